"""/v1/files and /v1/batches through the real client, and the lines that they and `octavo run-batch` share."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tqdm import tqdm

from octavo.entrypoints.batch import answer_lines, batch_job, batch_lines, batch_routes, stored_files
from octavo.entrypoints.batch.batch_lines import LineError, answer_line, checksum, error_line, read_answered, read_line
from octavo.entrypoints.batch.run_batch_files import BatchFiles
from octavo.entrypoints.http.app import build_app
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.store import Database, Stored
from octavo.errors import ConfigError, RequestError
from tests.entrypoints.fake_engine import FakeEngine, serving
from tests.waiting import wait_until, within

HELLO: Any = [{"role": "user", "content": "Hi"}]


def line(id: str, url: str = "/v1/chat/completions", **body: Any) -> bytes:
    request = {"custom_id": id, "method": "POST", "url": url, "body": body or {"messages": HELLO}}
    return json.dumps(request).encode() + b"\n"


BAD: Any = [
    b"not JSON\n", b"[1]\n", b'{"custom_id": 1}\n', b'{"custom_id": "get", "method": "GET"}\n',
    b'{"custom_id": "url", "method": "POST", "url": "/health", "body": {}}\n',
    b'{"custom_id": "list", "method": "POST", "url": "/v1/completions", "body": []}\n',
    line("stream", "/v1/completions", prompt="x", stream=True), b'{"custom_id": "\xff"}\n', b"[" * 100_000 + b"\n",
]  # fmt: skip


def test_answers_say_which_line_they_are_for() -> None:
    text = line("a")
    sum = checksum(text)
    for answer in (
        answer_line(7, sum, "ü\n", 200, b'{"a":\n1}'), error_line(7, sum, LineError("no", "a")),
    ):  # fmt: skip
        assert read_answered(answer) == (7, sum) and answer.count(b"\n") == 1 and json.loads(answer)
    assert read_answered(b'{"id":"other"}') is None
    for bad in BAD:
        with pytest.raises(LineError):
            read_line(bad)


def test_a_line_of_sound_needs_a_model_that_hears(client: openai.OpenAI) -> None:
    url = "/v1/audio/transcriptions"
    file = client.files.create(file=("in.jsonl", line("0", url, file_url="data:audio/wav;base64,")), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")  # type: ignore[arg-type]
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    (error,) = map(json.loads, client.files.content(client.batches.retrieve(batch.id).error_file_id or "").iter_lines())
    assert error["response"]["body"]["error"]["code"] == "model_is_deaf"


def test_a_batch_is_answered(client: openai.OpenAI, engine: FakeEngine) -> None:
    lines = [line(str(i)) for i in range(30)]
    lines[3] = line("3", messages=HELLO, temperature=-1)
    lines[4], lines[5], lines[7] = b"\n", b"not JSON\n", line("7", "/v1/completions", prompt="x")
    content = b"".join(lines).rstrip(b"\n")
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert file.bytes == len(content) and client.files.content(file.id).read() == content
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"k": "v"}
    )
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (29, 26, 3)
    assert batch.output_file_id and batch.error_file_id and batch.metadata == {"k": "v"}
    answers = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(int(one["custom_id"]) for one in answers) == sorted({*range(30)} - {3, 4, 5, 7})
    for one in answers:
        assert one["response"]["body"]["choices"][0]["message"]["content"] == "Hello there"
    errors = {one["custom_id"]: one for one in map(json.loads, client.files.content(batch.error_file_id).iter_lines())}
    assert errors[None]["error"]["message"].startswith("Request 5: "), "blank lines are none"
    assert errors["3"]["response"]["status_code"] == 400 and errors["7"]["error"] and errors[None]["response"] is None
    assert [one.id for one in client.batches.list(limit=1)][:1] == [batch.id]
    assert {file.id, batch.output_file_id} <= {one.id for one in client.files.list()}
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


def let_through(engine: FakeEngine, count: int) -> None:
    """Have `count` requests answered, and no more."""
    permits = iter(range(count))
    engine.may_begin = lambda: next(permits, None) is not None


def test_a_batch_is_cancelled_and_its_answers_are_kept(client: openai.OpenAI, engine: FakeEngine) -> None:
    file = client.files.create(file=("in.jsonl", b"".join(line(str(i)) for i in range(50))), purpose="batch")
    let_through(engine, 5)
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")

    def num_done() -> int:
        counts = client.batches.retrieve(batch.id).request_counts
        return 0 if counts is None else counts.completed

    wait_until(lambda: num_done() == 5)
    ended = client.batches.cancel(batch.id)
    assert ended.status == "cancelled" and ended.output_file_id and ended.cancelling_at is not None
    assert len(client.files.content(ended.output_file_id).text.splitlines()) == num_done() == 5
    wait_until(lambda: not engine.active)


def test_lines_without_an_answer_say_that_their_batch_has_expired(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_routes, "LIFETIME_S", -1)
    file = client.files.create(file=("in.jsonl", line("a") + b"{}\n" + line("b")), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "expired")
    ended = client.batches.retrieve(batch.id)
    assert ended.output_file_id is None and ended.error_file_id and ended.expired_at is not None
    assert ended.request_counts is not None and ended.request_counts.failed == 3
    errors = [json.loads(one) for one in client.files.content(ended.error_file_id).text.splitlines()]
    assert [(one["custom_id"], one["error"]["code"]) for one in errors] == [
        ("a", "batch_expired"), (None, "invalid_line"), ("b", "batch_expired"),
    ]  # fmt: skip


def test_large_lines_are_read_as_large_bodies_are(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process, and no further than the server's limits."""
    here = list[int]()
    read = answer_lines.read_line

    def note(text: bytes, endpoint: str | None = None, *decode: Any) -> Any:
        if not decode:
            here.append(len(text))
        return read(text, endpoint, *decode)

    monkeypatch.setattr(answer_lines, "read_line", note)
    lines = [
        line("few"),
        line("many", messages=HELLO, metadata={"x": [[1]] * 6000}),
        line("long", messages=HELLO, user="x" * (1 << 20)),
    ]
    lines.append(line("beyond", messages=HELLO, metadata={"x": [[1]] * 9000}))
    with (
        serving(engine, disable_log_requests=True, max_json_nodes=80_000) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="x", timeout=within(60)) as client,
    ):
        file = client.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        ended = client.batches.retrieve(batch.id)
        assert ended.output_file_id and ended.error_file_id
        answers = [json.loads(one) for one in client.files.content(ended.output_file_id).text.splitlines()]
        assert [(one["custom_id"], one["response"]["status_code"]) for one in answers] == [
            ("few", 200), ("many", 200), ("long", 200),
        ]  # fmt: skip
        assert "--max-json-nodes" in client.files.content(ended.error_file_id).text
    assert here == [len(lines[0])]


