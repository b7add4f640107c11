"""What `scripts/gameday` runs: two nodes over a Redis and a Postgres, four scripted upstreams in three regions, callers on raw
sockets, and Prometheus with the rules of conf/prometheus where it is installed. Only the standard library.

Time is compressed: an outage takes `--seconds`, the 47 minutes of one upstream as many seconds, and windows and delays of the
alert rules are divided by COMPRESSED. Thresholds stay as they are, so that those in seconds (a lag, a missed beat) do not fire here.
"""

import argparse
import asyncio
import collections
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

KEY = "sk-gameday-caller"
PROBES = 'probes: { every: 2s, cost_max_per_day: "100" }\n'
COMPRESSED = 30
# What is promised.
WEIGHT_DROP_MAX = 5.0
# Below it a weight has fallen: what of it is left is less than that of any other route.
FALLEN = 0.5
# The objective: of a month's calls so many may be bad.
BUDGET = 0.0005
LATE = 3.0
MONTH = 30 * 86400
# Bounds of waiting, in seconds.
STARTS = 60
RECOVERS = 180
CALL = 30

MOCKS = {"us-a": "us-east", "us-b": "us-east", "eu": "eu-west", "reseller": "elsewhere"}
HEALTHY = {"text": ["The", " quick", " brown", " fox", " jumps", "."], "delay_head_ms": 20, "delay_chunk_ms": 5}
CONFIG = """
listen: {{ http: "127.0.0.1:{http}", admin: "127.0.0.1:{admin}", threads: 2 }}
store:
  path: "{folder}/{name}"
  redis: {{ urls: ["redis://127.0.0.1:{redis}"] }}
  postgres: {{ url: "postgres://tollgate@127.0.0.1:{postgres}/postgres" }}
drain: {{ pre: 0s, max: 30s }}
{extra}
providers:
{providers}
models:
  m:
    price: {{ input: "2.50", output: "10.00" }}
    limits: {{ context: 128000, output: 16384 }}
    routes:
{routes}
bootstrap:
  accounts:
    gameday: {{ balance: "100000", keys: [ {{ key: {key}, default_output_tokens: 100 }} ] }}
"""


