"""`--kv-cache-disk` in the whole engine: what the next engine reads has the bits that it would compute, for all kinds
of layers and caches; and what else decides the bits keeps it apart."""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, RequestError
from octavo.kv_cache import disk_fetches
from octavo.lora.request import LoRARequest
from octavo.request import EngineRequest, Prompt
from octavo.step_cost import ReadCost
from tests.engine.disk_cache_kills import LIMIT_BYTES, kill_engines
from tests.lora.random_adapters import write_adapter_of
from tests.models.small_latent import LATENT_MODELS
from tests.models.small_models import MODELS, VOCAB
from tests.models.small_recurrent import RECURRENT_MODELS

NUM_KILLS = 20  # `benchmarks/cache_tiers.py kills` does more
PART_BYTES = 2 * 4096  # of the block that is being written: page and checksum
ALL = MODELS | LATENT_MODELS | RECURRENT_MODELS
DOCUMENT = torch.randint(3, VOCAB, (70,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [DOCUMENT, [*DOCUMENT[:41], 7, 9, 11]]
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=3)


@pytest.fixture(autouse=True)
def reads_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models compute faster than a disk answers, and a busy machine's lookups may be late."""
    monkeypatch.setattr(ReadCost, "seconds", lambda self, num_bytes: 0.0)
    monkeypatch.setattr(disk_fetches, "_PATIENCE", 1e9)
    monkeypatch.setattr(disk_fetches, "_LOOKUP_GRACE_S", 60.0)


@pytest.fixture
def model(tmp_path: Path, tiny_tokenizer: Path) -> Iterator[Any]:
    """Make engines of a small model, which share the folder `disk`."""
    folder, made = tmp_path / "model", list[LLM]()

    def make(name: str, seed: int = 2, **settings: Any) -> LLM:
        if not folder.exists():
            ALL[name].save(ALL[name].reference(seed=seed), folder)
        shape = {"dtype": "float32", "max_model_len": 96, "block_size": 8, "num_gpu_blocks_override": 80}
        shape |= {"kv_cache_disk": str(tmp_path / "disk"), "check_invariants": True} | settings
        made.append(LLM(str(folder), tokenizer=str(tiny_tokenizer), **shape))  # type: ignore[arg-type]
        clear_cache(made[-1])
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def clear_cache(llm: LLM) -> None:
    """Make equal blocks equal bytes: not every byte of a block is one of a key or a value."""
    for array in (array for pool in llm.core.executor.worker._cache for one in pool for array in one.arrays):
        array.view(np.uint8)[...] = 0


def answers(llm: LLM, prompts: list[Any], params: SamplingParams = PARAMS, **more: Any) -> list[list[Any]]:
    """Return of each prompt the tokens and the log-probabilities of each completion."""
    found = llm.generate(
        [one if isinstance(one, dict) else {"prompt_token_ids": one} for one in prompts], params, use_tqdm=False, **more
    )
    return [[(list(one.token_ids), one.logprobs) for one in result.outputs] for result in found]


def num_found(llm: LLM, **more: Any) -> int:
    """Return how many tokens of the document need not be computed."""
    [output] = llm.generate([{"prompt_token_ids": DOCUMENT} | more], SamplingParams(max_tokens=1), use_tqdm=False)  # type: ignore[list-item]
    return output.num_cached_tokens or 0


def blocks(llm: LLM) -> dict[tuple[int, bytes], bytes]:
    """Return the contents of all indexed blocks."""
    return {
        (number, key): llm.core.executor.read_blocks(number, [block]).tobytes()
        for number, pool in enumerate(llm.core.scheduler.cache.pools)
        for key, block in pool._index.items()
    }


CASES = {
    "full": ("llama ratio 3, head 64, tied", {}),
    "bfloat16": ("qwen3", {"dtype": "bfloat16"}),
    "eight bits": ("llama ratio 4, head 128", {"kv_cache_dtype": "int8"}),
    "windows": ("gemma 3", {}),
    "states": ("qwen 3.5", {}),
    "states and attention": ("jamba", {}),
    "latent attention": ("deepseek v3", {}),
    "n-grams": ("qwen3", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] * (i > 1)) for i, case in enumerate(CASES)]
)
def test_a_block_from_disk_has_the_bits_of_a_computed_one(case: str, model: Any) -> None:
    name, settings = CASES[case]
    first = model(name, **settings)
    expected = answers(first, PROMPTS)
    first.close()
    second = model(name, **settings)
    find = second.core.disk.fetches._plan
    found: list[Any] = []
    second.core.disk.fetches._plan = lambda *asked: found.append(find(*asked)) or found[-1]
    assert answers(second, PROMPTS) == expected
    assert found[0] is not None and found[0].num_found_blocks >= 5
    plain = model(name, kv_cache_disk=None, **settings)
    assert answers(plain, PROMPTS) == expected
    computed, read = blocks(plain), blocks(second)
    assert len(read.keys() & computed.keys()) >= 8
    assert all(read[name] == computed[name] for name in read.keys() & computed.keys())


