"""OpenAI's SDK: embeddings. Its Python client asks for base64 of its own accord and decodes it."""

import base64
import json
import struct

from case import Case


def words(embeddings):
    data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(embeddings)]
    usage = {"prompt_tokens": 8, "total_tokens": 8}
    whole = json.dumps({"object": "list", "model": "native", "data": data, "usage": usage})
    return {"answers": {"/v1/embeddings": {"whole": whole}}}


class Embeddings(Case):
    def test_texts_become_numbers_and_input_is_charged(self):
        coded = [base64.b64encode(struct.pack("<2f", *numbers)).decode() for numbers in ((0.5, -0.25), (1.0, 2.0))]
        self.upstream.play(**words(coded))
        answer = self.client().embeddings.create(model=self.solo, input=["Hello", "world"])
        self.assertEqual([one.embedding for one in answer.data], [[0.5, -0.25], [1.0, 2.0]])
        asked = self.upstream.asked()[0]
        self.assertEqual((asked["input"], asked["encoding_format"], asked["model"]), (["Hello", "world"], "base64", "native"))
        self.assert_paid(8 * 2_500)

    def test_plain_numbers_are_the_same_to_the_last_digit(self):
        numbers = [0.1, -0.0123456789012345, 1e-7]
        self.upstream.play(**words([numbers]))
        answer = self.client().embeddings.create(model=self.solo, input="Hello", encoding_format="float")
        self.assertEqual(answer.data[0].embedding, numbers)

    def test_a_failing_upstream_is_not_seen(self):
        self.upstream.play(fault={"kind": "status", "code": 503}, **words([[0.5]]))
        self.standby.play(**words([[0.5]]))
        answer = self.client().embeddings.create(model=self.pair, input="Hello", encoding_format="float")
        self.assertEqual((answer.data[0].embedding, self.standby.calls()), ([0.5], 1))

    def test_an_empty_purse_is_told_so(self):
        with self.assertRaises(self.sdk().APIStatusError) as caught:
            self.client(api_key="sk-caller-poor").embeddings.create(model=self.solo, input="Hello " * 1000)
        self.assertEqual((caught.exception.status_code, self.upstream.calls()), (402, 0))