def ask(order=None):
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Say hello."}]}
    if order:
        body["provider"] = {"order": order}
    body = json.dumps(body).encode()
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nhost: gameday\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n")
    return head.encode() + body


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def get(url, timeout=2):
    """The body of an answer, whatever its status; empty when there is none."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""


def metrics(text):
    """Samples by name and labels, as they are written."""
    samples = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    return samples


class Fleet:
    """Everything that runs. Each process is ours and ends with us."""

    def __init__(self, binary, folder):
        self.binary, self.folder = os.path.abspath(binary), pathlib.Path(folder)
        self.ports = collections.defaultdict(free_port)
        self.processes = {}
        self.nodes = ["node-1", "node-2"]
        self.extra = ""

    def spawn(self, name, *args, **more):
        log = open(self.folder / f"{name}.log", "ab")
        self.processes[name] = subprocess.Popen(args, stdout=log, stderr=log, stdin=subprocess.DEVNULL, **more)

    def end(self, name, how=signal.SIGTERM):
        process = self.processes.pop(name, None)
        if process:
            process.send_signal(how)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return process.returncode
        return None

    def end_all(self):
        for name in reversed(list(self.processes)):
            self.end(name, signal.SIGKILL if name.startswith("up-") else signal.SIGTERM)

    async def until(self, what, done, seconds=STARTS):
        """Waits until something is so, and says how long it took."""
        began = time.monotonic()
        while not await asyncio.to_thread(done):
            if time.monotonic() - began > seconds:
                raise SystemExit(f"gameday: {what} did not come about within {seconds} s; see {self.folder}")
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    def mock(self, name):
        self.spawn(f"up-{name}", self.binary, "mock", "--listen", f"127.0.0.1:{self.ports[name]}", "--script", json.dumps(HEALTHY))

    def script(self, name, **faults):
        body = json.dumps({**HEALTHY, **faults}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports[name]}/__mock/script", body, method="PUT")
        urllib.request.urlopen(request, timeout=5).read()

    def asked(self, name):
        return json.loads(get(f"http://127.0.0.1:{self.ports[name]}/__mock/counts") or "{}")

    def redis(self):
        data = self.folder / "redis"
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir()
        self.spawn("redis", "redis-server", "--port", str(self.ports["redis"]), "--bind", "127.0.0.1", "--dir", str(data),
                   "--appendonly", "no", "--save", "", "--maxmemory-policy", "noeviction")

    def as_postgres(self):
        return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []

    def postgres_bin(self, program):
        found = sorted(pathlib.Path("/usr/lib/postgresql").glob(f"*/bin/{program}"))
        return str(found[-1])

    def make_postgres(self):
        data = self.folder / "postgres"
        data.mkdir()
        if os.geteuid() == 0:
            shutil.chown(data, "postgres")
        subprocess.run([*self.as_postgres(), self.postgres_bin("initdb"), "-D", str(data), "-U", "tollgate", "-A", "trust", "-E", "UTF8",
                        "--locale=C"], check=True, stdout=subprocess.DEVNULL, cwd="/")

    def postgres(self):
        self.spawn("postgres", *self.as_postgres(), self.postgres_bin("postgres"), "-D", str(self.folder / "postgres"), "-p",
                   str(self.ports["postgres"]), "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", cwd="/")

    def config(self, node, more=""):
        providers = "".join(
            f'  {name}: {{ dialect: openai, base_url: "http://127.0.0.1:{self.ports[name]}/v1", credential: sk-up-{name}, region: {region} }}\n'
            for name, region in MOCKS.items())
        routes = "".join(f"      - {{ provider: {name}, model: native, weight: {100 - 10 * at} }}\n" for at, name in enumerate(MOCKS))
        text = CONFIG.format(folder=self.folder, name=node, http=self.ports[node], admin=self.ports[f"{node}-admin"],
                             redis=self.ports["redis"], postgres=self.ports["postgres"], providers=providers, routes=routes, key=KEY,
                             extra=self.extra + more)
        file = self.folder / f"{node}.yaml"
        # As an editor does: never half a file.
        file.with_suffix(".new").write_text(text)
        file.with_suffix(".new").rename(file)
        return str(file)

    def tollgate(self, *args, node="node-1"):
        return subprocess.run([self.binary, "--config", str(self.folder / f"{node}.yaml"), *args], capture_output=True, text=True,
                              timeout=120)

    def has_verb(self, verb):
        return self.tollgate(verb, "--help").returncode == 0

    def admin(self, node, path):
        return get(f"http://127.0.0.1:{self.ports[f'{node}-admin']}{path}")

    def metrics(self, node):
        return metrics(self.admin(node, "/metrics"))

    async def start(self):
        self.redis()
        self.make_postgres()
        self.postgres()
        for name in MOCKS:
            self.mock(name)
        ready = self.postgres_bin("pg_isready")
        await self.until("Postgres", lambda: subprocess.run(
            [ready, "-q", "-h", "127.0.0.1", "-p", str(self.ports["postgres"])]).returncode == 0)
        # What this binary does not know yet is left out.
        self.config("node-1", PROBES)
        self.extra = PROBES if self.tollgate("check").returncode == 0 else ""
        for node in self.nodes:
            self.config(node)
        done = self.tollgate("migrate")
        if done.returncode:
            raise SystemExit(f"gameday: migrate: {done.stderr}")
        for node in self.nodes:
            self.spawn(node, self.binary, "--config", str(self.folder / f"{node}.yaml"), "serve")
            await self.until(node, lambda node=node: self.admin(node, "/readyz").startswith("ready"))


class Prometheus:
    """A real one, with the rules in compressed time."""

    def __init__(self, fleet):
        self.fleet = fleet
        rules = pathlib.Path("conf/prometheus/rules.yml")
        self.is_there = bool(shutil.which("prometheus")) and rules.exists()
        if not self.is_there:
            return
        self.url = f"http://127.0.0.1:{fleet.ports['prometheus']}"
        (fleet.folder / "rules.yml").write_text(compressed(rules.read_text()))
        targets = [f"127.0.0.1:{fleet.ports[f'{node}-admin']}" for node in fleet.nodes]
        config = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": ["rules.yml"],
                  "scrape_configs": [{"job_name": "tollgate", "static_configs": [{"targets": targets}]}]}
        # JSON is YAML.
        (fleet.folder / "prometheus.yml").write_text(json.dumps(config))
        fleet.spawn("prometheus", "prometheus", f"--config.file={fleet.folder}/prometheus.yml",
                    f"--storage.tsdb.path={fleet.folder}/prometheus", f"--web.listen-address=127.0.0.1:{fleet.ports['prometheus']}")

    def firing(self):
        if not self.is_there:
            return set()
        answer = json.loads(get(f"{self.url}/api/v1/alerts") or '{"data": {"alerts": []}}')
        return {alert["labels"]["alertname"] for alert in answer["data"]["alerts"] if alert["state"] == "firing"}


def compressed(rules):
    """Every time in the rules divided, at least two seconds (a rate needs two samples)."""
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}

    def shorter(found):
        seconds = int(found[2]) * unit[found[3]]
        return f"{found[1]}{max(seconds // COMPRESSED, 5 if found[1] == '[' else 1)}s"

    return re.sub(r"(\[|for: |interval: |offset )(\d+)([smhd])\b", shorter, rules)


class Load:
    """Calls at an even pace to both nodes in turn, whatever becomes of them."""

    def __init__(self, fleet, rate):
        self.fleet, self.rate = fleet, rate
        self.calls = set()
        self.act = None

    async def run(self):
        at, turn = time.monotonic(), 0
        while True:
            at += 1 / self.rate
            await asyncio.sleep(max(0, at - time.monotonic()))
            turn += 1
            node = self.fleet.nodes[turn % len(self.fleet.nodes)]
            task = asyncio.create_task(self.call(node, self.act))
            self.calls.add(task)
            task.add_done_callback(self.calls.discard)

    async def call(self, node, act):
        began = time.monotonic()
        try:
            first, error = await asyncio.wait_for(call(self.fleet.ports[node]), CALL)
        except asyncio.TimeoutError:
            first, error = None, "no end"
        except OSError as failed:
            first, error = None, f"connection: {type(failed).__name__}"
        if act is not None:
            act.count(began, first, error)


async def call(port, order=None):
    """One streamed call: how long to its first event, or what went wrong."""
    began, first = time.monotonic(), None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(ask(order))
        head = await reader.readuntil(b"\r\n\r\n")
        status, text = int(head.split(b" ", 2)[1]), b""
        while piece := await reader.read(65536):
            if first is None and b"data:" in piece:
                first = time.monotonic() - began
            text += piece
    except asyncio.IncompleteReadError:
        return None, "no answer"
    finally:
        writer.close()
    if status != 200:
        code = re.search(rb'"code"\s*:\s*"([a-z_]+)"', text)
        return None, f"{status} {code[1].decode() if code else ''}".strip()
    if b'"error"' in text or b"[DONE]" not in text:
        return first, "broken stream"
    return first, None


class Act:
    """What was seen from the moment at which something broke."""

    def __init__(self, fleet, prometheus, title, down=(), alerts=()):
        self.fleet, self.prometheus, self.title = fleet, prometheus, title
        # Endpoints whose weight has to go, and alerts that have to fire.
        self.down, self.wanted = [f"{name}/native" for name in down], set(alerts)
        self.waits, self.errors, self.first_error = [], collections.Counter(), None
        self.began = time.monotonic()
        self.since = time.time()
        self.before = [fleet.metrics(node) for node in fleet.nodes]
        self.silent = prometheus.firing()
        self.fired, self.dropped, self.yellow, self.recovery, self.lasts = {}, {}, None, None, None
        self.is_shown = "operational" in self.status() or None

    def count(self, began, first, error):
        if error:
            self.errors[error] += 1
            self.first_error = self.first_error or began - self.began
        else:
            self.waits.append(first)

    def status(self):
        return get(f"http://127.0.0.1:{self.fleet.ports[self.fleet.nodes[0]]}/status.json")

    def look(self):
        """Weights, alerts and the status page, as they are now."""
        now = time.monotonic() - self.began
        for node in self.fleet.nodes:
            seen = self.fleet.metrics(node)
            for endpoint in self.down:
                factor = seen.get(f'tollgate_endpoint_factor{{endpoint="{endpoint}"}}', 1)
                refused = seen.get(f'tollgate_endpoint_refused{{endpoint="{endpoint}"}}', 0)
                if factor < FALLEN or refused:
                    self.dropped.setdefault((node, endpoint), now)
        for alert in self.prometheus.firing() - self.silent:
            self.fired.setdefault(alert, now)
        if self.is_shown and self.yellow is None and is_yellow(self.status()):
            self.yellow = now

    async def watch(self):
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(0.1)

    def failovers(self):
        """Attempts that failed on the way, by reason."""
        reasons = collections.Counter()
        for node, before in zip(self.fleet.nodes, self.before):
            for name, value in self.fleet.metrics(node).items():
                found = re.fullmatch(r'tollgate_attempts_total\{.*outcome="([a-z0-9_]+)".*\}', name)
                grown = value - before.get(name, 0)
                # A process that was replaced counts from 0.
                if found and found[1] not in ("served", "left") and grown > 0:
                    reasons[found[1]] += int(grown)
        return reasons

    def report(self):
        good, bad = len(self.waits), sum(self.errors.values())
        late = sum(wait > LATE for wait in self.waits)
        waits = sorted(self.waits) or [0]
        allowed = MONTH * (good + bad) / max(1e-9, self.length) * BUDGET
        tell = lambda counter: ", ".join(f"{name} {count}" for name, count in counter.most_common()) or "none"
        seconds = lambda span: "–" if span is None else f"{span:.1f} s"
        status = "no page" if self.is_shown is None else seconds(self.yellow)
        alerts = ", ".join(f"{name} {at:.0f} s" for name, at in sorted(self.fired.items(), key=lambda it: it[1]))
        return [
            self.title, f"{good + bad}", f"{good}", tell(self.errors), f"{waits[len(waits) // 2] * 1000:.0f} ms",
            f"{waits[-1] * 1000:.0f} ms", tell(self.failovers()), f"{100 * (bad + late) / allowed:.4f} %",
            seconds(max(self.dropped.values(), default=None)), status,
            alerts or ("none" if self.prometheus.is_there else "no Prometheus"), seconds(self.recovery),
        ]

    def broken(self):
        """Promises that were not kept."""
        broken = []
        if self.errors:
            broken.append(f"callers saw errors: {dict(self.errors)}")
        for node in self.fleet.nodes:
            for endpoint in self.down:
                at = self.dropped.get((node, endpoint))
                if at is None or at > WEIGHT_DROP_MAX:
                    broken.append(f"the weight of {endpoint} on {node} fell after {at} s, not within {WEIGHT_DROP_MAX}")
        if self.is_shown and self.down and self.yellow is None:
            broken.append("the status page never became yellow")
        if self.yellow and self.first_error and self.yellow > self.first_error:
            broken.append(f"the status page became yellow {self.yellow - self.first_error:.1f} s after the first error")
        if self.prometheus.is_there:
            broken += [f"the alert {alert} never fired" for alert in sorted(self.wanted - set(self.fired) - self.silent)]
        return broken


HEAD = ["act", "calls", "good", "errors", "first event p50", "slowest", "failed attempts by reason", "of a month's budget", "weight fell after",
        "status yellow after", "alerts, after", "recovered after"]


def is_yellow(text):
    """Whether the page says that something is wrong now; past days and incidents are another matter."""
    def any_of(value):
        if isinstance(value, dict):
            return any(any_of(part) for name, part in value.items() if name not in ("days", "incidents", "jobs"))
        if isinstance(value, list):
            return any(any_of(part) for part in value)
        return value in ("degraded", "partly_down", "down")
    try:
        return any_of(json.loads(text))
    except ValueError:
        return False


class Day:
    def __init__(self, fleet, prometheus, load, seconds):
        self.fleet, self.prometheus, self.load, self.seconds = fleet, prometheus, load, seconds
        self.rows, self.broken = [], []

    async def play(self, act, restore):
        """Watches an outage that has just begun; ends it with `restore`, and waits until all is as it was."""
        self.load.act = act
        watching = asyncio.create_task(act.watch())
        try:
            await asyncio.sleep(act.lasts or self.seconds)
            await restore()
            act.recovery = await self.recover(act)
        finally:
            watching.cancel()
        await asyncio.gather(*list(self.load.calls))
        act.length = time.monotonic() - act.began
        self.load.act = None
        self.rows.append(act.report())
        self.broken += [f"{act.title}: {what}" for what in act.broken()]
        print(f"  {act.title}: {self.rows[-1][1]} calls, errors: {self.rows[-1][3]}, recovered after {self.rows[-1][-1]}", flush=True)

    async def recover(self, act):
        """How long until all is well, and stays so for a second: what broke may not be noticed yet."""
        began = time.monotonic()
        while True:
            try:
                await self.fleet.until(f"recovery from: {act.title}", self.is_well, RECOVERS)
            except SystemExit as never:
                raise SystemExit(f"{never}: {self.ailments}") from None
            recovered = time.monotonic() - began
            await asyncio.sleep(1)
            if await asyncio.to_thread(self.is_well):
                return recovered

    def is_well(self):
        self.ailments = [f"{node}: {what}" for node in self.fleet.nodes for what in ailments(self.fleet.metrics(node))]
        return not self.ailments

    def act(self, *args, **more):
        return Act(self.fleet, self.prometheus, *args, **more)

    async def region(self):
        act = self.act("region us-east answers 503", down=["us-a", "us-b"], alerts=["RegionDown", "UpstreamDown"])
        for name in ("us-a", "us-b"):
            self.fleet.script(name, fault={"kind": "status", "code": 503})

        async def restore():
            for name in ("us-a", "us-b"):
                self.fleet.script(name)
        await self.play(act, restore)

    async def death(self):
        act = self.act("one upstream is dead for 47 minutes", down=["us-a"], alerts=["UpstreamDown"])
        act.lasts = 47 * 60 / 60
        self.fleet.end("up-us-a", signal.SIGKILL)

        async def restore():
            self.fleet.mock("us-a")
            await self.fleet.until("us-a", lambda: self.fleet.asked("us-a") != {})
        await self.play(act, restore)

    async def throttle(self):
        """A bucket of two calls, one more in each quarter of a second; what finds it empty gets 429 without a Retry-After."""
        act = self.act("us-a throttles silently", alerts=["UpstreamThrottles"])
        # Its alert looks at twenty seconds, and waits ten.
        act.lasts = max(self.seconds, 40)
        bucket = asyncio.create_task(self.bucket("us-a"))

        async def restore():
            bucket.cancel()
            await asyncio.gather(bucket, return_exceptions=True)
            self.fleet.script("us-a")
        await self.play(act, restore)

    async def bucket(self, name, size=2, refill=4):
        count = lambda: max((number for number in self.fleet.asked(name).values() if isinstance(number, int)), default=0)
        tokens, seen, at, is_open = size, await asyncio.to_thread(count), time.monotonic(), True
        while True:
            now = time.monotonic()
            asked = await asyncio.to_thread(count)
            tokens = min(size, tokens + (now - at) * refill) - (asked - seen if is_open else 0)
            seen, at = asked, now
            if is_open != (tokens >= 1):
                is_open = tokens >= 1
                await asyncio.to_thread(self.fleet.script, name, **({} if is_open else {"fault": {"kind": "status", "code": 429}}))
            await asyncio.sleep(0.02)

    async def two(self):
        act = self.act("two at once: one hangs, one resets", down=["us-a", "us-b"], alerts=["UpstreamDown"])
        self.fleet.script("us-a", fault={"kind": "hang_before_head"})
        # The next of the order, so that one call meets both.
        self.fleet.script("us-b", fault={"kind": "reset_after_head"})

        async def restore():
            for name in ("us-a", "us-b"):
                self.fleet.script(name)
        await self.play(act, restore)

    async def redis(self):
        act = self.act("Redis is lost, and comes back empty", alerts=["RedisLost"])
        self.fleet.end("redis", signal.SIGKILL)

        async def restore():
            self.fleet.redis()
        await self.play(act, restore)

    async def postgres(self):
        act = self.act("Postgres is lost", alerts=["PostgresLost"])
        # Its own children go with it; SIGQUIT is its crash.
        self.fleet.end("postgres", signal.SIGQUIT)

        async def restore():
            self.fleet.postgres()
        await self.play(act, restore)

    async def deploy(self):
        act = self.act("a bad deploy: the config is refused", alerts=["ConfigRefused"])
        for node in self.fleet.nodes:
            self.fleet.config(node, "bounds: { body_maximum: 1MiB }\n")
        await self.fleet.until("the refusal", lambda: all(
            self.fleet.metrics(node).get("tollgate_config_refused") == 1 for node in self.fleet.nodes))
        checked = self.fleet.tollgate("check")
        beside = self.fleet.tollgate("serve", "--upgrade")
        if (checked.returncode, beside.returncode) != (64, 64):
            self.broken.append(f"{act.title}: check ended with {checked.returncode}, a start with {beside.returncode}, not 64")

        async def restore():
            for node in self.fleet.nodes:
                self.fleet.config(node)
        await self.play(act, restore)

    async def books(self):
        """At the end nothing is missing: the books prove themselves, and Redis agrees with them."""
        await self.fleet.until("all is booked", lambda: all(
            self.fleet.metrics(node).get("tollgate_journal_unposted") == 0 for node in self.fleet.nodes), RECOVERS)
        for words in (["ledger", "verify"], ["ledger", "reconcile"]):
            done = await asyncio.to_thread(self.fleet.tollgate, *words)
            print(f"\ntollgate {' '.join(words)}: {done.stdout.strip()}{done.stderr.strip()}")
            if done.returncode or "!" in done.stdout:
                self.broken.append(f"tollgate {' '.join(words)} finds fault")


def ailments(seen):
    """What of a node's metrics is not as it should be."""
    wanted = {"tollgate_redis_shards_refused": 0, "tollgate_frozen_pools": 0, "tollgate_config_refused": 0, "tollgate_ledger_reachable": 1,
              "tollgate_ready": 1}
    found = [f"{name} is {seen.get(name)}" for name, value in wanted.items() if seen.get(name) != value]
    for name, value in seen.items():
        if name.startswith("tollgate_endpoint_factor") and value < FALLEN or name.startswith("tollgate_endpoint_refused") and value:
            found.append(f"{name} is {value}")
    return found


