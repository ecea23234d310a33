"""The scheduler plans each step. A step has a token budget. Running sequences take from it first, waiting sequences
take the rest. With chunked prefill, a waiting sequence that comes before a running prompt in scheduling order is
admitted before the prompt gets its next chunk. In vLLM's terms: a plan is a `SchedulerOutput`, a row a place in the
persistent batch, running ahead is async scheduling, and awaited tokens are output placeholders.

There is no prefill phase and no decode phase. A sequence has tokens left to compute: one in a decode, many in a prompt,
fewer after a prefix hit. Draft tokens follow the last token. They count as computed once the result accepts them.

The states of a sequence, and the methods that move it there:

    waiting     in `queues.waiting`, without a row           `add`; `apply_result`, for a fork without a free row, or
                                                             whose parent has lost its blocks
    running     in `queues.running`, with a row and blocks   `schedule` (`_schedule_waiting`); `apply_result`, for other
                                                             forks
    in flight   in a step of `_in_flight`, and running,      `schedule` (`Step.mark_in_flight`), until `apply_result`
                unless preempted or ended since
    preempted   waiting at its old place; its blocks are     `schedule` (`_preempt`), when blocks or rows run out;
                freed, or swapped out to the host            `withdraw`, if the model has states
    held        waiting or running, with `is_held`; all its  `apply_result` (`hold_for_beam_search`), until
                tokens are computed, none is chosen yet      `BeamSearch` chooses
    finished    `has_ended`; its row and blocks are free     `apply_result`, `abort`, `withdraw` (`queues.drop`)

With pipeline stages several steps are in flight, and each gets an equal part of the sequences. Then at most one of them
samples for a sequence; chunks of one prompt may be in several.

A device that runs ahead gets the next step before the tokens of the last step are known. A token that a step in flight
will sample is awaited (`num_awaited_tokens`) and is counted as if it were known. If the step in flight ends the
sequence, the next step computes the sequence's row for nothing, and `apply_result` drops the row's result.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from itertools import chain, islice

from octavo.config import SchedulerConfig
from octavo.errors import RequestError
from octavo.kv_cache.block_hashes import split_hashes
from octavo.kv_cache.block_pool import TableChanges
from octavo.kv_cache.disk_fetches import DiskFetches, Readiness
from octavo.kv_cache.host_tier import HostTier
from octavo.kv_cache.manager import KVCacheManager
from octavo.lora.pool import AdapterPool
from octavo.request import EngineRequest, SequenceOutput
from octavo.sampling.draft_verification import count_valid_tokens
from octavo.scheduling.adapter_turns import AdapterTurn
from octavo.scheduling.admission_check import check_request
from octavo.scheduling.beam_search import BeamSearch
from octavo.scheduling.policies import make_policy
from octavo.scheduling.prompt_chunks import PromptChunks
from octavo.scheduling.sampled_tokens import (
    accept_drafts,
    end_with_vectors,
    extend,
    hold_for_beam_search,
    keep_prompt_results,
    start_forks,
)
from octavo.scheduling.scheduler_stats import count_admission, count_computed, progress_of, set_gauges
from octavo.scheduling.sequence_queues import SequenceQueues, scheduling_order
from octavo.scheduling.step import Step
from octavo.scheduling.stop_tokens import stop_reasons
from octavo.scheduling.time_limit import TimeLimit, prompt_token_s, step_time_limit
from octavo.sequence import Sequence
from octavo.speculative.speculation import Speculation
from octavo.stats import EngineStats, SequenceProgress
from octavo.step_cost import StepCost, StepWork
from octavo.step_plan import PlannedRow, StepPlan, StepResult

_MAX_SHOWN_SEQUENCES = 50  # on a page that people read


class Scheduler:
    """Owns the sequences. Each plan with rows that `schedule` returns goes to `apply_result`, in order, or to
    `withdraw`.

    One thread calls all methods; `add` and `abort` may come between any two of them. If `plan.runs_ahead`, `schedule`
    may be called before the plan's result is known. A plan runs ahead:

    - with pipeline stages, always
    - on a device that runs ahead, but not if `Speculation.must_wait`, not if rows have draft tokens, and not if many
      sequences need their tokens on the host before their next step (`Step.mark_in_flight`). If only a few need them,
      the plan runs ahead and these few skip the next step
    - on other devices, never
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        device_runs_ahead: bool = False,
        speculation: Speculation | None = None,
        cost: StepCost | None = None,
        adapters: AdapterPool | None = None,
        num_stages: int = 1,
    ) -> None:
        """`device_runs_ahead`: the device computes while the host plans. `num_stages`: pipeline stages. `speculation`
        None: no draft tokens. Without a `cost` model a step has a token budget and no time limit, and the policy
        `deadline` is not possible."""
        self.config = config
        self.cache = cache
        self._in_flight: deque[Step] = deque()  # steps without a result, the oldest first
        self._last_step: Step | None = None
        self._num_steps = self._num_arrivals = 0
        self._device_runs_ahead, self._num_stages = device_runs_ahead, num_stages
        self._speculation = speculation
        self.queues = SequenceQueues(config.max_num_seqs, cache, adapters)
        if self._speculation is not None:
            self.queues.on_end.append(self._speculation.end)
        # Set by `EngineCore`, which sets `fetches` to None again once the cache on disk has failed.
        self.fetches: DiskFetches | None = None  # of blocks of waiting sequences, from the disk
        self.host_tier: HostTier | None = None  # of blocks on the host
        self._cost = cost
        self._policy = make_policy(config.policy, cache, cost)
        self.queues.on_end.append(self._policy.ended)
        self._chunks = PromptChunks(config, cache)
        self._prompt_token_s = 0.0  # seconds of a prompt token, as last predicted
        self._stats = EngineStats()

    @property
    def has_work(self) -> bool:
        return bool(self.queues.requests)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestError`, with the numbers, for a request that can never run."""
        if request.request_id in self.queues.requests:
            raise RequestError(f"request id {request.request_id!r} is in use.", param="request_id")
        check_request(request, self.config, self.cache)
        self._num_arrivals += 1
        seq = Sequence(
            request=request,
            key=(0, self._num_arrivals),  # replaced below: the sort key needs the sequence
            seed=(request.params.seed or 0) % 2**64,
            stop_reasons=stop_reasons(request),
            token_ids=array("i", request.prompt.token_ids),
            block_hashes=split_hashes(request.block_hashes),
            num_pending_forks=request.params.num_sequences - 1,
        )
        seq.key = (self._policy.sort_key(seq), self._num_arrivals)
        if request.params.use_beam_search:
            seq.beam_search = BeamSearch(seq, self.queues)
        # A request that an earlier core began goes on with the completions that have tokens.
        if not request.output_token_ids:
            self.queues.add(seq)
        for index, tokens in request.output_token_ids.items():
            self.queues.add(seq.continued(index, tokens))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or only its sequence `index`, and free the blocks at once. An unknown id is ignored. An
        `index` is ignored before the forks start and in a beam search: no sequence stands for that completion."""
        for seq in list(self.queues.requests.get(request_id, ())):
            if index is None or (seq.index == index and not seq.num_pending_forks and seq.beam_search is None):
                self.queues.drop(seq)

    def schedule(self) -> StepPlan:
        """Plan the next step. The plan has no rows if no sequence can run now: wait for a step in flight, or for the
        disk."""
        assert all(step.plan.runs_ahead for step in self._in_flight), "the result of the last plan comes first"
        self._num_steps += 1
        step = Step(self.config.max_num_batched_tokens, self._num_steps, self._make_time_limit, self._max_sequences())
        plan = step.plan
        if self.host_tier is not None:
            self.host_tier.begin_plan()
        # 1. Schedule running sequences.
        if self._schedule_running(step):
            # 2. Add draft tokens to decodes.
            self._add_draft_tokens(step)
            # 3. Admit waiting sequences.
            self._schedule_waiting(step)
        # 4. Nothing was planned, no step is in flight, and yet sequences run: all of them are held beams. They wait for
        #    a beam of their search that is in `waiting`. Preempt them from the end until a waiting sequence starts. Try
        #    first: a sequence that has just preempted itself may have left room.
        if not (self._in_flight or step.sequences) and self.queues.running:
            while not self._schedule_waiting(step) and self.queues.running:
                self._preempt(self.queues.running[-1])
        # 5. Add the copies of blocks and the loads of adapters that come before the rows.
        self._add_memory_changes(step)
        if plan.rows:
            # 6. Sum up the step's work.
            self._sum_up_work(step)
            # 7. Count the tokens as computed, and the samples as awaited if the plan runs ahead.
            may_run_ahead = self._device_runs_ahead and (
                self._speculation is None or not self._speculation.must_wait(step.sequences, plan.rows)
            )
            step.mark_in_flight(may_run_ahead, of_stages=self._num_stages > 1)
            self._in_flight.append(step)
            self._last_step = step
        assert len(step.sequences) <= step.max_sequences, "a step has no more than its part of the sequences"
        if self.config.check_invariants:
            assert all(seq.row is not None for seq in step.sequences), "a sequence of the step was preempted for it"
        return plan

    def _make_time_limit(self) -> TimeLimit | None:
        """Return the time limit of the step that is being planned."""
        running = self.queues.running
        if self._num_stages > 1:
            running = [seq for seq in running if not seq.num_awaited_tokens]
        return step_time_limit(self._cost, self.config.target_step_s, running, bool(self.queues.waiting))

    def _max_sequences(self) -> int:
        """Return the most sequences that a step may have. With pipeline stages each step gets an equal part of the
        running sequences and of the waiting sequences that can get a row."""
        if self._num_stages == 1:
            return self.config.max_num_seqs
        num_waiting = min(len(self.queues.waiting), self.queues.num_rows_left)
        return max(1, -(-(len(self.queues.running) + num_waiting) // self._num_stages))

    def _schedule_running(self, step: Step) -> bool:
        """Schedule running sequences in order. Returns False if neither draft tokens nor waiting sequences may be
        added: a sequence was preempted; or a sequence lacks blocks while nothing is planned yet, and is to wait for
        those that steps in flight may free."""
        # The queue itself, not a copy: `_preempt` removes entries from its end, `_admit_ahead_of` inserts entries
        # before `index` and returns the new index.
        running = self.queues.running
        has_preempted = False
        index = -1
        while index + 1 < len(running) and step.token_budget > 0 and len(step.sequences) < step.max_sequences:
            index += 1
            seq = running[index]
            # 1. Skip a sequence that has nothing to compute yet.
            if seq.num_awaited_tokens and (self._num_stages > 1 or seq.next_step_needs_tokens):
                continue  # its next input or sampling needs a token that is still being computed
            num_computed = seq.num_computed_tokens
            num_tokens = len(seq.token_ids) + seq.num_awaited_tokens - num_computed  # `num_uncomputed_tokens`, inlined
            if num_tokens == 0 or (seq.num_awaited_tokens and seq.num_tokens_left_to_sample <= 0):
                continue  # it is held, or a step in flight samples its last token
            # 2. Cut a chunk of a prompt, or of an answer that is computed again after a preemption. Each later running
            #    sequence keeps one token of the budget, so that a long prompt stalls no decode. Waiting sequences that
            #    come before the prompt leave one for it too.
            if num_tokens > 1:
                if self.config.enable_chunked_prefill and not has_preempted:
                    index = self._admit_ahead_of(step, index)
                num_running_after = len(running) - index - 1
                max_tokens = max(1, step.token_budget - num_running_after)
                num_tokens = self._chunks.length(seq, num_computed, max_tokens, step.time_limit)
                if num_tokens == 0:
                    continue
            # 3. Get slots for the tokens; if blocks run out, preempt from the end. Most tokens have a slot: `grow`
            #    would return the same, but takes 30 µs for 256 sequences.
            table_changes: TableChanges | tuple[()] = ()
            if num_computed + num_tokens > seq.num_ready_slots:
                while (grown := self.cache.grow(seq, num_computed + num_tokens)) is None:
                    if self._in_flight and not step.sequences:
                        # Nothing is planned yet: the steps in flight may end sequences and free their blocks.
                        return False
                    has_preempted = True
                    self._preempt(running[-1])
                    if seq.row is None:  # it was the last sequence, and has preempted itself
                        return False
                table_changes = grown
            # 4. Add the row.
            step.add(seq, num_tokens, table_changes)
            if seq.num_uncounted_tokens:
                count_computed(self._stats, seq, num_tokens)
        return not has_preempted

    def _add_draft_tokens(self, step: Step) -> None:
        """Add draft tokens to decodes. They take only budget and blocks that the running sequences leave: no sequence
        is preempted for them."""
        if self._speculation is None or self._speculation.is_idle:
            return
        row_indices, candidates = [], []
        for i, (seq, planned) in enumerate(zip(step.sequences, step.plan.rows, strict=True)):
            max_draft_tokens = min(step.token_budget, seq.num_tokens_left_to_sample - 1)
            # A decode, or the last token of a prompt, for which nothing is proposed.
            samples_one_token = planned.num_tokens == planned.num_sampled_positions == 1
            if samples_one_token and max_draft_tokens > 0 and not seq.num_awaited_tokens and _may_draft(seq, planned):
                row_indices.append(i)
                candidates.append((seq, max_draft_tokens))
        if not candidates:
            return
        proposals = self._speculation.choose(candidates, step.plan.rows)
        for i, (seq, _), draft_tokens in zip(row_indices, candidates, proposals, strict=True):
            draft_tokens = draft_tokens[: min(step.token_budget, self.cache.num_draft_slots)]
            if draft_tokens and (table_changes := self.cache.grow_for_drafts(seq, len(draft_tokens))) is not None:
                step.add_draft_tokens(i, draft_tokens, table_changes)

    def _admit_ahead_of(self, step: Step, index: int) -> int:
        """Admit waiting sequences that come before the prompt `running[index]` in scheduling order. They leave a token
        of the budget to the prompt and to each running sequence after it. Returns the prompt's new index: admitted
        sequences run before it."""
        running = self.queues.running
        return index + self._schedule_waiting(step, running[index], num_reserved_tokens=len(running) - index)

    def _schedule_waiting(self, step: Step, ahead_of: Sequence | None = None, num_reserved_tokens: int = 0) -> int:
        """Admit waiting sequences in order until budget, time, rows or blocks run out. Returns the number of admitted
        sequences. With `ahead_of`, a running prompt, admit only sequences that come before it, and leave it a row of
        the step. Leave `num_reserved_tokens` of the budget to running sequences."""
        max_rows = step.max_sequences - (ahead_of is not None)
        waiting, adapter_turn = self.queues.waiting, AdapterTurn(self.queues.adapters, self.queues.num_waiting)
        i = num_admitted = 0
        while (
            i < len(waiting)
            and step.token_budget > num_reserved_tokens
            and step.has_room
            and len(step.sequences) < max_rows
        ):
            seq = waiting[i]
            if ahead_of is not None and scheduling_order(ahead_of) < scheduling_order(seq):
                break
            # 1. Pass over a sequence that others may overtake: it is held, or waits for its adapter or for the disk.
            if seq.is_held or not adapter_turn.consider(seq):
                if adapter_turn.is_over:
                    break
                i += 1
                continue
            may_wait = not (self._in_flight or step.sequences)  # `prepare` may block this thread: nothing else can run
            if self.fetches is not None and (readiness := self.fetches.prepare(seq, may_wait)) is not Readiness.READY:
                # NO_ROOM: the pools have no room for the blocks to read. If sequences run, they will free some: stop,
                # so that no later sequence takes these. If nothing runs, the pools are full of blocks that were read
                # for later sequences: go on, so that one of those starts.
                if readiness is Readiness.NO_ROOM and (step.sequences or self.queues.running):
                    break
                i += 1
                continue
            # 2. Get rows and blocks. A sequence that gets none is not overtaken: a long prompt would starve.
            if (
                seq.num_needed_rows > self.queues.num_rows_left
                or seq.num_awaited_tokens  # preempted while a step samples it: wait for the token
            ):
                break
            max_step_tokens, is_first_in_step = self.config.max_num_batched_tokens, not step.sequences
            if self.host_tier is not None and not self.host_tier.load(seq, max_step_tokens, is_first_in_step):
                break
            num_tokens = self._allocate_for_start(seq, step.token_budget - num_reserved_tokens, step.time_limit)
            if num_tokens == 0:
                break
            # 3. Start it. This removes it from `waiting`, so that the next one is at i.
            self.queues.start(seq)
            seq.host_load = None
            adapter_turn.started(seq)
            self._policy.started(seq)
            if self.fetches is not None:
                self.fetches.forget(seq)
            num_admitted += 1
            if seq.first_scheduled_time == 0.0:
                seq.first_scheduled_time = time.monotonic()
            step.add(seq, num_tokens, ())
            count_computed(self._stats, seq, num_tokens)
        return num_admitted

    def _allocate_for_start(self, seq: Sequence, token_budget: int, time_limit: TimeLimit | None) -> int:
        """Give a waiting sequence the blocks of its first chunk. Returns the number of tokens to compute, or 0 if the
        sequence must wait.

        Blocks for all its tokens must be free, not only for the chunk: otherwise the prompt would later preempt other
        sequences.
        """
        # 1. Find its computed tokens: swapped out to the host, or in the prefix cache.
        prefix = None if seq.host_blocks else self.cache.find_prefix(seq)
        num_computed = seq.num_computed_tokens if prefix is None else prefix.num_tokens
        # 2. Check that the chunk has a token, before blocks are taken.
        must_fit = prefix is not None and not self.config.enable_chunked_prefill
        if must_fit and seq.num_tokens - num_computed > token_budget:
            return 0
        num_tokens = self._chunks.length(seq, num_computed, token_budget, time_limit)
        if num_tokens == 0:
            return 0
        # 3. Take the blocks of the computed tokens.
        max_step_tokens = self.config.max_num_batched_tokens
        if prefix is None:
            has_blocks = self.cache.swap_in(seq, max_step_tokens)
        else:
            has_blocks = self.cache.share_prefix(seq, prefix, max_step_tokens)
        if not has_blocks:
            return 0
        if prefix is not None:
            count_admission(self._stats, seq, prefix.num_tokens, self.cache, self.host_tier)
        # 4. Allocate the blocks of the chunk.
        table_changes = self.cache.grow(seq, num_computed + num_tokens)
        assert table_changes is not None, "`share_prefix` and `swap_in` check that the blocks are free"
        return num_tokens

    def _preempt(self, seq: Sequence, may_swap: bool = True) -> None:
        """Preempt a running sequence. Its blocks are swapped out if possible, otherwise freed. While a step is planned,
        callers take the last of `running`, and the sequences of the step stand before it."""
        self._stats.num_preemptions += 1
        has_drafts = seq.num_awaited_tokens > 1  # draft tokens are in flight, and the result may reject some
        self.queues.preempt(seq, may_swap and not has_drafts and self.config.preemption_mode == "swap")

    def _add_memory_changes(self, step: Step) -> None:
        """Add the copies of blocks and the loads of adapters that come before the step's rows."""
        plan = step.plan
        if plan.rows or self.host_tier is None:  # copies from and to the host tier wait for a plan with rows
            plan.moves = (self.host_tier or self.cache).take_moves()
        if self.queues.adapters is not None:
            plan.adapters = self.queues.adapters.take_loads()
            step.group_by_adapter()
        # A plan without rows is never executed: its moves and loads would be lost. It has none, as blocks are loaded
        # only for a sequence that gets a row, and after a preemption (which may swap out) a row is planned: in
        # `_schedule_running` that of the sequence that grows, in step 4 of `schedule` that of the one that starts.
        assert plan.rows or not plan.adapters
        assert plan.rows or not any(plan.moves)

    def _sum_up_work(self, step: Step) -> None:
        """Sum up the step's work for the cost model and the drafter, and predict the time of a prompt token."""
        plan = step.plan
        plan.work = StepWork.of(plan.rows)
        if self._speculation is not None:
            self._speculation.note_planned(plan.rows)
            plan.drafts_prompts = self._speculation.is_speculating
        # Rows with draft tokens count as chunks too, but only a step with a part of a prompt has prompt tokens.
        if plan.work.num_chunks and self._cost is not None and not all(row.is_decode for row in plan.rows):
            self._prompt_token_s = prompt_token_s(self._cost, plan, self.config.max_num_batched_tokens, step.time_limit)

    def apply_result(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Apply the result of a step. Returns the outputs of its sequences."""
        step = self._in_flight.popleft()
        assert step.plan is plan, "results come in the order of the plans"
        outputs: list[SequenceOutput] = []
        # The loop runs for every token, so it is written for speed: it unpacks rows, and rare cases are checked once.
        block_size, plan_runs_ahead, errors = self.cache.block_size, plan.runs_ahead, result.errors
        queues, all_tokens, all_logprobs = self.queues, result.tokens, result.logprobs
        has_prompt_results = bool(result.prompt_logprobs or result.alignment)
        # False if the model pools, if the worker has drafted, or if a proposer must see every token.
        has_fast_path = result.vectors is None and not result.draft_tokens
        if self._speculation is not None:
            self._speculation.count_running(len(self.queues.running))
            has_fast_path &= not self._speculation.needs_every_token
        num_generation_tokens = 0
        end = 0  # number of samples so far
        for seq, planned in zip(step.sequences, plan.rows, strict=True):
            row, num_computed_before, num_tokens, num_sampled_positions, num_last_samples, draft_tokens = planned
            # 1. Find the row's samples: begin .. end - 1 of the result.
            begin = end
            if num_sampled_positions:
                end += num_sampled_positions + num_last_samples - 1  # `PlannedRow.num_samples`, inlined
            # 2. End a sequence that failed. Drop the results of one that has ended while the step was in flight.
            if errors and row in errors and not seq.has_ended:
                outputs.append(self._fail(seq, errors[row]))
            if seq.has_ended:
                continue
            # 3. Count the row's tokens as no longer awaited.
            if plan_runs_ahead:
                seq.num_awaited_tokens -= num_sampled_positions
            # 4. Register full blocks in the prefix index. Not if the sequence was preempted after this step was
            #    planned: it may have been given different blocks.
            num_computed_now = num_computed_before + num_tokens - len(draft_tokens)
            if (
                num_computed_now // block_size > seq.num_registered_blocks
                and seq.row is not None
                and seq.admission_step <= step.number
            ):
                self.cache.register_computed(seq, num_computed_now)
            if has_prompt_results:
                keep_prompt_results(seq, row, num_computed_before, result)
            # 5. Apply the samples: most rows only extend their sequence by one token.
            if has_fast_path and end == begin + 1 and seq.beam_search is None and not seq.has_prediction:
                logprobs = None if all_logprobs is None else all_logprobs[begin:end]
                outputs.append(extend(queues, seq, all_tokens[begin:end], logprobs))
                num_generation_tokens += 1
            elif num_sampled_positions:
                row_outputs = self._apply_samples(seq, planned, begin, end, result)
                outputs += row_outputs
                num_generation_tokens += _num_generation_tokens(seq, row_outputs)
        num_found = len(result.tokens if result.vectors is None else result.vectors)
        assert end == num_found, f"the plan has {end} samples and the result has {num_found} tokens or vectors"
        self._stats.num_generation_tokens += num_generation_tokens
        self._stats.num_computed_tokens += plan.work.num_tokens
        if self._speculation is not None:
            drafts = {row: result.drafts_of(row) or () for row in result.draft_tokens}
            self._speculation.note_drafted(plan.rows, drafts, result.draft_s, result.caught_up)
        if self.config.check_invariants:
            self.check()
        if not self.queues.requests:
            self._last_step = None  # lets go of the ended sequences
        return outputs

    def _apply_samples(
        self, seq: Sequence, planned: PlannedRow, begin: int, end: int, result: StepResult
    ) -> list[SequenceOutput]:
        """Apply samples begin .. end - 1 of the result: the sequence goes on, forks, is held for its beam search, or
        ends. If the model pools, the samples are vectors."""
        if result.vectors is not None:
            return [end_with_vectors(self.queues, seq, result.vectors[begin:end])]
        tokens = result.tokens[begin:end]
        logprobs = None if result.logprobs is None else result.logprobs[begin:end]
        if seq.beam_search is not None:
            return hold_for_beam_search(seq, logprobs)
        draft_tokens = result.draft_tokens.get(planned.row, planned.draft_tokens)
        if planned.num_last_samples > 1:
            outputs = start_forks(self.queues, seq, tokens, logprobs)
        elif draft_tokens:
            num_valid = count_valid_tokens(draft_tokens, tokens)
            if self._speculation is not None:
                self._speculation.count(seq, draft_tokens, num_valid - 1, self._stats)
            outputs = [accept_drafts(self.queues, seq, num_valid, tokens, logprobs)]
        else:
            outputs = [extend(self.queues, seq, tokens, logprobs)]
        if self._speculation is not None:
            self._observe_tokens(seq, outputs[-1].token_ids, result.drafts_of(planned.row), planned.num_last_samples)
        return outputs

    def _observe_tokens(
        self, seq: Sequence, tokens: list[int], drafts: tuple[int, ...] | None, num_last_samples: int
    ) -> None:
        """Give the proposer the new `tokens` of a sequence, or the first token of each fork. `drafts` are the draft
        tokens that the worker made for the sequence; None if the plan asked for none."""
        assert self._speculation is not None
        if num_last_samples > 1:
            for fork in self.queues.siblings(seq):
                self._speculation.accept(fork, fork.token_ids[-1:].tolist(), None)
        elif not seq.has_ended:
            self._speculation.accept(seq, tokens, drafts)

    def _fail(self, seq: Sequence, error: str) -> SequenceOutput:
        """End a sequence with an error. In a beam search, end all sequences of the request."""
        for other in self.queues.siblings(seq) if seq.beam_search is not None else [seq]:
            self.queues.drop(other)
        return seq.output([], "error", error=error)

    def withdraw(self, plan: StepPlan, error: str) -> list[SequenceOutput]:
        """Take back the last plan, which ran out of device memory. The last of its requests in scheduling order ends
        with an error (503). Call `withdraw` before the next `schedule`, which plans the others again: `Step.roll_back`
        takes back counts of running sequences, and a sequence that was preempted since has none. Returns the outputs
        of the request that ended."""
        step = self._in_flight.pop()
        assert step.plan is plan, "only the last plan can be withdrawn"
        assert step.number == self._num_steps, "another plan has been made since"
        self._last_step = None  # `progress` shows none of its tokens
        scheduled = step.roll_back()
        for seq in scheduled:
            assert seq.row is not None, "a sequence of the plan was preempted since"
            self.cache.roll_back(seq)
            if self.cache.states:  # the step may have changed the states of some layers
                self._preempt(seq, may_swap=False)
        outputs = []
        for seq in self.queues.siblings(max(scheduled, key=scheduling_order)) if scheduled else ():
            output = seq.output([], "error", error=error)
            output.error_status = 503  # Service Unavailable: the same request may fit later
            outputs.append(output)
            self.queues.drop(seq)
        return outputs

    def take_stats(self) -> EngineStats:
        """Return the gauges, and the increments of the counters since the last call."""
        stats, self._stats = self._stats, EngineStats()
        stats.prompt_token_s = self._prompt_token_s
        set_gauges(stats, self.queues, self.cache)
        return stats

    def progress(self) -> list[SequenceProgress]:
        """Return how far the first `_MAX_SHOWN_SEQUENCES` sequences are, with their tokens in the last step."""
        last = self._last_step
        planned_rows = [] if last is None else zip(last.sequences, last.plan.rows, strict=True)
        in_step = {id(seq): planned.num_tokens for seq, planned in planned_rows}
        shown = islice(chain(self.queues.running, self.queues.waiting), _MAX_SHOWN_SEQUENCES)
        return [progress_of(seq, in_step.get(id(seq), 0)) for seq in shown]

    def check(self) -> None:
        """Assert the invariants of scheduler and cache; for tests and `--check-invariants`."""
        self.queues.check([seq for step in self._in_flight for seq in step.sequences])


def _num_generation_tokens(seq: Sequence, row_outputs: list[SequenceOutput]) -> int:
    """Return the number of tokens that a row has generated. A beam generates one token, whenever its search reports
    it."""
    return 1 if seq.beam_search is not None else sum([len(output.token_ids) for output in row_outputs])


def _may_draft(seq: Sequence, planned: PlannedRow) -> bool:
    """Return whether a sequence may have draft tokens. It may not in a beam search, when forks start, or with a logits
    processor, which is a caller's code and must never see a rejected token."""
    return seq.beam_search is None and planned.num_last_samples == 1 and not seq.params.logits_processors