def damage(folder: Path, name: tuple[int, bytes]) -> None:
    """Cut the end off a block's file."""
    [file] = folder.rglob(f"{name[1].hex()}-{name[0]}")
    file.write_bytes(file.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3", {"pipeline_parallel_size": 2}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("qwen3", {"tensor_parallel_size": 2}),
                ("gemma 3", {"pipeline_parallel_size": 2}),
                ("jamba", {"pipeline_parallel_size": 2}),  # a stage has no layer of a pool
            ]
        ),
    ],
    ids=str,
)
def test_a_block_has_the_parts_of_all_workers(name: str, settings: dict[str, Any], model: Any, tmp_path: Path) -> None:
    first = model(name, **settings)
    expected, computed = answers(first, PROMPTS), blocks(first)
    first.close()
    second = model(name, **settings)
    assert num_found(second) == 64
    read = blocks(second)
    assert len(read) >= 8 and all(read[name] == computed[name] for name in read)
    assert answers(second, PROMPTS) == expected
    second.close()
    for key in read:
        damage(tmp_path / "disk", key)
    third = model(name, **settings)
    assert answers(third, PROMPTS) == expected
    assert third.llm_engine.metrics.totals["num_disk_damaged"] > 0
    third.close()
    assert num_found(model(name)) == 0, "its sums are rounded otherwise, or its blocks are whole"


def test_forks_beams_and_salts_read_what_is_theirs(model: Any) -> None:
    sampled = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=10, ignore_eos=True, logprobs=3)
    beams = SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=10, ignore_eos=True)
    first = model("qwen3")
    expected = [answers(first, PROMPTS, params) for params in (sampled, beams)]
    first.close()
    second = model("qwen3")
    assert (num_found(second, cache_salt="another tenant"), num_found(second)) == (0, 64)
    second.core.scheduler.cache.forget_prefixes()
    assert [answers(second, PROMPTS, params) for params in (sampled, beams)] == expected


