"""Blocks that another server has on disk are copied; a server that fails or hangs keeps nobody from computing."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from octavo.kv_cache.block_files import block_paths
from octavo.kv_cache.disk_fetches import Readiness
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.kv_cache.peer_blocks import _COPIES_AT_ONCE, BLOCKS_PATH, _Peer
from octavo.request import BlockPeer
from octavo.sequence import Sequence as TokenSequence
from octavo.stats import EngineStats
from octavo.step_cost import ReadCost
from tests.kv_cache.disk_engine import BLOCK_BYTES, FULL, STATE, WINDOW, Engine, request
from tests.waiting import wait_until

PROMPT = list(range(100, 122))
KEY = "secret"
_Answer = tuple[int, bytes, int | None]  # status, body and its stated length; None: no length is stated


class Peer(ThreadingHTTPServer):
    """A server that has blocks in a folder."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.asked = str(folder), list[str]()
        self.spoil: Callable[[str, bytes], _Answer] = lambda _, body: (200, body, len(body))
        self.address = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Peer

    def do_POST(self) -> None:
        names = json.loads(self.rfile.read(int(self.headers["content-length"])))
        fingerprint, what = self.path.removeprefix(BLOCKS_PATH + "/").split("/")
        paths = [Path(path) for path in block_paths(self.server.folder, fingerprint, names) or ()]
        self.server.asked.append(what)
        assert self.headers["authorization"] == f"Bearer {KEY}"
        if what == "find":
            body = b"".join(b"1" if path.is_file() else b"0" for path in paths)
        else:
            body = b"".join(path.read_bytes() for path in paths)
        status, body, length = self.server.spoil(what, body)
        self.send_response(status)
        if length is not None:
            self.send_header("content-length", str(length))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = length != len(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Makes engines, each with a folder of its own."""
    monkeypatch.setattr("octavo.kv_cache.peer_blocks._TIMEOUT_S", 600.0)
    monkeypatch.setattr("octavo.kv_cache.disk_fetches._LOOKUP_GRACE_S", 60.0)
    made: list[Engine] = []

    def make(layers: Sequence[LayerCacheSpec] = (FULL,)) -> Engine:
        made.append(Engine(tmp_path / str(len(made)), layers))
        return made[-1]

    yield make
    for one in made:
        one.tier.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    """Has what the first engine saves."""
    with Peer(tmp_path / "0") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def saved(engine: Engine) -> Engine:
    """Return an engine that has computed and saved the prompt."""
    engine.compute(PROMPT)
    engine.save()
    return engine


def begin(engine: Engine, address: str, tokens: list[int] = PROMPT, name: str = "r") -> TokenSequence:
    """Let it be the turn of a prompt whose blocks are said to be at an address."""
    asked = request(tokens)
    asked.request_id = name
    asked.blocks_from = BlockPeer(address, KEY)
    return TokenSequence(request=asked, key=(0, 0), seed=0, token_ids=list(tokens))  # type: ignore[arg-type]


def num_hits(engine: Engine, address: str, tokens: list[int] = PROMPT) -> int:
    """Let it be the turn of such a prompt until it starts; return how many of its tokens were found."""
    return found(engine, address, tokens).num_disk_hits


def found(engine: Engine, address: str, tokens: list[int] = PROMPT) -> EngineStats:
    run_until_it_starts(engine, begin(engine, address, tokens))
    return engine.stats()


def run_until_it_starts(engine: Engine, seq: TokenSequence) -> None:
    fetches = engine.tier.fetches
    wait_until(lambda: fetches.prepare(seq, may_wait=True) is Readiness.READY or fetches.wait(1.0))
    fetches.forget(seq)


def hang(peer: Peer, *questions: str) -> threading.Event:
    """Have the peer answer none of `questions`, all by default, until the event is set."""
    may_go = threading.Event()

    def wait(question: str, body: bytes) -> _Answer:
        if question in (questions or ("find", "read")):
            may_go.wait()
        return 200, body, len(body)

    peer.spoil = wait
    return may_go


def known(engine: Engine, peer: Peer) -> _Peer:
    """Return what an engine knows of a server."""
    return engine.tier.fetches._peers._peers[peer.address]


@pytest.mark.parametrize("layers", [(FULL,), (FULL, WINDOW), (FULL, STATE), (STATE,), (FULL, WINDOW, STATE)], ids=str)
def test_blocks_of_another_server_have_the_same_contents(
    layers: Sequence[LayerCacheSpec], engines: Any, peer: Peer
) -> None:
    first, second = saved(engines(layers)), engines(layers)
    stats = found(second, peer.address)
    assert (stats.num_disk_hits, peer.asked) == (20, ["find", "read"])
    assert stats.disk_copied_bytes == BLOCK_BYTES * len(second.contents())
    assert second.contents().items() <= first.contents().items()
    assert num_hits(second, peer.address) == 0 and len(peer.asked) == 2, "all of them are here"
    second.tier.forget_pools(removes_files=False)
    second.cache.forget_prefixes()
    assert num_hits(second, peer.address) == 20 and len(peer.asked) == 2, "they are in the own folder too"


def test_only_blocks_that_are_missing_are_copied_chunk_by_chunk(
    engines: Any, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.kv_cache.peer_blocks.CHUNK_BYTES", 128)
    monkeypatch.setattr("octavo.kv_cache.peer_blocks.MAX_NAMES", 2)
    saved(engines())
    second = engines()
    second.compute(PROMPT[:9])
    assert num_hits(second, peer.address) == 12
    assert peer.asked == ["find"] * 3 + ["read"] * 2


@pytest.mark.parametrize("how", ["damaged", "another block", "another digest"])
def test_a_damaged_block_ends_what_is_copied(
    how: str, engines: Any, peer: Peer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = saved(engines()), engines()
    size, observed = BLOCK_BYTES + 32, list[int]()
    monkeypatch.setattr(ReadCost, "observe", lambda _, num_bytes, __: observed.append(num_bytes))

    def spoil(what: str, body: bytes) -> _Answer:
        blocks = [body[at : at + size] for at in range(0, len(body), size)]
        if what == "read" and how == "damaged":
            blocks[2] = b"?" + blocks[2][1:]
        elif what == "read":
            blocks[2] = blocks[3] if how == "another block" else blocks[2][:BLOCK_BYTES] + blocks[3][BLOCK_BYTES:]
        return 200, b"".join(blocks), len(body)

    well, peer.spoil = peer.spoil, spoil
    assert num_hits(second, peer.address) == 8 and second.contents().items() <= first.contents().items()
    assert "sent a damaged block" in caplog.text
    assert observed[0] == 5 * size, "the intact ones alone would make the server look slow"
    peer.spoil = well
    assert num_hits(second, peer.address) == 12 and second.contents() == first.contents(), "it is asked again at once"


BROKEN: dict[str, Callable[[str, bytes], _Answer]] = {
    "refused": lambda _, __: (401, b"", 0),
    "too long": lambda _, body: (200, body + body, 2 * len(body)),
    "too long about a block": lambda what, body: (200, body + b"1" * (what == "read"), len(body) + (what == "read")),
    "no length": lambda _, body: (200, body, None),
    "cut off": lambda what, body: (200, body[:-1] if what == "read" else body, len(body)),
    "too short": lambda _, body: (200, body[:-1], len(body) - 1),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_server_that_answers_wrongly_gives_no_blocks_and_is_left_alone(
    how: str, engines: Any, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = saved(engines()), engines()
    well, peer.spoil = peer.spoil, BROKEN[how]
    assert num_hits(second, peer.address) == 0 and second.contents() == {}
    assert f"{peer.address} gives no blocks" in caplog.text and KEY not in caplog.text
    peer.spoil, peer.asked = well, []
    assert num_hits(second, peer.address) == 0 and peer.asked == []
    second.now += 2.0
    assert num_hits(second, peer.address) == 20 and second.contents() == first.contents()


def test_a_server_that_is_not_there_costs_nothing(engines: Any, peer: Peer) -> None:
    saved(engines())
    second = engines()
    peer.shutdown()
    peer.server_close()
    assert num_hits(second, peer.address) == 0
    assert known(second, peer).retry_at > second.now


def test_an_unforeseen_error_pauses_the_server_and_shows_no_key(
    engines: Any, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    second = engines()
    seq = begin(second, peer.address)
    seq.request.blocks_from = BlockPeer(peer.address, KEY + "\n")  # http.client's error has the header
    run_until_it_starts(second, seq)
    assert known(second, peer).retry_at > second.now
    assert "gives no blocks: ValueError" in caplog.text and KEY not in caplog.text


def test_a_copy_behind_others_is_no_failure_of_its_server(engines: Any, peer: Peer) -> None:
    saved(engines())
    second, may_go = engines(), hang(peer)
    fetches = second.tier.fetches
    seqs = [begin(second, peer.address, name=str(number)) for number in range(_COPIES_AT_ONCE + 1)]
    for seq in seqs:
        assert fetches.prepare(seq, may_wait=True) is Readiness.READING
    wait_until(lambda: len(peer.asked) == _COPIES_AT_ONCE)
    copies = list(fetches._copies.values())
    second.now = max(copy.until for copy in copies if copy is not None)
    assert fetches.prepare(seqs[-1], may_wait=True) is Readiness.READY
    assert known(second, peer).retry_at == 0.0
    assert fetches.prepare(seqs[0], may_wait=True) is Readiness.READY
    assert known(second, peer).retry_at > second.now
    may_go.set()
    wait_until(lambda: all(copy is not None and copy.done.done() for copy in copies))


def test_copies_under_way_make_another_one_slower(engines: Any, peer: Peer) -> None:
    saved(engines())
    second, may_go = engines(), hang(peer, "read")
    fetches, seqs = second.tier.fetches, [begin(second, peer.address, name=name) for name in "ab"]
    fetches._peers._peers[peer.address] = known_peer = _Peer(peer.address)
    known_peer.cost._s_per_byte = 0.6 * fetches._compute_s(0, 5) / (5 * BLOCK_BYTES)
    assert fetches.prepare(seqs[0], may_wait=True) is Readiness.READING
    wait_until(lambda: peer.asked == ["find", "read"])
    wait_until(lambda: fetches.prepare(seqs[1], may_wait=True) is Readiness.READY or len(peer.asked) > 3)
    assert peer.asked == ["find", "read", "find"] and second.stats().num_disk_hits == 0
    may_go.set()
    run_until_it_starts(second, seqs[0])
    assert second.stats().num_disk_hits == 20 and known_peer.awaited_bytes == 0


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "the disk is full"), None], ids=["full", "too small"])
def test_a_folder_that_takes_no_blocks_ends_what_is_copied(
    error: OSError | None, engines: Any, peer: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(engines())
    second = engines()

    def write(*_: Any) -> bool:
        if error is not None:
            raise error
        return False

    monkeypatch.setattr("octavo.kv_cache.peer_blocks.CHUNK_BYTES", 2 * BLOCK_BYTES)
    well = second.files.write
    monkeypatch.setattr(second.files, "write", write)
    stats = found(second, peer.address)
    assert (stats.num_disk_hits, stats.num_disk_dropped, stats.disk_copied_bytes) == (0, 1, 0)
    assert peer.asked == ["find", "read", "read"], "the second chunk was under way"
    assert ("the disk is full" in caplog.text) == (error is not None)
    assert num_hits(second, peer.address) == 0 and len(peer.asked) == 3, "nothing is copied for a while"
    monkeypatch.setattr(second.files, "write", well)
    second.now += 61.0
    assert num_hits(second, peer.address) == 20


def test_a_server_that_hangs_is_waited_for_no_longer_than_computing_takes(engines: Any, peer: Peer) -> None:
    saved(engines())
    second, may_go = engines(), hang(peer)
    seq, fetches = begin(second, peer.address), second.tier.fetches
    assert (
        fetches.prepare(seq, may_wait=True) is Readiness.READING
        and fetches.prepare(seq, may_wait=True) is Readiness.READING
    )
    wait_until(lambda: peer.asked)
    copy = fetches._copies["r"]
    assert copy is not None
    second.now = copy.until
    assert fetches.prepare(seq, may_wait=True) is Readiness.READY
    fetches.forget(seq)
    assert num_hits(second, peer.address) == 0 and peer.asked == ["find"], "the next request does not wait at all"
    may_go.set()
    wait_until(copy.done.done)
    assert peer.asked == ["find"] and second.contents() == {}


def test_nothing_is_copied_for_a_request_that_has_ended_or_while_the_folder_is_emptied(
    engines: Any, peer: Peer
) -> None:
    saved(engines())
    second, may_go = engines(), hang(peer)
    seqs = [begin(second, peer.address, name=name) for name in "ab"]
    for seq in seqs:
        assert second.tier.fetches.prepare(seq, may_wait=True) is Readiness.READING
    copies = list(second.tier.fetches._copies.values())
    second.tier.fetches.forget(seqs[0])
    second.tier.forget_pools(removes_files=True)
    may_go.set()
    wait_until(lambda: all(copy is not None and copy.done.done() for copy in copies))
    wait_until(lambda: not second.tier.writer.is_removing_all)
    assert second.files.num_bytes == 0 and "read" not in peer.asked


def test_blocks_that_take_longer_to_copy_are_computed(engines: Any, peer: Peer) -> None:
    saved(engines())
    second = engines()
    second.compute(PROMPT[:5])
    assert num_hits(second, peer.address, PROMPT[:9]) == 4
    second.tier.fetches._peers._peers[peer.address].cost._s_per_byte = 1.0
    assert num_hits(second, peer.address) == 0 and peer.asked == ["find", "read", "find"]


@pytest.mark.parametrize(
    ("named", "known"),
    [
        ([1, 0, 2, 0, 3, 0, 4, 0, 5, 0], [5, 0]),  # those last used
        ([1, 0, 2], [1, 2]),  # those that have failed are not asked again at once
    ],
)
def test_of_servers_that_come_and_go_a_few_are_known(
    engines: Any, peer: Peer, monkeypatch: pytest.MonkeyPatch, named: list[int], known: list[int]
) -> None:
    """Server 0 answers, the others do not."""
    monkeypatch.setattr("octavo.kv_cache.peer_blocks._MAX_PEERS", 2)
    addresses = [peer.address, *(f"http://127.0.0.1:{number}" for number in range(1, 6))]
    saved(engines())
    second = engines()
    num_threads = threading.active_count()
    for place, number in enumerate(named):
        run_until_it_starts(second, begin(second, addresses[number], [1000 + place, *PROMPT]))
    assert list(second.tier.fetches._peers._peers) == [addresses[number] for number in known]
    wait_until(lambda: threading.active_count() <= num_threads + 2 * _COPIES_AT_ONCE)


def test_a_peers_key_is_in_no_text() -> None:
    assert KEY not in repr(BlockPeer("http://host", KEY))
