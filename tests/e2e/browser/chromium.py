"""A browser that opens the page, and the one origin of page and gateway.

The gateway sends no CORS headers: a key in a page of another origin would be a key in everybody's hands. Whoever
has a page puts both behind one origin, as this little proxy does, which also knows who its users are.
"""

import contextlib
import http.server
import json
import os
import pathlib
import queue
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import urllib.parse

HERE = pathlib.Path(__file__).resolve().parent
NAMES = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"]
# Without them it looks for the servers of its maker, again and again.
QUIET = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic", "--no-first-run",
         "--no-default-browser-check", "--disable-gpu", "--disable-extensions"]
PATIENCE_SECONDS = 60


def binary():
    return next(filter(None, map(shutil.which, NAMES)), None)


def browse(gateway, calls):
    """Lets the page make these calls; answers what it found."""
    findings = queue.Queue()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(gateway, calls, findings))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="tollgate-browser-", ignore_cleanup_errors=True) as profile:
        # The sandbox needs rights that a container does not give; the page is ours.
        command = [binary(), "--headless", "--no-sandbox", *QUIET, "--remote-debugging-port=0", f"--user-data-dir={profile}",
                   f"http://127.0.0.1:{server.server_port}/"]
        log = pathlib.Path(profile) / "log"
        with open(log, "w") as said:
            # A group of its own: it starts many processes, and not all of them end with the first one.
            running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
        try:
            return findings.get(timeout=PATIENCE_SECONDS)
        except queue.Empty:
            raise RuntimeError(f"the page said nothing:\n{log.read_text()[-3000:]}") from None
        finally:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            server.shutdown()
            server.server_close()


def handler(gateway, calls, findings):
    there = urllib.parse.urlsplit(gateway)

    class Origin(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            pages = {"/": ("text/html", (HERE / "page.html").read_bytes()), "/scenario": ("application/json", json.dumps(calls).encode())}
            kind, body = pages.get(self.path, ("text/plain", b""))
            self.answer(200 if self.path in pages else 404, kind, body)

        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/findings":
                self.answer(204, "text/plain", b"")
                findings.put(json.loads(body))
            else:
                self.pass_on(body)

        def answer(self, status, kind, body):
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def pass_on(self, body):
            """The bytes as they come, in both directions; when one side leaves, so does the other."""
            self.close_connection = True
            lines = [f"{name}: {value}" for name, value in self.headers.items() if name.lower() != "connection"]
            head = "\r\n".join([f"POST {self.path} HTTP/1.1", *lines, "connection: close", "", ""])
            with socket.create_connection((there.hostname, there.port)) as upstream, contextlib.suppress(OSError):
                upstream.sendall(head.encode("latin-1") + body)
                while True:
                    ready, _, _ = select.select([upstream, self.connection], [], [], PATIENCE_SECONDS)
                    if not ready or (self.connection in ready and not self.connection.recv(65536)):
                        return
                    if upstream in ready:
                        piece = upstream.recv(65536)
                        if not piece:
                            return
                        self.connection.sendall(piece)

        def log_message(self, *_):
            pass

    return Origin
