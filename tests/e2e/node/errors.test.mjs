// Both SDKs: which exception each error is, what a caller can read from it, and who asks again.

import assert from 'node:assert/strict';
import { randomUUID } from 'node:crypto';
import { beforeEach, suite, test } from 'node:test';

import Anthropic from '@anthropic-ai/sdk';
import OpenAI from 'openai';

import { Stand, USUAL_COST_NANO, WORLD, all, eventually, metric } from './stand.mjs';

const TURNS = [{ role: 'user', content: 'Say hello.' }];

const DIALECTS = {
  openai: {
    sdk: OpenAI,
    surface: 'chat',
    paymentRequired: OpenAI.APIError,
    tooLarge: OpenAI.APIError,
    unavailable: OpenAI.InternalServerError,
    timedOut: OpenAI.InternalServerError,
    ask: (client, body, options) => client.chat.completions.create(body, options),
    textOf: (answer) => answer.choices[0].message.content,
    pieceOf: (event) => event.choices[0].delta.content ?? '',
    codeOf: (error) => error.code,
  },
  anthropic: {
    sdk: Anthropic,
    surface: 'messages',
    paymentRequired: Anthropic.PaymentRequiredError,
    tooLarge: Anthropic.ContentTooLargeError,
    unavailable: Anthropic.ServiceUnavailableError,
    timedOut: Anthropic.GatewayTimeoutError,
    ask: (client, body, options) => client.messages.create(body, options),
    textOf: (answer) => answer.content[0].text,
    pieceOf: (event) => (event.type === 'content_block_delta' ? event.delta.text : ''),
    codeOf: (error) => error.error.error.code,
  },
};

