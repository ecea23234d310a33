"""The messages between a front end (tokenizer, text, HTTP) and an engine core, which may live in another process.

Plain msgspec structs, encoded as MessagePack; never pickle. A `FrontendMessage` goes to the core, a `CoreMessage`
comes back. What they carry is defined in `octavo.request` and `octavo.stats`.
"""

from __future__ import annotations

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.request import AdapterSource, EngineRequest, SequenceOutput
from octavo.stats import EngineStats


class CoreProcessArgs(msgspec.Struct):
    """What a core process has to be told before it can start, on its standard input as JSON."""

    config: EngineConfig
    input_address: str  # the core receives here
    output_address: str  # and sends here
    end_path: str  # of a file for why it ends, where it can send no more
    log_level: int


class Abort(msgspec.Struct, tag="abort"):
    """Ends one sequence of a request (`index`, which must have put out a token), or all of them (None). Unknown ids are
    ignored."""

    request_id: str
    index: int | None = None


class GetBlockMap(msgspec.Struct, tag="get_block_map"):
    """Asks for a `BlockMap`."""


class ResetCache(msgspec.Struct, tag="reset_cache"):
    """Asks to forget all prefixes, and to give the cache's memory back. `CacheWasReset` says that it is done."""

    frees_memory: bool = False


class SetPaused(msgspec.Struct, tag="set_paused"):
    """No steps from now on, or again."""

    is_paused: bool


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Have an adapter on the host, before a request asks for it; answered by an `AdapterLoaded`."""

    source: AdapterSource
    pins: bool = False  # it stays


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """No new request is going to ask for an adapter."""

    identity: str


class AdapterLoaded(msgspec.Struct, array_like=True):
    """An adapter is on the host, or why it cannot be."""

    identity: str
    error: str | None = None


class StepOutputs(msgspec.Struct, tag="step"):
    outputs: list[SequenceOutput]
    stats: EngineStats
    adapters: list[AdapterLoaded] = []


class Ready(msgspec.Struct, tag="ready"):
    """The core has loaded its model and takes requests."""

    max_model_len: int  # the configuration's, or less with --max-model-len auto
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


class CacheWasReset(msgspec.Struct, tag="cache_was_reset"):
    """The answer to `ResetCache`."""


class Leaving(msgspec.Struct, tag="leaving"):
    """From the host of a core elsewhere: it is to stop, and takes no more requests."""


FrontendMessage = EngineRequest | Abort | GetBlockMap | ResetCache | SetPaused | LoadAdapter | UnloadAdapter
CoreMessage = StepOutputs | Ready | Failed | BlockMap | CacheWasReset | Leaving

encode_message = msgspec.msgpack.Encoder().encode
decode_frontend_message = msgspec.msgpack.Decoder(FrontendMessage).decode
decode_core_message = msgspec.msgpack.Decoder(CoreMessage).decode


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. A non-blocking receive would say so with an exception, which costs ten times as much."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)
