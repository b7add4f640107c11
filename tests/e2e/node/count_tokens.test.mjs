// Anthropic's SDK: the count of a message's tokens, which is free.

import assert from 'node:assert/strict';
import { suite, test } from 'node:test';

import { Stand } from './stand.mjs';

suite('count_tokens', () => {
  test('a count comes and costs nothing', async () => {
    const stand = await Stand.make('anthropic');
    await stand.upstream.play({ answers: { '/v1/messages/count_tokens': { whole: '{"input_tokens":42}' } } });
    const count = await stand.client().messages.countTokens({ model: stand.solo, messages: [{ role: 'user', content: 'Say hello.' }] });
    assert.ok(count.input_tokens > 0);
    await stand.paid(0);
  });
});
