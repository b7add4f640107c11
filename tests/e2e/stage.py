"""A gateway between scripted upstreams, on free ports, with a data folder of its own.

No test shares anything with another that could carry a failure over: each takes an index of its own, and
with it an account, and models whose providers nobody else asks. Only the scripts of the upstreams are shared,
so tests run one after the other.

    solo-openai-007    one route, to the first upstream of that dialect
    pair-openai-007    two: the first, and a standby behind the second
    reseller/openai-007:free    the same two
"""

import contextlib
import json
import shutil
import socket
import sqlite3
import subprocess
import time
import urllib.error
import urllib.request

DIALECTS = ["openai", "anthropic"]
# Tests of one suite, at most.
INDICES = 130
BODY_BYTES_MAX = 2 << 20
# After it the impatient gateway says 504.
IMPATIENCE = "1s"
READY_SECONDS_MAX = 20


class Stage:
    def __init__(self, tollgate, folder):
        self.tollgate = tollgate
        self.folder = folder
        self.processes = {}
        self.world = {}

    def __enter__(self):
        try:
            mocks = {dialect: [self.mock(dialect) for _ in range(2)] for dialect in DIALECTS}
            tls, no_tls = self.tls(mocks)
            gateway, admin = self.gateway("gateway", mocks, tls=tls)
            impatient, _ = self.gateway("impatient", mocks, deadline=IMPATIENCE)
            status = self.status()
        except BaseException:
            self.leave()
            raise
        self.world = {
            "gateway": gateway, "admin": admin, "impatient": impatient, "tls": tls, "no_tls": no_tls,
            "mocks": mocks, "status": status, "indices": INDICES, "body_bytes_max": BODY_BYTES_MAX, "curl": shutil.which("curl"),
        }
        return self

    def __exit__(self, *_):
        self.leave()

    def leave(self):
        """Stops what was started, gateways first, and insists that they leave cleanly."""
        started, self.processes = self.processes, {}
        for process in reversed(started.values()):
            process.terminate()
        for name, process in started.items():
            try:
                code = process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if "mock" not in name and code != 0:
                raise RuntimeError(f"{name} left with {code}\n{self.logs()}")

    def logs(self):
        kept = [log.read_text() for log in sorted(self.folder.glob("*.log")) if "mock" not in log.name]
        return "\n".join("--- a gateway's log, its end\n" + "\n".join(text.splitlines()[-20:]) for text in kept)

    def mock(self, dialect):
        address = free_address()
        script = json.dumps({"dialect": dialect})
        name = f"mock-{len(self.processes)}"
        process = self.start(name, "mock", "--listen", address, "--script", script)
        wait_for(f"http://{address}/__mock/counts", process)
        return f"http://{address}"

    def gateway(self, name, mocks, deadline="60s", tls=None):
        http, admin = free_address(), free_address()
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(config(http, admin, self.folder / f"{name}-data", mocks, deadline, tls)))
        process = self.start(name, "--config", path, "serve")
        wait_for(f"http://{admin}/readyz", process)
        return f"http://{http}", f"http://{admin}"

    def status(self):
        """A gateway of few models in several regions, for its page, before upstreams of its own."""
        first, second = self.mock("openai"), self.mock("openai")
        http, admin = free_address(), free_address()
        data = self.folder / "status-data"
        path = self.folder / "status.yaml"
        path.write_text(json.dumps(page_config(http, admin, data, first, second)))
        process = self.start("status", "--config", path, "serve")
        wait_for(f"http://{admin}/readyz", process)
        remember(data / "records.db", {
            "aurora-large": ["eu-west", "us-east"], "aurora-small": ["us-east", "<i>mars</i>"], "<img/src=x>&amp;": ["us-east"],
        })
        token = (data / "admin.token").read_text()
        return {"gateway": f"http://{http}", "admin": f"http://{admin}", "token": token, "key": "sk-caller-page", "mock": first,
                "data": str(data)}

    def start(self, name, *arguments):
        with open(self.folder / f"{name}.log", "w") as log:
            self.processes[name] = subprocess.Popen([self.tollgate, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self.processes[name]

    def tls(self, mocks):
        """Where TLS is served and who vouches for it, or why it is not."""
        address = free_address()
        tls = certificates(self.folder) | {"address": address, "url": f"https://localhost:{address.split(':')[1]}"}
        trial = self.folder / "trial.yaml"
        trial.write_text(json.dumps(config(free_address(), free_address(), self.folder / "trial-data", mocks, "60s", tls)))
        check = subprocess.run([self.tollgate, "--config", trial, "check"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return (tls, None) if check.returncode == 0 else (None, check.stdout.strip())


def config(http, admin, data, mocks, deadline, tls):
    """In JSON, which is YAML."""
    listen = {"http": http, "admin": admin, "threads": 2}
    if tls:
        listen["https"] = {"address": tls["address"], "cert_file": tls["cert"], "key_file": tls["key"]}
    providers, models, accounts = {}, {}, {}
    for index in range(INDICES):
        for dialect in DIALECTS:
            mine = f"{dialect}-{index:03}"
            names = [f"first-{mine}", f"second-{mine}"]
            for name, mock in zip(names, mocks[dialect]):
                providers[name] = {"dialect": dialect, "base_url": f"{mock}/v1", "credential": f"credential-of-{name}"}
            models[f"solo-{mine}"] = model(names[:1])
            models[f"pair-{mine}"] = model(names)
            # A name as resellers make them; SDKs escape its slash.
            models[f"reseller/{mine}:free"] = models[f"pair-{mine}"]
        accounts[f"caller-{index:03}"] = {"balance": "100.00", "keys": [{"key": f"sk-caller-{index:03}"}]}
    few = [f"solo-{dialect}-000" for dialect in DIALECTS]
    accounts["poor"] = {"balance": "0.000001", "keys": [{"key": "sk-caller-poor"}]}
    accounts["walled"] = {"balance": "1.00", "keys": [{"key": "sk-caller-walled", "models": few}]}
    for dialect in DIALECTS:
        accounts[f"slow-{dialect}"] = {"balance": "1.00", "keys": [{"key": f"sk-caller-slow-{dialect}", "limits": {"rpm": 1}}]}
    return {
        "listen": listen,
        "store": {"embedded": {"path": str(data)}},
        "bounds": {"body_max": f"{BODY_BYTES_MAX // 1024}KiB"},
        "drain": {"pre": "0s", "max": "5s"},
        # Two attempts, so that a lone failing route is asked twice and a pair once each; no exploring, so that
        # the first route is always the first.
        "routing": {"deadline": deadline, "attempts_max": 2, "explore": False},
        "providers": providers,
        "models": models,
        "bootstrap": {"accounts": accounts},
    }


def page_config(http, admin, data, first, second):
    """Names as they come, and as nobody should be able to use them."""
    def provider(mock, region):
        return {"dialect": "openai", "base_url": f"{mock}/v1", "credential": "credential-of-page", "region": region}

    return {
        "listen": {"http": http, "admin": admin, "threads": 1},
        "store": {"embedded": {"path": str(data)}},
        "drain": {"pre": "0s", "max": "5s"},
        "routing": {"explore": False},
        "status": {"title": "Aurora API"},
        "providers": {"one": provider(first, "eu-west"), "two": provider(second, "us-east"), "three": provider(second, "<i>mars</i>")},
        "models": {
            "aurora-large": model(["one", "two"]),
            "aurora-small": model(["two", "three"]),
            "reseller/a-model-with-a-long-name-2026-11-30:free": model(["two"]),
            "<img/src=x>&amp;": model(["two"]),
        },
        "bootstrap": {"accounts": {"page": {"balance": "100.00", "keys": [{"key": "sk-caller-page"}]}}},
    }


def remember(file, models):
    """Gives the records of a running gateway a past of 89 days, good and bad; of today they know nothing."""
    today = int(time.time()) // 86400
    deadline = time.monotonic() + READY_SECONDS_MAX
    while not has_tables(file) and time.monotonic() < deadline:
        time.sleep(0.02)
    with contextlib.closing(sqlite3.connect(file, timeout=20)) as records, records:
        def word(text):
            records.execute("INSERT OR IGNORE INTO record_word (text) VALUES (?)", [text])
            return records.execute("SELECT id FROM record_word WHERE text = ?", [text]).fetchone()[0]

        places = [(model, region) for model, regions in models.items() for region in regions]
        for place, (name, region) in enumerate(places):
            for ago in range(1, 90 - 12 * place):
                bad = {3: 40, 4: 700, 17: 5, 18: 180, 41: 2, 60: 9000}.get(ago + 5 * place, 0)
                row = [(today - ago) * 86_400_000, word(name), word(region), 10_000 - bad, bad, 10_000, 0]
                records.execute("INSERT INTO slo_hour VALUES (?, ?, ?, ?, ?, ?, ?)", row)


def has_tables(file):
    """Whether the gateway has made its records."""
    if not file.exists():
        return False
    with contextlib.closing(sqlite3.connect(file, timeout=20)) as records:
        return records.execute("SELECT count(*) FROM sqlite_master WHERE name = 'slo_hour'").fetchone()[0] == 1


def model(providers):
    return {
        "price": {"input": "2.50", "output": "10.00", "cache_read": "1.25"},
        "limits": {"context": 128000, "output": 16384},
        "routes": [{"provider": name, "model": "native", "weight": 100 - 40 * place} for place, name in enumerate(providers)],
    }


def certificates(folder):
    """An authority made for this run, and a certificate for `localhost` from it."""
    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=tollgate e2e",
            "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign")
    openssl("req", *key, "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=localhost")
    (folder / "tls.ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    openssl("x509", "-req", "-in", "tls.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
            "-extfile", "tls.ext", "-out", "tls.pem")
    return {"ca": str(folder / "ca.pem"), "cert": str(folder / "tls.pem"), "key": str(folder / "tls.key")}


def free_address(given=set()):
    """Never the same one twice."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        if address not in given:
            given.add(address)
            return address


def wait_for(url, process):
    deadline = time.monotonic() + READY_SECONDS_MAX
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)
    raise RuntimeError(f"nothing at {url}: {process.args}")
