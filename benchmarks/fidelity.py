"""How far what is computed lies from the same weights in float32: agreement in the best token, and KL divergence.

    python benchmarks/fidelity.py [--model MODEL] [--windows 16] [--forms auto bfloat16 int8 ...]

A form is a `--dtype`, or a `--quantization` of the weights at load; `auto` is what `octavo serve` would do. The text
(benchmarks/data/perplexity.txt, see perplexity.py) is cut into windows of 512 tokens, of which 511 positions predict
another. The reference is Octavo with `--dtype float32`, which expands blocks of few bits and multiplies floats. KL is
that of the distributions of the next token, reference first, in nats; once more without the thousandth of positions
that are furthest off, since a single one can decide the mean.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--forms", nargs="*", default=["auto"])
    args = parser.parse_args()
    expected = log_probabilities(args.model, args.windows, dtype="float32")
    print("| form | best token agrees | KL | without 0.1% | median | 99th percentile | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name in args.forms:
        is_dtype = name in ("auto", "bfloat16", "float32")
        start = time.perf_counter()
        found = log_probabilities(args.model, args.windows, **{"dtype" if is_dtype else "quantization": name})
        seconds = time.perf_counter() - start
        divergence = (np.exp(expected) * (expected - found)).sum(-1)
        trimmed = np.sort(divergence)[: len(divergence) - len(divergence) // 1000].mean()
        agrees = (expected.argmax(-1) == found.argmax(-1)).mean()
        print(
            f"| {name} | {agrees:.2%} | {divergence.mean():.5f} | {trimmed:.5f} | {np.median(divergence):.5f} | "
            f"{np.percentile(divergence, 99):.4f} | {seconds:.0f} |"
        )


if __name__ == "__main__":
    main()
