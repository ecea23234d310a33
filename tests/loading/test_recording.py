"""What a model would take, and how much memory that is."""

import math
import resource
from collections.abc import Callable

import numpy as np
import pytest

from octavo.errors import ConfigError, LoadError
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.file_weights import open_weights
from octavo.loading.memory import GIB, check_fits
from octavo.loading.recording import RecordingWeights
from octavo.loading.weights import Weights
from tests.children import in_child

Shapes = dict[str, tuple[int, ...]]


def _take_llama(
    weights: Weights, hidden: int, intermediate: int, layers: int, kv: int, vocab: int, tied: bool = False
) -> None:
    weights.take_matrix("model.embed_tokens.weight", (vocab, hidden))
    for i in range(layers):
        p = f"model.layers.{i}."
        for name, rows in {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "o_proj": hidden}.items():
            weights.take_matrix(f"{p}self_attn.{name}.weight", (rows, hidden))
        for name, shape in {"gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden),
                            "down_proj": (hidden, intermediate)}.items():  # fmt: skip
            weights.take_matrix(f"{p}mlp.{name}.weight", shape)
        weights.take(f"{p}input_layernorm.weight", (hidden,))
    if not tied:
        weights.take_matrix("lm_head.weight", (vocab, hidden))


def _measured() -> tuple[dict[str | None, tuple[int, str]], int]:
    """What 70 billion parameters take, by their type, and the KiB that finding out took."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dummy = Checkpoint("d", "dummy", "", [], "", {})
    found = {}
    for quantization in (None, "int8"):
        weights = RecordingWeights("bfloat16", open_weights(dummy, "bfloat16", 0, quantization, False))
        _take_llama(weights, 8192, 28672, 80, 1024, 128256, tied=True)
        found[quantization] = weights.packed_bytes()
    return found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_a_model_of_70_billion_parameters_is_measured_without_memory() -> None:
    found, num_kib = in_child(_measured)
    assert num_kib < 100 << 10
    with pytest.raises(LoadError, match=r"needs 129\.46 GiB .* in bfloat16, and 64\.00 GiB are free"):
        check_fits(*found[None], 64 * GIB)
    check_fits(*found[None], 130 * GIB)
    with pytest.raises(LoadError, match=r"needs 68\.77 GiB .* in int8"):
        check_fits(*found["int8"], 64 * GIB)


def test_the_default_model_stays_in_its_98_megabytes(default_checkpoint: Checkpoint) -> None:
    def measured(dtype: str, quantization: str | None = None) -> tuple[int, str]:
        stored = open_weights(default_checkpoint, dtype, None, None, True)
        if quantization:  # of a model of these sizes: this one is quantized already
            stored = open_weights(Checkpoint("d", "dummy", "", [], "", {}), dtype, 0, quantization, True)
        weights = RecordingWeights(dtype, stored)
        _take_llama(weights, 576, 1536, 30, 192, 49152, tied=True)
        return weights.packed_bytes()

    num_bytes, kind = measured("bfloat16")
    assert kind == "Q8_0 and Q4_1"  # the embedding takes eight bits
    assert num_bytes < 100e6
    parameters = 30 * (576 * (2 * 576 + 2 * 192) + 3 * 576 * 1536) + 49152 * 576
    assert measured("float32") == (parameters * 4, "float32")
    assert measured("bfloat16", "int8") == (parameters * 34 // 32, "int8")
    with pytest.raises(LoadError, match=r"needs 0\.09 GiB of memory for its weights in Q8_0 and Q4_1"):
        check_fits(*measured("bfloat16"), 1 << 20)


def test_what_was_asked_for_is_noted_with_its_shape_and_share(hf_shapes: Callable[..., Shapes]) -> None:
    weights = RecordingWeights("bfloat16")
    assert "anything" in weights
    for name, shape in hf_shapes().items():
        taken = weights.take_matrix(name, (shape[0], shape[1])).data if len(shape) == 2 else weights.take(name, shape)
        assert taken.shape == shape
        assert not np.any(taken)
    assert {t.name: t.shape for t in weights.tensors} == hf_shapes()
    assert all(t.is_matrix == (len(t.shape) == 2) for t in weights.tensors)
    whole = sum(math.prod(t.shape) for t in weights.tensors if t.is_matrix) * 2
    assert weights.packed_bytes() == (whole, "bfloat16")
    halves = RecordingWeights("bfloat16")
    for name, shape in hf_shapes().items():
        if len(shape) == 2:
            halves.take_matrix(name, (shape[0], shape[1]), rows=(0, shape[0] // 2))
    assert halves.packed_bytes() == (whole // 2, "bfloat16")


def test_absent_tensors_and_shares_that_cannot_be_cut_are_refused_as_by_the_checkpoint(
    default_checkpoint: Checkpoint,
) -> None:
    weights = RecordingWeights("bfloat16", open_weights(default_checkpoint, "bfloat16", None, None, True))
    assert "lm_head.weight" not in weights
    with pytest.raises(LoadError, match=r"no tensor lm_head\.weight"):
        weights.take_matrix("lm_head.weight", (49152, 576))
    with pytest.raises(ConfigError, match=r"columns 0 to 100 of a Q4_1 matrix \[576, 576\]"):
        weights.take_matrix("model.layers.0.self_attn.q_proj.weight", (576, 576), columns=(0, 100))
    # Before anything of the wrong size is made.
    with pytest.raises(
        LoadError, match=r"embed_tokens\.weight has the shape \[49152, 576\]; .* makes it \[2147483647, 576\]"
    ):
        weights.take("model.embed_tokens.weight", ((1 << 31) - 1, 576))
    with pytest.raises(LoadError, match=r"has the shape \[576, 576\]; the model's configuration makes it \[576, 577\]"):
        weights.take_matrix("model.layers.0.self_attn.q_proj.weight", (576, 577))
