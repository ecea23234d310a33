"""A step as the scheduler decides it and as the executor reports it. Plain data, so that both can cross processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.pooling_params import PoolingParams
from octavo.request import MediaItem, TokenLogprobs
from octavo.sampling_params import SamplingParams
from octavo.step_cost import StepWork

DRAFT_PLACEHOLDER = -1  # in the place of a guess: a model guesses it, when the step runs


@dataclass(slots=True)
class BlockMoves:
    """Whole-block copies (source, destination) of one step within one pool, in the order in which they must happen:
    blocks leave for the host before anything overwrites them, copies-on-write read before swapped blocks come back."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)  # device -> host
    copy: list[tuple[int, int]] = field(default_factory=list)  # device -> device
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # host -> device


class AdapterMemory(NamedTuple):
    """What adapters have of a worker; nothing where none are served."""

    num_pages: int  # of the device; 0 too where it uses those of the host
    num_slots: int
    num_host_pages: int  # of the host, in the same measure
    page_bytes: int


class AdapterLoad(NamedTuple):
    """An adapter that is on the host is copied into pages of the device, and found there by its slot."""

    identity: str
    slot: int
    pages: list[int]


@dataclass(slots=True)
class Admission:
    """A sequence takes a row of the runner's tables: everything that the runner keeps of it."""

    row: int
    token_ids: list[int]  # prompt and output so far
    num_prompt_tokens: int
    block_tables: list[list[int]]  # by cache group
    params: SamplingParams
    stop_token_ids: list[int]  # masked until params.min_tokens are out; end-of-sequence included
    seed: int
    index: int  # which completion of its request
    adapter_slot: int = -1  # of its adapter; -1: it has none
    pooling: PoolingParams | None = None
    second_start: int | None = None  # of `Prompt`
    media: tuple[MediaItem, ...] = ()  # likewise
    is_embedded: bool = False  # likewise


class NewBlock(NamedTuple):
    """An entry of a block table that has changed."""

    row: int
    group: int
    position: int
    block: int


class PlannedRow(NamedTuple):
    """One sequence in a step."""

    row: int  # of the runner's tables
    num_computed: int  # tokens already in the cache
    num_tokens: int  # tokens to compute now, those after num_computed, guesses included
    # After so many of the last of them a token is sampled, or their vectors are wanted: 0 in mid-prompt, else
    # 1 + len(guesses).
    num_sampled_positions: int
    num_forks: int = 1  # samples drawn after the last of them: several where siblings start
    # The last tokens to compute, which may turn out wrong; `DRAFT_PLACEHOLDER` for those that the runner is to guess.
    draft_tokens: tuple[int, ...] = ()

    @property
    def is_decode(self) -> bool:
        """Whether it computes one token, and guesses of what follows."""
        return self.num_tokens - len(self.draft_tokens) == 1

    @property
    def num_samples(self) -> int:
        return self.num_sampled_positions + self.num_forks - 1 if self.num_sampled_positions else 0


@dataclass(slots=True)
class StepPlan:
    """One step. `rows` has an entry for each scheduled sequence."""

    moves: list[BlockMoves] = field(default_factory=list)  # by pool
    adapters: list[AdapterLoad] = field(default_factory=list)  # before anything of the step is computed
    admissions: list[Admission] = field(default_factory=list)
    new_blocks: list[NewBlock] = field(default_factory=list)
    new_tokens: list[tuple[int, int, int]] = field(default_factory=list)  # (row, position, token) that the core chose
    rows: list[PlannedRow] = field(default_factory=list)
    work: StepWork = field(default_factory=StepWork)  # of these rows
    drafts_prompts: bool = True  # whether a draft model computes the parts of prompts too, and not later

    # The next step may be planned before the tokens of this one are known: each sampled row goes on with its own.
    runs_ahead: bool = False


@dataclass(slots=True)
class StepResult:
    """What a step produced. `tokens` has `num_samples` entries for each row of the plan, one row after the other. Of a
    row with draft tokens the first `count_valid_tokens` are valid; the others follow a rejected draft token."""

    tokens: list[int]
    # Parallel to `tokens`; None when nobody asks for them. Beams have the best tokens here, whatever else they ask for.
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by row: its prompt positions so far
    errors: dict[int, str] = field(default_factory=dict)  # by row: a logits processor of that request failed
    # By row: queries of the cross attention of its prompt positions so far, one entry a token, and behind the last
    # token's one of keys; see `CrossOutputs.alignment`.
    alignment: dict[int, list[bytes]] = field(default_factory=dict)
    vectors: NDArray[np.float32] | None = None  # [samples, size]: of a model that pools, in the place of `tokens`
    draft_tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by row: what the runner has guessed for it
    num_drafted: dict[int, int] = field(
        default_factory=dict
    )  # how many of these: others stand where nothing could be guessed
    draft_s: float = 0.0  # that guessing took
    caught_up: bool = False  # in this time the drafter has also computed what it lacked

    def drafts_of(self, row: int) -> tuple[int, ...] | None:
        """Return the tokens that the worker has drafted for a row, or None if the plan asked for none."""
        draft_tokens = self.draft_tokens.get(row)
        return None if draft_tokens is None else draft_tokens[: self.num_drafted[row]]


def count_valid_tokens(draft_tokens: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many of `tokens`, one sampled after each position, are valid: the accepted draft tokens and the token
    after them."""
    for i, draft_token in enumerate(draft_tokens):
        if tokens[i] != draft_token:
            return i + 1
    return len(draft_tokens) + 1