@pytest.mark.long
def test_other_weights_and_settings_find_nothing(model: Any, tmp_path: Path) -> None:
    first = model("qwen3")
    answers(first, PROMPTS)
    first.close()
    for changed in ({"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"block_size": 16}, {"quantization": "int8"}):
        other = model("qwen3", **changed)
        assert num_found(other) == 0, changed
        other.close()
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    other = model("qwen3")
    assert num_found(other) == 0, "a bit of a weight"


def test_the_files_of_another_machine_are_found(model: Any, tmp_path: Path) -> None:
    first = model("qwen3")
    expected = answers(first, PROMPTS)
    first.close()
    (tmp_path / "disk").rename(tmp_path / "copied")
    second = model("qwen3", kv_cache_disk=str(tmp_path / "copied"))
    assert num_found(second) == 64 and answers(second, PROMPTS) == expected


def test_sleep_keeps_what_is_on_disk_and_a_reset_does_not(model: Any) -> None:
    llm = model("qwen3")
    expected = answers(llm, PROMPTS)
    llm.sleep(1)
    llm.wake_up()
    assert num_found(llm) == 64 and answers(llm, PROMPTS) == expected
    with pytest.raises(RequestError, match="reset_connector=False is not built: the cache on disk is emptied"):
        llm.reset_prefix_cache(reset_connector=False)
    llm.reset_prefix_cache()
    assert num_found(llm) == 0


def test_blocks_are_read_and_written_after_the_steps_in_flight(model: Any) -> None:
    """Which the last of several stages has not computed yet."""
    llm = model("gemma 3", pipeline_parallel_size=2, max_num_batched_tokens=16, kv_cache_disk=None)
    llm.core.add(EngineRequest("r", Prompt(DOCUMENT), SamplingParams(max_tokens=1), [0], 1, 0.0))
    executor = llm.core.executor
    llm.core.step()
    [seq] = llm.core.scheduler.queues.running
    first = list(seq.block_tables[0])
    read = executor.read_blocks(0, first)
    llm.core.step()
    second = seq.block_tables[0][len(first) :]
    assert executor.write_blocks(0, second, np.zeros_like(read))
    assert not executor._last_steps[-1].is_done, "nobody has waited for it"
    llm.core.step()
    assert len(first) == len(second) == 2 and read.any()
    assert (executor.read_blocks(0, first) == read).all() and not executor.read_blocks(0, second).any()


def test_what_is_written_behind_the_steps_in_flight_is_read_at_once(model: Any) -> None:
    llm = model("qwen3", pipeline_parallel_size=2, max_num_batched_tokens=16, kv_cache_disk=None)
    llm.core.add(EngineRequest("r", Prompt(DOCUMENT), SamplingParams(max_tokens=1), [0], 1, 0.0))
    llm.core.step()
    llm.core.step()
    executor, written = llm.core.executor, []
    for value in (1, 2):
        written.append(np.full((2, executor.block_bytes[0]), value, np.uint8))
        assert executor.write_blocks(0, [60, 61], written[-1])
        assert not executor._last_steps[-1].is_done
    assert (executor.read_blocks(0, [60, 61]) == written[-1]).all()


def test_computed_blocks_are_read_while_steps_are_in_flight(model: Any) -> None:
    """Without windows and states only computed blocks are indexed."""
    llm = model("qwen3", pipeline_parallel_size=2, max_num_batched_tokens=16)
    llm.core.add(EngineRequest("r", Prompt(DOCUMENT), SamplingParams(max_tokens=1), [0], 1, 0.0))
    llm.core.step()
    llm.core.step()
    read = blocks(llm)
    assert llm.core.executor._last_steps[-1]._result is None
    plain = model("qwen3", kv_cache_disk=None)
    answers(plain, [DOCUMENT])
    computed, last = blocks(plain), llm.core.executor.worker.block_bytes[0]
    assert len(read) == 2 and all(computed[name].endswith(read[name][:last]) for name in read)


def test_workers_of_a_shared_stage_do_not_wait_in_a_step_that_the_first_has_not_begun(model: Any) -> None:
    """It would wait for them: for their blocks, or until they read a prompt that no socket's buffer holds."""
    longer = {"max_model_len": 2560, "hf_overrides": {"max_position_embeddings": 2560}, "num_gpu_blocks_override": 400}
    llm = model("qwen3", tensor_parallel_size=2, pipeline_parallel_size=2, max_num_batched_tokens=16, **longer)
    core, executor = llm.core, llm.core.executor
    for connection in executor.worker_group.connections:
        with socket.socket(fileno=os.dup(connection)) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    for number, prompt in enumerate((DOCUMENT, [3 + i % 97 for i in range(2500)])):
        core.add(EngineRequest(str(number), Prompt(prompt), PARAMS, [0], 10, 0.0))
        core.step()
        core.step()
        assert not executor._last_steps[-1].is_done, "nobody has waited for it"
        contents = np.full((2, executor.block_bytes[0]), 1 + number, np.uint8)
        assert executor.write_blocks(0, [390, 391], contents)
        assert executor.read_blocks(0, [380]).shape == (1, executor.block_bytes[0])
        assert (executor.read_blocks(0, [390, 391]) == contents).all()
    core.abort("1")
    found = list[int]()
    while core.has_work:
        found += [token for output in core.step().outputs for token in output.token_ids]
    [[(expected, _)]] = answers(model("qwen3", kv_cache_disk=None, **longer), [DOCUMENT])
    assert found == expected


@pytest.mark.parametrize("is_busy", [False, True])
def test_another_engine_goes_on_from_a_saved_prompt(is_busy: bool, model: Any) -> None:
    """Its blocks are on disk when the output of a request with `saves_prompt` comes, though the engine has other
    work."""
    first, second, plain = model("qwen3", max_num_batched_tokens=16), model("qwen3"), model("qwen3", kv_cache_disk=None)
    if is_busy:
        others = [EngineRequest(str(i), Prompt([i, *DOCUMENT]), PARAMS, [0], 10, 0.0) for i in range(5, 9)]
        for one in others:
            first.core.add(one)
    params = SamplingParams(max_tokens=1)
    first.core.add(EngineRequest("r", Prompt(DOCUMENT), params, [0], 1, 0.0, saves_prompt=True))
    while not any(one.request_id == "r" for one in first.core.step().outputs):
        assert first.core.has_work
    assert not first.core.disk.writer.unsaved.keys() & blocks(second).keys()
    assert num_found(second) == 64
    assert answers(second, PROMPTS) == answers(plain, PROMPTS)


def test_a_prompt_whose_files_have_gone_is_saved_again(model: Any) -> None:
    first, second = model("qwen3"), model("qwen3")
    for number in range(2):
        params = SamplingParams(max_tokens=1)
        first.core.add(EngineRequest(str(number), Prompt(DOCUMENT), params, [0], 1, 0.0, saves_prompt=True))
        while not first.core.step().outputs:
            assert first.core.has_work
        assert num_found(second) == 64
        second.core.scheduler.cache.forget_prefixes()
        first.core.disk.files.remove_all()


def test_a_saved_prompt_that_is_aborted_or_cannot_be_written_holds_nothing(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = model("qwen3")
    monkeypatch.setattr(llm.core.disk.files, "write", lambda *_: time.sleep(0) or False)
    params = SamplingParams(max_tokens=1)
    for name in ("kept", "aborted"):
        llm.core.add(EngineRequest(name, Prompt(DOCUMENT), params, [0], 1, 0.0, saves_prompt=True, cache_session=name))
    llm.core.abort("aborted")
    seen = set[str]()
    while llm.core.has_work:
        seen |= {one.request_id for one in llm.core.step().outputs}
    assert seen == {"kept"}


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.long)])
def test_evicted_blocks_come_back(num_stages: int, model: Any) -> None:
    """Thirty prompts of five blocks in a cache of 24."""
    shape = {"num_gpu_blocks_override": 24, "max_num_seqs": 3}
    llm, plain = model("qwen3", pipeline_parallel_size=num_stages, **shape), model("qwen3", kv_cache_disk=None, **shape)
    prompts = [[(7 * number + place) % VOCAB for place in range(44)] for number in range(30)]
    expected = answers(plain, prompts)
    assert answers(llm, prompts) == expected
    llm.core.disk.save_all()
    assert answers(llm, prompts) == expected
    metrics = llm.llm_engine.metrics.totals
    assert metrics["num_disk_hits"] >= 20 * 40 and metrics["num_disk_dropped"] == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_cache_disk_gib": 0.0}, "--kv-cache-disk-gib must be above 0"),
        ({"kv_cache_disk": None, "kv_cache_disk_gib": 1.0}, "--kv-cache-disk-gib is the size of the folder"),
        ({"kv_cache_disk": ""}, "--kv-cache-disk is empty; name a folder"),
        ({"enable_prefix_caching": False}, "keeps the blocks of the prefix cache, which is off"),
        ({"kv_cache_disk": "/dev/null/disk"}, "--kv-cache-disk /dev/null/disk: Not a directory; name a folder"),
    ],
)
def test_what_cannot_be_kept_is_refused(settings: dict[str, Any], said: str, model: Any) -> None:
    with pytest.raises(ConfigError, match=said):
        model("qwen3", **settings)


