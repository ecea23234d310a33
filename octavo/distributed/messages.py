"""Messages between nodes about their group. Messages between workers are in `octavo.execution.worker_messages`."""

import msgspec


class Version(msgspec.Struct, tag="join", tag_field="kind"):
    """The part of a `Join` that can be read from any version."""

    version: str


class Join(msgspec.Struct, tag="join", tag_field="kind"):
    """The first message on a connection to node 0, which stays open. The answer is `Joined` or `Refused`. Engines on
    hosts without the server are nodes too."""

    version: str
    num_nodes: int
    rank: int
    host: str  # the host's name, for logs and errors
    settings: dict[str, str]  # by name; must be equal on all nodes
    link_port: int  # port for rows from the preceding node; 0: none


class Control(msgspec.Struct, tag="control", tag_field="kind"):
    """The first message on a connection from a worker of another node to the first worker."""

    session: bytes
    worker_rank: int  # number of the worker


class Rows(msgspec.Struct, tag="rows", tag_field="kind"):
    """The first message on a connection that carries rows from a stage to the next."""

    session: bytes
    rank: int  # rank of the workers within their stages


class EngineLink(msgspec.Struct, tag="engine_link", tag_field="kind"):
    """The first message on a connection between a server and one of its engines on another host."""

    session: bytes
    clock_s: float  # `time.monotonic` on the engine's host


class Joined(msgspec.Struct, tag="joined", tag_field="kind"):
    """The node has joined, and all nodes are there."""

    session: bytes  # of this group; messages of an earlier group are refused
    next_address: tuple[str, int] | None  # where the next node takes rows; None: at node 0


class Refused(msgspec.Struct, tag="refused", tag_field="kind"):
    reason: str
    may_pass: bool = False  # asking again may help


class Beat(msgspec.Struct, tag="beat", tag_field="kind"):
    """The sender is alive."""


class GroupReady(msgspec.Struct, tag="ready", tag_field="kind"):
    """All workers have loaded. From now on a short silence means a loss."""


class Ended(msgspec.Struct, tag="ended", tag_field="kind"):
    """The sender leaves the group."""

    reason: str
    is_over: bool = False  # from node 0: no group will follow


FirstMessage = Join | Control | Rows | EngineLink
Answer = Joined | Refused
News = Beat | GroupReady | Ended
