#!/usr/bin/env python3
"""Measures gateways side by side in front of one mock upstream, over loopback. Never asserts.

Everything is bounded in count and time. The proxies share one core, the mock and the load generator
another. Peers stay up together and take turns within each round, so that other work on the machine hits
all of them. Ratios to bare Pingora, taken within a round, are what to read; absolute times are the
machine's. `scripts/bench` builds what this needs.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from hashlib import sha256
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORK = Path(os.environ.get("BENCH_WORK", "/tmp/tollgate-bench"))
BIN = Path(os.environ.get("BENCH_BIN", HERE.parent / "target/bench/release"))
TOLLGATE = os.environ.get("TOLLGATE_BIN", str(HERE.parent / "target/release/tollgate"))
PROXY_CPU = int(os.environ.get("BENCH_PROXY_CPU", "0"))
LOAD_CPU = int(os.environ.get("BENCH_LOAD_CPU", "1"))
WATCH_MS = 500
PAGE = os.sysconf("SC_PAGE_SIZE")
TICK = os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- processes

def free_ports(count):
    """Ports of loopback that nobody listens on."""
    held = [socket.socket() for _ in range(count)]
    for s in held:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports


def tree(pid):
    out, todo = [], [pid]
    while todo:
        p = todo.pop()
        out.append(p)
        for t in Path(f"/proc/{p}/task").glob("*"):
            try:
                todo += [int(c) for c in (t / "children").read_text().split()]
            except OSError:
                pass
    return out


def cpu_secs(pids):
    """User and system time. The kernel's per-process CPU clock (the id is built as clock_getcpuclockid
    does) gives what /proc/PID/stat gives, without its 10 ms steps."""
    total = 0.0
    for p in pids:
        try:
            total += time.clock_gettime((~p << 3) | 2)
        except OSError:
            pass
    return total


def by_thread(pids):
    """Seconds on a core, by the thread's name."""
    out = {}
    for p in pids:
        for t in Path(f"/proc/{p}/task").glob("*"):
            try:
                name, ns = (t / "comm").read_text().strip(), int((t / "schedstat").read_text().split()[0])
                out[name] = out.get(name, 0) + ns / 1e9
            except (OSError, ValueError):
                pass
    return out


def status_mib(pids, field):
    total = 0
    for p in pids:
        try:
            line = next(l for l in Path(f"/proc/{p}/status").read_text().splitlines() if l.startswith(field))
            total += int(line.split()[1])
        except (OSError, StopIteration):
            pass
    return total / 1024


def reset_peak(pids):
    for p in pids:
        try:
            Path(f"/proc/{p}/clear_refs").write_text("5")
        except OSError:
            pass


def machine_busy():
    f = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(f[:3]) + sum(f[5:8])) / TICK


def pinned(cpu, args, prio=1):
    """For a child in a session of its own: its core, and real-time scheduling (the load generator above the
    mock, so that it reads a chunk when it comes) or the niceness of the process and its scheduling group."""
    def setup():
        os.sched_setaffinity(0, {cpu})
        if args.rt:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(prio))
        elif args.nice:
            nice = args.nice
            os.setpriority(os.PRIO_PROCESS, 0, nice)
            try:
                Path("/proc/self/autogroup").write_text(str(nice))
            except OSError:
                pass
    return setup


class Proc:
    def __init__(self, cmd, name, cpu, args, env=None):
        (WORK / "logs").mkdir(parents=True, exist_ok=True)
        log = open(WORK / "logs" / f"{name}.log", "wb")
        self.popen = subprocess.Popen([str(c) for c in cmd], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                      env=os.environ | (env or {}), preexec_fn=pinned(cpu, args), start_new_session=True)
        log.close()

    @property
    def pids(self):
        return tree(self.popen.pid)

    def stop(self):
        for sig, wait in ((signal.SIGINT, 5), (signal.SIGTERM, 3), (signal.SIGKILL, 5)):
            pids = self.pids
            for p in pids:
                try:
                    os.kill(p, sig)
                except OSError:
                    pass
            try:
                self.popen.wait(wait)
                return
            except subprocess.TimeoutExpired:
                pass


# ---------------------------------------------------------------- peers

