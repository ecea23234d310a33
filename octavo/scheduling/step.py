"""A step while it is planned and computed: its plan, and the sequence of each of the plan's rows."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from octavo.kv_cache.block_pool import TableChanges
from octavo.scheduling.time_limit import TimeLimit
from octavo.sequence import Sequence
from octavo.step_plan import Admission, NewBlock, StepPlan, new_row

# The largest share of a step's sequences that may be skipped in the next step. Each of them loses half of its steps;
# the others gain the time between two steps, about 15% of a step on a GPU. At a quarter, loss and gain in tokens a
# second are equal.
_MAX_SKIPPED = 0.25


@dataclass
class Step:
    token_budget: int  # tokens that the step may still get
    number: int  # counts the steps of a scheduler
    make_time_limit: Callable[[], TimeLimit | None]
    max_sequences: int
    plan: StepPlan = field(default_factory=StepPlan)
    sequences: list[Sequence] = field(default_factory=list)  # parallel to plan.rows
    is_grouped: bool = False  # `group_by_adapter` has changed the order of the rows

    @cached_property
    def time_limit(self) -> TimeLimit | None:
        """How long the step may take; None if no stream waits for it. Made at the first read: steps without prompts and
        draft tokens never read it. It depends on the queues at that moment. For a first prompt this is `has_room`, or
        the length of the chunk: after the decodes before it, and before any waiting sequence is admitted."""
        return self.make_time_limit()

    @property
    def has_room(self) -> bool:
        """Whether another part of a prompt may be added."""
        if self.token_budget <= 0 or len(self.sequences) >= self.max_sequences:
            return False
        return self.time_limit is None or not self.time_limit.is_spent

    def add(self, seq: Sequence, num_tokens: int, table_changes: TableChanges | tuple[()]) -> None:
        """Add a row: the next `num_tokens` of a sequence. `table_changes` are the new entries of its block tables."""
        row, plan, num_computed = seq.row, self.plan, seq.num_computed_tokens
        assert row is not None
        if seq.is_admitted_to_runner:
            if table_changes:
                plan.new_blocks += [NewBlock(row, *change) for change in table_changes]
            if seq.beam_search is not None:  # the runner does not know the chosen token
                plan.new_tokens.append((row, seq.num_tokens - 1, seq.token_ids[-1]))
        else:
            seq.is_admitted_to_runner = True
            seq.admission_step = self.number
            plan.admissions.append(_admission(seq, row))
        num_sampled_positions = 0
        if num_computed + num_tokens == len(seq.token_ids) + seq.num_awaited_tokens:
            num_sampled_positions = seq.num_result_positions
        num_last_samples = 1 if seq.beam_search is not None else 1 + seq.num_pending_forks
        plan.rows.append(new_row(row, num_computed, num_tokens, num_sampled_positions, num_last_samples))
        self.sequences.append(seq)
        self.token_budget -= num_tokens
        if num_tokens > 1 and self.time_limit is not None:
            self.time_limit.spend(num_computed, num_tokens)

    def add_draft_tokens(self, index: int, draft_tokens: tuple[int, ...], table_changes: TableChanges) -> None:
        """Add draft tokens after the one token of row `index`."""
        assert not self.is_grouped, "the rows have other indices now"
        planned, count = self.plan.rows[index], 1 + len(draft_tokens)
        self.plan.rows[index] = planned._replace(
            num_tokens=count, num_sampled_positions=count, draft_tokens=draft_tokens
        )
        self.plan.new_blocks += [NewBlock(planned.row, *change) for change in table_changes]
        self.token_budget -= len(draft_tokens)
        if self.time_limit is not None:
            self.time_limit.spend_on_drafts(planned.num_computed, len(draft_tokens))

    def group_by_adapter(self) -> None:
        """Put rows of one adapter next to each other, so that kernels read its factors once."""
        self.is_grouped = True
        order = sorted(range(len(self.sequences)), key=lambda i: self.sequences[i].adapter_slot)
        self.sequences = [self.sequences[i] for i in order]
        self.plan.rows = [self.plan.rows[i] for i in order]

    def mark_in_flight(self, may_run_ahead: bool, of_stages: bool) -> None:
        """Count the step's tokens as computed, except draft tokens; and if the step runs ahead, its samples as awaited.
        With pipeline stages (`of_stages`) every step runs ahead: its sequences wait for its result anyway.

        Otherwise a step runs ahead if at most `_MAX_SKIPPED` of its sequences need their tokens on the host before
        their next step; these sequences are skipped in the next step."""
        plan = self.plan
        if of_stages or not may_run_ahead:
            plan.runs_ahead = of_stages
        else:
            sampled = [pair for pair in zip(self.sequences, plan.rows, strict=True) if pair[1].num_sampled_positions]
            num_waiting = sum([seq.next_step_needs_tokens for seq, _ in sampled])
            plan.runs_ahead = num_waiting <= _MAX_SKIPPED * len(plan.rows) and not any(
                planned.draft_tokens for _, planned in sampled
            )
        for seq, planned in zip(self.sequences, plan.rows, strict=True):
            seq.num_computed_tokens += planned.num_tokens - len(planned.draft_tokens)
            if plan.runs_ahead:
                seq.num_awaited_tokens += planned.num_sampled_positions

    def roll_back(self) -> list[Sequence]:
        """Undo `mark_in_flight`. Returns the sequences that have not ended since."""
        alive = [
            (seq, planned) for seq, planned in zip(self.sequences, self.plan.rows, strict=True) if not seq.has_ended
        ]
        for seq, planned in alive:
            seq.num_computed_tokens -= planned.num_tokens - len(planned.draft_tokens)
            if self.plan.runs_ahead:
                seq.num_awaited_tokens -= planned.num_sampled_positions
        return [seq for seq, _ in alive]


def _admission(seq: Sequence, row: int) -> Admission:
    return Admission(
        row=row,
        packed_tokens=seq.token_ids.tobytes(),
        num_prompt_tokens=seq.num_prompt_tokens,
        block_tables=[list(table) for table in seq.block_tables],
        params=seq.params,
        stop_token_ids=seq.request.eos_token_ids + seq.params.stop_token_ids,
        seed=seq.seed,
        index=seq.index,
        adapter_slot=seq.adapter_slot,
        pooling=seq.request.pooling,
        second_start=seq.request.prompt.second_start,
        media=seq.request.prompt.media,
        is_embedded=seq.request.prompt.is_embedded,
    )
