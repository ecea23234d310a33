"""How far what is computed lies from the same weights in float32: agreement in the best token, and KL divergence.

    python benchmarks/fidelity.py [--model MODEL] [--windows 16] [--forms auto bfloat16 int8 ...]
        [--precise-layers N ...] [--speed [--rounds 7] [--work 16 64 ...]]

A form is a `--dtype`, or a `--quantization` of the weights at load; `auto` is what `octavo serve` would do. With
`--precise-layers` each form is measured with each of those numbers. The text (benchmarks/data/perplexity.txt, see
perplexity.py) is cut into windows of 512 tokens, of which 511 positions predict another. The reference is Octavo with
`--dtype float32`, which expands blocks of few bits and multiplies floats. KL is that of the distributions of the next
token, reference first, in nats; once more without the thousandth of positions that are furthest off, since a single one
can decide the mean.

`--speed` says what `--precise-layers` cost instead: the times of one stream, of 16 and 64 at once and of prompts,
engines in turn in one process, to those of the first number: medians of so many rounds, and quartiles. `--work` names
some of these four.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo import LLM, SamplingParams
from octavo.execution import prompt_logprobs

if __package__:
    from benchmarks.perplexity import read_tokens
else:
    from perplexity import read_tokens  # type: ignore[no-redef]

WINDOW = 512


@contextmanager
def kept_logits() -> Iterator[list[NDArray[Any]]]:
    """Logits of prompt positions, as the runner measures them."""
    kept: list[NDArray[Any]] = []
    measure = prompt_logprobs.measure

    def keep(ops: Any, logits: Any, *rest: Any) -> Any:
        kept.append(np.array(logits, np.float32))
        return measure(ops, logits, *rest)

    prompt_logprobs.measure = keep
    try:
        yield kept
    finally:
        prompt_logprobs.measure = measure


def log_probabilities(model: str, windows: int, **form: Any) -> NDArray[np.float32]:
    """[positions, vocabulary]"""
    llm = LLM(model, max_model_len=WINDOW + 8, enable_prefix_caching=False, disable_log_stats=True, **form)
    token_ids = read_tokens(llm, windows * WINDOW)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    with kept_logits() as kept:
        for begin in range(0, len(token_ids), WINDOW):
            llm.generate({"prompt_token_ids": token_ids[begin : begin + WINDOW]}, params, use_tqdm=False)
    logits = np.concatenate(kept)
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits


# Requests at once, tokens of a prompt, tokens of an answer.
WORK = {"one stream": (1, 16, 200), "16": (16, 16, 48), "64": (64, 16, 48), "prompts": (8, 256, 1)}


def compare_speed(model: str, numbers: list[int | None], works: list[str], rounds: int) -> None:
    flags: dict[str, Any] = {"max_model_len": 512, "enable_prefix_caching": False, "disable_log_stats": True}
    engines = [LLM(model, precise_layers=n, cpu_memory_utilization=0.1, **flags) for n in numbers]
    print("| precise layers | " + " | ".join(works) + " |\n|---|" + "---|" * len(works))
    ratios: dict[str, list[NDArray[np.float64]]] = {}
    random = np.random.default_rng(0)
    for work in works:
        requests, num_in, num_out = WORK[work]
        params = SamplingParams(max_tokens=num_out, temperature=0.0, ignore_eos=True, detokenize=False)
        seconds = np.zeros((len(engines), rounds))
        for turn in range(rounds):
            for i in range(len(engines))[:: 1 if turn % 2 else -1]:
                prompts = [{"prompt_token_ids": random.integers(100, 4e4, num_in).tolist()} for _ in range(requests)]
                start = time.perf_counter()
                engines[i].generate(prompts, params, use_tqdm=False)
                seconds[i, turn] = time.perf_counter() - start
        ratios[work] = np.quantile(seconds / seconds[0], [0.5, 0.25, 0.75], axis=1).T
    for i, number in enumerate(numbers):
        print(f"| {number} | " + " | ".join("{:.3f} ({:.3f}-{:.3f})".format(*ratios[work][i]) for work in works) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--forms", nargs="*", default=["auto"])
    parser.add_argument("--precise-layers", nargs="*", type=int, default=[None])
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--work", nargs="+", choices=WORK, default=[*WORK], help="of --speed")
    parser.add_argument("--rounds", type=int, default=7, help="of --speed")
    args = parser.parse_args()
    if args.speed:
        return compare_speed(args.model, args.precise_layers, args.work, args.rounds)
    expected = log_probabilities(args.model, args.windows, dtype="float32")
    print("| form | precise layers | best token agrees | KL | without 0.1% | median | 99th percentile | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for name, layers in product(args.forms, args.precise_layers):
        is_dtype = name in ("auto", "bfloat16", "float32")
        start = time.perf_counter()
        found = log_probabilities(
            args.model, args.windows, precise_layers=layers, **{"dtype" if is_dtype else "quantization": name}
        )
        seconds = time.perf_counter() - start
        divergence = (np.exp(expected) * (expected - found)).sum(-1)
        trimmed = np.sort(divergence)[: len(divergence) - len(divergence) // 1000].mean()
        agrees = (expected.argmax(-1) == found.argmax(-1)).mean()
        number = "default" if layers is None else layers
        print(
            f"| {name} | {number} | {agrees:.2%} | {divergence.mean():.5f} | {trimmed:.5f} | "
            f"{np.median(divergence):.5f} | {np.percentile(divergence, 99):.4f} | {seconds:.0f} |"
        )


if __name__ == "__main__":
    main()