class Peer:
    """A way to the mock: a process of its own, or none (`direct`)."""

    def __init__(self, name, cmd, conf=None, kind="proxy"):
        self.name, self.cmd, self.conf, self.kind = name, cmd, conf, kind


def peers(args):
    out = [Peer("direct", None), Peer("floor", [BIN / "floor", "@PORT@", "@UP@", "1"])]
    for name, cmd, conf in (("nginx", ["nginx", "-c", "@CONF@", "-e", "@DIR@/error.log", "-p", "@DIR@"], "nginx.conf"),
                            ("haproxy", ["haproxy", "-db", "-f", "@CONF@"], "haproxy.cfg")):
        found = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")
        if found:
            out.append(Peer(name, [found] + cmd[1:], conf))
    ours = [("tollgate", TOLLGATE)] + [tuple(also.split("=", 1)) for also in args.also]
    for name, binary in ours:
        out.append(Peer(name, [binary, "--config", "@CONF@", "serve"], "tollgate.yaml", "tollgate"))
    return [p for p in out if not args.peers or p.name in args.peers.split(",")]


class Running:
    """A peer that is up, on ports of its own."""

    def __init__(self, rig, peer, providers="", models="", prepare=None, cpu=PROXY_CPU):
        self.peer, self.rig = peer, rig
        if peer.cmd is None:
            self.port, self.proc, self.start_secs = rig.up, None, 0
            return
        self.port, fo, x1 = free_ports(3)
        self.dir = WORK / "run" / f"{peer.name}-{self.port}"
        shutil.rmtree(self.dir, ignore_errors=True)
        self.dir.mkdir(parents=True)
        values = dict(PORT=self.port, FO=fo, X1=x1, UP=rig.up, BAD=rig.bad, GOOD=rig.good, WATCH=WATCH_MS,
                      DIR=self.dir, PROVIDERS=providers, MODELS=models)

        def fill(text):
            for k, v in values.items():
                text = text.replace(f"@{k}@", str(v))
            return text

        if peer.conf:
            conf = self.dir / peer.conf
            conf.write_text(fill((HERE / "conf" / peer.conf).read_text()))
            values["CONF"] = conf
        cmd = [fill(str(c)) for c in peer.cmd]
        if prepare:
            self.launch(cmd, cpu)
            self.proc.stop()
            prepare(self.dir / "data")
        self.launch(cmd, cpu)

    def launch(self, cmd, cpu):
        began = time.monotonic()
        self.proc = Proc(cmd, self.peer.name, cpu, self.rig.args)
        while time.monotonic() - began < 60:
            if self.proc.popen.poll() is not None:
                break
            if serves(self.port):
                self.start_secs = time.monotonic() - began
                return
            time.sleep(0.002)
        self.proc.stop()
        raise RuntimeError(f"{self.peer.name} did not serve; see {WORK}/logs/{self.peer.name}.log")

    @property
    def pids(self):
        return self.proc.pids if self.proc else []

    def stop(self):
        if self.proc:
            self.proc.stop()
            shutil.rmtree(self.dir, ignore_errors=True)


def serves(port):
    body = json.dumps({"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer sk-bench"}
    try:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=5) as r:
            return r.status == 200 and b"t=" in r.read()
    except (OSError, ValueError):
        return False


# ---------------------------------------------------------------- the rig

