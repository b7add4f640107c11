// TLS with a certificate that is really verified: HTTP/1.1 as Node's own fetch speaks it, HTTP/2 by undici's.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { after, beforeEach, suite, test } from 'node:test';

import { Agent, fetch as undiciFetch } from 'undici';

import { Stand, USUAL_COST_NANO, WORLD, all, eventually } from './stand.mjs';

const TURNS = [{ role: 'user', content: 'Say hello.' }];

const DIALECTS = {
  openai: {
    ask: (client, body, options) => client.chat.completions.create(body, options),
    textOf: (answer) => answer.choices[0].message.content,
    pieceOf: (event) => event.choices[0].delta.content ?? '',
  },
  anthropic: {
    ask: (client, body, options) => client.messages.create(body, options),
    textOf: (answer) => answer.content[0].text,
    pieceOf: (event) => (event.type === 'content_block_delta' ? event.delta.text : ''),
  },
};

for (const [dialect, { ask: askRaw, textOf, pieceOf }] of Object.entries(DIALECTS)) {
  suite(`TLS with ${dialect}`, () => {
    let stand;
    beforeEach(async () => { stand = await Stand.make(dialect); });
    // One connection for all of them: what shares it has to be HTTP/2.
    const dispatcher = new Agent({ allowH2: true, connections: 1, connect: { ca: readFileSync(WORLD.tls.ca) } });
    after(() => dispatcher.close());

    const ask = (client, more = {}) => askRaw(client, { model: stand.solo, messages: TURNS, max_tokens: 100, ...more });
    const http2 = () => stand.client({ base: WORLD.tls.url, fetch: undiciFetch, fetchOptions: { dispatcher } });

    test('HTTP/1.1 carries whole answers and streams', async () => {
      const client = stand.client({ base: WORLD.tls.url });
      assert.equal(textOf(await ask(client)), 'Hello, world!');
      assert.equal((await all(await ask(client, { stream: true }))).map(pieceOf).join(''), 'Hello, world!');
      await stand.paid(2 * USUAL_COST_NANO);
    });

    test('ten streams at once share one connection of HTTP/2', async () => {
      await stand.upstream.play({ delay_chunk_ms: 20 });
      const one = async () => (await all(await ask(http2(), { stream: true }))).map(pieceOf).join('');
      assert.deepEqual(await Promise.all(Array.from({ length: 10 }, one)), Array(10).fill('Hello, world!'));
      await stand.paid(10 * USUAL_COST_NANO);
    });

    test('a stream that its reader breaks off stops the upstream, and the connection serves on', async () => {
      await stand.upstream.play({ fault: { kind: 'hang_after_pieces', pieces: 3 } });
      let text = '';
      for await (const event of await ask(http2(), { stream: true })) {
        text += pieceOf(event);
        if (text === 'Hello, world') break;
      }
      await eventually(() => stand.upstream.left(), 1, 'the upstream was stopped');
      assert.ok(await stand.settled() > 0, 'what was produced is paid');
      await stand.upstream.play({});
      assert.equal(textOf(await ask(http2())), 'Hello, world!');
    });
  });
}
