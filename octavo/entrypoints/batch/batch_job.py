"""Runs a batch of /v1/batches in the background: answers the lines of a stored file, and stores the answers in files.

Each answer is stored as it comes, so that another server can continue the batch if this server ends.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette

from octavo.entrypoints.batch import stored_files
from octavo.entrypoints.batch.answer_lines import BatchStopped, answer_lines
from octavo.entrypoints.batch.batch_lines import CustomIds, custom_id_of
from octavo.entrypoints.batch.stored_files import BATCH, FILE
from octavo.entrypoints.http.background_jobs import to_its_end
from octavo.entrypoints.http.server_state import ServerState
from octavo.entrypoints.http.store import DEAD_AFTER_S, Database, StoreError, StoreFullError
from octavo.errors import RequestError

logger = logging.getLogger("octavo.server")

LIFETIME_S = 24 * 3600
RETRY_S = 30.0  # pause of a batch after repeated refusals by the engine, and after a failure of the store
MAX_SHOWN_ERRORS = 50  # of a batch
ACTIVE_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")


class _InvalidBatch(Exception):
    """A batch that cannot begin, with the error for clients."""

    def __init__(self, found: list[dict[str, Any]]) -> None:
        super().__init__()
        self.found = found


class _NotOwnedError(Exception):
    """The batch is not this server's any more: another one took it over while this one could not reach the store."""


