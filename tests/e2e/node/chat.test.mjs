// OpenAI's SDK: what it asks for and gets.

import assert from 'node:assert/strict';
import { beforeEach, suite, test } from 'node:test';

import { Stand, USUAL_COST_NANO, all, eventually } from './stand.mjs';

const ASK = [{ role: 'user', content: 'Say hello.' }];
const PIXEL = 'data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII=';
const WEATHER = {
  type: 'function',
  function: {
    name: 'weather',
    description: 'The weather in a city.',
    parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
  },
};
const CALL = { id: 'call_1', type: 'function', function: { name: 'weather', arguments: '{"city": "Kraków"}' } };
const USAGE = { prompt_tokens: 10, completion_tokens: 5, total_tokens: 15 };

const whole = (message, finish_reason = 'stop') => JSON.stringify({
  id: 'chatcmpl-1', object: 'chat.completion', created: 1, model: 'native', usage: USAGE,
  choices: [{ index: 0, message: { role: 'assistant', content: null, ...message }, finish_reason }],
});

/** A stream of these deltas, with its usage. */
function events(deltas, finish) {
  const head = { id: 'chatcmpl-1', object: 'chat.completion.chunk', created: 1, model: 'native' };
  const choices = [...deltas.map((delta) => ({ index: 0, delta, finish_reason: null })), { index: 0, delta: {}, finish_reason: finish }];
  const chunks = [...choices.map((choice) => ({ ...head, choices: [choice] })), { ...head, choices: [], usage: USAGE }];
  return [...chunks.map((chunk) => JSON.stringify(chunk)), '[DONE]'].map((one) => `data: ${one}\n\n`);
}

const words = (whole, events = []) => ({ answers: { '/v1/chat/completions': { whole, events } } });
const textOf = (chunks) => chunks.map((chunk) => chunk.choices[0].delta.content ?? '').join('');

