"""OpenAI's SDK: responses."""

import json

from case import USUAL_COST_NANO, Case

USAGE = {
    "input_tokens": 10, "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 15,
}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Kraków"}', "status": "completed"}
WEATHER = {
    "type": "function", "name": "weather", "description": "The weather in a city.", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
}


def said(text):
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def response(*output, status="completed", usage=USAGE):
    return {
        "id": "resp_1", "object": "response", "created_at": 1, "status": status, "error": None, "incomplete_details": None,
        "instructions": None, "model": "native", "output": list(output), "parallel_tool_calls": True, "tool_choice": "auto",
        "tools": [], "temperature": 1.0, "top_p": 1.0, "metadata": {}, "usage": usage,
    }


def events(item, opening, deltas, done, part=None):
    """A stream of one item, with its usage at the end."""
    at = {"item_id": item["id"], "output_index": 0}
    kind, place = ("output_text", {"content_index": 0}) if part else ("function_call_arguments", {})
    told = [
        ("created", {"response": response(status="in_progress", usage=None)}),
        ("output_item.added", {"output_index": 0, "item": item | opening}),
        *([("content_part.added", at | place | {"part": part})] if part else []),
        *[(f"{kind}.delta", at | place | {"delta": delta} | ({"logprobs": []} if part else {})) for delta in deltas],
        (f"{kind}.done", at | place | done | ({"logprobs": []} if part else {"name": item["name"]})),
        ("output_item.done", {"output_index": 0, "item": item}),
        ("completed", {"response": response(item)}),
    ]
    numbered = [{"type": f"response.{name}", "sequence_number": number} | fields for number, (name, fields) in enumerate(told)]
    return [f"event: {one['type']}\ndata: {json.dumps(one, ensure_ascii=False)}\n\n" for one in numbered]


def words(whole=None, events=()):
    return {"answers": {"/v1/responses": {"whole": json.dumps(whole), "events": list(events)}}}


def text_events():
    empty = {"type": "output_text", "text": "", "annotations": []}
    opening = {"status": "in_progress", "content": []}
    return events(said("Hello, world!"), opening, ["Hello", ", ", "world", "!"], {"text": "Hello, world!"}, empty)


class Responses(Case):
    def test_a_whole_response_is_typed_and_charged(self):
        self.upstream.play(**words(response(said("Hello, world!"))))
        answer = self.client().responses.create(model=self.solo, input="Say hello.", max_output_tokens=100)
        self.assertEqual((answer.output_text, answer.usage.output_tokens), ("Hello, world!", 5))
        self.assert_paid(USUAL_COST_NANO)

    def test_a_stream_comes_in_pieces_and_ends_with_the_response(self):
        self.upstream.play(**words(events=text_events()))
        told = list(self.client().responses.create(model=self.solo, input="Say hello.", max_output_tokens=100, stream=True))
        self.assertEqual([one.delta for one in told if one.type == "response.output_text.delta"], ["Hello", ", ", "world", "!"])
        self.assertEqual((told[-1].type, told[-1].response.output_text), ("response.completed", "Hello, world!"))
        self.assert_paid(USUAL_COST_NANO)

    def test_a_streamed_function_call_is_put_together(self):
        opening = {"arguments": "", "status": "in_progress"}
        self.upstream.play(**words(events=events(CALL, opening, ['{"city": ', '"Krak', 'ów"}'], {"arguments": CALL["arguments"]})))
        with self.client().responses.stream(model=self.solo, input="Say hello.", max_output_tokens=100, tools=[WEATHER]) as stream:
            call = stream.get_final_response().output[0]
        self.assertEqual((call.call_id, json.loads(call.arguments)), ("call_1", {"city": "Kraków"}))
        self.assertEqual(self.upstream.asked()[0]["tools"], [WEATHER])
        self.assert_paid(USUAL_COST_NANO)

    def test_a_failing_upstream_is_not_seen(self):
        self.upstream.play(fault={"kind": "reset_after_head"}, **words(events=text_events()))
        self.standby.play(**words(events=text_events()))
        told = list(self.client().responses.create(model=self.pair, input="Say hello.", max_output_tokens=100, stream=True))
        self.assertEqual((told[-1].response.output_text, self.standby.calls()), ("Hello, world!", 1))

    def test_a_stream_that_breaks_ends_with_an_error_and_not_silently(self):
        self.upstream.play(fault={"kind": "reset_after_pieces", "pieces": 5}, **words(events=text_events()))
        told, failure = [], None
        try:
            for one in self.client().responses.create(model=self.solo, input="Say hello.", max_output_tokens=100, stream=True):
                told.append(one)
        except self.sdk().APIError as error:
            failure = error
        # The SDK hands an `error` event on as it is, and raises one that is told as an object.
        self.assertTrue(failure or told[-1].type == "error", told[-1:])
        self.assertNotIn("response.completed", [one.type for one in told])
        self.assertGreater(self.settled(), 0, "what was produced is paid")