@pytest.mark.parametrize("num_bytes", [1, 2, 7, 100])
def test_lines_are_the_same_however_a_file_is_cut(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    content = b"a\n\n \r\nbb\n" + b"x" * 11 + b"\n" + b"y" * 10 + b"\n" + b"z" * 30 + b"\nc"

    async def pieces(store: Any, file_id: str) -> AsyncIterator[bytes]:
        for begin in range(0, len(content), num_bytes):
            yield content[begin : begin + num_bytes]

    async def read() -> list[tuple[int, bytes]]:
        store: Any = None
        return [one async for one in stored_files.read_lines(store, "file", 10)]

    monkeypatch.setattr(stored_files, "read_content", pieces)
    lines = [b"a\n", b"bb\n", b"x" * 10, b"y" * 10 + b"\n", b"z" * 10, b"c\n"]
    assert asyncio.run(read()) == list(enumerate(lines))


def test_a_turn_of_the_loop_reads_few_lines_and_runs_of_blank_ones_cost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Piece(bytes):
        num_finds = 0

        def find(self, *args: Any) -> int:
            Piece.num_finds += 1
            return super().find(*args)

    async def pieces(store: Any, file_id: str) -> Any:
        yield Piece(b"{}\n" * 1000 + b" \r\n" * 50_000)
        yield Piece(b"\n" * 50_000 + b"{}")

    turns: list[int] = []

    async def read() -> None:
        async def count() -> None:
            while True:
                turns.append(0)
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        await asyncio.sleep(0)
        store: Any = None
        async for _, text in stored_files.read_lines(store, "file", 10):
            assert text == b"{}\n"
            turns[-1] += 1
        counting.cancel()

    monkeypatch.setattr(stored_files, "read_content", pieces)
    asyncio.run(read())
    assert sum(turns) == 1001 and max(turns) <= 64
    assert Piece.num_finds < 1010


def test_files_of_a_batch_under_way_cannot_be_deleted(client: openai.OpenAI, engine: FakeEngine) -> None:
    file = client.files.create(file=("in.jsonl", b"".join(line(str(i)) for i in range(50))), purpose="batch")
    let_through(engine, 5)
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    names = [f"{batch.id}_{name}.jsonl" for name in ("output", "error")]

    def outputs() -> list[str]:
        return [one.id for one in client.files.list(purpose="batch_output") if one.filename in names]

    wait_until(outputs)
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "in_progress" and batch.output_file_id is batch.error_file_id is None
    assert client.batches.list(limit=1).data[0].output_file_id is None
    for id in (file.id, *outputs()):
        with pytest.raises(openai.ConflictError, match=f"{batch.id} is under way and needs this file; cancel it"):
            client.files.delete(id)
    client.batches.cancel(batch.id)
    assert client.files.delete(file.id).deleted


@pytest.mark.long
@pytest.mark.parametrize("lost", ["input_file_id", "output_file_id"])
def test_a_batch_whose_file_is_lost_ends_and_says_so(engine: FakeEngine, lost: str) -> None:
    content = b"".join(line(str(i), messages=HELLO, user="x" * 5000) for i in range(400))  # of several reads
    with serving(engine, disable_log_requests=True) as url, openai.OpenAI(base_url=url + "/v1", api_key="x") as client:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        let_through(engine, 5)
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")

        def counts() -> int:
            found = client.batches.retrieve(batch.id).request_counts
            return 0 if found is None else found.completed

        wait_until(lambda: counts() == 5)
        store = url.server.state.store
        found = store._thread.submit(stored_files.find, store.database, "batch", batch.id).result()
        id = stored_files.read(found)[lost]
        store._thread.submit(store.database.delete, "file", id).result()
        engine.may_begin = lambda: True
        wait_until(lambda: client.batches.retrieve(batch.id).status not in ("in_progress", "validating"))
        ended = client.batches.retrieve(batch.id)
        assert ended.status == "failed" and ended.errors is not None and ended.errors.data is not None
        assert id in str(ended.errors.data[0].message)
        assert counts() < 400


def test_a_batch_that_an_unforeseen_error_ends_says_so(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(batch_job, "answer_lines", fail)
    file = client.files.create(file=("in.jsonl", line("0")), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "failed")
    errors = client.batches.retrieve(batch.id).errors
    assert errors is not None and errors.data is not None and errors.data[0].code == "internal_error"


def test_a_batch_whose_lines_have_the_same_id_is_refused(
    client: openai.OpenAI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lines, "is_large_json", lambda text: b"large" in text)
    lines = [line("a"), b"{}\n", line("b"), line("c", messages=HELLO, user="large"), b"not JSON\n", line("a")]
    lines += [b"{}\n", b"[1]\n", line("c"), line("b", messages=HELLO, user="large")]
    file = client.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "failed")
    ended = client.batches.retrieve(batch.id)
    assert ended.errors is not None and ended.errors.data is not None and ended.output_file_id is None
    assert [(one.code, one.line, one.param) for one in ended.errors.data] == [
        ("duplicate_custom_id", number, "custom_id") for number in (6, 9, 10)
    ]
    assert "'a'" in str(ended.errors.data[0].message) and not engine.seen


def test_a_file_with_the_same_id_twice_is_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join([line("a"), b"\n", b"{}\n", b"{}\n", b"not JSON\n", line("b"), line("a")]))
    with pytest.raises(ConfigError, match="request 6: custom_id 'a' is in an earlier line too"):
        BatchFiles(source, target, 10_000)
    assert not target.exists()


