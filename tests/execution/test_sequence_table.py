"""The arrays of a step against the same step put together token by token in Python."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.execution.cpu_device import CpuDevice
from octavo.execution.device_tables import DeviceTables
from octavo.execution.sequence_table import SequenceTable
from octavo.execution.step_arrays import Padding, StepArrays, StepLayout, StepLimits, StepShape, pad
from octavo.kv_cache.groups import CacheGroup, LayerCacheSpec
from octavo.request import pack_tokens
from octavo.sampling.sampling_table import Samples
from octavo.sampling_params import SamplingParams
from octavo.step_plan import Admission, NewBlock, PlannedRow, StepPlan

MAX_SEQS, MAX_TOKENS, MAX_LEN, SIZE = 6, 40, 29, 4
MAX_BLOCKS = 8
GROUPS = (
    CacheGroup(LayerCacheSpec("full", 2, 16, 16), (0, 2), 0),
    CacheGroup(LayerCacheSpec("window", 2, 16, 16, window=8), (1, 3), 0),
)
LARGEST = StepShape(MAX_TOKENS, MAX_SEQS, MAX_TOKENS, 0)
LAYOUT = StepLayout(StepLimits(LARGEST, len(GROUPS), MAX_BLOCKS), LARGEST)
Tables = dict[int, list[list[int]]]  # by row, then by group


def admission(row: int, tokens: list[int], blocks: list[list[int]]) -> Admission:
    return Admission(row, pack_tokens(tokens), len(tokens), blocks, SamplingParams(), [], 0, 0)


def table() -> SequenceTable:
    return SequenceTable(MAX_SEQS, MAX_LEN, SIZE, GROUPS)


def test_tables_that_no_memory_holds_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="of 1048576 sequences of 1073741824 tokens do not fit into the memory; lower"
    ):
        SequenceTable(1 << 20, 1 << 30, SIZE, GROUPS)


def arrays() -> StepArrays[NDArray[Any]]:
    return LAYOUT.on_host(np.zeros(LAYOUT.num_bytes, np.uint8))


def naive(plan: StepPlan, tokens: dict[int, list[int]], blocks: Tables) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {
        "token_ids": [], "positions": [], "slot_mapping": [[] for _ in GROUPS], "query_start_loc": [0],
        "seq_lens": [], "sample_rows": [],
    }  # fmt: skip
    for planned in plan.rows:
        row, end = planned.row, planned.num_computed + planned.num_tokens
        known = tokens[row][: end - len(planned.draft_tokens)] + list(planned.draft_tokens)
        for position in range(planned.num_computed, end):
            found["token_ids"].append(known[position])
            found["positions"].append(position)
            for group, slots in enumerate(found["slot_mapping"]):
                slots.append(blocks[row][group][position // SIZE] * SIZE + position % SIZE)
        num_tokens = len(found["token_ids"])
        found["query_start_loc"].append(num_tokens)
        found["seq_lens"].append(end)
        if planned.num_sampled_positions:
            found["sample_rows"] += range(num_tokens - planned.num_sampled_positions, num_tokens)
            found["sample_rows"] += [num_tokens - 1] * (planned.num_last_samples - 1)
    return found


def naive_samples(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(row, fork, tokens before the sample)"""
    found = []
    for planned in plan.rows:
        end = planned.num_computed + planned.num_tokens
        if planned.num_sampled_positions:
            found += [(planned.row, 0, end - behind) for behind in reversed(range(planned.num_sampled_positions))]
            found += [(planned.row, fork, end) for fork in range(1, planned.num_last_samples)]
    return found


