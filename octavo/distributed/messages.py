"""What nodes tell each other about the group. What workers tell each other is `octavo.execution.worker_messages`'s."""

from __future__ import annotations

import msgspec


class Version(msgspec.Struct, tag="join", tag_field="kind"):
    """What of a `Join` can be read whatever version it comes from."""

    version: str


class Join(msgspec.Struct, tag="join", tag_field="kind"):
    """The first message of a connection to node 0, which stays open; the answer is `Joined` or `Refused`. Engines on
    other hosts than their server's are nodes, too."""

    version: str
    num_nodes: int
    rank: int
    host: str  # its name, for messages
    settings: dict[str, str]  # that all nodes must have alike, by name
    link_port: int  # where it takes rows from the node before; 0: nowhere


class Control(msgspec.Struct, tag="control", tag_field="kind"):
    """The first message of a connection between a worker of another node and the first worker."""

    session: bytes
    worker_rank: int  # number of the worker


class Rows(msgspec.Struct, tag="rows", tag_field="kind"):
    """The first message of a connection that rows go over from a stage to the next."""

    session: bytes
    rank: int  # of the workers within their stages


class EngineLink(msgspec.Struct, tag="engine_link", tag_field="kind"):
    """The first message of a connection between a server and one of its engines on another host."""

    session: bytes
    clock_s: float  # what `time.monotonic` is there


class Joined(msgspec.Struct, tag="joined", tag_field="kind"):
    """All nodes are there."""

    session: bytes  # of this group: what belongs to an earlier one is refused
    next_address: tuple[str, int] | None  # where the node behind takes rows; None: where node 0 listens


class Refused(msgspec.Struct, tag="refused", tag_field="kind"):
    reason: str
    may_pass: bool = False  # it may do to ask again


class Beat(msgspec.Struct, tag="beat", tag_field="kind"):
    """This node is there."""


class GroupReady(msgspec.Struct, tag="ready", tag_field="kind"):
    """All workers have loaded: from now on silence counts."""


class Ended(msgspec.Struct, tag="ended", tag_field="kind"):
    """This node leaves the group."""

    reason: str
    is_over: bool = False  # of node 0: nothing comes after this group


FirstMessage = Join | Control | Rows | EngineLink
Answer = Joined | Refused
News = Beat | GroupReady | Ended
