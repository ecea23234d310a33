"""The scheduler and the cache under random workloads, against a model of the truth (`tests.scheduling.simulation`)."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from octavo.errors import RequestError
from octavo.kv_cache.manager import UNLIMITED
from octavo.sampling_params import SamplingParams
from octavo.scheduling import budget
from tests.scheduling.simulation import Simulation
from tests.scheduling.truth import MODELS, Setup
from tests.scheduling.workload import Workload

SWITCHES = list(
    product(("fcfs", "priority", "deadline"), ("recompute", "swap"), (True, False), (True, False), (True, False))
)
OPERATIONS_EACH = 1100
# What is rare (an abort of what is swapped out) may not be seen by then: a run goes on until it is, this far at most.
MOST_OPERATIONS = 24_000

# Every kind of memory, and guesses, which no step runs ahead of while there are some.
KINDS = [(model, "none", mode, ahead) for model in MODELS if model != "full" for mode, ahead in [
    ("recompute", True), ("swap", True), ("swap", False)
]]  # fmt: skip
GUESSES = [
    ("full", guesses, mode, ahead)
    for guesses, ahead in (("right", False), ("right", True), ("wrong", False), ("random", False), ("random", True))
    for mode in ("recompute", "swap")
]
GUESSES += [(model, "random", "swap", False) for model in MODELS if model != "full"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts of the workloads are short: what they get at least is less, so that time cuts them."""
    monkeypatch.setattr(budget, "MIN_CHUNK_TOKENS", 2)


def test_the_default_run_makes_at_least_50_000_operations() -> None:
    assert len(SWITCHES) * OPERATIONS_EACH >= 50_000


@pytest.mark.parametrize(("policy", "preemption_mode", "chunked", "caching", "ahead"), SWITCHES)
def test_every_answer_is_that_of_a_standalone_run_and_nothing_is_lost(
    policy: str, preemption_mode: str, chunked: bool, caching: bool, ahead: bool
) -> None:
    run(policy, preemption_mode, chunked, caching, ahead, OPERATIONS_EACH)


@pytest.mark.parametrize(("model", "guesses", "preemption_mode", "ahead"), KINDS + GUESSES)
def test_the_same_with_windows_states_and_guesses(model: str, guesses: str, preemption_mode: str, ahead: bool) -> None:
    run("fcfs", preemption_mode, True, True, ahead, OPERATIONS_EACH // 4, model, guesses)
    run("priority", preemption_mode, True, False, ahead, OPERATIONS_EACH // 8, model, guesses)


def run(
    policy: str,
    preemption_mode: str,
    chunked: bool,
    caching: bool,
    ahead: bool,
    num_wanted: int,
    model: str = "full",
    guesses: str = "none",
) -> None:
    rng = random.Random(f"{policy} {preemption_mode} {chunked} {caching}")
    num_operations = 0
    seen: dict[str, int] = {}
    wanted = wanted_of(policy, preemption_mode, chunked, caching, ahead, model, guesses)
    while num_operations < num_wanted or (num_operations < MOST_OPERATIONS and unseen(seen, wanted)):
        max_num_seqs = rng.choice([1, 3, 5, 8, 12])
        setup = Setup(
            num_blocks=rng.choice([6, 10, 16, 24, 40]),
            block_size=rng.choice([1, 3, 4, 4, 8]),
            num_host_blocks=rng.choice([0, 3, 8, 30]),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 5, 20, 60]),
            policy=policy,
            preemption_mode=preemption_mode,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=caching,
            runs_ahead=ahead,
            memory_failures=rng.choice([0, 0, 2]),
            model=model,
            guesses=guesses,
            target_step_s=rng.choice([0.0, 10.0, 40.0]),
        )
        simulation = Simulation(setup)
        Workload(simulation, rng.randint).run(400)
        simulation.drain()
        num_operations += simulation.num_operations
        for what, count in simulation.seen.items():
            seen[what] = seen.get(what, 0) + count
    assert num_operations >= num_wanted
    # A workload that never preempts, forks or hits proves nothing.
    assert not unseen(seen, wanted), f"the workload has seen {seen} and not {unseen(seen, wanted)}"
    assert caching or not seen["prefix hit"]


def unseen(seen: dict[str, int], wanted: set[str]) -> set[str]:
    return {what for what in wanted if not seen.get(what)}


def wanted_of(
    policy: str, preemption_mode: str, chunked: bool, caching: bool, ahead: bool, model: str, guesses: str
) -> set[str]:
    """What a workload must exercise."""
    wanted = {
        "preemption", "copy on write", "abort waiting", "abort running", "abort one of several", "abort an unborn fork",
        "prompt logprobs", "finish: stop", "finish: length", "finish: error",
        "finish of a search", "held beam", "held beam preempted", "withdrawn",
    }  # fmt: skip
    wanted |= {"swap", "swap back", "abort swapped"} if preemption_mode == "swap" else set()
    wanted |= {"chunk of a prompt"} if chunked else set()
    wanted |= {"prefix hit"} if caching else set()
    wanted |= {"overtaken"} if policy != "fcfs" and chunked else set()
    wanted |= {"ahead"} if ahead else set()
    if guesses != "none" and all(spec.kind != "state" for spec, _ in MODELS[model]):
        wanted |= {"guess"} | ({"right guess"} if guesses != "wrong" else set())
        wanted |= {"wrong guess"} if guesses != "right" else set()
    if (model, guesses) != ("full", "none"):  # what is rare, and seen in the other runs
        wanted -= {"held beam preempted", "abort an unborn fork", "abort swapped"}
    return wanted


class SchedulerMachine(RuleBasedStateMachine):
    """The same operations chosen by hypothesis, which shrinks whatever fails to a few lines."""

    simulation: Simulation
    workload: Workload

    @initialize(
        setup=st.builds(
            Setup,
            num_blocks=st.integers(2, 20),
            block_size=st.integers(1, 5),
            num_host_blocks=st.integers(0, 10),
            max_num_seqs=st.integers(1, 6),
            max_num_batched_tokens=st.integers(6, 30),
            policy=st.sampled_from(["fcfs", "priority", "deadline"]),
            target_step_s=st.sampled_from([0.0, 1.0, 20.0]),
            preemption_mode=st.sampled_from(["recompute", "swap"]),
            enable_chunked_prefill=st.booleans(),
            enable_prefix_caching=st.booleans(),
            runs_ahead=st.booleans(),
            memory_failures=st.sampled_from([0, 0, 10]),
            model=st.sampled_from(list(MODELS)),
            guesses=st.sampled_from(["none", "right", "wrong", "random"]),
        )
    )
    def start(self, setup: Setup) -> None:
        self.simulation = Simulation(setup)

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        Workload(self.simulation, lambda low, high: data.draw(st.integers(low, high))).add()

    @rule(num_more=st.integers(1, 50))
    def add_too_much(self, num_more: int) -> None:
        setup = self.simulation.setup
        capacity = self.simulation.cache.capacity(setup.max_num_batched_tokens)
        if capacity >= UNLIMITED:  # windows and states hold any number of tokens
            return
        with pytest.raises(RequestError, match=f"{capacity + num_more} tokens of KV cache"):
            self.simulation.add([1] * capacity, SamplingParams(max_tokens=num_more))
        self.simulation.requests.popitem()

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        Workload(self.simulation, lambda low, high: data.draw(st.integers(low, high))).abort()

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.simulation.step()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
test_hypothesis_finds_no_sequence_of_operations_that_breaks_an_invariant = SchedulerMachine.TestCase
