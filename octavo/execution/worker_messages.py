"""What the first worker of a team and the others tell each other, as MessagePack. Never pickle: it may cross hosts.

A `ToFollower` goes from the first worker to the others, a `ToLeader` comes back.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.plan import StepPlan
from octavo.request import AdapterSource


class Sizes(NamedTuple):
    """What has been found to fit, and all keep to."""

    num_blocks: list[int]  # by pool
    num_host_blocks: list[int]
    max_model_len: int


class Offer(NamedTuple):
    """Memory for the cache that a worker has, and what grants it, for messages."""

    num_bytes: int
    source: str


class Number(msgspec.Struct, tag="number"):
    """What a worker has of something, and the largest that one has of it."""

    value: int


class AgreedSizes(msgspec.Struct, tag="sizes"):
    sizes: Sizes


class Plan(msgspec.Struct, tag="plan"):
    """The next step."""

    plan: StepPlan


class SampledTokens(msgspec.Struct, tag="tokens"):
    """Of the oldest step of which they are not known yet."""

    values: bytes  # int64 [N]

    @property
    def tokens(self) -> NDArray[np.int64]:
        return np.frombuffer(self.values, np.int64)


class PictureRows(msgspec.Struct, tag="rows"):
    """What the tower has made of the pictures that the next plan's admissions have, by content."""

    values: dict[bytes, tuple[tuple[int, ...], bytes]]  # shape, and float32

    @classmethod
    def of(cls, rows: dict[bytes, NDArray[np.float32]]) -> PictureRows:
        """rows [parts, tokens, H] by content."""
        return cls({key: (of_one.shape, of_one.tobytes()) for key, of_one in rows.items()})

    @property
    def rows(self) -> dict[bytes, NDArray[np.float32]]:
        return {key: np.frombuffer(raw, np.float32).reshape(shape) for key, (shape, raw) in self.values.items()}


class PrepareAdapter(msgspec.Struct, tag="prepare_adapter"):
    """An adapter is read; `AdapterRead` answers, in any order."""

    source: AdapterSource


class ForgetAdapter(msgspec.Struct, tag="forget_adapter"):
    """No plan loads it any more."""

    identity: str


class ReleaseCache(msgspec.Struct, tag="release_cache"):
    """The cache's memory goes back to the system."""


class MemoryOffer(msgspec.Struct, tag="offer"):
    offer: Offer


class WorkerReady(msgspec.Struct, tag="ready"):
    """It takes plans."""


class CannotStart(msgspec.Struct, tag="cannot_start"):
    """Why, in a line that is the user's to act on."""

    error: str
    is_of_flags: bool


class AdapterRead(msgspec.Struct, tag="adapter_read"):
    """How many pages it takes, or why it cannot be served: said to the client if it is the request's fault."""

    identity: str
    num_pages: int
    error: str | None = None
    is_of_request: bool = True


ToFollower = Number | AgreedSizes | Plan | SampledTokens | PictureRows | PrepareAdapter | ForgetAdapter | ReleaseCache
ToLeader = Number | MemoryOffer | WorkerReady | CannotStart | AdapterRead

encode = msgspec.msgpack.Encoder().encode
decode_to_follower = msgspec.msgpack.Decoder(ToFollower).decode
decode_to_leader = msgspec.msgpack.Decoder(ToLeader).decode