def test_a_damaged_note_of_the_weights_is_not_believed(model: Any, tmp_path: Path) -> None:
    first = model("qwen3")
    answers(first, PROMPTS)
    first.close()
    notes = list((tmp_path / "disk" / "octavo-kv-1" / "weights").iterdir())
    assert notes
    for note in notes:
        note.write_text(json.dumps("x"))
    second = model("qwen3")
    assert num_found(second) == 64


@pytest.mark.long
@pytest.mark.timeout(300)
def test_engines_that_are_killed_leave_no_wrong_block_and_no_lost_room(tmp_path: Path, tiny_tokenizer: Path) -> None:
    folder = tmp_path / "model"
    MODELS["qwen3"].save(MODELS["qwen3"].reference(seed=2), folder)
    found = list(kill_engines(str(folder), str(tiny_tokenizer), tmp_path / "disk", NUM_KILLS))
    assert [(one["wrong"], one["damaged"], one["left"]) for one in found] == [(0, 0, 0)] * NUM_KILLS
    assert all(one["bytes"] <= LIMIT_BYTES + PART_BYTES for one in found)
    assert sum(one["blocks"] for one in found) > 0 and sum(one["cached"] for one in found[1:]) > 0


def test_adapters_have_blocks_of_their_own(model: Any, tmp_path: Path) -> None:
    sizes = {f"model.layers.{layer}.self_attn.v_proj": (32, 48) for layer in (0, 1)}
    asked = [LoRARequest(name, number, str(write_adapter_of(tmp_path / name, number, 4, sizes, 2.0)))
             for number, name in enumerate(("a", "b"), 1)]  # fmt: skip
    first = model("qwen3", enable_lora=True)
    expected = [answers(first, PROMPTS, lora_request=[one] * len(PROMPTS)) for one in asked]
    assert expected[0] != expected[1]
    first.close()
    second = model("qwen3", enable_lora=True)
    assert num_found(second) == 0, "blocks without an adapter"
    assert answers(second, PROMPTS, lora_request=[asked[0]] * len(PROMPTS)) == expected[0]
    assert second.llm_engine.metrics.totals["num_disk_hits"] >= 64


