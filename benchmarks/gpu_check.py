"""Everything about the GPU backend that only a GPU can tell: `scripts/gpu-check` prepares what this needs and runs it.

    python benchmarks/gpu_check.py [quick | kernels | rest | PART ...] [--results FOLDER] [--limit-s 450]
                                   [--total-s 480] [--smoke]

`quick` is what to know first, in at most eight minutes on a machine that has never compiled a kernel: `rates` of the
device, `rows` (bits of a row of each product, alone and among others), `answers` (one engine from end to end, and the
CPU's), then an 8B-shaped model in `bfloat16`, `fp8` and `int4`, output over `http`, and `experts`. `rest` is what
neither `quick` nor `kernels` has.

Other parts, each of which takes less than eight minutes on such a machine: `kernels` (their tests on the device, and a
request's bits alone, among others, in chunks, preempted), `parity` (answers of a GPU and of the CPU on the same random
weights, for every family), `pooling` (the same of models that pool, and texts a second), `parallel` (several GPUs,
where there are some, that share a model or have one each: the answers of one, the same bits in two runs, the end of a
worker, steps, exchanges, output of engines), `model` (an 8B-shaped model: decode, prefill, where a step's time goes),
`adapters` (what they add to such a model's steps), `transformers` (the same work on the same device), `start` (with an
empty cache of kernels, and again), `serve` (over HTTP, by `octavo bench serve`).

Each part is a process of its own. What it finds is in FOLDER/PART.json as soon as it is found, what it prints in
FOLDER/PART.log, and FOLDER/page.md has predictions, measurements and their ratios of all parts so far: parts may be run
one by one, again, or not at all. Compiled kernels are shared through FOLDER/triton, unless TRITON_CACHE_DIR is set.
Where a command is lent a machine, and brings back what lies in the folder $OUT, the same is there at each moment in
three files: page.md, results.json and log.txt. `--smoke` runs all of it in minutes on any machine, on a tiny model and
the CPU where there is no GPU: the figures mean nothing then, but the check itself is seen to work.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any, BinaryIO

import torch
from gpu_checks.correctness import kernels, parity
from gpu_checks.engines import HAS_GPU, Row, whatever_fails
from gpu_checks.parallel import parallel
from gpu_checks.pooling import pooling
from gpu_checks.quick import QUICK, planned_s
from gpu_checks.serving import ready, serve, start
from gpu_checks.speed import COPY, PRODUCT, adapters, model, transformers
from gpu_limits import LLAMA_3_1_8B, Limits, quick_rows
from gpu_limits import rows as predicted_rows

from octavo.models.registry import describe
from octavo.ops.triton.schedule import MACHINES

PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    **{name: part.rows for name, part in QUICK.items()},
    "kernels": kernels, "parity": parity, "pooling": pooling, "parallel": parallel, "model": model,
    "adapters": adapters, "transformers": transformers, "start": start, "serve": serve,
}  # fmt: skip
COMMANDS = {
    "quick": list(QUICK), "kernels": ["kernels"], "rest": [part for part in PARTS if part not in (*QUICK, "kernels")]
}  # fmt: skip
_QUICK_S = 480.0


def device_name() -> str:
    if not HAS_GPU:
        return "no GPU"
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"


def write_part(results: Path, part: str, rows: list[Row], state: str) -> None:
    """At once or not at all: the process may be ended in the midst of it."""
    entry = {"part": part, "device": device_name(), "state": state, "rows": rows}
    new = results / f"{part}.new"
    new.write_text(json.dumps(entry, indent=1))
    new.replace(results / f"{part}.json")


def read_parts(results: Path) -> list[dict[str, Any]]:
    """Of all parts that have left anything, in their order."""
    return [json.loads(file.read_text()) for part in PARTS if (file := results / f"{part}.json").exists()]


@cache
def predictions(device: str, copy_gbs: float, tflops: float) -> dict[str, float]:
    """Of every row that has one, by its name, at rates that were measured."""
    known = MACHINES["a100" if "A100" in device else "h200" if "H200" in device else "h100"]
    machine = replace(known, copy_gbs=copy_gbs, tflops=tflops)
    rows = {what: value for what, _, value in predicted_rows(Limits(describe(LLAMA_3_1_8B), machine))}
    rates = {COPY: known.copy_gbs, PRODUCT: known.tflops}  # of such devices: less says that something else runs
    return rates | rows | quick_rows(machine, bool(os.environ.get("OCTAVO_KERNELS")))


def predicted_from(parts: list[dict[str, Any]]) -> dict[str, float]:
    """Predictions for the device and the rates of `parts`; of those without a GPU, which predict nothing, an H100's."""
    measured = {what: value for part in parts for what, _, value in part["rows"]}
    if not {COPY, PRODUCT} <= measured.keys():
        return {}
    device = next((part["device"] for part in parts if part["device"] != "no GPU"), None)
    if device is None:
        return predictions("H100", MACHINES["h100"].copy_gbs, MACHINES["h100"].tflops)
    return predictions(device, float(measured[COPY]), float(measured[PRODUCT]))


def beside(predicted: dict[str, float], what: str, value: str) -> tuple[str, str]:
    """A row's prediction and what was measured over it; empty where there is none."""
    if (expected := predicted.get(what)) is None or value.startswith("FAILED"):
        return "", ""
    return f"{expected:.1f}", f"{float(value) / expected:.2f}"


