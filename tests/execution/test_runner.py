"""The runner gives the same answers on a device that is as late as a device can be as on the CPU.

Both sides are whole engine cores on the same small random model in float32: the CPU's native kernels, which wait for
each step, and the reference operations behind `LateDevice`, one step ahead, with and without graphs, swapping, forks,
beams, grammars and steps that find no memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import LlamaConfig

from octavo.config import EngineArgs, EngineConfig
from octavo.engine.core import EngineCore
from octavo.execution.cuda_device import can_pad_to, graph_sizes, shapes_to_capture
from octavo.execution.executor import LocalExecutor
from octavo.execution.step_arrays import StepLimits, StepShape
from octavo.request import EngineRequest, Prompt, SequenceOutput
from octavo.sampling_params import SamplingParams
from tests.execution.late_device import LateDevice
from tests.ops import torch_ref
from tests.untimed import without_time

VOCAB = 320
EOS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tiny_tokenizer)


def save_model(folder: Path, tokenizer: Path) -> Path:
    LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, bos_token_id=1, eos_token_id=EOS,
        pad_token_id=0, architectures=["LlamaForCausalLM"], tie_word_embeddings=False, dtype="float32",
    ).save_pretrained(folder)  # fmt: skip
    for file in tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def config_of(model: Path, **flags: Any) -> EngineConfig:
    defaults = {
        "load_format": "dummy", "dtype": "float32", "seed": 3, "max_num_seqs": 6, "max_num_batched_tokens": 24,
        "max_model_len": 96, "block_size": 8, "num_gpu_blocks_override": 30, "check_invariants": True, "device": "cpu",
        "swap_space": 0.001,
    }  # fmt: skip
    if "speculative_model" not in flags:
        defaults["speculative_config"] = {"method": "none"}  # tests count steps, and say when they want draft tokens
    return EngineArgs(model=str(model), **(defaults | flags)).create_engine_config()


def requests(seed: int, num: int = 20, **fixed: Any) -> list[EngineRequest]:
    """Prompts that begin alike, with settings that exercise every way of drawing a token."""
    rng = random.Random(seed)
    document = [rng.randrange(3, VOCAB) for _ in range(60)]
    found = []
    for i in range(num):
        prompt = document[: rng.randrange(1, 50)] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 6))]
        max_tokens = rng.randrange(1, 24)
        settings: dict[str, Any] = rng.choice(
            [
                {},
                {},
                {"temperature": 0.9, "seed": i},
                {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": i},
                {"logprobs": 3},
                {"prompt_logprobs": 2, "temperature": 0.5, "seed": i},
                {"n": 3, "temperature": 1.0, "seed": i},
                {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
                {"min_tokens": min(5, max_tokens), "bad_words_token_ids": [[7], [8, 9]]},
                {"logit_bias": {5: 3.0, 6: -2.0}, "temperature": 1.0, "seed": i},
                {"n": 2, "use_beam_search": True},
                {"ignore_eos": True},
                # Ends that nobody foresees, while the next step is under way.
                {"stop_token_ids": list(range(3, 60))},
                {"stop_token_ids": list(range(3, 60)), "temperature": 1.0, "seed": i},
            ]
        )
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens} | settings | fixed))
        found.append(EngineRequest(f"r{i}", Prompt(prompt), params, [EOS], max_tokens, 0.0))
    return found


def run(core: EngineCore, todo: list[EngineRequest], seed: int = 0) -> dict[tuple[str, int], list[SequenceOutput]]:
    """All outputs by sequence. Requests come in between steps."""
    without_time(core)
    rng = random.Random(seed)
    todo = list(todo)
    found: dict[tuple[str, int], list[SequenceOutput]] = {}
    for _ in range(2000):
        while todo and rng.random() < 0.4:
            core.add(todo.pop(0))
        if not core.has_work and not todo:
            break
        for output in core.step().outputs:
            found.setdefault((output.request_id, output.index), []).append(output)
    assert not core.has_work
    assert all(pool.num_used == 0 for pool in [*core.scheduler.cache.pools, *core.scheduler.cache.host_pools])
    return found


def told(outputs: list[SequenceOutput]) -> dict[str, Any]:
    """What a user sees of a sequence: tokens, why it ended, and which tokens it was told the likelihood of."""
    logprobs = [entry for output in outputs for entry in output.logprobs or []]
    prompt = [entry for output in outputs for entry in output.prompt_logprobs or []]
    return {
        "tokens": [token for output in outputs for token in output.token_ids],
        "status": outputs[-1].error_status,
        "end": (outputs[-1].finish_reason, outputs[-1].stop_reason, outputs[-1].error),
        "logprobs": [entry.token_ids for entry in logprobs],
        "prompt": [entry.token_ids for entry in prompt],
        "values": [round(value, 3) for entry in logprobs + prompt for value in entry.logprobs],
    }


class Reference:
    """The reference operations, of which sampling destroys the logits, as it may. What steps compute is given to a
    stream, whatever thread they come from: nothing else orders it."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self.serves = device, False

    def __getattr__(self, name: str) -> Any:
        assert self._device.is_running or not self.serves, f"{name} is in no stream"
        return getattr(torch_ref, name)

    def sample(self, logits: Tensor, *settings: Tensor) -> Tensor:
        tokens = torch_ref.sample(logits, *settings)
        logits.fill_(float("nan"))
        return tokens


