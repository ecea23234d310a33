"""Compares what `octavo plan` predicts for this machine's processors with what the engine takes, in turn.

    python benchmarks/plan_accuracy.py [--rounds 5] [--batches 1 4 16] [--outputs 64] [MODEL] [--format int8]

The engine is measured as `octavo bench latency` does it. A decode step is the time of `--outputs` more tokens behind
cached prompts of 128; a prompt has 512 tokens. Figures are medians over the rounds. Other programs on the machine
move both: believe it only where the rounds agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from octavo import LLM, SamplingParams

_PROMPT, _LONG_PROMPT = 128, 512
_TRIES = 3  # in a round
_PLAN = [sys.executable, "-m", "octavo.entrypoints.cli.main", "plan", "--json"]


def batch_s(llm: LLM, prompts: list[list[int]], num_out: int) -> float:
    """Seconds of a batch."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_out)
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", nargs="?", default="")
    parser.add_argument("--format", choices=("as-is", "int8", "int4"), default="as-is")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--outputs", type=int, default=64)
    args = parser.parse_args()
    of_plan = [*([args.model] if args.model else []), f"--format={args.format}", "--batch-sizes"]
    of_plan += [*map(str, args.batches), f"--context-len={_PROMPT + args.outputs // 2}", f"--input-len={_LONG_PROMPT}"]
    quantization = None if args.format == "as-is" else args.format
    llm = LLM(args.model, device="cpu", quantization=quantization)
    random = np.random.default_rng(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        tokens: list[list[int]] = random.integers(llm.config.model.vocab_size, size=(count, length)).tolist()
        return tokens

    pairs: dict[str, list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        done = subprocess.run([*_PLAN, *of_plan], check=True, capture_output=True, text=True)
        plan: dict[str, Any] = json.loads(done.stdout)
        for entry in plan["decode"]:
            batch = prompts(entry["batch"], _PROMPT)
            batch_s(llm, batch, 1)  # from here on the prompts are in the cache
            times_s = [(batch_s(llm, batch, 1 + args.outputs), batch_s(llm, batch, 1)) for _ in range(_TRIES)]
            step_s = statistics.median(more - one for more, one in times_s) / args.outputs
            pairs.setdefault(f"decode, {entry['batch']} at once", []).append((entry["seconds"], step_s))
        prompt_s = statistics.median(batch_s(llm, prompts(1, _LONG_PROMPT), 1) for _ in range(_TRIES))
        pairs.setdefault(f"prompt of {_LONG_PROMPT}", []).append((plan["prefill"][0]["seconds"], prompt_s))
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    print(f"{'':24}{'predicted':>12}{'measured':>12}{'ratio':>8}   ratios of the rounds")
    for name, found in pairs.items():
        predicted, measured = (statistics.median(pair[i] for pair in found) for i in (0, 1))
        ratios = " ".join(f"{p / m:.2f}" for p, m in found)
        print(f"{name:24}{1e3 * predicted:>9.2f} ms{1e3 * measured:>9.2f} ms{predicted / measured:>8.2f}   {ratios}")


if __name__ == "__main__":
    main()
