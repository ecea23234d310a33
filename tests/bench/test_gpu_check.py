"""The GPU check works, as far as that can be seen without a GPU, and its documentation says what its programs say."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, cwd=ROOT, check=False,
        env=os.environ | env,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_the_check_runs_through_and_makes_a_table(tmp_path: Path) -> None:
    brought_back = tmp_path / "out"  # not there yet
    parts = ("kernels", "parity", "model")
    text = run("benchmarks/gpu_check.py", "--smoke", "--results", str(tmp_path), *parts, OUT=str(brought_back))
    assert "greedy tokens before a difference |  | 192 of 192 |" in text
    same_bits = [line for line in text.splitlines() if line.startswith("| same bits")]
    assert len(same_bits) == 5
    assert all("| yes |" in line for line in same_bits)
    assert "output, 2 at once" in text
    assert {file.name for file in brought_back.iterdir()} == {"page.md", "results.json", "log.txt"}
    assert (brought_back / "page.md").read_text() in text
    assert [part["part"] for part in json.loads((brought_back / "results.json").read_text())] == [*parts]
    assert all(
        f"same bits {name}  yes" in (brought_back / "log.txt").read_text() for name in ("among others", "swapped")
    )


@pytest.mark.slow
@pytest.mark.long
def test_quick_says_what_is_most_worth_knowing_first(tmp_path: Path) -> None:
    parts = ("rates", "rows", "answers")
    text = run("benchmarks/gpu_check.py", "--smoke", "--results", str(tmp_path), *parts, OUT=str(tmp_path))
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        line for part in parts for line in text.splitlines() if line.startswith(f"## {part}: done")
    ]
    assert "copy, read and written GB/s" in text
    printed = [line for line in text.splitlines() if line.startswith("bfloat16 product, 8192 cubed TFLOP/s")]
    assert all("(predicted 790.0, " in line for line in printed), "with its prediction, once both rates are known"
    assert text.count(" same bits |") == 4
    assert "| one engine: same bits among others |  | yes |" in text
    assert "| one engine: greedy tokens of the CPU before a difference |  | 6 of 6 |" in text


@pytest.mark.long
def test_quick_is_planned_to_take_less_than_eight_minutes() -> None:
    program = """if True:
        from gpu_check import COMMANDS, PARTS, predictions
        from gpu_checks.quick import planned_s

        print([sum(planned_s(cores).values()) for cores in (16, 8)], COMMANDS["quick"] == list(planned_s()))
        print(sorted(part for parts in COMMANDS.values() for part in parts) == sorted(PARTS))
        names = predictions("NVIDIA H100", 3000.0, 790.0)
        print([f"{kind}: decode step, 1 streams" in names for kind in ("bfloat16", "fp8", "int4", "experts")])
    """
    lines = run("-c", program, PYTHONPATH=f"{ROOT / 'benchmarks'}:{ROOT}").splitlines()
    assert lines[1:] == ["True", "[True, True, True, True]"]
    planned, is_in_order = ast.literal_eval(lines[0].replace("] ", "], "))
    assert max(planned) < 460 and is_in_order


@pytest.mark.slow
@pytest.mark.long
def test_the_part_of_several_gpus_runs_on_several_processors(tmp_path: Path) -> None:
    text = run("benchmarks/gpu_check.py", "--smoke", "--results", str(tmp_path), "parallel")
    for layout in ("-tp 2", "-pp 2", "-dp 2"):
        assert f"{layout}: greedy tokens of one device before a difference |  | 64 of 64 |" in text
        assert f"{layout}: same bits in two runs, in another order |  | yes |" in text
        assert layout == "-dp 2" or f"{layout}: the end of a worker is noticed after" in text


@pytest.mark.long
def test_a_check_without_a_gpu_says_that_there_is_none() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_check.py"], capture_output=True, text=True, timeout=240, cwd=ROOT,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "there is no CUDA device" in done.stderr


@pytest.mark.long
def test_what_fails_is_said_and_the_next_is_tried() -> None:
    program = """if True:
        from gpu_checks.engines import whatever_fails

        def rows():
            yield "first", "", "1"
            raise ValueError("no such\\nthing")

        print([*whatever_fails("the whole", rows()), *whatever_fails("next", iter([("second", "", "2")]))])
    """
    found = ast.literal_eval(run("-c", program, PYTHONPATH=f"{ROOT / 'benchmarks'}:{ROOT}"))
    assert found == [
        ("first", "", "1"), ("the whole", "", "FAILED: ValueError: no such thing"), ("second", "", "2")
    ]  # fmt: skip


@pytest.mark.parametrize(("device", "column"), [("h100", 3), pytest.param("h200", 4, marks=pytest.mark.long)])
def test_the_documented_predictions_are_those_of_the_program(device: str, column: int) -> None:
    documented = {}
    for line in (ROOT / "benchmarks" / "results" / "2026-11-30-gpu-predictions.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 5:
            documented[cells[1]] = cells[column]
    for line in run("benchmarks/gpu_limits.py", "--device", device).splitlines()[1:]:
        what, value = line[:50].strip(), line[50:].split()[0]
        assert documented[what] == value
