"""Architectures on Triton's kernels: those that need what no other has."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from octavo.models.registry import build, describe
from octavo.ops import Ops, cuda
from tests.models.driving import ArrayWeights, all_logits
from tests.models.small_experts import ALL_MODELS
from tests.models.small_latent import LATENT_MODELS
from tests.models.small_models import VOCAB
from tests.ops.triton.conftest import DEVICE

_INDEXED = LATENT_MODELS["deepseek v3.2, of whose keys its index chooses 8"]
MODELS = ALL_MODELS | LATENT_MODELS
# Heads of the cache are multiples of 16 on GPUs.
MODELS["deepseek v3.2"] = _INDEXED._replace(settings=_INDEXED.settings | {"kv_lora_rank": 32, "index_head_dim": 24})
NAMES = (
    "gemma 2",
    "gpt-oss",
    "bloom",
    "llama 4",
    "youtu",
    "deepseek v3.2",
    "granite swa",
    "hunyuan dense",
    "apertus",
    "cohere",
    "ministral 3",
    "qwen2 moe",
    "glm 4 moe",
    "beam",
    "gemma 3n",
)


@pytest.mark.long
@pytest.mark.skipif(DEVICE.type != "cpu", reason="batches are made in the host's memory")
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str) -> None:
    reference: Any = MODELS[name].reference(0)
    description = describe(reference.config.to_dict() | {"architectures": [MODELS[name].architecture]})
    model = build(description, ArrayWeights.of(reference), cast(Ops, cuda), 64, "float32")
    sequences = [torch.randint(3, VOCAB, (length,)).tolist() for length in (2, 11)]
    for tokens, found in zip(sequences, all_logits(model, cast(Ops, cuda), sequences), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(found, reference(torch.tensor([tokens])).logits[0], atol=1e-4, rtol=0)
