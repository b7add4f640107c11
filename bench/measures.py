"""What is measured. Every function asks one peer once, and keeps what came of it in the rig."""

import os
import resource
import shutil
import signal
import sqlite3
import statistics
import subprocess
import time
from hashlib import sha256
from pathlib import Path

from peers import WATCH_MS, Running
from processes import BIN, LOAD_CPU, PROXY_CPU, WORK, Proc, cpu_secs, free_ports, pinned, reset_peak, status_mib

# The build of the gateway that counts its allocations (`--features count-allocations`).
COUNTING = Path(os.environ.get("TOLLGATE_COUNTING_BIN", ""))
# To an upstream and back; one way is half of it.
ROUND_TRIP_MS = 20


def per(threads, count):
    """Microseconds per request, by thread, where it is at least half of one."""
    out = {k: round(1e6 * v / max(1, count), 1) for k, v in threads.items()}
    return {k: v for k, v in sorted(out.items(), key=lambda kv: -kv[1]) if v >= 0.5}


def small(rig, r):
    """1 KB request, 1 KB answer, 64 connections, as fast as it goes."""
    rig.set_mock("size=700")
    rig.load("closed", r, conns=8, secs=0.3)
    got = rig.load("closed", r, conns=64, secs=rig.args.secs)
    rig.keep(r, "small", cpu_us=1e6 * got["cpu"] / max(1, got["ok"]), rps=got["per_sec"], failed=got["failed"], util=got["util"],
             mock_util=got["mock_util"], machine=got["machine"], threads=per(got["threads"], got["ok"]))


def rate(rig, r):
    """The same at 500 a second: added latency."""
    rig.set_mock("size=700")
    got = rig.load("rate", r, rate=500, secs=rig.args.secs, conns=64)
    l = got["latency_us"] or {}
    rig.keep(r, "rate500", p50=l.get("p50"), p99=l.get("p99"), failed=got["failed"], cpu_us=1e6 * got["cpu"] / max(1, got["ok"]),
             machine=got["machine"], threads=per(got["threads"], got["ok"]))


def stream(rig, r):
    """Streams of 100 chunks, one each 20 ms."""
    for n in (20, 200):
        rig.set_mock(f"size=40,gap=20,chunks={rig.args.chunks}")
        got = rig.load("sse", r, streams=n, ramp_ms=1000, limit_secs=40)
        d, t = got["chunk_us"] or {}, got["ttfb_us"] or {}
        chunks = d.get("n", 0)
        rig.keep(r, f"stream{n}", p50=d.get("p50"), p99=d.get("p99"), ttfb=t.get("p50"), cpu_us=1e6 * got["cpu"] / max(1, chunks),
                 ok=got["ok"], failed=got["failed"], machine=got["machine"], threads=per(got["threads"], chunks))


def memory(rig, r):
    """A thousand slow streams at once, on a fresh process."""
    if r.peer.cmd is None:
        return
    n = rig.args.open_streams
    fresh = Running(rig, r.peer)
    try:
        rig.set_mock("size=40,gap=1000,chunks=4")
        rig.load("sse", fresh, streams=4, ramp_ms=10, limit_secs=20)
        got = rig.load("sse", fresh, streams=n, ramp_ms=2000, limit_secs=60)
    finally:
        fresh.stop()
    rig.keep(r, "memory", kib=1024 * (got["rss"]["peak"] - got["rss"]["before"]) / n, ok=got["ok"], failed=got["failed"], rss=got["rss"]["peak"])


def body(rig, r):
    """Large request bodies."""
    rig.set_mock("size=700")
    for size, count in ((1_000_000, 24), (10_000_000, 8)):
        got = rig.load("seq", r, count=count, conns=1, body_bytes=size)
        rig.keep(r, f"body{size // 1_000_000}", cpu_ms=1e3 * got["cpu"] / count, p50_ms=(got["latency_us"] or {}).get("p50", 0) / 1e3,
                 ok=got["ok"], failed=got["failed"], machine=got["machine"])
    if r.peer.cmd is None:
        return
    fresh = Running(rig, r.peer)
    try:
        before = status_mib(fresh.pids, "VmRSS")
        reset_peak(fresh.pids)
        got = rig.load("seq", fresh, count=8, conns=4, body_bytes=10_000_000)
        rig.keep(r, "bodies", peak=(status_mib(fresh.pids, "VmHWM") - before) * 2**20 / 40_000_000, failed=got["failed"])
    finally:
        fresh.stop()


