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


def test_cosines_and_sines_are_the_nearest_float32_of_float32_angles() -> None:
    rope = RopeConfig(theta=100000.0, rotary_dim=64)
    table = rotary_table(rope, 9000)  # more than are computed at once
    frequencies = 1.0 / torch.tensor(100000.0) ** (torch.arange(0, 64, 2) / 64)
    angles = torch.outer(torch.arange(9000.0), frequencies).double()
    nearest = torch.cat([angles.cos(), angles.sin()], dim=1).float().numpy()
    np.testing.assert_array_equal(table, nearest)


def test_the_identity_rotates_nothing() -> None:
    table = identity_table(6, 3)
    np.testing.assert_array_equal(table, [[1, 1, 1, 0, 0, 0]] * 3)
