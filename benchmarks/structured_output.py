"""Prints what following a grammar costs: output tokens per second at several numbers of streams, free and constrained.

    python benchmarks/structured_output.py [--streams 1,8,32] [--max-tokens 64] [--rounds 3] [--temperature 0]

The grammar is the JSON schema of a record with strings, numbers and an array, made so that no answer ends before its
last token: both runs compute the same number of tokens of the same prompts. Rounds alternate, and the best of each is
shown. The first answer, which loads the vocabulary and compiles the grammar, is timed apart.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from octavo import LLM, SamplingParams, StructuredOutputsParams

RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["person", "place", "thing"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": RECORD, "minItems": 1000}


def run(llm: LLM, streams: int, params: SamplingParams) -> float:
    """Output tokens per second."""
    prompts = [f"A list of {i + 3} records as JSON:\n" for i in range(streams)]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    llm = LLM(model=args.model, max_model_len=2048, enable_prefix_caching=False)
    free = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=True, seed=1)
    wanted = StructuredOutputsParams(json=SCHEMA)
    constrained = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, seed=1, structured_outputs=wanted
    )
    begin = time.perf_counter()
    run(llm, 1, constrained)
    print(f"first answer: {time.perf_counter() - begin:.2f} s")
    print(f"{'streams':>7}{'free':>10}{'grammar':>10}   (output tokens per second)")
    for streams in map(int, args.streams.split(",")):
        best = {"free": 0.0, "grammar": 0.0}
        for _ in range(args.rounds):
            best["free"] = max(best["free"], run(llm, streams, free))
            best["grammar"] = max(best["grammar"], run(llm, streams, constrained))
        cost = 1 - best["grammar"] / best["free"]
        print(f"{streams:>7}{best['free']:>10.1f}{best['grammar']:>10.1f}   {cost:+.1%}", flush=True)


if __name__ == "__main__":
    main()