FAULTS = ["none", "503", "429", "truncate", "sse-error", "hang", "stall"]


def failover(rig, r):
    """The first upstream fails, the second is good; every try has two endpoints that nobody has asked before."""
    if not r.peer.is_ours:
        return
    tries = rig.args.tries
    names = [f"{fault}-{i}" for fault in FAULTS for i in range(tries)]
    providers, models = [], []
    for name in names:
        watch = f"first_byte: {WATCH_MS}ms, first_event: {WATCH_MS}ms"
        providers.append(f'  bad-{name}: {{ dialect: openai, base_url: "http://127.0.0.1:{rig.bad}/v1", {watch} }}')
        providers.append(f'  good-{name}: {{ dialect: openai, base_url: "http://127.0.0.1:{rig.good}/v1" }}')
        routes = f"[{{ provider: bad-{name}, weight: 100 }}, {{ provider: good-{name}, weight: 50 }}]"
        models.append(f'  {name}: {{ price: {{ input: "1", output: "1" }}, limits: {{ context: 100000, output: 4096 }}, routes: {routes} }}')
    fresh = Running(rig, r.peer, "\n".join(providers), "\n".join(models))
    try:
        for fault in FAULTS:
            spec = {"truncate": "truncate,after=0", "stall": "stall,after=0"}.get(fault, fault)
            rig.set_mock("chunks=5,gap=5,size=40", rig.good)
            rig.set_mock(f"chunks=5,gap=5,size=40,fault={spec}", rig.bad)
            rig.set_mock("size=700")
            got = rig.load("seq", fresh, count=tries, conns=1, stream=1, limit_secs=4, models_each=f"{fault}-", pause_ms=20)
            good = [x["first_ms"] for x in got["rows"] if not x["error"]]
            rig.keep(r, f"fail.{fault}", ok=len(good), of=tries, ms=statistics.median(good) if good else None,
                     worst=max(good) if good else None, saw="; ".join(sorted({x["error"] for x in got["rows"] if x["error"]})) or None,
                     cancelled=rig.mock_counts(rig.bad)["cancelled"])
    finally:
        fresh.stop()


def leave(rig, r):
    """Twenty callers leave in the middle of their streams: how many upstream requests end within 100 ms?"""
    rig.set_mock("size=40,gap=50,chunks=100")
    rig.load("sse", r, streams=20, ramp_ms=100, limit_secs=1)
    time.sleep(max(0.0, 0.1 - 0.02))  # the last of them left when the load generator did
    seen = rig.mock_counts()["cancelled"]
    rig.keep(r, "leave", ended=seen, of=20)
    time.sleep(6 if seen < 20 else 0)


def start(rig, r):
    """A start, and what an idle process holds. A node of a fleet has been there before, as nodes have."""
    if r.peer.cmd is None:
        return
    rig.set_mock("size=700")
    fresh = Running(rig, r.peer, prepare=(lambda _: None) if r.peer.kind == "fleet" else None)
    try:
        time.sleep(1.5)
        before, began = cpu_secs(fresh.pids), time.monotonic()
        time.sleep(2)
        rig.keep(r, "start", secs=fresh.start_secs, rss=status_mib(fresh.pids, "VmRSS"),
                 idle_cpu_pct=100 * (cpu_secs(fresh.pids) - before) / (time.monotonic() - began))
    finally:
        fresh.stop()


def more_keys(count):
    """Keys `sk-bench-0` and so on of the one account, straight into the ledger of a stopped gateway."""
    def prepare(running):
        file = next(p for p in (running.dir / "data").rglob("*") if p.is_file() and p.read_bytes()[:15] == b"SQLite format 3")
        ledger = sqlite3.connect(file)
        ((account,),) = ledger.execute("SELECT id FROM account WHERE name = 'bench'").fetchall()
        (settings,) = ledger.execute("SELECT settings FROM api_key LIMIT 1").fetchone()
        ledger.executemany("INSERT INTO api_key (digest, account, hint, settings, created_ms) VALUES (?, ?, 'bench', ?, 0)",
                           ((sha256(f"sk-bench-{i}".encode()).digest(), account, settings) for i in range(count)))
        ledger.commit()
        ledger.close()
    return prepare


