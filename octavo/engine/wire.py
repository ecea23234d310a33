"""The messages between a front end (tokenizer, text, HTTP) and an engine core, which may live in another process.

Plain msgspec structs, encoded as MessagePack; never pickle. A `FrontendMessage` goes to the core, a `CoreMessage` comes
back. `octavo.request` and `octavo.stats` define their contents.
"""

from array import array

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.request import AdapterSource, EngineRequest, SequenceOutput, pack_tokens
from octavo.stats import EngineStats, SequenceProgress

# Of a server that stops: for requests under way and then for blocks on their way to disk. With the time that processes
# take to end, it is less than Kubernetes' terminationGracePeriodSeconds (30).
STOP_S = 25.0
LEAST_SAVING_S = 5.0  # for blocks, however long the requests took


class CoreProcessArgs(msgspec.Struct):
    """The arguments of a core process: JSON on its standard input."""

    config: EngineConfig
    input_address: str  # where the core receives
    output_address: str  # where it sends
    end_path: str  # a file for the reason of its end, if it cannot send any more
    log_level: int


class Abort(msgspec.Struct, tag="abort"):
    """Ends a request (`index` None), or one of its sequences, which must have an output token. Unknown ids are
    ignored."""

    request_id: str
    index: int | None = None


class AbortAll(msgspec.Struct, tag="abort_all"):
    """Ends all requests of a front end that has ended. Their ids begin with `prefix`."""

    prefix: str


class GetLiveView(msgspec.Struct, tag="get_live_view"):
    """Asks for a `LiveView`."""


class ResetCache(msgspec.Struct, tag="reset_cache"):
    """Empties the prefix cache, and gives the cache's memory back with `frees_memory`. Answered by `CacheWasReset`."""

    frees_memory: bool = False


class DropCacheSession(msgspec.Struct, tag="drop_cache_session"):
    """Frees the blocks that a `cache_session` keeps. Answered by `CacheWasReset`."""

    session: str
    salt: str | None


class SetPaused(msgspec.Struct, tag="set_paused"):
    """Halts the core's steps, or goes on with them."""

    is_paused: bool


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Reads an adapter into the host's memory; answered by `AdapterLoaded`."""

    source: AdapterSource
    pins: bool = False  # keep it


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """Removes an adapter: no new request uses it."""

    identity: str


class Trials(msgspec.Struct, tag="trials"):
    """How many requests of a front end are to be tried alone (see `resubmission.py`): sent when a core has died, and
    when the last trial is over. A hub lets one front end after the other try; cores ignore it."""

    number: int


class AdapterLoaded(msgspec.Struct, array_like=True):
    """An adapter is on the host, or has failed."""

    identity: str
    error: str | None = None


class StepOutputs(msgspec.Struct, tag="step"):
    outputs: list[SequenceOutput]
    stats: EngineStats
    adapters: list[AdapterLoaded] = []


class StepBegins(msgspec.Struct, tag="running"):
    """The requests in the step that begins; sent when a step has new ones."""

    request_ids: list[str]


class Loading(msgspec.Struct, tag="loading"):
    """What share of the model's weights the core has loaded, from 0 to 1."""

    share: float


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
    """The core cannot start or go on. `message` is one line; `expected`: the user can act on it."""

    message: str
    expected: bool


class LiveView(msgspec.Struct, tag="live_view"):
    """The KV blocks and the sequences between two steps."""

    blocks: bytes  # one byte a block, a `kv_cache.block_pool.BlockState`
    sequences: list[SequenceProgress] = []  # the first of them in scheduling order, running ones first


class CacheWasReset(msgspec.Struct, tag="cache_was_reset"):
    """The answer to `ResetCache` and `DropCacheSession`."""

    num_blocks: int | None = None  # of the session; None: it is not known


class Leaving(msgspec.Struct, tag="leaving"):
    """From the host of a remote core: it will stop, and takes no more requests."""


FrontendMessage = (
    EngineRequest
    | Abort
    | AbortAll
    | GetLiveView
    | ResetCache
    | DropCacheSession
    | SetPaused
    | LoadAdapter
    | UnloadAdapter
    | Trials
)
CoreMessage = StepOutputs | StepBegins | Loading | Ready | Failed | LiveView | CacheWasReset | Leaving

_encode = msgspec.msgpack.Encoder().encode
_decode_frontend_message = msgspec.msgpack.Decoder(FrontendMessage).decode
decode_core_message = msgspec.msgpack.Decoder(CoreMessage).decode


def encode_message(message: FrontendMessage | CoreMessage) -> bytes:
    """Return a message as bytes. The tokens of a request's prompt are packed: as a list they would hold the core. What
    the core does not need is left out: the text, and the answer's id."""
    if isinstance(message, EngineRequest):
        prompt = message.prompt
        packed = msgspec.structs.replace(prompt, token_ids=[], text=None, packed=pack_tokens(prompt.token_ids))
        message = msgspec.structs.replace(message, prompt=packed, response_id="")
    return _encode(message)


def decode_frontend_message(data: bytes) -> FrontendMessage:
    message: FrontendMessage = _decode_frontend_message(data)
    if isinstance(message, EngineRequest):
        msgspec.structs.force_setattr(message.prompt, "token_ids", array("i", message.prompt.packed))
        msgspec.structs.force_setattr(message.prompt, "packed", b"")
    return message


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message waits. A non-blocking receive raises an exception otherwise, at ten times the cost."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)
