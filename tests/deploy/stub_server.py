"""A server for the tests of changes: what change.py asks of one, and the ways in which a new version is broken.

`--token NAME` is what its streams say, after which they wait for /go-on if the prompt is "wait". `--broken WAY`:
`start` exits, `health` never is ready, `warm` answers no question, `later` answers the first one alone, `dies` ends
with the second, and as slowly as a machine with much to do lets it: nobody can connect a while before.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    token, broken = "", ""
    num_answers, num_failed, num_running = 0, 0, 0
    lock, go_on = threading.Lock(), threading.Event()

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(503 if self.broken == "health" else 200, "")
        elif self.path == "/v1/models":
            self.answer(200, json.dumps({"data": [{"id": "m"}]}))
        elif self.path == "/go-on":
            self.go_on.set()
            self.answer(200, "")
        else:
            labels = 'http_requests_total{method="POST",status="5xx"}'
            self.answer(200, f"vllm:num_requests_running {self.num_running}\n{labels} {self.num_failed}\n")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            Handler.num_answers += 1
            Handler.num_running += 1
        if self.broken == "dies" and self.num_answers > 1:
            self.server.socket.close()
            time.sleep(0.3)
            os._exit(1)
        if self.broken == "warm" or (self.broken == "later" and self.num_answers > 1):
            Handler.num_failed += 1
            self.answer(500, "broken")
        else:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for text in (self.token, "end"):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text.encode()))
                self.wfile.flush()
                if body["prompt"] == "wait":
                    self.go_on.wait(60)
            self.wfile.write(b"0\r\n\r\n")
        with self.lock:
            Handler.num_running -= 1

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--token", required=True)
    parser.add_argument("--broken", default="")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    if args.broken == "start":
        raise SystemExit("broken")
    if args.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Handler.token, Handler.broken = args.token, args.broken
    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