def more_accounts(count):
    """The block of accounts `a0` and so on, with a key `sk-bench-0` and so on and the limits of `bench` each."""
    limits = 'limits: { rpm: 100000000, tpm: 100000000000, budget_day: "900000", budget_month: "900000" }, model_limits: { gpt-4o-mini: { rpm: 100000000 } }'
    key = "limits: { rpm: 100000000, tpm: 100000000000, concurrency: 100000 }"
    return "\n".join(f'    a{i}: {{ balance: "1000000", keys: [ {{ key: sk-bench-{i}, {key} }} ], {limits} }}' for i in range(count))


def pair(rig, r, measure, one, many, **more):
    """CPU of a small request on two processes that take turns: what does `many` cost over `one`?"""
    rig.set_mock("size=700")
    costs = ([], [])
    for turn in range(rig.args.turns):
        for into, (running, opts) in list(zip(costs, (one, many)))[:: 1 if turn % 2 == 0 else -1]:
            got = rig.load("closed", running, conns=64, secs=rig.args.secs / 2, **opts)
            if got["failed"] > got["ok"] / 100:
                raise RuntimeError(f"{measure}: {got['errors']}")
            into.append(1e6 * got["cpu"] / max(1, got["ok"]))
    a, b = map(statistics.median, costs)
    rig.keep(r, measure, one=a, many=b, ratio=b / a, **more)


def hot(rig, r):
    """64 callers on one account, and spread over 1,000: throughput of the one over that of the other, by CPU."""
    if not r.peer.is_ours:
        return
    fresh = Running(rig, r.peer, accounts=more_accounts(1000))
    try:
        # The first call of an account in a fleet waits for its lease.
        rig.load("closed", fresh, conns=64, secs=rig.args.secs, keys=1000)
        pair(rig, r, "hot", (fresh, dict(keys=1000)), (fresh, {}))
    finally:
        fresh.stop()


def growth(rig, r):
    """The same request beside more endpoints, keys and open holds."""
    if not r.peer.is_ours:
        return
    providers = "\n".join(f'  p{i}: {{ dialect: openai, base_url: "http://127.0.0.1:{rig.up}/v1", credential: sk-up }}' for i in range(rig.args.grow_routes))
    routes = ", ".join(f"{{ provider: p{i} }}" for i in range(rig.args.grow_routes))
    models = f'  many: {{ price: {{ input: "0.15", output: "0.60" }}, limits: {{ context: 4000000, output: 16384 }}, routes: [{routes}] }}'
    with_routes = Running(rig, r.peer, providers, models)
    try:
        pair(rig, r, "grow.endpoints", (with_routes, {}), (with_routes, dict(model="many")), routes=rig.args.grow_routes)
    finally:
        with_routes.stop()
    if r.peer.kind == "fleet":
        return
    few, many = Running(rig, r.peer), Running(rig, r.peer, prepare=more_keys(rig.args.grow_keys))
    try:
        pair(rig, r, "grow.keys", (few, {}), (many, dict(keys=rig.args.grow_keys)), keys=rig.args.grow_keys)
    finally:
        many.stop()
        few.stop()
    # A provider of their own, with all the time there is: opening so many at once must not look like an outage.
    slow = "first_byte: 300s, first_event: 300s, connect: 30s, idle: 300s"
    providers = f'  slow: {{ dialect: openai, base_url: "http://127.0.0.1:{rig.good}/v1", {slow} }}'
    models = '  slow: { price: { input: "1", output: "1" }, limits: { context: 100000, output: 4096 }, routes: [ { provider: slow } ] }'
    few, many = Running(rig, r.peer), Running(rig, r.peer, providers, models)
    # The gateway and the mock have two descriptors for each.
    n = min(rig.args.grow_holds, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1000) // 2)
    rig.set_mock("size=10,gap=250000,chunks=2", rig.good)
    opener = subprocess.Popen(rig.load_cmd("sse", many, streams=n, ramp_ms=2 * n, limit_secs=200, model="slow"), stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, preexec_fn=pinned(LOAD_CPU, rig.args, 2), start_new_session=True)
    try:
        until = time.monotonic() + 60
        while rig.mock_counts(rig.good)["requests"] < n and time.monotonic() < until:
            time.sleep(0.2)
        time.sleep(1)
        pair(rig, r, "grow.holds", (few, {}), (many, {}), holds=n)
    finally:
        opener.kill()
        opener.wait()
        many.stop()
        few.stop()


