"""What an asynchronous engine does besides answering requests: adapters, pause, sleep, and the prefix cache.

`pause_and_sleep.py` does sleep and pause, `adapter_requests.py` loads the adapters that callers name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.engine.adapter_requests import AdapterRequests
from octavo.engine.pause_and_sleep import PauseAndSleep
from octavo.engine.vllm_names import check_reset
from octavo.engine.wire import LiveView
from octavo.lora.request import LoRARequest
from octavo.metrics.prometheus import EngineMetrics
from octavo.request import AdapterSource


class EngineAdmin:
    """A part of `AsyncLLMEngine`, which sets the attributes."""

    metrics: EngineMetrics | None
    _adapters: AdapterRequests
    _pause_and_sleep: PauseAndSleep

    if TYPE_CHECKING:

        @property
        def config(self) -> EngineConfig: ...

    # Adapters.

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter into the host's memory and check it, before a request needs it. Raises `RequestError` if it
        cannot be served."""
        source = await self._adapters.find(lora_request)
        await self.load_adapter(source)
        self.name_adapter(lora_request.lora_int_id, source)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Remove the adapter of a `lora_int_id`. Returns whether the id had an adapter."""
        return self._adapters.remove(lora_id)

    async def list_loras(self) -> set[int]:
        """Return the `lora_int_id`s that were named and not removed."""
        return self._adapters.named.ids

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep the adapter of a `lora_int_id` in host memory. The device evicts it only if no other can be evicted."""
        await self._adapters.pin(lora_id)
        return True

    def name_adapter(self, lora_id: int, source: AdapterSource) -> None:
        """Remember which adapter a `lora_int_id` names, for `list_loras` and `pin_lora`."""
        self._adapters.named.name(lora_id, source)

    async def load_adapter(self, source: AdapterSource) -> None:
        """Wait until an adapter is in host memory. Raises `RequestError` if it cannot be served."""
        await self._adapters.load(source)

    def unload_adapter(self, identity: str) -> None:
        """Free an adapter's memory once no request uses it."""
        self._adapters.unload(identity)

    # Pause, sleep and cache.

    async def pause_generation(
        self, mode: str = "abort", *, wait_for_inflight_requests: bool | None = None, clear_cache: bool = True
    ) -> None:
        """Take no new requests until `resume_generation`; they wait. `mode` says what happens to running requests:
        "abort" ends them with their tokens so far, "wait" (formerly `wait_for_inflight_requests`) lets them finish,
        "keep" stops computing them and leaves the cache alone. Raises `RequestError` for another mode."""
        await self._pause_and_sleep.pause("wait" if wait_for_inflight_requests else mode, clear_cache)

    async def resume_generation(self) -> None:
        """Take requests again, and continue halted requests. No effect while the engine sleeps."""
        await self._pause_and_sleep.resume()

    async def is_paused(self) -> bool:
        """Whether the engine holds new requests back, because it is paused or asleep."""
        return self._pause_and_sleep.is_paused

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free memory until `wake_up`; requests wait. `mode` is that of `pause_generation`, without "keep". Raises
        `RequestError` for another level or mode.

        Level 1 keeps the weights and frees the KV cache. Level 2 ends the core's process; a new process waits with only
        its imports done. On a GPU level 1 does the same as level 2, because a process frees GPU memory only at its end.
        Waking then reads the weights from the page cache.
        """
        await self._pause_and_sleep.sleep(level, mode)
        self._record_sleep()

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Allocate again what `sleep` freed: "weights", the "kv_cache", or both. Requests continue once both are
        allocated."""
        await self._pause_and_sleep.wake_up(tags)
        self._record_sleep()

    async def is_sleeping(self) -> bool:
        """Whether the engine has freed memory and has not woken up."""
        return self._pause_and_sleep.is_sleeping

    def _record_sleep(self) -> None:
        if self.metrics is not None:
            self.metrics.sleep_level = self._pause_and_sleep.sleep_level

    async def live_view(self) -> LiveView | None:
        """Return the use of each KV block, taken between two steps; None if the core does not answer within 5 s.

        Concurrent callers share one answer. The core gathers the map only on request.
        """
        return await self._pause_and_sleep.live_view()

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = True) -> bool:
        """Empty the prefix cache, also on disk. Returns False if the core ended before it answered; its cache is gone
        too. Waits while the engine loads or sleeps. Raises `EngineDeadError`, and `RequestError` for
        `reset_running_requests`, and for `reset_connector=False` if there is a cache on disk."""
        check_reset(self.config, reset_running_requests=reset_running_requests, reset_connector=reset_connector)
        return await self._pause_and_sleep.reset_prefix_cache()

    async def drop_cache_session(self, session: str, salt: str | None = None) -> int | None:
        """Free the blocks that requests with this `cache_session` and `cache_salt` have kept, unless another session
        has them too. Returns their number, or None if there is no such session. Waits while the engine loads or sleeps.
        Raises `EngineDeadError`."""
        return await self._pause_and_sleep.drop_cache_session(session, salt)