def test_files_are_listed_by_purpose(client: openai.OpenAI, http: httpx.Client) -> None:
    files = [client.files.create(file=("in.jsonl", line("0")), purpose="batch") for _ in range(25)]
    assert {one.id for one in files} <= {one["id"] for one in http.get("/v1/files").json()["data"]}
    batch = client.batches.create(input_file_id=files[0].id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    for purpose in ("batch", "batch_output"):
        found = client.files.list(purpose=purpose, limit=10_000).data
        assert found and {one.purpose for one in found} == {purpose}
        assert client.files.list(purpose=purpose, limit=1).data[0].id == found[0].id
    assert client.files.list(purpose="vision").data == []
    for query in ("files?limit=10001", "batches?limit=101", "files?limit=--5", "files?limit=²", "files?limit=0x1"):
        assert http.get(f"/v1/{query}").status_code == 400


def test_files_expire(client: openai.OpenAI, http: httpx.Client) -> None:
    lives: Any = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("in.jsonl", line("0")), purpose="batch", expires_after=lives)
    assert file.expires_at == file.created_at + 3600
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", output_expires_after=lives
    )
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    output = client.files.retrieve(client.batches.retrieve(batch.id).output_file_id or "")
    assert output.expires_at == output.created_at + 3600
    for data in (
        {"expires_after[seconds]": "3600"}, {"expires_after[anchor]": "created_at"},
        {"expires_after[anchor]": "now", "expires_after[seconds]": "3600"},
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"},
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1h"}, {"expires_after": "3600"},
    ):  # fmt: skip
        answer = http.post("/v1/files", files={"file": b"x"}, data={"purpose": "batch", **data})
        assert answer.status_code == 400 and "expires_after" in answer.json()["error"]["param"], data