def assert_equal(t: SequenceTable, plan: StepPlan, tokens: dict[int, list[int]], blocks: Tables) -> None:
    found = arrays()
    row_of, samples = t.gather(plan, found)
    expected = naive(plan, tokens, blocks)
    for name, values in expected.items():
        length = len(values[0]) if name == "slot_mapping" else len(values)
        assert getattr(found, name)[..., :length].tolist() == values, name
    for s, planned in enumerate(plan.rows):
        used = -(-expected["seq_lens"][s] // SIZE)
        for group in range(len(GROUPS)):
            assert found.block_tables[group, s, :used].tolist() == blocks[planned.row][group][:used]
    assert row_of.tolist() == [planned.row for planned in plan.rows for _ in range(planned.num_tokens)]
    columns = samples.rows, samples.forks, samples.lengths
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == naive_samples(plan)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[StepPlan, dict[int, list[int]], Tables]]:
    """Plans that follow each other on one table, with the tokens and blocks that each row has by then."""
    tokens: dict[int, list[int]] = {}
    blocks: Tables = {}
    history = []
    numbers = st.integers(0, 10_000)
    for _ in range(draw(st.integers(1, 4))):
        plan = StepPlan()
        rows = draw(st.permutations(range(MAX_SEQS)))[: draw(st.integers(1, MAX_SEQS))]
        room = MAX_TOKENS
        for i, row in enumerate(rows):
            if row not in tokens or draw(st.booleans()):
                tokens[row] = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=MAX_LEN))
                blocks[row] = [draw(st.lists(numbers, min_size=MAX_BLOCKS, max_size=MAX_BLOCKS)) for _ in GROUPS]
                plan.admissions.append(admission(row, list(tokens[row]), [list(b) for b in blocks[row]]))
            else:
                for position in draw(st.lists(st.integers(0, MAX_BLOCKS - 1), max_size=3, unique=True)):
                    group = draw(st.integers(0, len(GROUPS) - 1))
                    blocks[row][group][position] = draw(numbers)
                    plan.new_blocks.append(NewBlock(row, group, position, blocks[row][group][position]))
            computed = draw(st.integers(0, len(tokens[row]) - 1))
            count = draw(st.integers(1, min(len(tokens[row]) - computed, room - (len(rows) - i - 1))))
            draft_tokens: tuple[int, ...] = ()
            num_last_samples = 1
            if computed + count == len(tokens[row]):
                num_draft_tokens = draw(
                    st.integers(0, max(0, min(3, MAX_LEN - len(tokens[row]), room - count - len(rows))))
                )
                draft_tokens = tuple(draw(st.lists(numbers, min_size=num_draft_tokens, max_size=num_draft_tokens)))
                count += num_draft_tokens
            elif draw(st.booleans()):
                num_last_samples = draw(st.integers(1, 3))
            num_sampled_positions = draw(st.integers(0, 1)) if not draft_tokens else 1 + len(draft_tokens)
            room -= count
            plan.rows.append(PlannedRow(row, computed, count, num_sampled_positions, num_last_samples, draft_tokens))
        history.append((plan, deepcopy(tokens), deepcopy(blocks)))
    return history


@settings(max_examples=100, derandomize=True, deadline=None)
@given(histories())
def test_gathering_equals_building_the_batch_token_by_token(
    history: list[tuple[StepPlan, dict[int, list[int]], Tables]],
) -> None:
    t = table()
    for plan, tokens, blocks in history:
        t.update(plan)
        assert_equal(t, plan, tokens, blocks)


def test_a_row_of_the_longest_length_has_room_for_its_last_sampled_token() -> None:
    t = table()
    blocks = [list(range(MAX_BLOCKS)), list(range(MAX_BLOCKS))]
    t.update(StepPlan(admissions=[admission(MAX_SEQS - 1, list(range(MAX_LEN)), blocks)]))
    t.tokens[MAX_SEQS - 1, MAX_LEN] = 5
    found = arrays()
    t.gather(StepPlan(rows=[PlannedRow(MAX_SEQS - 1, 0, MAX_LEN, 1)]), found)
    assert found.token_ids[:MAX_LEN].tolist() == list(range(MAX_LEN))
    assert found.sample_rows[0] == MAX_LEN - 1


def test_tokens_behind_a_wrong_guess_do_not_stand() -> None:
    t = table()
    t.update(StepPlan(admissions=[admission(0, [1, 2, 3], [[4], [4]]), admission(1, [7], [[5], [5]])]))
    plan = StepPlan(rows=[PlannedRow(0, 2, 4, 4, draft_tokens=(8, 9, 10)), PlannedRow(1, 0, 1, 1)])
    samples = t.gather(plan, arrays()).samples
    tokens = np.array([8, 6, 5, 4, 3])
    stands = samples.valid(tokens)
    assert stands.tolist() == [True, True, False, False, True]
    t.append(Samples(samples.rows[stands], samples.forks[stands], samples.lengths[stands]), tokens[stands])
    assert t.tokens[0, :5].tolist() == [1, 2, 3, 8, 6]
    assert t.num_known[:2].tolist() == [5, 2]


