"""Sessions of the cache on disk: an id under which a client keeps the blocks of a conversation for a time, and frees
them.

`EngineCore` calls `keep` when a sequence has ended, and `drop` for a client. `BlockWriter` knows which blocks are still
on their way to the folder, and `BlockFiles` has a file for each session.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Set
from dataclasses import dataclass, field
from functools import partial

from octavo.kv_cache.block_pool import BlockName
from octavo.kv_cache.block_writer import BlockWriter
from octavo.kv_cache.saved_pools import SavedPools
from octavo.sequence import Sequence

_SWEEP_S = 60.0  # between two searches for sessions that have ended
_LEAST_PRUNED = 64  # blocks that a session gains before lost blocks are looked for again
_LEAST_MEMORY_S = 86400.0  # the sessions of a former server can be dropped at least so long


@dataclass(slots=True)
class _Session:
    """The blocks of a conversation's turns. Lost blocks are removed now and then."""

    names: set[BlockName] = field(default_factory=set)
    keep_until: float = 0.0  # time.time
    prune_at: int = _LEAST_PRUNED  # number of blocks at which lost blocks are looked for


class CacheSessions:
    """The sessions that can be dropped, and their blocks."""

    def __init__(self, pools: SavedPools, writer: BlockWriter) -> None:
        self._pools, self._files, self._writer = pools, pools.files, writer
        self._sessions: dict[str, _Session] = {}  # the one used longest ago first
        self._num_blocks = 0  # of all sessions; a block counts in each
        self._next_sweep = 0.0  # time.time
        for session, keep_until in self._files.sessions().items():
            # Sessions whose time has passed can be dropped for a day too: some of their blocks may be left.
            end = max(keep_until, time.time() + _LEAST_MEMORY_S)
            self._remember(session, self._files.session_names(session), end)

    @property
    def count(self) -> int:
        return len(self._sessions)

    def clear(self) -> None:
        self._sessions.clear()
        self._num_blocks = 0

    def keep(self, seq: Sequence) -> None:
        """Keep the blocks of a finished sequence whose request has a session: the prompt's, and those of prompt and
        answer together, as the next turn may begin with either."""
        request = seq.request
        if request.cache_session is None:
            return
        session, found = _session_key(request.cache_session, request.prompt.cache_salt), dict[BlockName, None]()
        num_hashes = len(seq.block_hashes)  # fewer than the prompt's if the request has waited until its end
        for limit in (len(request.prompt.token_ids) // self._pools.cache.block_size, num_hashes):
            found |= dict.fromkeys(self._pools.known_names(seq.block_hashes, min(limit, num_hashes)))
        if not found:
            return
        keep_until = time.time() + request.cache_ttl_s
        self._writer.pin_pending(found, keep_until)
        self._remember(session, found.keys(), keep_until)
        pending = filter(self._writer.is_pending, self._sessions[session].names)  # includes blocks of earlier turns
        keep = partial(self._files.keep_session, session, [*found, *pending], keep_until)
        self._writer.enqueue_task(keep, may_skip=True)
        self._forget_old()

    def drop(self, session_id: str, salt: str | None) -> int | None:
        """Free the blocks that only this session has, in the pools and on disk. Returns their number, or None if the
        session is not known."""
        session = _session_key(session_id, salt)
        if session not in self._sessions:
            return None
        names = self._forget(session)
        freed = set(names)
        for other in self._sessions.values():
            freed -= freed & other.names  # takes time in proportion to the smaller set
        for name in freed:
            self._writer.remove(name)
        self._writer.enqueue_task(partial(self._files.drop_session, session, names))
        return len(freed)

    def _remember(self, session: str, names: Set[BlockName], keep_until: float) -> None:
        """Add blocks to a session, and make it the one used last."""
        one = self._sessions.pop(session, None) or _Session()
        num_before = len(one.names)
        one.names |= names
        one.keep_until = max(one.keep_until, keep_until)  # as the blocks of former turns are kept
        if len(one.names) >= one.prune_at:
            one.names = {name for name in one.names if name in names or self._is_anywhere(name)}
            one.prune_at = 2 * len(one.names) + _LEAST_PRUNED
        self._num_blocks += len(one.names) - num_before
        self._sessions[session] = one

    def _is_anywhere(self, name: BlockName) -> bool:
        """Return whether a block is in its pool, on disk or on its way there."""
        return self._pools.is_in_memory(name) or self._writer.is_pending(name) or self._files.knows(name)

    def _forget_old(self) -> None:
        """Forget the sessions whose time is over, and the least recently used sessions while all together have more
        blocks than fit on disk. Their blocks stay until they are evicted."""
        now, most = time.time(), self._files.limit_bytes // min(self._pools.memory.block_bytes)
        forgotten = []
        if now >= self._next_sweep:
            self._next_sweep = now + _SWEEP_S
            forgotten = [session for session, one in self._sessions.items() if one.keep_until <= now]
        for session in forgotten:
            self._forget(session)
        while len(self._sessions) > 1 and self._num_blocks > most:
            forgotten.append(next(iter(self._sessions)))
            self._forget(forgotten[-1])
        for session in forgotten:
            self._writer.enqueue_task(partial(self._files.forget_session, session))

    def _forget(self, session: str) -> set[BlockName]:
        """Forget a session, and return its blocks."""
        names = self._sessions.pop(session).names
        self._num_blocks -= len(names)
        return names


def _session_key(session_id: str, salt: str | None) -> str:
    """Return a session's name on disk. It includes the salt, so that tenants have different sessions."""
    return hashlib.sha256(repr((session_id, salt)).encode()).hexdigest()
