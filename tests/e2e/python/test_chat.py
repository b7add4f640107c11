"""OpenAI's SDK: what it asks for and gets."""

import asyncio
import json

import pydantic

from case import USUAL_COST_NANO, WORLD, Case

ASK = [{"role": "user", "content": "Say hello."}]
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Kraków"}'}}
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def whole(message, finish="stop"):
    choice = {"index": 0, "message": {"role": "assistant", "content": None} | message, "finish_reason": finish}
    return json.dumps({"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "native", "choices": [choice], "usage": USAGE})


def events(*deltas, finish="stop"):
    """A stream of these deltas, with its usage."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "native"}
    choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
    chunks = [head | {"choices": choice} for choice in [*choices, [{"index": 0, "delta": {}, "finish_reason": finish}]]]
    said = [json.dumps(chunk, ensure_ascii=False) for chunk in [*chunks, head | {"choices": [], "usage": USAGE}]]
    return [f"data: {one}\n\n" for one in [*said, "[DONE]"]]


def words(whole="", events=()):
    return {"answers": {"/v1/chat/completions": {"whole": whole, "events": list(events)}}}


def tool_deltas():
    opening = CALL["function"] | {"arguments": ""}
    return [
        {"role": "assistant", "content": None, "tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": opening}]},
        *[{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in ('{"city": ', '"Krak', 'ów"}')],
    ]


class Answers(Case):
    def test_a_whole_answer_is_typed_named_and_charged(self):
        answer = self.client().chat.completions.with_raw_response.create(model=self.solo, messages=ASK)
        completion = answer.parse()
        self.assertEqual(completion.choices[0].message.content, "Hello, world!")
        self.assertEqual(completion.choices[0].finish_reason, "stop")
        self.assertEqual((completion.usage.prompt_tokens, completion.usage.completion_tokens), (10, 5))
        self.assertEqual(completion._request_id, answer.headers["x-request-id"])
        self.assertEqual(answer.headers["x-tollgate-cost-nano"], str(USUAL_COST_NANO))
        self.assert_paid(USUAL_COST_NANO)

    def test_a_stream_comes_in_pieces_and_without_the_usage_that_was_not_asked_for(self):
        chunks = list(self.client().chat.completions.create(model=self.solo, messages=ASK, stream=True))
        pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
        self.assertEqual(pieces, ["Hello", ", ", "world", "!"])
        self.assertEqual([chunk.usage for chunk in chunks], [None] * len(chunks))
        self.assert_paid(USUAL_COST_NANO)

    def test_a_stream_with_usage_ends_with_it(self):
        ask = {"model": self.solo, "messages": ASK, "stream": True, "stream_options": {"include_usage": True}}
        *_, last = self.client().chat.completions.create(**ask)
        self.assertEqual((last.choices, last.usage.prompt_tokens, last.usage.completion_tokens), ([], 10, 5))
        self.assert_paid(USUAL_COST_NANO)

    def test_a_stream_cut_into_single_bytes_is_the_same(self):
        self.upstream.play(text=["Zażółć", " gęślą", " jaźń 🦊"], bytes_per_write=1)
        chunks = self.client().chat.completions.create(model=self.solo, messages=ASK, stream=True)
        self.assertEqual("".join(chunk.choices[0].delta.content or "" for chunk in chunks), "Zażółć gęślą jaźń 🦊")

    def test_a_tool_call_and_its_result_go_there_and_back(self):
        client = self.client()
        self.upstream.play(**words(whole({"tool_calls": [CALL]}, "tool_calls")))
        asked = client.chat.completions.create(model=self.solo, messages=ASK, tools=[WEATHER], tool_choice="auto")
        call = asked.choices[0].message.tool_calls[0]
        self.assertEqual((asked.choices[0].finish_reason, call.id), ("tool_calls", "call_1"))
        self.assertEqual(json.loads(call.function.arguments), {"city": "Kraków"})
        self.upstream.play()
        turns = [*ASK, asked.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        client.chat.completions.create(model=self.solo, messages=turns, tools=[WEATHER])
        first, second = self.upstream.asked()
        self.assertEqual((first["tools"], first["tool_choice"]), ([WEATHER], "auto"))
        self.assertEqual(second["messages"][1]["tool_calls"], [CALL])
        self.assertEqual(second["messages"][2], turns[2])

    def test_a_streamed_tool_call_is_put_together(self):
        self.upstream.play(**words(events=events(*tool_deltas(), finish="tool_calls")))
        with self.client().chat.completions.stream(model=self.solo, messages=ASK, tools=[WEATHER]) as stream:
            choice = stream.get_final_completion().choices[0]
        self.assertEqual((choice.finish_reason, choice.message.tool_calls[0].id), ("tool_calls", "call_1"))
        self.assertEqual(json.loads(choice.message.tool_calls[0].function.arguments), {"city": "Kraków"})
        self.assert_paid(USUAL_COST_NANO)

    def test_a_json_schema_goes_through_untouched_and_its_answer_is_parsed(self):
        class Place(pydantic.BaseModel):
            city: str
            people: int

        self.upstream.play(**words(whole({"content": '{"city": "Kraków", "people": 807644}'})))
        completion = self.client().chat.completions.parse(model=self.solo, messages=ASK, response_format=Place)
        self.assertEqual(completion.choices[0].message.parsed, Place(city="Kraków", people=807644))
        asked = self.upstream.asked()[0]["response_format"]
        self.assertEqual((asked["type"], asked["json_schema"]["strict"]), ("json_schema", True))
        self.assertEqual(list(asked["json_schema"]["schema"]["properties"]), ["city", "people"])

    def test_an_image_goes_through_untouched(self):
        image = {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}
        turns = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
        self.client().chat.completions.create(model=self.solo, messages=turns)
        self.assertEqual(self.upstream.asked()[0]["messages"], turns)

    def test_models_are_listed_and_found(self):
        client = self.client(api_key="sk-caller-walled")
        self.assertEqual([model.id for model in client.models.list()], ["solo-openai-000"])
        self.assertEqual(client.models.retrieve("solo-openai-000").object, "model")
        self.assertEqual(self.client().models.retrieve(self.slashed).id, self.slashed)
        self.assertIn(self.pair, {model.id for model in self.client().models.list()})


class Failovers(Case):
    FAULTS = [
        {"kind": "status", "code": 503},
        {"kind": "close_before_head"},
        {"kind": "reset_after_head"},
        {"kind": "error_event", "pieces": 0},
        {"kind": "html"},
    ]

    def test_a_failing_upstream_is_not_seen_by_a_stream(self):
        for fault in self.FAULTS:
            with self.subTest(fault["kind"]):
                self.setUp()
                self.upstream.play(fault=fault)
                answer = self.client().chat.completions.with_raw_response.create(model=self.pair, messages=ASK, stream=True)
                text = "".join(chunk.choices[0].delta.content or "" for chunk in answer.parse())
                self.assertEqual((text, answer.headers["x-tollgate-attempts"]), ("Hello, world!", "2"))
                self.assertEqual(self.standby.calls(), 1)
                self.assert_paid(USUAL_COST_NANO)

    def test_a_failing_upstream_is_not_seen_by_a_whole_answer(self):
        self.upstream.play(fault={"kind": "status", "code": 500})
        completion = self.client().chat.completions.create(model=self.pair, messages=ASK)
        self.assertEqual(completion.choices[0].message.content, "Hello, world!")
        self.assertEqual((self.upstream.calls(), self.standby.calls()), (1, 1))


class Async(Case):
    def test_twenty_calls_at_once_each_get_their_answer(self):
        async def ask(client, stream):
            answer = await client.chat.completions.create(model=self.solo, messages=ASK, stream=stream)
            if not stream:
                return answer.choices[0].message.content
            return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

        async def all_of_them():
            async with self.async_client() as client:
                return await asyncio.gather(*[ask(client, number % 2 == 0) for number in range(20)])

        self.assertEqual(asyncio.run(all_of_them()), ["Hello, world!"] * 20)
        self.assert_paid(20 * USUAL_COST_NANO)

    def test_a_cancelled_task_stops_the_upstream(self):
        self.upstream.play(fault={"kind": "hang_after_pieces", "pieces": 2})

        async def read(client, two):
            pieces = 0
            async for chunk in await client.chat.completions.create(model=self.solo, messages=ASK, stream=True):
                pieces += bool(chunk.choices[0].delta.content)
                if pieces == 2:
                    two.set()

        async def leave():
            two = asyncio.Event()
            async with self.async_client() as client:
                reading = asyncio.create_task(read(client, two))
                await asyncio.wait_for(two.wait(), 20)
                reading.cancel()
                await asyncio.wait([reading])

        asyncio.run(leave())
        self.eventually(self.upstream.left, 1, "the upstream was stopped")
        self.assertGreater(self.settled(), 0, "what was produced is paid")
