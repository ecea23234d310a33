"""Which blocks each sequence has: prefix hits, growth, copy-on-write, release, and swaps between device and host.

The scheduler calls it while it plans a step. Copies are collected in `BlockMoves`, one for each pool, which the plan
carries to the device. What differs by kind of group is in `attention_blocks`, `cross_blocks` and `state_blocks`.
"""

from __future__ import annotations

import collections.abc
from bisect import bisect
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from octavo.kv_cache.attention_blocks import AttentionBlocks
from octavo.kv_cache.block_events import BlockEvents
from octavo.kv_cache.block_hashes import extend_block_hashes
from octavo.kv_cache.block_pool import BlockName, BlockPool, TableChanges
from octavo.kv_cache.cross_blocks import CrossBlocks
from octavo.kv_cache.groups import CacheGroup
from octavo.kv_cache.state_blocks import MAX_DRAFT_TOKENS, StateBlocks
from octavo.sequence import Sequence
from octavo.step_plan import BlockMoves

UNLIMITED = 2**62
# Blocks of an answer from one snapshot to the next. A snapshot is a copy of the state, which may be hundreds of MB. A
# prompt that continues an answer computes the blocks after the last snapshot again.
_SNAPSHOT_BLOCKS = 8
_NOT_KEPT = -1  # in a table of host blocks, where the device's table has the null block


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached tokens, and their block table in each group."""

    num_tokens: int
    tables: list[list[int]]


class KVCacheManager:
    """Block tables over device and host pools, by cache group. Methods that need blocks return False or None, and
    change nothing, if there are too few."""

    def __init__(
        self,
        groups: collections.abc.Sequence[CacheGroup],
        num_blocks: list[int],
        block_size: int,
        num_host_blocks: list[int],
        enable_prefix_caching: bool,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        windowed = {group.pool for group in groups if group.spec.kind == "window"}
        self.pools = [
            BlockPool(count, int(pool in windowed), pool) for pool, count in enumerate(num_blocks)
        ]  # block 0 is null
        self.host_pools = [BlockPool(count, number=pool) for pool, count in enumerate(num_host_blocks)]
        # By pool: host blocks that get their contents with the next plan.
        self.host_blocks_written_later: list[set[int]] = [set() for _ in num_host_blocks]
        self.attention: list[AttentionBlocks] = []
        self.states: list[StateBlocks] = []
        cross: list[CrossBlocks] = []
        for i, group in enumerate(groups):
            is_alone = sum(other.pool == group.pool for other in groups) == 1
            if group.spec.kind == "state":
                assert is_alone, "a state group has its pool for itself"
                self.states.append(StateBlocks(i, self.pools[group.pool], block_size))
            elif group.spec.kind == "cross":
                cross.append(CrossBlocks(i, self.pools[group.pool], block_size, group.spec.num_tokens))
            else:
                suffix = b"" if is_alone else b"%d" % i
                window = group.spec.window
                self.attention.append(AttentionBlocks(i, self.pools[group.pool], block_size, window, suffix))
        self._groups: list[AttentionBlocks | CrossBlocks | StateBlocks] = sorted(
            [*self.attention, *cross, *self.states], key=lambda blocks: blocks.group
        )
        self._pool_of = [group.pool for group in groups]
        self._has_window = bool(windowed)
        self._moves = self._no_moves()
        # A sequence that waited for room, its number of tokens and its prefix at that time; see `_recall`.
        self._remembered: tuple[Sequence, int, Prefix] | None = None
        self._whole = next((blocks for blocks in self.attention if not blocks.window), None)
        self._returning: list[tuple[int, int]] = []  # (pool, host block): becomes free with the next plan
        # By pool: blocks that get the contents of a host block with the next plan, on behalf of `HostTier`.
        self._loads: list[dict[int, int]] = [{} for _ in self.pools]
        # Are called with the names of a sequence's indexed blocks when it loses its blocks.
        self.on_release: list[Callable[[list[BlockName]], None]] = []
        self.events: BlockEvents | None = None

    def collect_events(self) -> BlockEvents | None:
        """Collect the events of blocks from now on. Returns None if no group of layers has attention."""
        if self.attention:
            reported = self._whole or self.attention[0]
            self.events = BlockEvents(reported.pool, reported.key_suffix, self.block_size, reported.window)
        return self.events

    def forget_prefixes(self) -> None:
        """Empty the prefix index."""
        for pool in (*self.pools, *self.host_pools):
            pool.forget_all()
        if self.events is not None:
            self.events.clear()

    # Sizes.

    def most_blocks(self, num_tokens: int, num_step_tokens: int) -> list[int]:
        """Return, by pool, the most blocks that a sequence needs if steps compute up to `num_step_tokens`."""
        needed = [0] * len(self.pools)
        for blocks, pool in zip(self._groups, self._pool_of, strict=True):
            needed[pool] += blocks.num_most_blocks(num_tokens, num_step_tokens)
        return needed

    def capacity(self, num_step_tokens: int) -> int:
        """Return the tokens of the longest sequence that fits alone, in steps of up to `num_step_tokens`."""

        def is_too_long(num_tokens: int) -> bool:
            needed = self.most_blocks(num_tokens, num_step_tokens)
            return any(count > pool.num_usable for count, pool in zip(needed, self.pools, strict=True))

        limit = self.block_size * max(pool.num_blocks for pool in self.pools) + 1
        return bisect(range(1, limit), 0, key=is_too_long) if is_too_long(limit) else UNLIMITED

    def states_of_blocks(self) -> bytes:
        """The `BlockState` of every block, one pool after the other."""
        return b"".join([pool.states() for pool in self.pools])

    # For waiting sequences.

    def find_prefix(self, seq: Sequence) -> Prefix:
        """Return the longest prefix of `seq` for which every group has the blocks that later tokens need. At least one
        token is left to compute, for its logits; prompt log-probabilities need the whole prompt computed."""
        if (known := self._recall(seq)) is not None:
            return known
        num_blocks = 0
        if self.looks_up(seq):
            extend_block_hashes(seq, self.block_size)
            num_blocks = self.num_prefix_blocks(seq.block_hashes, (seq.num_tokens - 1) // self.block_size)
        tables = [blocks.prefix_table(seq.block_hashes, num_blocks) for blocks in self._groups]
        return Prefix(num_blocks * self.block_size, tables)

    def looks_up(self, seq: Sequence) -> bool:
        """Return whether a prefix of `seq` may be found at all."""
        return self.enable_prefix_caching and seq.params.prompt_logprobs is None

    def num_prefix_blocks(
        self, keys: list[bytes], limit: int, tiers: collections.abc.Sequence[Container[bytes]] = ()
    ) -> int:
        """Return the longest prefix, in blocks up to `limit`, for which every group has the blocks that later tokens
        need, in the index of its pool or in the tier below the pool."""
        num_blocks, num_agreed, i = limit, 0, 0
        while num_agreed < len(self._groups):  # a shorter prefix is looked up in the other groups again
            tier = tiers[self._pool_of[i]] if tiers else ()
            found = self._groups[i].num_prefix_blocks(keys, num_blocks, tier)
            num_agreed = num_agreed + 1 if found == num_blocks else 1
            num_blocks, i = found, (i + 1) % len(self._groups)
        return num_blocks

    def prefix_names(self, keys: list[bytes], num_blocks: int) -> list[BlockName]:
        """Return the names of the blocks that tokens after a prefix of `num_blocks` need."""
        found = [blocks.prefix_keys(keys, num_blocks) for blocks in self._groups]
        # Group by group from the end: a window group has only the last blocks of the prefix.
        places = range(-max(map(len, found), default=0), 0)
        return [
            (pool, of_group[place])
            for place in places
            for pool, of_group in zip(self._pool_of, found, strict=True)
            if len(of_group) >= -place
        ]

    def all_names(self, keys: list[bytes]) -> list[BlockName]:
        """Return the names of the blocks that tokens after any prefix may need."""
        groups = [(self._pool_of[blocks.group], blocks.key_suffix) for blocks in self.attention]
        groups += [(self._pool_of[blocks.group], b"") for blocks in self.states]
        return [(pool, key + suffix) for key in keys for pool, suffix in groups]

    def has_room(self, seq: Sequence, prefix_tables: list[list[int]], num_step_tokens: int) -> bool:
        """Return whether the free blocks are enough for all tokens of `seq` after a prefix."""
        num_free = [pool.num_free for pool in self.pools]
        for blocks, table, pool in zip(self._groups, prefix_tables, self._pool_of, strict=True):
            num_free[pool] -= blocks.num_free_needed(table, _extent(blocks, seq, seq.num_tokens), num_step_tokens)
        return min(num_free) >= 0

    def share_prefix(self, seq: Sequence, prefix: Prefix, num_step_tokens: int) -> bool:
        """Give `seq`, which has no blocks, the result of `find_prefix`, if all its other tokens fit too."""
        assert not seq.block_tables
        if not self.has_room(seq, prefix.tables, num_step_tokens):
            self._remember(seq, prefix)
            return False
        self._remembered = None
        seq.block_tables = prefix.tables
        seq.num_computed_tokens = prefix.num_tokens
        seq.num_registered_blocks = prefix.num_tokens // self.block_size
        self._share(seq)
        if self.events is not None:
            self.events.add_stored(seq, 0, seq.num_registered_blocks)  # some may have come from disk
        return True

    def _remember(self, seq: Sequence, prefix: Prefix) -> None:
        """Keep the prefix of a sequence that is looked at again in the next step."""
        if not prefix.num_tokens or (self._remembered is not None and self._remembered[2] is prefix):
            return
        self._remembered = seq, seq.num_tokens, prefix
        for pool in self.pools:
            pool.watched, pool.has_lost_watched = set(), False
        for blocks, table in zip(self._groups, prefix.tables, strict=True):
            blocks.pool.watched.update(table)

    def _recall(self, seq: Sequence) -> Prefix | None:
        """Return the remembered prefix of `seq`, if its blocks are still in the index and it cannot be longer now: a
        group that sees all tokens still lacks the next block. Finding a prefix takes a millisecond for 100,000
        tokens."""
        if self._remembered is None or self._remembered[0] is not seq or self._whole is None:
            return None
        _, num_tokens, prefix = self._remembered
        next_block = prefix.num_tokens // self.block_size
        if num_tokens != seq.num_tokens or any(pool.has_lost_watched for pool in self.pools):
            return None
        if next_block < (num_tokens - 1) // self.block_size and self._whole.has(seq.block_hashes, next_block):
            return None
        return prefix

    def swap_in(self, seq: Sequence, num_step_tokens: int) -> bool:
        """Bring the blocks of `seq` back from the host, if all its other tokens fit too."""
        absent = [
            [blocks.null] * table.count(_NOT_KEPT) for blocks, table in zip(self._groups, seq.host_blocks, strict=True)
        ]
        if not self.has_room(seq, absent, num_step_tokens):
            return False
        for blocks, table, pool in zip(self._groups, seq.host_blocks, self._pool_of, strict=True):
            on_device = []
            for host_block in table:
                block = blocks.null
                if host_block != _NOT_KEPT:
                    block = blocks.pool.allocate()
                    self._moves[pool].swap_in.append((host_block, block))
                    self._returning.append((pool, host_block))
                on_device.append(block)
            seq.block_tables.append(on_device)
        seq.host_blocks.clear()
        return True

    # For running sequences.

    def grow(self, seq: Sequence, num_tokens: int) -> TableChanges | None:
        """Allocate blocks for the tokens `num_computed_tokens` .. `num_tokens`.

        Shared blocks that will be written are copied, and blocks out of the window are released. Returns the changed
        entries, or None if there are too few free blocks.
        """
        changed: TableChanges = []
        if num_tokens <= seq.num_ready_slots:
            return changed
        num_computed = seq.num_computed_tokens
        tables = seq.block_tables
        if not tables:
            tables = seq.block_tables = [[] for _ in self._groups]
        if len(self._groups) == 1:
            extent = _extent(self._groups[0], seq, num_tokens)
            if self._groups[0].num_needed(tables[0], num_computed, extent) > self.pools[0].num_free:
                return None
        else:
            num_free = [pool.num_free for pool in self.pools]
            for blocks, table, pool in zip(self._groups, tables, self._pool_of, strict=True):
                num_free[pool] -= blocks.num_needed(table, num_computed, _extent(blocks, seq, num_tokens))
            if min(num_free) < 0:
                return None
        if self._has_window:
            self._leave_windows(seq, changed)
        if self.states and self.enable_prefix_caching and seq.num_ready_slots <= num_computed:  # not yet for this step
            self._take_snapshots(seq)
        for blocks, table, pool in zip(self._groups, tables, self._pool_of, strict=True):
            extent, copies = _extent(blocks, seq, num_tokens), self._moves[pool].copy
            num_copies = len(copies)
            blocks.allocate(table, num_computed, extent, copies, changed)
            if loads := self._loads[pool]:  # copies are made before loads: load such a copy too
                for pair in [pair for pair in copies[num_copies:] if pair[0] in loads]:
                    copies.remove(pair)
                    loads[pair[1]] = loads[pair[0]]
        seq.num_ready_slots = -(-num_tokens // self.block_size) * self.block_size
        return changed

    @property
    def num_draft_slots(self) -> int:
        """Return the most draft tokens that a sequence may compute. A group with states needs a block for each."""
        return min([MAX_DRAFT_TOKENS, *[state.pool.num_free for state in self.states]]) if self.states else UNLIMITED

    def grow_for_drafts(self, seq: Sequence, num_draft_tokens: int) -> TableChanges | None:
        """Allocate blocks for up to `num_draft_slots` draft tokens after the next token, for which `grow` was called.
        Returns as `grow`."""
        changed = self.grow(seq, seq.num_computed_tokens + 1 + num_draft_tokens)
        if changed is not None:
            for state in self.states:
                state.allocate_for_drafts(seq.block_tables[state.group], num_draft_tokens, changed)
        return changed

    def register_computed(self, seq: Sequence, num_computed: int) -> None:
        """Add the blocks of `seq` that are full of computed tokens to the prefix index."""
        num_full = num_computed // self.block_size
        if num_full <= seq.num_registered_blocks or not self.enable_prefix_caching:
            return
        extend_block_hashes(seq, self.block_size)
        for blocks, table in zip(self._groups, seq.block_tables, strict=True):
            blocks.register(table, seq.block_hashes, seq.num_registered_blocks, num_full)
        if self.events is not None:
            self.events.add_stored(seq, seq.num_registered_blocks, num_full)
        seq.num_registered_blocks = num_full

    def roll_back(self, seq: Sequence, num_right: int = 0) -> None:
        """Release the blocks after the computed tokens. The last `num_right` computed tokens are accepted draft tokens;
        later ones were rejected, or their step did not run."""
        if self.states and self.enable_prefix_caching:
            self._keep_passed(seq, num_right)
        for state in self.states:
            state.commit_drafts(seq.block_tables[state.group], num_right)
        num_blocks = -(-seq.num_computed_tokens // self.block_size)
        for attention in self.attention:
            table = seq.block_tables[attention.group]
            while len(table) > num_blocks:
                attention.pool.release(table.pop())
        # If a state has moved, the next step has to report it.
        most = 0 if self.states and num_right else num_blocks * self.block_size
        seq.num_ready_slots = min(seq.num_ready_slots, most)

    def chunk_end(self, num_computed: int, num_tokens: int) -> int:
        """Return where a step should end that could compute the prompt's tokens num_computed .. num_tokens: at the end
        of a block if there are states, as only there snapshots are taken."""
        if self.states and self.enable_prefix_caching:
            border = num_tokens // self.block_size * self.block_size
            return border if border > num_computed else num_tokens
        return num_tokens

    def share_all(self, seq: Sequence, fork: Sequence) -> None:
        """Count the references of `fork`, whose block tables are copies of `seq`'s."""
        seq.num_ready_slots = fork.num_ready_slots = 0
        self._share(fork)

    def release(self, seq: Sequence) -> None:
        """Release all blocks of `seq`, on the device and on the host. Its last ones are evicted first."""
        self._tell_release(seq)
        for blocks, table in zip(self._groups, seq.block_tables, strict=False):
            for block in reversed(table):
                if block != blocks.null:
                    blocks.pool.release(block)
        for pool, table in zip(self._pool_of, seq.host_blocks, strict=False):
            for block in table:
                if block != _NOT_KEPT:
                    self.host_pools[pool].release(block)
        seq.block_tables = []
        seq.host_blocks = []
        seq.num_computed_tokens = seq.num_registered_blocks = seq.num_ready_slots = 0

    def swap_out(self, seq: Sequence) -> bool:
        """Move the blocks of `seq` to the host. False if the host tier is too full."""
        if self._has_window and seq.block_tables:
            self._leave_windows(seq, [])  # so that `swap_in` copies no block that would be released in the same step
        num_free = [pool.num_free for pool in self.host_pools]
        for blocks, table, pool in zip(self._groups, seq.block_tables, self._pool_of, strict=True):
            num_free[pool] -= len(table) - table.count(blocks.null)
        if min(num_free) < 0:
            return False
        self._tell_release(seq)
        for blocks, table, pool in zip(self._groups, seq.block_tables, self._pool_of, strict=True):
            on_host = []
            for block in reversed(table):
                host_block = _NOT_KEPT
                if block != blocks.null:
                    host_block = self.host_pools[pool].allocate()
                    self._write_host_block(pool, block, host_block)
                    blocks.pool.release(block)
                on_host.append(host_block)
            seq.host_blocks.append(on_host[::-1])
        seq.block_tables = []
        seq.num_registered_blocks = seq.num_ready_slots = 0
        return True

    # For `HostTier`.

    def copy_to_host(self, pool: int, key: bytes, block: int) -> bool:
        """Have the next plan copy an indexed block to the host, before its other moves. Returns False if no host block
        is free."""
        host_pool = self.host_pools[pool]
        if not host_pool.num_free:
            return False
        host_block = host_pool.allocate()
        self._write_host_block(pool, block, host_block)
        host_pool.register(host_block, key)
        host_pool.release(host_block)
        return True

    def load_from_host(self, pool: int, key: bytes) -> None:
        """Index a free block, and have the next plan copy the host's block with this key to it, after its other
        moves."""
        host_block = self.host_pools[pool].lookup(key)
        assert host_block is not None, "the host has the block"
        self.host_pools[pool].share(host_block)  # until the plan is made, as it would be overwritten before it is read
        self._returning.append((pool, host_block))
        block = self.pools[pool].allocate()
        self._loads[pool][block] = host_block
        self.pools[pool].register(block, key)
        self.pools[pool].release(block)

    def cancel_load(self, pool: int, block: int) -> None:
        """Load nothing to a block that leaves the index, unless a sequence has it: the block gets other contents."""
        if not self.pools[pool].ref_counts[block]:
            self._loads[pool].pop(block, None)

    def is_loaded_later(self, pool: int, block: int) -> bool:
        """Return whether a block gets its contents with the next plan."""
        return block in self._loads[pool]

    def is_read_later(self, pool: int, blocks: Iterable[int]) -> bool:
        """Return whether the next plan copies any of these blocks of the device, even if they are free by now."""
        moves = self._moves[pool]
        return bool(moves) and not {source for source, _ in (*moves.copy, *moves.swap_out)}.isdisjoint(blocks)

    # For the plan, and checks.

    def take_moves(self) -> list[BlockMoves]:
        """Return the moves collected since the last call, by pool."""
        moves, self._moves = self._moves, self._no_moves()
        for of_pool, loads in zip(moves, self._loads, strict=True):
            of_pool.swap_in += [(host_block, block) for block, host_block in loads.items()]
            loads.clear()
        for pool, block in reversed(self._returning):  # a prefix's last block is evicted first
            self.host_pools[pool].release(block)
        self._returning.clear()
        for host_blocks in self.host_blocks_written_later:
            host_blocks.clear()
        return moves

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that reference counts and block tables agree, on the device and on the host."""
        references: list[dict[int, int]] = [{} for _ in self.pools]
        host_references: list[dict[int, int]] = [{} for _ in self.pools]
        for pool, block in self._returning:
            host_references[pool][block] = host_references[pool].get(block, 0) + 1
        for seq in sequences:
            assert not (seq.block_tables and seq.host_blocks), "a sequence is both on the device and on the host"
            assert seq.block_tables or seq.host_blocks or not seq.num_computed_tokens, "computed tokens have no blocks"
            num_full_blocks = seq.num_computed_tokens // self.block_size
            assert seq.num_registered_blocks <= num_full_blocks, "a block is indexed before it is computed"
            for blocks, table, pool in zip(self._groups, seq.block_tables, self._pool_of, strict=False):
                if isinstance(blocks, CrossBlocks):
                    blocks.check(table, seq.num_computed_tokens, seq.num_cross_tokens)
                else:
                    blocks.check(table, seq.num_computed_tokens)
                for block in table:
                    if block != blocks.null:
                        references[pool][block] = references[pool].get(block, 0) + 1
            for table, pool in zip(seq.host_blocks, self._pool_of, strict=False):
                for block in table:
                    if block != _NOT_KEPT:
                        host_references[pool][block] = host_references[pool].get(block, 0) + 1
        found = zip([*self.pools, *self.host_pools], [*references, *host_references], strict=True)
        for block_pool, counts in found:
            block_pool.check(counts)

    def _write_host_block(self, pool: int, block: int, host_block: int) -> None:
        self._moves[pool].swap_out.append((block, host_block))
        self.host_blocks_written_later[pool].add(host_block)

    def _no_moves(self) -> list[BlockMoves]:
        return [BlockMoves() for _ in self.pools]

    def _leave_windows(self, seq: Sequence, changed: TableChanges) -> None:
        """Release the blocks of `seq` that are out of the window, after adding them to the prefix index."""
        self.register_computed(seq, seq.num_computed_tokens)
        for attention in self.attention:
            attention.free_out_of_window(seq.block_tables[attention.group], seq.num_computed_tokens, changed)

    def _take_snapshots(self, seq: Sequence) -> None:
        """Take a snapshot of each state of `seq` before the sequence goes on, if `_is_worth_keeping`."""
        if not self._is_worth_keeping(seq, seq.num_computed_tokens):
            return
        extend_block_hashes(seq, self.block_size)
        for state in self.states:
            table = seq.block_tables[state.group]
            returning = self._moves[self._pool_of[state.group]].swap_in  # copies are made before these come back
            if table and all(block not in table for _, block in returning):
                state.snapshot(table[0], seq.num_computed_tokens, seq.block_hashes)

    def _keep_passed(self, seq: Sequence, num_right: int) -> None:
        """Take snapshots of the states that accepting `num_right` draft tokens has passed, if `_is_worth_keeping`."""
        extend_block_hashes(seq, self.block_size)
        for i in range(num_right):
            num_computed = seq.num_computed_tokens - num_right + i
            if self._is_worth_keeping(seq, num_computed):
                for state in self.states:
                    state.snapshot(seq.block_tables[state.group][i], num_computed, seq.block_hashes)

    def _is_worth_keeping(self, seq: Sequence, num_computed: int) -> bool:
        """Return whether a snapshot after `num_computed` tokens is worth it: anywhere in the prompt, and after every
        `_SNAPSHOT_BLOCKS` blocks of the answer."""
        return num_computed <= seq.num_prompt_tokens or num_computed % (_SNAPSHOT_BLOCKS * self.block_size) == 0

    def _tell_release(self, seq: Sequence) -> None:
        if self.on_release and (names := self.prefix_names(seq.block_hashes, seq.num_registered_blocks)):
            for tell in self.on_release:
                tell(names)

    def _share(self, seq: Sequence) -> None:
        for blocks, table in zip(self._groups, seq.block_tables, strict=False):
            for block in table:
                if block != blocks.null:
                    blocks.pool.share(block)


def _extent(blocks: AttentionBlocks | CrossBlocks | StateBlocks, seq: Sequence, num_tokens: int) -> int:
    """Return how many positions a group needs blocks for: `num_tokens`, or the encoder's rows that `seq` sees."""
    return seq.num_cross_tokens if isinstance(blocks, CrossBlocks) else num_tokens
