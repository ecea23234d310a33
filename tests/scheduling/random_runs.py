"""Random workloads until they have seen all that they are made for."""

from __future__ import annotations

import random

from tests.scheduling.simulation import Simulation
from tests.scheduling.truth import Setup
from tests.scheduling.workload import Workload

# What is rare (an abort of what is swapped out) may not be seen by then: a run goes on until it is, this far at most.
MOST_OPERATIONS = 24_000


def run(
    policy: str,
    preemption_mode: str,
    chunked: bool,
    caching: bool,
    ahead: bool,
    num_wanted: int,
    model: str = "full",
    draft_tokens: str = "none",
    staged: bool = False,
    keeps_on_host: bool = False,
) -> None:
    rng = random.Random(f"{policy} {preemption_mode} {chunked} {caching}")
    num_operations = 0
    seen: dict[str, int] = {}
    wanted = wanted_of(policy, preemption_mode, chunked, caching, ahead, model, draft_tokens)
    wanted |= {"host hit"} if keeps_on_host else set()
    while num_operations < num_wanted or (num_operations < MOST_OPERATIONS and unseen(seen, wanted)):
        max_num_seqs = rng.choice([1, 3, 5, 8, 12])
        num_stages = rng.choice([2, 3, 4]) if staged else 1
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
            keeps_on_host=keeps_on_host,
            runs_ahead=ahead and num_stages == 1,
            num_stages=num_stages,
            memory_failures=rng.choice([0, 0, 2]),
            model=model,
            draft_tokens=draft_tokens,
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
    policy: str, preemption_mode: str, chunked: bool, caching: bool, ahead: bool, model: str, draft_tokens: str
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
    if draft_tokens != "none":
        wanted |= {"guess"} | ({"right guess"} if draft_tokens != "wrong" else set())
        wanted |= {"wrong guess"} if draft_tokens != "right" else set()
    if (model, draft_tokens) != ("full", "none"):  # what is rare, and seen in the other runs
        wanted -= {"held beam preempted", "abort an unborn fork", "abort swapped"}
    return wanted