def test_a_download_that_fails_does_not_look_whole(
    client: openai.OpenAI, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_routes, "PIECE_BYTES", 100)
    monkeypatch.setattr(stored_files, "_PIECES_AT_ONCE", 1)
    chunks = Database.chunks

    def fail_later(database: Database, id: str, after: int, limit: int) -> Any:
        if after >= 1:
            raise sqlite3.OperationalError("disk I/O error")
        return chunks(database, id, after, limit)

    file = client.files.create(file=("in.jsonl", b"x" * 1000), purpose="batch")
    monkeypatch.setattr(Database, "chunks", fail_later)
    with http.stream("GET", f"/v1/files/{file.id}/content") as answer:
        parts = answer.iter_raw()
        assert next(parts).startswith(b"x")
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            list(parts)


def test_expired_files_are_gone_unless_a_batch_needs_them() -> None:
    database = Database(None, 1 << 20)
    file = stored_files.new_file("a", "batch", 1) | {"expires_at": 1}
    batch = {"id": "b", "input_file_id": file["id"], "output_file_id": None, "error_file_id": None}
    stored_files.write(database, "file", file)
    stored_files.write(database, "file", stored_files.new_file("b", "batch", 1, 3600))
    stored_files.write(database, "batch", batch, is_owned=True)
    stored_files.delete_expired(database)
    assert stored_files.find(database, "file", file["id"])
    stored_files.write(database, "batch", batch)
    with pytest.raises(RequestError, match="There is no file"):
        stored_files.find(database, "file", file["id"])
    stored_files.delete_expired(database)
    assert [stored_files.read(one)["filename"] for one in every_file(database)] == ["b"]


