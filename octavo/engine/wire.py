"""The messages between a front end (tokenizer, text, HTTP) and an engine core, which may live in another process.

Plain msgspec structs, encoded as MessagePack; never pickle. A `FrontendMessage` goes to the core, a `CoreMessage`
comes back. Structs that are made for each token hold no cycles, and the garbage collector is told not to look at them.
"""

from __future__ import annotations

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.sampling_params import SamplingParams


class CoreProcessArgs(msgspec.Struct):
    """What a core process has to be told before it can start, on its standard input as JSON."""

    config: EngineConfig
    input_address: str  # the core receives here
    output_address: str  # and sends here
    log_level: int


class EngineRequest(msgspec.Struct, tag="request", omit_defaults=True):
    """A tokenized, checked request on its way to the core."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int]
    max_tokens: int  # output tokens at most, `max_model_len` already considered
    arrival_time: float  # seconds of time.monotonic, which processes of one machine share
    priority: int = 0  # lower goes first
    cache_salt: str | None = None  # requests with different salts share no cached blocks


class Abort(msgspec.Struct, tag="abort"):
    """Ends one sequence of a request (`index`, which must have put out a token), or all of them (None). Unknown ids are
    ignored."""

    request_id: str
    index: int | None = None


class GetBlockMap(msgspec.Struct, tag="get_block_map"):
    """Asks for a `BlockMap`, while somebody watches."""


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


class EngineStats(msgspec.Struct, array_like=True, gc=False):
    """The state after a step (gauges) and what the step did (increments)."""

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0  # referenced by a sequence
    num_host_blocks: int = 0
    num_host_blocks_used: int = 0
    num_slots_allocated: int = 0  # token slots of referenced blocks
    num_slots_filled: int = 0  # those that hold a token
    num_preemptions: int = 0  # from here on: increments
    num_prompt_tokens: int = 0  # of the prompts that were started, found in the cache or not
    num_computed_tokens: int = 0  # prompt and output tokens that went through the model
    num_generation_tokens: int = 0
    num_prefix_queries: int = 0  # prompt tokens looked up in the prefix index
    num_prefix_hits: int = 0  # prompt tokens found there
    step_s: float = 0.0


class StepOutputs(msgspec.Struct, tag="step"):
    outputs: list[SequenceOutput]
    stats: EngineStats


class Ready(msgspec.Struct, tag="ready"):
    """The core has loaded its model and takes requests."""

    num_blocks: int
    num_host_blocks: int
    block_size: int
    weight_bytes: int
    cache_bytes: int
    startup: dict[str, float]  # seconds by phase, from the start of the process


class Failed(msgspec.Struct, tag="failed"):
    """The core cannot start or go on. `message` is one line; `expected` says that it is the user's to act on."""

    message: str
    expected: bool


class BlockMap(msgspec.Struct, tag="block_map"):
    """What each KV block is used for: a byte a block, the numbers of `kv_cache.block_pool.BlockState`."""

    states: bytes


FrontendMessage = EngineRequest | Abort | GetBlockMap
CoreMessage = StepOutputs | Ready | Failed | BlockMap

encode_message = msgspec.msgpack.Encoder().encode
decode_frontend_message = msgspec.msgpack.Decoder(FrontendMessage).decode
decode_core_message = msgspec.msgpack.Decoder(CoreMessage).decode


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. A non-blocking receive would say so with an exception, which costs ten times as much."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)