def failovers_far(rig, r):
    """From a failure that the gateway has seen to the next attempt's request on its way, over TLS to upstreams a round trip
    away: when the second one's mock has the request, less when the first one's mock failed, less that round trip."""
    if not r.peer.is_ours:
        return
    bad, good = free_ports(2)
    relays = [Proc([BIN / "relay", near, far, ROUND_TRIP_MS // 2], f"relay-{near}", LOAD_CPU, rig.args)
              for near, far in ((bad, rig.bad_tls), (good, rig.good_tls))]
    tries = rig.args.far_tries
    providers, models = [], []
    for i in range(tries):
        for name, port in (("bad", bad), ("good", good)):
            providers.append(f'  {name}-{i}: {{ dialect: openai, base_url: "https://localhost:{port}/v1", http: h2, ca_file: "{rig.certificates}/ca.pem" }}')
        routes = f"[{{ provider: bad-{i}, weight: 100 }}, {{ provider: good-{i}, weight: 50 }}]"
        models.append(f'  far-{i}: {{ price: {{ input: "1", output: "1" }}, limits: {{ context: 100000, output: 4096 }}, routes: {routes} }}')
    fresh = None
    try:
        fresh = Running(rig, r.peer, "\n".join(providers), "\n".join(models))
        rig.set_mock("size=700")
        rig.set_mock("size=40", rig.good)
        # Every model is in use before anything fails.
        rig.set_mock("size=40", rig.bad)
        rig.load("seq", fresh, count=tries, conns=1, limit_secs=4, models_each="far-", pause_ms=1)
        time.sleep(2)
        rig.set_mock("size=40", rig.good)
        rig.set_mock("size=40,fault=503", rig.bad)
        got = rig.load("seq", fresh, count=tries, conns=1, limit_secs=4, models_each="far-", pause_ms=5)
        failed, came = rig.mock_counts(rig.bad, "/times")["faulted"], rig.mock_counts(rig.good, "/times")["came"]
    finally:
        for it in [fresh, *relays]:
            if it:
                it.stop()
    if len(failed) != len(came) or got["failed"]:
        raise RuntimeError(f"far: {len(failed)} failures and {len(came)} next attempts; {got['errors']}")
    took = sorted((after - before) / 1e6 - ROUND_TRIP_MS for before, after in zip(failed, came))
    rig.keep(r, "far", p50=statistics.median(took), p99=took[int(0.99 * (len(took) - 1))], worst=took[-1], tries=len(took))


def secure(rig, r):
    """The small request over HTTP/2 and TLS, from the caller and to the upstream; 64 callers on eight connections."""
    if r.peer.kind not in ("tollgate", "fleet") and r.peer.name not in ("direct", "floor"):
        return
    rig.set_mock("size=700")
    if r not in rig.secure:
        rig.secure[r] = Running(rig, r.peer, tls=True)
    running = rig.secure[r]
    rig.load("closed", running, conns=64, secs=0.3)
    got = rig.load("closed", running, conns=64, secs=rig.args.secs)
    if got["failed"] > got["ok"] / 100:
        raise RuntimeError(f"tls: {got['errors']}")
    rig.keep(r, "tls", cpu_us=1e6 * got["cpu"] / max(1, got["ok"]), rps=got["per_sec"], util=got["util"], mock_util=got["mock_util"],
             machine=got["machine"], threads=per(got["threads"], got["ok"]))


def allocations(rig, r):
    """How often a small request and a chunk ask the allocator for memory, in a build that counts."""
    if not r.peer.is_ours or rig.round > 0:
        return
    if not COUNTING.is_file():
        raise RuntimeError("TOLLGATE_COUNTING_BIN names no build that counts: scripts/bench makes one")
    fresh = Running(rig, r.peer, binary=COUNTING)

    def counted(mode, **opts):
        names = ("tollgate_allocations_total", "tollgate_allocated_bytes_total")
        before = [fresh.metric(name) for name in names]
        got = rig.load(mode, fresh, **opts)
        return got, [fresh.metric(name) - was for name, was in zip(names, before)]

    try:
        rig.set_mock("size=700")
        rig.load("closed", fresh, conns=8, secs=0.5)
        got, (calls, size) = counted("closed", conns=8, secs=1)
        ok = max(1, got["ok"])
        # What streams of a few chunks cost is what streams of many cost less their chunks.
        few, many = 10, 210
        costs = []
        for chunks in (few, many):
            rig.set_mock(f"size=40,gap=2,chunks={chunks}")
            got, (streamed, _) = counted("sse", streams=20, ramp_ms=100, limit_secs=20)
            costs.append(streamed / max(1, got["ok"]))
        rig.keep(r, "allocations", request=calls / ok, request_bytes=size / ok, chunk=(costs[1] - costs[0]) / (many - few))
    finally:
        fresh.stop()


def counts(rig, r):
    """What a small request is made of: system calls, bytes of the journal, commands to Redis."""
    if r.peer.cmd is None or rig.round > 0:
        return
    rig.set_mock("size=700")
    written = redis = None
    if r.peer.is_ours:
        journal = lambda: sum(p.stat().st_size for p in (r.dir / "data").rglob("*.log"))
        asked = rig.servers.commands if r.peer.kind == "fleet" else lambda: 0
        # What nodes say by the clock, all that are up: calls or not.
        commands, began = asked(), time.monotonic()
        time.sleep(4 if r.peer.kind == "fleet" else 0)
        idle = (asked() - commands) / max(1e-9, time.monotonic() - began)
        # Shorter than a segment of the journal lasts: what is booked is deleted.
        for _ in range(3):
            before = journal()
            got = rig.load("closed", r, conns=8, secs=0.3)
            written = (journal() - before) / max(1, got["ok"])
            if written > 0:
                break
        commands, began = asked(), time.monotonic()
        got = rig.load("closed", r, conns=32, secs=2)
        time.sleep(2 if r.peer.kind == "fleet" else 0)
        by_clock = idle * (time.monotonic() - began)
        redis = (asked() - commands - by_clock) / max(1, got["ok"]) if r.peer.kind == "fleet" else None
    calls = None
    if shutil.which("strace"):
        trace = WORK / f"strace-{r.peer.name}.txt"
        tracer = subprocess.Popen(["strace", "-f", "-c", "-U", "calls,name", "-o", str(trace)] + [x for p in r.pids for x in ("-p", str(p))],
                                  stderr=subprocess.DEVNULL)
        time.sleep(1)
        got = rig.load("closed", r, conns=64, secs=2)
        tracer.send_signal(signal.SIGINT)
        tracer.wait(10)
        rows = [l.split() for l in trace.read_text().splitlines()]
        found = {row[1]: int(row[0]) / max(1, got["ok"]) for row in rows if len(row) == 2 and row[0].isdigit() and row[1] != "total"}
        calls = {k: round(v, 2) for k, v in sorted(found.items(), key=lambda kv: -kv[1]) if v >= 0.02}
    rig.keep(r, "counts", journal_bytes=written, redis=redis, syscalls=sum(calls.values()) if calls else None, calls=calls)


def redis_trip(rig, r):
    """One round trip to Redis with nothing else: what a node's added p50 may be above the floor's."""
    if r.peer.kind != "fleet" or rig.round > 0:
        return
    rig.keep(r, "redis_trip", us=rig.servers.round_trip_us(PROXY_CPU))


MEASURES = dict(small=small, rate=rate, stream=stream, tls=secure, memory=memory, body=body, failover=failover, far=failovers_far, leave=leave,
                start=start, hot=hot, growth=growth, counts=counts, allocations=allocations, trip=redis_trip)
ROUNDS = dict(memory=2, failover=1, far=1, leave=2, start=3, hot=1, growth=1, counts=1, allocations=1, trip=1, body=3)
