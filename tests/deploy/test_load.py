"""The load of deploy/load, made by Locust against a real server; its profiles by a clock that is set."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.e2e.server import running_server

LOAD = Path(__file__).parents[2] / "deploy" / "load"


def locust(*flags: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since it changes how sockets work."""
    command = [sys.executable, "-m", "locust", "-f", str(LOAD / "locustfile.py"), "--headless", "--json", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_load_on_a_real_server(tmp_path: Path) -> None:
    with running_server(tmp_path, "--max-model-len", "512", "--api-key", "secret") as server:
        at = ("--host", server.url, "--users", "3", "--spawn-rate", "3", "--run-time", "1m")
        small = ("--stop-after", "12", "--max-tokens", "8", "--prompt-words", "8")
        done = locust(*at, *small, "--api-key", "secret")
        assert done.returncode == 0, done.stderr
        rows = {row["name"]: row for row in json.loads(done.stdout)}
        assert {row["num_failures"] for row in rows.values()} == {0}
        posts = [row for row in rows.values() if row["method"] == "POST"]
        assert sum(row["num_requests"] for row in posts) >= 12
        first = rows["stream, first token"]
        assert 0 < first["num_requests"] <= rows["stream"]["num_requests"]
        assert first["total_response_time"] <= rows["stream"]["total_response_time"]
        refused = locust(*at, *small, "--api-key", "wrong", "--model-name", "m")
        assert refused.returncode == 1, "failed requests fail the test"
        assert all(row["num_failures"] == row["num_requests"] for row in json.loads(refused.stdout))


@pytest.mark.parametrize(
    ("profile", "users"),
    [
        ("Ramp", {0: 2, 59: 2, 60: 4, 300: 12, 599: 20, 600: None}),
        ("Soak", {0: 20, 539: 20, 540: 1, 599: 1, 600: None}),
    ],
)
def test_profiles(profile: str, users: dict[int, int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SimpleNamespace(LoadTestShape=object)  # Locust itself would change this process's sockets
    monkeypatch.setitem(sys.modules, "locust", shape)
    spec = importlib.util.spec_from_file_location("profile", LOAD / f"{profile.lower()}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = getattr(module, profile)()
    options = SimpleNamespace(run_time=600, users=20, spawn_rate=5.0)
    made.runner = SimpleNamespace(environment=SimpleNamespace(parsed_options=options))
    for time_s, number in users.items():
        made.get_run_time = lambda time_s=time_s: time_s
        assert made.tick() == (None if number is None else (number, 5.0)), time_s
