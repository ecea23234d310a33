"""Weights made of random numbers."""

import numpy as np
import pytest

from octavo.loading.checkpoint import Checkpoint
from octavo.loading.file_weights import open_weights
from octavo.loading.weights import Weights


def _dummy(dtype: str = "float32", seed: int | None = 0, quantization: str | None = None) -> Weights:
    return open_weights(Checkpoint("d", "dummy", "", [], "", {}), dtype, seed, quantization, True)


def test_dummy_weights_depend_on_seed_and_name_only() -> None:
    up, down = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    first = _dummy().take(up, (96, 64))
    again = _dummy()
    again.take(down, (64, 96))
    assert np.array_equal(again.take(up, (96, 64)), first)
    assert not np.array_equal(again.take(down, (96, 64)), first)
    assert not np.array_equal(_dummy(seed=1).take(up, (96, 64)), first)
    assert not np.array_equal(_dummy(seed=None).take(up, (96, 64)), first)
    rounded = _dummy("bfloat16").take(up, (96, 64))
    assert np.array_equal(rounded, first.astype(rounded.dtype))
    assert first.std() == pytest.approx(0.02, rel=0.05)
    # The same in any process and on any machine: no hash() and nothing of the machine in it.
    assert first[0, :3].tolist() == pytest.approx(_FIRST_VALUES, rel=1e-5)


_FIRST_VALUES = [0.0133176893, -0.0123931216, 0.0012203276]


def test_dummy_norms_are_ones_and_large_tensors_repeat_no_row() -> None:
    weights = _dummy()
    assert np.array_equal(weights.take("model.norm.weight", (64,)), np.ones(64, np.float32))
    assert np.array_equal(weights.take("transformer.h.0.ln_1.weight", (64,)), np.ones(64, np.float32))
    assert weights.take("transformer.h.0.ln_1.bias", (64,)).std() > 0
    large = weights.take("model.embed_tokens.weight", (3000, 700))
    assert large.std() == pytest.approx(0.02, rel=0.01)
    assert len(np.unique(large, axis=0)) == 3000
    weights.check_all_taken()


def test_tensors_beyond_the_numbers_that_are_drawn_go_round() -> None:
    weights = _dummy("bfloat16")
    huge = weights.take("model.embed_tokens.weight", (20_000, 1000)).astype(np.float32)
    assert huge.std() == pytest.approx(0.02, rel=0.01)
    assert not (huge[:-1] == huge[1:]).all(1).any()
    assert np.array_equal(huge.reshape(-1)[:-16_777_259], huge.reshape(-1)[16_777_259:])


def test_whatever_a_model_asks_for_is_there() -> None:
    """Its configuration decides what that is."""
    weights = _dummy()
    for name, shape in {"lm_head.weight": (8, 4), "x.q_proj.bias": (4,), "any.name": (2, 3, 4)}.items():
        assert name in weights
        assert weights.take(name, shape).shape == shape
