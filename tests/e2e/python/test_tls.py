"""TLS with a certificate that is really verified; HTTP/2 and HTTP/1.1, as the client asks."""

import asyncio
import json
import ssl
import unittest

import httpx2

from case import USUAL_COST_NANO, WORLD, Case
from test_curl import curl

TURNS = [{"role": "user", "content": "Say hello."}]


class Tls:
    """The tests; the classes below say in which SDK."""

    def http(self, maker, http2):
        return maker(http2=http2, verify=ssl.create_default_context(cafile=WORLD["tls"]["ca"]), timeout=60)

    def over_tls(self, http2=True, **options):
        http_client = self.http(httpx2.Client, http2)
        return self.client(base=WORLD["tls"]["url"], http_client=http_client, **options)

    def test_http_2_carries_whole_answers_and_streams(self):
        client = self.over_tls()
        whole = self.ask(self.raw(client))
        self.assertEqual((self.text_of(whole.parse()), whole.http_response.http_version), ("Hello, world!", "HTTP/2"))
        stream = self.ask(self.raw(client), stream=True)
        self.assertEqual("".join(map(self.piece_of, stream.parse())), "Hello, world!")
        self.assertEqual(stream.http_response.http_version, "HTTP/2")
        self.assert_paid(2 * USUAL_COST_NANO)

    def test_http_1_1_is_spoken_with_those_who_want_it(self):
        whole = self.ask(self.raw(self.over_tls(http2=False)))
        self.assertEqual((self.text_of(whole.parse()), whole.http_response.http_version), ("Hello, world!", "HTTP/1.1"))

    def test_a_certificate_that_nobody_vouches_for_is_refused_by_the_client(self):
        stranger = self.client(base=WORLD["tls"]["url"], http_client=httpx2.Client(verify=ssl.create_default_context()))
        with self.assertRaises(self.sdk().APIConnectionError):
            self.ask(stranger)

    def test_a_stream_that_its_reader_leaves_stops_the_upstream(self):
        self.upstream.play(fault={"kind": "hang_after_pieces", "pieces": 3})
        client = self.over_tls()
        stream, text = self.ask(client, stream=True), ""
        for event in stream:
            text += self.piece_of(event)
            if text == "Hello, world":
                break
        stream.close()
        # This HTTP client tells nobody that it has closed a stream of HTTP/2: it ends the connection, or nothing.
        client.close()
        self.eventually(self.upstream.left, 1, "the upstream was stopped")
        self.assertGreater(self.settled(), 0, "what was produced is paid")

    def test_a_stream_that_breaks_is_an_error_and_no_silent_end(self):
        self.upstream.play(fault={"kind": "reset_after_pieces", "pieces": 2})
        text = ""
        with self.assertRaises(self.sdk().APIError) as caught:
            for event in self.ask(self.over_tls(), stream=True):
                text += self.piece_of(event)
        self.assertNotIsInstance(caught.exception, self.sdk().APIConnectionError)
        self.assertEqual(text, "Hello, ")

    def test_errors_and_failovers_are_the_same_over_http_2(self):
        with self.assertRaises(self.sdk().AuthenticationError):
            self.ask(self.over_tls(api_key="sk-nobody-knows-this"))
        self.upstream.play(fault={"kind": "status", "code": 503})
        self.assertEqual(self.text_of(self.ask(self.over_tls(), model=self.pair)), "Hello, world!")

    def test_413_is_read_although_the_body_was_still_under_way(self):
        long = [{"role": "user", "content": "a" * (WORLD["body_bytes_max"] * 2)}]
        client = self.over_tls()
        with self.assertRaises(self.sdk().APIStatusError) as caught:
            self.ask(client, messages=long)
        self.assertEqual(caught.exception.status_code, 413)
        self.assertEqual(self.text_of(self.ask(client)), "Hello, world!", "the client goes on")

    def test_many_streams_share_one_connection(self):
        async def ask(client):
            return "".join([self.piece_of(event) async for event in await self.ask(client, stream=True)])

        async def all_of_them():
            http_client = self.http(httpx2.AsyncClient, True)
            async with self.async_client(base=WORLD["tls"]["url"], http_client=http_client) as client:
                return await asyncio.gather(*[ask(client) for _ in range(30)])

        self.assertEqual(asyncio.run(all_of_them()), ["Hello, world!"] * 30)
        self.assert_paid(30 * USUAL_COST_NANO)


class OpenAi(Tls, Case):
    dialect = "openai"

    def ask(self, client, **more):
        made = getattr(client, "chat", client)
        made = getattr(made, "completions", made)
        return made.create(**{"model": self.solo, "messages": TURNS, "max_tokens": 100} | more)

    def raw(self, client):
        return client.chat.completions.with_raw_response

    def text_of(self, answer):
        return answer.choices[0].message.content

    def piece_of(self, event):
        return event.choices[0].delta.content or ""


class Anthropic(Tls, Case):
    dialect = "anthropic"

    def ask(self, client, **more):
        return getattr(client, "messages", client).create(**{"model": self.solo, "messages": TURNS, "max_tokens": 100} | more)

    def raw(self, client):
        return client.messages.with_raw_response

    def text_of(self, answer):
        return answer.content[0].text

    def piece_of(self, event):
        return event.delta.text if event.type == "content_block_delta" else ""


@unittest.skipUnless(WORLD["curl"], "there is no curl")
class Curl(Case):
    def test_curl_is_answered_in_the_version_that_it_asks_for(self):
        ca = ["--cacert", WORLD["tls"]["ca"]]
        for option, expected in (("--http2", "2"), ("--http1.1", "1.1")):
            with self.subTest(option):
                body, status, version = curl(WORLD["tls"]["url"], self.key, self.solo, option, *ca)
                self.assertEqual((json.loads(body)["choices"][0]["message"]["content"], status, version), ("Hello, world!", "200", expected))
                body, status, version = curl(WORLD["tls"]["url"], self.key, self.solo, option, "--no-buffer", *ca, stream=True)
                self.assertEqual((body.strip().splitlines()[-1], status, version), ("data: [DONE]", "200", expected))
