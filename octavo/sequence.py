"""`Sequence`: one line of tokens to compute, the unit that the scheduler schedules.

A request starts as one sequence. With `n` or `best_of` above one it forks once its prompt is computed. Forks share the
blocks of the prompt; each is scheduled, preempted and aborted on its own.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.request import EngineRequest, SequenceOutput, TokenLogprobs, seen_together
from octavo.sampling_params import SamplingParams


class Chooser(Protocol):
    """Chooses the next tokens of a request's sequences, in the place of the sampler: `BeamSearch`."""

    def propose(self, seq: Sequence, found: TokenLogprobs) -> list[SequenceOutput]:
        """Take the most likely next tokens of `seq`, which is held until its next token is chosen, in this call or a
        later one. `found` starts with any token; the most likely ones follow, best first. Returns the new outputs."""


@dataclass(slots=True)
class HostLoad:
    """The blocks of a waiting sequence's prefix that the host tier brings back."""

    num_tokens: int  # of the sequence when its prefix was looked up
    num_cached_tokens: int  # that the device had then
    missing: deque[tuple[int, bytes]]  # pools and keys of those still to be planned; empty too if computing is faster
    planned: tuple[tuple[int, bytes], ...] = ()  # the first and the last of those planned


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, and how many of them are computed: `num_computed_tokens` ≤ `num_tokens`. Its states: see
    `octavo.scheduling.scheduler`.

    Several objects write these fields of a sequence that exists:

        field                  written by
        num_computed_tokens    `KVCacheManager.share_prefix`; `Step.mark_in_flight`, and `Step.roll_back` to undo it;
                               `accept_drafts`; set to 0 by `KVCacheManager.release` and `SequenceQueues.fork`
        num_awaited_tokens     raised by `Step.mark_in_flight`; lowered by `Scheduler.apply_result` and `Step.roll_back`
        num_registered_blocks  `KVCacheManager.share_prefix` and `register_computed`; set to 0 by
                               `KVCacheManager.release`, `KVCacheManager.swap_out` and `SequenceQueues.fork`
        admission_step         `Step.add`, at each admission
        num_uncounted_tokens   `count_admission`, at each admission that looks up the prefix; lowered by
                               `count_computed`
        token_ids              `extend`; `SequenceQueues.append`
        block_tables           `KVCacheManager`; `SequenceQueues.fork`
        is_admitted_to_runner  `Step.add`; set to False when `SequenceQueues` takes its row back
        is_held                `hold_for_beam_search`, until `SequenceQueues.append`
        num_pending_forks      set to 0 by `start_forks` and `hold_for_beam_search`
        host_load              `HostTier.load`, until `Scheduler._schedule_waiting` starts it
        prompt_logprobs        `keep_prompt_results`, like `alignment`, until `Sequence.output` takes them
        num_bypassed           `AdapterTurn`
    """

    request: EngineRequest
    key: tuple[float, int]  # scheduling order: smaller goes first and is preempted last
    seed: int
    index: int = 0  # index of its completion in the request
    token_ids: array[int] = field(default_factory=lambda: array("i"))  # prompt, then output
    stop_reasons: dict[int, int | None] = field(default_factory=dict)  # tokens that end it -> `stop_reason`
    num_computed_tokens: int = 0  # tokens in the cache, those of steps in flight included
    num_awaited_tokens: int = 0  # tokens that steps in flight will sample
    block_tables: list[list[int]] = field(default_factory=list)  # by cache group; empty if it has no blocks
    num_ready_slots: int = 0  # tokens that fit in its blocks before a block table must change
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were needed
    num_registered_blocks: int = 0  # leading blocks that are in the prefix index
    host_blocks: list[list[int]] = field(default_factory=list)  # by cache group: its blocks while it is swapped out
    host_load: HostLoad | None = None  # while it waits, once looked up
    row: int | None = None  # row of the runner's tables, while it runs
    is_admitted_to_runner: bool = False  # the runner's row holds its tokens and blocks
    admission_step: int = 0  # number of its last admission's step; results of older steps are not in its blocks
    adapter_slot: int = -1  # slot of its adapter on the device, while it runs
    num_bypassed: int = 0  # sequences that started while it waited for room for its adapter
    num_pending_forks: int = 0  # siblings to fork off when the prompt is computed
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at its first admission
    # Prompt tokens that the statistics do not have yet; None before its first admission.
    num_uncounted_tokens: int | None = None
    num_preemptions: int = 0
    first_scheduled_time: float = 0.0
    has_ended: bool = False  # finished, failed or aborted; steps in flight may still compute it
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    alignment: list[bytes] = field(default_factory=list)  # see `StepResult`
    beam_search: Chooser | None = None  # None: the sampler chooses its tokens
    is_held: bool = False  # waits for its beam_search: not scheduled, and may lose its blocks and its row
    speculated: Any = None  # state of `octavo.speculative`
    num_accepted_prediction_tokens: int = 0  # accepted draft tokens from the request's `prediction`
    num_rejected_prediction_tokens: int = 0  # and rejected ones
    has_reported: bool = False  # its first output is made, which has the results of its prompt
    # Copies of values of the request that each step reads: by then the request is no longer in the processor's cache.
    request_id: str = field(init=False)
    has_prediction: bool = field(init=False)
    max_tokens: int = field(init=False)  # prompt and output together
    num_result_positions: int = field(init=False)  # last tokens that have a result once all are computed

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.has_prediction = bool(self.request.prediction)
        self.max_tokens = len(self.request.prompt.token_ids) + self.request.max_tokens
        pooling = self.request.pooling
        self.num_result_positions = len(self.token_ids) if pooling is not None and pooling.is_by_token else 1

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def adapter(self) -> str | None:
        """The identity of its adapter."""
        return self.request.prompt.adapter

    @property
    def num_tokens(self) -> int:
        """Tokens known or awaited."""
        return len(self.token_ids) + self.num_awaited_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt.token_ids)

    @property
    def num_cross_tokens(self) -> int:
        """The most rows of encoder output that any of its tokens attends to."""
        return max((sum(item.num_rows for item in run) for run in seen_together(self.request.prompt.media)), default=0)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens still to compute: one in a decode, many in a prefill. The scheduler knows no other difference."""
        return len(self.token_ids) + self.num_awaited_tokens - self.num_computed_tokens

    @property
    def num_tokens_left_to_sample(self) -> int:
        """Tokens that may still be sampled after the awaited ones."""
        return self.request.max_tokens - (self.num_tokens - len(self.request.prompt.token_ids))

    @property
    def next_step_needs_tokens(self) -> bool:
        """Return whether its next step needs the last step's tokens on the host: its sampling depends on them, or they
        decide which sequences there are."""
        if self.beam_search is not None or self.num_pending_forks:
            return True
        return self.params.needs_output_tokens_on_host or self.params.grammar is not None

    @property
    def num_needed_rows(self) -> int:
        """Runner rows for itself and for the forks that it will start."""
        return 1 + self.num_pending_forks

    def fork(self, index: int) -> Sequence:
        """Return a sibling that has computed the same tokens. The caller must share the blocks."""
        return Sequence(
            request=self.request,
            key=self.key,
            seed=self.seed,
            stop_reasons=self.stop_reasons,
            index=index,
            token_ids=self.token_ids[:],
            num_computed_tokens=self.num_computed_tokens,
            block_tables=[list(table) for table in self.block_tables],
            block_hashes=list(self.block_hashes),
            num_registered_blocks=self.num_registered_blocks,
            num_cached_tokens=self.num_cached_tokens,
            num_uncounted_tokens=0,
            num_preemptions=self.num_preemptions,
            first_scheduled_time=self.first_scheduled_time,
            beam_search=self.beam_search,
        )

    def continued(self, index: int, output_token_ids: list[int]) -> Sequence:
        """Return the sequence of a completion that another core has begun. It continues like a preempted one."""
        one = self.fork(index)
        one.token_ids.extend(output_token_ids)
        return one

    def output(
        self,
        token_ids: list[int],
        finish_reason: str | None = None,
        stop_reason: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
    ) -> SequenceOutput:
        """Return the output of new tokens for its request; the first one includes results of the prompt."""
        # By position: msgspec takes twice as long to match names, and this happens for every token.
        output = SequenceOutput(
            self.request_id, self.index, token_ids, finish_reason, stop_reason, logprobs, None, 0,
            self.num_preemptions, None, error,
        )  # fmt: skip
        if not self.has_reported:
            self.has_reported = True
            output.num_cached_tokens, output.first_scheduled_time = self.num_cached_tokens, self.first_scheduled_time
            output.prompt_logprobs, output.alignment = self.prompt_logprobs or None, b"".join(self.alignment) or None
            self.prompt_logprobs, self.alignment = [], []
        if self.num_accepted_prediction_tokens or self.num_rejected_prediction_tokens:
            output.num_accepted_prediction_tokens = self.num_accepted_prediction_tokens
            output.num_rejected_prediction_tokens = self.num_rejected_prediction_tokens
        return output
