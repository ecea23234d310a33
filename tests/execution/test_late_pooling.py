"""Models that pool give the same vectors on a device that is as late as a device can be as on the CPU: texts that are
computed whole, and prompts in parts with what is cached of them, with captured steps and without."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import BertConfig, PreTrainedConfig, Qwen3Config

from octavo.config import EngineArgs, EngineConfig
from octavo.engine.core import EngineCore
from octavo.execution.cuda_device import shapes_to_capture
from octavo.execution.step_arrays import StepLimits, StepShape
from octavo.pooling_params import PoolingParams
from octavo.request import EngineRequest, Prompt, SequenceOutput
from octavo.sampling_params import SamplingParams
from tests.execution.late_device import LateDevice
from tests.execution.test_runner import device_core, refuse_in_turn

VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "dtype": "float32",
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "encoder": BertConfig(architectures=["BertModel"], **SIZES),
    "decoder": Qwen3Config(architectures=["Qwen3Model"], num_key_value_heads=2, head_dim=16, **SIZES),
}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    CONFIGS[request.param].save_pretrained(folder)
    return folder


def config_of(folder: Path, tokenizer: Path, **flags: Any) -> EngineConfig:
    defaults = {
        "load_format": "dummy", "seed": 3, "max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 96,
        "block_size": 8, "check_invariants": True, "device": "cpu", "tokenizer": str(tokenizer),
        "num_gpu_blocks_override": 40,
    }  # fmt: skip
    return EngineArgs(model=str(folder), **(defaults | flags)).create_engine_config()


def requests(config: EngineConfig, count: int = 24) -> list[EngineRequest]:
    rng, pooling = random.Random(0), config.model.pooling
    assert pooling is not None
    document = [rng.randrange(3, VOCAB) for _ in range(60)]
    found = []
    for i in range(count):
        params = pooling.settle(PoolingParams(task=rng.choice(pooling.tasks), use_activation=False))
        text = document[: rng.choice([0, 5, 40, 60])] + [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 7, 30]))]
        found.append(EngineRequest(f"r{i}", Prompt(text), SamplingParams(), [], 0, 0.0, pooling=params))
    return found


def run(core: EngineCore, todo: list[EngineRequest]) -> dict[str, SequenceOutput]:
    rng, todo, found = random.Random(1), list(todo), {}
    while todo or core.has_work:
        while todo and rng.random() < 0.7:
            core.add(todo.pop(0))
        for output in core.step().outputs:
            assert output.request_id not in found
            found[output.request_id] = output
    return found


def vectors(output: SequenceOutput) -> np.ndarray:
    assert output.error is None and output.vectors is not None
    return np.frombuffer(output.vectors, np.float32).reshape(-1, SIZES["hidden_size"])


@pytest.mark.parametrize(
    "flags",
    [pytest.param({}, marks=pytest.mark.long), {"enforce_eager": True}, {"max_num_batched_tokens": 96}],
    ids=str,
)
def test_every_vector_is_the_cpus(folder: Path, tiny_tokenizer: Path, flags: dict[str, Any]) -> None:
    config = config_of(folder, tiny_tokenizer, **flags)
    device = LateDevice(0)
    core = device_core(config, device)
    found = run(core, requests(config))
    expected = run(EngineCore(config), requests(config))
    assert found.keys() == expected.keys()
    for key, output in expected.items():
        np.testing.assert_allclose(vectors(found[key]), vectors(output), atol=2e-5)
    assert (device.num_replays > 0) != config.enforce_eager
    is_whole = config.model.pooling is not None and config.model.pooling.whole_prompts
    assert is_whole != any(output.num_cached_tokens for output in found.values())


def test_texts_are_computed_one_step_ahead(folder: Path, tiny_tokenizer: Path) -> None:
    config = config_of(folder, tiny_tokenizer, max_num_seqs=8)
    core = device_core(config, LateDevice(0))
    for request in requests(config):
        core.add(request)
    num_ahead = 0
    while core.has_work:
        core.step()
        num_ahead += len(core._in_flight) == 1
    assert num_ahead > 3


def test_a_step_without_memory_ends_its_newest_text_and_no_other(folder: Path, tiny_tokenizer: Path) -> None:
    device = LateDevice(1)
    config = config_of(folder, tiny_tokenizer)
    core = device_core(config, device)
    expected = run(core, requests(config))
    device.memory_failures = 0.05
    found = run(core, requests(config))
    failed = {key for key, output in found.items() if output.error is not None}
    assert 0 < len(failed) <= device.num_failures
    assert all(found[key].error_status == 503 for key in failed)
    for key in found.keys() - failed:
        np.testing.assert_allclose(vectors(found[key]), vectors(expected[key]), atol=2e-5)


@pytest.mark.long
def test_memory_may_run_out_at_any_piece_of_work(folder: Path, tiny_tokenizer: Path) -> None:
    device, config = LateDevice(0), config_of(folder, tiny_tokenizer)
    core, asked = device_core(config, device), requests(config, 8)

    def told(output: SequenceOutput) -> dict[str, Any]:
        end = output.finish_reason if output.error is None else "error"
        values = None if output.vectors is None else vectors(output).round(3).tolist()
        return {"end": (end,), "status": output.error_status, "values": values}

    refuse_in_turn(device, lambda: {(key, 0): told(output) for key, output in run(core, asked).items()})


def test_what_is_captured() -> None:
    limits = StepLimits(StepShape(4096, 256, 4096, 0), pools="texts")
    texts = [(shape.tokens, shape.seqs, shape.samples) for shape in shapes_to_capture(limits)]
    assert texts == [
        (128, 64, 128), (256, 128, 256), (512, 256, 512), (1024, 256, 1024), (2048, 256, 2048)
    ]  # fmt: skip
    parts = shapes_to_capture(replace(limits, pools="parts"))
    assert [shape.tokens for shape in parts] == [128, 256, 512]