class BatchJob:
    """The work on one batch. `batch` is its object; this server owns it."""

    def __init__(self, app: Starlette, state: ServerState, batch: dict[str, Any]) -> None:
        self._app = app
        self._state = state
        self._store = state.store
        self.batch = batch
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Answer the remaining lines, and store the batch's final status."""
        batch, status = self.batch, "completed"
        try:
            try:
                while not await self._answer_all():
                    await self._wait(RETRY_S)
            except TimeoutError:
                status = "expired"
                while not await self._answer_all(is_expired=True):
                    await self._wait(RETRY_S)
            await to_its_end(self._end(status))
        except asyncio.CancelledError:
            batch["cancelling_at"] = int(time.time())
            await to_its_end(self._end("cancelled"))
        except _NotOwnedError:
            logger.warning("batch %s stops here: another server has it", batch["id"])
        except BatchStopped as error:
            # It stays unfinished and its owner is gone, so the next server continues it.
            logger.warning("batch %s stops and will be continued: %s", batch["id"], error)
        except _InvalidBatch as error:
            await self._fail(error.found)
        except RequestError as error:  # because a file was deleted, or the store is full
            logger.error("batch %s: %s", batch["id"], error)
            await self._fail([{"code": error.code, "message": str(error)}])
        except Exception:
            logger.exception("batch %s", batch["id"])
            message = "the server made an error; its log says which."
            await self._fail([{"code": "internal_error", "message": message}])

    async def _fail(self, errors: list[dict[str, Any]]) -> None:
        self.batch["errors"] = {"object": "list", "data": errors}
        await to_its_end(self._end("failed"))

    async def _answer_all(self, *, is_expired: bool = False) -> bool:
        """Answer the remaining lines, with errors if the batch `is_expired`. Return whether all lines have an answer;
        False if the engine takes no requests now, or if the store cannot be read. Raises `BatchStopped` when the server
        ends, and `TimeoutError` when the batch's time is up."""
        at_once = max(1, self._state.engine.config.scheduler.max_num_seqs // 2)  # leave room for other clients
        try:
            done = await self._begin()
            await answer_lines(
                self._app, self._left(done, is_expired), self._write, at_once=at_once,
                endpoint=self.batch["endpoint"], is_expired=is_expired,
            )  # fmt: skip
        except StoreFullError:
            raise
        except (BatchStopped, StoreError) as error:
            if self._state.is_stopping:
                raise BatchStopped("the server is stopping") from error
            logger.warning("batch %s goes on in %g s: %s", self.batch["id"], RETRY_S, error)
            return False
        return True

    async def _wait(self, seconds: float) -> None:
        """Wait. Raises `BatchStopped` if the server ends meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._state.is_stopping:
                raise BatchStopped("the server is stopping")
            await asyncio.sleep(min(1.0, seconds))

    async def _store_surely(self, work: Callable[[Database], None]) -> None:
        """Have the store do `work`, again and again while it fails, so that no answer is computed twice. Raises
        `BatchStopped` if the server ends meanwhile, `_NotOwnedError`, and `StoreFullError`: waiting makes no room."""

        def work_as_owner(database: Database) -> None:
            if not database.owns(BATCH, self.batch["id"]):
                raise _NotOwnedError
            work(database)

        while True:
            try:
                await self._store.run(work_as_owner)
                return
            except StoreFullError:
                raise
            except StoreError as error:
                logger.warning("batch %s waits %g s for the store: %s", self.batch["id"], RETRY_S, error)
            await self._wait(RETRY_S)

    async def _begin(self) -> set[int]:
        """Prepare the batch's files, and return the numbers of answered lines."""
        batch = self.batch
        if batch["output_file_id"] is None:
            num_lines = await self._check_lines()
            files = [
                stored_files.new_file(f"{batch['id']}_{name}.jsonl", "batch_output", 0) for name in ("output", "error")
            ]
            batch["request_counts"]["total"] = num_lines
            batch["output_file_id"], batch["error_file_id"] = files[0]["id"], files[1]["id"]

            def begin(database: Database) -> None:
                for file in files:
                    stored_files.write(database, FILE, file)
                stored_files.write(database, BATCH, batch, is_owned=True)

            batch |= {"status": "in_progress", "in_progress_at": int(time.time())}
            await self._store_surely(begin)

        def answered(database: Database) -> tuple[list[int], list[int]]:
            return database.chunk_numbers(batch["output_file_id"]), database.chunk_numbers(batch["error_file_id"])

        completed, failed = await self._store.run(answered)
        # An interrupted try may have stored an answer that it did not count.
        batch["request_counts"] |= {"completed": len(completed), "failed": len(failed)}
        return {*completed, *failed}

    async def _check_lines(self) -> int:
        """Return the number of lines. Raises `_InvalidBatch` if two have the same `custom_id`, by which clients tell
        answers apart."""
        decode, ids, num_lines = self._app.state.octavo.json_worker.parse, CustomIds(), 0
        found: list[dict[str, Any]] = []
        async for number, line in self._lines():
            num_lines += 1
            repeated = ids.repeated(await custom_id_of(line, decode))
            if repeated is not None and len(found) < MAX_SHOWN_ERRORS:
                fields = {"code": "duplicate_custom_id", "message": repeated, "param": "custom_id", "line": number + 1}
                found.append(fields)
        if found:
            raise _InvalidBatch(found)
        return num_lines

    def _lines(self) -> Any:
        return stored_files.read_lines(self._store, self.batch["input_file_id"], self._state.args.max_body_bytes)

    async def _left(self, done: set[int], is_expired: bool) -> Any:
        async for number, line in self._lines():
            if self._state.is_stopping:
                raise BatchStopped("the server is stopping")
            if not is_expired and time.time() > self.batch["expires_at"]:
                raise TimeoutError
            if number not in done:
                yield number, line

    async def _write(self, number: int, is_good: bool, line: bytes) -> None:
        if self._state.is_stopping and is_good:
            raise BatchStopped("the server is stopping")  # the answer may be incomplete
        batch, count = self.batch, "completed" if is_good else "failed"
        file_id = batch["output_file_id" if is_good else "error_file_id"]

        def write(database: Database) -> None:
            stored_files.find(database, FILE, file_id)  # raises if the file was deleted; its lines would have no owner
            database.add_chunks(file_id, [(number, line)])
            stored_files.write(database, BATCH, {**batch, "request_counts": counts}, is_owned=True)

        async with self._writing:  # one at a time, so that clients see no answer counted that is not stored
            counts = {**batch["request_counts"], count: batch["request_counts"][count] + 1}
            await self._store_surely(write)
            batch["request_counts"] = counts

    async def _end(self, status: str) -> None:
        batch = self.batch
        batch |= {"status": status, f"{status}_at": int(time.time())}
        if status == "completed":
            batch["finalizing_at"] = batch["completed_at"]
        life_s = (batch.get("output_expires_after") or {}).get("seconds")

        def end(database: Database) -> None:
            ended = {**batch, "request_counts": dict(batch["request_counts"])}  # a copy, for another try
            for name, count in (("output_file_id", "completed"), ("error_file_id", "failed")):
                if batch[name] is None:
                    continue
                ended["request_counts"][count] = len(database.chunk_numbers(batch[name]))
                num_bytes = database.num_chunk_bytes(batch[name])
                if num_bytes and database.get(FILE, batch[name]) is not None:
                    file = stored_files.read(stored_files.find(database, FILE, batch[name]))
                    file |= {"bytes": num_bytes, **stored_files.lifetime(life_s)}
                    stored_files.write(database, FILE, file, needs_room=False)
                else:
                    database.delete(FILE, batch[name])
                    ended[name] = None
            stored_files.write(database, BATCH, ended, needs_room=False)

        try:
            await self._store_surely(end)
        except BatchStopped as error:  # the next server finds that all lines are answered
            logger.error("the end of batch %s is not noted: %s", batch["id"], error)
        except _NotOwnedError:
            logger.warning("the end of batch %s is not noted here: it has ended, or another server has it", batch["id"])


async def take_over(app: Starlette, state: ServerState) -> None:
    """Take over the batches of dead servers, until this server ends."""

    def take(database: Database) -> list[dict[str, Any]]:
        found = [stored_files.read(one) for one in database.abandoned(BATCH)]
        # This server's own look abandoned after an outage of the store.
        return [
            batch for batch in found
            if state.background.get(batch["id"]) is None and database.take(BATCH, batch["id"])
        ]  # fmt: skip

    while not state.is_stopping:
        if await state.unavailable() is None:
            try:
                for batch in await state.store.run(take):
                    logger.info("going on with batch %s", batch["id"])
                    state.background.start(
                        batch["id"], BatchJob(app, state, batch), uses_engine=False, is_awaited=False
                    )
            except StoreError as error:
                logger.error("%s", error)
        await asyncio.sleep(DEAD_AFTER_S / 3)
