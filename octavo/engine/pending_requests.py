"""Requests that the scheduler does not know yet: their grammar is being compiled, their adapter read from disk, or
their pictures are looked at."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from octavo.request import AdapterSource, EngineRequest


@dataclass(slots=True)
class PendingRequests:
    """A request, and what must be ready before it is queued."""

    request: EngineRequest
    grammar: Future[None] | None = None
    adapter: Future[int] | None = None  # None while there is no room on the host for the one that it wants
    media: list[Future[Any]] | None = None  # None while there is no room for the rows of its media

    @property
    def waits_for_room(self) -> bool:
        return self.request.adapter is not None and self.adapter is None

    @property
    def waits_for_media(self) -> bool:
        return bool(self.request.media) and self.media is None

    @property
    def futures(self) -> list[Future[Any]]:
        return [future for future in (self.grammar, self.adapter, *(self.media or ())) if future is not None]

    @property
    def is_ready(self) -> bool:
        return not self.waits_for_room and not self.waits_for_media and all(future.done() for future in self.futures)

    @property
    def error(self) -> BaseException | None:
        """Of a request that is ready: what keeps it from running."""
        return next((error for future in self.futures if (error := future.exception()) is not None), None)


@dataclass(slots=True)
class LoadingAdapter:
    """An adapter that is wanted on the host though no request has asked for it."""

    source: AdapterSource
    pins: bool
    ready: Future[int] | None = None  # None while there is no room

    @property
    def is_ready(self) -> bool:
        return self.ready is not None and self.ready.done()
