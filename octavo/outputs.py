"""What a request gives back: the objects that `LLM`, `AsyncLLMEngine` and the servers hand to their callers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo.lora.request import LoRARequest

    Vectors = NDArray[np.float32]


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position. `rank` is 1 for the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One entry a position: {token_id: Logprob}, the chosen token first, then the most likely ones.
PositionLogprobs = dict[int, Logprob]


class PromptPositions(Sequence[PositionLogprobs | None]):
    """The entries of a prompt's tokens, of which the first has none. Each is made when it is asked for: those of a long
    prompt take longer than others should wait."""

    def __init__(self, num_tokens: int, make: Callable[[int], PositionLogprobs]) -> None:
        """`make` has the entry of a position that is not 0."""
        self._num_tokens, self._make = num_tokens, make

    def __len__(self) -> int:
        return self._num_tokens

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._num_tokens))]
        position = range(self._num_tokens)[index]
        return self._make(position) if position else None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request. In a delta stream `text`, `token_ids` and `logprobs` hold only what is new."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None  # "stop", "length" or "abort"; None while it runs
    # The stop string or stop token id that ended it, or "schema_mismatch" where its `final_check` fails; None for
    # end-of-sequence.
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic`, and how often it was preempted."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def queued_ts(self) -> float:
        """vLLM's newer names of these times."""
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float | None:
        return self.first_scheduled_time

    @property
    def first_token_ts(self) -> float | None:
        return self.first_token_time

    @property
    def last_token_ts(self) -> float | None:
        return self.last_token_time

    @property
    def first_token_latency(self) -> float | None:
        return self.intervals().get("time_to_first_token")

    @property
    def time_in_queue(self) -> float | None:
        return self.intervals().get("time_in_queue")

    def intervals(self) -> dict[str, float]:
        """Seconds of what the request has been through; what it never reached is left out."""
        bounds = {
            "time_in_queue": (self.arrival_time, self.first_scheduled_time),
            "time_to_first_token": (self.arrival_time, self.first_token_time),
            "time_in_model_prefill": (self.first_scheduled_time, self.first_token_time),
            "time_in_model_decode": (self.first_token_time, self.last_token_time),
            "time_in_model_inference": (self.first_scheduled_time, self.last_token_time),
            "e2e": (self.arrival_time, self.finished_time),
        }
        return {name: end - begin for name, (begin, end) in bounds.items() if begin is not None and end is not None}

    def phases(self) -> Iterator[tuple[str, float, float]]:
        """What the request has been through, one after the other: a phase's name, begin and end. The one that it was in
        when it ended lasts to then; after its last token it is in none."""
        bounds = {
            "queue": (self.arrival_time, self.first_scheduled_time),
            "prefill": (self.first_scheduled_time, self.first_token_time),
            "decode": (self.first_token_time, self.last_token_time),
        }
        for name, (begin, end) in bounds.items():
            if begin is not None and (end := end if end is not None else self.finished_time) is not None:
                yield name, begin, end


@dataclass(slots=True)
class RequestOutput:
    """The state of a request: its prompt and its completions, in the order of their `index`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    # None for the first token. A list in `LLM`; of asynchronous engines `PromptPositions`.
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    num_accepted_prediction_tokens: int = 0  # of the request's prediction, by all completions
    num_rejected_prediction_tokens: int = 0  # and those that were computed for nothing
    # Of `SamplingParams.alignment_heads`, A of them: float32 queries [prompt tokens, A, D] and, behind them, the keys
    # [A, rows, D] of what is heard.
    alignment: bytes | None = None
    lora_request: LoRARequest | None = None  # the adapter that it was computed with, where Python named one

    @property
    def encoder_prompt(self) -> None:
        """vLLM's, of models whose encoder reads a text: there are none here."""

    @property
    def encoder_prompt_token_ids(self) -> None:
        """Likewise."""

    @property
    def kv_transfer_params(self) -> None:
        """vLLM's, of caches that move between servers, which is not built."""


@dataclass(slots=True)
class PoolingOutput:
    """The vector [size] of a text, or those [tokens, size] of its tokens."""

    data: Vectors


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each class, or what the model says of it where nothing makes that one."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float


O = TypeVar("O")  # noqa: E741  # what a request gives
P = TypeVar("P")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[O]):
    """What a text, or a pair, gave."""

    request_id: str
    outputs: O
    prompt_token_ids: list[int]
    finished: bool = True
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0

    def giving(self, outputs: P) -> PoolingRequestOutput[P]:
        """The same in another form."""
        return PoolingRequestOutput(
            self.request_id, outputs, self.prompt_token_ids, self.finished, self.metrics, self.num_cached_tokens
        )


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


@dataclass(slots=True)
class BeamSearchSequence:
    """One answer of a beam search. `tokens` and `text` are of prompt and output; a token that ended it is not in them
    unless `include_stop_str_in_output` asks for it, but counts in the score."""

    tokens: list[int]
    logprobs: list[PositionLogprobs]  # of each output token, and of the best beside it
    cum_logprob: float
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    score: float  # what answers are ranked by: cum_logprob over (output tokens ** length_penalty)


@dataclass(slots=True)
class BeamSearchOutput:
    """The answers of one prompt, best first: as many as there were beams."""

    sequences: list[BeamSearchSequence]
