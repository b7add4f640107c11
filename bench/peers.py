"""Who is measured, and how each is started."""

import json
import os
import shutil
import time
import urllib.request
from pathlib import Path

from processes import BIN, HERE, PROXY_CPU, TOLLGATE, WORK, Proc, free_ports

WATCH_MS = 500
VENV, NPM = WORK / "venv", WORK / "npm"
# What is always there; `--with` adds others, which `bench/peers` installs.
OURS = "tollgate", "tollgate-fleet"
BODY = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


class Peer:
    """A way to the mock: a process of its own, or none (`direct`). `kind`: `proxy`, `tollgate` or `fleet`."""

    def __init__(self, name, cmd, conf=None, kind="proxy", env=None, headers=(), path=None, model=None, secs=60):
        self.name, self.cmd, self.conf, self.kind, self.env, self.headers, self.path, self.model = name, cmd, conf, kind, env, headers, path, model
        self.secs = secs

    @property
    def is_ours(self):
        return self.kind in ("tollgate", "fleet")


def further():
    """Peers that run on request, by name; those that are not installed are `None`."""
    def there(binary, name, words, **more):
        return Peer(name, [binary, *words], **more) if binary and Path(binary).exists() else None

    one = {"RUST_LOG": "error", "TOKIO_WORKER_THREADS": "1"}
    portkey = NPM / "node_modules/@portkey-ai/gateway/build/start-server.js"
    return {
        "envoy": there(next(VENV.glob("envoy/lib/python3*/site-packages/envoy/_bin/envoy"), None), "envoy",
                       ["-c", "@CONF@", "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"], conf="envoy.yaml"),
        "smg": there(VENV / "smg/bin/smg", "smg", ["launch", "--host", "127.0.0.1", "--port", "@PORT@", "--worker-urls", "http://127.0.0.1:@UP@",
                                                   "--backend", "openai", "--policy", "round_robin", "--disable-health-check",
                                                   "--disable-tokenizer-autoload", "--disable-load-monitoring", "--history-backend", "none",
                                                   "--prometheus-port", "@X1@", "--prometheus-host", "127.0.0.1", "--log-level", "error",
                                                   "--max-payload-size", "268435456"], env=one),
        "portkey": portkey.exists() and Peer("portkey", ["node", portkey, "--headless", "--port=@PORT@"], env={"NODE_ENV": "production"},
                                             headers=("x-portkey-provider: openai", "x-portkey-custom-host: http://127.0.0.1:@UP@/v1")) or None,
        "litellm": there(VENV / "litellm/bin/litellm", "litellm", ["--config", "@CONF@", "--host", "127.0.0.1", "--port", "@PORT@", "--num_workers", "1", "--telemetry", "False"],
                         conf="litellm.yaml", secs=180, env={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION",
                                                             "LITELLM_MASTER_KEY": "sk-bench"}),
        "agentgateway": there(os.environ.get("AGENTGATEWAY_BIN"), "agentgateway", ["-f", "@CONF@"], conf="agentgateway.yaml", env={"RUST_LOG": "error"}),
        "tensorzero": there(os.environ.get("TENSORZERO_BIN"), "tensorzero", ["--config-file", "@CONF@"], conf="tensorzero.toml",
                            env=one | {"OPENAI_API_KEY": "sk-up"}, path="/openai/v1/chat/completions", model="tensorzero::model_name::main"),
    }


def peers(args):
    out = [Peer("direct", None), Peer("floor", [BIN / "floor", "@PORT@", "@UP@", "1"])]
    for name, cmd, conf in (("nginx", ["-c", "@CONF@", "-e", "@DIR@/error.log", "-p", "@DIR@"], "nginx.conf"),
                            ("haproxy", ["-db", "-f", "@CONF@"], "haproxy.cfg")):
        found = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")
        if found:
            out.append(Peer(name, [found, *cmd], conf))
    there = further()
    for name in filter(None, args.peers.split(",")):
        if name not in there:
            raise SystemExit(f"{name}: no such peer; there are {', '.join(there)}")
        if there[name] is None:
            print(f"left out: {name} is not installed: bench/peers {name}, or its path in {name.upper()}_BIN", flush=True)
        else:
            out.append(there[name])
    for name, binary in [("tollgate", TOLLGATE)] + [tuple(also.split("=", 1)) for also in args.also]:
        cmd = [binary, "--config", "@CONF@", "serve"]
        out.append(Peer(name, cmd, "tollgate.yaml", "tollgate"))
        out.append(Peer(f"{name}-fleet", cmd, "tollgate.yaml", "fleet"))
    return [p for p in out if p.name not in args.without.split(",")]


