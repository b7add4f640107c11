"""OpenAI's SDK: the older text completions."""

import json

from case import USUAL_COST_NANO, Case

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def completion(text, finish="stop", **more):
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return json.dumps({"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "native", "choices": [choice]} | more)


def words():
    chunks = [completion(text, None) for text in ("Hello", ", ", "world", "!")]
    last = [completion("", "stop"), completion("", usage=USAGE, choices=[]), "[DONE]"]
    events = [f"data: {one}\n\n" for one in [*chunks, *last]]
    return {"answers": {"/v1/completions": {"whole": completion("Hello, world!", usage=USAGE), "events": events}}}


class Completions(Case):
    def test_a_whole_answer_is_typed_and_charged(self):
        self.upstream.play(**words())
        answer = self.client().completions.create(model=self.solo, prompt="Say hello.", max_tokens=100)
        self.assertEqual((answer.choices[0].text, answer.usage.completion_tokens), ("Hello, world!", 5))
        self.assert_paid(USUAL_COST_NANO)

    def test_a_stream_comes_in_pieces(self):
        self.upstream.play(**words())
        chunks = self.client().completions.create(model=self.solo, prompt="Say hello.", max_tokens=100, stream=True)
        self.assertEqual([text for chunk in chunks if (text := chunk.choices[0].text)], ["Hello", ", ", "world", "!"])
        self.assert_paid(USUAL_COST_NANO)
