"""What a checkpoint must contain is what the model's constructor takes."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PretrainedConfig

from octavo.models.inventory import required_tensors
from octavo.models.registry import describe
from tests.models.small_models import MODELS
from tests.models.test_decoder import hf_config


@pytest.mark.parametrize("name", MODELS)
def test_required_tensors_are_those_of_the_checkpoint(name: str) -> None:
    reference: Any = MODELS[name].reference(0)
    description = describe(hf_config(reference))
    assert isinstance(reference.config, PretrainedConfig)
    expected = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    if description.tie_word_embeddings:
        del expected["lm_head.weight"]
    found = required_tensors(description)
    assert {tensor.name: tensor.shape for tensor in found} == expected
    assert len(found) == len(expected)
    assert [t for t in found if t.is_matrix] == [t for t in found if len(t.shape) == 2]