class Running:
    """A peer that is up, on ports of its own. `tls`: with HTTP/2 over TLS on both sides; for the floor and ours."""

    def __init__(self, rig, peer, providers="", models="", accounts="", prepare=None, cpu=PROXY_CPU, tls=False, binary=None):
        self.peer, self.rig, self.tls, self.proc = peer, rig, tls, None
        self.headers, self.path, self.model = peer.headers, peer.path, peer.model
        if peer.cmd is None:
            self.port, self.start_secs = rig.up_tls if tls else rig.up, 0
            return
        self.port, fo, self.admin, x2, x3, plain = free_ports(6)
        self.dir = WORK / "run" / f"{peer.name}-{self.port}"
        shutil.rmtree(self.dir, ignore_errors=True)
        self.dir.mkdir(parents=True)
        store = rig.servers.fleet() if peer.kind == "fleet" else '{ embedded: { path: "@DIR@/data" } }'
        up = f"https://localhost:{rig.up_tls}/v1" if tls else f"http://127.0.0.1:{rig.up}/v1"
        trust = f', http: h2, ca_file: "{rig.certificates}/ca.pem"' if tls else ""
        # The start is watched over plain HTTP.
        self.watched = plain if tls and peer.is_ours else self.port
        listen = f'http: "127.0.0.1:{self.watched}"'
        if tls:
            listen += f', https: {{ address: "127.0.0.1:{self.port}", cert_file: "{rig.certificates}/cert.pem", key_file: "{rig.certificates}/key.pem" }}'
        self.values = dict(STORE=store, LISTEN=listen, UPSTREAM=up, TRUST=trust, PROVIDERS=providers, MODELS=models, ACCOUNTS=accounts,
                           PORT=self.port, FO=fo, X1=self.admin, X2=x2, X3=x3, UP=rig.up, BAD=rig.bad, GOOD=rig.good, WATCH=WATCH_MS,
                           WATCH_S=WATCH_MS / 1000, DIR=self.dir)
        if peer.conf:
            conf = self.dir / peer.conf
            conf.write_text(self.fill((HERE / "conf" / peer.conf).read_text()))
            self.values["CONF"] = conf
        self.headers = [self.fill(h) for h in peer.headers]
        cmd = [self.fill(str(c)) for c in peer.cmd]
        if binary:
            cmd[0] = str(binary)
        if tls and not peer.is_ours:
            cmd = [str(BIN / "floor"), str(self.port), str(rig.up_tls), "1", "1", str(rig.certificates)]
        if peer.kind == "fleet":
            self.migrate(cmd)
        if prepare:
            self.launch(cmd, cpu)
            self.proc.stop()
            prepare(self)
        self.launch(cmd, cpu)

    def fill(self, text):
        for k, v in self.values.items():
            text = text.replace(f"@{k}@", str(v))
        return text

    def migrate(self, cmd):
        migration = Proc([*cmd[:-1], "migrate"], f"{self.peer.name}-migrate", PROXY_CPU, self.rig.args)
        if migration.popen.wait(60):
            raise RuntimeError(f"{self.peer.name} cannot migrate; see {WORK}/logs/{self.peer.name}-migrate.log")

    def launch(self, cmd, cpu):
        began = time.monotonic()
        self.proc = Proc(cmd, self.peer.name, cpu, self.rig.args, self.peer.env)
        while time.monotonic() - began < self.peer.secs:
            if self.proc.popen.poll() is not None:
                break
            if self.serves():
                self.start_secs = time.monotonic() - began
                return
            time.sleep(0.002)
        self.proc.stop()
        raise RuntimeError(f"{self.peer.name} did not serve; see {WORK}/logs/{self.peer.name}.log")

    def serves(self):
        if self.tls and not self.peer.is_ours:
            return self.rig.load_succeeds(self)
        headers = {"content-type": "application/json", "authorization": "Bearer sk-bench"}
        headers |= dict(h.split(": ", 1) for h in self.headers)
        url = f"http://127.0.0.1:{self.watched}{self.path or '/v1/chat/completions'}"
        body = json.dumps(BODY | ({"model": self.model} if self.model else {})).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=5) as r:
                return r.status == 200 and b"t=" in r.read()
        except (OSError, ValueError):
            return False

    def metric(self, name):
        """A number of the admin port; `None`: it has none of this name."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/metrics", timeout=5) as r:
                lines = r.read().decode().splitlines()
        except OSError:
            return None
        return next((float(line.split()[1]) for line in lines if line.split(" ")[0] == name), None)

    @property
    def pids(self):
        return self.proc.pids if self.proc else []

    def stop(self):
        if self.proc:
            self.proc.stop()
            shutil.rmtree(self.dir, ignore_errors=True)
