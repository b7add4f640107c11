"""The rig: one mock upstream, the load generator, and what a peer spends while it is asked."""

import json
import subprocess
import threading
import time
import urllib.request

from processes import BIN, LOAD_CPU, WORK, Proc, by_thread, cpu_secs, free_ports, machine_busy, pinned, status_mib
from servers import Servers, await_true


class Rig:
    def __init__(self, args):
        self.args, self.samples, self.round, self.made, self.secure = args, [], 0, None, {}
        self.certificates = WORK / "run" / "certificates"
        self.certificates.mkdir(parents=True, exist_ok=True)
        subprocess.run([BIN / "certificates", self.certificates], check=True)
        self.up, self.bad, self.good, self.up_tls, self.bad_tls, self.good_tls = free_ports(6)
        ports = [f"{self.up}+{self.up_tls}", f"{self.bad}+{self.bad_tls}", f"{self.good}+{self.good_tls}"]
        self.mock = Proc([BIN / "mock", "--tls", self.certificates, *ports], "mock", LOAD_CPU, args)
        await_true("the mock", lambda: self.mock_counts() is not None, 10)

    @property
    def servers(self):
        """Redis and Postgres, once a fleet wants them."""
        if self.made is None:
            self.made = Servers(self.args)
        return self.made

    def stop(self):
        for running in self.secure.values():
            running.stop()
        self.mock.stop()
        if self.made:
            self.made.stop()

    def set_mock(self, spec, port=None):
        url = f"http://127.0.0.1:{port or self.up}/_mock?{spec}"
        urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5).read()

    def mock_counts(self, port=None, page=""):
        try:
            return json.load(urllib.request.urlopen(f"http://127.0.0.1:{port or self.up}/_mock{page}", timeout=5))
        except OSError:
            return None

    def load_cmd(self, mode, r, **opts):
        cmd = [str(BIN / "load"), mode, "--port", str(r.port)]
        opts = dict(path=r.path, model=r.model, tls=self.certificates if r.tls else None) | opts
        for k, v in opts.items():
            if v is not None:
                cmd += ["--" + k.replace("_", "-"), str(v)]
        for header in r.headers:
            cmd += ["--header", header]
        return cmd

    def load_succeeds(self, r):
        done = subprocess.run(self.load_cmd("seq", r, count=1, conns=1, limit_secs=2), capture_output=True, text=True, timeout=10)
        return done.returncode == 0 and json.loads(done.stdout)["ok"] == 1

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
        print(f"  [{self.round}] {measure:<14} {name:<14} {shown}", flush=True)