class Rig:
    def __init__(self, args):
        self.args, self.samples, self.round = args, [], 0
        self.up, self.bad, self.good = free_ports(3)
        self.mock = Proc([BIN / "mock", self.up, self.bad, self.good], "mock", LOAD_CPU, args)
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", self.up), 1).close()
                break
            except OSError:
                time.sleep(0.02)

    def set_mock(self, spec, port=None):
        url = f"http://127.0.0.1:{port or self.up}/_mock?{spec}"
        urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5).read()

    def mock_counts(self, port=None):
        return json.load(urllib.request.urlopen(f"http://127.0.0.1:{port or self.up}/_mock", timeout=5))

    def load_cmd(self, mode, r, **opts):
        cmd = [str(BIN / "load"), mode, "--port", str(r.port)]
        for k, v in opts.items():
            cmd += ["--" + k.replace("_", "-"), str(v)]
        return cmd

    def load(self, mode, r, **opts):
        """Runs the load generator against a peer; adds what the proxy spent on it."""
        pids = r.pids
        peak, stop = [status_mib(pids, "VmRSS")], threading.Event()

        def watch():
            while not stop.wait(0.1):
                peak.append(status_mib(pids, "VmRSS"))

        watcher = threading.Thread(target=watch)
        before = (by_thread(pids), machine_busy(), cpu_secs(pids), cpu_secs(self.mock.pids), time.monotonic())
        watcher.start()
        try:
            done = subprocess.run(self.load_cmd(mode, r, **opts), capture_output=True, text=True, timeout=150,
                                  preexec_fn=pinned(LOAD_CPU, self.args, 2), start_new_session=True)
        finally:
            stop.set()
            watcher.join()
        after = (by_thread(pids), machine_busy(), cpu_secs(pids), cpu_secs(self.mock.pids), time.monotonic())
        if done.returncode:
            raise RuntimeError(f"load: {done.stderr[-300:]}")
        out = json.loads(done.stdout)
        wall = after[4] - before[4]
        out["cpu"] = after[2] - before[2]
        out["util"] = out["cpu"] / wall
        out["mock_util"] = (after[3] - before[3]) / wall
        out["machine"] = (after[1] - before[1]) / wall
        out["threads"] = {k: v - before[0].get(k, 0) for k, v in after[0].items() if v - before[0].get(k, 0) > 1e-4}
        out["rss"] = dict(before=peak[0], peak=max(peak))
        return out

    def keep(self, r, measure, **values):
        name = r if isinstance(r, str) else r.peer.name
        self.samples.append(dict(peer=name, measure=measure, round=self.round, **values))
        shown = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items() if v is not None)
        print(f"  [{self.round}] {measure:<14} {name:<10} {shown}", flush=True)


# ---------------------------------------------------------------- measures

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
    if r.peer.kind != "tollgate":
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
    """A fresh start, and what an idle process holds."""
    if r.peer.cmd is None:
        return
    rig.set_mock("size=700")
    fresh = Running(rig, r.peer)
    try:
        time.sleep(1.5)
        before, began = cpu_secs(fresh.pids), time.monotonic()
        time.sleep(2)
        rig.keep(r, "start", secs=fresh.start_secs, rss=status_mib(fresh.pids, "VmRSS"),
                 idle_cpu_pct=100 * (cpu_secs(fresh.pids) - before) / (time.monotonic() - began))
    finally:
        fresh.stop()


def more_keys(count, accounts):
    """Keys `sk-bench-0` and so on, of so many accounts, straight into the ledger of a stopped gateway."""
    def prepare(data):
        file = next(p for p in data.rglob("*") if p.is_file() and p.read_bytes()[:15] == b"SQLite format 3")
        ledger = sqlite3.connect(file)
        first, limits = ledger.execute("SELECT id, settings FROM account WHERE name = 'bench'").fetchone()
        ids = [first]
        for i in range(accounts - 1):
            ids.append(ledger.execute("INSERT INTO account (kind, name, created_ms, settings) VALUES (1, ?, 0, ?)", (f"a{i}", limits)).lastrowid)
            ledger.execute("INSERT INTO balance (account, posted, leased) VALUES (?, 0, 0)", (ids[-1],))
            ledger.execute("INSERT INTO transfer (reference, kind, debit, credit, amount, reason, at_ms) SELECT ?, kind, debit, ?, 1000000000000, '', at_ms FROM transfer WHERE credit = ? LIMIT 1",
                           (f"bench-{i}".encode(), ids[-1], first))
            ledger.execute("UPDATE balance SET posted = 1000000000000 WHERE account = ?", (ids[-1],))
        (settings,) = ledger.execute("SELECT settings FROM api_key LIMIT 1").fetchone()
        ledger.executemany("INSERT INTO api_key (digest, account, hint, settings, created_ms) VALUES (?, ?, 'bench', ?, 0)",
                           ((sha256(f"sk-bench-{i}".encode()).digest(), ids[i % accounts], settings) for i in range(count)))
        ledger.commit()
        ledger.close()
    return prepare


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
    if r.peer.kind != "tollgate":
        return
    fresh = Running(rig, r.peer, prepare=more_keys(1000, 1000))
    try:
        pair(rig, r, "hot", (fresh, dict(keys=1000)), (fresh, {}))
    finally:
        fresh.stop()


