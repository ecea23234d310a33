"""Models that pool on Triton's kernels, in the whole engine: the vectors of the CPU's, and the same bits alone and in
company."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from octavo.config import EngineArgs, EngineConfig
from octavo.engine.core import EngineCore
from octavo.execution.cuda_device import CudaDevice
from octavo.execution.device import Device
from octavo.execution.dummy_steps import DummySteps
from octavo.execution.executor import LocalExecutor
from octavo.ops import cuda
from octavo.pooling_params import PoolingParams
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from tests.execution.late_device import LateDevice
from tests.models.small_encoders import DECODERS, ENCODERS, VOCAB
from tests.ops.triton.conftest import DEVICE

pytestmark = pytest.mark.long

MODELS = ENCODERS | DECODERS
# One of each family and of each kind of head.
NAMES = (
    "BertForSequenceClassification", "RobertaForSequenceClassification", "MPNetModel",
    "DistilBertForTokenClassification", "ElectraForSequenceClassification", "NomicBertModel",
    "ModernBertForSequenceClassification", "ModernBertForTokenClassification", "GteForSequenceClassification",
    "EuroBertModel", *DECODERS,
)  # fmt: skip
# Heads of 16 elements, the least that GPUs have.
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 40}
LENGTHS = (1, 20, 13)


@pytest.fixture(params=NAMES)
def config(request: pytest.FixtureRequest, tmp_path: Path, tiny_tokenizer: Path) -> EngineConfig:
    model = MODELS[request.param]
    model = model._replace(settings={**model.settings, **SIZES})
    model.save(model.reference(NAMES.index(request.param)), tmp_path)
    return EngineArgs(
        model=str(tmp_path), tokenizer=str(tiny_tokenizer), dtype="float32", max_num_seqs=3, max_model_len=24,
        max_num_batched_tokens=32, device="cpu", enforce_eager=True, num_gpu_blocks_override=24, block_size=8,
        reproducible_parallel=False,  # as on GPUs
    ).create_engine_config()  # fmt: skip


def triton_core(config: EngineConfig) -> EngineCore:
    device: Device = LateDevice(0) if DEVICE.type == "cpu" else CudaDevice()
    return EngineCore(config, LocalExecutor(config, device, cast(Any, cuda)))


def run(core: EngineCore, texts: dict[str, list[int]], params: PoolingParams) -> dict[str, np.ndarray]:
    found = {}
    for name, tokens in texts.items():
        core.add(EngineRequest(name, Prompt(tokens), SamplingParams(), [], 0, 0.0, pooling=params))
    while core.has_work:
        for output in core.step().outputs:
            assert output.error is None and output.vectors is not None
            found[output.request_id] = np.frombuffer(output.vectors, np.float32)
    return found


def test_vectors_are_those_of_the_cpu_and_do_not_depend_on_company(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DummySteps, "warm_up", lambda self: None)  # the interpreter takes its time
    pytest.importorskip("octavo._cpu", reason="the CPU's kernels are not built", exc_type=ImportError)
    assert config.model.pooling is not None
    params = config.model.pooling.settle(PoolingParams(use_activation=False))
    torch.manual_seed(0)
    texts = {str(length): torch.randint(3, VOCAB, (length,)).tolist() for length in LENGTHS}
    core = triton_core(config)
    found = run(core, texts, params)
    for name, expected in run(EngineCore(config), texts, params).items():
        np.testing.assert_allclose(found[name], expected, atol=2e-4, rtol=0)
    name = str(LENGTHS[-1])
    assert np.array_equal(run(core, {name: texts[name]}, params)[name], found[name])
