"""Starts a real server process and waits until it is healthy."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil

from tests.ports import held_port
from tests.waiting import wait_until, within

MODEL = "SmolLM2-135M-Instruct"
GATEWAY = [sys.executable, "-m", "octavo.entrypoints.cli.main", "gateway"]


@dataclass
class Server:
    """A running server. `url` ends without a slash."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str) -> tuple[int, str]:
        """Status (0 while nothing listens) and body."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=within(60)) as response:
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

    def wait_until_idle(self) -> None:
        """Return when nothing runs, waits or holds a block; fail if that does not come."""
        names = ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc")

        def in_use() -> dict[str, float]:
            return {name: self.metric(name) for name in names}

        wait_until(lambda: not any(in_use().values()), of_what=in_use)

    def core_process(self) -> psutil.Process:
        """The engine core."""
        (core,) = [p for p in psutil.Process(self.process.pid).children() if "core_process" in " ".join(p.cmdline())]
        return core

    def stop(self) -> int:
        """Terminate it and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within(60))


@contextlib.contextmanager
def running_server(
    folder: Path,
    *flags: str,
    wait: bool = True,
    module: str = "octavo.entrypoints.openai.api_server",
    command: list[str] | None = None,
) -> Iterator[Server]:
    """`python -m octavo.entrypoints.openai.api_server`, or `command`, on a free port, with these flags."""
    port = held_port()
    log = folder / f"server-{port}.log"
    command = [*(command or [sys.executable, "-m", module]), "--host", "127.0.0.1", "--port", str(port)]
    with open(log, "wb") as out:
        process = subprocess.Popen([*command, *flags], stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ))
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        if wait:
            wait_until(lambda: process.poll() is not None or server.get("/health")[0] == 200, log.read_text, 300)
            assert process.poll() is None, f"the server ended:\n{log.read_text()}"
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(within(60))
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
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=within(120)) as client:
        yield client


@contextlib.contextmanager
def running_gateway(folder: Path, models: dict[str, Any], *flags: str) -> Iterator[Server]:
    """`octavo gateway` with these entries in the file `models.yaml` of the folder."""
    file = folder / "models.yaml"
    file.write_text(json.dumps({"models": models}))
    with running_server(folder, "--catalogue", str(file), *flags, command=GATEWAY) as server:
        yield server


def serve(*flags: str, **environment: str) -> tuple[int, str]:
    """Exit status and standard error of a server that should not start."""
    done = subprocess.run(
        [sys.executable, "-m", "octavo.entrypoints.cli.main", "serve", "--port", "0", *flags],
        capture_output=True, text=True, timeout=120, env={**os.environ, **environment},
    )  # fmt: skip
    assert "Traceback" not in done.stderr + done.stdout
    return done.returncode, done.stderr