def growth(rig, r):
    """The same request beside more endpoints, keys and open holds."""
    if r.peer.kind != "tollgate":
        return
    providers = "\n".join(f'  p{i}: {{ dialect: openai, base_url: "http://127.0.0.1:{rig.up}/v1", credential: sk-up }}' for i in range(200))
    routes = ", ".join(f"{{ provider: p{i} }}" for i in range(200))
    models = f'  many: {{ price: {{ input: "0.15", output: "0.60" }}, limits: {{ context: 4000000, output: 16384 }}, routes: [{routes}] }}'
    with_routes = Running(rig, r.peer, providers, models)
    try:
        pair(rig, r, "grow.endpoints", (with_routes, {}), (with_routes, dict(model="many")))
    finally:
        with_routes.stop()
    few, many = Running(rig, r.peer), Running(rig, r.peer, prepare=more_keys(rig.args.grow_keys, 1))
    try:
        pair(rig, r, "grow.keys", (few, {}), (many, dict(keys=rig.args.grow_keys)))
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


def counts(rig, r):
    """What a small request is made of: system calls, and bytes of the journal."""
    if r.peer.cmd is None or rig.round > 0:
        return
    rig.set_mock("size=700")
    written = None
    if r.peer.kind == "tollgate":
        journal = lambda: sum(p.stat().st_size for p in (r.dir / "data").rglob("*.log"))
        before = journal()
        got = rig.load("closed", r, conns=8, secs=0.5)
        written = (journal() - before) / max(1, got["ok"])
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
    rig.keep(r, "counts", journal_bytes=written, syscalls=sum(calls.values()) if calls else None, calls=calls)


MEASURES = dict(small=small, rate=rate, stream=stream, memory=memory, body=body, failover=failover, leave=leave, start=start,
                hot=hot, growth=growth, counts=counts)
ROUNDS = dict(memory=2, failover=1, leave=2, start=3, hot=1, growth=1, counts=1, body=3)


# ---------------------------------------------------------------- results

def mid(values):
    values = [v for v in values if v is not None]
    return statistics.median(values) if values else None


def say(value):
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values):
    values = [v for v in values if v is not None]
    if not values:
        return "-"
    return say(mid(values)) if len(values) == 1 else f"{say(mid(values))} ({say(min(values))}-{say(max(values))})"


class Results:
    def __init__(self, samples):
        self.at = {(s["measure"], s["peer"], s["round"]): s for s in samples}
        self.peers = list(dict.fromkeys(s["peer"] for s in samples))
        self.measures = list(dict.fromkeys(s["measure"] for s in samples))

    def values(self, measure, peer, key):
        return [s.get(key) for (m, p, _), s in self.at.items() if (m, p) == (measure, peer) and s.get(key) is not None]

    def over(self, measure, peer, key, added):
        """To the floor, within each round; of what is added to `direct`, where asked."""
        out = []
        for (m, p, n), s in self.at.items():
            floor, direct = self.at.get((measure, "floor", n)), self.at.get((measure, "direct", n))
            if (m, p) != (measure, peer) or not floor or s.get(key) is None or not floor.get(key):
                continue
            less = direct[key] if added and direct else 0
            if floor[key] > less:
                out.append((s[key] - less) / (floor[key] - less))
        return out


