"""A step as the scheduler decides it and as the executor reports it. Plain data, so that both can cross processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.request import TokenLogprobs
from octavo.sampling_params import SamplingParams


@dataclass(slots=True)
class BlockMoves:
    """Whole-block copies (source, destination) of one step, in the order in which they must happen: blocks leave for
    the host before anything overwrites them, copies-on-write read before swapped blocks come back."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)  # device -> host
    copy: list[tuple[int, int]] = field(default_factory=list)  # device -> device
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # host -> device


@dataclass(slots=True)
class Admission:
    """A sequence takes a row of the runner's tables: everything that the runner keeps of it."""

    row: int
    token_ids: list[int]  # prompt and output so far
    num_prompt_tokens: int
    block_table: list[int]
    params: SamplingParams
    stop_token_ids: list[int]  # masked until params.min_tokens are out; end-of-sequence included
    seed: int
    index: int  # which completion of its request


@dataclass(slots=True)
class StepPlan:
    """One step. The lists from `rows` on are parallel, one entry a scheduled sequence."""

    moves: BlockMoves = field(default_factory=BlockMoves)
    admissions: list[Admission] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # (row, position in its table, block)
    new_tokens: list[tuple[int, int, int]] = field(default_factory=list)  # (row, position, token) that the core chose
    rows: list[int] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)  # tokens already in the cache
    num_tokens: list[int] = field(default_factory=list)  # tokens to compute now, those after num_computed
    num_samples: list[int] = field(default_factory=list)  # 0 in mid-prompt, 1, or the number of forks to start

    # The next step may be planned before the tokens of this one are known: each sampled row goes on with its own.
    runs_ahead: bool = False

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)


@dataclass(slots=True)
class StepResult:
    """What a step produced. `tokens` has `num_samples` entries for each row of the plan, one row after the other."""

    tokens: list[int]
    # Parallel to `tokens`; None when nobody asks for them. Beams have the best tokens here, whatever else they ask for.
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by row: its prompt positions so far
    errors: dict[int, str] = field(default_factory=dict)  # by row: a logits processor of that request failed
