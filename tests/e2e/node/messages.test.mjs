// Anthropic's SDK: what it asks for and gets.

import assert from 'node:assert/strict';
import { beforeEach, suite, test } from 'node:test';

import { Stand, USUAL_COST_NANO, all } from './stand.mjs';

const ASK = { max_tokens: 100, messages: [{ role: 'user', content: 'Say hello.' }] };
const PIXEL = 'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII=';
const WEATHER = {
  name: 'weather',
  description: 'The weather in a city.',
  input_schema: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
};
const USE = { type: 'tool_use', id: 'toolu_1', name: 'weather', input: { city: 'Kraków' } };

const message = (content, stop_reason) => ({
  id: 'msg_1', type: 'message', role: 'assistant', model: 'native', content, stop_reason, stop_sequence: null,
  usage: { input_tokens: 10, output_tokens: 5 },
});

/** A stream of one block, with its usage. */
function events(block, deltas, stop_reason) {
  const said = [
    { type: 'message_start', message: { ...message([], null), usage: { input_tokens: 10, output_tokens: 1 } } },
    { type: 'content_block_start', index: 0, content_block: block },
    { type: 'ping' },
    ...deltas.map((delta) => ({ type: 'content_block_delta', index: 0, delta })),
    { type: 'content_block_stop', index: 0 },
    { type: 'message_delta', delta: { stop_reason, stop_sequence: null }, usage: { output_tokens: 5 } },
    { type: 'message_stop' },
  ];
  return said.map((one) => `event: ${one.type}\ndata: ${JSON.stringify(one)}\n\n`);
}

const words = (whole, events = []) => ({ answers: { '/v1/messages': { whole: JSON.stringify(whole), events } } });

