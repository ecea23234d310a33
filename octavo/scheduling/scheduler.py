"""The scheduler: each step has a budget of tokens; running sequences get theirs first, then waiting ones.

There is no prefill phase and no decode phase. A sequence lacks the tokens that it has but has not computed: one for a
decode, many for a prompt, fewer after a prefix hit. Draft tokens are computed behind the last token and count once the
result accepts them.

The states of a sequence, and who moves it there:

    waiting     in `queues.waiting`, without a row             `add`
    running     in `queues.running`, with a row and blocks     `schedule` (`_schedule_waiting`, `_admit`)
    in flight   running, and part of a step in `_in_flight`    `schedule` (`Step.mark_in_flight`), until `update`
    preempted   waiting again at its old place; its blocks     `schedule` (`_preempt`), when blocks run out
                are dropped, or moved to the host
    held        computed to its end; beam search is yet to     `update` (`propose`), until `BeamSearch` has chosen
                choose its next token
    finished    `has_ended`; row and blocks are free           `update`, `abort`, `withdraw` (`queues.drop`)

With pipeline stages several steps are in flight, each with its part of the sequences; a sequence is in one of them at
a time. A device that runs ahead gets its next step before the tokens of the last one are known: a sequence then has an
awaited token, which counts like any other. If the step in flight ends the sequence, its row in the next step is
computed for nothing and its result is dropped.
"""

from __future__ import annotations

import time
from collections import deque

from octavo.config import SchedulerConfig
from octavo.errors import RequestError
from octavo.kv_cache.manager import KVCacheManager
from octavo.lora.pool import AdapterPool
from octavo.request import EngineRequest, Prompt, SequenceOutput
from octavo.sampling.draft_verification import count_valid_tokens
from octavo.scheduling.adapter_turns import AdapterTurn
from octavo.scheduling.admission_check import check_request
from octavo.scheduling.beam_search import BeamSearch
from octavo.scheduling.deadlines import first_token_deadline
from octavo.scheduling.gauges import set_gauges
from octavo.scheduling.sampled_tokens import accept_drafts, end_with_vectors, extend, propose, start_forks
from octavo.scheduling.sequence_queues import SequenceQueues, scheduling_order
from octavo.scheduling.step import Step
from octavo.scheduling.stop_check import stop_reasons
from octavo.scheduling.time_limit import TimeLimit, prompt_token_s, step_time_limit
from octavo.sequence import Sequence
from octavo.speculative.speculation import Speculation
from octavo.stats import EngineStats
from octavo.step_cost import StepCost, StepWork
from octavo.step_plan import PlannedRow, StepPlan, StepResult


