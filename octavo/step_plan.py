"""`StepPlan`, the scheduler's decisions for a step, and `StepResult`, the executor's report of the step. Both are plain
data that can cross processes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from octavo.pooling_params import PoolingParams
from octavo.request import MediaItem, TokenLogprobs
from octavo.sampling_params import SamplingParams
from octavo.step_cost import StepWork

DRAFT_PLACEHOLDER = -1  # stands for a draft token that the worker's draft model makes when the step runs


@dataclass(slots=True)
class BlockMoves:
    """Copies of whole blocks (source, destination) of one pool in a step, in the order of the fields: blocks are
    swapped out before anything overwrites them, and copied on write before swapped blocks come back."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)  # device -> host
    copy: list[tuple[int, int]] = field(default_factory=list)  # device -> device
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # host -> device

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.swap_out or self.copy or self.swap_in)


class AdapterMemory(NamedTuple):
    """The memory that a worker has for adapters."""

    num_pages: int  # on the device; 0 if the device uses the host's
    num_slots: int
    num_host_pages: int  # on the host, of the same size
    page_bytes: int


class AdapterLoad(NamedTuple):
    """Copy an adapter from the host to pages of the device, where kernels find it by its slot."""

    identity: str
    slot: int
    pages: list[int]


@dataclass(slots=True)
class Admission:
    """A sequence takes a row of the runner's tables. These fields are everything that the runner knows of the
    sequence."""

    row: int
    packed_tokens: bytes  # prompt and output so far, as int32
    num_prompt_tokens: int
    block_tables: list[list[int]]  # by cache group
    params: SamplingParams
    stop_token_ids: list[int]  # with end-of-sequence; masked until params.min_tokens are generated
    seed: int
    index: int  # index of its completion in the request
    adapter_slot: int = -1  # -1: no adapter
    pooling: PoolingParams | None = None
    second_start: int | None = None  # for this and the next two fields see `Prompt`
    media: tuple[MediaItem, ...] = ()
    is_embedded: bool = False

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return np.frombuffer(self.packed_tokens, np.int32)


class NewBlock(NamedTuple):
    """A changed entry of a block table."""

    row: int
    group: int
    position: int
    block: int


class PlannedRow(NamedTuple):
    """One sequence in a step."""

    row: int  # of the runner's tables
    num_computed: int  # tokens already in the cache
    num_tokens: int  # tokens to compute in this step, after num_computed; draft tokens included
    # Sample after this many of the last tokens (a model that pools: return their vectors). 0 within a prompt, otherwise
    # 1 + len(draft_tokens).
    num_sampled_positions: int
    num_last_samples: int = 1  # samples after the last token: more than one where siblings start
    draft_tokens: tuple[int, ...] = ()  # the last tokens to compute, or `DRAFT_PLACEHOLDER` for each

    @property
    def is_decode(self) -> bool:
        """Return whether the row computes one token, apart from draft tokens."""
        return self.num_tokens - len(self.draft_tokens) == 1

    @property
    def wants_drafts(self) -> bool:
        """Return whether the worker has still to make the row's draft tokens."""
        return bool(self.draft_tokens) and self.draft_tokens[0] == DRAFT_PLACEHOLDER

    @property
    def num_samples(self) -> int:
        return self.num_sampled_positions + self.num_last_samples - 1 if self.num_sampled_positions else 0


def new_row(
    row: int, num_computed: int, num_tokens: int, num_sampled_positions: int, num_last_samples: int, /
) -> PlannedRow:
    """Return a row without draft tokens. It takes less time than `PlannedRow`, and less than with keywords; this
    happens for every token."""
    return tuple.__new__(PlannedRow, (row, num_computed, num_tokens, num_sampled_positions, num_last_samples, ()))


class RowColumns(NamedTuple):
    """The fields of several `PlannedRow`s, each as a tuple with an entry for each row."""

    row: tuple[int, ...]
    num_computed: tuple[int, ...]
    num_tokens: tuple[int, ...]
    num_sampled_positions: tuple[int, ...]
    num_last_samples: tuple[int, ...]
    draft_tokens: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rows: Sequence[PlannedRow]) -> Self:
        """Return the columns of at least one row, in a third of the time that list comprehensions take."""
        return cls._make(zip(*rows, strict=True))

    @property
    def each_row_samples_once(self) -> bool:
        """Return whether each row has one sample. Most steps only have decodes and are like this."""
        return self.num_sampled_positions.count(1) == len(self.row) == self.num_last_samples.count(1)


assert RowColumns._fields == PlannedRow._fields


@dataclass(slots=True)
class StepPlan:
    """One step. `rows` has an entry for each scheduled sequence; the lists before it are applied first."""

    moves: list[BlockMoves] = field(default_factory=list)  # by pool
    adapters: list[AdapterLoad] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    new_blocks: list[NewBlock] = field(default_factory=list)
    new_tokens: list[tuple[int, int, int]] = field(default_factory=list)  # (row, position, token): chosen by the core
    rows: list[PlannedRow] = field(default_factory=list)
    work: StepWork = field(default_factory=StepWork)  # what the rows compute, for predictions of its time
    drafts_prompts: bool = True  # a draft model computes prompts in the same step, not later
    runs_ahead: bool = False  # the next step may be planned before this one's tokens are known


@dataclass(slots=True)
class StepResult:
    """The results of a step. `tokens` has `num_samples` entries for each row of the plan, one row after the other. In a
    row with draft tokens only the first `count_valid_tokens` tokens are valid; the others follow a rejected draft
    token."""

    tokens: list[int]
    # Parallel to `tokens`; None if no request asks for them. For beams: the most likely next tokens.
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by row: of prompt tokens
    errors: dict[int, str] = field(default_factory=dict)  # by row: its request's logits processor failed
    # By row: cross-attention queries of this step's prompt tokens, one entry a token; the last token of the prompt has
    # one more entry, the keys. See `CrossOutputs.alignment`.
    alignment: dict[int, list[bytes]] = field(default_factory=dict)
    vectors: NDArray[np.float32] | None = None  # [samples, size]: from a model that pools, instead of `tokens`
    draft_tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by row: made by the worker
    num_drafted: dict[int, int] = field(default_factory=dict)  # by row: how many of them are not padding
    draft_s: float = 0.0  # time that drafting took
    caught_up: bool = False  # `draft_s` includes older tokens that the drafter had not computed

    def drafts_of(self, row: int) -> tuple[int, ...] | None:
        """Return the tokens that the worker has drafted for a row, or None if the plan asked for none."""
        draft_tokens = self.draft_tokens.get(row)
        return None if draft_tokens is None else draft_tokens[: self.num_drafted[row]]
