"""Requests and their outputs inside the engine: the values that cross between front end and core.

They are plain msgspec structs. Structs that are made for each token have no cycles and are excluded from garbage
collection. `octavo.engine.wire` turns them into bytes.
"""

import struct
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from octavo.pooling_params import PoolingParams
from octavo.sampling_params import SamplingParams
from octavo.structured_output.final_check import FinalCheck


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """A run of a prompt's tokens that stands for a picture, or for a part of a picture: tokens of text may separate
    rows of patches, and tiles."""

    position: int  # index of its first token in the prompt
    num_tokens: int
    content_hash: bytes  # of the picture
    first_row: int = 0  # the row of the picture that this run's first token gets
    # Numbers of its tokens in time, height and width, for models whose positions follow from a grid.
    grid: tuple[int, int, int] | None = None
    time_step: float = 1.0  # positions in time from one frame to the next
    num_rows: int = 0  # rows of encoder output that layers attend to; such an item has no tokens

    @property
    def num_positions(self) -> int:
        """Return the number of positions that its tokens take. Models with axes place a video by its times, which may
        be more than one position apart."""
        if self.grid is None:
            return self.num_tokens
        time, height, width = self.grid
        # Step and product in float32, like `execution.media_table`. The bound 1 << 40 is larger than any model's
        # positions, and does not overflow.
        step = _as_float32(min(self.time_step, float(1 << 20)))
        return max(min(int(_as_float32((time - 1) * step)) + 1, 1 << 40), height, width)


def _as_float32(value: float) -> float:
    """Return the float32 that is nearest to a value; of a product of two float32 it is their product in float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def num_positions(num_tokens: int, media: Sequence[MediaItem]) -> int:
    """Return the number of positions that a prompt of `num_tokens` takes, at least one for each token."""
    return max(num_tokens, num_tokens + sum(item.num_positions - item.num_tokens for item in media))


def seen_together(media: Sequence[MediaItem]) -> list[list[MediaItem]]:
    """Return runs of media that layers attend to. The media of a run follow each other directly; the tokens behind a
    run see all of them, up to the next run."""
    runs: list[list[MediaItem]] = []
    for item in media:
        if runs and runs[-1][-1].position + 1 == item.position:
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


EMBEDDINGS = "embeddings"
MAX_CACHE_TTL_S = 30 * 86_400


class MediaArray(msgspec.Struct, frozen=True, array_like=True):
    """One array in a processor's output."""

    name: str
    dtype: str  # numpy's name
    shape: tuple[int, ...]
    values: bytes


class MediaInput(msgspec.Struct, frozen=True, array_like=True):
    """The input from which a tower computes a picture's rows. A single array named `EMBEDDINGS` holds the rows
    themselves."""

    content_hash: bytes
    num_tokens: int  # tokens that get these rows
    arrays: tuple[MediaArray, ...]
    grid: tuple[int, int, int] | None = None  # like `MediaItem.grid`; for several runs, their grids joined in time
    time_step: float = 1.0


# Tokens in the core: an array, which takes no time to copy, to hash and to write into a row.
Tokens: TypeAlias = "list[int] | array[int]"


def pack_tokens(token_ids: Tokens) -> bytes:
    """Return tokens as int32."""
    return array("i", token_ids).tobytes()


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt, and everything that its keys and values depend on. Two sequences share cached blocks only if all of
    these agree."""

    token_ids: list[int]
    text: str | None = None  # if it came as text
    adapter: str | None = None  # identity of its adapter
    media: tuple[MediaItem, ...] = ()  # in order of position
    cache_salt: str | None = None  # requests with different salts share no cached blocks
    is_embedded: bool = False  # `media` has embeddings that replace all or some tokens; penalties ignore these
    second_start: int | None = None  # in a pair: first token of the second text, for models that tell them apart
    packed: bytes = b""  # `token_ids` from `pack_tokens`, on the way to a core, which makes an array of them


class AdapterSource(msgspec.Struct, frozen=True, array_like=True):
    """The files of an adapter, and its name in messages."""

    identity: str  # a hash of its files' contents
    name: str
    config: str | None  # file; None: the weights are a GGUF file, which has the configuration
    weights: str  # file
    num_bytes: int = 0  # of the file


class BlockPeer(msgspec.Struct, frozen=True, array_like=True):
    """Another server, which may have the blocks of a prompt on disk."""

    address: str  # http://host:port
    key: str  # API key

    def __repr__(self) -> str:  # without the key
        return f"BlockPeer({self.address})"


class EngineRequest(msgspec.Struct, tag="request", omit_defaults=True, weakref=True):
    """A tokenized, checked request on its way to the core."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    eos_token_ids: list[int]
    max_tokens: int  # output tokens at most, `max_model_len` already considered
    arrival_time: float  # seconds of time.monotonic, which processes of one machine share
    priority: int = 0  # lower goes first
    max_ttft_s: float | None = None  # wanted seconds from arrival to the first token
    deadline: float | None = None  # `time.monotonic` at which it ends with the tokens so far
    pooling: PoolingParams | None = None  # the request asks for vectors and no output tokens
    prediction: list[int] = []  # tokens that its answer is likely to contain
    adapter: AdapterSource | None = None  # source of `prompt.adapter`
    data_parallel_rank: int | None = None  # the server's engine that must take it; None: any
    media: list[MediaInput] = []  # inputs for `prompt.media`; dropped once the rows are computed
    final_check: FinalCheck | None = None  # check of its answers' texts
    already_sent_token_ids: list[list[int]] = []  # of its answer, sent by another server, in groups as they came
    output_token_ids: dict[int, list[int]] = {}  # by completion to go on with: its tokens from a core that has died
    cache_session: str | None = None  # keeps its blocks on disk under this id
    cache_ttl_s: float = 0.0  # seconds for which its blocks are kept
    session_id: str | None = None  # requests of one session go to the same engine, if its load allows it
    client: str | None = None  # its sender, for the policy `fair`
    response_id: str = ""  # of the answer that it is for, if this is not the request's id; not sent to the core
    saves_prompt: bool = False  # its output waits until the blocks of its prompt are on disk, for another server
    blocks_from: BlockPeer | None = None  # the server that has computed its prompt
    block_hashes: bytes = b""  # of the prompt's full blocks, one after the other, as far as they are known


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position: the chosen token first, then the most likely tokens, best first, or the tokens
    that the request names."""

    token_ids: list[int]
    logprobs: list[float]
    chosen_rank: int  # 1 for the most likely


class SequenceOutput(msgspec.Struct, omit_defaults=True, gc=False):
    """The part that one step added to one sequence of a request."""

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length" or "error"
    stop_reason: int | None = None  # the stop token that ended it
    logprobs: list[TokenLogprobs] | None = None  # one for each token
    prompt_logprobs: list[TokenLogprobs] | None = None  # for prompt positions 1.., once, with the first token
    num_cached_tokens: int = 0  # like the next but one, with the first token
    num_preemptions: int = 0
    first_scheduled_time: float | None = None  # time.monotonic; with the first token
    error: str | None = None  # one line, when finish_reason is "error"
    error_status: int = 400  # the HTTP status for `error`
    error_param: str | None = None  # the field that `error` is about
    num_accepted_prediction_tokens: int = 0  # tokens of the request's prediction that were accepted
    num_rejected_prediction_tokens: int = 0
    vectors: bytes | None = None  # for a request that pools: float32, one vector after the other
    alignment: bytes | None = None  # for `alignment_heads`, once, with the first token; see `RequestOutput`
