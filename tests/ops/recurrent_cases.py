"""Layers with a state, for the tests of all backends: arguments, and sequences in steps of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.ops.kernel_cases import random
from tests.ops.tensors import OverTensors

LENGTHS = (1, 19, 6, 33)
CHUNKS = ([1, 2, 0, 17], [0, 3, 5, 1], [1, 9, 1, 0])  # of a first step, by sequence
Operation = Callable[..., Tensor]
# An operation's name, what it has a row of for each token, its other arguments, and what the size of a state follows
# from: arguments of `num_scan_floats`, or the number itself.
Case = tuple[str, list[Tensor], list[Any], tuple[int, ...]]


def conv(kernel: int, width: int, activation: str, dtype: torch.dtype) -> Case:
    rows = [random(0, sum(LENGTHS), 2 * width, dtype=dtype)[:, width:]]
    return "causal_conv", rows, [random(1, kernel, width), random(2, width), activation], ((kernel - 1) * width,)


def scan(heads: int, head_size: int, groups: int, size: int, wide: bool, dtype: torch.dtype) -> Case:
    channels, num = heads * head_size, sum(LENGTHS)
    x, time, b, c = (
        random(i, num, width, dtype=dtype) for i, width in enumerate((channels, heads, groups * size, groups * size))
    )
    rates = -random(5, size, channels).exp() if wide else -random(5, channels).exp()
    others = [rates, random(6, channels), random(7, heads), (0.1, 1.5)]
    rows = [x, time, b.view(num, groups, size), c.view(num, groups, size)]
    return "selective_scan", rows, others, (channels, groups, size)


def delta(
    key_heads: int, heads: int, size: int, width: int, dtype: torch.dtype, by_element: bool = False
) -> Case:  # fmt: skip
    num = sum(LENGTHS)
    query, key = (torch.nn.functional.normalize(random(i, num, key_heads, size), dim=-1).to(dtype) for i in range(2))
    value, decay, beta = random(2, num, heads, width, dtype=dtype), *random(3, 2, num, heads, dtype=dtype)
    if by_element:
        decay = random(6, num, heads * size, dtype=dtype)
    others = [-random(4, heads).exp(), random(5, decay.shape[1]), 1.5]
    return "gated_delta", [query, key, value, decay, beta], others, (heads * width, heads, size)


def neighbours_and_alternating(ops: OverTensors, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Outputs of the same value heads, laid by key heads and by turns."""
    _, rows, (rates, bias, scale), sizes = delta(2, 4, 12, 20, torch.float32)
    by_turns = torch.tensor([0, 2, 1, 3])
    found = []
    for order in (torch.arange(4), by_turns):
        query, key, *of_values = (x.to(device or x.device) for x in rows)
        of_values, others = [x[:, order] for x in of_values], [x[order].to(query.device) for x in (rates, bias)]
        states = torch.full((1, ops.num_scan_floats(*sizes)), float("nan"), device=query.device)
        places = one_sequence(len(query), query.device)
        out = ops.gated_delta(query, key, *of_values, *others, scale, states, *places, 0.0, order is by_turns)
        found.append(out.unflatten(1, (4, -1)))
    return found[0][:, by_turns.to(found[0].device)], found[1]


def one_sequence(num_tokens: int, device: torch.device | None = None) -> list[Tensor]:
    """Slots, bounds and length of a sequence whose state is in block 0."""
    sequence = ([0, num_tokens], [num_tokens])
    return [
        torch.zeros(num_tokens, dtype=torch.int64, device=device),
        *(torch.tensor(values, dtype=torch.int32, device=device) for values in sequence),
    ]


def recurrence(width: int, dtype: torch.dtype) -> Case:
    rows = [random(i, sum(LENGTHS), 2 * width, dtype=dtype)[:, width:] for i in range(3)]
    return "gated_recurrence", rows, [-random(4, width).exp(), random(5, width), random(6, width)], (width, 1, 1)