suite('messages', () => {
  let stand;
  beforeEach(async () => { stand = await Stand.make('anthropic'); });

  test('a whole message is typed, named and charged', async () => {
    const { data, response } = await stand.client().messages.create({ model: stand.solo, ...ASK }).withResponse();
    assert.deepEqual([data.content[0].text, data.stop_reason], ['Hello, world!', 'end_turn']);
    assert.deepEqual([data.usage.input_tokens, data.usage.output_tokens], [10, 5]);
    assert.ok(data._request_id);
    assert.equal(data._request_id, response.headers.get('x-request-id'));
    assert.equal(response.headers.get('x-tollgate-cost-nano'), String(USUAL_COST_NANO));
    await stand.paid(USUAL_COST_NANO);
  });

  test('a key is taken as a bearer too', async () => {
    const client = stand.client({ apiKey: null, authToken: stand.key });
    assert.equal((await client.messages.create({ model: stand.solo, ...ASK })).content[0].text, 'Hello, world!');
  });

  test('a raw stream has every event', async () => {
    const events = await all(await stand.client().messages.create({ model: stand.solo, stream: true, ...ASK }));
    const kinds = events.map((event) => event.type);
    assert.deepEqual(kinds.slice(0, 2), ['message_start', 'content_block_start']);
    assert.deepEqual(kinds.slice(-3), ['content_block_stop', 'message_delta', 'message_stop']);
    const pieces = events.filter((event) => event.type === 'content_block_delta').map((event) => event.delta.text);
    assert.deepEqual(pieces, ['Hello', ', ', 'world', '!']);
    await stand.paid(USUAL_COST_NANO);
  });

  test('the stream helper puts text and usage together', async () => {
    const final = await stand.client().messages.stream({ model: stand.solo, ...ASK }).finalMessage();
    assert.equal(final.content[0].text, 'Hello, world!');
    assert.deepEqual([final.usage.input_tokens, final.usage.output_tokens], [10, 5]);
  });

  test('a stream cut into single bytes is the same', async () => {
    await stand.upstream.play({ text: ['Zażółć', ' gęślą', ' jaźń 🦊'], bytes_per_write: 1 });
    const stream = stand.client().messages.stream({ model: stand.solo, ...ASK });
    assert.equal(await stream.finalText(), 'Zażółć gęślą jaźń 🦊');
  });

  test('a tool use and its result go there and back', async () => {
    const client = stand.client();
    await stand.upstream.play(words(message([USE], 'tool_use')));
    const asked = await client.messages.create({ model: stand.solo, tools: [WEATHER], tool_choice: { type: 'auto' }, ...ASK });
    assert.deepEqual([asked.stop_reason, asked.content], ['tool_use', [USE]]);
    await stand.upstream.play({});
    const result = { role: 'user', content: [{ type: 'tool_result', tool_use_id: 'toolu_1', content: 'rain' }] };
    const messages = [...ASK.messages, { role: 'assistant', content: asked.content }, result];
    await client.messages.create({ model: stand.solo, max_tokens: 100, messages, tools: [WEATHER] });
    const [first, second] = await stand.upstream.asked();
    assert.deepEqual([first.tools, first.tool_choice], [[WEATHER], { type: 'auto' }]);
    assert.deepEqual(second.messages, messages);
  });

  test('a streamed tool use is put together', async () => {
    const deltas = ['', '{"city": ', '"Krak', 'ów"}'].map((partial_json) => ({ type: 'input_json_delta', partial_json }));
    await stand.upstream.play(words(null, events({ ...USE, input: {} }, deltas, 'tool_use')));
    const final = await stand.client().messages.stream({ model: stand.solo, tools: [WEATHER], ...ASK }).finalMessage();
    assert.deepEqual([final.stop_reason, final.content[0].input], ['tool_use', { city: 'Kraków' }]);
    await stand.paid(USUAL_COST_NANO);
  });

  test('a JSON schema goes through untouched', async () => {
    const schema = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'], additionalProperties: false };
    const output_config = { format: { type: 'json_schema', schema } };
    await stand.upstream.play(words(message([{ type: 'text', text: '{"city": "Kraków"}' }], 'end_turn')));
    const answer = await stand.client().messages.create({ model: stand.solo, output_config, ...ASK });
    assert.deepEqual(JSON.parse(answer.content[0].text), { city: 'Kraków' });
    assert.deepEqual((await stand.upstream.asked())[0].output_config, output_config);
  });

  test('an image goes through untouched', async () => {
    const image = { type: 'image', source: { type: 'base64', media_type: 'image/png', data: PIXEL } };
    const messages = [{ role: 'user', content: [image, { type: 'text', text: 'What is this?' }] }];
    await stand.client().messages.create({ model: stand.solo, max_tokens: 100, messages });
    assert.deepEqual((await stand.upstream.asked())[0].messages, messages);
  });

  test('models are listed and found', async () => {
    const client = stand.client({ apiKey: 'sk-caller-walled' });
    assert.deepEqual((await all(client.models.list())).map((model) => model.id), ['solo-anthropic-000']);
    const found = await client.models.retrieve('solo-anthropic-000');
    assert.deepEqual([found.type, found.display_name], ['model', 'solo-anthropic-000']);
    assert.equal((await stand.client().models.retrieve(stand.slashed)).id, stand.slashed);
    assert.ok((await all(stand.client().models.list())).some((model) => model.id === stand.pair));
  });

  const overloaded = JSON.stringify({ type: 'error', error: { type: 'overloaded_error', message: 'busy' } });
  for (const fault of [
    { kind: 'status', code: 529 },
    { kind: 'close_before_head' },
    { kind: 'reset_after_head' },
    { kind: 'error_event', pieces: 0, body: overloaded },
    { kind: 'html' },
  ]) {
    test(`an upstream's ${fault.kind} is not seen by a stream`, async () => {
      await stand.upstream.play({ fault });
      const stream = stand.client().messages.stream({ model: stand.pair, ...ASK });
      const { response } = await stream.withResponse();
      assert.equal(await stream.finalText(), 'Hello, world!');
      assert.equal(response.headers.get('x-tollgate-attempts'), '2');
      assert.equal(await stand.standby.calls(), 1);
      await stand.paid(USUAL_COST_NANO);
    });
  }

  test('twenty calls at once each get their answer', async () => {
    const client = stand.client();
    const ask = async (number) => {
      if (number % 2) return (await client.messages.create({ model: stand.solo, ...ASK })).content[0].text;
      return client.messages.stream({ model: stand.solo, ...ASK }).finalText();
    };
    const answers = await Promise.all(Array.from({ length: 20 }, (_, number) => ask(number)));
    assert.deepEqual(answers, Array(20).fill('Hello, world!'));
    await stand.paid(20 * USUAL_COST_NANO);
  });
});