for (const [dialect, { sdk, surface, ask: askRaw, textOf, pieceOf, codeOf, ...kinds }] of Object.entries(DIALECTS)) {
  suite(`errors of ${dialect}`, () => {
    let stand;
    beforeEach(async () => { stand = await Stand.make(dialect); });

    const ask = (client, more = {}, options = {}) => askRaw(client, { model: stand.solo, messages: TURNS, max_tokens: 100, ...more }, options);
    const gatewayCalls = (status) => metric('tollgate_requests_total', { surface, status: String(status) });

    /** The call fails as said, and only so many requests went upstream. */
    async function failing(expected, status, code, call, upstreamCalls = 0) {
      const error = await call().then(() => assert.fail('it did not fail'), (thrown) => thrown);
      assert.equal(error.constructor, expected, String(error));
      assert.deepEqual([error.status, codeOf(error)], [status, code]);
      assert.ok(error.requestID);
      assert.equal(error.requestID, error.headers.get('x-request-id'));
      if (upstreamCalls !== null) assert.equal(await stand.upstream.calls(), upstreamCalls);
      return error;
    }

    test('401 is an AuthenticationError', async () => {
      const client = stand.client({ apiKey: 'sk-nobody-knows-this', maxRetries: 2 });
      await failing(sdk.AuthenticationError, 401, 'invalid_api_key', () => ask(client));
    });

    test('402 says that the balance is too small', async () => {
      const client = stand.client({ apiKey: 'sk-caller-poor', maxRetries: 2 });
      const error = await failing(kinds.paymentRequired, 402, 'insufficient_balance', () => ask(client));
      assert.match(error.message, /\$0\.000001/);
    });

    test('403 is a PermissionDeniedError', async () => {
      const client = stand.client({ apiKey: 'sk-caller-walled', maxRetries: 2 });
      await failing(sdk.PermissionDeniedError, 403, 'model_not_allowed', () => ask(client));
    });

    test('404 is a NotFoundError', async () => {
      const client = stand.client({ maxRetries: 2 });
      await failing(sdk.NotFoundError, 404, 'model_not_found', () => ask(client, { model: 'nobody' }));
      await failing(sdk.NotFoundError, 404, 'model_not_found', () => client.models.retrieve('nobody'));
    });

    test('400 is a BadRequestError of ours', async () => {
      await failing(sdk.BadRequestError, 400, 'invalid_value', () => ask(stand.client({ maxRetries: 2 }), { max_tokens: -1 }));
    });

    test('400 of the upstream comes with its words and at once', async () => {
      await stand.upstream.play({ fault: { kind: 'status', code: 400 } });
      const error = await ask(stand.client({ maxRetries: 2 }), { model: stand.pair }).catch((thrown) => thrown);
      assert.equal(error.constructor, sdk.BadRequestError);
      assert.match(error.message, /the script says so/);
      assert.deepEqual([await stand.upstream.calls(), await stand.standby.calls()], [1, 0]);
      await stand.paid(0);
    });

    test('409 is a conflict that is not asked again', async () => {
      const client = stand.client({ maxRetries: 2 });
      const keyed = { headers: { 'Idempotency-Key': randomUUID() } };
      await all(await ask(client, { stream: true }, keyed));
      const before = await gatewayCalls(409);
      await failing(sdk.ConflictError, 409, 'idempotency_conflict', () => ask(client, { stream: true }, keyed), 1);
      assert.equal(await gatewayCalls(409) - before, 1);
      await stand.paid(USUAL_COST_NANO);
    });

    test('413 is read although the body was still under way', async () => {
      const messages = [{ role: 'user', content: 'a'.repeat(WORLD.body_bytes_max * 2) }];
      const client = stand.client();
      await failing(kinds.tooLarge, 413, 'body_too_large', () => ask(client, { messages }));
      assert.equal(textOf(await ask(client)), 'Hello, world!', 'the client goes on');
    });

    test('422 is an UnprocessableEntityError', async () => {
      const client = stand.client({ maxRetries: 2 });
      const keyed = { headers: { 'Idempotency-Key': randomUUID() } };
      await ask(client, {}, keyed);
      const messages = [{ role: 'user', content: 'Say goodbye.' }];
      await failing(sdk.UnprocessableEntityError, 422, 'idempotency_mismatch', () => ask(client, { messages }, keyed), 1);
    });

    test("429 of the caller's own limit says when to come back", async () => {
      const client = stand.client({ apiKey: `sk-caller-slow-${dialect}` });
      await ask(client);
      const error = await failing(sdk.RateLimitError, 429, 'rate_limit_exceeded', () => ask(client), 1);
      const wait = Number(error.headers.get('retry-after'));
      assert.ok(wait >= 1 && wait <= 61, `${wait}`);
    });

    test('429 of the upstream is asked again no sooner than it says', async () => {
      await stand.upstream.play({ fault: { kind: 'status', code: 429, retry_after: '1' }, fault_count: 1 });
      const [before, began] = [await gatewayCalls(429), performance.now()];
      assert.equal(textOf(await ask(stand.client({ maxRetries: 2 }))), 'Hello, world!');
      // Timers of Node may be a millisecond early.
      assert.ok(performance.now() - began >= 990);
      assert.deepEqual([await stand.upstream.calls(), await gatewayCalls(429) - before], [2, 1]);
      await stand.paid(USUAL_COST_NANO);
    });

    test('502 is asked again as often as the SDK is told', async () => {
      await stand.upstream.play({ fault: { kind: 'garbage' } });
      const before = await gatewayCalls(502);
      await failing(sdk.InternalServerError, 502, 'upstream_failed', () => ask(stand.client({ maxRetries: 1 })), null);
      assert.equal(await gatewayCalls(502) - before, 2);
      await stand.paid(0);
    });

    test('our own credential refused is not asked again, and then nobody is there', async () => {
      await stand.upstream.play({ fault: { kind: 'status', code: 401 } });
      const before = await gatewayCalls(502);
      const refused = await failing(sdk.InternalServerError, 502, 'upstream_credential', () => ask(stand.client({ maxRetries: 2 })), 1);
      assert.deepEqual([refused.headers.get('x-should-retry'), await gatewayCalls(502) - before], ['false', 1]);
      const error = await failing(kinds.unavailable, 503, 'no_upstream', () => ask(stand.client()), 1);
      assert.ok(Number(error.headers.get('retry-after')) > 0);
      await stand.paid(0);
    });

    test('504 is said when the deadline is over', async () => {
      await stand.upstream.play({ fault: { kind: 'hang_before_head' } });
      const client = stand.client({ base: WORLD.impatient });
      await failing(kinds.timedOut, 504, 'upstream_timeout', () => ask(client), null);
    });

    test("the SDK's own timeout ends the call upstream too", async () => {
      await stand.upstream.play({ fault: { kind: 'hang_before_head' } });
      await assert.rejects(ask(stand.client({ timeout: 500 })), (error) => error.constructor === sdk.APIConnectionTimeoutError);
      await eventually(() => stand.upstream.left(), 1, 'the upstream was stopped');
      await stand.paid(0);
    });

    test('a stream that its reader breaks off stops the upstream', async () => {
      await stand.upstream.play({ fault: { kind: 'hang_after_pieces', pieces: 3 } });
      let text = '';
      for await (const event of await ask(stand.client(), { stream: true })) {
        text += pieceOf(event);
        if (text === 'Hello, world') {
          assert.equal(await metric('tollgate_holds_open'), 1);
          break;
        }
      }
      await eventually(() => stand.upstream.left(), 1, 'the upstream was stopped');
      const paid = await stand.settled();
      assert.ok(paid > 0 && paid < 100 * USUAL_COST_NANO, `prompt and three pieces are paid: ${paid}`);
      await eventually(() => metric('tollgate_in_flight'), 0, 'nothing is in flight');
    });

    for (const fault of [
      { kind: 'error_event', pieces: 2 },
      { kind: 'reset_after_pieces', pieces: 2 },
      { kind: 'cut_after_pieces', pieces: 2 },
      { kind: 'end_after_pieces', pieces: 2 },
    ]) {
      test(`a stream that breaks by ${fault.kind} is an error and no silent end`, async () => {
        await stand.upstream.play({ fault });
        const stream = await ask(stand.client({ maxRetries: 2 }), { model: stand.pair, stream: true });
        let text = '';
        const error = await (async () => {
          for await (const event of stream) text += pieceOf(event);
        })().then(() => assert.fail('it ended silently'), (thrown) => thrown);
        assert.equal(error.constructor, sdk.APIError, String(error));
        assert.deepEqual([text, codeOf(error)], ['Hello, ', 'upstream_failed']);
        assert.deepEqual([await stand.upstream.calls(), await stand.standby.calls()], [1, 0]);
        assert.ok(await stand.settled() > 0, 'what was produced is paid');
      });
    }
  });
}
