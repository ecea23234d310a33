"""A scheduler and its cache on a simulated device, and a model of the truth to compare them with.

A slot of the simulated memory holds one number that stands for the key and the value of a token: a hash over that token
and over what *the device itself* finds, through the block tables of every cache group, that the token can see: the
number in the slot before where all keys are kept, all numbers in a window, the state. It therefore depends on every
earlier token, as attention does, and a block that was overwritten, copied too late, swapped wrongly, given back too
early or taken from another sequence shows in all that is computed from it. The next token is drawn from the last of
these numbers.

Operations are `add`, `abort`, `abort_one` and `step`. Each one checks the scheduler's own invariants, and a step checks
the rest: the memory of every sequence, the budgets, progress, and each finished sequence against `standalone`.
"""

from __future__ import annotations

import random
from collections import Counter, deque

from octavo.config import SchedulerConfig
from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.groups import NULL_BLOCK
from octavo.kv_cache.host_tier import HostTier
from octavo.kv_cache.manager import KVCacheManager
from octavo.request import EngineRequest, Prompt, SequenceOutput
from octavo.sampling_params import SamplingParams
from octavo.scheduling.policies import LONGEST_WAIT_S
from octavo.scheduling.scheduler import Scheduler
from octavo.scheduling.sequence_queues import scheduling_order
from octavo.sequence import Sequence
from octavo.stats import EngineStats
from octavo.step_plan import BlockMoves, StepPlan, StepResult
from tests.scheduling.device import Device
from tests.scheduling.truth import EOS, FAILURE, STEP_COST, VOCAB_SIZE, Setup, Watched, searched, standalone
from tests.speculation import guessing