def late_executor(config: EngineConfig, device: LateDevice) -> LocalExecutor:
    ops: Any = Reference(device)
    executor = LocalExecutor(config, device, ops)
    ops.serves = True
    return executor


def device_core(config: EngineConfig, device: LateDevice) -> EngineCore:
    return EngineCore(config, late_executor(config, device))


FLAGS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "call by call": {"enforce_eager": True},
    "few blocks": {"num_gpu_blocks_override": 13},
    "few blocks, swapped": {"num_gpu_blocks_override": 13, "preemption_mode": "swap"},
    "no prefix cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.long), 1])
def test_every_answer_is_the_cpus(model: Path, flags: dict[str, Any], seed: int) -> None:
    config = config_of(model, **flags)
    device = LateDevice(seed)
    core = device_core(config, device)
    found = run(core, requests(seed), seed)
    expected = run(EngineCore(config), requests(seed), seed)
    assert {key: told(outputs) for key, outputs in found.items()} == {
        key: told(outputs) for key, outputs in expected.items()
    }
    assert (device.num_replays > 0) != config.enforce_eager
    num_preemptions = sum(outputs[-1].num_preemptions for outputs in found.values())
    assert num_preemptions or "num_gpu_blocks_override" not in flags


@pytest.mark.parametrize("cache", ["int8", "fp8_e5m2"])
def test_a_cache_of_bytes_is_swapped_forked_shared_and_cut_without_a_trace(model: Path, cache: str) -> None:
    def answers(**flags: Any) -> dict[Any, Any]:
        core = EngineCore(config_of(model, kv_cache_dtype=cache, **flags))
        return {key: told(outputs) for key, outputs in run(core, requests(0), 0).items()}

    expected = answers(num_gpu_blocks_override=200, enable_prefix_caching=False)
    few = {"num_gpu_blocks_override": 17}
    for flags in (few, few | {"preemption_mode": "swap"}, {"max_num_batched_tokens": 9}):
        assert answers(**flags) == expected


def test_plain_requests_are_computed_one_step_ahead(model: Path) -> None:
    core = device_core(config_of(model), LateDevice(0))
    for i in range(3):
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        core.add(EngineRequest(f"r{i}", Prompt([5, 6, 7 + i]), params, [EOS], 20, 0.0))
    num_steps = num_ahead = 0
    while core.has_work:
        core.step()
        num_steps += 1
        num_ahead += len(core._in_flight) == 1
    assert (num_steps, num_ahead) == (21, 20)


