"""The adapters that callers of the asynchronous engine name, and the callers that wait for one to be read.

The core's side is `adapter_library.py`.
"""

import asyncio

from octavo.engine.input_processor import InputProcessor
from octavo.engine.named_adapters import NamedAdapters
from octavo.engine.off_loop import MAX_INLINE_LENGTH, run_off_loop
from octavo.engine.supervisor import Supervisor
from octavo.engine.wire import AdapterLoaded, LoadAdapter, UnloadAdapter
from octavo.errors import OctavoError, RequestError
from octavo.lora.request import LoRARequest
from octavo.request import AdapterSource


class AdapterRequests:
    def __init__(self, supervisor: Supervisor, inputs: InputProcessor) -> None:
        self._supervisor, self._inputs = supervisor, inputs
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}  # by the adapter's identity
        self.named = NamedAdapters()

    async def find(self, asked: LoRARequest) -> AdapterSource:
        """Return where an adapter's files are, and the identity of their contents. Raises `RequestError`."""
        return await run_off_loop(lambda: self._inputs.find_adapter(asked), length=MAX_INLINE_LENGTH + 1)

    async def load(self, source: AdapterSource, pins: bool = False) -> None:
        """Return when an adapter is on the host. Raises `RequestError` if it cannot be served."""
        await self._supervisor.wait_ready()
        self._supervisor.send(LoadAdapter(source, pins))
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(source.identity, []).append(ready)
        await ready

    def unload(self, identity: str) -> None:
        """Free an adapter's memory once no request uses it."""
        self.named.unpin(identity)
        self._supervisor.tell(UnloadAdapter(identity))

    def remove(self, lora_id: int) -> bool:
        """Remove the adapter of a `lora_int_id`. Returns whether there was one."""
        was_named, identity = self.named.remove(lora_id)
        if identity is not None:
            self.unload(identity)
        return was_named

    async def pin(self, lora_id: int) -> None:
        """Keep the adapter of a `lora_int_id` on the host. Raises `RequestError`."""
        found = self.named.named(lora_id)
        await self.load(found, pins=True)
        self.named.pin(found)

    def pin_again(self) -> None:
        """Have a new core, which has no adapters yet, read the pinned ones."""
        for source in self.named.pinned:
            self._supervisor.tell(LoadAdapter(source, pins=True))

    def adapter_loaded(self, loaded: AdapterLoaded) -> None:
        """Tell callers that the core has read an adapter, or failed to."""
        error = None if loaded.error is None else RequestError(loaded.error, param="lora_path")
        self.named.note_loaded(loaded)
        self._end(self._waiting.pop(loaded.identity, []), error)

    def core_ended(self, error: OctavoError) -> None:
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
