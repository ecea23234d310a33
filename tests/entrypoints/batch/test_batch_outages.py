"""Batches through outages: of the engine and of the store, of servers that share it, and cancelled meanwhile."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from typing import Any

import openai
import pytest

from octavo.entrypoints.batch import answer_lines, batch_job, stored_files
from octavo.entrypoints.http.store import Database
from octavo.errors import EngineDeadError, EngineRestartingError, RequestError
from tests.entrypoints.batch.test_batches import let_through, line
from tests.entrypoints.fake_engine import FakeEngine
from tests.waiting import wait_until


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_batch_that_the_engine_refuses_goes_on_later_and_can_be_cancelled(
    client: openai.OpenAI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    waits = []

    async def wait(job: batch_job.BatchJob, seconds: float) -> None:
        waits.append(seconds)
        if is_cancelled:
            await asyncio.Event().wait()
        elif len(waits) == 2:
            engine.fails_after = None

    monkeypatch.setattr(answer_lines, "MAX_WAIT_S", 0.0)
    monkeypatch.setattr(answer_lines, "MAX_TRIES", 2)
    monkeypatch.setattr(batch_job.BatchJob, "_wait", wait)
    file = client.files.create(file=("in.jsonl", line("a") + line("b")), purpose="batch")
    engine.fails_after = (0, EngineRestartingError("again") if is_cancelled else EngineDeadError("lost"))
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_until(lambda: waits)
    if is_cancelled:
        assert client.batches.cancel(batch.id).status == "cancelled"
    else:
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        assert engine.seen and waits == [batch_job.RETRY_S] * 2


@pytest.mark.parametrize("failing", ["put", "add_chunks", "chunk_numbers", "num_chunk_bytes"])
def test_a_batch_waits_for_a_store_that_fails(
    client: openai.OpenAI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """And no line is answered twice, or counted before its answer is stored."""
    waits, works, puts, counted = list[float](), getattr(Database, failing), list[str](), list[int]()

    async def wait(job: batch_job.BatchJob, seconds: float) -> None:
        waits.append(seconds)
        counted.append(job.batch["request_counts"]["completed"])

    def work(database: Database, *args: Any, **options: Any) -> Any:
        if failing == "put":
            puts.append(args[0])
        if puts != ["batch"] and len(waits) < 3:
            raise sqlite3.OperationalError("disk I/O error")
        return works(database, *args, **options)

    monkeypatch.setattr(batch_job.BatchJob, "_wait", wait)
    file = client.files.create(file=("in.jsonl", line("a")), purpose="batch")
    monkeypatch.setattr(Database, failing, work)
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (1, 1, 0)
    assert waits == [batch_job.RETRY_S] * 3 and len(engine.seen) == 1
    assert counted == [failing == "num_chunk_bytes"] * 3, "only at the end is the answer stored"


def test_an_end_that_is_stored_at_the_second_try_leaves_no_empty_file(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, put = list[float](), Database.put

    async def wait(job: batch_job.BatchJob, seconds: float) -> None:
        waits.append(seconds)

    def fail_once(database: Database, kind: str, *args: Any, is_owned: bool = False, **options: Any) -> None:
        if kind == "batch" and not is_owned and not waits:
            raise sqlite3.OperationalError("disk I/O error")
        put(database, kind, *args, is_owned=is_owned, **options)

    monkeypatch.setattr(batch_job.BatchJob, "_wait", wait)
    monkeypatch.setattr(Database, "put", fail_once)
    file = client.files.create(file=("in.jsonl", line("a")), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    assert waits and client.batches.retrieve(batch.id).error_file_id is None
    files = [one.filename for one in client.files.list(purpose="batch_output")]
    assert f"{batch.id}_output.jsonl" in files and f"{batch.id}_error.jsonl" not in files


def begun_batch(client: openai.OpenAI, engine: FakeEngine) -> str:
    """Return the id of a batch of 30 lines of which 5 have an answer; the others wait for the engine."""
    file = client.files.create(file=("in.jsonl", b"".join(line(str(i)) for i in range(30))), purpose="batch")
    let_through(engine, 5)
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_until(lambda: num_completed(client, batch.id) == 5)
    return batch.id


def num_completed(client: openai.OpenAI, id: str) -> int:
    counts = client.batches.retrieve(id).request_counts
    return 0 if counts is None else counts.completed


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_batch_ends_that_finds_the_store_full(
    client: openai.OpenAI, address: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    id = begun_batch(client, engine)
    monkeypatch.setattr(address.server.state.store.database, "_max_bytes", 0)
    if is_cancelled:
        assert client.batches.cancel(id).status == "cancelled"
    else:
        engine.may_begin = lambda: True
        wait_until(lambda: client.batches.retrieve(id).status == "failed")
    ended = client.batches.retrieve(id)
    assert ended.output_file_id and num_completed(client, id) == 5
    assert len(client.files.content(ended.output_file_id).text.splitlines()) == 5
    if not is_cancelled:
        assert ended.errors is not None and ended.errors.data is not None
        assert "has no room" in str(ended.errors.data[0].message)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_batch_that_another_server_has_taken_over_is_left_to_it(
    client: openai.OpenAI, address: Any, engine: FakeEngine, is_cancelled: bool
) -> None:
    id, state = begun_batch(client, engine), address.server.state
    owner = "another"

    def take(database: Database) -> None:
        database._db.execute("INSERT OR REPLACE INTO owners VALUES (?, ?)", (owner, 1e12))  # it lives
        database._db.execute("UPDATE objects SET owner = ? WHERE id = ?", (owner, id))

    state.store._thread.submit(take, state.store.database).result()
    if is_cancelled:
        task = state.background._tasks[id]
        task.get_loop().call_soon_threadsafe(task.cancel)
    else:
        engine.may_begin = lambda: True
    wait_until(lambda: state.background.get(id) is None)
    row = "SELECT owner FROM objects WHERE id = ?"
    found = state.store._thread.submit(lambda: state.store.database._db.execute(row, (id,)).fetchone()).result()
    assert found == (owner,) and num_completed(client, id) == 5
    assert client.batches.retrieve(id).status == "in_progress"


def test_a_server_does_not_take_over_its_own_batch() -> None:
    """After an outage of the store it looks dead to itself."""
    database, started = Database(None, 1 << 20), list[str]()
    for id in ("its own", "left"):
        database.put("batch", id, json.dumps({"id": id}).encode(), is_owned=True)
    database.leave()

    class Stop(Exception):
        pass

    class State:
        is_stopping = False
        store: Any
        background: Any

        async def unavailable(self) -> None:
            return None

    class Work:
        async def run(self, work: Any) -> Any:
            return work(database)

        def get(self, id: str) -> Any:
            return self if id == "its own" else None

        def start(self, id: str, job: Any, **_: Any) -> None:
            started.append(id)
            raise Stop  # which ends the rounds

    state: Any = State()
    state.store = state.background = Work()
    with pytest.raises(Stop):
        asyncio.run(batch_job.take_over(state, state))
    database.close()
    assert started == ["left"]


class DirectStore:
    """Runs the work of a store in the caller, when `may_run` lets it."""

    def __init__(self) -> None:
        self.database, self.may_run, self.is_asked = Database(None, 1 << 20), asyncio.Event(), asyncio.Event()
        self.may_run.set()

    async def run(self, work: Any) -> Any:
        self.is_asked.set()
        await self.may_run.wait()
        return work(self.database)


def begun_job() -> tuple[batch_job.BatchJob, DirectStore]:
    """Return a batch of which lines 0 and 2 have an answer and line 1 an error, and which has counted more."""
    store = DirectStore()
    batch = {"id": "b", "status": "in_progress", "output_file_id": "out", "error_file_id": "err"}
    batch["request_counts"] = {"total": 9, "completed": 7, "failed": 3}  # type: ignore[assignment]
    stored_files.write(store.database, "batch", batch, is_owned=True)
    store.database.add_chunks("out", [(0, b"a"), (2, b"b")])
    store.database.add_chunks("err", [(1, b"c")])

    class State:
        is_stopping = False

    state: Any = State()
    state.store = store
    return batch_job.BatchJob(state, state, batch), store


def stored_batch(store: DirectStore) -> dict[str, Any]:
    return stored_files.read(stored_files.find(store.database, "batch", "b"))


def test_a_batch_counts_the_answers_that_are_stored() -> None:
    async def run() -> None:
        counts = {"total": 9, "completed": 2, "failed": 1}
        job, store = begun_job()
        assert await job._begin() == {0, 1, 2} and job.batch["request_counts"] == counts
        job, store = begun_job()
        await job._end("cancelled")
        assert stored_batch(store)["request_counts"] == counts
        store.database.close()

    asyncio.run(run())


@pytest.mark.parametrize("status", ["cancelled", "failed", "completed"])
def test_a_batch_stores_its_end_though_it_is_cancelled_meanwhile(status: str) -> None:
    async def run() -> None:
        job, store = begun_job()

        async def answer_all(**_: Any) -> bool:
            store.may_run.clear()
            store.is_asked.clear()
            if status == "failed":
                raise RequestError("no")
            if status == "cancelled":
                await asyncio.Event().wait()
            return True

        job._answer_all = answer_all  # type: ignore[method-assign]
        task = asyncio.ensure_future(job.run())
        await asyncio.sleep(0)
        if status == "cancelled":
            task.cancel()
        await store.is_asked.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        store.may_run.set()
        await task
        assert stored_batch(store)["status"] == status and not store.database.owns("batch", "b")
        store.database.close()

    asyncio.run(run())
