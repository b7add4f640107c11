"""Processes: how they are started, what they spend, and how they end."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORK = Path(os.environ.get("BENCH_WORK", "/tmp/tollgate-bench"))
BIN = Path(os.environ.get("BENCH_BIN", HERE.parent / "target/bench/release"))
TOLLGATE = os.environ.get("TOLLGATE_BIN", str(HERE.parent / "target/release/tollgate"))
PROXY_CPU = int(os.environ.get("BENCH_PROXY_CPU", "0"))
LOAD_CPU = int(os.environ.get("BENCH_LOAD_CPU", "1"))
TICK = os.sysconf("SC_CLK_TCK")


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


def pinned(cpu, args, prio=1, user=None):
    """For a child in a session of its own: its core, and real-time scheduling (the load generator above the
    mock, so that it reads a chunk when it comes) or the niceness of the process and its scheduling group.
    `user`: whom it becomes."""
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
        if user is not None:
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
    return setup


class Proc:
    def __init__(self, cmd, name, cpu, args, env=None, user=None):
        (WORK / "logs").mkdir(parents=True, exist_ok=True)
        log = open(WORK / "logs" / f"{name}.log", "wb")
        self.popen = subprocess.Popen([str(c) for c in cmd], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                      env=os.environ | (env or {}), preexec_fn=pinned(cpu, args, user=user), start_new_session=True)
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
