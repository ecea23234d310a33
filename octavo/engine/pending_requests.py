"""Requests that are not scheduled yet: their grammar is compiled, their adapter is read, or the tower computes their
media."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from octavo.request import AdapterSource, EngineRequest


@dataclass(slots=True)
class PendingRequest:
    """A request, and what must be ready before the scheduler gets it."""

    request: EngineRequest
    grammar: Future[None] | None = None
    adapter: Future[int] | None = None  # None: no adapter, or no room for it on the host yet
    media: list[Future[Any]] | None = None  # None: no media, or no room for their rows yet

    @property
    def waits_for_adapter_room(self) -> bool:
        return self.request.adapter is not None and self.adapter is None

    @property
    def waits_for_media(self) -> bool:
        return bool(self.request.media) and self.media is None

    @property
    def futures(self) -> list[Future[Any]]:
        return [future for future in (self.grammar, self.adapter, *(self.media or ())) if future is not None]

    @property
    def is_ready(self) -> bool:
        return (
            not self.waits_for_adapter_room
            and not self.waits_for_media
            and all(future.done() for future in self.futures)
        )

    @property
    def error(self) -> BaseException | None:
        """Why a request that is ready cannot run, or None."""
        return next((error for future in self.futures if (error := future.exception()) is not None), None)


@dataclass(slots=True)
class LoadingAdapter:
    """An adapter to read for `load_adapter`; no request waits for it."""

    source: AdapterSource
    pins: bool
    ready: Future[int] | None = None  # None: no room yet

    @property
    def is_ready(self) -> bool:
        return self.ready is not None and self.ready.done()
