"""The servers that a node of a fleet needs: one Redis and one Postgres for a run, on free ports of loopback.

They are not the gateway: they run on the core of the mock and the load generator. Every node of a run gets a database
and a prefix of its own, so that each is a fleet of one.
"""

import os
import pwd
import shutil
import socket
import statistics
import subprocess
import time
from pathlib import Path

from processes import LOAD_CPU, WORK, Proc, free_ports


def postgres_folder():
    """Where Debian has the newest Postgres; `None`: nowhere."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name))
    return found[-1] if found else None


def await_true(what, ready, secs=30):
    until = time.monotonic() + secs
    while not ready():
        if time.monotonic() > until:
            raise RuntimeError(f"{what} does not come up; see {WORK}/logs")
        time.sleep(0.02)


class Servers:
    """Both, as long as the run lasts."""

    def __init__(self, args):
        self.binaries, redis = postgres_folder(), shutil.which("redis-server")
        if not redis or not self.binaries:
            raise RuntimeError("redis-server and postgresql are needed for a fleet: scripts/setup fleet")
        self.folder, self.made = WORK / "run" / "servers", 0
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "redis").mkdir(parents=True)
        self.redis_port, self.postgres_port = free_ports(2)
        self.redis = Proc([redis, "--port", self.redis_port, "--bind", "127.0.0.1", "--dir", self.folder / "redis", "--save", "",
                           "--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction"], "redis", LOAD_CPU, args)
        self.postgres = self.start_postgres(args)
        await_true("redis", lambda: self.ask_redis("PING") == b"PONG")
        await_true("postgres", lambda: self.run("pg_isready", "-q").returncode == 0)

    def start_postgres(self, args):
        # Postgres does not run as root.
        user = pwd.getpwnam("postgres") if os.geteuid() == 0 else None
        data = self.folder / "postgres"
        data.mkdir()
        if user:
            for folder in (WORK, WORK / "run", self.folder):
                folder.chmod(0o755)
            os.chown(data, user.pw_uid, user.pw_gid)

        def become():
            if user:
                os.setgid(user.pw_gid)
                os.setuid(user.pw_uid)

        made = subprocess.run([self.binaries / "initdb", "-D", data, "-U", "tollgate", "-A", "trust", "-E", "UTF8", "--locale=C"],
                              preexec_fn=become, capture_output=True, text=True, cwd=data)
        if made.returncode:
            raise RuntimeError(f"initdb: {made.stderr[-300:]}")
        return Proc([self.binaries / "postgres", "-D", data, "-p", self.postgres_port, "-c", "listen_addresses=127.0.0.1",
                     "-c", "unix_socket_directories="], "postgres", LOAD_CPU, args, user=user)

    def run(self, program, *words):
        cmd = [self.binaries / program, "-h", "127.0.0.1", "-p", str(self.postgres_port), "-U", "tollgate", *words]
        return subprocess.run(cmd, capture_output=True, text=True)

    def ask_redis(self, *words):
        """One command's answer, where that is one text."""
        try:
            with socket.create_connection(("127.0.0.1", self.redis_port), 2) as s, s.makefile("rb") as answer:
                s.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w.encode()) for w in words))
                head = answer.readline().strip()
                return answer.read(int(head[1:])) if head[:1] == b"$" else head[1:]
        except OSError:
            return None

    def commands(self):
        """How often nodes have asked Redis for a verb. What a verb does inside is no command of theirs."""
        stats = (self.ask_redis("INFO", "commandstats") or b"").decode()
        calls = {}
        for line in stats.splitlines():
            name, _, rest = line.partition(":")
            if name.startswith("cmdstat_"):
                calls[name[8:]] = int(rest.split("calls=", 1)[1].split(",", 1)[0])
        return sum(calls.get(name, 0) for name in ("fcall", "evalsha"))

    def round_trip_us(self, cpu, count=2000):
        """The median of so many `PING`s from a core, one after another."""
        took, before = [], os.sched_getaffinity(0)
        os.sched_setaffinity(0, {cpu})
        try:
            with socket.create_connection(("127.0.0.1", self.redis_port), 2) as s:
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(count):
                    began = time.perf_counter_ns()
                    s.sendall(b"PING\r\n")
                    s.recv(64)
                    took.append((time.perf_counter_ns() - began) / 1e3)
        finally:
            os.sched_setaffinity(0, before)
        return statistics.median(took)

    def fleet(self):
        """The block `store:` of a fleet that nobody else is in; `@DIR@` is the node's folder."""
        self.made += 1
        name = f"bench{self.made}"
        made = self.run("createdb", name)
        if made.returncode:
            raise RuntimeError(f"createdb: {made.stderr}")
        return (f'{{ path: "@DIR@/data", redis: {{ urls: ["redis://127.0.0.1:{self.redis_port}"], prefix: {name} }}, '
                f'postgres: {{ url: "postgres://tollgate@127.0.0.1:{self.postgres_port}/{name}" }} }}')

    def stop(self):
        self.redis.stop()
        self.postgres.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
