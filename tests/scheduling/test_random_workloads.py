"""The scheduler and the cache under random workloads, against a model of the truth (`tests.scheduling.simulation`)."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from octavo.errors import RequestError
from octavo.kv_cache.manager import UNLIMITED
from octavo.sampling_params import SamplingParams
from tests.scheduling.random_runs import run
from tests.scheduling.simulation import Simulation
from tests.scheduling.truth import MODELS, Setup
from tests.scheduling.workload import Workload

pytestmark = pytest.mark.usefixtures("small_chunks")

SWITCHES = list(
    product(("fcfs", "priority", "deadline"), ("recompute", "swap"), (True, False), (True, False), (True, False))
)
OPERATIONS_EACH = 1100


def test_the_long_tier_makes_at_least_50_000_operations() -> None:
    assert len(SWITCHES) * OPERATIONS_EACH >= 50_000


# Of the short tier each value of a switch meets each of every other, in as few as can be.
SHORT = (0, 15, 22, 25, 35, 44)


@pytest.mark.parametrize(
    ("policy", "preemption_mode", "chunked", "caching", "ahead"),
    [pytest.param(*one, marks=() if i in SHORT else pytest.mark.long) for i, one in enumerate(SWITCHES)],
)
def test_every_answer_is_that_of_a_standalone_run_and_nothing_is_lost(
    policy: str, preemption_mode: str, chunked: bool, caching: bool, ahead: bool
) -> None:
    run(policy, preemption_mode, chunked, caching, ahead, OPERATIONS_EACH)


@pytest.mark.parametrize(
    ("model", "draft_tokens"),
    [("full", "none"), pytest.param("full", "random", marks=pytest.mark.long), ("full and state", "random")],
)
@pytest.mark.parametrize("preemption_mode", ["recompute", pytest.param("swap", marks=pytest.mark.long)])
def test_stages_share_the_sequences_out_and_change_nothing(preemption_mode: str, model: str, draft_tokens: str) -> None:
    policy = "priority" if draft_tokens == "none" else "fcfs"
    run(policy, preemption_mode, True, True, True, OPERATIONS_EACH, model, draft_tokens, staged=True)


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
            keeps_on_host=st.booleans(),
            runs_ahead=st.booleans(),
            num_stages=st.sampled_from([1, 1, 2, 4]),
            memory_failures=st.sampled_from([0, 0, 10]),
            model=st.sampled_from(list(MODELS)),
            draft_tokens=st.sampled_from(["none", "right", "wrong", "random"]),
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
            self.simulation.add([1] * capacity, SamplingParams(max_tokens=num_more + 1))
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