def test_a_closed_engine_is_freed(model: Any) -> None:
    llm = model("qwen3")
    answers(llm, PROMPTS[:1])
    core = weakref.ref(llm.core)
    llm.close()
    assert core() is None


def test_no_blocks_are_asked_of_workers_after_a_broken_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, asked = model("qwen3"), list[int]()

    def break_off(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as breaking:
        breaking.setattr(llm.core.executor, "submit", break_off)
        with pytest.raises(KeyboardInterrupt):
            answers(llm, PROMPTS[:1])
    assert llm.core.scheduler.fetches is None, "later prompts do not wait for a thread that has ended"
    assert llm.core.disk.fetches.forget not in llm.core.scheduler.queues.on_end
    llm.core.disk.writer.unsaved[0, b"computed"] = 1
    monkeypatch.setattr(llm.core.disk._memory, "read_blocks", lambda pool, blocks: asked.append(pool))
    llm.close()
    assert not asked


@pytest.mark.parametrize("settings", [{"preemption_mode": "swap", "swap_space": 0.01}, {"max_num_batched_tokens": 16}])
def test_too_few_blocks_change_no_answer(settings: dict[str, Any], model: Any) -> None:
    """Forks and beams that lose their blocks while others' are read."""
    small = {"num_gpu_blocks_override": 26, "max_num_seqs": 6} | settings
    plain, llm = model("qwen3", kv_cache_disk=None, **small), model("qwen3", **small)
    prompts = [[(7 * number + place) % VOCAB for place in range(44 + number)] for number in range(8)]
    params = [
        SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=30, ignore_eos=True, logprobs=2),
        SamplingParams(n=2, use_beam_search=True, temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2),
    ]
    mixed: Any = [params[number % 3] for number in range(len(prompts))]
    expected = answers(plain, prompts, mixed)
    for _ in range(3):
        assert answers(llm, prompts, mixed) == expected
        llm.core.disk.save_all()
    assert llm.llm_engine.metrics.totals["num_disk_hits"] > 0
