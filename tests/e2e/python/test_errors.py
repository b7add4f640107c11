"""Both SDKs: which exception each error is, what a caller can read from it, and who asks again."""

import time
import uuid

import anthropic
import openai

from case import USUAL_COST_NANO, WORLD, Case, metric

TURNS = [{"role": "user", "content": "Say hello."}]


class Errors:
    """The tests; the classes below say in which SDK."""

    def failing(self, expected, status, code, ask, upstream_calls=0):
        """The call fails as said, and only so many requests went upstream."""
        with self.assertRaises(expected) as caught:
            ask()
        error = caught.exception
        self.assertIs(type(error), expected)
        self.assertEqual((error.status_code, self.code_of(error)), (status, code), error.body)
        self.assertEqual(error.request_id, error.response.headers["x-request-id"])
        if upstream_calls is not None:
            self.assertEqual(self.upstream.calls(), upstream_calls)
        return error

    def gateway_calls(self, status):
        return metric("tollgate_requests_total", surface=self.surface, status=str(status))

    def test_401_is_an_authentication_error(self):
        client = self.client(api_key="sk-nobody-knows-this", max_retries=2)
        self.failing(self.sdk().AuthenticationError, 401, "invalid_api_key", lambda: self.ask(client))

    def test_402_says_that_the_balance_is_too_small(self):
        client = self.client(api_key="sk-caller-poor", max_retries=2)
        error = self.failing(self.payment_required, 402, "insufficient_balance", lambda: self.ask(client))
        self.assertIn("$0.000001", error.message)

    def test_403_is_a_permission_denied_error(self):
        client = self.client(api_key="sk-caller-walled", max_retries=2)
        self.failing(self.sdk().PermissionDeniedError, 403, "model_not_allowed", lambda: self.ask(client))

    def test_404_is_a_not_found_error(self):
        client = self.client(max_retries=2)
        self.failing(self.sdk().NotFoundError, 404, "model_not_found", lambda: self.ask(client, model="nobody"))
        self.failing(self.sdk().NotFoundError, 404, "model_not_found", lambda: client.models.retrieve("nobody"))

    def test_400_is_a_bad_request_error_of_ours(self):
        client = self.client(max_retries=2)
        self.failing(self.sdk().BadRequestError, 400, "invalid_value", lambda: self.ask(client, max_tokens=-1))

    def test_400_of_the_upstream_comes_with_its_words_and_at_once(self):
        self.upstream.play(fault={"kind": "status", "code": 400})
        client = self.client(max_retries=2)
        with self.assertRaises(self.sdk().BadRequestError) as caught:
            self.ask(client, model=self.pair)
        self.assertIn("the script says so", caught.exception.message)
        self.assertEqual((self.upstream.calls(), self.standby.calls()), (1, 0))
        self.assert_paid(0)

    def test_409_is_a_conflict_that_is_not_asked_again(self):
        client = self.client(max_retries=2)
        keyed = {"extra_headers": {"Idempotency-Key": str(uuid.uuid4())}}
        list(self.ask(client, stream=True, **keyed))
        before = self.gateway_calls(409)
        self.failing(self.sdk().ConflictError, 409, "idempotency_conflict", lambda: self.ask(client, stream=True, **keyed), upstream_calls=1)
        self.assertEqual(self.gateway_calls(409) - before, 1)
        self.assert_paid(USUAL_COST_NANO)

    def test_413_is_read_although_the_body_was_still_under_way(self):
        long = [{"role": "user", "content": "a" * (WORLD["body_bytes_max"] * 2)}]
        client = self.client(max_retries=0)
        self.failing(self.too_large, 413, "body_too_large", lambda: self.ask(client, messages=long))
        self.assertEqual(self.text_of(self.ask(client)), "Hello, world!", "the client goes on")

    def test_422_is_an_unprocessable_entity_error(self):
        client = self.client(max_retries=2)
        keyed = {"extra_headers": {"Idempotency-Key": str(uuid.uuid4())}}
        self.ask(client, **keyed)
        other = [{"role": "user", "content": "Say goodbye."}]
        expected = self.sdk().UnprocessableEntityError
        self.failing(expected, 422, "idempotency_mismatch", lambda: self.ask(client, messages=other, **keyed), upstream_calls=1)

    def test_a_repeat_under_the_same_key_is_the_same_answer_and_paid_once(self):
        client = self.client()
        keyed = {"extra_headers": {"Idempotency-Key": str(uuid.uuid4())}}
        self.assertEqual(self.ask(client, **keyed).id, self.ask(client, **keyed).id)
        self.assertEqual(self.upstream.calls(), 1)
        self.assert_paid(USUAL_COST_NANO)

    def test_429_of_the_callers_own_limit_says_when_to_come_back(self):
        client = self.client(api_key=f"sk-caller-slow-{self.dialect}")
        self.ask(client)
        error = self.failing(self.sdk().RateLimitError, 429, "rate_limit_exceeded", lambda: self.ask(client), upstream_calls=1)
        self.assertIn(int(error.response.headers["retry-after"]), range(1, 62))

    def test_429_of_the_upstream_is_asked_again_no_sooner_than_it_says(self):
        self.upstream.play(fault={"kind": "status", "code": 429, "retry_after": "1"}, fault_count=1)
        before, began = self.gateway_calls(429), time.monotonic()
        self.assertEqual(self.text_of(self.ask(self.client(max_retries=2))), "Hello, world!")
        self.assertGreaterEqual(time.monotonic() - began, 1)
        self.assertEqual((self.upstream.calls(), self.gateway_calls(429) - before), (2, 1))
        self.assert_paid(USUAL_COST_NANO)

    def test_502_is_asked_again_as_often_as_the_sdk_is_told(self):
        self.upstream.play(fault={"kind": "garbage"})
        before = self.gateway_calls(502)
        client = self.client(max_retries=1)
        self.failing(self.sdk().InternalServerError, 502, "upstream_failed", lambda: self.ask(client), upstream_calls=None)
        self.assertEqual(self.gateway_calls(502) - before, 2)
        self.assert_paid(0)

    def test_our_own_credential_refused_is_not_asked_again_and_then_nobody_is_there(self):
        self.upstream.play(fault={"kind": "status", "code": 401})
        before = self.gateway_calls(502)
        client = self.client(max_retries=2)
        error = self.failing(self.sdk().InternalServerError, 502, "upstream_credential", lambda: self.ask(client), upstream_calls=1)
        self.assertEqual((error.response.headers["x-should-retry"], self.gateway_calls(502) - before), ("false", 1))
        resting = self.client()
        error = self.failing(self.unavailable, 503, "no_upstream", lambda: self.ask(resting), upstream_calls=1)
        self.assertGreater(int(error.response.headers["retry-after"]), 0)
        self.assert_paid(0)

    def test_504_is_said_when_the_deadline_is_over(self):
        self.upstream.play(fault={"kind": "hang_before_head"})
        client = self.client(base=WORLD["impatient"])
        self.failing(self.timed_out, 504, "upstream_timeout", lambda: self.ask(client), upstream_calls=None)

    def test_the_sdks_own_timeout_ends_the_call_upstream_too(self):
        self.upstream.play(fault={"kind": "hang_before_head"})
        with self.assertRaises(self.sdk().APITimeoutError):
            self.ask(self.client(timeout=0.5))
        self.eventually(self.upstream.left, 1, "the upstream was stopped")
        self.assert_paid(0)

    def test_the_sdks_timeout_in_a_stream_is_an_error_too(self):
        self.upstream.play(fault={"kind": "hang_after_pieces", "pieces": 2})
        # OpenAI's SDK wraps it; Anthropic's leaves the HTTP client's own.
        with self.assertRaises((self.sdk().APITimeoutError, TimeoutError, self.read_timeout)):
            list(self.ask(self.client(timeout=0.5), stream=True))
        self.eventually(self.upstream.left, 1, "the upstream was stopped")
        self.assertGreater(self.settled(), 0, "what was produced is paid")

    def test_a_stream_that_its_reader_closes_stops_the_upstream(self):
        self.upstream.play(fault={"kind": "hang_after_pieces", "pieces": 3})
        stream = self.ask(self.client(), stream=True)
        text = ""
        for event in stream:
            text += self.piece_of(event)
            if text == "Hello, world":
                break
        self.assertEqual(metric("tollgate_holds_open"), 1)
        stream.close()
        self.eventually(self.upstream.left, 1, "the upstream was stopped")
        paid = self.settled()
        self.assertTrue(0 < paid < 100 * USUAL_COST_NANO, f"prompt and three pieces are paid: {paid}")
        self.eventually(lambda: metric("tollgate_in_flight"), 0, "nothing is in flight")

    def test_a_stream_that_breaks_is_an_error_and_no_silent_end(self):
        for fault in (
            {"kind": "error_event", "pieces": 2},
            {"kind": "reset_after_pieces", "pieces": 2},
            {"kind": "cut_after_pieces", "pieces": 2},
            {"kind": "end_after_pieces", "pieces": 2},
        ):
            with self.subTest(fault["kind"]):
                self.setUp()
                self.upstream.play(fault=fault)
                text = ""
                with self.assertRaises(self.sdk().APIError) as caught:
                    for event in self.ask(self.client(max_retries=2), model=self.pair, stream=True):
                        text += self.piece_of(event)
                self.assertNotIsInstance(caught.exception, self.sdk().APIConnectionError)
                self.assertEqual((text, self.code_of(caught.exception)), ("Hello, ", "upstream_failed"))
                self.assertEqual((self.upstream.calls(), self.standby.calls()), (1, 0))
                self.assertGreater(self.settled(), 0, "what was produced is paid")


class OpenAi(Errors, Case):
    dialect, surface = "openai", "chat"
    payment_required = too_large = openai.APIStatusError
    unavailable = timed_out = openai.InternalServerError
    read_timeout = openai.APITimeoutError

    def ask(self, client, **more):
        return client.chat.completions.create(**{"model": self.solo, "messages": TURNS, "max_tokens": 100} | more)

    def text_of(self, answer):
        return answer.choices[0].message.content

    def piece_of(self, event):
        return event.choices[0].delta.content or ""

    def code_of(self, error):
        return error.code


class Anthropic(Errors, Case):
    dialect, surface = "anthropic", "messages"
    payment_required, too_large = anthropic.PaymentRequiredError, anthropic.ContentTooLargeError
    unavailable, timed_out = anthropic.ServiceUnavailableError, anthropic.GatewayTimeoutError
    read_timeout = __import__("httpx2").ReadTimeout

    def ask(self, client, **more):
        return client.messages.create(**{"model": self.solo, "messages": TURNS, "max_tokens": 100} | more)

    def text_of(self, answer):
        return answer.content[0].text

    def piece_of(self, event):
        return event.delta.text if event.type == "content_block_delta" else ""

    def code_of(self, error):
        return error.body["error"]["code"]
