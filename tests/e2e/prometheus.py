"""Runs a real Prometheus (Debian's, where there is one) that scrapes what a test tells it to."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MISSING = "there is no prometheus here (Debian: apt-get install --no-install-recommends prometheus)"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Prometheus:
    """A running Prometheus."""

    url: str

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return json.load(response)["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of an instant query."""
        data = self.get("/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
        return [(row["metric"], float(row["value"][1])) for row in data["result"]]


@contextlib.contextmanager
def running_prometheus(folder: Path, **targets: str) -> Iterator[Prometheus | None]:
    """One that scrapes each of `targets` (job to host:port) every second, and has done so once; None where there is no
    Prometheus."""
    binary = shutil.which("prometheus")
    if binary is None:
        yield None
        return
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{"job_name": job, "static_configs": [{"targets": [at]}]} for job, at in targets.items()],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [
        binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    running = Prometheus(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 60
        while not _has_scraped(running, len(targets)):
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _has_scraped(prometheus: Prometheus, num_targets: int) -> bool:
    try:
        return [value for _, value in prometheus.query("up")] == [1.0] * num_targets
    except OSError:
        return False