suite('chat', () => {
  let stand;
  beforeEach(async () => { stand = await Stand.make('openai'); });

  test('a whole answer is typed, named and charged', async () => {
    const { data, response, request_id } = await stand.client().chat.completions.create({ model: stand.solo, messages: ASK }).withResponse();
    assert.equal(data.choices[0].message.content, 'Hello, world!');
    assert.deepEqual([data.usage.prompt_tokens, data.usage.completion_tokens], [10, 5]);
    assert.ok(request_id);
    assert.equal(data._request_id, request_id);
    assert.equal(response.headers.get('x-tollgate-cost-nano'), String(USUAL_COST_NANO));
    await stand.paid(USUAL_COST_NANO);
  });

  test('a stream comes in pieces and without the usage that was not asked for', async () => {
    const chunks = await all(await stand.client().chat.completions.create({ model: stand.solo, messages: ASK, stream: true }));
    assert.deepEqual(chunks.map((chunk) => chunk.choices[0].delta.content).filter(Boolean), ['Hello', ', ', 'world', '!']);
    assert.ok(chunks.every((chunk) => chunk.usage == null));
    await stand.paid(USUAL_COST_NANO);
  });

  test('a stream with usage ends with it', async () => {
    const ask = { model: stand.solo, messages: ASK, stream: true, stream_options: { include_usage: true } };
    const last = (await all(await stand.client().chat.completions.create(ask))).at(-1);
    assert.deepEqual([last.choices, last.usage.prompt_tokens, last.usage.completion_tokens], [[], 10, 5]);
    await stand.paid(USUAL_COST_NANO);
  });

  test('a stream cut into single bytes is the same', async () => {
    await stand.upstream.play({ text: ['Zażółć', ' gęślą', ' jaźń 🦊'], bytes_per_write: 1 });
    const chunks = await all(await stand.client().chat.completions.create({ model: stand.solo, messages: ASK, stream: true }));
    assert.equal(textOf(chunks), 'Zażółć gęślą jaźń 🦊');
  });

  test('a tool call and its result go there and back', async () => {
    const client = stand.client();
    await stand.upstream.play(words(whole({ tool_calls: [CALL] }, 'tool_calls')));
    const asked = await client.chat.completions.create({ model: stand.solo, messages: ASK, tools: [WEATHER], tool_choice: 'auto' });
    const [call] = asked.choices[0].message.tool_calls;
    assert.deepEqual([asked.choices[0].finish_reason, call], ['tool_calls', CALL]);
    await stand.upstream.play({});
    const result = { role: 'tool', tool_call_id: call.id, content: 'rain' };
    await client.chat.completions.create({ model: stand.solo, messages: [...ASK, asked.choices[0].message, result], tools: [WEATHER] });
    const [first, second] = await stand.upstream.asked();
    assert.deepEqual([first.tools, first.tool_choice], [[WEATHER], 'auto']);
    assert.deepEqual([second.messages[1].tool_calls, second.messages[2]], [[CALL], result]);
  });

  test('a streamed tool call is put together', async () => {
    const opening = { index: 0, id: 'call_1', type: 'function', function: { name: 'weather', arguments: '' } };
    const parts = ['{"city": ', '"Krak', 'ów"}'].map((part) => ({ tool_calls: [{ index: 0, function: { arguments: part } }] }));
    await stand.upstream.play(words('', events([{ role: 'assistant', content: null, tool_calls: [opening] }, ...parts], 'tool_calls')));
    const stream = stand.client().chat.completions.stream({ model: stand.solo, messages: ASK, tools: [WEATHER] });
    const [choice] = (await stream.finalChatCompletion()).choices;
    assert.equal(choice.finish_reason, 'tool_calls');
    assert.deepEqual(JSON.parse(choice.message.tool_calls[0].function.arguments), { city: 'Kraków' });
    await stand.paid(USUAL_COST_NANO);
  });

  test('a JSON schema goes through untouched and its answer is parsed', async () => {
    const schema = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'], additionalProperties: false };
    const response_format = { type: 'json_schema', json_schema: { name: 'place', strict: true, schema } };
    await stand.upstream.play(words(whole({ content: '{"city": "Kraków"}' })));
    const completion = await stand.client().chat.completions.parse({ model: stand.solo, messages: ASK, response_format });
    assert.deepEqual(JSON.parse(completion.choices[0].message.content), { city: 'Kraków' });
    assert.deepEqual((await stand.upstream.asked())[0].response_format, response_format);
  });

  test('an image goes through untouched', async () => {
    const image = { type: 'image_url', image_url: { url: PIXEL, detail: 'low' } };
    const messages = [{ role: 'user', content: [{ type: 'text', text: 'What is this?' }, image] }];
    await stand.client().chat.completions.create({ model: stand.solo, messages });
    assert.deepEqual((await stand.upstream.asked())[0].messages, messages);
  });

  test('models are listed and found', async () => {
    const client = stand.client({ apiKey: 'sk-caller-walled' });
    assert.deepEqual((await all(client.models.list())).map((model) => model.id), ['solo-openai-000']);
    assert.equal((await client.models.retrieve('solo-openai-000')).object, 'model');
    assert.equal((await stand.client().models.retrieve(stand.slashed)).id, stand.slashed);
    assert.ok((await all(stand.client().models.list())).some((model) => model.id === stand.pair));
  });

  for (const fault of [
    { kind: 'status', code: 503 },
    { kind: 'close_before_head' },
    { kind: 'reset_after_head' },
    { kind: 'error_event', pieces: 0 },
    { kind: 'html' },
  ]) {
    test(`an upstream's ${fault.kind} is not seen by a stream`, async () => {
      await stand.upstream.play({ fault });
      const ask = { model: stand.pair, messages: ASK, stream: true };
      const { data, response } = await stand.client().chat.completions.create(ask).withResponse();
      assert.equal(textOf(await all(data)), 'Hello, world!');
      assert.equal(response.headers.get('x-tollgate-attempts'), '2');
      assert.equal(await stand.standby.calls(), 1);
      await stand.paid(USUAL_COST_NANO);
    });
  }

  test('twenty calls at once each get their answer', async () => {
    const client = stand.client();
    const ask = async (number) => {
      const body = { model: stand.solo, messages: ASK };
      if (number % 2) return (await client.chat.completions.create(body)).choices[0].message.content;
      return textOf(await all(await client.chat.completions.create({ ...body, stream: true })));
    };
    const answers = await Promise.all(Array.from({ length: 20 }, (_, number) => ask(number)));
    assert.deepEqual(answers, Array(20).fill('Hello, world!'));
    await stand.paid(20 * USUAL_COST_NANO);
  });

  test('what an aborted signal leaves is stopped upstream', async () => {
    await stand.upstream.play({ fault: { kind: 'hang_after_pieces', pieces: 2 } });
    const leaving = new AbortController();
    const ask = { model: stand.solo, messages: ASK, stream: true };
    const stream = await stand.client().chat.completions.create(ask, { signal: leaving.signal });
    let text = '';
    // The SDK ends the loop quietly when its reader aborts.
    for await (const chunk of stream) {
      text += chunk.choices[0].delta.content ?? '';
      if (text === 'Hello, ') leaving.abort();
    }
    assert.equal(text, 'Hello, ');
    await eventually(() => stand.upstream.left(), 1, 'the upstream was stopped');
    assert.ok(await stand.settled() > 0, 'what was produced is paid');
  });
});
