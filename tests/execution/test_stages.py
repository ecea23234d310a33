"""Stages of models whose layers read more than what the layer before has made: the embedding, which stages pass on
behind the residual stream, and keys of another layer, with which they are in one stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.core import EngineCore
from octavo.errors import ConfigError
from tests.execution.small_overrides import CUT, GEMMA_3N, GEMMA_4, ZAMBA, ZAMBA_2
from tests.execution.test_runner import config_of, model, requests, run
from tests.execution.test_worker_group import start, start_of, told_exactly, without_partition

__all__ = ["model", "start", "start_of"]

# The last two read the keys of the two before them, so that a stage can begin with one of the first three alone.
_SIX: dict[str, Any] = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
    "activation_sparsity_pattern": [0.9, 0.0, 0.6, 0.0, 0.9, 0.0],
}  # fmt: skip
GEMMAS = CUT | GEMMA_3N | _SIX, CUT | GEMMA_4 | _SIX
_TWICE: dict[str, Any] = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
ZAMBAS = CUT | ZAMBA | _TWICE, CUT | ZAMBA_2 | _TWICE


@pytest.mark.parametrize(
    ("sizes", "flags", "overrides"),
    [
        pytest.param((1, 2), {"num_gpu_blocks_override": 60}, GEMMAS[0], marks=pytest.mark.long),
        ((1, 2), {"num_gpu_blocks_override": 60, "dtype": "bfloat16"}, ZAMBAS[1]),
        *(
            pytest.param((size, 2), {"num_gpu_blocks_override": 60, **flags}, overrides, marks=pytest.mark.long)
            for overrides in (*GEMMAS, *ZAMBAS)
            for size, flags in ((1, {"enforce_eager": True}), (2, {"dtype": "bfloat16"}))
        ),
        pytest.param((1, 3), {"num_gpu_blocks_override": 60}, GEMMAS[0], marks=pytest.mark.long),
        pytest.param(
            (1, 2),
            {"dtype": "bfloat16", "quantization": "int8", "pipeline_layer_partition": "1,5"},
            GEMMAS[1],
            marks=pytest.mark.long,
        ),
    ],
)
def test_bits_are_those_of_one_worker(
    model: Path,
    start: Callable[..., EngineCore],
    sizes: tuple[int, int],
    flags: dict[str, Any],
    overrides: dict[str, Any],
) -> None:
    flags = flags | {"hf_overrides": overrides}
    expected = run(EngineCore(config_of(model, **without_partition(flags))), requests(1), 1)
    size, num_stages = sizes
    found = run(start(tensor_parallel_size=size, pipeline_parallel_size=num_stages, **flags), requests(1), 1)
    assert {key: told_exactly(outputs) for key, outputs in found.items()} == {
        key: told_exactly(outputs) for key, outputs in expected.items()
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"pipeline_parallel_size": 4},
            "-size 4 is more stages than Gemma3n.* behind the first can begin with layers 1, 2",
        ),
        (
            {"pipeline_parallel_size": 2, "pipeline_layer_partition": "3,3"},
            "cannot begin with layer 3: layer 4 reads the keys of layer 2, .*Those that can, .*: 1, 2.",
        ),
    ],
)
def test_a_stage_has_the_layers_whose_keys_it_reads(model: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(model, hf_overrides=GEMMAS[0], **flags)
