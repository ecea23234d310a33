"""Prints how long the products of a model's layers and of its output matrix take in a recorded step.

    python benchmarks/layer_times.py MODEL... [--repeat 8]

Models take turns. A figure is the sum over the layers of the least of so many replays, in milliseconds, at 1, 16 and 64
rows of one token each, and for a prompt's 512.
"""

from __future__ import annotations

import argparse
import gc

from octavo import LLM, SamplingParams

ROWS = (1, 16, 64, 512)
MOST_SEQS = 64


def measure(model: str, repeat: int) -> str:
    llm = LLM(
        model, max_num_seqs=MOST_SEQS, max_num_batched_tokens=max(ROWS), max_model_len=600, disable_log_stats=True,
        num_gpu_blocks_override=MOST_SEQS * 40,
    )  # fmt: skip
    prompt = {"prompt_token_ids": [100 + i % 400 for i in range(max(ROWS))]}
    llm.generate([prompt], SamplingParams(max_tokens=2), use_tqdm=False)
    program = llm.core.executor.worker.runner.submitter.captured_steps[0].step.program  # type: ignore[attr-defined,union-attr]
    found = []
    for rows in ROWS:
        num_samples = rows if rows <= MOST_SEQS else 1
        replays = [program.profile(rows, 1, num_samples) for _ in range(repeat)]
        least = [min(times) for times in zip(*([ns for _, ns in replay] for replay in replays), strict=True)]
        products = [ns / 1e6 for (name, _), ns in zip(replays[0], least, strict=True) if name == "linear"]
        found.append(f"{rows:>6} rows {sum(products[:-1]):>7.1f} and {products[-1]:>5.2f}")
    return "".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders or GGUF files")
    parser.add_argument("--repeat", type=int, default=8)
    args = parser.parse_args()
    for model in args.models:
        print(f"{measure(model, args.repeat)}  {model}", flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