def every_file(database: Database) -> list[Stored]:
    return database.page("file", after=None, limit=9, is_ascending=True)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"input_file_id": "file-no"}, 404), ({"endpoint": "/v1/nothing"}, 400), ({"completion_window": "1h"}, 400),
        ({"nonsense": 1}, 400),
    ],
)  # fmt: skip
def test_bad_batches_are_refused(http: httpx.Client, fields: Any, status: int) -> None:
    body = {"input_file_id": "f", "endpoint": "/v1/chat/completions", "completion_window": "24h", **fields}
    assert http.post("/v1/batches", json=body).status_code == status
    assert http.get("/v1/batches/batch_no").status_code == 404


def test_bad_files_are_refused(tiny_tokenizer: Path) -> None:
    with (
        serving(FakeEngine(tiny_tokenizer), max_file_bytes=5000, disable_log_requests=True) as url,
        httpx.Client(base_url=url, timeout=within(60)) as http,
    ):
        for status, request in (
            (200, {"files": {"file": b"x" * 4000}, "data": {"purpose": "batch"}}),
            (413, {"files": {"file": b"x" * 9000}, "data": {"purpose": "batch"}}),
            (400, {"files": {"file": b"x"}, "data": {"purpose": "fine-tune"}}),
            (400, {"files": {"other": b"x"}, "data": {"purpose": "batch"}}),
            (400, {"content": b"rubbish", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}),
            (400, {"content": b"", "headers": {"Content-Type": "multipart/form-data"}}),
            (415, {"json": {}}),
        ):
            answer = http.post("/v1/files", **request)  # type: ignore[arg-type]
            assert answer.status_code == status, answer.text
            assert status == 200 or answer.json()["error"].keys() == {"message", "type", "param", "code"}
        assert len(http.get("/v1/files").json()["data"]) == 1