@pytest.mark.parametrize(
    ("settings", "tokens_of_it"),
    [
        ({"min_tokens": 9}, 10),  # needs the number of tokens alone
        ({"repetition_penalty": 1.2}, 10),  # the device counts the last token
        ({"presence_penalty": 0.2, "frequency_penalty": 0.1}, 10),
        ({"bad_words_token_ids": [[7], [8]]}, 10),
        ({"bad_words_token_ids": [[7, 8]]}, 5),  # is skipped in every other step
    ],
)
def test_a_request_that_follows_its_output_does_not_stop_the_others(
    model: Path, settings: dict[str, Any], tokens_of_it: int
) -> None:
    core = device_core(config_of(model), LateDevice(0))
    for i in range(4):
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, **(settings if i == 0 else {}))
        core.add(EngineRequest(f"r{i}", Prompt([5, 6, 7 + i]), params, [EOS], 20, 0.0))
    num_tokens, num_ahead = dict.fromkeys((f"r{i}" for i in range(4)), 0), 0
    for _ in range(11):
        for output in core.step().outputs:
            num_tokens[output.request_id] += len(output.token_ids)
        num_ahead += len(core._in_flight) == 1
    assert num_ahead == 11
    assert num_tokens == {"r0": tokens_of_it, "r1": 10, "r2": 10, "r3": 10}


@pytest.mark.parametrize("flags", ["graphs", "few blocks"])
def test_penalties_and_min_tokens_count_every_token_of_requests_that_run_ahead(model: Path, flags: str) -> None:
    often = {"frequency_penalty": -0.4, "presence_penalty": 1.0}  # has tokens come again and again
    settings: list[dict[str, Any]] = [
        {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.3}, often, {},
        {"repetition_penalty": 1.5, "temperature": 1.0, "seed": 5}, {"min_tokens": 12}, often | {"min_tokens": 9},
    ]  # fmt: skip
    rng, asked = random.Random(3), []
    for i in range(18):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))]
        stops = list(range(200, VOCAB)) if i % 6 > 3 else []
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "stop_token_ids": stops} | settings[i % 6])
        asked.append(EngineRequest(f"r{i}", Prompt(prompt), params, [EOS], 24, 0.0))
    config = config_of(model, **FLAGS[flags])
    core = device_core(config, LateDevice(2))
    made = run(core, asked)
    num_preemptions = sum(outputs[-1].num_preemptions for outputs in made.values())
    assert num_preemptions or flags != "few blocks"
    found = {key: told(outputs) for key, outputs in made.items()}
    assert found == {key: told(outputs) for key, outputs in run(EngineCore(config), asked).items()}
    num_different = {len({*one["tokens"]}) for one in found.values() if len(one["tokens"]) == 24}
    assert min(num_different) < 20 and max(num_different) == 24, "tokens come again, and new ones come"


def test_where_half_follow_their_output_steps_wait(model: Path) -> None:
    """Each would lose half of its steps, for less than the others would gain."""
    core = device_core(config_of(model), LateDevice(0))
    for i in range(2):
        words = [[7, 8]] if i else None
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, bad_words_token_ids=words)
        core.add(EngineRequest(f"r{i}", Prompt([5, 6, 7 + i]), params, [EOS], 6, 0.0))
    num_steps = 0
    while core.has_work:
        core.step()
        num_steps += 1
        assert not core._in_flight
    assert num_steps == 6


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_a_step_without_memory_ends_its_newest_request_and_no_other(model: Path, seed: int) -> None:
    device = LateDevice(seed)
    config = config_of(model)
    # A new block for each token: what the device was not told must reach it with a later step.
    core = device_core(replace(config, cache=replace(config.cache, block_size=1, num_blocks_override=400)), device)
    expected = {key: told(outputs) for key, outputs in run(core, requests(seed), seed).items()}
    device.memory_failures = 0.03
    found = {key: told(outputs) for key, outputs in run(core, requests(seed), seed).items()}
    assert device.num_failures > 0
    failed = {key for key, outcome in found.items() if outcome["end"][0] == "error"}
    assert 0 < len({request_id for request_id, _ in failed}) <= device.num_failures
    for key in found.keys() - failed:
        assert found[key] == expected[key]
    for key in failed:
        assert "ran out of device memory" in found[key]["end"][2]
        assert found[key]["status"] == 503
    assert found.keys() | failed >= {key for key in expected if key[1] == 0}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("in_a_row", [1, 3])
