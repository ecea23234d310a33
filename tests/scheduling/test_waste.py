"""How much of the memory that sequences hold is empty: DESIGN.md promises less than 5%."""

from __future__ import annotations

import random

import pytest

from octavo.sampling_params import SamplingParams
from tests.scheduling.simulation import Simulation
from tests.scheduling.truth import Setup


def chat_traffic(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """(prompt, output) lengths, log-normal with means of about 330 and 220 tokens, as in published chat traces."""
    return [
        (min(max(4, int(rng.lognormvariate(5.3, 1.0))), 1400), min(max(1, int(rng.lognormvariate(5.1, 0.8))), 600))
        for _ in range(count)
    ]


@pytest.mark.long
@pytest.mark.parametrize("num_blocks", [pytest.param(2400, id="roomy"), pytest.param(500, id="preempting")])
def test_less_than_5_percent_of_the_allocated_slots_are_empty_on_mixed_traffic(num_blocks: int) -> None:
    rng = random.Random(0)
    simulation = Simulation(
        Setup(num_blocks=num_blocks, block_size=16, num_host_blocks=0, max_num_seqs=64, max_num_batched_tokens=2048)
    )
    lengths = chat_traffic(rng, 200)
    waste: list[float] = []
    num_preemptions = 0
    while lengths or simulation.scheduler.has_work:
        if lengths and rng.random() < 0.3:
            num_prompt, num_output = lengths.pop()
            prompt = [rng.randrange(1, 40) for _ in range(num_prompt)]
            simulation.add(prompt, SamplingParams(max_tokens=num_output, ignore_eos=True, seed=0))
        stats = simulation.step()
        num_preemptions += stats.num_preemptions
        if stats.num_slots_allocated:
            waste.append(1 - stats.num_slots_filled / stats.num_slots_allocated)
    assert simulation.num_requests == 200
    assert sum(waste) / len(waste) < 0.05
    assert (num_preemptions > 0) == (num_blocks == 500)
    assert stats.num_blocks_used == stats.num_slots_allocated == 0, "nothing is held when idle"