def table(rows):
    print()
    for at, row in enumerate([HEAD, *rows]):
        print("| " + " | ".join(row) + " |")
        if at == 0:
            print("|" + " --- |" * len(HEAD))


async def main(args):
    folder = tempfile.mkdtemp(prefix="gameday-")
    os.chmod(folder, 0o755)
    fleet = Fleet(args.bin, folder)
    try:
        await fleet.start()
        prometheus = Prometheus(fleet)
        if prometheus.is_there:
            await fleet.until("Prometheus", lambda: "Healthy" in get(f"{prometheus.url}/-/healthy"))
        load = Load(fleet, args.rate)
        day = Day(fleet, prometheus, load, args.seconds)
        print("Two nodes, a Redis, a Postgres, four upstreams in three regions"
              + (", Prometheus." if prometheus.is_there else "; no Prometheus: no alerts are looked at."), flush=True)
        # Everybody shows how fast it is: limits that are learnt need fifty answers.
        for _ in range(60):
            lessons = [call(fleet.ports[node], [name]) for node in fleet.nodes for name in MOCKS]
            for first, error in await asyncio.gather(*lessons):
                if error:
                    raise SystemExit(f"gameday: a healthy fleet answers: {error}")
        loading = asyncio.create_task(load.run())
        calm = day.act("nothing is wrong")
        calm.lasts = min(args.seconds, 10)

        async def nothing():
            pass
        await day.play(calm, nothing)
        for name in args.acts.split(","):
            await getattr(day, name)()
        loading.cancel()
        await asyncio.gather(loading, *list(load.calls), return_exceptions=True)
        table(day.rows)
        await day.books()
        for verb in (["failovers", "--since", "1h", "--by", "reason"], ["slo"]):
            if fleet.has_verb(verb[0]):
                print(f"\n$ tollgate {' '.join(verb)}\n{fleet.tollgate(*verb).stdout}")
        for what in day.broken:
            print(f"gameday: a promise is broken: {what}", file=sys.stderr)
        return 1 if day.broken else 0
    finally:
        fleet.end_all()
        if args.keep:
            print(f"logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=20, help="calls a second")
    parser.add_argument("--seconds", type=float, default=20, help="how long an outage lasts")
    parser.add_argument("--acts", default="region,death,throttle,two,redis,postgres,deploy")
    parser.add_argument("--bin", default=os.environ.get("TOLLGATE_BIN"), help="the binary")
    parser.add_argument("--keep", action="store_true", help="keeps the folder with the logs")
    sys.exit(asyncio.run(main(parser.parse_args())))