# measure, key, what it is, over the floor?, added to direct?, goal
GOALS = [
    ("small", "cpu_us", "CPU per small request, µs", True, False, "≤ 1.15"),
    ("rate500", "p50", "added p50 at 500/s, µs", True, True, "≤ 1.25"),
    ("rate500", "p99", "added p99 at 500/s, µs", True, True, "≤ 1.25"),
    ("stream200", "cpu_us", "CPU per chunk, 200 streams, µs", True, False, "≤ 1.1"),
    ("stream20", "p50", "added chunk delay p50, 20 streams, µs", True, True, "≤ 1.1"),
    ("stream20", "p99", "added chunk delay p99, 20 streams, µs", True, True, "≤ 1.3"),
    ("stream20", "ttfb", "added first byte, 20 streams, µs", True, True, "≤ 1.2"),
    ("memory", "kib", "memory per open stream, KiB", False, False, "≤ 32"),
    ("body1", "cpu_ms", "CPU of a 1 MB request, ms", True, False, "≤ 1.5"),
    ("body10", "cpu_ms", "CPU of a 10 MB request, ms", True, False, "≤ 1.8"),
    ("bodies", "peak", "peak memory of four 10 MB bodies, of their bytes", False, False, "≤ 1.25"),
    ("fail.none", "ms", "first byte without a failover, ms", False, False, ""),
    ("fail.503", "ms", "first byte after a 503, ms", False, False, "≤ 1.5 added"),
    ("fail.429", "ms", "first byte after a 429, ms", False, False, "≤ 1.5 added"),
    ("fail.truncate", "ms", "first byte after 200, then closed, ms", False, False, "≤ 1.5 added"),
    ("fail.sse-error", "ms", "first byte after an error as first event, ms", False, False, "≤ 1.5 added"),
    ("fail.hang", "ms", f"first byte after silence, W = {WATCH_MS}, ms", False, False, "≤ W + 5"),
    ("fail.stall", "ms", f"first byte after 200 and silence, W = {WATCH_MS}, ms", False, False, "≤ W + 5"),
    ("leave", "ended", "of 20 left streams, ended upstream within 100 ms", False, False, "20"),
    ("hot", "ratio", "CPU per request on one account over 1,000 accounts", False, False, "≤ 1.11"),
    ("grow.endpoints", "ratio", "CPU per request, 200 routes over 1", False, False, "≤ 1.1"),
    ("grow.keys", "ratio", "CPU per request, many keys over 1", False, False, "≤ 1.1"),
    ("grow.holds", "ratio", "CPU per request, many open holds over none", False, False, "≤ 1.1"),
    ("start", "secs", "start to first served request, s", False, False, "≤ 0.1"),
    ("start", "rss", "idle memory, MiB", False, False, "≤ 20"),
    ("counts", "syscalls", "system calls per small request", False, False, ""),
    ("counts", "journal_bytes", "journal bytes per small request", False, False, ""),
]


def report(samples):
    """Markdown: median (min-max) over the rounds."""
    results = Results(samples)
    ours = [p for p in results.peers if p not in ("direct", "floor", "nginx", "haproxy")]
    out = ["| measure | floor | " + " | ".join(f"{p} | × floor" for p in ours) + " | goal |", "|---|---|" + "---|---|" * len(ours) + "---|"]
    for measure, key, what, over, added, goal in GOALS:
        if measure not in results.measures:
            continue
        direct = mid(results.values(measure, "direct", key)) if added else 0
        shown = lambda p: spread([v - (direct or 0) for v in results.values(measure, p, key)])
        row = [what, shown("floor")]
        for p in ours:
            row += [shown(p), spread(results.over(measure, p, key, added)) if over else ""]
        out.append("| " + " | ".join(row + [goal]) + " |")
    others = [p for p in results.peers if p in ("nginx", "haproxy")]
    if others:
        out += ["", "| measure, × floor | " + " | ".join(others) + " |", "|---|" + "---|" * len(others)]
        for measure, key, what, over, added, _ in GOALS:
            if measure in results.measures and over:
                out.append(f"| {what} | " + " | ".join(spread(results.over(measure, p, key, added)) for p in others) + " |")
    tries = [(m, p, s) for (m, p, _), s in results.at.items() if m.startswith("fail.")]
    if tries:
        out += ["", "Failovers that ended in a whole, good answer: " + "; ".join(f"{m[5:]} {s['ok']} of {s['of']} (worst {say(s['worst'])} ms)" for m, p, s in tries if p == ours[0]) + "."]
    for p in ours:
        threads = [s["threads"] for (m, q, _), s in results.at.items() if (m, q) == ("small", p)]
        if threads:
            names = sorted({n for t in threads for n in t})
            out += ["", f"{p}: CPU per small request by thread, µs: " + ", ".join(f"{n} {say(mid([t.get(n, 0) for t in threads]))}" for n in names) + "."]
        for (m, q, _), s in results.at.items():
            if (m, q) == ("counts", p) and s.get("calls"):
                out += ["", f"{p}: system calls per small request at saturation: " + ", ".join(f"{k} {v}" for k, v in s["calls"].items()) + "."]
    return "\n".join(out)


