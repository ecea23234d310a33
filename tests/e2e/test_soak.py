"""A short soak: benchmarks/soak.py says what it checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
@pytest.mark.long
def test_no_request_is_lost_at_twice_the_capacity_while_the_engine_is_killed(tmp_path: Path) -> None:
    result, log = tmp_path / "soak.json", tmp_path / "server.log"
    ends = ["refused", "left", "queue_full", "abort"]
    options = ["--minutes", "0.4", "--seed", "7", "--json", str(result), "--log", str(log), "--until", *ends]
    done = subprocess.run([sys.executable, str(SOAK), *options], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    measured = json.loads(result.read_text())
    assert measured["wrong"] == []
    assert done.returncode == 0
    assert set(ends) <= {end.partition(": ")[2] for end in measured["ends"]}
