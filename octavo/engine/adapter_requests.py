"""Adapters that callers of the asynchronous engine name: which there are by number, and who waits for one to be read.

The core's side is `adapters.py`.
"""

from __future__ import annotations

import asyncio
import logging

from octavo.engine.input_processor import InputProcessor
from octavo.engine.off_loop import MAX_INLINE_LENGTH, run_off_loop
from octavo.engine.supervisor import Supervisor
from octavo.engine.wire import AdapterLoaded, LoadAdapter, UnloadAdapter
from octavo.errors import OctavoError, RequestError
from octavo.lora.request import LoRARequest
from octavo.request import AdapterSource

logger = logging.getLogger(__name__)


class AdapterRequests:
    """Those of one engine."""

    def __init__(self, supervisor: Supervisor, inputs: InputProcessor) -> None:
        self._supervisor, self._inputs = supervisor, inputs
        self._by_id: dict[int, AdapterSource] = {}  # by `lora_int_id`
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}  # by the adapter's identity
        self._pinned: dict[str, AdapterSource] = {}  # likewise

    @property
    def ids(self) -> set[int]:
        """The `lora_int_id`s that have been asked for and not removed."""
        return set(self._by_id)

    async def find(self, asked: LoRARequest) -> AdapterSource:
        """Where an adapter lies and what it holds now. Raises `RequestError`."""
        return await run_off_loop(lambda: self._inputs.find_adapter(asked), length=MAX_INLINE_LENGTH + 1)

    def name(self, lora_id: int, source: AdapterSource) -> None:
        """Have an adapter listed under its `lora_int_id` until it is removed."""
        self._by_id[lora_id] = source

    async def load(self, source: AdapterSource, pins: bool = False) -> None:
        """Return when an adapter is on the host. Raises `RequestError` if it cannot be served."""
        await self._supervisor.wait_ready()
        self._supervisor.send(LoadAdapter(source, pins))
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(source.identity, []).append(ready)
        await ready

    def unload(self, identity: str) -> None:
        """Free an adapter's memory when no request uses it."""
        self._pinned.pop(identity, None)
        self._supervisor.tell(UnloadAdapter(identity))

    def remove(self, lora_id: int) -> bool:
        """Forget the adapter of a `lora_int_id`. Whether there was one."""
        found = self._by_id.pop(lora_id, None)
        if found is not None and all(one.identity != found.identity for one in self._by_id.values()):
            self.unload(found.identity)
        return found is not None

    async def pin(self, lora_id: int) -> None:
        """Keep the adapter of a `lora_int_id` on the host. Raises `RequestError`."""
        found = self._by_id.get(lora_id)
        if found is None:
            raise RequestError(f"there is no adapter {lora_id}; add it first.", param="lora_id")
        await self.load(found, pins=True)
        if found in self._by_id.values():  # still
            self._pinned[found.identity] = found

    def pin_again(self) -> None:
        """A core has become ready, which has no adapters yet: it is told those that are pinned."""
        for source in self._pinned.values():
            self._supervisor.tell(LoadAdapter(source, pins=True))

    def end(self, loaded: AdapterLoaded) -> None:
        """The core has read an adapter, or cannot."""
        error = None if loaded.error is None else RequestError(loaded.error, param="lora_path")
        if error is not None and self._pinned.pop(loaded.identity, None) is not None:
            logger.warning("an adapter that was pinned is not any more: %s", error)
        self._end(self._waiting.pop(loaded.identity, []), error)

    def lose(self, error: OctavoError) -> None:
        """The core has ended: nobody's adapter is going to be read."""
        waiting, self._waiting = self._waiting, {}
        for of_one in waiting.values():
            self._end(of_one, error)

    @staticmethod
    def _end(waiting: list[asyncio.Future[None]], error: OctavoError | None) -> None:
        for ready in waiting:
            if ready.done():  # cancelled
                continue
            if error is None:
                ready.set_result(None)
            else:
                ready.set_exception(error)
