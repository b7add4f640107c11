"""curl: what HTTP it is answered in. Over TLS it is asked in test_tls.py."""

import json
import subprocess
import unittest

from case import USUAL_COST_NANO, WORLD, Case


def curl(base, key, model, *options, stream=False):
    """The body, the status and the version of HTTP."""
    ask = {"model": model, "stream": stream, "messages": [{"role": "user", "content": "Say hello."}]}
    told = ["--silent", "--show-error", "--max-time", "20", "--write-out", "\n%{http_code} %{http_version}"]
    command = ["curl", *told, *options, f"{base}/v1/chat/completions", "-H", f"authorization: Bearer {key}", "-d", json.dumps(ask)]
    said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert said.returncode == 0, said.stderr
    body, _, verdict = said.stdout.rpartition("\n")
    return body, *verdict.split()


@unittest.skipUnless(WORLD["curl"], "there is no curl")
class Curl(Case):
    def test_a_wish_for_http_2_without_tls_is_answered_one_way_or_the_other(self):
        body, status, version = curl(WORLD["gateway"], self.key, self.solo, "--http2")
        self.assertEqual((json.loads(body)["choices"][0]["message"]["content"], status), ("Hello, world!", "200"))
        self.assertIn(version, ("1.1", "2"))
        self.assert_paid(USUAL_COST_NANO)
