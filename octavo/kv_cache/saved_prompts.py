"""Requests that only compute a prompt for another server, which goes on from the blocks on disk. Their outputs wait
until the blocks are there. `EngineCore` calls everything here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.kv_cache.block_pool import BlockName
from octavo.kv_cache.block_writer import BlockWriter
from octavo.kv_cache.saved_pools import SavedPools
from octavo.request import EngineRequest, SequenceOutput
from octavo.sequence import Sequence as TokenSequence

_PATIENCE_S = 10.0  # for writing the blocks; the other server computes those that are not there


class SavedPrompts:
    """The requests of `EngineRequest.saves_prompt`."""

    def __init__(self, pools: SavedPools, writer: BlockWriter, clock: Callable[[], float]) -> None:
        self._pools, self._writer, self._clock = pools, writer, clock
        self._expected: set[str] = set()  # requests that have not ended
        # By ended request: its unsaved blocks, and until when it waits.
        self._waits: dict[str, tuple[Sequence[BlockName], float]] = {}
        self._held: list[SequenceOutput] = []

    @property
    def holds_outputs(self) -> bool:
        return bool(self._held)

    @property
    def are_awaited(self) -> bool:
        """Whether blocks are to be saved as fast as the writer takes them."""
        return bool(self._expected or self._held)

    def expect(self, request: EngineRequest) -> None:
        if request.saves_prompt:
            self._expected.add(request.request_id)

    def end(self, seq: TokenSequence) -> None:
        """Have the prompt's blocks of a sequence that has ended saved before others."""
        request = seq.request
        if not request.saves_prompt:
            return
        self._expected.discard(request.request_id)
        limit = min(len(request.prompt.token_ids) // self._pools.cache.block_size, len(seq.block_hashes))
        names = self._pools.known_names(seq.block_hashes, limit)
        for name in names:  # the folder may have lost blocks that were saved once
            self._writer.add_if_lost(name)
        self._writer.save_first(names)
        self._waits[request.request_id] = names, self._clock() + _PATIENCE_S

    def forget(self, request_id: str) -> None:
        """Drop the output of a request that is aborted."""
        self._expected.discard(request_id)
        self._held = [output for output in self._held if output.request_id != request_id]

    def hold(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        """Return the outputs that need not wait, and those that have waited."""
        if self._expected:
            self._expected -= {output.request_id for output in outputs if output.finish_reason}  # some were refused
        if not self._waits:
            return outputs
        now = self._clock()
        saved = {
            request_id
            for request_id, (names, until) in self._waits.items()
            if now >= until or not any(map(self._writer.is_pending, names))
        }
        waiting = self._waits.keys() - saved
        everything = [*self._held, *outputs]
        self._held = [output for output in everything if output.request_id in waiting]
        for request_id in saved:
            del self._waits[request_id]
        return [output for output in everything if output.request_id not in waiting]
