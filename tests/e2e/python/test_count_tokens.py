"""Anthropic's SDK: the count of a message's tokens, which is free."""

import json

from case import Case

TURNS = [{"role": "user", "content": "Say hello."}]
WORDS = {"answers": {"/v1/messages/count_tokens": {"whole": json.dumps({"input_tokens": 42})}}}


class CountTokens(Case):
    dialect = "anthropic"

    def test_a_count_comes_and_costs_nothing(self):
        self.upstream.play(**WORDS)
        count = self.client().messages.count_tokens(model=self.solo, messages=TURNS, system="Be brief.")
        self.assertGreater(count.input_tokens, 0)
        self.assert_paid(0)

    def test_a_failing_upstream_is_not_seen(self):
        self.upstream.play(fault={"kind": "status", "code": 529}, **WORDS)
        self.standby.play(**WORDS)
        self.assertGreater(self.client().messages.count_tokens(model=self.pair, messages=TURNS).input_tokens, 0)
