"""Adapters on a device that is late: loads are ordered with steps, whatever is loaded, unloaded and aborted meanwhile.

More adapters than the device has memory for, and than the host keeps, so that pages of both are used again while steps
are under way that read them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.errors import RequestError
from octavo.lora.adapter_files import source
from octavo.request import AdapterSource, EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.sequence import Sequence
from octavo.speculative.proposer import ToBeDrafted
from octavo.speculative.speculation import Speculation
from octavo.stats import EngineStats
from octavo.step_plan import AdapterLoad
from tests.execution.late_device import LateDevice
from tests.execution.test_runner import (
    EOS,
    VOCAB,
    config_of,
    device_core,
    late_executor,
    refuse_in_turn,
    run,
    save_model,
    told,
)
from tests.lora.random_adapters import TINY_SIZES, write_adapter_of
from tests.untimed import without_time

NUM_ADAPTERS = 7


def write_adapters(folder: Path, num: int = NUM_ADAPTERS) -> list[AdapterSource]:
    """Of different ranks; one of them is a DoRA with biases."""
    paths = [write_adapter_of(folder / f"a{i}", i, 1 + i, TINY_SIZES, 1.0, magnitudes=i == 2) for i in range(num)]
    return [source(path.name, str(path)) for path in paths]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tiny_tokenizer)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterSource]:
    return write_adapters(tmp_path_factory.mktemp("adapters"))


def lora_config(folder: Path, **flags: Any) -> EngineConfig:
    return config_of(folder, enable_lora=True, max_loras=2, max_lora_rank=8, max_cpu_loras=4, **flags)


def adapted_requests(seed: int, adapters: list[AdapterSource], num: int = 24) -> list[EngineRequest]:
    rng = random.Random(seed)
    found = []
    for i in range(num):
        adapter = rng.choice([None, *adapters])
        max_tokens = rng.randrange(1, 9)
        settings = rng.choice([{}, {"logprobs": 2}, {"temperature": 0.8, "seed": i}, {"prompt_logprobs": 1}])
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | settings))
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(2, 30))]
        identity = None if adapter is None else adapter.identity
        found.append(
            EngineRequest(f"r{i}", Prompt(prompt, adapter=identity), params, [EOS], max_tokens, 0.0, adapter=adapter)
        )
    return found


def tokens_of(core: EngineCore, requests: list[EngineRequest], seed: int = 0, aborts: float = 0.0) -> dict[str, Any]:
    """Requests come in between steps, and some are aborted, whose tokens so far are told too."""
    without_time(core)
    rng, todo = random.Random(seed), list(requests)
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    live: list[str] = []
    while core.has_work or todo:
        while todo and rng.random() < 0.5:
            live.append(todo[0].request_id)
            core.add(todo.pop(0))
        if live and rng.random() < aborts:
            core.abort(live.pop(rng.randrange(len(live))))
        if not core.has_work:
            continue
        for output in core.step().outputs:
            assert output.error is None, output.error
            found[output.request_id] += output.token_ids
            if output.finish_reason is not None and output.request_id in live:
                live.remove(output.request_id)
    assert core.adapters is not None
    core.adapters.pool.check([])
    return found


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "call by call"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_every_answer_is_the_cpus(model: Path, adapters: list[AdapterSource], seed: int, eager: bool) -> None:
    config, requests = lora_config(model, enforce_eager=eager), adapted_requests(seed, adapters)
    device = LateDevice(seed)
    core = device_core(config, device)
    store, loads = core.executor.worker.adapters, list[AdapterLoad]()  # type: ignore[attr-defined]
    load = store.load
    store.load = lambda given: (loads.extend(given), load(given))
    found = tokens_of(core, requests, seed)
    assert found == tokens_of(EngineCore(config), requests, seed)
    assert (device.num_replays > 0) != eager
    assert len(loads) > len({one.identity for one in loads}) > 4, "some were loaded again"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_aborts_and_unloads_disturb_nobody(model: Path, adapters: list[AdapterSource], seed: int) -> None:
    config, requests = lora_config(model), adapted_requests(seed, adapters, 40)
    expected = tokens_of(EngineCore(config), requests, seed)
    core = device_core(config, LateDevice(seed))
    for request in requests[::5]:
        if request.adapter is not None:
            core.unload_adapter(request.adapter.identity)
    found = tokens_of(core, requests, seed, aborts=0.3)
    assert all(tokens == expected[name][: len(tokens)] for name, tokens in found.items())
    assert 0 < sum(len(found[name]) < len(expected[name]) for name in found) < len(requests)


def test_a_draft_model_changes_no_answer_of_an_adapter(model: Path, adapters: list[AdapterSource]) -> None:
    """What it drafts without adapters is verified with the adapter of each sequence."""
    requests = adapted_requests(1, adapters, 7)
    speculation, verified = Speculation(ToBeDrafted(96), 3), set[str | None]()
    count = speculation.count

    def note(seq: Sequence, draft_tokens: tuple[int, ...], num_accepted: int, stats: EngineStats) -> None:
        verified.add(seq.adapter)
        count(seq, draft_tokens, num_accepted, stats)

    speculation.count = note  # type: ignore[method-assign]
    config = lora_config(model, speculative_config={"model": str(model), "num_speculative_tokens": 3})
    found = tokens_of(EngineCore(config, None, speculation), requests)
    assert found == tokens_of(EngineCore(lora_config(model)), requests)
    assert None in verified and len(verified) > 2


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("is_drafted", "in_a_row", "count"), [(False, 1, 7), (False, 3, 7), (True, 1, 3)])
def test_memory_may_run_out_at_any_piece_of_work(
    model: Path, adapters: list[AdapterSource], is_drafted: bool, in_a_row: int, count: int
) -> None:
    """Also at copies of adapters, which later steps read, and at drafts."""
    drafts = {"speculative_config": {"model": str(model), "num_speculative_tokens": 3}} if is_drafted else {}
    config, device = lora_config(model, num_gpu_blocks_override=16, **drafts), LateDevice(0)
    speculation = Speculation(ToBeDrafted(96), 3) if is_drafted else None
    core = EngineCore(config, late_executor(config, device), speculation)
    asked = adapted_requests(3, adapters, count)
    store, loads = core.executor.worker.adapters, list[AdapterLoad]()  # type: ignore[attr-defined]
    load = store.load
    store.load = lambda given: (loads.extend(given), load(given))

    def run_all() -> dict[Any, Any]:
        loads.clear()
        found = {key: told(outputs) for key, outputs in run(core, asked, 3).items()}
        assert core.adapters is not None
        core.adapters.pool.check([])
        assert loads, "each run loads adapters"
        for one in adapters:
            core.unload_adapter(one.identity)
        return found

    refuse_in_turn(device, run_all, in_a_row)


def test_a_base_request_has_the_bits_of_a_server_without_adapters(model: Path, adapters: list[AdapterSource]) -> None:
    requests = adapted_requests(0, adapters)
    base = [request for request in requests if request.adapter is None]
    assert base
    found = tokens_of(device_core(lora_config(model), LateDevice(0)), requests)
    plain = device_core(config_of(model), LateDevice(0))
    for request in base:
        plain.add(request)
    expected: dict[str, list[int]] = {}
    while plain.has_work:
        for output in plain.step().outputs:
            expected.setdefault(output.request_id, []).extend(output.token_ids)
    assert {request.request_id: found[request.request_id] for request in base} == expected


def test_pinned_pages_are_used_again_once_they_have_been_copied(model: Path, adapters: list[AdapterSource]) -> None:
    """Even where an adapter is let go of in the moment in which it was loaded."""
    device = LateDevice(0)
    store: Any = device_core(lora_config(model), device).executor.worker.adapters  # type: ignore[attr-defined]
    pages: list[Any] = []
    for adapter in adapters[:3]:
        num_pages = store.prepare(adapter).result()
        images = store._on_host[adapter.identity].pages
        pages = pages or images
        assert images[0] is pages[0]
        expected = [image.copy() for image in images]
        store.load([AdapterLoad(adapter.identity, 0, list(range(num_pages)))])
        store.forget(adapter.identity)
        for page, image in enumerate(expected):
            at = page * store.page_bytes
            assert store._arena[at : at + store.page_bytes].numpy().tobytes() == image.tobytes()


def test_an_adapter_that_is_refused_for_its_size_leaves_its_pages(model: Path, adapters: list[AdapterSource]) -> None:
    store: Any = device_core(lora_config(model), LateDevice(0)).executor.worker.adapters  # type: ignore[attr-defined]
    store.num_pages = 0  # tiny adapters fit into the least memory that there can be
    for _ in range(2):
        with pytest.raises(RequestError, match="raise --lora-memory-gb"):
            store.prepare(adapters[-1]).result()
        assert len(store._free_pages) == 1
