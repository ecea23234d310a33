"""Blocks that another server has on disk, its peer: they are copied into the own folder before a prompt is computed.

When it is the turn of a waiting sequence whose request names a peer (`EngineRequest.blocks_from`), a thread asks which
blocks the peer has, and copies those that are missing here, if that is predicted to be faster than computing them.
`DiskFetches` calls everything here, and then reads the blocks like all others of the folder. A peer that fails, or
takes too long, is not asked again for a while. `block_routes` is the peer's side.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.kv_cache.block_files import DIGEST_BYTES, block_file_name
from octavo.kv_cache.block_pool import BlockName
from octavo.kv_cache.block_writer import BlockWriter
from octavo.kv_cache.reader_threads import ReaderThreads
from octavo.kv_cache.saved_pools import SavedPools
from octavo.request import BlockPeer
from octavo.step_cost import ReadCost

logger = logging.getLogger(__name__)

BLOCKS_PATH = "/v1/cache/blocks"
MAX_NAMES = 16384  # blocks that one request names
CHUNK_BYTES = 4 << 20  # of blocks that one answer has
PIECE_BYTES = 1 << 18
_COPIES_AT_ONCE = 2  # from a peer
_MAX_PEERS = 64  # that are known
_TIMEOUT_S = 5.0  # to connect, and until the next bytes
_LEAST_PAUSE_S, _MOST_PAUSE_S = 1.0, 60.0  # until a peer that has failed is asked again
_WARNING_S = 60.0  # between two warnings of damaged blocks
_FOLDER_PAUSE_S = 60.0  # until blocks are copied again after one could not be written

_Contents = NDArray[np.uint8]


class _PeerError(Exception):
    """A peer's answer is not what it must be."""


class _Peer:
    """A server, and what is known of it."""

    def __init__(self, address: str) -> None:
        self.address, self.cost = address, ReadCost()
        self.threads = ReaderThreads(_COPIES_AT_ONCE, "copy blocks of another server")
        self.retry_at = 0.0  # on `clock`
        self.awaited_bytes = 0  # of blocks that copies under way will still ask for; guarded by `PeerBlocks._lock`
        self._pause_s, self._next_warning = _LEAST_PAUSE_S, 0.0

    def fail(self, why: object, now: float) -> None:
        """Do not ask it again for a while."""
        if now >= self.retry_at:  # several copies may fail at once
            logger.warning(
                "%s gives no blocks: %s; it is asked again after %g s, and prompts are computed meanwhile",
                self.address, why, self._pause_s,
            )  # fmt: skip
            self.retry_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)

    def warn_of_damage(self, now: float) -> None:
        """Tell that it sent a block whose checksum is wrong. It is asked again: the others on its disk may be well."""
        if now >= self._next_warning:
            logger.warning("%s sent a damaged block, and the prompt is computed from there on", self.address)
            self._next_warning = now + _WARNING_S

    def succeed(self) -> None:
        self._pause_s = _LEAST_PAUSE_S


@dataclass(slots=True)
class Copy:
    """The blocks of a prompt that are being copied."""

    peer: _Peer
    key: str
    keys: list[bytes]  # hashes of the blocks that may be used
    num_known_blocks: int  # of the prefix, in the pools and the folder
    compute_s: float  # predicted seconds to compute the others
    until: float  # on `clock`: then the rest is computed
    is_cancelled: bool = False
    is_refused: bool = False  # the own folder does not take the blocks
    done: Future[None] = field(default_factory=Future)


