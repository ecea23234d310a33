"""Models of which an index chooses the keys that a token reads, in the whole engine: whatever of a sequence was cached,
copied, moved away or guessed, its answers have the bits that they have alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.models.small_latent import LATENT_MODELS
from tests.models.small_models import VOCAB

NAMES = [name for name, model in LATENT_MODELS.items() if model.settings.get("index_topk") == 8]
DOCUMENT = torch.randint(3, VOCAB, (70,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [DOCUMENT, [*DOCUMENT[:61], 7, 9, 11], [*DOCUMENT[:40], 5], DOCUMENT[20:], DOCUMENT]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
# What is not at its place costs blocks: three sequences of eleven blocks do not fit into 24.
SETTINGS: dict[str, dict[str, Any]] = {
    "prefixes": {"enable_prefix_caching": True},
    "chunks": {"max_num_batched_tokens": 11},
    "swapping": {"preemption_mode": "swap", "swap_space": 0.01, "num_gpu_blocks_override": 24},
    "guesses": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


def engine(folder: Path, tokenizer: Path, **settings: Any) -> LLM:
    shape = {"dtype": "float32", "max_model_len": 96, "block_size": 8, "num_gpu_blocks_override": 80}
    return LLM(str(folder), tokenizer=str(tokenizer), check_invariants=True, **shape | settings)


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[tuple[Any, Any]]]:
    """Of each prompt the tokens and the log-probabilities of each completion."""
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [[(list(one.token_ids), one.logprobs) for one in result.outputs] for result in results]


@pytest.mark.parametrize("name", NAMES)
def test_answers_have_the_bits_that_they_have_alone(name: str, tiny_tokenizer: Path, tmp_path: Path) -> None:
    model = LATENT_MODELS[name]
    model.save(model.reference(seed=2), tmp_path)
    alone = engine(tmp_path, tiny_tokenizer, enable_prefix_caching=False)
    expected = [answers(alone, [prompt], PARAMS)[0] for prompt in PROMPTS]
    for settings in SETTINGS.values():
        llm = engine(tmp_path, tiny_tokenizer, **settings)
        for _ in range(2):  # the second time of what the first has left
            assert answers(llm, PROMPTS, PARAMS) == expected
    sampled = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, logprobs=3)
    forked = [answers(alone, [prompt], sampled)[0] for prompt in PROMPTS[1:3]]
    assert answers(engine(tmp_path, tiny_tokenizer), PROMPTS[1:3], sampled) == forked


def test_a_prefix_of_another_request_is_read(tiny_tokenizer: Path, tmp_path: Path) -> None:
    model = LATENT_MODELS[NAMES[0]]
    model.save(model.reference(seed=2), tmp_path)
    llm = engine(tmp_path, tiny_tokenizer, enable_prefix_caching=True)
    answers(llm, PROMPTS[:1], PARAMS)
    [result] = llm.generate([{"prompt_token_ids": PROMPTS[1]}], PARAMS, use_tqdm=False)
    assert result.num_cached_tokens == 56
