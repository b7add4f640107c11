// OpenAI's SDK: responses.

import assert from 'node:assert/strict';
import { beforeEach, suite, test } from 'node:test';

import { Stand, USUAL_COST_NANO, all } from './stand.mjs';

const USAGE = {
  input_tokens: 10, input_tokens_details: { cached_tokens: 0 },
  output_tokens: 5, output_tokens_details: { reasoning_tokens: 0 }, total_tokens: 15,
};
const PIECES = ['Hello', ', ', 'world', '!'];
const part = (text) => ({ type: 'output_text', text, annotations: [] });
const said = (text) => ({ type: 'message', id: 'msg_1', role: 'assistant', status: 'completed', content: [part(text)] });

const response = (output, status = 'completed', usage = USAGE) => ({
  id: 'resp_1', object: 'response', created_at: 1, status, error: null, incomplete_details: null, instructions: null,
  model: 'native', output, parallel_tool_calls: true, tool_choice: 'auto', tools: [], temperature: 1, top_p: 1, metadata: {}, usage,
});

function events() {
  const at = { item_id: 'msg_1', output_index: 0, content_index: 0 };
  const told = [
    ['created', { response: response([], 'in_progress', null) }],
    ['output_item.added', { output_index: 0, item: { ...said(''), status: 'in_progress', content: [] } }],
    ['content_part.added', { ...at, part: part('') }],
    ...PIECES.map((delta) => ['output_text.delta', { ...at, delta, logprobs: [] }]),
    ['output_text.done', { ...at, text: PIECES.join(''), logprobs: [] }],
    ['output_item.done', { output_index: 0, item: said(PIECES.join('')) }],
    ['completed', { response: response([said(PIECES.join(''))]) }],
  ];
  const numbered = told.map(([name, fields], sequence_number) => ({ type: `response.${name}`, sequence_number, ...fields }));
  return numbered.map((one) => `event: ${one.type}\ndata: ${JSON.stringify(one)}\n\n`);
}

const WORDS = { answers: { '/v1/responses': { whole: JSON.stringify(response([said('Hello, world!')])), events: events() } } };

suite('responses', () => {
  let stand;
  beforeEach(async () => { stand = await Stand.make('openai'); });
  const ask = (more = {}) => ({ model: stand.solo, input: 'Say hello.', max_output_tokens: 100, ...more });

  test('a whole response is typed and charged', async () => {
    await stand.upstream.play(WORDS);
    const answer = await stand.client().responses.create(ask());
    assert.deepEqual([answer.output_text, answer.usage.output_tokens], ['Hello, world!', 5]);
    await stand.paid(USUAL_COST_NANO);
  });

  test('a stream comes in pieces and ends with the response', async () => {
    await stand.upstream.play(WORDS);
    const told = await all(await stand.client().responses.create(ask({ stream: true })));
    assert.deepEqual(told.filter((one) => one.type === 'response.output_text.delta').map((one) => one.delta), PIECES);
    assert.deepEqual([told.at(-1).type, told.at(-1).response.status], ['response.completed', 'completed']);
    await stand.paid(USUAL_COST_NANO);
  });

  test('a failing upstream is not seen', async () => {
    await stand.upstream.play({ fault: { kind: 'reset_after_head' }, ...WORDS });
    await stand.standby.play(WORDS);
    const told = await all(await stand.client().responses.create(ask({ model: stand.pair, stream: true })));
    assert.equal(told.at(-1).type, 'response.completed');
    assert.equal(await stand.standby.calls(), 1);
  });
});
