"""Guessed tokens change no answer: with right, wrong and random guesses, on the CPU and on a device that is late.

Both sides are whole engine cores on one small random model; the guesses come from a proposer that has seen the answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.core import EngineCore
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.sequence import Sequence
from tests.execution.late_device import LateDevice
from tests.execution.test_runner import EOS, VOCAB, config_of, late_executor, model, refuse_in_turn, requests, run, told
from tests.speculation import guessing
from tests.structured_output.grammars import make_grammar

__all__ = ["model"]

Answers = dict[tuple[str, int], list[int]]  # whole outputs, by request and completion


def guessed_requests(seed: int) -> list[EngineRequest]:
    """Those of the runner's tests, and some that follow a grammar."""
    found = requests(seed)
    digits = make_grammar(StructuredOutputsParams(regex=r"[0-9]{3,12}(, [a-z]{1,4}){0,4}"))
    for i in range(4):
        params = SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=16, logprobs=1)
        params.grammar = digits
        if i == 3:
            params.min_tokens = 8
        found.append(EngineRequest(f"g{i}", Prompt([9, 10, 11 + i]), params, [EOS], 16, 0.0))
    return found


def proposer(kind: str, answers: Answers, seed: int) -> Callable[[Sequence, int], tuple[int, ...]]:
    rng = random.Random(seed)

    def propose(seq: Sequence, most: int) -> tuple[int, ...]:
        answer = answers.get((seq.request.request_id, seq.index), [])
        right = answer[seq.num_output_tokens : seq.num_output_tokens + min(most, rng.randrange(1, 6))]
        if kind == "right":
            return tuple(right)
        if kind == "wrong":
            return tuple((token + 1) % VOCAB for token in right)
        return tuple(token if rng.random() < 0.7 else rng.randrange(VOCAB) for token in right)

    return propose


FLAGS: list[dict[str, Any]] = [{}, {"num_gpu_blocks_override": 13}, {"enforce_eager": True}]
# Each kind and each flag once by device; the others are in the long tier.
CASES = [
    pytest.param(place, kind, flags, marks=pytest.mark.long if (i + j + k) % 3 else (), id=f"{place}-{kind}-{flags}")
    for i, place in enumerate(("cpu", "late device"))
    for j, kind in enumerate(("right", "wrong", "random"))
    for k, flags in enumerate(FLAGS)
]


@pytest.mark.parametrize(("place", "kind", "flags"), CASES)
def test_guesses_change_no_answer(model: Path, kind: str, flags: dict[str, Any], place: str) -> None:
    config = config_of(model, **flags)
    expected = run(EngineCore(config), guessed_requests(1), 1)
    answers = {key: told(outputs)["tokens"] for key, outputs in expected.items()}
    executor = None if place == "cpu" else late_executor(config, LateDevice(1))
    core = EngineCore(config, executor, guessing(proposer(kind, answers, 1)))
    found = run(core, guessed_requests(1), 1)
    assert found.keys() == expected.keys()
    for key, outputs in found.items():
        was, should_be = told(outputs), told(expected[key])
        # The operations behind the late device round log-probabilities otherwise than the native ones.
        assert was.pop("values") == pytest.approx(should_be.pop("values"), abs=2e-3)
        assert was == should_be


def test_right_guesses_save_steps(model: Path) -> None:
    config = config_of(model)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)

    def request() -> list[EngineRequest]:
        return [EngineRequest("r", Prompt([5, 6, 7]), params, [EOS], 24, 0.0)]

    [outputs] = run(EngineCore(config), request(), 0).values()
    answer = told(outputs)["tokens"]
    core = EngineCore(config, None, guessing(lambda seq, most: tuple(answer[seq.num_output_tokens :][: min(most, 3)])))
    core.add(request()[0])
    found, num_steps = [], 0
    while core.has_work:
        found += [token for output in core.step().outputs for token in output.token_ids]
        num_steps += 1
    assert found == answer
    assert num_steps == 1 + -(-23 // 4), "a prompt, then four tokens a step"


def test_draft_tokens_of_a_step_without_memory_are_forgotten(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it nothing is drafted, and steps run ahead: their inputs are sampled tokens, no draft tokens."""
    device, speculation = LateDevice(0), guessing(lambda seq, most: (9,) * min(most, 3))
    choose = speculation.choose
    monkeypatch.setattr(
        speculation, "choose", lambda seqs, rows: [()] * len(seqs) if device.num_failures else choose(seqs, rows)
    )
    config = config_of(model, enable_prefix_caching=False)
    core = EngineCore(config, late_executor(config, device), speculation)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    asked = [EngineRequest(f"r{i}", Prompt([5, 6, 7 + i]), params, [EOS], 8, 0.0) for i in range(2)]

    def run_all() -> dict[Any, Any]:
        device.num_failures = 0
        return {key: told(outputs) for key, outputs in run(core, asked).items()}

    refuse_in_turn(device, run_all)


@pytest.mark.parametrize("place", ["cpu", "late device"])
def test_a_step_of_draft_tokens_and_forks_has_room_for_all_their_samples(model: Path, place: str) -> None:
    """15 of 16 tokens are sampled after, and the last one four times, for its forks."""
    config = config_of(model, max_num_batched_tokens=16, max_num_seqs=8)
    drafting = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    forking = SamplingParams(temperature=1.0, n=4, seed=1, max_tokens=2)
    todo = [
        EngineRequest("drafts", Prompt([5, 6, 7]), drafting, [EOS], 16, 0.0),
        EngineRequest("forks", Prompt([8]), forking, [EOS], 2, 0.0),
    ]
    expected = run(EngineCore(config), todo)
    executor = None if place == "cpu" else late_executor(config, LateDevice(1))
    core = EngineCore(config, executor, guessing(lambda seq, most: (9,) * min(most, 14)))
    core.add(todo[0])
    core.step()  # its prompt
    for _ in range(2 if place == "late device" else 0):
        core.step()
    core.add(todo[1])
    found = run(core, [])
    assert {key: told(outputs)["tokens"] for key, outputs in found.items() if key[0] == "forks"} == {
        key: told(outputs)["tokens"] for key, outputs in expected.items() if key[0] == "forks"
    }
