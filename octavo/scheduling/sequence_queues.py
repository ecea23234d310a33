"""The queues of sequences: running, each with a row of the runner's tables, and waiting.

Sequences are added, started, forked, preempted and dropped here. The scheduler decides which of them run in a step, and
with how many tokens.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter

from octavo.kv_cache.manager import KVCacheManager
from octavo.lora.pool import AdapterPool
from octavo.sequence import Sequence

scheduling_order = attrgetter("key", "index")


class SequenceQueues:
    """Every sequence that has not ended is either running or waiting. Both queues are in scheduling order: the first
    sequence runs first, the last is preempted first."""

    def __init__(self, max_num_seqs: int, cache: KVCacheManager, adapters: AdapterPool | None) -> None:
        self.cache, self.adapters = cache, adapters
        self.on_end: list[Callable[[Sequence], None]] = []  # called with each sequence that has ended
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_waiting: Counter[str | None] = Counter()  # by adapter; None: the base model
        self.requests: dict[str, list[Sequence]] = {}  # by request
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))

    def __iter__(self) -> Iterator[Sequence]:
        for sequences in self.requests.values():
            yield from sequences

    @property
    def num_rows_left(self) -> int:
        """Rows that are free and not kept for forks."""
        return len(self.free_rows) - sum([seq.num_pending_forks for seq in self.running])

    def siblings(self, seq: Sequence) -> list[Sequence]:
        """Return the sequences of its request that have not ended, itself included."""
        return list(self.requests.get(seq.request_id, ()))

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self.requests.setdefault(seq.request_id, []).append(seq)
        self._wait(seq)

    def start(self, seq: Sequence) -> None:
        """Move a waiting sequence to the running ones, with a row."""
        self._leave_waiting(seq)
        self._take_row(seq)

    def preempt(self, seq: Sequence, may_swap: bool) -> None:
        """Take the blocks and the row of a running sequence, and queue it again at its old place."""
        seq.num_preemptions += 1
        if not (may_swap and self.cache.swap_out(seq)):
            self.cache.release(seq)
        self._return_row(seq)
        self._wait(seq)

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """Start a sibling of `parent`, before its next token is added. With a free row, and if the parent still has
        blocks, the fork runs and shares them; otherwise it waits and is computed anew."""
        fork = parent.fork(index)
        if parent.row is not None and self.num_rows_left > 0:
            self.requests[parent.request.request_id].append(fork)
            self.cache.share_all(parent, fork)
            self._take_row(fork)
        else:
            fork.block_tables = []
            fork.num_computed_tokens = fork.num_registered_blocks = 0
            self.add(fork)
        return fork

    def append(self, seq: Sequence, token: int) -> None:
        """Add the token that beam search has chosen to a held sequence."""
        seq.token_ids.append(token)
        seq.is_held = False

    def drop(self, seq: Sequence) -> None:
        """End a sequence and free its row and blocks."""
        seq.has_ended = True
        self.cache.release(seq)
        if seq.row is None:
            self._leave_waiting(seq)
        else:
            self._return_row(seq)
        siblings = self.requests[seq.request_id]
        siblings.remove(seq)
        if not siblings:
            del self.requests[seq.request_id]
        for call in self.on_end:
            call(seq)

    def check(self, in_flight: list[Sequence]) -> None:
        """Assert that no sequence, row or block is lost or owned twice."""
        running, waiting, queues = self.running, self.waiting, list(self)
        self.cache.check(queues)
        rows = [seq.row for seq in running if seq.row is not None]
        num_rows = len(rows) + len(self.free_rows)
        assert len(rows) == len(running) and {*rows, *self.free_rows} == {*range(num_rows)}, "two sequences share a row"
        assert self.num_rows_left >= 0, "more rows are kept for forks than are free"
        assert all(seq.row is None for seq in waiting), "a waiting sequence has a row"
        assert running == sorted(running, key=scheduling_order), "running sequences are out of order"
        assert waiting == sorted(waiting, key=scheduling_order), "waiting sequences are out of order"
        assert len(running) + len(waiting) == len(queues) and {*running, *waiting} == {*queues}, "a sequence was lost"
        assert self.num_waiting == Counter(seq.adapter for seq in waiting), "waiting sequences are counted wrongly"
        for seq in running:
            assert (seq.num_uncomputed_tokens > 0) != seq.is_held or seq in in_flight, "a sequence lacks nothing"
            of_states = [seq.block_tables[state.group] for state in self.cache.states if seq.block_tables]
            assert seq in in_flight or all(len(table) <= 1 for table in of_states), (
                "draft tokens have kept their states"
            )
        if self.adapters is not None:
            self.adapters.check([seq.adapter for seq in running if seq.adapter is not None])
        if not queues:
            pools = [*self.cache.pools, *self.cache.host_pools]
            assert all(pool.num_used == 0 for pool in pools), "blocks are in use when idle"

    def _wait(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=scheduling_order)
        self.num_waiting[seq.adapter] += 1

    def _leave_waiting(self, seq: Sequence) -> None:
        self._leave(self.waiting, seq)
        self.num_waiting[seq.adapter] -= 1
        if not self.num_waiting[seq.adapter]:
            del self.num_waiting[seq.adapter]

    def _take_row(self, seq: Sequence) -> None:
        seq.row = self.free_rows.pop()
        if seq.adapter is not None and self.adapters is not None:
            seq.adapter_slot = self.adapters.pin(seq.adapter)
        insort(self.running, seq, key=scheduling_order)

    def _return_row(self, seq: Sequence) -> None:
        assert seq.row is not None
        self._leave(self.running, seq)
        self.free_rows.append(seq.row)
        seq.row = None
        if seq.adapter is not None and self.adapters is not None:
            self.adapters.unpin(seq.adapter)
            seq.adapter_slot = -1
        seq.is_admitted_to_runner = False

    @staticmethod
    def _leave(place: list[Sequence], seq: Sequence) -> None:
        i = bisect_left(place, scheduling_order(seq), key=scheduling_order)
        assert place[i] is seq
        del place[i]
