"""A request as the engine knows it, and what it is told of it: the values that cross between front end and core.

Plain msgspec structs. Those that are made for each token hold no cycles, and the garbage collector is told not to look
at them. How they become bytes is `octavo.engine.wire`'s.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from octavo.pooling_params import PoolingParams
from octavo.sampling_params import SamplingParams
from octavo.structured_output.final_check import FinalCheck


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """A run of a prompt's tokens that stand for a picture, or for a part of one: between rows of patches, and between
    tiles, there may be tokens of text."""

    position: int  # of its first token in the prompt
    num_tokens: int
    content_hash: bytes  # of the picture
    first_row: int = 0  # of the picture's, that of its first token
    # How its tokens lie in time, height and width, where positions follow from that.
    grid: tuple[int, int, int] | None = None
    time_step: float = 1.0  # between positions in time
    num_rows: int = 0  # of another network's output, which layers attend to; such an item has no tokens

    @property
    def num_positions(self) -> int:
        """How many positions its tokens take: a model with axes places a video by its times, which may lie apart."""
        if self.grid is None:
            return self.num_tokens
        time, height, width = self.grid
        # In float32, as `execution.media_table` counts. 1 << 40 is more than any model has, and less than overflows.
        step = struct.unpack("f", struct.pack("f", min(self.time_step, float(1 << 20))))[0]
        return max(min(int((time - 1) * step) + 1, 1 << 40), height, width)


def num_positions(num_tokens: int, media: Sequence[MediaItem]) -> int:
    """How many positions a prompt of `num_tokens` takes, at least one for each token."""
    return max(num_tokens, num_tokens + sum(item.num_positions - item.num_tokens for item in media))


def seen_together(media: Sequence[MediaItem]) -> list[list[MediaItem]]:
    """Runs of media that layers attend to: those that follow each other without a token between them, and that the
    tokens behind them see, up to the next run."""
    runs: list[list[MediaItem]] = []
    for item in media:
        if runs and runs[-1][-1].position + 1 == item.position:
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


EMBEDDINGS = "embeddings"


class MediaArray(msgspec.Struct, frozen=True, array_like=True):
    """One of the arrays that a processor makes."""

    name: str
    dtype: str  # numpy's name
    shape: tuple[int, ...]
    values: bytes


class MediaInput(msgspec.Struct, frozen=True, array_like=True):
    """What a tower makes the rows of a picture of. One array named `EMBEDDINGS` is those rows."""

    content_hash: bytes
    num_tokens: int  # which have these rows
    arrays: tuple[MediaArray, ...]
    grid: tuple[int, int, int] | None = None  # of `MediaItem`, or of as many as there are runs, one behind the other
    time_step: float = 1.0


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is to be continued, and everything that its keys and values depend on: two sequences share cached blocks
    only where all of it agrees."""

    token_ids: list[int]
    text: str | None = None  # where it came as text
    adapter: str | None = None  # identity of the adapter that it is computed with
    media: tuple[MediaItem, ...] = ()  # in order of position
    cache_salt: str | None = None  # requests with different salts share no cached blocks
    is_embedded: bool = False  # `media` are embeddings in the place of its tokens, or of some, which penalties ignore
    second_start: int | None = None  # of a pair: the first token of the second text, for models that tell them apart


class AdapterSource(msgspec.Struct, frozen=True, array_like=True):
    """Where the adapter of an identity lies, and what it is called in messages."""

    identity: str  # a hash of its files' contents
    name: str
    config: str | None  # file; None: the weights are a GGUF file, which says it all
    weights: str  # file
    num_bytes: int = 0  # of the file


class EngineRequest(msgspec.Struct, tag="request", omit_defaults=True, weakref=True):
    """A tokenized, checked request on its way to the core."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    eos_token_ids: list[int]
    max_tokens: int  # output tokens at most, `max_model_len` already considered
    arrival_time: float  # seconds of time.monotonic, which processes of one machine share
    priority: int = 0  # lower goes first
    max_ttft_s: float | None = None  # in which its first token is wanted
    deadline: float | None = None  # `time.monotonic` at which it ends with what it has
    pooling: PoolingParams | None = None  # vectors are wanted, and no output tokens
    prediction: list[int] = []  # tokens of which its answer may largely consist
    adapter: AdapterSource | None = None  # that of `prompt.adapter`
    data_parallel_rank: int | None = None  # of the engine, among the server's, that is to have it; None: any
    media: list[MediaInput] = []  # what `prompt.media` are made of; dropped once they are
    final_check: FinalCheck | None = None  # of its answers' texts


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position: the chosen token first, then the most likely ones, best first."""

    token_ids: list[int]
    logprobs: list[float]
    chosen_rank: int  # 1 for the most likely


class SequenceOutput(msgspec.Struct, array_like=True, gc=False):
    """What one step added to one sequence of a request."""

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length" or "error"
    stop_reason: int | None = None  # the stop token that ended it
    logprobs: list[TokenLogprobs] | None = None  # one a token
    prompt_logprobs: list[TokenLogprobs] | None = None  # for prompt positions 1.., once, with the first token
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float = 0.0  # time.monotonic
    error: str | None = None  # one line, when finish_reason is "error"
    error_status: int = 400  # as HTTP has it: whose fault it is
    num_accepted_prediction_tokens: int = 0  # tokens of the request's prediction that were accepted
    num_rejected_prediction_tokens: int = 0
    vectors: bytes | None = None  # of a request for pooling: float32, one vector after the other
    alignment: bytes | None = None  # of `alignment_heads`, once, with the first token; see `RequestOutput`
