"""The arrays of a step against the same step put together token by token in Python."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.batch import StepBatch
from octavo.execution.step_batch import SequenceTable
from octavo.plan import Admission, StepPlan
from octavo.sampling_params import SamplingParams

MAX_SEQS, MAX_TOKENS, MAX_LEN, SIZE = 6, 40, 29, 4
MAX_BLOCKS = 8


def admission(row: int, tokens: list[int], blocks: list[int]) -> Admission:
    return Admission(row, tokens, len(tokens), blocks, SamplingParams(), [], 0, 0)


def table() -> SequenceTable:
    return SequenceTable(MAX_SEQS, MAX_TOKENS, MAX_LEN, SIZE)


def naive(plan: StepPlan, tokens: dict[int, list[int]], blocks: dict[int, list[int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {
        "token_ids": [], "positions": [], "slot_mapping": [], "query_start_loc": [0], "seq_lens": [], "sample_rows": [],
    }  # fmt: skip
    for row, computed, count, samples in zip(
        plan.rows, plan.num_computed, plan.num_tokens, plan.num_samples, strict=True
    ):
        for position in range(computed, computed + count):
            found["token_ids"].append(tokens[row][position])
            found["positions"].append(position)
            found["slot_mapping"].append(blocks[row][position // SIZE] * SIZE + position % SIZE)
        found["query_start_loc"].append(len(found["token_ids"]))
        found["seq_lens"].append(computed + count)
        found["sample_rows"] += [len(found["token_ids"]) - 1] * samples
    return found


def assert_equal(batch: StepBatch, plan: StepPlan, tokens: dict[int, list[int]], blocks: dict[int, list[int]]) -> None:
    for name, values in naive(plan, tokens, blocks).items():
        assert getattr(batch, name).tolist() == values, name
    for s, row in enumerate(plan.rows):
        used = -(-int(batch.seq_lens[s]) // SIZE)
        assert batch.block_tables[s, :used].tolist() == blocks[row][:used]
    assert batch.num_tokens == plan.total_tokens
    dtypes = [
        batch.token_ids.dtype, batch.positions.dtype, batch.slot_mapping.dtype, batch.query_start_loc.dtype,
        batch.seq_lens.dtype, batch.block_tables.dtype, batch.sample_rows.dtype,
    ]  # fmt: skip
    i32, i64 = torch.int32, torch.int64
    assert dtypes == [i32, i64, i64, i32, i32, i32, i64]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[StepPlan, dict[int, list[int]], dict[int, list[int]]]]:
    """Plans that follow each other on one table, with the tokens and blocks that each row has by then."""
    tokens: dict[int, list[int]] = {}
    blocks: dict[int, list[int]] = {}
    history = []
    for _ in range(draw(st.integers(1, 4))):
        plan = StepPlan()
        rows = draw(st.permutations(range(MAX_SEQS)))[: draw(st.integers(1, MAX_SEQS))]
        room = MAX_TOKENS
        for i, row in enumerate(rows):
            if row not in tokens or draw(st.booleans()):
                tokens[row] = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=MAX_LEN))
                blocks[row] = draw(st.lists(st.integers(0, 10_000), min_size=MAX_BLOCKS, max_size=MAX_BLOCKS))
                plan.admissions.append(admission(row, list(tokens[row]), list(blocks[row])))
            else:
                for position in draw(st.lists(st.integers(0, MAX_BLOCKS - 1), max_size=3, unique=True)):
                    blocks[row][position] = draw(st.integers(0, 10_000))
                    plan.new_blocks.append((row, position, blocks[row][position]))
            computed = draw(st.integers(0, len(tokens[row]) - 1))
            count = draw(st.integers(1, min(len(tokens[row]) - computed, room - (len(rows) - i - 1))))
            room -= count
            plan.rows.append(row)
            plan.num_computed.append(computed)
            plan.num_tokens.append(count)
            # A sample has a row, or will have one when it becomes a fork.
            num_free = MAX_SEQS - sum(plan.num_samples) - (len(rows) - i - 1)
            plan.num_samples.append(draw(st.integers(0, min(3, num_free))))
        history.append((plan, {r: list(t) for r, t in tokens.items()}, {r: list(b) for r, b in blocks.items()}))
    return history


@settings(max_examples=300, derandomize=True, deadline=None)
@given(histories())
def test_gathering_equals_building_the_batch_token_by_token(
    history: list[tuple[StepPlan, dict[int, list[int]], dict[int, list[int]]]],
) -> None:
    t = table()
    for plan, tokens, blocks in history:
        t.update(plan)
        assert_equal(t.build(plan), plan, tokens, blocks)


def test_a_row_of_the_longest_length_has_room_for_its_last_sampled_token() -> None:
    t = table()
    t.update(StepPlan(admissions=[admission(MAX_SEQS - 1, list(range(MAX_LEN)), list(range(MAX_BLOCKS)))]))
    t.tokens[MAX_SEQS - 1, MAX_LEN] = 5
    plan = StepPlan(rows=[MAX_SEQS - 1], num_computed=[0], num_tokens=[MAX_LEN], num_samples=[1])
    batch = t.build(plan)
    assert batch.token_ids.tolist() == list(range(MAX_LEN))
    assert batch.sample_rows.tolist() == [MAX_LEN - 1]


def test_batches_are_views_of_buffers_that_live_as_long_as_the_table() -> None:
    t = table()
    t.update(StepPlan(admissions=[admission(0, [1, 2, 3], [4])]))
    plan = StepPlan(rows=[0], num_computed=[0], num_tokens=[3], num_samples=[1])
    first = t.build(plan)
    addresses = [x.data_ptr() for x in (first.token_ids, first.positions, first.slot_mapping, first.block_tables)]
    second = t.build(plan)
    assert [x.data_ptr() for x in (second.token_ids, second.positions, second.slot_mapping, second.block_tables)] == (
        addresses
    )
    assert np.shares_memory(second.block_tables.numpy(), first.block_tables.numpy())
