"""Runs a real Prometheus (Debian's, where there is one) that scrapes what a test tells it to."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import held_port
from tests.waiting import wait_until, within

MISSING = "there is no prometheus here (Debian: apt-get install --no-install-recommends prometheus)"


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
    port = held_port()
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
        wait_until(
            lambda: process.poll() is not None or _has_scraped(running, len(targets)),
            of_what=(folder / "log").read_text,
        )
        assert process.poll() is None, (folder / "log").read_text()
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(within(30))


def _has_scraped(prometheus: Prometheus, num_targets: int) -> bool:
    try:
        return [value for _, value in prometheus.query("up")] == [1.0] * num_targets
    except OSError:
        return False
