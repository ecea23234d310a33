"""Starts a real server process and waits until it is healthy."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil

MODEL = "SmolLM2-135M-Instruct"
START_TIMEOUT_S = 300  # where transformers is imported by two processes and others share the machine


@dataclass
class Server:
    """A running server. `url` ends without a slash."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str) -> tuple[int, str]:
        """Status (0 while nothing listens) and body."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()
        except (urllib.error.URLError, ConnectionError):
            return 0, ""

    def metric(self, name: str) -> float:
        """The value of a metric of vLLM's without labels besides `model_name`."""
        return self.count(f"vllm:{name}")

    def count(self, sample: str) -> float:
        """The value of one sample, given as its whole name and its labels besides `engine` and `model_name`, in
        alphabetic order."""
        for line in self.get("/metrics")[1].splitlines():
            name, _, value = line.rpartition(" ")
            if re.sub(r',?(engine|model_name)="[^"]*"', "", name).replace("{,", "{").replace("{}", "") == sample:
                return float(value)
        raise AssertionError(f"no metric {sample}")

    def bound(self, histogram: str, share: float) -> float | None:
        """The least bound of a histogram's buckets that `share` of its values keep; None if it has no values."""
        buckets = []
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(f"{histogram}_bucket"):
                buckets.append((float(line.split('le="')[1].split('"')[0]), float(line.rpartition(" ")[2])))
        total = max((count for _, count in buckets), default=0.0)
        return next(le for le, count in sorted(buckets) if count >= share * total) if total else None

    def wait_until_idle(self, timeout_s: float = 60) -> None:
        """Return when nothing runs, waits or holds a block; fail if that does not come."""
        deadline = time.monotonic() + timeout_s
        names = ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc")
        while any(left := {name: self.metric(name) for name in names}.values()):
            assert time.monotonic() < deadline, f"not idle: {left}"
            time.sleep(0.1)

    def core_process(self) -> psutil.Process:
        """The engine core."""
        (core,) = [p for p in psutil.Process(self.process.pid).children() if "core_process" in " ".join(p.cmdline())]
        return core

    def stop(self, timeout_s: float = 30) -> int:
        """Terminate it and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


@contextlib.contextmanager
def running_server(
    folder: Path,
    *flags: str,
    wait: bool = True,
    module: str = "octavo.entrypoints.openai.api_server",
    command: list[str] | None = None,
) -> Iterator[Server]:
    """`python -m octavo.entrypoints.openai.api_server`, or `command`, on a free port, with these flags."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / f"server-{port}.log"
    command = [*(command or [sys.executable, "-m", module]), "--host", "127.0.0.1", "--port", str(port)]
    with open(log, "wb") as out:
        process = subprocess.Popen([*command, *flags], stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ))
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while wait and server.get("/health")[0] != 200:
            assert process.poll() is None, f"the server ended:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"the server is not ready:\n{log.read_text()}"
            time.sleep(0.1)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def served(folder: Path, *flags: str) -> Iterator[Server]:
    """`running_server`, which in the end stops when it is told to and has logged no traceback."""
    with running_server(folder, *flags) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


@contextlib.contextmanager
def openai_client(server: Server) -> Iterator[openai.OpenAI]:
    """One that tries nothing twice."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