class PeerBlocks:
    """Copies blocks of other servers into the folder."""

    def __init__(self, pools: SavedPools, writer: BlockWriter, clock: Callable[[], float]) -> None:
        self._pools, self._writer, self._clock = pools, writer, clock
        self._files, self._cache, self._block_bytes = pools.files, pools.cache, pools.memory.block_bytes
        self._peers: dict[str, _Peer] = {}  # by address; the one last used is last
        self._lock = threading.Lock()  # for `_copied_bytes` and `_Peer.awaited_bytes`
        self._copied_bytes = 0  # since `take_copied_bytes`
        self._retry_at = 0.0  # when the own folder may take blocks again

    def close(self) -> None:
        """End the threads."""
        for peer in self._peers.values():
            peer.threads.close()

    def take_copied_bytes(self) -> int:
        """Return the bytes of blocks that were copied since the last call."""
        with self._lock:
            copied, self._copied_bytes = self._copied_bytes, 0
        return copied

    def begin(
        self, source: BlockPeer, keys: list[bytes], num_known_blocks: int, compute_s: float, patience_s: float
    ) -> Copy | None:
        """Begin to copy the blocks of `keys` behind the first `num_known_blocks`, which take `compute_s` to compute.
        Returns None if the peer or the own folder has failed lately."""
        peer = self._peers.pop(source.address, None) or _Peer(source.address)
        self._peers[source.address] = peer
        now = self._clock()
        if len(self._peers) > _MAX_PEERS:  # servers of a network come and go
            # The oldest, but rather one that works: a failed server that is forgotten would be asked again at once.
            *others, _ = self._peers.values()
            dropped = min(others, key=lambda other: now < other.retry_at)
            self._peers.pop(dropped.address).threads.close()  # after the copies that they have
        if now < max(peer.retry_at, self._retry_at):
            return None
        copy = Copy(peer, source.key, keys, num_known_blocks, compute_s, now + patience_s)
        copy.done = peer.threads.run(partial(self._run, copy))
        return copy

    def has_ended(self, copy: Copy) -> bool:
        """Return whether a copy has ended. One that takes too long is cancelled."""
        if not copy.done.done() and (now := self._clock()) >= copy.until:
            copy.is_cancelled = True
            has_begun = not copy.done.cancel()  # the peer is not to blame for the copies before this one
            if has_begun and not copy.done.done():
                copy.peer.fail("it takes longer than to compute the prompt", now)
        return copy.is_cancelled or copy.done.done()

    def _run(self, copy: Copy) -> None:
        """Copy blocks, in a thread."""
        if copy.is_cancelled or self._clock() < copy.peer.retry_at:  # it has failed since
            return
        why = ""
        try:
            with contextlib.closing(_connect(copy.peer.address)) as connection:
                self._copy(copy, connection)
            copy.peer.succeed()
        except (_PeerError, http.client.HTTPException, OSError) as error:
            why = str(error) or type(error).__name__
        except Exception as error:  # its text may have the key
            why = type(error).__name__
        if why and not copy.is_cancelled:
            copy.peer.fail(why, self._clock())

    def _copy(self, copy: Copy, connection: http.client.HTTPConnection) -> None:
        # 1. Find the longest prefix that the pools, the folder and the peer have together.
        unknown = [name for name in self._cache.all_names(copy.keys) if not self._files.knows(name)]
        at_peer = self._find(copy, connection, unknown)
        num_found = self._pools.num_prefix_blocks(
            copy.keys, len(copy.keys), lambda name: name in at_peer or self._files.knows(name)
        )
        missing = [
            name
            for name in self._cache.prefix_names(copy.keys, num_found)
            if name in at_peer and not self._pools.is_in_memory(name) and not self._files.has(name)
        ]
        # 2. Compare the predicted times.
        share = (num_found - copy.num_known_blocks) / (len(copy.keys) - copy.num_known_blocks)
        num_bytes = self._pools.num_bytes(missing)
        copy_s = copy.peer.cost.seconds(num_bytes + copy.peer.awaited_bytes)
        if num_found <= copy.num_known_blocks or copy_s >= copy.compute_s * share:
            copy.peer.cost.doubt()
            return
        # 3. Copy.
        self._await(copy.peer, num_bytes)
        try:
            for names in self._copy_chunks(copy, connection, missing):
                chunk_bytes = self._pools.num_bytes(names)
                self._await(copy.peer, -chunk_bytes)
                num_bytes -= chunk_bytes
        finally:
            self._await(copy.peer, -num_bytes)

    def _copy_chunks(
        self, copy: Copy, connection: http.client.HTTPConnection, names: Sequence[BlockName]
    ) -> Iterator[Sequence[BlockName]]:
        """Copy blocks chunk by chunk, up to the first one that the peer does not give or the own folder does not take.
        A chunk is written while the next one is read. Yields the names of each chunk that has been read."""
        per_chunk = max(1, CHUNK_BYTES // max(self._block_bytes))
        written: threading.Event | None = None
        for first in range(0, len(names), per_chunk):
            asked = names[first : first + per_chunk]
            blocks = self._read(copy, connection, asked)
            yield asked
            if not _wait(written) or copy.is_refused:
                return
            written = self._write(copy, blocks)
            if len(blocks) < len(asked):
                break
        _wait(written)

    def _await(self, peer: _Peer, num_bytes: int) -> None:
        with self._lock:
            peer.awaited_bytes += num_bytes

    def _find(self, copy: Copy, connection: http.client.HTTPConnection, names: Sequence[BlockName]) -> set[BlockName]:
        """Return those of `names` that the peer has."""
        found = set[BlockName]()
        for first in range(0, len(names), MAX_NAMES):
            asked = names[first : first + MAX_NAMES]
            answer = self._ask(copy, connection, "find", asked, len(asked))
            if len(answer) != len(asked):
                raise _PeerError(f"it answered {len(answer)} bytes about {len(asked)} blocks")
            found |= {name for name, is_there in zip(asked, answer, strict=True) if is_there == ord("1")}
        return found

    def _read(
        self, copy: Copy, connection: http.client.HTTPConnection, names: Sequence[BlockName]
    ) -> list[tuple[BlockName, _Contents]]:
        """Return the names and contents of blocks up to the first one that the peer lacks, or that is damaged."""
        sizes = [self._block_bytes[pool] + DIGEST_BYTES for pool, _ in names]
        begin = time.monotonic()
        answer = memoryview(self._ask(copy, connection, "read", names, sum(sizes)))
        num_bytes = len(answer)
        blocks = []
        for name, size in zip(names, sizes, strict=True):
            if not answer:
                break
            contents, digest, answer = answer[: size - DIGEST_BYTES], answer[size - DIGEST_BYTES : size], answer[size:]
            if not self._files.is_intact(name, contents, digest):
                copy.peer.warn_of_damage(self._clock())
                break
            blocks.append((name, np.frombuffer(contents, np.uint8)))
        copy.peer.cost.observe(num_bytes, time.monotonic() - begin)  # damaged ones take time too
        return blocks

    def _ask(
        self, copy: Copy, connection: http.client.HTTPConnection, what: str, names: Sequence[BlockName], max_bytes: int
    ) -> bytearray:
        """Return the body of the peer's answer. Raises `_PeerError` and errors of `http.client`."""
        path = f"{urlsplit(copy.peer.address).path}{BLOCKS_PATH}/{self._files.fingerprint_hex}/{what}"
        body = msgspec.json.encode([block_file_name(name) for name in names])
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {copy.key}"}
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _PeerError(f"it answered {response.status}")
        if response.length is None or response.length > max_bytes:
            raise _PeerError(f"it answered {response.length} bytes, and {max_bytes} were asked for at most")
        data, num_bytes = bytearray(), response.length
        while len(data) < num_bytes:
            piece = response.read1(PIECE_BYTES)  # returns what has come: a slow answer can be cancelled
            if not piece or copy.is_cancelled:
                raise _PeerError("it hung up")
            data += piece
        response.read()
        return data

    def _write(self, copy: Copy, blocks: Sequence[tuple[BlockName, _Contents]]) -> threading.Event:
        """Have the writer write blocks, up to the first one that the folder does not take. Returns the event
        that the writer is done."""
        written = threading.Event()

        def write() -> None:
            try:
                for name, contents in blocks:
                    if copy.is_cancelled or copy.is_refused or self._files.knows(name):
                        continue
                    if self._writer.write_file(name, contents):
                        with self._lock:
                            self._copied_bytes += contents.nbytes
                    else:
                        copy.is_refused, self._retry_at = True, self._clock() + _FOLDER_PAUSE_S
            finally:
                written.set()

        self._writer.enqueue_task(write)
        return written


def _connect(address: str) -> http.client.HTTPConnection:
    """Return a connection, which is made with the first request. It follows neither redirects nor proxies."""
    parts = urlsplit(address)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.netloc, timeout=_TIMEOUT_S)


def _wait(written: threading.Event | None) -> bool:
    """Wait for the writer. Returns False if the disk hangs."""
    return written is None or written.wait(_TIMEOUT_S)
