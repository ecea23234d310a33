"""`octavo bench startup` over a real server, and how it reads the server's account of its start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.bench.startup import Start, main, median, parse_metrics, report

METRICS = """\
# TYPE octavo:startup_seconds gauge
octavo:startup_seconds{engine="0",model_name="a,b",phase="imports",process="core"} 1.5
octavo:startup_seconds{engine="0",model_name="a,b",phase="HTTP server",process="server"} 0.25
octavo:memory_bytes{engine="0",model_name="a,b",kind="weights"} 9.6e+07
"""


def start(ready_s: float, peak_bytes: int | None) -> Start:
    return Start(ready_s, {"HTTP server": ready_s / 2}, {"imports": ready_s}, 0.01, 96 << 20, 1 << 30, peak_bytes, None)


def test_phases_and_sizes_are_read_from_the_metrics() -> None:
    phases, memory = parse_metrics(METRICS)
    assert phases == {"core": {"imports": 1.5}, "server": {"HTTP server": 0.25}}
    assert memory == {"weights": 96_000_000}


def test_report_shows_medians_and_what_is_unknown() -> None:
    starts = [start(3.0, 300 << 20), start(1.0, None), start(2.0, 200 << 20)]
    assert median(starts).core_s == {"imports": 2.0}
    text = report(starts)
    assert "ready after 1.00 / 2.00 / 3.00 s" in text
    assert "peak resident 200 MiB when ready, unknown after a request" in text


@pytest.mark.long
@pytest.mark.slow
def test_a_start_is_taken_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "start.json"
    assert main(["--runs", "1", "--max-model-len", "256", "--json", str(file)]) == 0
    (run,) = json.loads(file.read_text())["runs"]
    assert run["ready_s"] == pytest.approx(sum(run["server_s"].values()))
    assert {"imports", "weights packed", "program"} <= set(run["core_s"])
    assert run["weight_bytes"] > 80 << 20
    assert run["peak_bytes"] > run["weight_bytes"]
    assert "peak resident" in capsys.readouterr().out


@pytest.mark.long
def test_what_cannot_start_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", "1", "--model", "/nowhere/model.gguf"]) == 1
    assert "/nowhere/model.gguf" in capsys.readouterr().err
