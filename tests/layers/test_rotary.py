"""Tables of rotary positions."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.errors import LoadError
from octavo.layers.parameters import Parameters
from octavo.layers.rotary import AttentionTemperature, RopeConfig, alibi_slopes, identity_table, rotary_table
from octavo.loading.recording import RecordingWeights
from octavo.models.inventory import _NoOps, record
from octavo.models.registry import describe
from octavo.ops import Ops
from tests.models.small_models import SIZES

THETA = {"rope_theta": 100000.0}
LONG = {"short_factor": [1.0 + 0.1 * i for i in range(32)], "long_factor": [1.5 + 0.5 * i for i in range(32)]}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, all settings": {
        "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn, not truncated": {"factor": 4.0, "attention_factor": 1.3, "truncate": False},
    "dynamic": {"factor": 3.0},
    "longrope, short": LONG | {"original_max_position_embeddings": 8192, "factor": 4.0},
    "longrope, long": LONG | {"original_max_position_embeddings": 1024},
    "proportional": {"partial_rotary_factor": 0.5, "factor": 2.0},
}  # fmt: skip


def test_a_table_that_no_memory_holds_is_refused() -> None:
    parameters = Parameters(RecordingWeights("float32"), cast(Ops, _NoOps()), 1 << 45, "float32")
    with pytest.raises(
        LoadError, match=f"a table of {1 << 45} positions does not fit into the memory; lower --max-mod"
    ):
        parameters.rotary(RopeConfig(10000.0, 64), 64)


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_those_of_transformers_but_for_the_last_bits(name: str) -> None:
    parameters = THETA | {"rope_type": name.split(",")[0]} | SCALINGS[name]
    config = LlamaConfig(**SIZES | {"head_dim": 64, "max_position_embeddings": 2048, "rope_parameters": parameters})
    description = describe(config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    rope = description.layers[0].attention.rope
    assert rope is not None
    found = rotary_table(rope, 8192)
    embedding = LlamaRotaryEmbedding(config)
    cos, sin = embedding(torch.zeros(1), torch.arange(8192)[None])
    expected = np.concatenate([cos[0, :, :32].numpy(), sin[0, :, :32].numpy()], axis=1)
    assert found.dtype == np.float32
    # A frequency may differ in its last bits, and the angle with it.
    angles = np.outer(np.arange(8192), embedding.inv_freq.numpy())
    assert (np.abs(found - expected) <= 1.5 * (1.2e-7 + 2.0**-21 * np.tile(angles, 2))).all()


@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6])
@pytest.mark.parametrize("rotary_dim", [64, 80])
def test_tables_are_right_to_the_last_bit_but_one(theta: float, rotary_dim: int) -> None:
    table = rotary_table(RopeConfig(theta, rotary_dim), 40000)
    powers = torch.tensor(theta, dtype=torch.float64) ** (torch.arange(0, rotary_dim, 2) / rotary_dim).double()
    angles = torch.outer(torch.arange(40000.0), 1.0 / powers.float()).double()
    exact = torch.cat([angles.cos(), angles.sin()], dim=1).numpy()
    last_place = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    # Beside the rounding: the polynomial's own error, and near zero that of pi in float64.
    assert (np.abs(table - exact) <= 0.61 * last_place + 1e-11).all()


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch computes sines otherwise")
def test_the_default_models_table_is_the_one_that_torch_computes() -> None:
    angles = torch.outer(torch.arange(8192.0), 1.0 / 100000.0 ** (torch.arange(0, 64, 2) / 64))
    expected = torch.cat([angles.cos(), angles.sin()], dim=1).numpy()
    np.testing.assert_array_equal(rotary_table(RopeConfig(theta=100000.0, rotary_dim=64), 8192), expected)


def test_the_identity_rotates_nothing() -> None:
    assert identity_table(1 << 40).nbytes == 0, "it has a row for each position, and no columns"


def test_slopes_fall_by_powers_of_two() -> None:
    np.testing.assert_allclose(alibi_slopes(8, 8.0), 2.0 ** -np.arange(1.0, 9.0))
    np.testing.assert_allclose(alibi_slopes(3, 8.0), [2**-4, 2**-8, 2**-2])  # those of 2, and every other of 4


def test_queries_grow_with_the_logarithm_of_the_position() -> None:
    np.testing.assert_allclose(
        AttentionTemperature(0.1, 4).table(12), np.repeat(1 + 0.1 * np.log([1, 2, 3]), 4), rtol=1e-6
    )
    np.testing.assert_allclose(
        AttentionTemperature(0.1, 4, 1, is_power=True).table(3), np.power([1.25, 1.5, 1.75], 0.1), rtol=1e-6
    )


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_row_of_a_table_does_not_depend_on_how_many_there_are(is_changed: bool) -> None:
    changes: dict[str, Any] = {"kind": "yarn", "factor": 4.0, "attention_factor": 1.2, "reversed": True}
    rope = RopeConfig(theta=1e4, rotary_dim=8, original_max_position=16, **changes if is_changed else {})
    whole = rotary_table(rope, 5000)
    for count in (1, 1024, 1025, 3000):
        np.testing.assert_array_equal(rotary_table(rope, count), whole[:count])


def test_tables_count_among_what_a_model_takes_once_for_layers_that_rotate_alike() -> None:
    def num_bytes(num_positions: int, **given: Any) -> int:
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
        config = sizes | {"num_attention_heads": 2, "max_position_embeddings": 64} | given
        recorded = RecordingWeights("float32")
        record(describe(config), recorded)
        return recorded.packed_bytes(num_positions=num_positions)[0] - recorded.packed_bytes()[0]

    assert num_bytes(1000, architectures=["LlamaForCausalLM"]) == 1000 * 16 * 4
    two_kinds = {"num_hidden_layers": 6, "head_dim": 24, "num_key_value_heads": 1, "sliding_window": 8}
    assert num_bytes(1000, architectures=["Gemma3ForCausalLM"], **two_kinds) == 1000 * 2 * 24 * 4
    assert num_bytes(1000, architectures=["OPTForCausalLM"], ffn_dim=64, word_embed_proj_dim=32) == 0
