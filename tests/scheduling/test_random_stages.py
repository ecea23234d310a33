"""Random requests over three and four pipeline stages: what a step computed counts only in the blocks it was computed
in."""

from __future__ import annotations

import random
from collections import deque

from octavo.step_plan import StepPlan
from tests.scheduling.test_scheduler import request, result_of, scheduler

NUM_WORKLOADS = 110


def run(seed: int) -> int:
    """A workload of short caches and many aborts, with the invariants checked after each step. Returns how many
    sequences were preempted while a chunk of theirs was under way."""
    rng = random.Random(seed)
    num_stages = rng.choice([3, 4])
    num_blocks, max_num_seqs, budget = rng.choice([8, 10, 12, 16]), rng.choice([4, 6, 8]), rng.choice([8, 12, 16, 24])
    s = scheduler(
        num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget, policy="priority", num_stages=num_stages
    )
    longest = s.cache.capacity(budget) // 2
    under_way: deque[StepPlan] = deque()
    num_requests = num_preempted = 0
    for _ in range(200):
        if rng.random() < 0.5 and len(s.queues.requests) < 8:
            prompt = [rng.randint(1, 5) for _ in range(rng.randint(1, longest))]
            s.add(request(str(num_requests), prompt, priority=rng.randint(-2, 2)))
            num_requests += 1
        elif rng.random() < 0.3 and s.queues.requests:
            s.abort(rng.choice(sorted(s.queues.requests)))
        else:
            before = [seq for seq in s.queues.running if seq.num_uncomputed_tokens and not seq.num_awaited_tokens]
            plan = s.schedule()
            num_preempted += bool(under_way) * sum(seq.row is None and not seq.has_ended for seq in before)
            if plan.rows:
                under_way.append(plan)
            if under_way and (not plan.rows or len(under_way) == num_stages):
                oldest = under_way.popleft()
                s.apply_result(oldest, result_of(oldest))
    return num_preempted


def test_a_step_from_before_a_preemption_indexes_no_block_that_the_sequence_got_after_it() -> None:
    assert sum(run(seed) for seed in range(NUM_WORKLOADS)) > 50, "preemptions are what this is about"
