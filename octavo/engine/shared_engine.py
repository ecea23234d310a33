"""The engine as one of several front ends sees it. Requests go to the engine directly; calls that control the engine go
through the hub, so that all front ends take part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from octavo.engine.hub_link import Answering, Channels

if TYPE_CHECKING:
    from octavo.engine.engine_client import EngineClient


class SharedEngine:
    """An `EngineClient` over `engine`, whose cores are the hub's. See `AsyncLLMEngine` for the methods."""

    def __init__(self, engine: EngineClient, channels: Channels) -> None:
        self._engine, self._channels = engine, channels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def own_parts(self) -> dict[str, Answering]:
        """The calls that the hub makes in each front end, by name."""
        engine = self._engine
        return {
            "pause_generation": engine.pause_generation,
            "resume_generation": engine.resume_generation,
            "sleep": engine.sleep,
            "wake_up": engine.wake_up,
        }

    async def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        await self._channels.call("pause_generation", mode=mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        await self._channels.call("resume_generation")

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        await self._channels.call("sleep", level=level, mode=mode)

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        await self._channels.call("wake_up", tags=None if tags is None else list(tags))
