"""A simulated device: carries out plans as the runner does, with numbers in the place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.request import TokenLogprobs
from octavo.sampling.draft_verification import count_valid_tokens
from octavo.sequence import Sequence
from octavo.step_plan import Admission, PlannedRow, StepPlan, StepResult
from tests.scheduling.truth import FAILURE, Truth, advance, choose, likelihoods, root, visible

if TYPE_CHECKING:
    from tests.scheduling.simulation import Simulation


@dataclass
class Row:
    """What the runner keeps of a running sequence."""

    admission: Admission
    token_ids: list[int]
    block_tables: list[list[int]]


class Device:
    """Carries out plans as the runner does, with numbers in the place of keys and values."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        setup = simulation.setup
        self.block_size = setup.block_size
        self.groups = setup.groups
        self.memory = [[0] * (size * setup.block_size) for size in setup.pool_sizes()]  # by pool
        self.host_memory = [[0] * (setup.num_host_blocks * setup.block_size) for _ in self.memory]
        self.rows: dict[int, Row] = {}
        self._truths: dict[tuple[str, int], Truth] = {}  # what each token's slots must hold, by sequence

    def execute(self, plan: StepPlan) -> StepResult:
        for moves, memory, host_memory in zip(plan.moves, self.memory, self.host_memory, strict=True):
            self._move(moves.swap_out, memory, host_memory)
            self._move(moves.copy, memory, memory)
            self._move(moves.swap_in, host_memory, memory)
        for admission in plan.admissions:
            tables = [list(table) for table in admission.block_tables]
            self.rows[admission.row] = Row(admission, admission.token_ids.tolist(), tables)
        for row, group, position, block in plan.new_blocks:
            table = self.rows[row].block_tables[group]
            table[position : position + 1] = [block]
        for row, position, token in plan.new_tokens:
            self.rows[row].token_ids[position:] = [token]
        sequences = {seq.row: seq for seq in self.simulation.scheduler.queues.running}
        result = StepResult(tokens=[])
        for planned in plan.rows:
            states = self._compute(planned, sequences[planned.row])
            self._sample(planned, sequences[planned.row], states[len(states) - planned.num_sampled_positions :], result)
        for seq in self.simulation.scheduler.queues:
            self._check_memory(seq)
        assert all(set(memory[: self.block_size]) == {0} for memory in self._memories_with_null_block()), (
            "the null block was written"
        )
        return result

    def _memories_with_null_block(self) -> list[list[int]]:
        return [self.memory[group.pool] for group in self.groups if group.spec.kind == "window"]

    def _move(self, pairs: list[tuple[int, int]], source: list[int], destination: list[int]) -> None:
        """All sources are read before anything is written, as with numpy's and torch's indexing."""
        size = self.block_size
        contents = [source[a * size : (a + 1) * size] for a, _ in pairs]
        for (_, b), content in zip(pairs, contents, strict=True):
            destination[b * size : (b + 1) * size] = content

    def _compute(self, planned: PlannedRow, seq: Sequence) -> list[int]:
        """Compute the tokens of a row: read what each group can see, write what it keeps. Returns their states."""
        row = self.rows[planned.row]
        end = planned.num_computed + planned.num_tokens - len(planned.draft_tokens)
        token_ids = [*row.token_ids[planned.num_computed : end], *planned.draft_tokens]
        assert len(token_ids) == planned.num_tokens, "the runner does not know the tokens"
        states = []
        for position, token in enumerate(token_ids, start=planned.num_computed):
            seen = [
                tuple(self.memory[group.pool][self._slot(row, g, p, end)] for p in visible(group.spec, position))
                for g, group in enumerate(self.groups)
            ]
            state = advance(root(seq.request.prompt.cache_salt), token, position, seen)
            states.append(state)
            for g, group in enumerate(self.groups):
                slot = self._slot(row, g, position, end)
                if group.spec.kind == "state":
                    self.memory[group.pool][slot : slot + self.block_size] = [state + g] * self.block_size
                else:
                    self.memory[group.pool][slot] = state + g
        return states

    def _slot(self, row: Row, g: int, position: int, end: int) -> int:
        """Where a group has what it keeps of a token; tokens from `end` on are guesses."""
        table, size = row.block_tables[g], self.block_size
        if self.groups[g].spec.kind == "state":
            return table[max(0, position + 1 - end)] * size
        return table[position // size] * size + position % size

    def _check_memory(self, seq: Sequence) -> None:
        """The blocks of a sequence hold exactly its own tokens, on the device or on the host."""
        name = seq.request.request_id, seq.index
        if seq.beam_search is not None:  # the next one of its index is another
            self._truths.pop(name, None)
        truth = self._truths.setdefault(name, Truth(self.simulation.setup, seq.request))
        for token in seq.token_ids[len(truth.states) :]:
            truth.append(token)
        num_computed = min(seq.num_computed_tokens, len(seq.token_ids))
        memories, tables = (self.host_memory, seq.host_blocks) if seq.host_blocks else (self.memory, seq.block_tables)
        size = self.block_size
        for g, (group, table) in enumerate(zip(self.groups, tables, strict=False)):
            memory = memories[group.pool]
            if group.spec.kind == "state":
                if num_computed == seq.num_computed_tokens > 0:  # else it is ahead of what the scheduler knows
                    assert memory[table[0] * size] == truth.states[num_computed - 1] + g, "a state is not its own"
                continue
            oldest = visible(group.spec, num_computed).start if group.spec.kind == "window" else 0
            for i in range(oldest // size, -(-num_computed // size)):
                first, count = max(oldest - i * size, 0), min(size, num_computed - i * size)
                found = memory[table[i] * size + first : table[i] * size + count]
                wanted = [state + g for state in truth.states[i * size + first : i * size + count]]
                assert found == wanted, f"{seq.request.request_id} reads what is not its own"

    def _sample(self, planned: PlannedRow, seq: Sequence, states: list[int], result: StepResult) -> None:
        """Sample after each of the last tokens, whose states these are; after a wrong guess it is for nothing."""
        row = self.rows[planned.row]
        admission = row.admission
        params = admission.params
        num_known = planned.num_computed + planned.num_tokens - len(planned.draft_tokens)
        sampled: list[int] = []
        result.logprobs = result.logprobs or []
        for i, state in enumerate(states):
            num_output = num_known + i - admission.num_prompt_tokens
            masked = admission.stop_token_ids if num_output < params.min_tokens else []
            for fork in range(planned.num_last_samples):
                sampled.append(choose(state, admission.seed, admission.index + fork, masked))
                result.logprobs.append(TokenLogprobs([sampled[-1]], [-1.0], 1) if params.logprobs is not None else None)
            if params.use_beam_search:
                num_offered = params.num_sequences + len(admission.stop_token_ids)
                best = likelihoods(state, masked)[:num_offered]
                result.logprobs[-1] = TokenLogprobs([0, *(t for t, _ in best)], [0.0, *(v for _, v in best)], 1)
        if sampled:
            count = count_valid_tokens(planned.draft_tokens, sampled)
            self.simulation.seen["right guess"] += count - 1
            self.simulation.seen["wrong guess"] += count <= len(planned.draft_tokens)
            row.token_ids[num_known:] = sampled[:count]
            if self.simulation.requests[seq.request.request_id].fails_at == num_known - admission.num_prompt_tokens:
                result.errors[planned.row] = FAILURE
        result.tokens += sampled
        if params.prompt_logprobs is not None and len(admission.token_ids) == admission.num_prompt_tokens:
            end = min(num_known, admission.num_prompt_tokens - 1)
            predicted = row.token_ids[planned.num_computed + 1 : max(end, planned.num_computed) + 1]
            result.prompt_logprobs[planned.row] = [TokenLogprobs([token], [-1.0], 1) for token in predicted]
