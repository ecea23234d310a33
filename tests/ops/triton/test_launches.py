"""Engines launch nothing that their start has not launched, whatever requests ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.lora.files import source
from octavo.request import AdapterSource, EngineRequest
from octavo.speculative.proposer import ToBeDrafted
from octavo.speculative.speculation import Speculation
from tests.execution.test_heads import heads, settings
from tests.execution.test_heads import model as deep
from tests.execution.test_runner import config_of as deep_config
from tests.lora.random_adapters import TINY_SIZES, write_adapter_of
from tests.ops.triton.conftest import DEVICE
from tests.ops.triton.launches import launches
from tests.ops.triton.test_adapted_engine import config_of, folder
from tests.ops.triton.test_adapted_engine import request as adapted
from tests.ops.triton.test_engine import run, triton_executor

__all__ = ["deep", "folder", "heads", "launches"]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="launches are watched in the interpreter"),
    pytest.mark.usefixtures("launches"),
]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> AdapterSource:
    path = write_adapter_of(tmp_path_factory.mktemp("adapters") / "a", 0, 4, TINY_SIZES, 1.0)
    return source(path.name, str(path))


def requests(adapter: AdapterSource | None = None) -> list[EngineRequest]:
    """What steps are made of: chunks, prompts' log-probabilities from any token of a step on, forks, settings."""
    return [
        adapted("in chunks", list(range(5, 36)), adapter, prompt_logprobs=2, max_tokens=2),
        adapted("sampled", [40, 41, 42], adapter, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=3),
        adapted("behind it", [43, 44, 45, 46, 47], adapter, prompt_logprobs=0),
        adapted("penalized", [7, 7, 8], None, repetition_penalty=1.3, presence_penalty=0.4, prompt_logprobs=0),
        adapted("forked", [50, 51], adapter, temperature=1.0, seed=9, n=2),
        adapted("biased", [60] * 9, adapter, logit_bias={5: 4.0}, bad_words_token_ids=[[6], [5, 5]]),
    ]


def test_of_an_engine_with_adapters(folder: Path, tiny_tokenizer: Path, adapter: AdapterSource) -> None:
    config = config_of(folder, tiny_tokenizer, enable_lora=True, max_loras=2, max_lora_rank=8)
    run(EngineCore(config, triton_executor(config)), requests(adapter))


def test_of_an_engine_whose_head_has_a_vocabulary_of_its_own(deep: Path, heads: dict[str, Path]) -> None:
    config: EngineConfig = deep_config(deep, reproducible_parallel=False, **settings("eagle3", heads))
    core = EngineCore(config, triton_executor(config), Speculation(ToBeDrafted(config.model.vocab_size), 3))
    run(core, requests())
