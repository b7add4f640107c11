"""Anthropic's SDK: what it asks for and gets."""

import asyncio
import json

from case import USUAL_COST_NANO, Case

ASK = {"max_tokens": 100, "messages": [{"role": "user", "content": "Say hello."}]}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Kraków"}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}


def message(*content, stop="end_turn"):
    return {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "native", "content": list(content),
        "stop_reason": stop, "stop_sequence": None, "usage": {"input_tokens": 10, "output_tokens": 5},
    }


def events(block, deltas, stop):
    """A stream of one block, with its usage."""
    said = [
        {"type": "message_start", "message": message(stop=None) | {"usage": {"input_tokens": 10, "output_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "ping"},
        *[{"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas],
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]
    return [f"event: {one['type']}\ndata: {json.dumps(one, ensure_ascii=False)}\n\n" for one in said]


def words(whole=None, events=()):
    return {"answers": {"/v1/messages": {"whole": json.dumps(whole), "events": list(events)}}}


class Answers(Case):
    dialect = "anthropic"

    def test_a_whole_message_is_typed_named_and_charged(self):
        answer = self.client().messages.with_raw_response.create(model=self.solo, **ASK)
        message = answer.parse()
        self.assertEqual((message.content[0].text, message.stop_reason), ("Hello, world!", "end_turn"))
        self.assertEqual((message.usage.input_tokens, message.usage.output_tokens), (10, 5))
        self.assertEqual(message._request_id, answer.headers["x-request-id"])
        self.assertEqual(answer.headers["x-tollgate-cost-nano"], str(USUAL_COST_NANO))
        self.assert_paid(USUAL_COST_NANO)

    def test_a_key_is_taken_as_a_bearer_too(self):
        client = self.client(api_key=None, auth_token=self.key)
        self.assertEqual(client.messages.create(model=self.solo, **ASK).content[0].text, "Hello, world!")

    def test_a_raw_stream_has_every_event(self):
        events = list(self.client().messages.create(model=self.solo, stream=True, **ASK))
        kinds = [event.type for event in events]
        self.assertEqual((kinds[:2], kinds[-3:]), (["message_start", "content_block_start"], ["content_block_stop", "message_delta", "message_stop"]))
        self.assertEqual([event.delta.text for event in events if event.type == "content_block_delta"], ["Hello", ", ", "world", "!"])
        self.assert_paid(USUAL_COST_NANO)

    def test_the_stream_helper_puts_text_and_usage_together(self):
        with self.client().messages.stream(model=self.solo, **ASK) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        self.assertEqual((pieces, final.content[0].text), (["Hello", ", ", "world", "!"], "Hello, world!"))
        self.assertEqual((final.usage.input_tokens, final.usage.output_tokens), (10, 5))

    def test_a_stream_cut_into_single_bytes_is_the_same(self):
        self.upstream.play(text=["Zażółć", " gęślą", " jaźń 🦊"], bytes_per_write=1)
        with self.client().messages.stream(model=self.solo, **ASK) as stream:
            self.assertEqual(stream.get_final_text(), "Zażółć gęślą jaźń 🦊")

    def test_a_tool_use_and_its_result_go_there_and_back(self):
        client = self.client()
        self.upstream.play(**words(message(USE, stop="tool_use")))
        asked = client.messages.create(model=self.solo, tools=[WEATHER], tool_choice={"type": "auto"}, **ASK)
        use = asked.content[0]
        self.assertEqual((asked.stop_reason, use.id, use.input), ("tool_use", "toolu_1", {"city": "Kraków"}))
        self.upstream.play()
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"}]}
        turns = [*ASK["messages"], {"role": "assistant", "content": asked.content}, result]
        client.messages.create(model=self.solo, max_tokens=100, messages=turns, tools=[WEATHER])
        first, second = self.upstream.asked()
        self.assertEqual((first["tools"], first["tool_choice"]), ([WEATHER], {"type": "auto"}))
        self.assertEqual((second["messages"][1]["content"], second["messages"][2]), ([USE], result))

    def test_a_streamed_tool_use_is_put_together(self):
        deltas = [{"type": "input_json_delta", "partial_json": part} for part in ("", '{"city": ', '"Krak', 'ów"}')]
        self.upstream.play(**words(events=events(USE | {"input": {}}, deltas, "tool_use")))
        with self.client().messages.stream(model=self.solo, tools=[WEATHER], **ASK) as stream:
            final = stream.get_final_message()
        self.assertEqual((final.stop_reason, final.content[0].input), ("tool_use", {"city": "Kraków"}))
        self.assert_paid(USUAL_COST_NANO)

    def test_thinking_before_the_text_is_streamed_too(self):
        deltas = [{"type": "thinking_delta", "thinking": "Hm."}, {"type": "signature_delta", "signature": "c2ln"}]
        thinking = {"type": "thinking", "thinking": "", "signature": ""}
        self.upstream.play(**words(events=events(thinking, deltas, "end_turn")))
        with self.client().messages.stream(model=self.solo, **ASK) as stream:
            final = stream.get_final_message()
        self.assertEqual((final.content[0].thinking, final.content[0].signature), ("Hm.", "c2ln"))

    def test_a_json_schema_goes_through_untouched(self):
        wanted = {"format": {"type": "json_schema", "schema": SCHEMA}}
        self.upstream.play(**words(message({"type": "text", "text": '{"city": "Kraków"}'})))
        answer = self.client().messages.create(model=self.solo, output_config=wanted, **ASK)
        self.assertEqual(json.loads(answer.content[0].text), {"city": "Kraków"})
        self.assertEqual(self.upstream.asked()[0]["output_config"], wanted)

    def test_an_image_goes_through_untouched(self):
        source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
        turns = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]}]
        self.client().messages.create(model=self.solo, max_tokens=100, messages=turns)
        self.assertEqual(self.upstream.asked()[0]["messages"], turns)

    def test_betas_are_told_to_the_upstream(self):
        answer = self.client().beta.messages.create(model=self.slashed, betas=["files-api-2025-04-14"], **ASK)
        self.assertEqual(answer.content[0].text, "Hello, world!")
        head = self.upstream.heads()[0]
        self.assertEqual((head["anthropic-beta"], head["x-api-key"][:14]), ("files-api-2025-04-14", "credential-of-"))

    def test_models_are_listed_and_found(self):
        client = self.client(api_key="sk-caller-walled")
        self.assertEqual([model.id for model in client.models.list()], ["solo-anthropic-000"])
        found = client.models.retrieve("solo-anthropic-000")
        self.assertEqual((found.type, found.display_name), ("model", "solo-anthropic-000"))
        self.assertEqual(self.client().models.retrieve(self.slashed).id, self.slashed)
        self.assertIn(self.pair, {model.id for model in self.client().models.list()})


class Failovers(Case):
    dialect = "anthropic"

    def test_a_failing_upstream_is_not_seen_by_a_stream(self):
        overloaded = json.dumps({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}})
        for fault in (
            {"kind": "status", "code": 529},
            {"kind": "close_before_head"},
            {"kind": "reset_after_head"},
            {"kind": "error_event", "pieces": 0, "body": overloaded},
            {"kind": "html"},
        ):
            with self.subTest(fault["kind"]):
                self.setUp()
                self.upstream.play(fault=fault)
                with self.client().messages.stream(model=self.pair, **ASK) as stream:
                    self.assertEqual(stream.get_final_text(), "Hello, world!")
                    self.assertEqual(stream.response.headers["x-tollgate-attempts"], "2")
                self.assertEqual(self.standby.calls(), 1)
                self.assert_paid(USUAL_COST_NANO)

    def test_a_failing_upstream_is_not_seen_by_a_whole_message(self):
        self.upstream.play(fault={"kind": "status", "code": 500})
        self.assertEqual(self.client().messages.create(model=self.pair, **ASK).content[0].text, "Hello, world!")
        self.assertEqual((self.upstream.calls(), self.standby.calls()), (1, 1))


class Async(Case):
    dialect = "anthropic"

    def test_twenty_calls_at_once_each_get_their_answer(self):
        async def ask(client, stream):
            if not stream:
                return (await client.messages.create(model=self.solo, **ASK)).content[0].text
            async with client.messages.stream(model=self.solo, **ASK) as answer:
                return await answer.get_final_text()

        async def all_of_them():
            async with self.async_client() as client:
                return await asyncio.gather(*[ask(client, number % 2 == 0) for number in range(20)])

        self.assertEqual(asyncio.run(all_of_them()), ["Hello, world!"] * 20)
        self.assert_paid(20 * USUAL_COST_NANO)
