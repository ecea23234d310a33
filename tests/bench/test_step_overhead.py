"""The benchmark that docs cite for what a step costs around the model runs with today's engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*flags: str) -> list[list[str]]:
    script = [sys.executable, "benchmarks/step_overhead.py", *flags]
    done = subprocess.run(script, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines() if line.strip()]


@pytest.mark.long
def test_it_prints_a_figure_for_each_part_and_number_of_streams() -> None:
    header, *lines = run("--streams", "1,3", "--steps", "4", "--weights-mb", "1")
    parts = header[: header.index("(microseconds")]
    assert {"streams", "schedule", "submit", "update", "core", "LLM", "front_end"} <= {*parts}
    assert [line[0] for line in lines] == ["1", "3"]
    assert all(float(figure) > 0 for line in lines for figure in line)


@pytest.mark.long
def test_it_prints_what_the_admission_of_a_long_prompt_costs() -> None:
    lines = run("--prompt-len", "400")
    assert [line[0] for line in lines] == ["process", "encode", "decode", "add", "first_step", "waiting_step"]
    assert all(float(figure) >= 0 and unit == "ms" for _, figure, unit in lines)