def conditions(samples, began):
    cpu = next((l.split(":", 1)[1].strip() for l in Path("/proc/cpuinfo").read_text().splitlines() if l.startswith("model name")), "?")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout.strip()
    busy = [s["machine"] for s in samples if s.get("machine") is not None]
    return (f"{began}, commit {commit}. {os.cpu_count()} cores of {cpu}, Linux {platform.release()}; cores busy while measuring, this run included: "
            f"{spread(busy)}; load average at its end {os.getloadavg()[0]:.1f}.")


def keep_in_docs(text):
    file = HERE.parent / "docs/performance.md"
    head, rest = file.read_text().split("<!-- results -->\n", 1)
    tail = rest.split("<!-- end of results -->", 1)[1]
    file.write_text(f"{head}<!-- results -->\n\n{text}\n\n<!-- end of results -->{tail}")


def isolate():
    """Starts over in a network namespace with nothing but loopback, where that can be had."""
    if os.geteuid() == 0 and not os.environ.get("BENCH_ISOLATED") and shutil.which("unshare") and shutil.which("ip"):
        os.environ["BENCH_ISOLATED"] = "1"
        inner = 'ip link set lo up && exec "$@"'
        os.execvp("unshare", ["unshare", "-n", "sh", "-c", inner, "sh", sys.executable, *sys.argv])


def options():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--quick", action="store_true", help="two short rounds")
    ap.add_argument("--only", default=",".join(MEASURES), help=f"comma list of: {', '.join(MEASURES)}")
    ap.add_argument("--peers", default="", help="comma list; default: all that are there")
    ap.add_argument("--also", action="append", default=[], help="NAME=BINARY: another build of tollgate, for before and after")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--nice", type=int, default=0, help="niceness of proxies, mock and load")
    ap.add_argument("--rt", action="store_true", help="real-time scheduling: tails that mean something on a busy machine; only for rate, stream, failover")
    ap.add_argument("--keep", action="store_true", help="write the tables into docs/performance.md")
    args = ap.parse_args()
    args.secs, args.chunks, args.open_streams, args.tries, args.turns = 3, 100, 1000, 12, 5
    args.grow_keys, args.grow_holds = 100_000, 10_000
    if args.quick:
        args.rounds = min(args.rounds, 2)
        args.secs, args.chunks, args.open_streams, args.tries, args.turns = 1, 50, 300, 3, 2
        args.grow_keys, args.grow_holds = 10_000, 1_000
    unknown = set(args.only.split(",")) - set(MEASURES)
    if unknown:
        ap.error(f"no such measure: {', '.join(sorted(unknown))}")
    return args


def main():
    args = options()
    isolate()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(200_000, limit),) * 2)
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    rig, live = Rig(args), []
    try:
        for p in peers(args):
            try:
                live.append(Running(rig, p))
            except (RuntimeError, OSError) as e:
                print(f"left out: {e}", flush=True)
        for measure in args.only.split(","):
            for rig.round in range(min(args.rounds, ROUNDS.get(measure, args.rounds))):
                turn = rig.round % max(1, len(live))
                for r in live[turn:] + live[:turn]:
                    try:
                        MEASURES[measure](rig, r)
                    except (RuntimeError, OSError, subprocess.TimeoutExpired, ValueError, KeyError, sqlite3.Error) as e:
                        print(f"  [{rig.round}] {measure} {r.peer.name} FAILED: {e}", flush=True)
                        rig.samples.append(dict(peer=r.peer.name, measure=measure + ".failed", round=rig.round, why=str(e)[:300]))
    finally:
        for r in live:
            r.stop()
        rig.mock.stop()
    samples = [s for s in rig.samples if not s["measure"].endswith(".failed")]
    told = conditions(samples, began)
    out = HERE / "results" / f"{began.replace(' UTC', '').replace(' ', 'T').replace(':', '')}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(dict(conditions=told, args=vars(args), samples=rig.samples), indent=1))
    text = f"{told}\n\n{report(samples)}"
    print(f"\n{text}\n\n{out}")
    if args.keep:
        keep_in_docs(text)


if __name__ == "__main__":
    main()
