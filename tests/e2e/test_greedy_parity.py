"""The default model's greedy tokens are those of `transformers` in float32, whatever the scheduler does meanwhile.

The reference reads the same GGUF file with its own dequantization. It is asked for the logits of Octavo's whole answer
at once: every token must be the reference's best, given the tokens before it. A token is excused only where the
reference's own two best logits lie within 1e-3.
"""

from __future__ import annotations

import os

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.loading.checkpoint import resolve
from tests.e2e.driving import run_arriving

NUM_TOKENS = 64
EXCUSED_GAP = 1e-3

SHARED = (
    "You are a careful assistant. Answer in full sentences, say when you do not know, and never invent a source. "
    "The following question comes from a reader of a small library in a harbour town.\n\n"
)
PROMPTS = [
    "Hello",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "Once upon a time, in a village at the foot of a mountain, there lived",
    "1, 1, 2, 3, 5, 8, 13,",
    "Translate to French: 'The book is on the table.'\n",
    SHARED + "Why is the sky blue?",
    SHARED + "Why is the sea salty?",
    SHARED + "How do ships find their way at night?",
    SHARED + "What is a lighthouse, and who was the first to build one?",
    "List three reasons to read a book twice.\n1.",
    "SELECT name, age FROM users WHERE",
    "The history of printing begins with woodblocks. " * 8,
    "It was a bright cold day in April, and the clocks were striking thirteen. " * 6 + "Then",
    SHARED * 3 + "In one word: what is an octavo?",
]


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    folder, file = os.path.split(resolve("").path)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()


@pytest.mark.long
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_greedy_tokens_equal_those_of_transformers_under_preemption(
    preemption_mode: str, reference: torch.nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(
        dtype="float32", max_model_len=400, max_num_batched_tokens=48, num_gpu_blocks_override=40,
        preemption_mode=preemption_mode, swap_space=0.25, check_invariants=True,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

    run = run_arriving(llm, PROMPTS, [params] * len(PROMPTS), seed=7)

    assert run.num_preemptions > 0
    assert any(stats.num_swapped for stats in run.stats) == (preemption_mode == "swap")
    assert sum(stats.num_prefix_hits for stats in run.stats) > 0
    num_excused = 0
    for output in run.outputs:
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(answer) == NUM_TOKENS
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2, dim=-1)
        for i, token in enumerate(answer):
            if token != int(best.indices[i, 0]):
                gap = float(best.values[i, 0] - best.values[i, 1])
                assert gap <= EXCUSED_GAP, f"{output.prompt!r}: token {i} differs and the reference's gap is {gap}"
                assert token == int(best.indices[i, 1])
                num_excused += 1
    with capsys.disabled():
        print(f"\n{preemption_mode}: {num_excused} of {len(PROMPTS) * NUM_TOKENS} tokens excused, "
              f"{run.num_preemptions} preemptions in {len(run.stats)} steps")  # fmt: skip
