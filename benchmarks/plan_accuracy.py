"""Compares what `octavo plan` predicts for this machine's processors with what `octavo bench latency` takes, in turn.

    python benchmarks/plan_accuracy.py [--rounds 5] [--batches 1 4 16] [--outputs 64] [MODEL] [--format int8]

A decode step is the time of `--outputs` more tokens behind prompts of 128; a prompt has 512 tokens. Figures are medians
over the rounds. Other programs on the machine move both: believe it only where the rounds agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_PROMPT, _LONG_PROMPT = 128, 512
_OCTAVO = [sys.executable, "-m", "octavo.entrypoints.cli.main"]


def bench_s(flags: list[str], batch: int, num_in: int, num_out: int) -> float:
    """Median seconds of a batch."""
    sizes = [f"--batch-size={batch}", f"--input-len={num_in}", f"--output-len={num_out}"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [*_OCTAVO, "bench", "latency", *flags, *sizes, "--num-iters=3", "--num-iters-warmup=1"]
        subprocess.run([*command, f"--json={file}", "--temperature=0"], check=True, capture_output=True)
        return statistics.median(json.loads(file.read_text())["latencies"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", nargs="?", default="")
    parser.add_argument("--format", choices=("as-is", "int8", "int4"), default="as-is")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--outputs", type=int, default=64)
    args = parser.parse_args()
    of_plan = [*([args.model] if args.model else []), f"--format={args.format}", "--json", "--batch-sizes"]
    of_plan += [*map(str, args.batches), f"--context-len={_PROMPT + args.outputs // 2}", f"--input-len={_LONG_PROMPT}"]
    of_bench = [f"--model={args.model}", "--device=cpu"]
    of_bench += [f"--quantization={args.format}"] * (args.format != "as-is")
    pairs: dict[str, list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        done = subprocess.run([*_OCTAVO, "plan", *of_plan], check=True, capture_output=True, text=True)
        plan: dict[str, Any] = json.loads(done.stdout)
        for entry in plan["decode"]:
            batch = entry["batch"]
            more, one = (bench_s(of_bench, batch, _PROMPT, count) for count in (1 + args.outputs, 1))
            pairs.setdefault(f"decode, {batch} at once", []).append((entry["seconds"], (more - one) / args.outputs))
        prompt_s = bench_s(of_bench, 1, _LONG_PROMPT, 1)
        pairs.setdefault(f"prompt of {_LONG_PROMPT}", []).append((plan["prefill"][0]["seconds"], prompt_s))
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    print(f"{'':24}{'predicted':>12}{'measured':>12}{'ratio':>8}   ratios of the rounds")
    for name, found in pairs.items():
        predicted, measured = (statistics.median(pair[i] for pair in found) for i in (0, 1))
        ratios = " ".join(f"{p / m:.2f}" for p, m in found)
        print(f"{name:24}{1e3 * predicted:>9.2f} ms{1e3 * measured:>9.2f} ms{predicted / measured:>8.2f}   {ratios}")


if __name__ == "__main__":
    main()
