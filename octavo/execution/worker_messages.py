"""The messages between the first worker and the others, as MessagePack. Never pickle: they may cross hosts.

`ToFollower` goes from the first worker to the others, `ToLeader` the other way.
"""

from typing import NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.request import AdapterSource
from octavo.step_plan import BlockMoves, StepPlan


class Sizes(NamedTuple):
    """The sizes that the first worker has chosen for all."""

    num_blocks: list[int]  # by pool
    num_host_blocks: list[int]
    max_model_len: int


class Offer(NamedTuple):
    """A worker's memory for the cache, and what limits it, for messages."""

    num_bytes: int
    source: str


class Number(msgspec.Struct, tag="number"):
    """A worker's number; the answer is the largest of all workers' numbers."""

    value: int


class AgreedSizes(msgspec.Struct, tag="sizes"):
    sizes: Sizes


class Plan(msgspec.Struct, tag="plan"):
    """The next step."""

    plan: StepPlan


class SampledTokens(msgspec.Struct, tag="tokens"):
    """The tokens of the oldest step whose tokens were not sent."""

    values: bytes  # int64 [N]

    @property
    def tokens(self) -> NDArray[np.int64]:
        return np.frombuffer(self.values, np.int64)


class TowerRows(msgspec.Struct, tag="rows"):
    """The rows of the next plan's media, by content hash."""

    values: dict[bytes, tuple[tuple[int, ...], bytes]]  # shape, and float32

    @classmethod
    def of(cls, rows: dict[bytes, NDArray[np.float32]]) -> Self:
        """Make the message of rows [parts, tokens, H] by content hash."""
        return cls({key: (of_one.shape, of_one.tobytes()) for key, of_one in rows.items()})

    @property
    def rows(self) -> dict[bytes, NDArray[np.float32]]:
        return {key: np.frombuffer(raw, np.float32).reshape(shape) for key, (shape, raw) in self.values.items()}


class PrepareAdapter(msgspec.Struct, tag="prepare_adapter"):
    """Read an adapter; answered by `AdapterRead`, in any order."""

    source: AdapterSource


class ForgetAdapter(msgspec.Struct, tag="forget_adapter"):
    """Free an adapter: no plan loads it any more."""

    identity: str


class ReleaseCache(msgspec.Struct, tag="release_cache"):
    """Give the cache's memory back to the system."""


class MoveBlocks(msgspec.Struct, tag="move_blocks"):
    """Move blocks outside of a step."""

    moves: list[BlockMoves]


class ReadBlocks(msgspec.Struct, tag="read_blocks"):
    """Read blocks in the host's memory; answered by `BlockContents`."""

    pool: int
    blocks: list[int]


class WriteBlocks(msgspec.Struct, tag="write_blocks"):
    """Overwrite blocks in the host's memory."""

    pool: int
    blocks: list[int]
    contents: bytes  # uint8 [len(blocks), bytes of the worker's part of a block]


class MemoryOffer(msgspec.Struct, tag="offer"):
    offer: Offer


class WorkerReady(msgspec.Struct, tag="ready"):
    """The worker takes plans."""

    block_bytes: list[int]  # of its part of a block of the cache, by pool
    hardware: str  # `Device.hardware`
    node: str = ""  # `node_identity`, with --kv-cache-disk from the first worker of each node other than node 0


class CannotStart(msgspec.Struct, tag="cannot_start"):
    """Why the worker cannot start: one line for the user."""

    error: str
    is_of_flags: bool


class AdapterRead(msgspec.Struct, tag="adapter_read"):
    """How many pages the adapter takes, or why it cannot be served; the client is told if the request is at fault."""

    identity: str
    num_pages: int
    error: str | None = None
    is_of_request: bool = True


class BlockContents(msgspec.Struct, tag="contents"):
    """The worker's part of blocks of the cache."""

    contents: bytes  # uint8 [number of blocks, bytes of the worker's part of a block]


ToFollower = (
    Number | AgreedSizes | Plan | SampledTokens | TowerRows | PrepareAdapter | ForgetAdapter | ReleaseCache
    | MoveBlocks | ReadBlocks | WriteBlocks
)  # fmt: skip
ToLeader = Number | MemoryOffer | WorkerReady | CannotStart | AdapterRead | BlockContents

encode = msgspec.msgpack.Encoder().encode
decode_to_follower = msgspec.msgpack.Decoder(ToFollower).decode
decode_to_leader = msgspec.msgpack.Decoder(ToLeader).decode
