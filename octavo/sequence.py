"""The engine core's view of work: a `Sequence` is one line of tokens to compute, and what the scheduler schedules.

A request starts as one sequence. With `n` or `best_of` above one it forks when its prompt has been computed; the forks
share the blocks of the prompt and are then scheduled, preempted and aborted each on its own.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.request import EngineRequest, TokenLogprobs
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.scheduling.beams import Beam


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, and how many of them have been computed. `num_computed_tokens` ≤ `num_tokens` always."""

    request: EngineRequest
    key: tuple[int, int]  # scheduling order: smaller goes first and is preempted last
    seed: int
    index: int = 0  # which completion of its request
    token_ids: list[int] = field(default_factory=list)  # prompt, then output
    stop_reasons: dict[int, int | None] = field(default_factory=dict)  # tokens that end it -> what is then reported
    num_computed_tokens: int = 0  # tokens whose keys and values are in the cache, or will be when steps under way end
    num_awaited_tokens: int = 0  # output that steps under way will bring; the device knows it before the scheduler does
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks of token_ids, as far as computed
    num_registered_blocks: int = 0  # leading blocks that were offered to the prefix index
    host_blocks: list[int] = field(default_factory=list)  # where a swapped sequence waits
    row: int | None = None  # its row of the runner's tables while it runs
    is_admitted_to_runner: bool = False  # the runner's row holds its tokens and blocks
    num_pending_forks: int = 0  # sequences that will be forked off when the prompt is computed
    num_cached_tokens: int = 0  # prompt tokens found in the prefix index when it was first admitted
    num_preemptions: int = 0
    first_scheduled_time: float = 0.0
    is_aborted: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    beam: Beam | None = None  # set if it is a beam of a search

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_tokens(self) -> int:
        """Awaited ones included."""
        return len(self.token_ids) + self.num_awaited_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt.token_ids)

    @property
    def num_lacking_tokens(self) -> int:
        """Tokens still to compute. One is a decode, many a prefill; the scheduler makes no other difference."""
        return len(self.token_ids) + self.num_awaited_tokens - self.num_computed_tokens

    @property
    def is_complete(self) -> bool:
        """The output is as long as it may become once what is awaited has come."""
        return self.num_tokens - len(self.request.prompt.token_ids) >= self.request.max_tokens

    @property
    def needs_its_tokens(self) -> bool:
        """Its next step cannot be prepared before the tokens of the last one are known: whoever draws looks at them, or
        they decide which sequences there are."""
        if self.beam is not None or self.num_pending_forks:
            return True
        return self.params.follows_output or self.params.grammar is not None

    @property
    def num_rows(self) -> int:
        """Runner rows that it holds or has reserved for its forks."""
        return 1 + self.num_pending_forks

    @property
    def is_held(self) -> bool:
        """A beam that has been computed and waits for the others of its search. Held, it may lose its blocks and its
        row; it does not stand in the queue."""
        return self.beam is not None and self.beam.group.is_held(self)

    def fork(self, index: int) -> Sequence:
        """A sibling that has computed the same tokens. The caller shares the blocks."""
        return Sequence(
            request=self.request,
            key=self.key,
            seed=self.seed,
            stop_reasons=self.stop_reasons,
            index=index,
            token_ids=list(self.token_ids),
            num_computed_tokens=self.num_computed_tokens,
            block_table=list(self.block_table),
            block_hashes=list(self.block_hashes),
            num_registered_blocks=self.num_registered_blocks,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            first_scheduled_time=self.first_scheduled_time,
        )

    def extend_block_hashes(self, block_size: int) -> None:
        """Chain the hashes of full blocks: each over its parent's hash, its tokens and the request's cache salt.

        BLAKE2b with 16 bytes: prompts come from strangers, so a collision must not be something one can construct.
        """
        while (len(self.block_hashes) + 1) * block_size <= len(self.token_ids):
            start = len(self.block_hashes) * block_size
            parent = (
                self.block_hashes[-1] if self.block_hashes else _digest((self.request.prompt.cache_salt or "").encode())
            )
            tokens = array("i", self.token_ids[start : start + block_size]).tobytes()
            self.block_hashes.append(_digest(tokens, parent))


def _digest(data: bytes, parent: bytes = b"") -> bytes:
    return hashlib.blake2b(data, digest_size=16, key=parent).digest()
