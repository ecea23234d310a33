"""Tables of rotary positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.layers.rotary import RopeConfig, identity_table, rotary_table
from tests.models.small_models import LINEAR_ROPE, LLAMA3_ROPE, sizes

DEFAULT = {"rope_type": "default", "rope_theta": 100000.0}


@pytest.mark.parametrize("parameters", [DEFAULT, LINEAR_ROPE, LLAMA3_ROPE], ids=lambda p: p["rope_type"])
@pytest.mark.parametrize("head_size", [16, 64, 80, 128])
def test_tables_are_those_of_transformers_but_for_the_last_bits(parameters: dict[str, float], head_size: int) -> None:
    config = LlamaConfig(**sizes(2, 2, head_size, max_position_embeddings=8192, rope_parameters=dict(parameters)))
    rope = RopeConfig(
        theta=parameters["rope_theta"],
        rotary_dim=head_size,
        kind=parameters["rope_type"],
        factor=parameters.get("factor", 1.0),
        original_max_position=parameters.get("original_max_position_embeddings", 8192),
    )
    found = rotary_table(rope, 8192)
    embedding = LlamaRotaryEmbedding(config)
    cos, sin = embedding(torch.zeros(1), torch.arange(8192)[None])
    half = head_size // 2
    expected = np.concatenate([cos[0, :, :half].numpy(), sin[0, :, :half].numpy()], axis=1)
    assert found.dtype == np.float32
    # A frequency may differ in its last bits, and the angle with it.
    angles = np.outer(np.arange(8192), embedding.inv_freq.numpy())
    assert (np.abs(found - expected) <= 1.2e-7 + 2.0**-21 * np.tile(angles, 2)).all()


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
    table = identity_table(6, 3)
    np.testing.assert_array_equal(table, [[1, 1, 1, 0, 0, 0]] * 3)
