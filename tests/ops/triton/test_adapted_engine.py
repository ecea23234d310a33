"""A whole engine core on Triton's kernels with adapters: the answers of the CPU's engine, and to each request the bits
that it has alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineArgs, EngineConfig
from octavo.engine.core import EngineCore
from octavo.lora.adapter_files import source
from octavo.request import AdapterSource, EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from tests.lora.random_adapters import TINY_SIZES, write_adapter_of
from tests.ops.triton.test_engine import CONFIGS, triton_core

pytestmark = pytest.mark.long

Answers = dict[str, list[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    CONFIGS["attention"].save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterSource]:
    """Of several ranks; the last has magnitudes and biases."""
    folder = tmp_path_factory.mktemp("adapters")
    paths = [write_adapter_of(folder / f"a{i}", i, 1 + 3 * i, TINY_SIZES, 1.0, magnitudes=i == 2) for i in range(3)]
    return [source(path.name, str(path)) for path in paths]


def config_of(folder: Path, tokenizer: Path, **flags: Any) -> EngineConfig:
    return EngineArgs(
        model=str(folder), tokenizer=str(tokenizer), load_format="dummy", seed=5, max_num_seqs=4,
        max_num_batched_tokens=24, num_gpu_blocks_override=40, block_size=8, device="cpu", check_invariants=True,
        reproducible_parallel=False, **flags,
    ).create_engine_config()  # fmt: skip


def request(name: str, prompt: list[int], adapter: AdapterSource | None, **params: Any) -> EngineRequest:
    settings = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "logprobs": 1} | params
    whose = None if adapter is None else adapter.identity
    return EngineRequest(
        name, Prompt(prompt, adapter=whose), SamplingParams(**settings), [2], settings["max_tokens"], 0.0,
        adapter=adapter,
    )  # fmt: skip


def answers(core: EngineCore, requests: list[EngineRequest]) -> tuple[Answers, Answers]:
    """Tokens, and their log-probabilities to the bit."""
    tokens: Answers = {one.request_id: [] for one in requests}
    values: Answers = {one.request_id: [] for one in requests}
    for one in requests:
        core.add(one)
    while core.has_work:
        for output in core.step().outputs:
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
            values[output.request_id] += [entry.logprobs for entry in output.logprobs or []]
    return tokens, values


def test_answers_are_those_of_the_cpu_and_of_each_alone(
    folder: Path, adapters: list[AdapterSource], tiny_tokenizer: Path
) -> None:
    pytest.importorskip("octavo._cpu", reason="the CPU's kernels are not built", exc_type=ImportError)
    config = config_of(folder, tiny_tokenizer, enable_lora=True, max_loras=3, max_lora_rank=8)
    requests = [
        request("base", list(range(5, 26)), None),
        request("first", list(range(5, 26)), adapters[0]),
        request("second", [40, 41, 42], adapters[1], temperature=0.8, seed=3),
        request("magnitudes", [7, 7, 8], adapters[2], prompt_logprobs=0),
        request("first again", [50, 51, 3, 4, 5], adapters[0]),
    ]
    core = triton_core(config)
    tokens, values = answers(core, requests)
    assert tokens == answers(EngineCore(config), requests)[0]
    assert tokens["base"] != tokens["first"], "adapters do something"
    for one in requests[1:4]:
        alone = answers(core, [one])
        assert alone == ({one.request_id: tokens[one.request_id]}, {one.request_id: values[one.request_id]})
    plain = triton_core(config_of(folder, tiny_tokenizer))
    assert answers(plain, requests[:1]) == ({"base": tokens["base"]}, {"base": values["base"]})
