"""What `scripts/soak` runs: one gateway, one mock upstream, callers on raw sockets. Only the standard library."""

import argparse
import asyncio
import os
import pathlib
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

KEY = "sk-soak-caller"
KEPT_MIB_MAX = 10
# As long as memory may take to go back to the system.
PATIENCE_SECONDS = 5
AT_ONCE = 200
CONFIG = """
listen: {{ http: "127.0.0.1:{http}", admin: "127.0.0.1:{admin}", threads: 2 }}
store: {{ embedded: {{ path: "{folder}/data" }} }}
bounds: {{ keepalive: 300s, connections_max: 16384, connections_per_address_max: 16384 }}
drain: {{ pre: 0s, max: 5s }}
providers:
  up: {{ dialect: openai, base_url: "http://127.0.0.1:{up}/v1", credential: sk-up, first_byte: 60s, first_event: 60s }}
models:
  m: {{ price: {{ input: "0.15", output: "0.60" }}, limits: {{ context: 128000, output: 16384 }}, routes: [ {{ provider: up, cost: {{ input: "0.12", output: "0.50" }} }} ] }}
bootstrap:
  accounts:
    soak:
      balance: "1000000"
      keys:
        - {{ key: sk-soak-caller, limits: {{ rpm: 100000000, tpm: 100000000000, concurrency: 100000 }} }}
      limits: {{ rpm: 100000000, tpm: 100000000000, budget_day: "900000", budget_month: "900000" }}
"""
HEAD = f"host: soak\r\nauthorization: Bearer {KEY}\r\n"
SMALL = f"GET /v1/models HTTP/1.1\r\n{HEAD}\r\n".encode()
ASK = b'{"model":"m","stream":true,"max_tokens":50,"messages":[{"role":"user","content":"Say hello."}]}'
STREAM = (f"POST /v1/chat/completions HTTP/1.1\r\n{HEAD}content-type: application/json\r\n"
          f"content-length: {len(ASK)}\r\n\r\n").encode() + ASK


class Gateway:
    def __init__(self, binary, folder):
        ports = {name: free_port() for name in ("http", "admin", "up")}
        config = pathlib.Path(folder, "tollgate.yaml")
        config.write_text(CONFIG.format(folder=folder, **ports))
        script = '{"text":["a"," b"," c"," d"," e"," f"," g"," h"," i"," j"],"delay_chunk_ms":300}'
        self.log = open(pathlib.Path(folder, "log"), "w+")
        start = lambda *args: subprocess.Popen([binary, *args], stdout=self.log, stderr=self.log)
        self.mock = start("mock", "--listen", f"127.0.0.1:{ports['up']}", "--script", script)
        self.process = start("--config", str(config), "serve")
        self.port = ports["http"]
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{ports['admin']}/readyz", timeout=1)
                return
            except OSError:
                time.sleep(0.05)
        self.stop()
        sys.exit(f"soak: the gateway did not start\n{pathlib.Path(folder, 'log').read_text()}")

    def stop(self):
        for process in (self.process, self.mock):
            process.terminate()
            process.wait()

    def memory(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024

    def files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    async def connect(self, number):
        # Addresses of its own: those of a burst that is over wait for a minute in the kernel.
        address = f"127.0.{1 + number // 200 % 250}.{1 + number % 200}"
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0), limit=1 << 14)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


async def several(count, one, at_once=AT_ONCE):
    turn = asyncio.Semaphore(at_once)

    async def bounded(number):
        async with turn:
            return await asyncio.wait_for(one(number), 60)

    answers = await asyncio.gather(*(bounded(number) for number in range(count)), return_exceptions=True)
    broken = [answer for answer in answers if isinstance(answer, BaseException)]
    if broken:
        raise SystemExit(f"soak: {len(broken)} of {count} calls broke, one with {broken[0]!r}")
    return answers


async def idle(gateway, count):
    async def one(number):
        reader, writer = await gateway.connect(number)
        writer.write(SMALL)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head, head
        await reader.readexactly(int(re.search(rb"content-length: (\d+)", head, re.I)[1]))
        return writer

    held = await several(count, one)
    await asyncio.sleep(1)
    peak = gateway.memory(), gateway.files()
    for writer in held:
        writer.close()
    return peak


async def streams(gateway, count, cancelled=False):
    peak = [0, 0]

    async def one(number):
        reader, writer = await gateway.connect(number)
        writer.write(STREAM)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head, head
        await reader.readuntil(b"data: ")
        if not cancelled:
            await reader.readuntil(b"[DONE]")
        if number % 50 == 0:
            peak[:] = max(peak[0], gateway.memory()), max(peak[1], gateway.files())
        writer.close()

    await several(count, one, at_once=AT_ONCE if cancelled else count)
    return peak


async def settle(gateway, files):
    """Until every descriptor is back; then what is resident when memory has had its time. Connections to the
    upstream are kept for a minute."""
    end = time.monotonic() + 90
    while gateway.files() > files and time.monotonic() < end:
        await asyncio.sleep(0.1)
    await asyncio.sleep(PATIENCE_SECONDS)
    return gateway.memory(), gateway.files()


async def main(options, gateway):
    kinds = {
        "idle": lambda: idle(gateway, options.idle),
        "streams": lambda: streams(gateway, options.streams),
        "cancelled": lambda: streams(gateway, options.cancelled, cancelled=True),
    }
    await idle(gateway, 200)
    await streams(gateway, 200)
    await streams(gateway, 200, cancelled=True)
    await asyncio.sleep(PATIENCE_SECONDS)
    # What is kept for a while in any case, such as connections to the upstream, is there now and stays.
    began = gateway.memory(), gateway.files()
    print(f"{'after warm-up':34}{began[0]:8.1f} MiB {began[1]:6} files", flush=True)
    worst = began
    for turn in range(options.turns):
        for kind, run in kinds.items():
            count = getattr(options, kind)
            peak = await run()
            after = await settle(gateway, began[1])
            each = (peak[0] - began[0]) * 1024 / max(count, 1)
            print(f"turn {turn + 1}, {count:6} {kind:10} peak{peak[0]:8.1f} MiB {peak[1]:6} files"
                  f"   after{after[0]:8.1f} MiB {after[1]:6} files"
                  + (f"   {each:.1f} KiB each" if kind != "cancelled" else ""), flush=True)
            worst = max(worst[0], after[0]), max(worst[1], after[1])
    kept = worst[0] - began[0], worst[1] - began[1]
    print(f"at most {kept[0]:.1f} MiB and {max(kept[1], 0)} files stayed")
    return kept[0] <= KEPT_MIB_MAX and kept[1] <= 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("idle", 10_000), ("streams", 1_000), ("cancelled", 5_000), ("turns", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--bin", default=os.environ.get("TOLLGATE_BIN"))
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        gateway = Gateway(options.bin, folder)
        try:
            right = asyncio.run(main(options, gateway))
        finally:
            gateway.stop()
    sys.exit(0 if right else 1)