@pytest.mark.long
def test_a_batch_goes_on_where_another_server_has_left_it(tiny_tokenizer: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    first = FakeEngine(tiny_tokenizer)
    let_through(first, 5)
    flags: Any = {"response_store": path, "disable_log_requests": True}
    with serving(first, **flags) as url, httpx.Client(base_url=url, timeout=within(60)) as http:
        content = b"".join(line(str(i)) for i in range(30))
        file = http.post("/v1/files", files={"file": content}, data={"purpose": "batch"}).json()
        batch = http.post("/v1/batches", json={**body, "input_file_id": file["id"]}).json()
        where = f"/v1/batches/{batch['id']}"
        wait_until(lambda: http.get(where).json()["request_counts"]["completed"] == 5)
    second = FakeEngine(tiny_tokenizer)
    with serving(second, **flags) as url, httpx.Client(base_url=url, timeout=within(60)) as http:
        wait_until(lambda: http.get(where).json()["status"] == "completed")
        ended = http.get(where).json()
        assert ended["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        answers = http.get(f"/v1/files/{ended['output_file_id']}/content").text.splitlines()
        assert [json.loads(one)["custom_id"] for one in answers] == [str(i) for i in range(30)]
    assert len(second.seen) == 25


def answer_files(engine: FakeEngine, source: Path, target: Path) -> None:
    files = BatchFiles(source, target, max_line_bytes=10_000)
    try:
        app = build_app(engine, ServerArgs(disable_log_requests=True))  # type: ignore[arg-type]
        asyncio.run(files.run(app, at_once=4, progress=tqdm(disable=True)))
        files.put_in_order()
    finally:
        files.close()


def test_a_summary_says_why_a_request_is_refused(tiny_tokenizer: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    refused = json.loads(line("1")) | {"body": {"model": "none", "messages": []}}
    source.write_bytes(line("0") + b"\n" + json.dumps(refused).encode() + b"\nno JSON\n")
    answer_files(FakeEngine(tiny_tokenizer), source, target)
    files = BatchFiles(source, target, 10_000)
    said = files.summary()
    files.close()
    assert said == "3 requests, 2 of them refused; custom_id '1': messages should have at least 1 item, got []."
    target.write_bytes(target.read_bytes().splitlines(keepends=True)[2])
    files = BatchFiles(source, target, 10_000)
    said = files.summary()
    files.close()
    assert said.startswith("3 requests, 1 of them refused; custom_id None: Request 3: The line is not valid JSON")


def test_answers_are_in_the_order_of_the_input_whatever_came_first(tiny_tokenizer: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "folder" / "out.jsonl"
    target.parent.mkdir()
    source.write_bytes(b"".join(line(str(i)) + b"\n" for i in range(30)))
    answer_files(FakeEngine(tiny_tokenizer), source, target)
    whole = target.read_bytes().splitlines(keepends=True)
    ids = [str(i) for i in range(30)]
    assert [json.loads(one)["custom_id"] for one in whole] == ids
    # As a batch leaves it that is killed with its last answer.
    target.write_bytes(b"".join(random.Random(0).sample(whole, len(whole))))
    target.chmod(0o600)
    engine = FakeEngine(tiny_tokenizer)
    answer_files(engine, source, target)
    assert not engine.seen and [json.loads(one)["custom_id"] for one in target.read_bytes().splitlines()] == ids
    assert target.stat().st_mode & 0o777 == 0o600
    assert list(target.parent.iterdir()) == [target]


def test_a_file_is_gone_on_with_where_it_was_left(tiny_tokenizer: Path, tmp_path: Path) -> None:
    engine = FakeEngine(tiny_tokenizer)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = [line(str(i)) for i in range(20)]
    good += [line("c", "/v1/completions", prompt="x"), line("r", "/v1/responses", input="x")]
    good += [line("m", "/v1/messages", messages=HELLO, max_tokens=3), line("e", "/v2/embed", input="x")]
    source.write_bytes(b"\n".join([*good, *BAD, line("z", messages=[{"role": "user", "content": "x" * 20_000}])]))
    answer_files(engine, source, target)
    whole = target.read_bytes().splitlines(keepends=True)
    for num_kept, torn in ((0, b""), (9, b""), (12, whole[12][:20]), (len(whole), b"")):
        target.write_bytes(b"".join(whole[:num_kept]) + torn)
        num_seen = len(engine.seen)
        answer_files(engine, source, target)
        again = target.read_bytes().splitlines(keepends=True)
        assert again[:num_kept] == whole[:num_kept] and len(again) == len(whole)
        assert len({read_answered(one) for one in again}) == len(whole)
        assert len(engine.seen) - num_seen <= len(whole) - num_kept
    answers = {one["custom_id"]: one for one in map(json.loads, target.read_bytes().splitlines())}
    assert [answers[id]["response"]["status_code"] for id in ("0", "c", "r", "m", "e")] == [200, 200, 200, 200, 400]
    assert len(target.read_bytes().splitlines()) == len(good) + len(BAD) + 1

    # What is of another batch is not touched.
    other = target.read_bytes()
    source.write_bytes(b"".join([line("other"), *good[1:], *BAD]))
    with pytest.raises(ConfigError, match=r"line 1 of .* has changed since its answer was written"):
        answer_files(engine, source, target)
    source.write_bytes(b"\n".join([*good[:3], line("new"), *good[4:], *BAD, line("z")]))  # and all are answered
    with pytest.raises(ConfigError, match=r"line 4 of .* has changed .* Give another output file"):
        answer_files(engine, source, target)
    assert target.read_bytes() == other
    target.write_text("notes of mine\n")
    with pytest.raises(ConfigError, match="not the output"):
        answer_files(engine, source, target)
    assert target.read_text() == "notes of mine\n" and other
    target.unlink()
    files = BatchFiles(source, target, 10_000)
    with pytest.raises(ConfigError, match="another process"):
        BatchFiles(source, target, 10_000)
    files.close()