def test_memory_may_run_out_at_any_piece_of_work(model: Path, in_a_row: int) -> None:
    """Also at those before a step's rows: blocks that are swapped, and copied. What others count on comes later."""
    device = LateDevice(0)
    flags = {"num_gpu_blocks_override": 13, "preemption_mode": "swap", "enable_prefix_caching": False}
    core = device_core(config_of(model, **flags), device)
    asked = requests(5, 8, ignore_eos=True)
    refuse_in_turn(device, lambda: {key: told(outputs) for key, outputs in run(core, asked, 5).items()}, in_a_row)


def refuse_in_turn(device: LateDevice, run_all: Callable[[], dict[Any, Any]], in_a_row: int = 1) -> None:
    """Have every `in_a_row` pieces of work of `run_all` in turn find no memory: that ends as many requests at most, and
    changes what no other is told. `run_all` returns what `told` does by (request, index)."""
    device.num_given, device.refused = 0, range(0)
    expected, ended = run_all(), set[Any]()
    for first in range(device.num_given):
        device.num_given, device.refused = 0, range(first, first + in_a_row)
        found = run_all()
        failed = {key for key, outcome in found.items() if outcome["end"][0] == "error"}
        assert len({request_id for request_id, _ in failed}) <= in_a_row
        assert all(found[key]["status"] == 503 for key in failed)
        assert all(found[key] == expected[key] for key in found.keys() - failed)
        assert {request_id for request_id, _ in found} == {request_id for request_id, _ in expected}
        ended |= failed
    assert ended


def test_a_runner_is_captured_once_and_its_steps_are_collected_in_order(model: Path) -> None:
    config = config_of(model)
    executor = late_executor(config, LateDevice(0))
    core, runner = EngineCore(config, executor), executor.worker.runner
    collected = list[Any]()
    collect = runner.collect
    runner.collect = lambda step: collected.append(step) or collect(step)  # type: ignore[method-assign]
    run(core, requests(0, num=3))
    for step in (collected[0], collected[-1]):
        with pytest.raises(AssertionError, match="in the order of submission"):
            collect(step)
    with pytest.raises(AssertionError):
        runner.submitter.capture()
    with pytest.raises(AssertionError):
        runner.use_caches(runner.submitter.caches, runner.block_mover)
    with pytest.raises(AssertionError, match="before steps are captured"):
        runner.submitter.set_draft_hooks(keeps_features=True)
    with pytest.raises(AssertionError, match="a later step has overwritten the features"):
        runner.submitter.features_of(collected[0])


def test_steps_with_prompts_are_replayed_too(model: Path) -> None:
    """Up to some hundred tokens, padded; longer ones and those of more sequences are launched call by call."""
    device = LateDevice(0)
    core = device_core(config_of(model, max_num_batched_tokens=200), device)
    core.add(EngineRequest("a", Prompt(list(range(5, 45))), SamplingParams(max_tokens=1), [EOS], 1, 0.0))
    while core.has_work:
        core.step()
    assert device.num_replays == 1


def test_what_is_captured() -> None:
    shapes = shapes_to_capture(StepLimits(StepShape(8192, 300, 8192, 10**5), groups=2))
    decodes, mixed = shapes[:-3], shapes[-3:]
    assert [shape.tokens for shape in decodes] == graph_sizes(300)
    assert [(shape.tokens, shape.seqs) for shape in mixed] == [(128, 64), (256, 128), (512, 256)]
    few = shapes_to_capture(StepLimits(StepShape(200, 6, 200, 0)))
    assert [(s.tokens, s.seqs) for s in few[-2:]] == [(128, 6), (200, 6)]

    def captured_for(*used: int) -> int:
        return next((shape.tokens for shape in shapes if can_pad_to(StepShape(*used), shape)), 0)

    assert captured_for(3, 3, 3, 0) == 4
    assert captured_for(3, 2, 2, 0) == 128  # two of them are of a prompt
    assert captured_for(100, 70, 70, 0) == 256
    assert captured_for(130, 3, 0, 9) == 256
    assert captured_for(513, 1, 1, 0) == 0
    assert captured_for(40, 1, 1, 2 * (2 * 64 + 128) + 1) == 256  # the blocks of a long prefix
