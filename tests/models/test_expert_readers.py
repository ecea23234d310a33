"""Readers of architectures with experts: what config.json leaves out, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from octavo.errors import LoadError
from octavo.models.families.moe import FAMILIES
from octavo.models.registry import describe
from tests.models.small_experts import EXPERT_MODELS
from tests.models.small_models import MODEL_TYPES, SIZES

# Their configuration classes have other names for sizes, or no default for the number of experts.
_OTHERS = {"DbrxForCausalLM", "Dots1ForCausalLM"}


@pytest.mark.parametrize("architecture", sorted(set(FAMILIES) - _OTHERS))
def test_what_is_left_out_is_the_configuration_classes_own_default(architecture: str) -> None:
    sizes = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
    sizes |= {"num_hidden_layers": 8, "num_attention_heads": 64, "hidden_size": 6400}
    config = AutoConfig.for_model(MODEL_TYPES[architecture], **sizes).to_dict()
    assert describe(sizes | {"architectures": [architecture]}) == describe(config | {"architectures": [architecture]})


def test_every_architecture_of_the_table_is_compared_with_transformers() -> None:
    assert {model.architecture for model in EXPERT_MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("architecture", "given", "message"),
    [
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not built yet"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "9 of 8 experts, out of 1 of 1 groups, cannot be chosen"),
        ("PhimoeForCausalLM", {"num_experts_per_tok": 3}, "3 experts by sparsemixer are not built; it chooses 2"),
        ("MixtralForCausalLM", {"hidden_act": "mish"}, "activation 'mish' of experts is not built"),
        ("Glm4MoeForCausalLM", {"n_group": 3}, "8 of 128 experts, out of 1 of 3 groups, cannot be chosen"),
        (
            "DbrxForCausalLM", {"ffn_config": {"moe_normalize_expert_weights": 2}},
            "divided by their norm of power 2 are not built",
        ),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused(architecture: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        describe(SIZES | given | {"architectures": [architecture]})


def test_llama_4_serves_what_its_chunks_hold() -> None:
    """Beyond a chunk most layers would see fewer keys than ours do."""
    config = SIZES | {"architectures": ["Llama4ForCausalLM"], "max_position_embeddings": 1 << 20}
    assert describe(config).max_position_embeddings == 8192
    assert describe(config | {"attention_chunk_size": None}).max_position_embeddings == 1 << 20