@pytest.mark.parametrize("seed", range(20))
def test_a_device_has_the_tables_of_a_steps_rows_whatever_became_of_the_plans_before(seed: int) -> None:
    """Some plans have no step, some steps fail, and some have several rows or only some of the changed ones."""
    rng, t = random.Random(seed), table()
    tables = DeviceTables(CpuDevice(), t)
    device, lengths = np.zeros((len(GROUPS), MAX_SEQS + 1, MAX_BLOCKS), np.int32), dict[int, int]()
    for _ in range(60):
        admitted = rng.sample(range(MAX_SEQS), rng.randrange(3))
        lengths |= {row: rng.randrange(1, 4) for row in admitted}
        blocks = {row: [rng.choices(range(1, 99), k=lengths[row]) for _ in GROUPS] for row in admitted}
        grown = [row for row in lengths if row not in admitted and lengths[row] < MAX_BLOCKS and rng.random() < 0.3]
        new = [
            NewBlock(row, group, lengths[row], rng.randrange(1, 99)) for row in grown for group in range(len(GROUPS))
        ]
        lengths |= {row: lengths[row] + 1 for row in grown}
        plan = StepPlan(admissions=[admission(row, [1], blocks[row]) for row in admitted], new_blocks=new)
        t.update(plan)
        tables.note_changes(plan)
        for _ in range(rng.randrange(3)):
            rows = [PlannedRow(row, 0, 1, 1) for row in lengths if rng.random() < 0.5]
            places, sent = tables.updates(rows)
            if rng.random() < 0.3:
                continue  # the device lacks memory
            device.reshape(-1)[places] = sent
            tables.note_sent(rows)
            for planned in rows:
                length = lengths[planned.row]
                assert (device[:, planned.row, :length] == t.blocks[:, planned.row, :length]).all()


def test_a_layout_gives_each_array_bytes_of_its_own_and_pads_what_lies_behind_a_step() -> None:
    largest = StepShape(7, 5, 6, 4)
    limits = StepLimits(largest, groups=2)
    layout = StepLayout(limits, largest)
    buffer = np.full(layout.num_bytes, 0xA5, np.uint8)
    found = layout.on_host(buffer)
    values = {field.name: 10 + i for i, field in enumerate(fields(StepArrays))}
    for name, value in values.items():
        getattr(found, name)[...] = value
    for name, value in values.items():
        assert (getattr(found, name) == value).all(), f"{name} shares bytes with another array"
    on_device = layout.on_device(torch.from_numpy(buffer), lambda array, dtype: array.view(getattr(torch, dtype)))
    for name, value in values.items():
        assert (getattr(on_device, name) == value).all()
    pad(found, limits, StepShape(3, 2, 1, 0), Padding(num_tokens=3, no_row=9, no_place=99))
    slot, owner = values["slot_mapping"], values["seq_table_rows"]
    assert found.slot_mapping.tolist() == [[slot, slot, slot, -1, -1, -1, -1]] * 2
    assert found.query_start_loc[3:].tolist() == [3, 3, 3]
    assert found.seq_table_rows.tolist() == [owner, owner, 9, 9, 9]
    assert found.sample_table_rows[1:].tolist() == [9] * 5
    assert found.block_places.tolist() == [99] * 4


def test_each_guess_leaves_its_state_in_a_block_of_its_own() -> None:
    groups = (*GROUPS[:1], CacheGroup(LayerCacheSpec("state", num_bytes=64), (1,), 1))
    t = SequenceTable(MAX_SEQS, MAX_LEN, SIZE, groups)
    layout = StepLayout(StepLimits(LARGEST, len(groups), t.max_blocks), LARGEST)
    found = layout.on_host(np.zeros(layout.num_bytes, np.uint8))
    plan = StepPlan(
        admissions=[admission(row, [7] * 9, [[0, 1, 2], [10 * row + 1]]) for row in range(3)],
        new_blocks=[NewBlock(1, 1, 0, 15), NewBlock(1, 1, 1, 16), NewBlock(1, 1, 2, 17)],
        rows=[PlannedRow(0, 4, 3, 0), PlannedRow(1, 8, 3, 3, 1, (5, 6)), PlannedRow(2, 8, 1, 1)],
    )
    t.update(plan)
    t.gather(plan, found)
    assert found.slot_mapping[1, :7].tolist() == [1, 1, 1, 15, 16, 17, 21]
