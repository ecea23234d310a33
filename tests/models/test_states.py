"""Layers with a state under everything that a sequence may go through: prompts that begin like earlier ones, forks,
too few blocks. Logits stay those of `transformers`, and equal bits where the same tokens are computed again."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.kv_cache.groups import group_layers
from octavo.kv_cache.manager import KVCacheManager
from octavo.models.registry import describe
from tests.models.small_models import VOCAB
from tests.models.small_recurrent import RECURRENT_MODELS
from tests.models.test_parity import assert_near, logits_of

# One of each kind of state, alone and beside attention.
KINDS = ["mamba", "mamba 2", "jamba", "lfm 2", "qwen 3.5", "zamba 2"]


@pytest.mark.parametrize("preemption_mode", [pytest.param("recompute", marks=pytest.mark.long), "swap"])
@pytest.mark.parametrize("name", KINDS)
def test_prefix_hits_forks_and_too_few_blocks(
    name: str, preemption_mode: str, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    model = RECURRENT_MODELS[name]
    reference = model.reference(seed=7)
    model.save(reference, tmp_path)
    llm = LLM(
        str(tmp_path), tokenizer=str(tiny_tokenizer), dtype="float32", max_model_len=96, max_num_batched_tokens=40,
        block_size=8, num_gpu_blocks_override=5 if name.startswith("mamba") else 20, max_num_seqs=5, swap_space=0.01,
        check_invariants=True, preemption_mode=preemption_mode,
    )  # fmt: skip

    def check(tokens: list[int], logits: torch.Tensor) -> None:
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0]
        assert_near(logits, expected[len(tokens) - len(logits) - 1 : -1])

    shared = torch.randint(3, VOCAB, (40,)).tolist()
    prompts = [shared, *(torch.randint(3, VOCAB, (length,)).tolist() for length in (7, 33, 60))]
    first = logits_of(llm, prompts)
    for tokens, logits in first:
        check(tokens, logits)

    # The same prompt once more, alone, finds its own state; one that goes on from there finds it too.
    [(tokens, logits)] = logits_of(llm, [shared])
    assert tokens == first[0][0] and torch.equal(logits, first[0][1])
    longer = [*tokens, *range(5, 20)]
    params = SamplingParams(temperature=0, max_tokens=1)
    [output] = llm.generate([{"prompt_token_ids": longer}], params, use_tqdm=False)
    assert output.num_cached_tokens >= 40
    [(tokens, logits)] = logits_of(llm, [longer])
    check(tokens, logits)

    found: dict[tuple[int, ...], torch.Tensor] = {}

    def keep(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        found[(*prompt, *output)] = logits.clone()
        return logits

    params = SamplingParams(
        n=3, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logits_processors=[keep], top_k=50
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in (shared, prompts[2])], params, use_tqdm=False)
    for output in outputs:
        completions = [tuple(completion.token_ids) for completion in output.outputs]
        assert all(one != other for one, other in pairwise(completions))
        for completion in completions:
            tokens = [*output.prompt_token_ids, *completion]
            check(tokens, torch.stack([found[tuple(tokens[:-n])] for n in range(len(completion), 0, -1)]))


def test_a_state_space_takes_the_same_memory_at_every_length() -> None:
    description = describe({"architectures": ["Mamba2ForCausalLM"], **RECURRENT_MODELS["mamba 2"].settings})
    cache = KVCacheManager(group_layers(description.layer_caches), [1], 16, [0], enable_prefix_caching=False)
    assert cache.most_blocks(10, 512) == cache.most_blocks(1_000_000, 512) == [1]
