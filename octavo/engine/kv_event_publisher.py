"""Publishes events of the prefix cache over ZeroMQ, as vLLM does, for routers such as those of llm-d and vLLM.

Each step's events are one message of three frames: the topic, a number that counts messages from 0 on (8 bytes, big
endian), and `EventBatch` as MessagePack. Subscribers that miss a number ask the replay endpoint for it.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from octavo.config import KVEventsConfig
from octavo.errors import ConfigError
from octavo.kv_cache.block_events import Event

logger = logging.getLogger(__name__)

_REPLAY_SEND_MS = 5000  # how long a client may stop reading
_END = (-1).to_bytes(8, "big", signed=True)  # the number of the message that ends a replay


class EventBatch(msgspec.Struct, array_like=True):
    """The events of a step."""

    ts: float  # seconds since 1970
    events: list[Event]
    data_parallel_rank: int | None = None


class KVEventPublisher:
    """A PUB socket for messages, and a thread with a ROUTER socket for replays if `replay_endpoint` is set."""

    def __init__(self, config: KVEventsConfig, data_parallel_rank: int, take: Callable[[], list[Event]]) -> None:
        """`take` returns the events since its last call. Raises `ConfigError` for an endpoint that cannot be used."""
        self._rank, self._topic, self._take = data_parallel_rank, config.topic.encode(), take
        self._count = 0
        self._sent = deque[tuple[int, bytes]](maxlen=config.buffer_steps)  # the last messages, for replays
        self._sent_lock = threading.Lock()
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, min(config.hwm, config.max_queue_size))
        endpoint = endpoint_of_rank(config.endpoint, data_parallel_rank)
        # As in vLLM, an address of this host is bound, and the address of another process is connected to.
        binds = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
        _attach(self._publisher, endpoint, binds=binds)
        if config.replay_endpoint is not None:
            replays = self._context.socket(zmq.ROUTER)
            # A client that does not read ends its replay: otherwise messages would be dropped silently.
            replays.router_mandatory, replays.sndtimeo = 1, _REPLAY_SEND_MS
            _attach(replays, endpoint_of_rank(config.replay_endpoint, data_parallel_rank), binds=True)
            threading.Thread(target=self._replay, args=(replays,), name="kv-event-replay", daemon=True).start()

    def publish(self) -> None:
        """Send the new events, if there are any. Never waits: a slow subscriber misses messages."""
        if not (events := self._take()):
            return
        payload = msgspec.msgpack.encode(EventBatch(time.time(), events, self._rank))
        number, self._count = self._count, self._count + 1
        with self._sent_lock:
            self._sent.append((number, payload))
        self._publisher.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    def close(self) -> None:
        """Close the sockets. Unsent messages are lost."""
        self._publisher.close(linger=0)
        self._context.term()  # ends the thread, which closes its socket

    def _replay(self, replays: zmq.Socket[bytes]) -> None:
        """Answer replay requests. A request is an empty frame and the number of the first wanted message."""
        with replays, contextlib.suppress(zmq.ContextTerminated):
            replays.linger = 0
            while True:
                frames = replays.recv_multipart()
                if len(frames) != 3:
                    continue
                client, _, first = frames
                with self._sent_lock:
                    wanted = [one for one in self._sent if one[0] >= int.from_bytes(first, "big")]
                try:
                    for number, payload in wanted:
                        replays.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
                    replays.send_multipart([client, b"", _END, b""])
                except zmq.ContextTerminated:
                    raise
                except zmq.ZMQError as e:  # the client has gone, or does not read
                    logger.warning("a replay of KV events has ended early: %s", e)


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of engine `rank`: the port plus the rank, or an address that ends in `_dp{rank}`."""
    if rank == 0:
        return endpoint
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}" if endpoint.startswith("tcp://") else f"{endpoint}_dp{rank}"


def _attach(socket: zmq.Socket[bytes], endpoint: str, *, binds: bool) -> None:
    socket.ipv6 = "[" in endpoint
    try:
        if binds:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as e:
        raise ConfigError(f"--kv-events-config: the endpoint {endpoint} cannot be used: {e}.") from None
