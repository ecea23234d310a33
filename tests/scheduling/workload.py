"""Random requests for a simulation: bursts of arrivals, quiet times, and people who hang up."""

from __future__ import annotations

import random
from collections.abc import Callable

from octavo.sampling_params import SamplingParams
from tests.scheduling.simulation import Simulation
from tests.scheduling.truth import VOCAB_SIZE


class Workload:
    """Random operations on a simulation. `integer(low, high)`, both included, is where the randomness comes from."""

    def __init__(self, simulation: Simulation, integer: Callable[[int, int], int]) -> None:
        self.simulation = simulation
        self.integer = integer
        setup = simulation.setup
        self.longest = setup.max_model_len
        # Prompts begin alike, so that there are prefixes to share.
        documents = random.Random(17)
        self.documents = [[documents.randrange(1, VOCAB_SIZE) for _ in range(self.longest)] for _ in range(3)]

    def chance(self, percent: int) -> bool:
        return self.integer(1, 100) <= percent

    def add(self) -> None:
        setup = self.simulation.setup
        integer, chance = self.integer, self.chance
        num_prompt = integer(1, max(1, self.longest // (2 if chance(20) else 4)))
        prompt = self.documents[integer(0, 2)][:num_prompt]
        if chance(50):
            kept = integer(0, num_prompt - 1)
            prompt = prompt[:kept] + [integer(1, VOCAB_SIZE - 1) for _ in range(min(num_prompt - kept, 3))]
        max_tokens = integer(1, max(1, min(self.longest + 1 - len(prompt), 24)))
        n = integer(1, min(4, setup.max_num_seqs)) if chance(25) else 1
        best_of = integer(n, min(5, setup.max_num_seqs)) if chance(15) else None
        is_search = chance(15)
        if is_search:  # as wide as the blocks allow, so that beams are short of them
            cache = self.simulation.cache
            needed = cache.most_blocks(len(prompt) + max_tokens - 1, setup.max_num_batched_tokens)
            best_of = min(pool.num_usable // count for pool, count in zip(cache.pools, needed, strict=True))
            best_of = max(1, min(setup.max_num_seqs, 6, best_of))
            n = integer(1, best_of)
        self.simulation.add(
            prompt,
            SamplingParams(
                use_beam_search=is_search,
                length_penalty=integer(-1, 3) / 2 if is_search else 1.0,
                early_stopping=(False, True, "never")[integer(0, 2)] if is_search else False,
                n=n,
                best_of=best_of,
                max_tokens=max_tokens,
                min_tokens=integer(0, max_tokens) if chance(20) else 0,
                stop_token_ids=[integer(1, VOCAB_SIZE - 1) for _ in range(integer(0, 3))],
                ignore_eos=chance(30),
                seed=integer(0, 3),
                prompt_logprobs=0 if chance(10) else None,
                logprobs=0 if chance(20) else None,
            ),
            priority=integer(-2, 2),
            max_ttft_s=float(integer(0, 50)) if chance(20) else None,
            cache_salt="salt" if chance(15) else None,
            fails_at=integer(0, 4) if chance(4) else None,
        )

    def abort(self) -> None:
        simulation = self.simulation
        if not simulation.requests:
            return
        request_id = list(simulation.requests)[self.integer(0, len(simulation.requests) - 1)]
        if self.chance(50):
            simulation.abort(request_id)
        else:
            live = sorted(simulation.requests[request_id].live)
            simulation.abort_one(request_id, live[self.integer(0, len(live) - 1)])

    def run(self, num_operations: int) -> None:
        """Bursts of arrivals, quiet times, and now and then everybody hangs up."""
        simulation = self.simulation
        end = simulation.num_operations + num_operations
        busy = 30
        while simulation.num_operations < end:
            if self.chance(2):
                busy = self.integer(0, 60)
            if not simulation.requests or (self.chance(busy) and len(simulation.requests) < 40):
                self.add()
            elif self.chance(8):
                self.abort()
            elif self.integer(1, 1000) == 1:
                for request_id in list(simulation.requests):
                    simulation.abort(request_id)
            else:
                simulation.step()