class Scheduler:
    """Owns the sequences. Each plan of `schedule` that has rows comes back in `update`, in order, or in `withdraw`.

    `add` and `abort` may come at any time. A plan with `runs_ahead` allows the next plan before its result is known.
    Plans that need draft tokens never set it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        runs_ahead: bool = False,
        speculation: Speculation | None = None,
        cost: StepCost | None = None,
        adapters: AdapterPool | None = None,
        num_stages: int = 1,
    ) -> None:
        """Without a `cost` model, steps have a budget of tokens but no time limit, and there are no deadlines."""
        self.config = config
        self.cache = cache
        self._in_flight: deque[Step] = deque()
        self._num_steps = 0
        self._arrivals = 0
        self._runs_ahead, self._num_stages = runs_ahead, num_stages
        self._speculation = speculation
        on_end = None if self._speculation is None else self._speculation.end
        self.queues = SequenceQueues(config.max_num_seqs, cache, on_end, adapters)
        self._cost = cost
        self._prompt_token_s = 0.0
        self._stats = EngineStats()

    @property
    def has_work(self) -> bool:
        return bool(self.queues.requests)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestError` for one that could never run, with the numbers."""
        if request.request_id in self.queues.requests:
            raise RequestError(f"request id {request.request_id!r} is in use.", param="request_id")
        check_request(request, self.config, self.cache)
        self._arrivals += 1
        seq = Sequence(
            request=request,
            key=(0, self._arrivals),
            seed=(request.params.seed or 0) % 2**64,
            stop_reasons=stop_reasons(request),
            token_ids=list(request.prompt.token_ids),
            num_pending_forks=request.params.num_sequences - 1,
        )
        seq.key = (self._order_number(seq), self._arrivals)
        if request.params.use_beam_search:
            seq.chooser = BeamSearch(seq, self.queues)
        if not request.output_token_ids:
            self.queues.add(seq)
        for index, tokens in request.output_token_ids.items():
            self.queues.add(seq.continued(index, tokens))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or its sequence `index`, and free the blocks at once. Unknown ids are ignored. So is an index
        before the forks have started, or in a beam search: no sequence is the completion of that index then."""
        for seq in list(self.queues.requests.get(request_id, ())):
            if index is None or (seq.index == index and not seq.num_pending_forks and seq.chooser is None):
                self.queues.drop(seq)

    def schedule(self) -> StepPlan:
        """Decide the next step. The plan has no rows only if nothing can run."""
        running = self.queues.running
        if self._num_stages > 1:
            running = [seq for seq in running if not seq.num_awaited_tokens]
        time_limit = step_time_limit(self._cost, self.config.target_step_s, running, bool(self.queues.waiting))
        self._num_steps += 1
        step = Step(self.config.max_num_batched_tokens, self._num_steps, time_limit, self._most_sequences())
        if self._schedule_running(step):
            self._add_draft_tokens(step)
            self._schedule_waiting(step)
        if not self._in_flight:
            while not step.sequences and self.queues.running:  # held sequences have the blocks or rows that others need
                self._preempt(self.queues.running[-1])
                self._schedule_waiting(step)
        plan = step.plan
        plan.moves = self.cache.take_moves()
        if self.queues.adapters is not None:
            plan.adapters = self.queues.adapters.take_loads()
            step.group_by_adapter()
        # A plan without rows is not executed. The first sequence always gets its blocks: each fits in the pools alone.
        assert plan.rows or not plan.adapters
        assert plan.rows or not any(moves.swap_out or moves.copy or moves.swap_in for moves in plan.moves)
        if plan.rows:
            plan.work = StepWork.of(plan.rows)
            if self._speculation is not None:
                self._speculation.planned(plan.rows)
                plan.drafts_prompts = self._speculation.is_speculating
            if plan.work.num_chunks and self._cost is not None and not all(row.is_decode for row in plan.rows):
                self._prompt_token_s = prompt_token_s(self._cost, plan, self.config.max_num_batched_tokens, time_limit)
            step.mark_in_flight(self._runs_ahead and not self._must_wait(step), of_stages=self._num_stages > 1)
            self._in_flight.append(step)
        return plan

    def _schedule_running(self, step: Step) -> bool:
        """Schedule running sequences. Returns whether all got blocks: only then may waiting ones be admitted."""
        running = self.queues.running
        has_preempted = False
        i = 0
        while i < len(running) and step.token_budget > 0 and len(step.sequences) < step.most_sequences:
            seq = running[i]
            i += 1
            if self._num_stages > 1 and seq.num_awaited_tokens:
                continue  # its next token is known when the last stage has sampled
            num_tokens = seq.num_lacking_tokens
            if num_tokens == 0 or (seq.num_awaited_tokens and seq.num_remaining_tokens <= 0):
                continue  # it is held, or its last token is in flight
            if num_tokens > 1:
                if self.config.enable_chunked_prefill and not has_preempted:
                    i += self._schedule_waiting(step, before=seq, num_behind=len(running) - i + 1)
                # One token is reserved for each later sequence, so that a long prompt never stalls decodes.
                most = max(1, step.token_budget - (len(running) - i))
                num_tokens = self._chunk(seq, seq.num_computed_tokens, most, step.time_limit)
                if num_tokens == 0:
                    continue
            while (changed := self.cache.grow(seq, seq.num_computed_tokens + num_tokens)) is None:
                if self._in_flight and not step.sequences:
                    return False  # steps in flight may end sequences: preempt none before their results are known
                has_preempted = True
                self._preempt(running[-1])
                if seq.row is None:
                    return False
            step.add(seq, num_tokens, changed)
        return not has_preempted

    def _add_draft_tokens(self, step: Step) -> None:
        """Add draft tokens to decodes. They get only the budget and blocks that running sequences leave, so that none
        is preempted for them."""
        if self._speculation is None or self._speculation.is_idle:
            return
        places, candidates = [], []
        for place, (seq, planned) in enumerate(zip(step.sequences, step.plan.rows, strict=True)):
            most = min(step.token_budget, seq.num_remaining_tokens - 1)
            is_last = planned.num_tokens == planned.num_sampled_positions == 1  # not a token within a prompt
            if is_last and most > 0 and not seq.num_awaited_tokens and _may_draft(seq, planned):
                places.append(place)
                candidates.append((seq, most))
        if not candidates:
            return
        found = self._speculation.choose(candidates, step.plan.rows)
        for place, (seq, _), draft_tokens in zip(places, candidates, found, strict=True):
            draft_tokens = draft_tokens[: min(step.token_budget, self.cache.num_draft_slots)]
            if draft_tokens and (changed := self.cache.grow_for_drafts(seq, len(draft_tokens))) is not None:
                step.add_draft_tokens(place, draft_tokens, changed)

    def _observe_tokens(self, seq: Sequence, tokens: list[int], drafts: tuple[int, ...] | None, num_forks: int) -> None:
        """Tell the proposer the new `tokens` of a sequence, or the first tokens of its forks, so that it drafts the
        next ones. `drafts` are the draft tokens that the worker had made."""
        assert self._speculation is not None
        if num_forks > 1:
            for fork in self.queues.siblings(seq):
                self._speculation.accept(fork, fork.token_ids[-1:], None)
        elif not seq.has_ended:
            self._speculation.accept(seq, tokens, drafts)

    def _most_sequences(self) -> int:
        """Return the most sequences of a step. With pipeline stages each step gets an equal part of those that run or
        could start."""
        if self._num_stages == 1:
            return self.config.max_num_seqs
        num_waiting = min(len(self.queues.waiting), self.queues.num_rows_left)
        return max(1, -(-(len(self.queues.running) + num_waiting) // self._num_stages))

    def _must_wait(self, step: Step) -> bool:
        """Return whether the next step needs draft tokens, so that it has to wait for this step's tokens."""
        return self._speculation is not None and self._speculation.must_wait(step.sequences, step.plan.rows)

    def _schedule_waiting(self, step: Step, before: Sequence | None = None, num_behind: int = 0) -> int:
        """Admit waiting sequences in order, as many as fit; only those that come `before` a running prompt, if one is
        given. `num_behind` running sequences keep a token of the budget each. Returns how many were admitted."""
        waiting, turn = self.queues.waiting, AdapterTurn(self.queues.adapters)
        i = num_admitted = 0
        while i < len(waiting) and step.token_budget > num_behind and step.has_room:
            seq = waiting[i]
            if before is not None and scheduling_order(before) < scheduling_order(seq):
                break
            if seq.is_held or not turn.may_start(seq):
                i += 1
                continue
            has_row = seq.num_rows <= self.queues.num_rows_left
            num_tokens = self._admit(seq, step.token_budget - num_behind, step.time_limit) if has_row else 0
            if num_tokens == 0:
                break
            self.queues.start(seq)
            turn.started(seq)
            num_admitted += 1
            if seq.first_scheduled_time == 0.0:
                seq.first_scheduled_time = time.monotonic()
            step.add(seq, num_tokens, [])
        return num_admitted

    def _admit(self, seq: Sequence, token_budget: int, time_limit: TimeLimit | None) -> int:
        """Give a waiting sequence its blocks. Returns how many tokens to compute, or 0 if it has to wait.

        Blocks for all its tokens must be free, so that a prompt that cannot finish preempts no other. A sequence that
        was preempted while a token of it was in flight waits for that token.
        """
        if seq.num_awaited_tokens:
            return 0
        if seq.host_blocks:
            if self._chunk(seq, seq.num_computed_tokens, token_budget, time_limit) == 0:
                return 0
            if not self.cache.swap_in(seq, self.config.max_num_batched_tokens):
                return 0
        else:
            prefix = self.cache.find_prefix(seq)
            if seq.num_tokens - prefix.num_tokens > token_budget and not self.config.enable_chunked_prefill:
                return 0
            if self._chunk(seq, prefix.num_tokens, token_budget, time_limit) == 0:
                return 0
            if not self.cache.share_prefix(seq, prefix, self.config.max_num_batched_tokens):
                return 0
            if seq.num_preemptions == 0:
                seq.num_cached_tokens = prefix.num_tokens
                self._stats.num_prompt_tokens += seq.num_tokens
                self._stats.num_prefix_queries += seq.num_tokens
                self._stats.num_prefix_hits += prefix.num_tokens
        num_tokens = self._chunk(seq, seq.num_computed_tokens, token_budget, time_limit)
        changed = self.cache.grow(seq, seq.num_computed_tokens + num_tokens)
        assert changed is not None, "blocks were counted before"
        return num_tokens

    def _chunk(self, seq: Sequence, num_computed: int, most: int, time_limit: TimeLimit | None) -> int:
        """Return how many tokens after `num_computed` the step computes: all that the sequence lacks, or as many as
        fit; 0 if the picture that comes next does not fit."""
        num_tokens = min(seq.num_tokens - num_computed, most)
        if num_tokens > 1 and self.config.starts_at_pictures:
            ahead = [item.position - num_computed for item in seq.request.prompt.media]
            num_tokens = min([num_tokens, *(distance for distance in ahead if distance > 0)])
        if not self.config.enable_chunked_prefill or (num_tokens == 1 and not self.config.whole_pictures):
            return num_tokens
        if time_limit is not None:
            num_tokens = time_limit.chunk(num_computed, num_tokens)
        end = self.cache.step_end(num_computed, num_computed + num_tokens)
        if self.config.whole_pictures:
            end = _end_outside_pictures(seq.request.prompt, num_computed, end, most)
        return end - num_computed

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Account for a finished step. Returns what its sequences have produced."""
        step = self._in_flight.popleft()
        assert step.plan is plan, "results come in the order of the plans"
        outputs: list[SequenceOutput] = []
        end = 0  # of a row's samples in the result
        errors, measures_prompts = result.errors, bool(result.prompt_logprobs or result.alignment)
        # What follows happens for every token: rows are unpacked, and what few steps have is asked about once.
        for seq, planned in zip(step.sequences, plan.rows, strict=True):
            row, first, num_tokens, num_sampled_positions, num_forks, draft_tokens = planned
            begin = end
            if num_sampled_positions:
                end += num_sampled_positions + num_forks - 1
            if errors and row in errors and not seq.has_ended:
                outputs.append(self._fail(seq, errors[row]))
            if seq.has_ended:  # now, or while this step was in flight
                continue
            if plan.runs_ahead:
                seq.num_awaited_tokens -= num_sampled_positions
            if seq.row is not None and seq.admission_step <= step.number:  # it was not preempted meanwhile
                self.cache.register_computed(seq, first + num_tokens - len(draft_tokens))
            if measures_prompts:
                self._keep_prompt_measures(seq, row, first, result)
            if num_sampled_positions:
                outputs += self._apply_samples(seq, planned, begin, end, result)
        num_found = len(result.tokens if result.vectors is None else result.vectors)
        assert end == num_found, f"{end} tokens or vectors were wanted and {num_found} came"
        self._stats.num_computed_tokens += sum([planned.num_tokens for planned in plan.rows])
        if self._speculation is not None:
            drafts = {row: result.drafts_of(row) or () for row in result.draft_tokens}
            self._speculation.drafted(plan.rows, drafts, result.draft_s, result.caught_up)
        if self.config.check_invariants:
            self.check()
        return outputs

    def _fail(self, seq: Sequence, error: str) -> SequenceOutput:
        """End a sequence with an error, and its whole request if beam search chooses its tokens."""
        for other in self.queues.siblings(seq) if seq.chooser is not None else [seq]:
            self.queues.drop(other)
        return seq.output([], "error", error=error)

    def _keep_prompt_measures(self, seq: Sequence, row: int, first: int, result: StepResult) -> None:
        """Keep what was measured of a prompt from position `first` on. A preempted prompt starts over: the same values
        replace those of its first run."""
        if row in result.prompt_logprobs:
            seq.prompt_logprobs[first:] = result.prompt_logprobs[row]
        if row in result.alignment:
            seq.alignment[first:] = result.alignment[row]

    def _apply_samples(
        self, seq: Sequence, planned: PlannedRow, begin: int, end: int, result: StepResult
    ) -> list[SequenceOutput]:
        """Give a sequence the tokens begin .. end of the result: it goes on, forks, waits for its chooser, or ends. A
        model that pools has vectors instead of tokens."""
        if result.vectors is not None:
            return [end_with_vectors(self.queues, seq, result.vectors[begin:end])]
        tokens = result.tokens[begin:end]
        logprobs = None if result.logprobs is None else result.logprobs[begin:end]
        if seq.chooser is not None:
            self._stats.num_generation_tokens += 1
            return propose(seq, logprobs)
        row, _, _, _, num_forks, draft_tokens = planned
        draft_tokens = result.draft_tokens.get(row, draft_tokens)
        if num_forks > 1:
            outputs = start_forks(self.queues, seq, tokens, logprobs)
        elif draft_tokens:
            num_valid = count_valid_tokens(draft_tokens, tokens)
            if self._speculation is not None:
                self._speculation.count(seq, draft_tokens, num_valid - 1, self._stats)
            outputs = [accept_drafts(self.queues, seq, num_valid, tokens, logprobs)]
        else:
            outputs = [extend(self.queues, seq, tokens, logprobs)]
        if self._speculation is not None:
            self._observe_tokens(seq, outputs[-1].token_ids, result.drafts_of(row), num_forks)
        self._stats.num_generation_tokens += len(tokens) if not draft_tokens else len(outputs[0].token_ids)
        return outputs

    def withdraw(self, plan: StepPlan, error: str) -> list[SequenceOutput]:
        """Take back the last plan, which ran out of device memory: end its newest request, so that the others may fit,
        and plan the rest again. Returns the request's outputs."""
        step = self._in_flight.pop()
        assert step.plan is plan, "only the last plan can be withdrawn"
        scheduled = step.roll_back()
        for seq in scheduled:
            self.cache.roll_back(seq)
            if self.cache.states:  # some layers may have changed theirs before the memory ran out
                self._preempt(seq, may_swap=False)
        outputs = []
        for seq in self.queues.siblings(max(scheduled, key=scheduling_order)):
            output = seq.output([], "error", error=error)
            output.error_status = 503  # the same request may fit later
            outputs.append(output)
            self.queues.drop(seq)
        return outputs

    def take_stats(self) -> EngineStats:
        """Return the gauges, and the counters' increments since the last call."""
        stats, self._stats = self._stats, EngineStats()
        stats.prompt_token_s = self._prompt_token_s
        set_gauges(stats, self.queues, self.cache)
        return stats

    def check(self) -> None:
        """Assert the invariants of scheduler and cache; for tests and `--check-invariants`."""
        self.queues.check([seq for step in self._in_flight for seq in step.sequences])

    def _order_number(self, seq: Sequence) -> float:
        """Return a new sequence's place by the policy: smaller numbers go first, equal ones by arrival."""
        if self.config.policy == "priority":
            return seq.request.priority
        if self.config.policy == "fcfs":
            return 0
        assert self._cost is not None, "deadlines follow from how long prompts take"
        num_cached = self.cache.find_prefix(seq).num_tokens
        prompt = StepWork().plus(num_cached, seq.num_tokens - num_cached, 1)
        return first_token_deadline(seq.request, self._cost.seconds(prompt))

    def _preempt(self, seq: Sequence, may_swap: bool = True) -> None:
        self._stats.num_preemptions += 1
        has_drafts = seq.num_awaited_tokens > 1  # some may be rejected
        self.queues.preempt(seq, may_swap and not has_drafts and self.config.preemption_mode == "swap")


def _may_draft(seq: Sequence, planned: PlannedRow) -> bool:
    """Return whether a sequence may have draft tokens: the sampler alone chooses its tokens, and draft tokens change
    nothing of what it sees."""
    if seq.chooser is not None or planned.num_forks > 1:
        return False
    return not seq.params.logits_processors  # callers' code must see no rejected tokens


def _end_outside_pictures(prompt: Prompt, start: int, end: int, most: int) -> int:
    """Return where a chunk from `start` to about `end` ends: never within a picture, but before it; or after it, if the
    picture begins the chunk and is at most `most` tokens."""
    for item in prompt.media:
        picture_end = item.position + item.num_tokens
        if item.position < end < picture_end:
            if item.position > start:
                return item.position
            return picture_end if picture_end - start <= most else start
    return end
