"""Engines of every kind launch nothing that their start has not launched, whatever requests ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.config import EngineArgs
from octavo.execution import executor, worker
from octavo.execution.compile_ahead import outline_runners
from octavo.execution.dummy_steps import DummySteps
from octavo.layers.tensor_parallel import WHOLE
from octavo.loading.checkpoint import Checkpoint
from octavo.models.registry import describe
from octavo.models.sharding import with_shard
from octavo.ops import cuda
from octavo.ops.triton.outline import outlining
from octavo.planning.weight_formats import weights_in
from tests.execution.late_device import LateDevice
from tests.execution.test_draft_heads import heads
from tests.execution.test_draft_heads import model as deep
from tests.multimodal.conftest import tokenizer_that_sees
from tests.multimodal.test_devices import tokenizer as tokenizer_of_media
from tests.multimodal.test_mllama import folder as mllama
from tests.ops.triton.conftest import DEVICE
from tests.ops.triton.launch_cases import CASES, DRAFT_CASES, SIZES
from tests.ops.triton.launches import Launches, launches
from tests.untimed import without_time

__all__ = ["deep", "heads", "launches", "mllama", "tokenizer_of_media", "tokenizer_that_sees"]

pytestmark = [
    pytest.mark.skipif(DEVICE.type != "cpu", reason="launches are watched in the interpreter"),
    pytest.mark.usefixtures("launches"),
]


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_an_engine_launches_what_its_start_has(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    monkeypatch.setattr(executor, "_open_device", lambda config, worker_group: (LateDevice(0), cuda))
    if case.format is not None:

        def opened(checkpoint: Checkpoint, *_: Any) -> Any:
            assert case.format is not None
            return weights_in(case.format, describe(checkpoint.config))

        monkeypatch.setattr(worker, "open_weights", opened)
    given = case.make(request, tmp_path)
    flags = {key: value for key, value in given.items() if key in EngineArgs.__dataclass_fields__}
    llm = LLM(**SIZES | flags | (case.flags or {}))
    without_time(llm.core)
    llm.core.scheduler._speculation.cost = None  # as many guesses as can be
    case.drive(llm, given)
    llm.close()


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", *DRAFT_CASES])
def test_what_is_compiled_ahead_is_what_a_start_launches(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, launches: Launches
) -> None:
    """Of models, and of what drafts for them."""
    monkeypatch.setattr(executor, "_open_device", lambda config, worker_group: (LateDevice(0), cuda))
    given = CASES[name].make(request, tmp_path)
    llm = LLM(**SIZES | given | (CASES[name].flags or {}))
    llm.close()
    at_start, launches.known = launches.known, set()
    model = llm.config.model
    description = with_shard(describe(model.checkpoint.config), WHOLE, reproducible=llm.config.reproducible_parallel)
    weights = worker.open_weights(model.checkpoint, model.dtype, model.seed, None, description.tie_word_embeddings)
    launches.num_starting = 1
    with outlining(lambda *_: None):
        for runner in outline_runners(llm.config, description, weights, cuda, range(1)):
            DummySteps(runner).warm_up()
    assert at_start - launches.known == set()
