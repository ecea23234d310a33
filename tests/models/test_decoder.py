"""The decoder over the reference backend gives the logits of `transformers`, in chunks, one by one and in mixed
batches, whatever the architecture's settings.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.models.registry import build, describe
from octavo.ops import Ops
from tests.models.driving import ArrayWeights, all_logits
from tests.models.small_models import MODELS, VOCAB


def hf_config(reference: Any) -> dict[str, Any]:
    return reference.config.to_dict() | {"architectures": reference.config.architectures or [type(reference).__name__]}


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_mixed_steps_equal_those_of_transformers(name: str, ops: Ops) -> None:
    reference = MODELS[name].reference(seed=list(MODELS).index(name))
    weights = ArrayWeights.of(reference)
    description = describe(hf_config(reference))
    model = build(description, weights, ops, 128, "float32")
    assert weights.left == ({"lm_head.weight"} if description.tie_word_embeddings else set())

    sequences = [torch.randint(3, VOCAB, (length,)).tolist() for length in (1, 9, 33, 70)]
    for tokens, found in zip(sequences, all_logits(model, ops, sequences), strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
