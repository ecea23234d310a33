"""The one-rule scheduler: each step hands out a budget of tokens, running sequences first, then waiting ones.

There is no prefill phase and no decode phase. A sequence lacks the tokens that it has but has not computed: one for a
decode, many for a prompt, fewer after a prefix hit. When blocks run out, the sequence that comes last in the order
gives its blocks back and waits again at its old place.

A device that is fed ahead gets its next step before the tokens of the last one are known: a sequence then has a token
that is awaited, which counts like any other. What turns out to have been its last token makes one row of the step
under way pointless; that row's result is dropped.
"""

from __future__ import annotations

import heapq
import random
import time
from bisect import insort
from collections import deque
from collections.abc import Iterator
from operator import attrgetter

from octavo.config import SchedulerConfig
from octavo.errors import RequestError
from octavo.kv_cache.manager import KVCacheManager
from octavo.plan import Admission, StepPlan, StepResult
from octavo.request import EngineRequest, SequenceOutput
from octavo.scheduling.beams import Beam, BeamGroup, Continuation
from octavo.sequence import Sequence
from octavo.stats import EngineStats

_scheduling_order = attrgetter("key", "index")


class Scheduler:
    """Owns the sequences. Each plan of `schedule` that has rows comes back in `update`, in order, or in `withdraw`.

    `add` and `abort` may come at any time. Another plan may be made before the last one has come back if that says
    `runs_ahead`.
    """

    def __init__(
        self, config: SchedulerConfig, cache: KVCacheManager, seed: int | None = None, runs_ahead: bool = False
    ) -> None:
        self.config = config
        self.cache = cache
        self.running: list[Sequence] = []  # in scheduling order; the last one is preempted first
        self._waiting: list[tuple[tuple[int, int], int, Sequence]] = []  # heap of (key, index, sequence)
        self._requests: dict[str, list[Sequence]] = {}  # live sequences by request
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._num_live = 0  # sequences running or waiting
        self._num_swapped = 0  # those of them that wait with their blocks on the host
        self._num_rows_taken = 0  # rows of running sequences and of the forks they will start
        self._arrivals = 0
        self._runs_ahead = runs_ahead
        self._random = random.Random(seed)
        self._under_way: deque[list[Sequence]] = deque()  # of each plan under way, parallel to its rows
        self._stats = EngineStats()

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def live_sequences(self) -> Iterator[Sequence]:
        for sequences in self._requests.values():
            yield from sequences

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestError` for one that could never run, with the numbers."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use.", param="request_id")
        longest = len(request.prompt.token_ids) + request.max_tokens
        capacity = self.cache.pool.num_blocks * self.cache.block_size
        if longest > capacity:
            raise RequestError(
                f"the request needs {longest} tokens of KV cache ({len(request.prompt.token_ids)} of prompt and up to "
                f"{request.max_tokens} of output) and the cache holds {capacity}."
            )
        if request.params.use_beam_search:
            needed = request.params.num_sequences * self.cache.blocks_for(longest)
            if needed > self.cache.pool.num_blocks:
                raise RequestError(
                    f"{request.params.num_sequences} beams of up to {longest} tokens need {needed} blocks of KV cache "
                    f"at once and it has {self.cache.pool.num_blocks}.",
                    param="n",
                )
        if request.params.num_sequences > self.config.max_num_seqs:
            raise RequestError(
                f"the request needs {request.params.num_sequences} sequences at once and --max-num-seqs is "
                f"{self.config.max_num_seqs}.",
                param="n",
            )
        self._arrivals += 1
        priority = request.priority if self.config.policy == "priority" else 0
        seed = request.params.seed
        seq = Sequence(
            request=request,
            key=(priority, self._arrivals),
            seed=self._random.getrandbits(64) if seed is None else seed % 2**64,
            stop_reasons=_stop_reasons(request),
            token_ids=list(request.prompt.token_ids),
            num_pending_forks=request.params.num_sequences - 1,
        )
        if request.params.use_beam_search:
            seq.beam = Beam(BeamGroup(request.params, request.max_tokens))
        self._requests[request.request_id] = [seq]
        self._num_live += 1
        self._push_waiting(seq)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences, and free its blocks at once. Unknown ids are ignored, and so are
        single sequences before the forks have started: until then one stands for all. A beam is nothing that one could
        mean."""
        for seq in list(self._requests.get(request_id, ())):
            if index is None or (seq.index == index and not seq.num_pending_forks and seq.beam is None):
                seq.is_aborted = True
                self._drop(seq)

    def schedule(self) -> StepPlan:
        """Decide the next step. The plan may be empty of rows only if nothing can run."""
        plan = StepPlan()
        scheduled: list[Sequence] = []
        budget = self.config.max_num_batched_tokens
        budget, preempted = self._schedule_running(plan, scheduled, budget)
        if not preempted:
            self._schedule_waiting(plan, scheduled, budget)
        if not self._under_way:
            while not plan.rows and self.running:  # beams that wait for others, which find no blocks or no rows
                self._preempt(self.running.pop())
                self._schedule_waiting(plan, scheduled, budget)
        plan.moves = self.cache.take_moves()
        # A plan without rows is not executed. The first sequence always gets its blocks: the pool holds any one alone.
        assert plan.rows or not (plan.moves.swap_out or plan.moves.copy or plan.moves.swap_in), "moves would be lost"
        if plan.rows:
            self._set_off(plan, scheduled)
        return plan

    def _set_off(self, plan: StepPlan, scheduled: list[Sequence]) -> None:
        """From here on the plan's tokens count as computed, and as awaited what it samples if it `runs_ahead`."""
        self._under_way.append(scheduled)
        plan.runs_ahead = self._runs_ahead and not any(
            seq.needs_its_tokens for seq, samples in zip(scheduled, plan.num_samples, strict=True) if samples
        )
        for seq, num_tokens, num_samples in zip(scheduled, plan.num_tokens, plan.num_samples, strict=True):
            seq.num_computed_tokens += num_tokens
            if plan.runs_ahead:
                seq.num_awaited_tokens += num_samples

    def _schedule_running(self, plan: StepPlan, scheduled: list[Sequence], budget: int) -> tuple[int, bool]:
        preempted = False
        i = 0
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            i += 1
            num_tokens = seq.num_lacking_tokens
            if num_tokens == 0 or (seq.num_awaited_tokens and seq.is_complete):
                continue  # a beam that waits for the others; a sequence whose last token is under way
            if num_tokens > 1:
                # One token is kept back for each sequence behind, so that a long prompt never stalls the decodes.
                num_tokens = min(num_tokens, max(1, budget - (len(self.running) - i)))
            while (changed := self.cache.grow(seq, seq.num_computed_tokens + num_tokens)) is None:
                if self._under_way and not plan.rows:
                    return budget, True  # what is under way may end sequences: nobody loses blocks before that is known
                preempted = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is seq:
                    return budget, True
            self._plan_row(plan, seq, num_tokens, changed)
            scheduled.append(seq)
            budget -= num_tokens
        return budget, preempted

    def _schedule_waiting(self, plan: StepPlan, scheduled: list[Sequence], budget: int) -> None:
        while self._waiting and budget > 0:
            seq = self._waiting[0][2]
            if seq.is_aborted:
                heapq.heappop(self._waiting)
                continue
            if self._num_rows_taken + seq.num_rows > self.config.max_num_seqs:
                return
            num_tokens = self._admit(seq, budget)
            if num_tokens == 0:
                return
            heapq.heappop(self._waiting)
            if seq.first_scheduled_time == 0.0:
                seq.first_scheduled_time = time.monotonic()
            seq.row = self._free_rows.pop()
            self._num_rows_taken += seq.num_rows
            insort(self.running, seq, key=_scheduling_order)
            self._plan_row(plan, seq, num_tokens, [])
            scheduled.append(seq)
            budget -= num_tokens

    def _admit(self, seq: Sequence, budget: int) -> int:
        """Give a waiting sequence its blocks. Returns the tokens to compute, or 0 if it must go on waiting.

        Blocks for all its tokens must be free, so that a prompt which cannot finish does not push others out. One that
        was preempted while a token of it was under way waits for that token.
        """
        if seq.num_awaited_tokens:
            return 0
        needed = self.cache.blocks_for(seq.num_tokens)
        if seq.host_blocks:
            if needed > self.cache.pool.num_free or not self.cache.swap_in(seq):
                return 0
            self._num_swapped -= 1
        else:
            prefix = self.cache.find_prefix(seq)
            num_lacking = seq.num_tokens - len(prefix) * self.cache.block_size
            if needed - len(prefix) > self.cache.num_free_after(prefix):
                return 0
            if num_lacking > budget and not self.config.enable_chunked_prefill:
                return 0
            self.cache.share_prefix(seq, prefix)
            if seq.num_preemptions == 0:
                seq.num_cached_tokens = seq.num_computed_tokens
                self._stats.num_prompt_tokens += seq.num_tokens
                self._stats.num_prefix_queries += seq.num_tokens
                self._stats.num_prefix_hits += seq.num_computed_tokens
        num_tokens = min(seq.num_lacking_tokens, budget)
        changed = self.cache.grow(seq, seq.num_computed_tokens + num_tokens)
        assert changed is not None, "blocks were counted before"
        return num_tokens

    def _plan_row(self, plan: StepPlan, seq: Sequence, num_tokens: int, changed: list[tuple[int, int]]) -> None:
        assert seq.row is not None
        if seq.is_admitted_to_runner:
            plan.new_blocks += [(seq.row, position, block) for position, block in changed]
            if seq.beam is not None:  # the runner does not know which token was chosen
                plan.new_tokens.append((seq.row, seq.num_tokens - 1, seq.token_ids[-1]))
        else:
            seq.is_admitted_to_runner = True
            plan.admissions.append(
                Admission(
                    row=seq.row,
                    token_ids=list(seq.token_ids),
                    num_prompt_tokens=seq.num_prompt_tokens,
                    block_table=list(seq.block_table),
                    params=seq.params,
                    stop_token_ids=seq.request.eos_token_ids + seq.params.stop_token_ids,
                    seed=seq.seed,
                    index=seq.index,
                )
            )
        plan.rows.append(seq.row)
        plan.num_computed.append(seq.num_computed_tokens)
        plan.num_tokens.append(num_tokens)
        num_samples = 1 if seq.beam is not None else seq.num_rows
        plan.num_samples.append(num_samples if num_tokens == seq.num_lacking_tokens else 0)

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Account for a finished step: tokens computed and sampled, forks, ends. Returns what is new, by sequence."""
        outputs: list[SequenceOutput] = []
        errors = result.errors
        place = 0  # in result.tokens
        for seq, row, num_computed, num_tokens, num_samples in zip(
            self._under_way.popleft(), plan.rows, plan.num_computed, plan.num_tokens, plan.num_samples, strict=True
        ):
            first, place = place, place + num_samples
            self._stats.num_computed_tokens += num_tokens
            if row in errors and not seq.is_aborted:
                outputs.append(self._output(seq, [], "error", error=errors[row]))
                for other in list(self._requests[seq.request.request_id]) if seq.beam is not None else [seq]:
                    self._drop(other)
            if seq.is_aborted:  # it, or another beam of its search; or it ended while this step was under way
                continue
            if plan.runs_ahead:
                seq.num_awaited_tokens -= num_samples
            if seq.row is not None:  # it was not preempted meanwhile
                self.cache.register_computed(seq, num_computed + num_tokens)
            if row in result.prompt_logprobs:
                # A preempted prompt starts over: what it reported before is replaced by the same values.
                seq.prompt_logprobs[num_computed:] = result.prompt_logprobs[row]
            if num_samples == 1 and seq.beam is not None:
                found = result.logprobs[first] if result.logprobs is not None else None
                assert found is not None, "a beam got no tokens to choose from"
                seq.beam.group.offer(seq, found)
                outputs += self._advance_search(seq.beam.group, self._requests[seq.request.request_id])
            elif num_samples == 1:
                outputs.append(self._append(seq, result, first))
            elif num_samples:
                siblings = [seq, *self._start_forks(seq)]
                outputs += [self._append(sibling, result, first + i) for i, sibling in enumerate(siblings)]
        assert place == len(result.tokens), f"{place} tokens were to be sampled and {len(result.tokens)} came"
        if self.config.check_invariants:
            self.check()
        return outputs

    def withdraw(self, plan: StepPlan, error: str) -> list[SequenceOutput]:
        """The step that was planned last did not run, for want of memory: end its newest request, so that the others
        may find enough, and plan the rest again. Returns what the request is told."""
        scheduled = self._under_way.pop()
        for seq, num_tokens, num_samples in zip(scheduled, plan.num_tokens, plan.num_samples, strict=True):
            if not seq.is_aborted:
                seq.num_computed_tokens -= num_tokens
                seq.num_awaited_tokens -= num_samples if plan.runs_ahead else 0
        newest = max((seq for seq in scheduled if not seq.is_aborted), key=_scheduling_order)
        outputs = []
        for seq in list(self._requests[newest.request.request_id]):
            output = self._output(seq, [], "error", error=error)
            output.error_status = 503  # the same request may find memory later
            outputs.append(output)
            self._drop(seq)
        return outputs

    def take_stats(self) -> EngineStats:
        """Gauges of now, and the increments since the last call."""
        stats, self._stats = self._stats, EngineStats()
        stats.num_running = len(self.running)
        stats.num_swapped = self._num_swapped
        stats.num_waiting = self._num_live - stats.num_running - stats.num_swapped
        stats.num_blocks = self.cache.pool.num_blocks
        stats.num_blocks_used = self.cache.pool.num_used
        stats.num_host_blocks = self.cache.host_pool.num_blocks
        stats.num_host_blocks_used = self.cache.host_pool.num_used
        stats.num_slots_allocated = stats.num_blocks_used * self.cache.block_size
        stats.num_slots_filled = stats.num_slots_allocated - self._num_unfilled_slots()
        return stats

    def check(self) -> None:
        """Assert the invariants of scheduler and cache; for tests and `--check-invariants`."""
        self.cache.check(self.live_sequences())
        rows = [seq.row for seq in self.running]
        assert len(rows) == len(set(rows)) and not set(rows) & set(self._free_rows), "two sequences share a row"
        assert self._num_rows_taken == sum(seq.num_rows for seq in self.running) <= self.config.max_num_seqs
        assert self.running == sorted(self.running, key=_scheduling_order), "running sequences are out of order"
        waiting = [seq for _, _, seq in self._waiting if not seq.is_aborted]
        waiting += [seq for seq in self.live_sequences() if seq.row is None and seq.is_held]
        assert len(waiting) + len(self.running) == sum(1 for _ in self.live_sequences()), "a sequence was lost"
        assert self._num_live == len(waiting) + len(self.running), "the count of live sequences is wrong"
        assert self._num_swapped == sum(bool(seq.host_blocks) for seq in waiting), "the count of swapped ones is wrong"
        scheduled = [seq for step in self._under_way for seq in step]
        assert all((seq.num_lacking_tokens > 0) != seq.is_held or seq in scheduled for seq in self.running), (
            "a sequence lacks nothing"
        )
        if not self.has_work:
            assert self.cache.pool.num_used == self.cache.host_pool.num_used == 0, "blocks are in use when idle"

    def _num_unfilled_slots(self) -> int:
        """Slots of referenced blocks that hold no token. Only the end of a block table can have any."""
        size = self.cache.block_size
        unfilled = sum([len(seq.block_table) * size - seq.num_computed_tokens for seq in self.running])
        if self._num_live > len(self._requests):  # forks, which may still share the block that they write to next
            seen: set[int] = set()
            for seq in self.running:
                num_full, num_in_last = divmod(seq.num_computed_tokens, size)
                if num_in_last:
                    block = seq.block_table[num_full]
                    unfilled -= size - num_in_last if block in seen else 0
                    seen.add(block)
        return unfilled

    def _start_forks(self, seq: Sequence) -> list[Sequence]:
        """The prompt of `seq` has been computed: start its siblings, which share all its blocks."""
        forks = []
        for index in range(1, seq.num_rows):
            fork = seq.fork(index)
            fork.row = self._free_rows.pop()
            self.cache.share_all(fork)
            self._requests[seq.request.request_id].append(fork)
            self._num_live += 1
            insort(self.running, fork, key=_scheduling_order)
            forks.append(fork)
        seq.num_pending_forks = 0
        return forks

    def _advance_search(self, group: BeamGroup, beams: list[Sequence]) -> list[SequenceOutput]:
        """Go on with the best continuations once all beams have made their offers, or end the search."""
        if len(group.offers) < len(beams):
            return []
        root = beams[0]
        group.prompt_logprobs = group.prompt_logprobs or root.prompt_logprobs
        continuations = group.advance()
        if not continuations:
            return self._end_search(group, list(beams))
        # The first continuation of a beam goes on in its place; the others are its forks, and share its blocks.
        going_on: dict[int, Continuation] = {}
        forks = []
        for continuation in continuations:
            if going_on.setdefault(continuation.parent.index, continuation) is not continuation:
                forks.append(continuation)
        self._num_rows_taken -= root.num_pending_forks  # no longer reserved, but taken
        root.num_pending_forks = 0
        for seq in [seq for seq in beams if seq.index not in going_on]:
            self._drop(seq)
        free_indices = [index for index in range(group.width) if index not in going_on]
        for continuation, index in zip(forks, free_indices, strict=False):
            self._fork_beam(continuation, index)
        for continuation in going_on.values():
            seq = continuation.parent
            seq.token_ids.append(continuation.token)
            seq.beam = continuation.beam
            if seq.row is None:
                self._push_waiting(seq)
        self._stats.num_generation_tokens += len(continuations)
        return []

    def _fork_beam(self, continuation: Continuation, index: int) -> None:
        """Start a sibling of a beam, before that has its own next token. It takes a row if there is one; without, or
        without the blocks of its parent, it is computed anew."""
        parent = continuation.parent
        fork = parent.fork(index)
        fork.beam = continuation.beam
        fork.token_ids.append(continuation.token)
        self._requests[parent.request.request_id].append(fork)
        self._num_live += 1
        if parent.row is not None and self._num_rows_taken < self.config.max_num_seqs:
            fork.row = self._free_rows.pop()
            self._num_rows_taken += 1
            self.cache.share_all(fork)
            insort(self.running, fork, key=_scheduling_order)
        else:
            fork.block_table.clear()
            fork.num_computed_tokens = fork.num_registered_blocks = 0
            fork.num_preemptions += 1
            self._push_waiting(fork)

    def _end_search(self, group: BeamGroup, beams: list[Sequence]) -> list[SequenceOutput]:
        """The answers of a search, best first, as if sequence after sequence had put them out at once."""
        num_wanted = beams[0].params.n
        self._stats.num_generation_tokens += 1
        outputs = []
        if len(group.finished) < num_wanted:
            error = f"beam search found {len(group.finished)} of {num_wanted} completions: no other token is allowed."
            outputs.append(self._output(beams[0], [], "error", error=error))
        else:
            for index, found in enumerate(group.finished[:num_wanted]):
                output = self._output(beams[0], found.token_ids, found.finish_reason, found.stop_reason)
                output.index, output.logprobs, output.prompt_logprobs = index, found.logprobs, None
                outputs.append(output)
            outputs[0].prompt_logprobs = group.prompt_logprobs or None
        for seq in beams:
            self._drop(seq)
        return outputs

    def _append(self, seq: Sequence, result: StepResult, place: int) -> SequenceOutput:
        """Add a sampled token and end the sequence if it was the last one."""
        token = result.tokens[place]
        seq.token_ids.append(token)
        self._stats.num_generation_tokens += 1
        num_output = seq.num_output_tokens
        finish_reason: str | None = None
        stop_reason: int | None = None
        if token in seq.stop_reasons and (num_output >= seq.params.min_tokens or seq.params.grammar is not None):
            finish_reason, stop_reason = "stop", seq.stop_reasons[token]
        elif num_output >= seq.request.max_tokens:
            finish_reason = "length"
        output = self._output(seq, [token], finish_reason, stop_reason)
        if result.logprobs is not None and (logprobs := result.logprobs[place]) is not None:
            output.logprobs = [logprobs]
        if finish_reason is not None:
            self._drop(seq)
        return output

    @staticmethod
    def _output(
        seq: Sequence,
        token_ids: list[int],
        finish_reason: str | None,
        stop_reason: int | None = None,
        error: str | None = None,
    ) -> SequenceOutput:
        prompt_logprobs = None
        if seq.prompt_logprobs:
            prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, []
        # By position: msgspec takes twice as long to match names, and this happens for every token.
        return SequenceOutput(
            seq.request.request_id, seq.index, token_ids, finish_reason, stop_reason, None, prompt_logprobs,
            seq.num_cached_tokens, seq.num_preemptions, seq.first_scheduled_time, error,
        )  # fmt: skip

    def _preempt(self, seq: Sequence) -> None:
        """Take the blocks of a running sequence, already off the running list, and queue it at its old place."""
        seq.num_preemptions += 1
        self._stats.num_preemptions += 1
        if self.config.preemption_mode == "swap" and self.cache.swap_out(seq):
            self._num_swapped += 1
        else:
            self.cache.release(seq)
        self._return_row(seq)
        if not seq.is_held:
            self._push_waiting(seq)

    def _drop(self, seq: Sequence) -> None:
        """Forget a sequence that has ended and free what it holds."""
        if seq.row is not None:
            self.running.remove(seq)
            self._return_row(seq)
        self._num_live -= 1
        self._num_swapped -= bool(seq.host_blocks)
        seq.is_aborted = True  # a waiting one is skipped when it reaches the head of the queue
        self.cache.release(seq)
        if len(self._waiting) > 2 * (self._num_live - len(self.running)) + 64:
            self._waiting = [entry for entry in self._waiting if not entry[2].is_aborted]
            heapq.heapify(self._waiting)
        siblings = self._requests[seq.request.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._requests[seq.request.request_id]

    def _return_row(self, seq: Sequence) -> None:
        assert seq.row is not None
        self._free_rows.append(seq.row)
        self._num_rows_taken -= seq.num_rows
        seq.row = None
        seq.is_admitted_to_runner = False

    def _push_waiting(self, seq: Sequence) -> None:
        heapq.heappush(self._waiting, (seq.key, seq.index, seq))


def _stop_reasons(request: EngineRequest) -> dict[int, int | None]:
    """The tokens that end a request, and what is reported as the reason: end-of-sequence goes without saying.

    Where a grammar is followed, its masks decide when the answer may end.
    """
    ignores_eos = request.params.ignore_eos and request.params.grammar is None
    end_of_sequence = [] if ignores_eos else request.eos_token_ids
    stop_token_ids = request.params.stop_token_ids
    return dict.fromkeys(end_of_sequence) | dict(zip(stop_token_ids, stop_token_ids, strict=True))
