"""A small Hugging Face hub of our own, for processes whose HF_ENDPOINT it is."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Answers the calls that the client makes for `repos`: name -> files; notes which files were fetched. GGUF files
    are large ones, known by their SHA-256."""

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos = repos
        self.fetched: list[str] = []
        self.begun_at: list[int] = []  # bytes at which fetches of large files began
        self.cuts_after: int | None = None  # bytes of a large file, after which the connection breaks
        self.damages = False  # large files have other bytes than their SHA-256 says

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[Hub]:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        body = self._body(path)
        begin, is_large = 0, body is not None and "/resolve/" in path and _is_large(path)
        if is_large and (found := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))):
            begin = int(found[1])
        self.send_response(404 if body is None else 206 if begin else 200)
        if body is None:
            gated = self.path.startswith("/api/models/org/gated")
            self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
            body = b""
        self.send_header("Content-Length", str(len(body) - begin))
        self.send_header("ETag", f'"{_digest(path, body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "GET":
            return
        if is_large:
            self.server.begun_at.append(begin)
            body = body[:-1] + bytes([body[-1] ^ 1]) if self.server.damages else body
        self.wfile.write(body[begin : self.server.cuts_after if is_large else None])
        self.close_connection = True

    def _body(self, path: str) -> bytes | None:
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and (files := self.server.repos.get("/".join(parts[2:4]))) is not None:
            if "tree" in parts:
                return json.dumps([_described(name, content) for name, content in files.items()]).encode()
            name = "/".join(parts[2:4])
            siblings = []
            for file, content in files.items():
                large = {"lfs": {"sha256": _digest(file, content), "size": len(content), "pointerSize": 1}}
                siblings.append({"rfilename": file, "size": len(content), **(large if _is_large(file) else {})})
            return json.dumps({"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}).encode()
        if len(parts) > 4 and parts[2] == "resolve":
            file = "/".join(parts[4:])
            if self.command == "GET":
                self.server.fetched.append(file)
            return self.server.repos.get("/".join(parts[:2]), {}).get(file)
        return None

    def log_message(self, *args: object) -> None:
        pass


def _is_large(name: str) -> bool:
    return name.endswith(".gguf")


def _digest(name: str, content: bytes) -> str:
    return (hashlib.sha256 if _is_large(name) else hashlib.sha1)(content).hexdigest()


def _described(name: str, content: bytes) -> dict[str, Any]:
    large = {"lfs": {"oid": _digest(name, content), "size": len(content), "pointerSize": 1}}
    about = {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
    return about | (large if _is_large(name) else {})
