"""Draft heads: they read the hidden states of a step as soon as its tokens are known.

A chain head (EAGLE, EAGLE-3, multi-token prediction) has its own runner over the same sequences and blocks, like a
draft model. Right after a step it computes the step's valid positions, each with the token that follows it, and samples
the first draft token. For more draft tokens it continues from its own hidden states. Medusa's heads keep only the last
hidden state of each sequence. Draft tokens are sampled with the random numbers that the model will use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from octavo.errors import DeviceMemoryError
from octavo.execution.device import Device
from octavo.execution.model_drafter import DraftBatch, changes_of
from octavo.execution.runner import Runner
from octavo.execution.submitted_step import SubmittedStep
from octavo.models.draft_heads import ChainHead, MedusaHeads
from octavo.ops import Array, Ops
from octavo.sampling.draft_verification import count_valid_tokens
from octavo.sampling.sampler import sample_tokens, write_settings
from octavo.sampling.sampling_table import Samples, SamplingTable
from octavo.step_plan import PlannedRow, StepPlan, StepResult


class _RowFeatures:
    """One row of features for each sequence, on the device: [rows, F]."""

    def __init__(self, array: Array, ops: Ops) -> None:
        self._array: Any = array
        self._ops = ops

    def put(self, rows: Sequence[int], features: Array) -> None:
        """Store features [len(rows), F] in `rows`."""
        self._array[cast(Any, self._ops.place(np.array(rows, np.int64)))] = features

    def take(self, rows: Sequence[int]) -> Array:
        return self._ops.take_rows(self._array, self._ops.place(np.array(rows, np.int64)))


class ChainDrafter:
    """Makes draft tokens with a chain head, run by `runner`, for the sequences of `target`. The head's cache is in the
    blocks of group `group`."""

    def __init__(self, head: ChainHead, runner: Runner, target: Runner, group: int, device: Device, dtype: str) -> None:
        self._head, self._runner, self._target, self._device, self._group = head, runner, target, device, group
        self._ops = runner.ops
        runner.submitter.set_draft_hooks(keeps_features=True)
        target.submitter.set_draft_hooks(keeps_features=True, warm_up_drafter=self._read)
        table = target.sequence_table
        self._max_len = table.tokens.shape[1] - 1
        # By row: the number of positions that the head has computed, if it has a draft token for the next one;
        # otherwise -1.
        self._num_computed = np.full(table.max_num_seqs, -1, np.int64)
        self._first_draft = np.zeros(table.max_num_seqs, np.int64)
        self._buffer: Any = device.zeros([runner.max_step_tokens, head.hidden_size], dtype)
        head.features = device.as_input(self._buffer)
        head.rows = device.as_input(self._ops.place(np.arange(runner.max_step_tokens, dtype=np.int64)))
        # The head's features of each row's last position.
        self._last = _RowFeatures(device.zeros([table.max_num_seqs, head.hidden_size], dtype), self._ops)

    def _read(self, features: Array) -> None:
        """Launch the kernels that `observe` and `draft` use on features [T, F], so that they are compiled at the
        start."""
        rows: Any = self._head.features_of(_first_rows(self._ops, features, len(cast(Any, features))))
        self._buffer[: len(rows)] = rows
        numbers = range(min(len(rows), len(self._num_computed)))
        self._last.put(numbers, rows[: len(numbers)])
        self._last.take(numbers)

    def draft(self, plan: StepPlan) -> DraftBatch:
        """Make draft tokens for the rows of a plan that ask for them."""
        num_shared_tokens = self._head.vocab_size if self._head.target_token_ids is None else 0
        num_groups = len(self._runner.sequence_table.blocks)
        self._runner.apply_updates(changes_of(plan, self._group, num_groups, num_shared_tokens))
        for admission in plan.admissions:
            self._num_computed[admission.row] = -1
        wanting = [planned for planned in plan.rows if planned.wants_drafts]
        ready = [planned for planned in wanting if self._num_computed[planned.row] == planned.num_computed]
        found = {planned.row: [int(self._first_draft[planned.row])] for planned in ready}
        try:
            while going := [p for p in ready if len(found[p.row]) < len(p.draft_tokens)]:
                self._continue(going, found)
        except DeviceMemoryError:
            pass  # use the tokens made so far; the step that verifies them needs more memory than this
        return DraftBatch({planned.row: found.get(planned.row, []) for planned in wanting})

    def _continue(self, rows: list[PlannedRow], found: dict[int, list[int]]) -> None:
        """Make one more draft token for each of the rows, and append it to `found`."""
        numbers = [planned.row for planned in rows]
        last, planned_rows = self._last, []
        for planned in rows:
            num_computed = planned.num_computed + len(found[planned.row]) - 1
            self._runner.sequence_table.set_known(planned.row, num_computed + 2)
            planned_rows.append(PlannedRow(planned.row, num_computed, 1, 1))

        def feed() -> None:
            self._buffer[: len(rows)] = last.take(numbers)

        self._device.compute.run(feed)
        step = self._runner.submit_rows(StepPlan(rows=planned_rows))
        for row, token in zip(numbers, step.result().tokens, strict=True):
            found[row].append(token)
        features = self._runner.submitter.features_of(step)
        self._device.compute.run(lambda: last.put(numbers, features))

    def observe(self, plan: StepPlan, step: SubmittedStep, result: StepResult) -> None:
        """Read a finished step of the model: compute its valid positions, and the first draft token after them."""
        last, rows, sources, ends = self._last, [], [], []
        if plan.runs_ahead and self._device.runs_ahead:  # another step has overwritten the features
            self._num_computed[[planned.row for planned in plan.rows]] = -1
            return
        for planned, begin, count in valid_rows(plan, result):
            end = planned.num_computed + count
            is_sampled = planned.num_sampled_positions > 0 and end + 1 < self._max_len
            rows.append(PlannedRow(planned.row, planned.num_computed, count, int(is_sampled)))
            sources.append(np.arange(begin, begin + count))
            ends.append(sum(map(len, sources)) - 1)
            self._runner.sequence_table.set_known(planned.row, end + 1)
            self._num_computed[planned.row] = -1
        source, features = np.concatenate(sources), self._target.submitter.features_of(step)

        def feed() -> None:
            taken = self._ops.take_rows(features, self._ops.place(source))
            self._buffer[: len(source)] = self._head.features_of(taken)

        self._device.compute.run(feed)
        try:
            own = self._runner.submit_rows(StepPlan(rows=rows))
        except DeviceMemoryError:
            return  # the head never computes these positions, and its later draft tokens are worse
        sampled = [(planned, end) for planned, end in zip(rows, ends, strict=True) if planned.num_sampled_positions]
        for (planned, _), token in zip(sampled, own.result().tokens, strict=True):
            self._first_draft[planned.row] = token
            self._num_computed[planned.row] = planned.num_computed + planned.num_tokens
        if sampled:
            numbers = [planned.row for planned, _ in sampled]
            places = np.array([end for _, end in sampled], np.int64)

            own_features = self._runner.submitter.features_of(own)

            def keep() -> None:
                last.put(numbers, self._ops.take_rows(own_features, self._ops.place(places)))

            self._device.compute.run(keep)


class MedusaDrafter:
    """Makes draft tokens with Medusa's heads for the sequences of `target`."""

    def __init__(self, heads: MedusaHeads, target: Runner, device: Device, dtype: str) -> None:
        self._heads, self._target, self._device, self._ops = heads, target, device, target.ops
        target.submitter.set_draft_hooks(keeps_features=True, warm_up_drafter=self._read)
        num_rows = target.sequence_table.max_num_seqs
        self._sampling = SamplingTable(num_rows)
        self._num_computed = np.full(num_rows, -1, np.int64)  # by row: position of its last features, or -1 without any
        self._last = _RowFeatures(device.zeros([num_rows, heads.hidden_size], dtype), self._ops)

    def _read(self, features: Array) -> None:
        """Like `ChainDrafter._read`, with sampling from the heads' logits."""
        numbers = range(min(len(cast(Any, features)), len(self._num_computed)))
        self._last.put(numbers, self._heads.features_of(_first_rows(self._ops, features, len(numbers))))
        for head in range(self._heads.num_heads):
            self._ops.argmax(self._heads.logits(head, self._last.take(numbers)))

    def draft(self, plan: StepPlan) -> DraftBatch:
        """Make draft tokens for the rows of a plan that ask for them."""
        for admission in changes_of(plan, 0, 0, self._target.model.vocab_size).admissions:
            self._sampling.admit(admission)
            self._num_computed[admission.row] = -1
        wanting = [planned for planned in plan.rows if planned.wants_drafts]
        ready = [planned for planned in wanting if self._num_computed[planned.row] == planned.num_computed]
        found: dict[int, list[int]] = {planned.row: [] for planned in ready}
        for head in range(self._heads.num_heads):
            if going := [planned for planned in ready if len(planned.draft_tokens) > head]:
                lengths = np.array([planned.num_computed + 1 + head for planned in going], np.int64)
                tokens = self._draft(head, np.array([planned.row for planned in going], np.int64), lengths)
                for planned, token in zip(going, tokens, strict=True):
                    found[planned.row].append(max(token, 0))
        return DraftBatch({planned.row: found.get(planned.row, []) for planned in wanting})

    def _draft(self, head: int, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[int]:
        """Return the tokens that a head samples for rows [N], whose lengths with earlier draft tokens are `lengths`
        [N]."""
        last, samples = self._last, Samples(rows, np.zeros_like(rows), lengths)
        batch = self._sampling.build(samples, self._target.sequence_table.tokens)
        settings = SimpleNamespace(
            temperature=np.zeros(len(rows), np.float32), top_k=np.zeros(len(rows), np.int64),
            top_p=np.zeros(len(rows), np.float32), min_p=np.zeros(len(rows), np.float32),
            uniforms=np.zeros(len(rows), np.float64),
        )  # fmt: skip
        if batch is not None:
            write_settings(settings, batch)
        drawn: list[Array] = []

        def work() -> None:
            placed = SimpleNamespace(**{name: self._ops.place(value) for name, value in vars(settings).items()})
            logits = self._heads.logits(head, last.take(rows.tolist()))
            best = self._ops.argmax(logits)
            drawn.append(sample_tokens(self._ops, logits, best, placed, batch, self._device.shares_memory).tokens)

        self._device.compute.run(work)
        done = self._device.compute.record()
        done.wait()
        tokens: list[int] = self._device.fetch(drawn, done)[0].tolist()
        return tokens

    def observe(self, plan: StepPlan, step: SubmittedStep, result: StepResult) -> None:
        """Keep the features of the last valid position of each row."""
        last, rows, places = self._last, [], []
        if plan.runs_ahead and self._device.runs_ahead:  # another step has overwritten the features
            self._num_computed[[planned.row for planned in plan.rows]] = -1
            return
        for planned, begin, count in valid_rows(plan, result):
            self._num_computed[planned.row] = -1
            if planned.num_sampled_positions:
                rows.append(planned.row)
                places.append(begin + count - 1)
                self._num_computed[planned.row] = planned.num_computed + count

        features = self._target.submitter.features_of(step)

        def keep() -> None:
            taken = self._ops.take_rows(features, self._ops.place(np.array(places, np.int64)))
            last.put(rows, self._heads.features_of(taken))

        if rows:
            self._device.compute.run(keep)


def _first_rows(ops: Ops, features: Array, count: int) -> Array:
    """Return the first rows, taken by index like the rows of a step."""
    return ops.take_rows(features, ops.place(np.arange(count)))


def valid_rows(plan: StepPlan, result: StepResult) -> Iterator[tuple[PlannedRow, int, int]]:
    """Yield each row of a finished plan, with its first token in the step and the number of its valid tokens."""
    begin = first = 0
    for planned in plan.rows:
        tokens = result.tokens[first : first + planned.num_samples]
        count = planned.num_tokens
        if planned.draft_tokens:
            count += count_valid_tokens(planned.draft_tokens, tokens) - 1 - len(planned.draft_tokens)
        yield planned, begin, count
        begin += planned.num_tokens
        first += planned.num_samples
