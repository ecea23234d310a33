"""Outputs of requests: the objects that `LLM`, `AsyncLLMEngine` and the servers give to their callers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

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


class Positions(Sequence[PositionLogprobs | None]):
    """The entries of tokens; a prompt's first token has none. Each entry is made when it is read, because making all
    entries of a long prompt would delay other requests."""

    def __init__(self, found: Sequence[Any], make: Callable[[Any], PositionLogprobs]) -> None:
        """`make` returns the entry of an item of `found` other than None."""
        self._found, self._make = found, make

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Positions(self._found[index], self._make)
        found = self._found[index]
        return None if found is None else self._make(found)


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request. In a delta stream `text`, `token_ids` and `logprobs` hold only the new part."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[PositionLogprobs] | None = None  # a list; `Positions` in the server
    finish_reason: str | None = None  # "stop", "length" or "abort"; None while it runs
    # The stop string or stop token id that ended it, or the result of its `final_check`: "schema_mismatch", or
    # "schema_unchecked" if the answer could not be checked. None for end-of-sequence.
    stop_reason: int | str | None = None
    # All tokens, also in a delta stream; set with the finish reason.
    all_token_ids: list[int] | None = field(default=None, repr=False, compare=False)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """The times of a request's events, in seconds of `time.monotonic`, and its number of preemptions."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    # vLLM's newer names.
    queued_ts = property(attrgetter("arrival_time"))
    scheduled_ts = property(attrgetter("first_scheduled_time"))
    first_token_ts = property(attrgetter("first_token_time"))
    last_token_ts = property(attrgetter("last_token_time"))

    @property
    def first_token_latency(self) -> float | None:
        return self.intervals().get("time_to_first_token")

    @property
    def time_in_queue(self) -> float | None:
        return self.intervals().get("time_in_queue")

    def intervals(self) -> dict[str, float]:
        """Return the seconds of the request's intervals. Intervals that it never reached are left out."""
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
        """Yield the request's phases in order: name, begin and end. The phase in which the request ended lasts until
        the end; after the last token there is no phase."""
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
    # None for the first token. A list in `LLM`; `Positions` in asynchronous engines.
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    num_accepted_prediction_tokens: int = 0  # of the request's prediction, by all completions
    num_rejected_prediction_tokens: int = 0  # tokens of the prediction that were rejected
    # For `SamplingParams.alignment_heads` of A heads: float32 queries [prompt tokens, A, D], then keys [A, rows, D] of
    # the sound.
    alignment: bytes | None = None
    lora_request: LoRARequest | None = None  # the adapter that a Python caller named

    # vLLM's fields for what is not built: models whose encoder reads a text, caches that move between servers.
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None


@dataclass(slots=True)
class PoolingOutput:
    """The vector [size] of a text, or the vectors [tokens, size] of its tokens."""

    data: Vectors


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each class, or the model's raw score without an activation."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float


O = TypeVar("O")  # noqa: E741  # the type of a request's result
P = TypeVar("P")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[O]):
    """The output of a text or a pair."""

    request_id: str
    outputs: O
    prompt_token_ids: list[int]
    finished: bool = True
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0

    def giving(self, outputs: P) -> PoolingRequestOutput[P]:
        """Return the same output with `outputs` in another form."""
        return PoolingRequestOutput(
            self.request_id, outputs, self.prompt_token_ids, self.finished, self.metrics, self.num_cached_tokens
        )


Output = RequestOutput | PoolingRequestOutput[PoolingOutput]
EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


@dataclass(slots=True)
class BeamSearchSequence:
    """One answer of a beam search. `tokens` and `text` cover prompt and output. They include the token that ended the
    answer only with `include_stop_str_in_output`; the score always counts it."""

    tokens: list[int]
    logprobs: list[PositionLogprobs]  # of each output token, with the best other tokens
    cum_logprob: float
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    score: float  # rank of the answer: cum_logprob / (output tokens ** length_penalty)


@dataclass(slots=True)
class BeamSearchOutput:
    """The answers of one prompt, best first: one for each beam."""

    sequences: list[BeamSearchSequence]
