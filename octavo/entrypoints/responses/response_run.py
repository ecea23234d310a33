"""Runs a response, either for a waiting client or in the background for clients that ask later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from octavo.entrypoints.chat.chat_run import AnswerPart
from octavo.entrypoints.http.background_jobs import to_its_end
from octavo.entrypoints.http.error_responses import error_fields
from octavo.entrypoints.http.resumable import ResumableStream
from octavo.entrypoints.http.server_state import ServerState
from octavo.entrypoints.http.store import Database, StoreError, StoreFullError
from octavo.entrypoints.http.streaming import named_event
from octavo.entrypoints.responses import stored_conversations, stored_responses
from octavo.entrypoints.responses.items import Item
from octavo.entrypoints.responses.response_builder import Event, ResponseBuilder

logger = logging.getLogger("octavo.server")

ACTIVE_STATUSES = ("queued", "in_progress")
_CHUNKS_AT_ONCE = 256  # events read together
_POLL_S = 0.25  # between looks at a response of another server


class ResponseRun:
    """Runs one response. `items` are the items of the request."""

    def __init__(
        self, state: ServerState, builder: ResponseBuilder, items: list[Item], parts: AsyncGenerator[AnswerPart, None]
    ) -> None:
        self._state = state
        self._builder = builder
        self._items = items
        self._parts = parts
        self._is_resumed = False

    @property
    def response(self) -> dict[str, Any]:
        """Return the response so far."""
        return self._builder.response

    async def collect(self) -> dict[str, Any]:
        """Return the whole response. Raises the error that ends the request."""
        self._builder.begin()
        async for part in self._parts:
            self._builder.add(part)
        await self._keep()
        return self.response

    async def stream(self, resumable: ResumableStream) -> AsyncGenerator[bytes, None]:
        """Yield the events; an error becomes an event."""
        self._is_resumed = resumable.is_resumed
        try:
            begin = _encode(self._builder.begin())
            if not resumable.has_begun:
                yield begin
            async for part in self._parts:
                events, is_last = self._builder.write(part), part.finish_reason is not None
                if is_last and not resumable.is_given_up:
                    await self._keep()  # before the client learns that it is complete
                elif is_last and self.response["status"] == "failed" and self._state.args.response_store is not None:
                    await self._store()  # for a client whose stream no other server continues
                if shown := resumable.shown(events, part.token_ids, is_last=is_last):
                    yield shown
        except Exception as error:
            end = resumable.before_error(error) + _encode(self._fail(error))
            await self._store()
            yield end
        finally:
            await self._parts.aclose()

    def _fail(self, error: Exception) -> list[Event]:
        fields = error_fields(error)
        code = "rate_limit_exceeded" if fields["status"] == 429 else "server_error"
        return self._builder.fail(code, fields["message"])

    async def _join(self) -> None:
        """Add the request's items and the answer to the conversation that the request names. Raises `RequestError` if
        there is no room or the conversation is gone, as the next turn would miss this one."""
        conversation, said = self.response["conversation"], [*self._items, *self.response["output"]]
        if conversation is not None and self.response["status"] != "failed":
            await self._state.store.run(
                lambda database: stored_conversations.append(database, conversation["id"], said)
            )

    async def _keep(self) -> None:
        await self._join()
        await self._store()

    async def _store(self) -> None:
        """Store the response, unless the request says otherwise. If the store has no room, the client still gets the
        response, which says that it is not stored. A response that another server has begun and stored is replaced only
        if it failed there, as its id comes from the client."""
        if not self.response["store"]:
            return

        def keep(database: Database) -> None:
            kept = database.get(stored_responses.KIND, self.response["id"]) if self._is_resumed else None
            if kept is None or stored_responses.read_response(kept)["status"] == "failed":
                stored_responses.write(database, self.response, self._items)

        try:
            await self._state.store.run(keep)
        except StoreError as error:
            logger.error("response %s is not stored: %s", self.response["id"], error)
            self.response["store"] = False


class BackgroundRun(ResponseRun):
    """A run that goes on without its client. Its events are kept, so that any number of clients can follow it."""

    def __init__(
        self, state: ServerState, builder: ResponseBuilder, items: list[Item], parts: AsyncGenerator[AnswerPart, None]
    ) -> None:
        super().__init__(state, builder, items, parts)
        self._log: list[bytes] = []  # events, by number
        self._is_over = False
        self._news = asyncio.Condition()
        self._log += map(named_event, builder.begin())

    async def run(self) -> None:
        """Run until the answer is complete or cancelled."""
        try:
            async for part in self._parts:
                events = self._builder.add(part)
                if part.finish_reason is not None:
                    await self._join()
                await self._tell(events)
        except asyncio.CancelledError:
            self._builder.cancel()
        except Exception as error:
            await self._tell(self._fail(error))
        finally:
            await to_its_end(self._end())

    async def _end(self) -> None:
        """Store the response, and end the streams that follow it."""
        try:
            await self._parts.aclose()
            await self._keep_log()
        finally:
            self._is_over = True
            await self._tell([])

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events with numbers above `after`, as they come."""
        position = after + 1
        while True:
            if position < len(self._log):
                events = self._log[position:]
                position = len(self._log)
                yield b"".join(events)
            if self._is_over:
                return
            async with self._news:
                while position >= len(self._log) and not self._is_over:
                    await self._news.wait()

    async def _tell(self, events: list[Event]) -> None:
        self._log += map(named_event, events)
        async with self._news:
            self._news.notify_all()

    async def _keep_log(self) -> None:
        def keep(database: Database) -> None:
            stored_responses.write(database, self.response, self._items)
            database.add_chunks(self.response["id"], enumerate(self._log))

        try:
            try:
                await self._state.store.run(keep)
            except StoreFullError as full:  # clients that ask later must not wait for ever
                error = {"code": "server_error", "message": str(full)}
                lost = self.response | {"status": "failed", "output": [], "completed_at": None, "error": error}
                await self._state.store.run(
                    lambda database: stored_responses.write(database, lost, self._items, needs_room=False)
                )
        except StoreError as error:
            logger.error("response %s is not stored: %s", self.response["id"], error)


async def stored_events(state: ServerState, response_id: str, after: int) -> AsyncGenerator[bytes, None]:
    """Yield the events of a background response with numbers above `after`. Another server that works on it stores them
    at its end, for which this waits. A response whose events are lost has only its failure."""

    async def find() -> dict[str, Any]:
        return stored_responses.read_response(
            await state.store.run(lambda database: stored_responses.find(database, response_id))
        )

    async def read(after: int) -> list[tuple[int, bytes]]:
        return await state.store.run(lambda database: database.chunks(response_id, after, _CHUNKS_AT_ONCE))

    while (response := await find())["status"] in ACTIVE_STATUSES:  # noqa: ASYNC110 - the file tells, when it is asked
        await asyncio.sleep(_POLL_S)
    if response["status"] == "failed" and not await read(-1):
        yield named_event({"type": "response.failed", "sequence_number": after + 1, "response": response})
    while chunks := await read(after):
        after = chunks[-1][0]
        yield b"".join(data for _, data in chunks)


def _encode(events: list[Event]) -> bytes:
    return b"".join(map(named_event, events))
