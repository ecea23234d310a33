"""Small random-weight models give the same logits as `transformers` in float32, whatever the architecture's settings.

Checkpoints are written as safetensors by `transformers` and read by Octavo; logits are taken with a logits processor,
the way a user would, so the whole engine is between the weights and the numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.models.small_models import MODELS, VOCAB

PROMPT_LENGTHS = (1, 7, 33, 70)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path, tiny_tokenizer: Path) -> None:
    reference = MODELS[name].reference(seed=list(MODELS).index(name))
    MODELS[name].save(reference, tmp_path)
    prompts = [torch.randint(3, VOCAB, (length,)).tolist() for length in PROMPT_LENGTHS]

    llm = LLM(
        str(tmp_path), tokenizer=str(tiny_tokenizer), dtype="float32", max_model_len=128, max_num_batched_tokens=40,
        num_gpu_blocks_override=64, check_invariants=True,
    )  # fmt: skip
    found: dict[tuple[int, ...], torch.Tensor] = {}

    def keep(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        found[(*prompt, *output)] = logits.clone()
        return logits

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logits_processors=[keep])
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    assert len(found) == len(prompts) * 8
    for output in outputs:
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0]
        for length in range(len(output.prompt_token_ids), len(tokens)):
            torch.testing.assert_close(found[tuple(tokens[:length])], expected[length - 1], atol=1e-4, rtol=0)