CASES: dict[str, Callable[[torch.dtype], Case]] = {
    "conv 4": lambda dtype: conv(4, 40, "silu", dtype),
    "conv 3, as it is, partial vectors": lambda dtype: conv(3, 37, "identity", dtype),
    "conv 1": lambda dtype: conv(1, 5, "silu", dtype),
    "conv 8": lambda dtype: conv(8, 16, "silu", dtype),
    "mamba 1": lambda dtype: scan(45, 1, 1, 6, True, dtype),
    "mamba 1, two groups": lambda dtype: scan(42, 1, 2, 6, True, dtype),
    "mamba 2": lambda dtype: scan(6, 16, 2, 32, False, dtype),
    "mamba 2, heads across tiles": lambda dtype: scan(6, 11, 3, 7, False, dtype),
    "gated delta": lambda dtype: delta(2, 4, 12, 20, dtype),
    "gated delta, whole tiles": lambda dtype: delta(2, 2, 16, 32, dtype),
    "gated delta, decays by element": lambda dtype: delta(2, 4, 12, 20, dtype, by_element=True),
    "gated recurrence": lambda dtype: recurrence(37, dtype),
}


class Run:
    """Sequences of `LENGTHS` tokens, a chunk of each a step."""

    def __init__(self, ops: OverTensors, case: Case, device: torch.device | None = None) -> None:
        name, rows, others, sizes = case
        self.device = device or torch.device("cpu")
        self.rows = [row.to(self.device) for row in rows]
        self.others = [x.to(self.device) if isinstance(x, Tensor) else x for x in others]
        num_floats = sizes[0] if len(sizes) == 1 else ops.num_scan_floats(*sizes)
        self.operation: Operation = getattr(ops, name)
        # Nothing may be read that was not written; and the floats behind a state are not its own.
        self.states = torch.full((16, num_floats + 3), float("nan"), device=self.device)
        self.blocks, self.spare = [5, 0, 6, 2], list(range(7, 16))
        self.starts = [sum(LENGTHS[:s]) for s in range(len(LENGTHS))]

    def step(self, done: list[int], chunks: list[int], draft_tokens: list[list[int]] | None = None) -> list[Tensor]:
        """`draft_tokens` are the blocks that the last tokens of each sequence leave their states in."""
        places = torch.cat([torch.arange(s + d, s + d + c) for s, d, c in zip(self.starts, done, chunks, strict=True)])
        slots: list[int] = []
        for block, chunk, own in zip(self.blocks, chunks, draft_tokens or [[]] * len(chunks), strict=True):
            slots += [*[block] * (chunk - len(own)), *own]
        bounds = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
        lengths = torch.tensor([d + c for d, c in zip(done, chunks, strict=True)], dtype=torch.int32)
        states = self.states[:, :-3]
        sequences = (x.to(self.device) for x in (torch.tensor(slots), bounds, lengths))
        out = self.operation(*(row[places] for row in self.rows), *self.others, states, *sequences)
        return list(out.split(chunks))

    def all(self, first: list[int]) -> list[Tensor]:
        """In steps of `first` tokens of each sequence, of one, of one and up to two guesses, not all of which are
        right, and of all the others -> each one's outputs."""
        done, outputs = [0] * len(LENGTHS), [list[Tensor]() for _ in LENGTHS]
        guessing = [3] * len(LENGTHS)
        for wanted in (first, [1] * len(LENGTHS), guessing, list(LENGTHS)):
            chunks = [min(w, length - d) for w, length, d in zip(wanted, LENGTHS, done, strict=True)]
            if not sum(chunks):
                continue
            draft_tokens = [[self.spare.pop() for _ in range(c - 1)] if wanted is guessing else [] for c in chunks]
            for s, (out, own) in enumerate(zip(self.step(done, chunks, draft_tokens), draft_tokens, strict=True)):
                num_wrong = min(s % 3, len(own))
                if own[: len(own) - num_wrong]:
                    self.blocks[s] = own[len(own) - num_wrong - 1]
                outputs[s].append(out[: len(out) - num_wrong])
                done[s] += len(outputs[s][-1])
        assert self.states[:, -3:].isnan().all() and self.states[[1, 3, 4]].isnan().all()
        return [torch.cat(parts) for parts in outputs]
