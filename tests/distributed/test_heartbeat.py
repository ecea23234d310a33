"""What nodes and stages on several hosts notice of each other."""

from __future__ import annotations

import queue
import re
import socket
from collections.abc import Callable

import numpy as np
import pytest

from octavo.distributed import heartbeat
from octavo.distributed.connection import framed
from octavo.distributed.heartbeat import Heartbeat
from octavo.distributed.messages import Ended, GroupReady, News
from octavo.execution.stage_links import TcpLink
from tests.waiting import within


@pytest.mark.parametrize(
    ("do", "expected"),
    [
        (lambda other: None, "has not been heard of for 0.2 s"),
        (lambda other: other.close(), "has closed its connection"),
        (lambda other: other.sendall(framed(Ended("it was told to"))), "has ended: it was told to"),
        (lambda other: other.sendall(b"HTTP/1.1 400 Bad Request"), "sends bytes that no node would send .*"),
    ],
)
def test_a_node_is_lost(do: Callable[[socket.socket], None], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the other one does comes in time, however late.
    monkeypatch.setattr(heartbeat, "SILENCE_S", 0.2 if "0.2 s" in expected else 1e6)
    lost: queue.Queue[str] = queue.Queue()
    own, other = socket.socketpair()
    one = Heartbeat(own, "node 7", lambda news: None, lost.put)
    one.be_strict()
    do(other)
    found = lost.get(timeout=within(60))
    one.close()
    other.close()
    assert re.fullmatch(expected, found)


def test_nodes_that_beat_hear_each_other_and_end_in_order() -> None:
    heard: queue.Queue[News] = queue.Queue()
    lost: queue.Queue[str] = queue.Queue()
    own, other = socket.socketpair()
    first = Heartbeat(own, "node 0", lambda news: None, lost.put)
    second = Heartbeat(other, "node 1", heard.put, lost.put)
    first.say(GroupReady())
    assert heard.get(timeout=within(60)) == GroupReady()
    first.close(Ended("that was all", is_over=True), grace_s=0)
    assert heard.get(timeout=within(60)) == Ended("that was all", is_over=True)
    assert lost.get(timeout=within(60)) == "has ended: that was all", "told by the second alone"
    second.close()
    assert lost.empty()


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def test_rows_arrive_over_tcp_however_many_are_under_way() -> None:
    """More than the sockets' buffers take, sent before anything is received."""
    one, other = connected()
    sender, receiver = TcpLink(one, []), TcpLink(other, [])
    rng = np.random.default_rng(0)
    sent = [rng.integers(0, 256, (rows, 4096), np.uint8) for rows in (1, 2000, 1, 3000, 7)]
    for rows in sent:
        sender.send(rows)
    for rows in sent:
        found = np.empty_like(rows)
        receiver.receive(found)
        assert np.array_equal(found, rows)
    sender.send(sent[0])
    with pytest.raises(ConnectionError, match="is at another step"):
        receiver.receive(np.empty((2, 4096), np.uint8))


def test_rows_that_do_not_come_are_not_awaited() -> None:
    """Whether the stage before has ended, or a process that it is known by."""
    for num_sent in (0, 10):  # nothing, and half of a header
        one, other = connected()
        one.sendall(b"x" * num_sent)
        one.close()
        with pytest.raises(ConnectionError, match="has ended"):
            TcpLink(other, []).receive(np.empty((1, 8), np.uint8))
        other.close()
    one, other = connected()
    watched, process = socket.socketpair()
    process.close()
    with pytest.raises(ConnectionError, match="has ended"):
        TcpLink(other, [watched.fileno()]).receive(np.empty((1, 8), np.uint8))
    for connection in (one, other, watched):
        connection.close()
