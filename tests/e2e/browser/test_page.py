"""A page in a real browser that reads streams with `fetch`, without any SDK."""

import json

from chromium import browse
from case import USUAL_COST_NANO, WORLD, Case

ASK = [{"role": "user", "content": "Say hello. Grüße, 世界!"}]


class Page(Case):
    def call(self, model, **more):
        return {
            "path": "/v1/chat/completions",
            "headers": {"authorization": f"Bearer {more.pop('key', self.key)}"},
            "body": {"model": model, "messages": ASK, "stream": True} | more.pop("body", {}),
        } | more

    def browse(self, *calls):
        return browse(WORLD["gateway"], calls)


class Chat(Page):
    def test_a_stream_is_read_event_by_event_and_charged(self):
        self.upstream.play(text=["Grüße", ", ", "世界", "!"], bytes_per_write=7)
        [found] = self.browse(self.call(self.solo, body={"stream_options": {"include_usage": True}}))
        self.assertEqual((found["status"], found["failure"]), (200, None))
        self.assertTrue(found["headers"]["content-type"].startswith("text/event-stream"))
        self.assertEqual(found["events"][-1]["data"], "[DONE]")
        chunks = [json.loads(event["data"]) for event in found["events"][:-1]]
        said = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        self.assertEqual(said, "Grüße, 世界!")
        self.assertEqual(chunks[-1]["usage"]["completion_tokens"], 5)
        self.assertEqual({chunk["model"] for chunk in chunks}, {self.solo})
        self.assert_paid(USUAL_COST_NANO)

    def test_a_page_sees_what_has_come_while_the_rest_has_not_and_its_leaving_stops_the_upstream(self):
        self.upstream.play(text=["One", "Two", "Three"], fault={"kind": "hang_after_pieces", "pieces": 2})
        [found] = self.browse(self.call(self.solo, leaves_after="Two"))
        self.assertEqual((found["status"], found["left"], found["failure"]), (200, True, "AbortError"))
        self.assertIn("One", found["body"])
        self.eventually(self.upstream.left, 1, "the upstream is left too")
        self.assertGreater(self.settled(), 0, "what was produced is charged")

    def test_a_stream_that_breaks_ends_with_an_error_that_the_page_can_read(self):
        self.upstream.play(fault={"kind": "reset_after_pieces", "pieces": 2})
        [found] = self.browse(self.call(self.solo))
        self.assertEqual((found["status"], found["failure"]), (200, None), "for the browser the body is whole")
        self.assertEqual(json.loads(found["events"][-1]["data"])["error"]["code"], "upstream_failed")

    def test_the_next_candidate_serves_and_the_page_notices_nothing(self):
        self.upstream.play(fault={"kind": "error_event", "pieces": 0})
        [found] = self.browse(self.call(self.pair))
        self.assertEqual((found["status"], found["failure"]), (200, None))
        self.assertEqual(found["events"][-1]["data"], "[DONE]")
        self.assertTrue(found["headers"]["x-tollgate-upstream"].startswith("second-"))

    def test_errors_are_json_that_a_page_can_show(self):
        bad_key, bad_body = self.browse(self.call(self.solo, key="sk-unknown"), self.call(self.solo, body={"n": -1}))
        self.assertEqual((bad_key["status"], json.loads(bad_key["body"])["error"]["code"]), (401, "invalid_api_key"))
        self.assertEqual((bad_body["status"], json.loads(bad_body["body"])["error"]["param"]), (400, "n"))
        for found in bad_key, bad_body:
            self.assertNotIn("access-control-allow-origin", found["headers"])


class Messages(Page):
    dialect = "anthropic"

    def test_a_message_is_read_event_by_event(self):
        [found] = self.browse({
            "path": "/v1/messages",
            "headers": {"x-api-key": self.key, "anthropic-version": "2023-06-01"},
            "body": {"model": self.solo, "max_tokens": 64, "messages": ASK, "stream": True},
        })
        self.assertEqual((found["status"], found["failure"]), (200, None))
        names = [event["name"] for event in found["events"]]
        self.assertEqual((names[0], names[-1]), ("message_start", "message_stop"))
        deltas = [json.loads(event["data"])["delta"] for event in found["events"] if event["name"] == "content_block_delta"]
        self.assertEqual("".join(delta["text"] for delta in deltas), "Hello, world!")
