"""What every test stands on: clients, its own models and account, the scripted upstreams, the books."""

import itertools
import json
import os
import pathlib
import time
import unittest
import urllib.request

import anthropic
import openai

WORLD = json.loads(pathlib.Path(os.environ["E2E_WORLD"]).read_text())
INDICES = itertools.count()
# How long something that has to happen may take.
PATIENCE_SECONDS = 20
# What ten tokens in and five out cost: the mock's usual answer.
USUAL_COST_NANO = 10 * 2_500 + 5 * 10_000


def fetch(url, method="GET", body=None, headers={}):
    ask = urllib.request.Request(url, method=method, headers=headers, data=None if body is None else json.dumps(body).encode())
    with urllib.request.urlopen(ask, timeout=PATIENCE_SECONDS) as answer:
        return answer.read().decode()


class Upstream:
    """One scripted provider, and what it was asked since the test began."""

    def __init__(self, url, dialect):
        self.url = url
        self.dialect = dialect
        self.play()
        self.before = self.counts()

    def play(self, **script):
        fetch(f"{self.url}/__mock/script", "PUT", {"dialect": self.dialect} | script)

    def counts(self):
        return json.loads(fetch(f"{self.url}/__mock/counts"))

    def calls(self):
        return self.counts()["requests"] - self.before["requests"]

    def left(self):
        return self.counts()["disconnects"] - self.before["disconnects"]

    def asked(self):
        """The bodies, as JSON."""
        return [json.loads(one["body"]) for one in self.seen()]

    def heads(self):
        return [{name.lower(): value for name, value in one["headers"]} for one in self.seen()]

    def seen(self):
        calls = self.calls()
        seen = json.loads(fetch(f"{self.url}/__mock/requests"))
        return seen[len(seen) - calls:]


class Case(unittest.TestCase):
    dialect = "openai"

    def setUp(self):
        index = next(INDICES)
        assert index < WORLD["indices"], "more tests than indices: raise INDICES in stage.py"
        self.solo, self.pair = (f"{kind}-{self.dialect}-{index:03}" for kind in ("solo", "pair"))
        self.slashed = f"reseller/{self.dialect}-{index:03}:free"
        self.key = f"sk-caller-{index:03}"
        self.upstream, self.standby = (Upstream(url, self.dialect) for url in WORLD["mocks"][self.dialect])

    def sdk(self):
        return {"openai": openai, "anthropic": anthropic}[self.dialect]

    def client(self, **options):
        """A client that never asks twice, unless it is told to."""
        maker = {"openai": openai.OpenAI, "anthropic": anthropic.Anthropic}[self.dialect]
        return self.closing(maker(**self.options(options)))

    def async_client(self, **options):
        maker = {"openai": openai.AsyncOpenAI, "anthropic": anthropic.AsyncAnthropic}[self.dialect]
        return maker(**self.options(options))

    def options(self, options):
        base = options.pop("base", WORLD["gateway"])
        base += {"openai": "/v1", "anthropic": ""}[self.dialect]
        return {"base_url": base, "api_key": self.key, "max_retries": 0, "timeout": 60.0} | options

    def closing(self, client):
        self.addCleanup(client.close)
        return client

    def eventually(self, ask, expected, what):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := ask()) != expected and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertEqual(found, expected, what)

    def settled(self, key=None):
        """What the account has paid, once nothing is set aside for it any more."""
        def ask():
            return json.loads(fetch(f"{WORLD['gateway']}/v1/credits", headers={"authorization": f"Bearer {key or self.key}"}))["data"]

        self.eventually(lambda: metric("tollgate_holds_open"), 0, "every hold is settled")
        self.eventually(lambda: (found := ask())["available_nano"] - found["balance_nano"], 0, "nothing is set aside")
        return round(ask()["total_usage"] * 1e9)

    def assert_paid(self, nano):
        self.eventually(self.settled, nano, "what the account paid")


def metric(name, **labels):
    """The sum of a metric's samples with these labels; zero if there is none."""
    total = 0.0
    for line in fetch(f"{WORLD['admin']}/metrics").splitlines():
        head, _, value = line.rpartition(" ")
        wanted = all(f'{label}="{text}"' in head for label, text in labels.items())
        if head.partition("{")[0] == name and wanted:
            total += float(value)
    return total
