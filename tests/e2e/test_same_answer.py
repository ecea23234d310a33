"""A request's logits are the same bits alone, among others, in other chunks, after a prefix hit and a preemption."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.e2e.driving import run_arriving

SUBJECT = (
    "The octavo is a book format in which each printed sheet is folded three times to make eight leaves. Printers of "
    "the Renaissance preferred it because such a book was cheap to make, light to carry and easy to hold. " * 3
)
NUM_TOKENS = 24


def logits_of_subject(llm: LLM, company: list[list[int]], cached_tokens: int = 0) -> torch.Tensor:
    """[NUM_TOKENS, vocab_size]: the raw logits of the subject's answer, sampled with a seed, beside other requests."""
    steps: dict[int, torch.Tensor] = {}

    def keep(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        steps[len(output)] = logits.clone()
        return logits

    subject = SamplingParams(
        temperature=0.8, top_p=0.95, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True, logits_processors=[keep]
    )
    others = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=10 + i % 20, ignore_eos=True) for i in range(len(company))
    ]
    run = run_arriving(llm, [SUBJECT, *company], [subject, *others], seed=len(company))
    assert run.outputs[0].num_cached_tokens == cached_tokens
    assert sorted(steps) == list(range(NUM_TOKENS))
    return torch.stack([steps[i] for i in range(NUM_TOKENS)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "cache", "num_others"),
    [
        ("bfloat16", "auto", 15),
        pytest.param("bfloat16", "auto", 63, marks=pytest.mark.long),
        pytest.param("bfloat16", "int8", 63, marks=pytest.mark.long),
        pytest.param("float32", "auto", 63, marks=pytest.mark.long),
        pytest.param("bfloat16", "fp8_e4m3", 63, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_logits_are_bitwise_equal_whatever_else_the_engine_does(dtype: str, cache: str, num_others: int) -> None:
    generator = torch.Generator().manual_seed(0)
    company = [
        torch.randint(100, 40000, (length,), generator=generator).tolist()
        for length in torch.randint(1, 150, (num_others,), generator=generator).tolist()
    ]

    def engine(**args: Any) -> LLM:
        return LLM(dtype=dtype, kv_cache_dtype=cache, max_model_len=512, **args)

    alone = engine(enable_prefix_caching=False)
    expected = logits_of_subject(alone, [])
    assert torch.equal(logits_of_subject(alone, company), expected), "in a batch"
    chunked = engine(max_num_batched_tokens=29, max_num_seqs=8, enable_prefix_caching=True)
    assert torch.equal(logits_of_subject(chunked, []), expected), "in chunks of at most 29 tokens"
    whole_blocks = (len(chunked.tokenizer(SUBJECT).input_ids) - 1) // 16 * 16
    hit = logits_of_subject(chunked, company[:4], cached_tokens=whole_blocks)
    assert torch.equal(hit, expected), "after a prefix hit, in chunks, beside others"
    small = engine(num_gpu_blocks_override=40, max_num_batched_tokens=64)
    assert torch.equal(logits_of_subject(small, company[:16]), expected), "in a cache that forces preemption"
    if num_others < 16:
        return  # tests/execution/test_runner.py swaps a smaller model
    swapping = engine(num_gpu_blocks_override=40, max_num_batched_tokens=64, preemption_mode="swap", swap_space=0.1)
    assert torch.equal(logits_of_subject(swapping, company[:16]), expected), "in a cache that forces swapping"