def page(parts: list[dict[str, Any]]) -> str:
    """Markdown."""
    predicted = predicted_from(parts)
    lines = []
    for part in parts:
        lines += [f"## {part['part']}: {part['state']}", "", f"On {part['device']}.", ""]
        lines += ["| | predicted | measured | ratio | |", "|---|---|---|---|---|"]
        for what, unit, value in part["rows"]:
            expected, ratio = beside(predicted, what, value)
            lines.append(f"| {what} | {expected} | {value} | {ratio} | {unit} |")
        lines.append("")
    return "\n".join(lines)


def publish(results: Path) -> None:
    """The page of what there is, and what comes back from a lent machine: few files, whole at each moment."""
    parts = read_parts(results)
    text = page(parts)
    (results / "page.md").write_text(text)
    if brought_back := os.environ.get("OUT"):
        (Path(brought_back) / "page.md").write_text(text)
        (Path(brought_back) / "results.json").write_text(json.dumps(parts, indent=1))


def run_part(part: str, results: Path, smoke: bool, limit_s: float) -> bool:
    """In a process of its own -> whether it came to its end. What it prints goes to its log too."""
    (results / f"{part}.json").unlink(missing_ok=True)
    command = [sys.executable, "-u", __file__, "--part", part, "--results", str(results)]
    # Quick's engines run the kernels themselves where there is no GPU.
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if part in QUICK and not HAS_GPU else {})
    begun = time.monotonic()
    seen = -1
    with ExitStack() as stack:
        logs: list[BinaryIO] = [stack.enter_context((results / f"{part}.log").open("wb"))]
        if brought_back := os.environ.get("OUT"):
            logs.append(stack.enter_context((Path(brought_back) / "log.txt").open("ab")))
        # A session of its own, so that what it has started ends with it.
        child = subprocess.Popen(
            [*command, *(["--smoke"] if smoke else [])], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, env=environment,
        )  # fmt: skip
        timer = Timer(limit_s, lambda: os.killpg(child.pid, signal.SIGKILL))
        timer.start()
        assert child.stdout is not None
        file = results / f"{part}.json"
        for line in child.stdout:
            for log in (sys.stdout.buffer, *logs):
                log.write(line)
                log.flush()
            if file.exists() and (now := file.stat().st_mtime_ns) != seen:
                seen = now
                publish(results)
        status = child.wait()
        timer.cancel()
    took = f"{time.monotonic() - begun:.0f} s"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    ended = f"ended after {took}" if status == -signal.SIGKILL else f"failed with status {status} after {took}"
    write_part(results, part, rows, f"done in {took}" if status == 0 else ended)
    publish(results)
    print(f"== {part}: status {status}, {took}", flush=True)
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"quick, kernels, rest, or of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--results", type=Path, default=Path("gpu-check-results"))
    parser.add_argument("--limit-s", type=float, default=450, help="of each part, which is ended then")
    parser.add_argument("--total-s", type=float, help="of all parts together; quick alone: 480")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--ready", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts) - {*PARTS, *COMMANDS}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join((*COMMANDS, *PARTS))}")
    if not HAS_GPU and not args.smoke:
        parser.error("there is no CUDA device; --smoke shows that the check itself works")
    if args.ready:
        ready(args.smoke)
        return 0
    if args.part:
        return show_part(args.part, args.results, args.smoke)
    for folder in (args.results, Path(os.environ.get("OUT") or args.results)):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRITON_CACHE_DIR", str(args.results.absolute() / "triton"))
    parts = list(dict.fromkeys(part for each in args.parts or COMMANDS for part in COMMANDS.get(each, [each])))
    total_s = args.total_s or (_QUICK_S if args.parts == ["quick"] else float("inf"))
    begun, failed = time.monotonic(), []
    if planned := {part: seconds for part, seconds in planned_s().items() if part in parts}:
        told = ", ".join(f"{part} {seconds:.0f}" for part, seconds in planned.items())
        print(f"== expected with 16 cores and nothing compiled, in s: {told}; in all {sum(planned.values()):.0f}")
    for part in parts:
        left_s = total_s - (time.monotonic() - begun)
        if left_s <= 0 or not run_part(part, args.results, args.smoke, min(args.limit_s, left_s)):
            failed.append(part)
    print(page(read_parts(args.results)))
    if failed:
        print(f"failed, or left out for time: {', '.join(failed)}")
    return 1 if failed else 0


def show_part(part: str, results: Path, smoke: bool) -> int:
    """Run a part in this process: keep and print each row as it is found, with its prediction beside."""
    rows: list[Row] = []
    before = [other for other in read_parts(results) if other["part"] != part]
    for what, unit, value in whatever_fails(part, PARTS[part](smoke)):
        rows.append((what, unit, value))
        write_part(results, part, rows, "under way")
        predicted = predicted_from([*before, {"device": device_name(), "rows": rows}])
        expected, ratio = beside(predicted, what, value)
        print(what, unit, value, f"(predicted {expected}, {ratio} of it)" if expected else "", flush=True)
    return int(any(value.startswith(("FAILED", "DIFFER", "NO")) for _, _, value in rows))


if __name__ == "__main__":
    sys.exit(main())