class Simulation:
    """The operations, and what was found out while they ran."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        sizes = setup.pool_sizes()
        num_host_blocks = [setup.num_host_blocks] * len(sizes)
        self.cache = KVCacheManager(setup.groups, sizes, setup.block_size, num_host_blocks, setup.enable_prefix_caching)
        config = SchedulerConfig(
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            enable_chunked_prefill=setup.enable_chunked_prefill,
            policy=setup.policy,
            preemption_mode=setup.preemption_mode,
            target_step_s=setup.target_step_s,
        )
        speculation = None if setup.draft_tokens == "none" else guessing(self._propose)
        self.scheduler = Scheduler(
            config, self.cache, setup.runs_ahead, speculation, STEP_COST, num_stages=setup.num_stages
        )
        if setup.keeps_on_host:
            self.scheduler.host_tier = HostTier(self.cache, [1] * len(sizes), STEP_COST, copy_bytes=3, load_bytes=2)
        self.device = Device(self)
        self.under_way: deque[tuple[StepPlan, StepResult]] = deque()
        self._failures = random.Random(5)
        self._draft_tokens = random.Random(6)
        self.requests: dict[str, Watched] = {}
        self.num_operations = 0
        self.num_steps = 0
        self.seen: Counter[str] = Counter()  # what the workload exercised
        self.num_requests = 0
        self._contents: dict[tuple[int, bytes], list[int]] = {}  # of every block that was ever indexed, by pool and key

    def add(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        fails_at: int | None = None,
        max_ttft_s: float | None = None,
    ) -> str:
        """Queue a request that can run. Returns its id."""
        assert params.max_tokens is not None
        request_id = f"request-{self.num_requests}"
        self.num_requests += 1
        request = EngineRequest(
            request_id=request_id,
            prompt=Prompt(prompt_token_ids, cache_salt=cache_salt),
            params=params,
            eos_token_ids=[EOS],
            max_tokens=params.max_tokens,
            arrival_time=float(self.num_steps),
            priority=priority,
            max_ttft_s=max_ttft_s,
        )
        watched = Watched(request, fails_at, None, live=set(range(params.num_completions)))
        self.requests[request_id] = watched
        self.scheduler.add(request)
        if self.setup.policy == "fcfs":
            self._give_deadline(watched)
        elif self.setup.policy == "deadline":
            watched.due = self._sequences(watched)[0].key[0]
            assert watched.due <= self.num_steps + (max_ttft_s or LONGEST_WAIT_S), "it may have to wait for too long"
        self._count("add")
        return request_id

    def _give_deadline(self, watched: Watched) -> None:
        """Nobody who comes from now on goes before it. The first sequence in the order computes at least one token in
        each step, so that this is the longest it can take."""
        if not self.setup.memory_failures:  # each is a step for nothing
            watched.deadline = self.num_steps + self._most_steps()

    def _most_steps(self) -> int:
        """In which all requests end. What a stage computes comes back when the others have had it. On a device that
        runs ahead a sequence may be skipped in every other step."""
        most = sum(watched.num_most_steps for watched in self.requests.values())
        return most * max(self.setup.num_stages, 1 + self.setup.runs_ahead) + 2 * max(
            self.setup.runs_ahead, self.setup.num_stages - 1
        )

    def abort(self, request_id: str) -> None:
        watched = self.requests.pop(request_id)
        for seq in self._sequences(watched):
            self.seen[
                "abort swapped" if seq.host_blocks else "abort waiting" if seq.row is None else "abort running"
            ] += 1
        self.scheduler.abort(request_id)
        assert not self._sequences(watched), "an aborted request is still there"
        self._count("abort")

    def abort_one(self, request_id: str, index: int) -> None:
        """End one sequence. Before its request has put out a token that means nothing, unless it is the only one."""
        watched = self.requests[request_id]
        if watched.request.params.use_beam_search:
            self.seen["abort one beam"] += 1
        elif watched.has_started or watched.request.params.num_sequences == 1:
            watched.live.discard(index)
            self.seen["abort one of several"] += len(watched.live) > 0
        else:
            self.seen["abort an unborn fork"] += 1
        self.scheduler.abort(request_id, index)
        if not watched.live:
            del self.requests[request_id]
        self._count("abort one")

    def step(self) -> EngineStats:
        """Schedule, compute and account, and check everything that must hold of a step."""
        running_before = [
            seq for seq in self.scheduler.queues.running
            if not seq.is_held
            and not (
                seq.num_awaited_tokens
                and (seq.num_tokens_left_to_sample <= 0 or self.setup.num_stages > 1 or seq.next_step_needs_tokens)
            )
        ]  # fmt: skip
        self.seen["sat out"] += sum(
            seq.num_awaited_tokens > 0 and seq.next_step_needs_tokens for seq in self.scheduler.queues.running
        )
        held_before = [seq for seq in self.scheduler.queues if seq.is_held]
        waiting_before = [seq for seq in self.scheduler.queues.waiting if not seq.is_held]
        plan = self.scheduler.schedule()
        self._check_order(waiting_before, running_before)
        self.seen["held beam"] += len(held_before)
        self.seen["held beam preempted"] += sum(seq.row is None for seq in held_before)
        self._check_plan(plan)
        rows = {planned.row for planned in plan.rows}
        passed_over = [seq for seq in running_before if seq.row is None or seq.row not in rows]
        if self.setup.num_stages > 1:
            passed_over = [] if rows else passed_over  # each stage has its part of the sequences
        num_ahead = max(0, len(self.under_way) - 1)
        if not rows and self.under_way:
            passed_over = []  # nobody loses blocks before the results of the last step are known
        is_withdrawn = False
        if plan.rows:
            result = self.device.execute(plan)
            is_withdrawn = self._failures.randrange(100) < self.setup.memory_failures
            if is_withdrawn:  # as the core does, what is under way is waited for before more is planned
                self._withdraw(plan)
            else:
                self.under_way.append((plan, result))
        else:
            assert not self.scheduler.has_work or self.under_way, "requests wait and nothing runs"
            assert all(moves == BlockMoves() for moves in plan.moves)
        if plan.rows and not is_withdrawn:
            num_ahead = max(1, self.setup.num_stages - 1) if plan.runs_ahead else 0
        self.seen["ahead"] += bool(plan.rows and num_ahead)
        while len(self.under_way) > num_ahead:
            for output in self.scheduler.apply_result(*self.under_way.popleft()):
                self._take(output)
        stats = self.scheduler.take_stats()
        if self.scheduler.host_tier is not None:
            self.scheduler.host_tier.take_stats(stats)
        self.seen["host hit"] += stats.num_host_hits
        assert stats.num_preemptions or not passed_over, "a running sequence got no token though none was preempted"
        self.seen["preemption"] += stats.num_preemptions
        self.seen["swap"] += any(moves.swap_out for moves in plan.moves)
        self.seen["swap back"] += any(moves.swap_in for moves in plan.moves)
        self.seen["copy on write"] += sum(len(moves.copy) for moves in plan.moves)
        self.seen["prefix hit"] += stats.num_prefix_hits
        self.seen["chunk of a prompt"] += sum(planned.num_samples == 0 for planned in plan.rows)
        self.seen["guess"] += sum(len(planned.draft_tokens) for planned in plan.rows)
        self.num_steps += 1
        for watched in self.requests.values():
            if watched.deadline is None and watched.due <= self.num_steps:
                self._give_deadline(watched)
            assert watched.deadline is None or self.num_steps <= watched.deadline, (
                f"{watched.request.request_id} starves"
            )
        assert stats.num_slots_filled == self.num_filled_slots()
        assert stats.num_slots_allocated == self.num_slots_allocated()
        self._count("step")
        self._check_index()
        return stats

    def drain(self) -> None:
        """Run until nothing is left, and see that nothing is."""
        limit = self.num_steps + self._most_steps()
        while self.scheduler.has_work or self.under_way:
            assert self.setup.memory_failures or self.num_steps <= limit, "the requests do not come to an end"
            self.step()
        assert not self.requests, "a request was forgotten"
        assert all(pool.num_used == 0 for pool in self.cache.pools + self.cache.host_pools)
        assert all(pool.num_free == pool.num_usable for pool in self.cache.pools)

    def num_filled_slots(self) -> int:
        """Slots of blocks in use that hold a token. A state has none."""
        size = self.setup.block_size
        filled: dict[tuple[int, int], int] = {}
        for seq in self.scheduler.queues.running:
            for group, table in zip(self.setup.groups, seq.block_tables, strict=True):
                for i, block in enumerate(table):
                    if group.spec.kind == "full" or (group.spec.kind == "window" and block != NULL_BLOCK):
                        tokens = min(max(seq.num_computed_tokens - i * size, 0), size)
                        filled[group.pool, block] = max(filled.get((group.pool, block), 0), tokens)
        return sum(filled.values())

    def num_slots_allocated(self) -> int:
        pools = {group.pool for group in self.setup.groups if group.spec.kind != "state"}
        return sum(self.cache.pools[pool].num_used for pool in pools) * self.setup.block_size

    def _propose(self, seq: Sequence, most: int) -> tuple[int, ...]:
        """Guess what follows, which the test knows, and spoil it as the setup says."""
        assert most > 0
        watched = self.requests[seq.request.request_id]
        if watched.fails_at is not None:
            return ()  # an error takes with it what its row has found before
        future = standalone(self.setup, watched, seq.index).token_ids[seq.num_output_tokens :]
        uniforms = self._draft_tokens
        draft_tokens = future[: uniforms.randint(0, 6)]
        if self.setup.draft_tokens == "wrong" or (self.setup.draft_tokens == "random" and uniforms.random() < 0.6):
            spoilt = 0 if self.setup.draft_tokens == "wrong" else uniforms.randint(0, 3)
            draft_tokens = [(token + (i >= spoilt)) % VOCAB_SIZE for i, token in enumerate(draft_tokens)]
        if self.setup.draft_tokens != "right":
            draft_tokens += [uniforms.randrange(VOCAB_SIZE) for _ in range(uniforms.randint(0, 3))]
        return tuple(draft_tokens)

    def _withdraw(self, plan: StepPlan) -> None:
        """The step failed for want of memory: its newest request ends, and nothing else is lost."""
        scheduled = {seq.row: seq for seq in self.scheduler.queues.running}
        newest = max((scheduled[planned.row] for planned in plan.rows), key=lambda seq: (seq.key, seq.index))
        for output in self.scheduler.withdraw(plan, FAILURE):
            assert (output.request_id, output.finish_reason) == (newest.request.request_id, "error")
        del self.requests[newest.request.request_id]
        self.seen["withdrawn"] += 1

    def _take(self, output: SequenceOutput) -> None:
        """Compare what a sequence puts out with what it must."""
        watched = self.requests[output.request_id]
        is_search = watched.request.params.use_beam_search
        index = 0 if is_search and output.finish_reason == "error" else output.index
        assert index in watched.live, "a sequence that has ended puts out a token"
        is_first_of_request = not watched.has_started
        tokens = watched.outputs.setdefault(index, [])
        tokens += output.token_ids
        if index not in watched.expected:
            watched.expected |= (
                searched(self.setup, watched) if is_search else {index: standalone(self.setup, watched, index)}
            )
        expected = watched.expected[index]
        assert tokens == expected.token_ids[: len(tokens)], "the tokens are not those of a standalone run"
        prompt = watched.request.prompt.token_ids
        if output.finish_reason != "error":
            is_due = watched.request.params.prompt_logprobs is not None and is_first_of_request
            reported = [entry.token_ids for entry in output.prompt_logprobs or []]
            assert reported == ([[token] for token in prompt[1:]] if is_due else [])
            self.seen["prompt logprobs"] += is_due
        if output.finish_reason is None:
            assert len(tokens) < len(expected.token_ids) or expected.finish_reason == "error", "it goes on for too long"
            return
        assert (tokens, output.finish_reason, output.stop_reason) == (
            expected.token_ids,
            expected.finish_reason,
            expected.stop_reason,
        )
        self.seen[f"finish: {output.finish_reason}"] += 1
        self.seen["finish of a search"] += is_search
        watched.live.discard(index)
        if output.finish_reason == "error":
            assert output.error == FAILURE
            if not watched.outputs.keys() - {index} and not tokens:
                watched.live.clear()  # it failed before it forked
        if not watched.live:
            del self.requests[output.request_id]

    def _check_order(self, waiting: list[Sequence], running: list[Sequence]) -> None:
        """Nobody is admitted who comes behind one that goes on waiting."""
        admitted = [scheduling_order(seq) for seq in waiting if seq.row is not None]
        left = [scheduling_order(seq) for seq in waiting if seq.row is None]
        assert not admitted or not left or max(admitted) < min(left), "somebody was passed over"
        self.seen["overtaken"] += any(
            scheduling_order(seq) > min(admitted, default=scheduling_order(seq)) and seq.num_uncomputed_tokens > 0
            for seq in running
            if seq.row is not None
        )

    def _check_plan(self, plan: StepPlan) -> None:
        assert sum(planned.num_tokens for planned in plan.rows) <= self.setup.max_num_batched_tokens
        assert len(plan.rows) == len({planned.row for planned in plan.rows}) <= self.setup.max_num_seqs
        assert sum(seq.num_needed_rows for seq in self.scheduler.queues.running) <= self.setup.max_num_seqs
        if self.setup.num_stages == 1:
            assert not (plan.runs_ahead and any(planned.draft_tokens for planned in plan.rows))
        scheduled = {seq.row: seq for seq in self.scheduler.queues.running}
        for planned in plan.rows:
            seq = scheduled[planned.row]
            num_certain = planned.num_tokens - len(planned.draft_tokens)
            assert num_certain > 0
            assert planned.num_computed + num_certain == seq.num_computed_tokens
            num_tokens = seq.num_tokens - (planned.num_sampled_positions if plan.runs_ahead else 0)
            is_complete = planned.num_computed + num_certain == num_tokens
            assert is_complete or self.setup.enable_chunked_prefill, "a prompt was cut though chunked prefill is off"
            assert planned.num_sampled_positions == (1 + len(planned.draft_tokens) if is_complete else 0)
            assert planned.num_last_samples == (1 if seq.beam_search is not None else seq.num_needed_rows)

    def _check_index(self) -> None:
        """A block of the prefix index holds the same as when it was indexed; equal keys mean equal contents, on the
        device and on the host. Blocks that are copied with the next plan are not there yet."""
        coming = [{block for _, block in moves.swap_out} for moves in self.cache._moves]
        for number, pool in enumerate(self.cache.pools):
            later = {block for block in range(pool.num_blocks) if self.cache.is_loaded_later(number, block)}
            self._check_contents(number, pool, self.device.memory[number], later)
            self._check_contents(number, self.cache.host_pools[number], self.device.host_memory[number], coming[number])

    def _check_contents(self, number: int, pool: BlockPool, memory: list[int], coming: set[int]) -> None:
        size = self.setup.block_size
        for block, key in enumerate(pool.hashes):
            if key is not None and block not in coming:
                content = memory[block * size : (block + 1) * size]
                assert self._contents.setdefault((number, key), content) == content, "an indexed block was overwritten"

    def _sequences(self, watched: Watched) -> list[Sequence]:
        request_id = watched.request.request_id
        return [seq for seq in self.scheduler.queues if seq.request.request_id == request_id]

    def _count(self, operation: str) -> None:
        self.num_operations += 1
        self.seen[operation] += 1
        self.scheduler.check()
