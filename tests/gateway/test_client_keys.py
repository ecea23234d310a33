"""Clients' keys: what each may do, what it has used, and that no count is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from octavo.entrypoints.cli.run import make_ps_parser
from octavo.entrypoints.cli.terminal import ApiClient
from octavo.errors import ConfigError, OctavoError, RequestError
from octavo.gateway import key_store, request_body
from octavo.gateway.client_keys import DAY_S, KeySettings, day_number, day_text
from octavo.gateway.key_store import KeyStore, LostError, open_keys
from octavo.gateway.sqlite_keys import SqliteKeys
from tests.gateway.fakes import Asked, FakeLaunch, Gateway, gateway, until
from tests.gateway.key_databases import SERVERS, server
from tests.waiting import Clock, within

DAY = 20_000
ADMIN = {"authorization": "Bearer root"}


class Now:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = DAY * DAY_S + 30.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture(scope="module", params=["sqlite", *SERVERS])
def place(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], str]]:
    """Makes an address of an empty store."""
    if request.param == "sqlite":
        yield lambda folder: str(folder / "keys.db")
        return
    with server(request.param) as running:
        yield lambda _: running.url()


async def opened(address: str, now: Now) -> KeyStore:
    store = open_keys(address, now=now)
    await store.open()
    return store


def test_limits_hold_in_their_windows_and_after_a_crash(tmp_path: Path, place: Callable[[Path], str]) -> None:
    address, now = place(tmp_path), Now()
    secrets: list[bytes] = []

    async def run() -> None:
        store = await opened(address, now)
        key, secret = await store.create(
            KeySettings(name="a", requests_per_minute=2, requests_per_day=3, tokens_per_day=100)
        )
        other, _ = await store.create(KeySettings(name="b", tokens_per_minute=10))
        secrets.append(secret.encode())
        for _ in range(2):
            await store.admit(key, "m")
        with pytest.raises(RequestError, match=r"2 of 2 requests .*; more in 31 s\.") as caught:
            await store.admit(key, "m")
        assert caught.value.status == 429 and caught.value.retry_after_s == 31
        await store.admit(other, "m")
        await store.add_tokens(other, "m", 7, 3)
        store = await opened(address, now)  # the process was killed
        found = await store.find(secret.encode())
        assert found is not None and found.settings == key.settings
        with pytest.raises(RequestError, match="2 of 2 requests"):
            await store.admit(found, "m")
        other = await store.get(other.id)
        with pytest.raises(RequestError, match="10 of 10 tokens"):
            await store.admit(other, "m")
        now.time += 60
        await store.admit(other, "n")
        await store.admit(found, "m")
        with pytest.raises(RequestError, match=r"\(requests_per_day\); more at 00:00 UTC\.") as caught:
            await store.admit(found, "m")
        assert caught.value.retry_after_s == DAY_S - 89
        now.time += DAY_S
        await store.admit(found, "m")
        await store.add_tokens(found, "m", 99, 1)
        with pytest.raises(RequestError, match="tokens_per_day"):
            await store.admit(found, "m")
        rows = await store.usage(0, 10**6)
        columns = ("name", "day", "model", "requests", "completion_tokens")
        assert sorted(tuple(row[column] for column in columns) for row in rows) == [
            ("a", day_text(DAY), "m", 3, 0), ("a", day_text(DAY + 1), "m", 1, 1), ("b", day_text(DAY), "m", 1, 3),
            ("b", day_text(DAY), "n", 1, 0),
        ]  # fmt: skip
        assert day_number(day_text(DAY)) == DAY
        found = await store.get(found.id)
        assert (found.num_requests, found.num_prompt_tokens) == (4, 99)
        await store.close()

    asyncio.run(run())
    if address.startswith(str(tmp_path)):
        assert secrets[0] not in b"".join(file.read_bytes() for file in tmp_path.iterdir()), "only digests are kept"


def test_keys_expire_are_disabled_and_deleted(tmp_path: Path, place: Callable[[Path], str]) -> None:
    async def run() -> None:
        now = Now()
        store = await opened(place(tmp_path), now)
        key, secret = await store.create(KeySettings(name="a", expires_at=now.time + 10))
        store.check(key)
        now.time += 10
        with pytest.raises(RequestError, match="has expired"):
            store.check(key)
        await store.change(key, KeySettings(name="a", is_enabled=False))
        with pytest.raises(RequestError, match="is disabled"):
            store.check(key)
        await store.delete(key)
        assert await store.find(secret.encode()) is None and await store.keys() == []
        with pytest.raises(RequestError, match="there is no key with the id"):
            await store.get(key.id)
        await store.close()

    asyncio.run(run())


def test_no_two_keys_have_one_name(tmp_path: Path, place: Callable[[Path], str]) -> None:
    async def run() -> None:
        address = place(tmp_path)
        stores = [await opened(address, Now()) for _ in range(2)]
        made = await asyncio.gather(
            *(store.create(KeySettings(name="é")) for store in stores for _ in range(4)), return_exceptions=True
        )
        refused = [one for one in made if isinstance(one, RequestError)]
        assert len(refused) == 7 and len(await stores[0].keys()) == 1
        assert {(one.status, one.param, str(one)) for one in refused} == {
            (409, "name", "another key has the name é; choose another one.")
        }
        other, _ = await stores[0].create(KeySettings(name="b"))
        with pytest.raises(RequestError, match="the name é"):
            await stores[1].change(other, KeySettings(name="é"))
        assert [key.settings.name for key in await stores[0].keys()] == ["é", "b"]
        assert await stores[1].change(other, KeySettings(name="b", is_enabled=False)), "its own name is free for it"
        await stores[1].delete(other)
        await stores[0].create(KeySettings(name="b"))
        for store in stores:
            await store.close()

    asyncio.run(run())


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("no database" * 100)
    with pytest.raises(ConfigError, match="cannot be used"):
        asyncio.run(opened(str(tmp_path / "other"), Now()))


def test_a_file_in_a_folder_that_is_not_there_is_refused_with_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "none" / "keys.db"
    with pytest.raises(ConfigError, match=f"--keys {file} cannot be used: there is no folder {tmp_path / 'none'}"):
        asyncio.run(opened(str(file), Now()))


@pytest.mark.parametrize("on_loss", ["refuse", "admit"])
def test_a_file_that_cannot_be_written_loses_nothing(
    tmp_path: Path, on_loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        path = str(tmp_path / "keys.db")
        store = open_keys(path, on_loss, Now())
        await store.open()
        key, _ = await store.create(KeySettings(name="a"))
        await store.admit(key, "m")
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with monkeypatch.context() as patch:
            patch.setattr(key_store, "TIMEOUT_S", 0.0)
            if on_loss == "refuse":
                with pytest.raises(RequestError) as caught:
                    await store.admit(key, "m")
                assert caught.value.status == 503
            else:
                await store.admit(key, "m")
            await store.add_tokens(key, "m", 5, 6)
        other.execute("ROLLBACK")
        await until(lambda: store._is_idle.is_set())
        await store.admit(key, "m")
        (row,) = await store.usage(0, 10**6)
        num = 2 if on_loss == "refuse" else 3
        assert (row["requests"], row["prompt_tokens"], row["completion_tokens"]) == (num, 5, 6)
        for one in (await store.get(key.id), *store.counted()):
            assert (one.num_requests, one.num_prompt_tokens, one.num_completion_tokens) == (num, 5, 6)
        await store.close()

    asyncio.run(run())


def test_a_file_that_is_locked_for_a_moment_stops_nobody_and_limits_hold(tmp_path: Path) -> None:
    async def run() -> None:
        path = str(tmp_path / "keys.db")
        store = await opened(path, Now())
        key, secret = await store.create(KeySettings(name="a", requests_per_day=2))
        gone, _ = await store.create(KeySettings(name="gone"))
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        asks = [asyncio.ensure_future(store.admit(key, "m")) for _ in range(3)]
        changes = [
            asyncio.ensure_future(store.change(key, KeySettings(name=name, requests_per_day=2))) for name in "bc"
        ]
        deleting = asyncio.ensure_future(store.delete(gone))
        leaving, tokens = (asyncio.ensure_future(store.add_tokens(key, "m", n, 0)) for n in (5, 6))
        assert (await store.get(key.id)).settings.name == "a"
        found = await store.find(secret.encode())
        assert found is not None and found.id == key.id, "readers wait for nobody"
        assert not any(one.done() for one in (*asks, *changes, deleting, tokens))
        leaving.cancel()  # its client hangs up
        other.execute("ROLLBACK")
        assert sorted(await asyncio.gather(*changes)) == [False, True]
        results = await asyncio.gather(*asks, return_exceptions=True)
        assert [getattr(one, "status", None) for one in results] == [None, None, 429]
        await deleting
        await tokens
        (row,) = await store.usage(0, 10**6)
        assert (row["requests"], row["prompt_tokens"]) == (2, 11) and row["name"] in ("b", "c")
        assert [one.id for one in await store.keys()] == [one.id for one in store.counted()] == [key.id]
        await store.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("code", "num_tries"),
    [(sqlite3.SQLITE_BUSY_SNAPSHOT, 2), (sqlite3.SQLITE_LOCKED, 2), (sqlite3.SQLITE_PROTOCOL, 2),
     (sqlite3.SQLITE_FULL, 1), (None, 1)],
)  # fmt: skip
def test_only_a_lock_is_waited_for(tmp_path: Path, code: int | None, num_tries: int) -> None:
    """What else is wrong with the file is so the next time, too."""
    tries = list[int]()

    def work(_: sqlite3.Connection) -> None:
        tries.append(1)
        if len(tries) == 1:
            error = sqlite3.OperationalError("it failed")
            if code is not None:
                error.sqlite_errorcode = code
            raise error

    async def run() -> None:
        database = SqliteKeys(str(tmp_path / "keys.db"))
        with contextlib.nullcontext() if num_tries == 2 else pytest.raises(LostError, match="it failed"):
            await database._done(work)
        await database.close()

    asyncio.run(run())
    assert len(tries) == num_tries


def test_writes_are_moved_into_the_file(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = list[int]()
    monkeypatch.setattr(SqliteKeys, "checkpoint", lambda self: moved.append(1))

    async def run() -> None:
        store = await opened(str(tmp_path / "keys.db"), Now())
        key, _ = await store.create(KeySettings(name="a"))
        for number in (1, 2):
            await store.admit(key, "m")
            await store.admit(key, "m")
            await until(lambda number=number: len(moved) == number)  # type: ignore[misc]
        await store.close()

    clock.run(run())


def test_what_a_gateway_has_counted_goes_on_after_its_restart(tmp_path: Path) -> None:
    """So the metrics of a file begin with what it has."""

    async def run() -> None:
        path, now = str(tmp_path / "keys.db"), Now()
        store = await opened(path, now)
        (key, _), (other, _) = [await store.create(KeySettings(name=name)) for name in "ab"]
        await store.add_tokens(key, "m", 5, 6)
        await store.close()
        store = await opened(path, now)
        await store.admit(key, "m")
        await store.change(key, KeySettings(name="c"))
        rows = [(one.settings.name, one.num_requests, one.num_prompt_tokens) for one in store.counted()]
        assert rows == [("c", 1, 5), ("b", 0, 0)]
        await store.delete(other)
        assert [one.id for one in store.counted()] == [key.id]
        await store.close()

    asyncio.run(run())


def test_usage_is_read_and_written_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have millions of rows."""
    works = list[str]()

    async def to_thread(work: Callable[..., Any], *args: Any) -> Any:
        works.append(work.__name__)
        return work(*args)

    async def run() -> None:
        async with gateway({"a": {}}, keys=str(tmp_path / "keys.db"), admin_key=["root"]) as gate:
            monkeypatch.setattr(asyncio, "to_thread", to_thread)
            async with httpx.AsyncClient(base_url=gate.admin_url, headers=ADMIN, timeout=within(60)) as http:
                for query, write in (("", "_as_json"), ("?format=csv", "_as_csv")):
                    works.clear()
                    assert (await http.get(f"/usage{query}")).status_code == 200
                    assert [one for one in works if one != "checkpoint"] == ["read", "named", write]

    asyncio.run(run())


USAGE = b'{"prompt_tokens": 4, "completion_tokens": 3, "details": {"x": null}}'
MESSAGE = (
    b'event: message_start\ndata: {"message": {"usage":{"input_tokens": 4, "output_tokens": 0}}}\n\n'
    b'event: message_delta\ndata: {"usage":{"output_tokens": 3}}\n\nevent: message_stop\ndata: {}\n\n'
)


async def answer(asked: Asked) -> None:
    """As each API does, with a usage of 4 and 3 tokens."""
    if asked.target == "/v1/messages":
        asked.begin_stream()
        asked.piece(MESSAGE)
        asked.piece(b"")
    elif not asked.body or not asked.json.get("stream"):
        asked.reply(b'{"id": "resp_1", "usage":%b, "x": "%b"}' % (USAGE, b"y" * 500))
    else:
        asked.begin_stream()
        null = b',"usage":null' if asked.json.get("stream_options") else b""
        asked.piece(b'data: {"choices":[{"delta":{"content":"\\"usage\\":{"}}]' + null + b"}\n\n")
        if asked.json.get("stream_options"):
            asked.piece(b'data: {"choices":[],"usage":' + USAGE + b"}\n\n")
        asked.piece(b"data: [DONE]\n\n")
        asked.piece(b"")


class Keys:
    """The admin routes of a gateway."""

    def __init__(self, gate: Gateway) -> None:
        self.http = httpx.AsyncClient(base_url=gate.admin_url, headers=ADMIN, timeout=None)
        self._num_made = 0

    async def create(self, **settings: Any) -> tuple[str, dict[str, str]]:
        """The id of a new key, and its header. The keys are named k, k2 and so on."""
        self._num_made += 1
        name = "k" if self._num_made == 1 else f"k{self._num_made}"
        made = (await self.http.post("/keys", json={"name": name, **settings})).json()
        return made["id"], {"authorization": f"Bearer {made['key']}"}

    async def used(self, key_id: str) -> tuple[int, int, int]:
        used = (await self.http.get(f"/keys/{key_id}")).json()["used"]
        return used["requests"], used["prompt_tokens"], used["completion_tokens"]


def with_keys(
    clock: Clock, tmp_path: Path, test: Callable[[Gateway, Keys], Awaitable[None]], behave: Any = answer, **args: Any
) -> None:
    async def run() -> None:
        models: dict[str, Any] = {"a": {"aliases": ["x"], "fallbacks": ["b"]}, "b": {}}
        options = {"keys": str(tmp_path / "keys.db"), "admin_key": ["root"], **args}
        async with gateway(models, FakeLaunch(behave), **options) as gate:
            keys = Keys(gate)
            gate.server.store._now = Now()  # type: ignore[union-attr]
            async with keys.http:
                await test(gate, keys)

    clock.run(run())


def test_a_key_for_one_model_cannot_name_another_in_capitals(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers written in Go read such names as `model`."""
    monkeypatch.setattr(request_body, "MAX_COLONS", 7)

    async def test(gate: Gateway, keys: Keys) -> None:
        for settings, status in ({"models": ["a"]}, 400), ({}, 200):
            gate.http.headers.update((await keys.create(**settings))[1])
            for name in ("Model", "MODEL", r"mode\u004c", "a:b:c:d:e:f:g"):
                answer = await gate.http.post("/v1/embeddings", content=f'{{"model": "a", "{name}": "b"}}')
                assert answer.status_code == status and ("small letters" in answer.text) == (status == 400)
            answer = await gate.ask(input={"Model": 7}, models="b")
            assert answer.status_code == 200, "other names, and those of inner objects, may be so"

    with_keys(clock, tmp_path, test)


def test_tokens_are_counted_in_every_api(clock: Clock, tmp_path: Path) -> None:
    async def test(gate: Gateway, keys: Keys) -> None:
        key_id, headers = await keys.create()
        gate.http.headers.update(headers)
        stream = await gate.ask(stream=True)
        assert stream.content == b'data: {"choices":[{"delta":{"content":"\\"usage\\":{"}}]}\n\ndata: [DONE]\n\n'
        assert await keys.used(key_id) == (1, 4, 3)
        assert (await gate.ask(path="/invocations", stream=True)).content == stream.content
        assert await keys.used(key_id) == (2, 8, 6)
        wanted = await gate.ask(stream=True, stream_options={"include_usage": True})
        assert b"completion_tokens" in wanted.content
        assert (await gate.ask()).json()["x"] == "y" * 500
        assert (await gate.ask(path="/v1/messages", stream=True)).content == MESSAGE
        assert await keys.used(key_id) == (5, 20, 15)
        client = ollama.AsyncClient(str(gate.http.base_url), headers=headers)
        assert (await client.generate("a", "x")).eval_count == 3
        assert await keys.used(key_id) == (6, 24, 18)
        rows = (await keys.http.get("/usage")).json()["data"]
        assert {row["model"] for row in rows} == {"a"} and sum(row["requests"] for row in rows) == 6
        table = await keys.http.get("/usage?format=csv&since=2000-01-01")
        assert table.text.splitlines()[0].startswith("key,name,day,model,requests")
        assert await gate.metric('octavo_gateway_key_tokens_total{key="k",kind="prompt"}', keys.http) == 24
        assert await gate.metric('octavo_gateway_model_ready{model="a"}', keys.http) == 1
        assert "octavo_gateway_key" not in (await gate.http.get("/metrics")).text, "which anybody may read"
        assert (await keys.http.get("/metrics", headers={"authorization": "Bearer no"})).status_code == 401

    with_keys(clock, tmp_path, test)


def test_the_tokens_of_an_answer_are_counted_once_wherever_it_has_them(clock: Clock, tmp_path: Path) -> None:
    kept = b'{"id": "resp_1", "usage":{"input_tokens": 4, "output_tokens": 3}}'
    bodies = {
        "/v1/messages": b'{"content": [{"input": {"usage":{"input_tokens": 900}}}], ' + kept[17:],
        "/rerank": b'{"usage":{"prompt_tokens": 7, "total_tokens": 7}, "results": ["%b"]}' % (b"y" * 200_000),
        "/v2/embed": b'{"embeddings": {}, "meta": {"billed_units":{"input_tokens": 7}}}',
        "/v1/score": b'{"data": [{"usage":%b}], "usage":{"prompt_tokens": 7}}' % (b"[" * 5000),
    }
    headers_of = {
        "/v1/embeddings": {"metadata": '{"usage":{"prompt_tokens": 7}}'},
        "/pooling": {"x_octavo_prompt_tokens": "7"},
        "/classify": {"x_octavo_prompt_tokens": "9" * 5000, "metadata": '{"usage":{"prompt_tokens": 7}}'},
    }

    async def behave(asked: Asked) -> None:
        headers = headers_of.get(asked.target, {})
        asked.reply(bodies.get(asked.target, b"vectors" if headers else kept), **headers)

    async def test(gate: Gateway, keys: Keys) -> None:
        key_id, headers = await keys.create()
        gate.http.headers.update(headers)
        for number, path in enumerate([*bodies, *headers_of, "/v1/responses"], 1):
            assert (await gate.ask(path=path)).status_code == 200
            assert sum((await keys.used(key_id))[1:]) == 7 * number, path
        before = await keys.used(key_id)
        for method, path in (("GET", "/v1/responses/resp_1"), ("POST", "/v1/responses/resp_1/cancel")):
            assert (await gate.http.request(method, path)).content == kept
        assert await keys.used(key_id) == (before[0] + 2, *before[1:]), "what is kept was counted when it was made"

    with_keys(clock, tmp_path, test, behave)


def test_refusals_of_a_key_are_counted_by_reason_and_logged_with_its_name(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="octavo.gateway")

    async def test(gate: Gateway, keys: Keys) -> None:
        key_id, headers = await keys.create(requests_per_minute=0, models=["a"])
        gate.http.headers.update(headers)
        assert (await gate.ask()).status_code == 429
        assert (await gate.ask(model="b")).status_code == 403
        await keys.http.patch(f"/keys/{key_id}", json={"is_enabled": False})
        for _ in range(2):
            assert (await gate.ask()).status_code == 401
        reasons = {"requests_per_minute": 1, "model_not_allowed": 1, "invalid_api_key": 2}
        for reason, count in reasons.items():
            name = f'octavo_gateway_key_refusals_total{{key="k",reason="{reason}"}}'
            assert await gate.metric(name, keys.http) == count
        assert "octavo_gateway_key" not in (await gate.http.get("/metrics")).text, "which anybody may read"

    with_keys(clock, tmp_path, test)
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    known = ["POST /v1/chat/completions is refused: 429, requests_per_minute, key k",
             "POST /v1/chat/completions is refused: 403, model, model_not_allowed, key k"]  # fmt: skip
    assert [line.rpartition(", request ")[0] for line in lines[:2]] == known


def test_a_replicas_refusal_of_a_key_is_counted_and_logged_with_the_id_of_the_answer(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="octavo.gateway")

    async def refuse(asked: Asked) -> None:
        asked.reply(b"{}", 400, x_request_id="r7")

    async def test(gate: Gateway, keys: Keys) -> None:
        _, headers = await keys.create()
        gate.http.headers.update(headers)
        assert (await gate.ask()).headers["x-request-id"] == "r7"
        assert await gate.metric('octavo_gateway_key_refusals_total{key="k",reason="400"}', keys.http) == 1

    with_keys(clock, tmp_path, test, behave=refuse)
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert lines == ["POST /v1/chat/completions is refused: 400, by a, key k, request r7"]


def test_a_key_neither_unloads_a_model_nor_changes_how_long_it_stays(clock: Clock, tmp_path: Path) -> None:
    async def test(gate: Gateway, keys: Keys) -> None:
        _, headers = await keys.create()
        gate.http.headers.update(headers)
        message = {"role": "user", "content": "x"}
        assert (await gate.ask(path="/api/chat", messages=[message], keep_alive=0, stream=False)).status_code == 200
        assert (await gate.ask(path="/api/generate", keep_alive=-1)).status_code == 200
        refused = await gate.ask(path="/api/generate", keep_alive=0)
        assert refused.status_code == 403 and "as others use it" in refused.json()["error"]
        assert (gate.deployment("a").keep_alive, gate.deployment("a").state) == (300, "ready")
        assert "keys of --api-key (OCTAVO_API_KEY) may do it" in refused.text
        assert "--api-key" in (await gate.ask(path="/api/pull")).text
        gate.http.headers["authorization"] = "Bearer operator"
        assert (await gate.ask(path="/api/generate", keep_alive=0)).status_code == 200
        await until(lambda: gate.deployment("a").state == "stopped")

    with_keys(clock, tmp_path, test, api_key=["operator"])


def test_a_key_may_not_use_routes_that_change_a_server_for_all(clock: Clock, tmp_path: Path) -> None:
    async def test(gate: Gateway, keys: Keys) -> None:
        _, headers = await keys.create()
        gate.http.headers.update(headers | {"x-octavo-model": "a"})
        paths = ("/sleep?level=1", "/llm/pause", "/v1/load_lora_adapter/", "/v1/unload%5Flora_adapter")
        for path in paths:
            refused = await gate.http.post(path, json={})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed"), path
        assert not gate.launch.servers, "and start nothing"
        gate.http.headers["authorization"] = "Bearer operator"
        assert [(await gate.http.post(path, json={})).status_code for path in paths] == [200] * 4

    with_keys(clock, tmp_path, test, api_key=["operator"])


def test_a_setting_that_keys_lack_is_refused_with_those_that_they_have(clock: Clock, tmp_path: Path) -> None:
    async def test(gate: Gateway, keys: Keys) -> None:
        answer = await keys.http.post("/keys", json={"name": "k", "request_per_minute": 3})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "unknown field `request_per_minute`; known are name, models, " in message
        assert "requests_per_minute" in message

    with_keys(clock, tmp_path, test)


@pytest.mark.parametrize("has_key", [False, True])
def test_a_gateway_without_a_key_and_without_admin_routes_says_so(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture, has_key: bool
) -> None:
    path = str(tmp_path / "keys.db")

    async def run() -> None:
        store = await opened(path, Now())
        if has_key:
            await store.create(KeySettings(name="a"))
        await store.close()
        async with gateway({"a": {}}, FakeLaunch(answer), keys=path):
            pass

    clock.run(run())
    said = [record.getMessage() for record in caplog.records if "has no key" in record.getMessage()]
    assert len(said) == (not has_key) and all("--admin-port" in one for one in said)


def test_a_client_that_hangs_up_has_used_what_it_was_sent(clock: Clock, tmp_path: Path) -> None:
    async def behave(asked: Asked) -> None:
        about = json.dumps({"id": "c", "created": 1, "seed": 1})
        asked.head(
            content_type="text/event-stream", transfer_encoding="chunked", x_octavo_resumable=about,
            x_octavo_prompt_tokens="9",
        )  # fmt: skip
        asked.piece(b'data: {"choices":[{}]}\n\n: tokens [1,2,3]\n\n')
        await asked.reader.read()

    async def test(gate: Gateway, keys: Keys) -> None:
        key_id, headers = await keys.create()
        body = {"model": "a", "stream": True}
        async with gate.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            assert await anext(response.aiter_raw())
        await until(lambda: gate.server.app.num_in_flight == 0)
        assert await keys.used(key_id) == (1, 9, 3)

    with_keys(clock, tmp_path, test, behave)


def test_admins_are_told_which_setting_or_key_is_wrong(clock: Clock, tmp_path: Path) -> None:
    async def test(gate: Gateway, keys: Keys) -> None:
        for setting, value, code in (
            ("budget_per_day", 1, "unknown_parameter"),
            ("requests_per_day", "1", "invalid_value"),
            ("requests_per_day", -1, "invalid_value"),
        ):
            refused = (await keys.http.post("/keys", json={"name": "n", setting: value})).json()["error"]
            assert (refused["param"], refused["code"]) == (setting, code)
        assert (await keys.http.post("/keys", content=b"[")).json()["error"]["code"] == "invalid_body"
        await keys.create(name="team")
        refused = (await keys.http.patch("/keys/team", json={})).json()["error"]
        assert refused["message"] == "there is no key with the id team; GET /keys lists the ids."

    with_keys(clock, tmp_path, test)


def test_a_key_from_before_the_checks_can_be_changed(clock: Clock, tmp_path: Path) -> None:
    async def test(gate: Gateway, keys: Keys) -> None:
        store = gate.server.store
        assert store is not None
        before = KeySettings(name="a\nb", expires_at=1795994424000.0, priority=2**40)
        key, _ = await store.create(before)
        answer = await keys.http.patch(f"/keys/{key.id}", json={"is_enabled": False})
        assert answer.status_code == 200 and (await store.get(key.id)).settings.is_enabled is False
        for field in ("name", "expires_at", "priority"):
            refused = await keys.http.patch(f"/keys/{key.id}", json={field: getattr(before, field)})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == field

    with_keys(clock, tmp_path, test)


def test_a_key_is_for_its_models_and_sees_no_others(clock: Clock, tmp_path: Path) -> None:
    async def test(gate: Gateway, keys: Keys) -> None:
        assert (await gate.ask()).status_code == 401
        key_id, headers = await keys.create(models=["x"])
        gate.http.headers.update({**headers, "x-api-key": ""})
        refused = await gate.ask("b")
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "model_not_allowed"
        assert refused.json()["error"]["message"].endswith(" is not for the model b; its models are: x.")
        assert (await keys.http.patch(f"/keys/{key_id}", json={"models": []})).status_code == 200
        assert (await gate.ask("b")).json()["error"]["message"].endswith(" is not for the model b; it is for none.")
        assert (await keys.http.patch(f"/keys/{key_id}", json={"models": ["x"]})).status_code == 200
        listed = {one["id"] for one in (await gate.http.get("/v1/models")).json()["data"]}
        assert listed == {"a", "x"} and (await gate.http.get("/v1/models/b")).status_code == 403
        for path in ("show", "generate", "pull"):
            assert (await gate.http.post(f"/api/{path}", json={"model": "b"})).status_code == 403
        made = (await gate.ask(path="/v1/responses", input="x")).json()["id"]
        _, others = await keys.create()
        found = await gate.http.get(f"/v1/responses/{made}", headers=others)
        assert found.status_code == 404, "what another key has made"
        for path, status in (
            (f"/llm/v1/responses/{made}", 403),
            (f"/v1/cache/sessions/%2e%2e/%2e%2e/responses/{made}", 404),
        ):
            for method in ("GET", "DELETE"):
                found = await gate.http.request(method, path, headers={**others, "x-octavo-model": "a"})
                assert found.status_code == status and found.json()["error"]["message"].startswith("/"), path
        assert (await gate.http.delete("/v1/cache/sessions/s")).status_code == 200
        assert [one.target for one in gate.launch.last("a").asked][-1] == "/v1/cache/sessions/s"
        elsewhere = await gate.http.delete("/v1/cache/sessions/s", headers={"x-octavo-model": "b"})
        assert elsewhere.status_code == 403
        for path in ("/v1/files", "/v1/files/", "/llm/v1/files"):
            assert (await gate.http.get(path, headers={**others, "x-octavo-model": "a"})).status_code == 403, path
        for path in ("/v1/responses", "/v1/responses/"):
            chosen = await gate.ask(path=path, input="x", stream=True, resume={"id": made})
            assert chosen.status_code == 403, "whose id it would have"
        changed = await keys.http.patch(f"/keys/{key_id}", json={"models": None, "is_enabled": False})
        assert changed.json()["models"] is None and changed.json()["name"] == "k"
        assert (await gate.ask("b")).status_code == 401
        assert (await keys.http.delete(f"/keys/{key_id}")).json()["deleted"]
        assert "b" not in gate.launch.begun

    with_keys(clock, tmp_path, test)


def test_octavo_run_says_that_a_key_is_not_for_a_model_and_serves_what_is_not_there(
    clock: Clock, tmp_path: Path
) -> None:
    async def test(gate: Gateway, keys: Keys) -> None:
        _, headers = await keys.create(models=["a"])
        key = headers["authorization"].removeprefix("Bearer ")
        args = make_ps_parser("octavo ps").parse_args(["--url", f"{gate.http.base_url}/v1", "--api-key", key])
        client = ApiClient(args, needs_model=False)
        assert [await asyncio.to_thread(client.has_model, name) for name in ("a", "x", "none")] == [True, True, False]
        with pytest.raises(OctavoError, match="answered 403: The API key is not for the model b"):
            await asyncio.to_thread(client.has_model, "b")

    with_keys(clock, tmp_path, test)


def test_limits_refuse_with_the_time_to_come_back(clock: Clock, tmp_path: Path) -> None:
    async def test(gate: Gateway, keys: Keys) -> None:
        key_id, headers = await keys.create(requests_per_day=3, priority=7)
        gate.http.headers.update(headers)
        for _ in range(3):
            assert (await gate.ask()).status_code == 200
        asked = gate.launch.last("a").asked
        assert asked[-1].json["priority"] == 7
        refused = await gate.ask()
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= DAY_S + 1
        assert len(asked) == 3 and await keys.used(key_id) == (3, 12, 9)
        key_id, headers = await keys.create(priority=7)
        gate.http.headers.update(headers)
        for path, priority in (("/v1/messages", 7), ("/v1/messages/count_tokens", None), ("/tokenize", None)):
            assert (await gate.ask(path=path)).status_code == 200
            assert asked[-1].json.get("priority") == priority, "routes without the field would refuse it"
        key_id, headers = await keys.create(tokens_per_day=7)
        gate.http.headers.update(headers)
        assert (await gate.ask(path="/v1/batches")).status_code == (await gate.ask(path="/generate")).status_code == 403
        assert (await gate.ask(path="/generate/")).status_code == 403
        num_asked = len(asked)
        for path, status in (("/llm/generate", 403), ("/llm/v1/chat/completions", 403), ("/v1/nothing", 404)):
            assert (await gate.ask(path=path)).status_code == status
        unknown = await gate.ask(path="/v1/chat/completion")
        assert "did you mean /v1/chat/completions?" in unknown.json()["error"]["message"]
        assert (unknown.status_code, len(asked)) == (404, num_asked)
        assert (await gate.ask(path="/v1/responses", background=True)).status_code == 403
        assert (await gate.ask()).status_code == 200 and (await gate.ask()).status_code == 429

    with_keys(clock, tmp_path, test)


def test_a_request_that_is_counted_while_its_model_changes_goes_to_the_new_one(clock: Clock, tmp_path: Path) -> None:
    async def run() -> None:
        file = tmp_path / "models.yaml"
        file.write_text("models: {a: {}}")
        options: dict[str, Any] = {"keys": str(tmp_path / "keys.db"), "admin_key": ["root"]}
        async with gateway(str(file), FakeLaunch(answer), **options) as gate:
            keys, store = Keys(gate), gate.server.store
            key_id, headers = await keys.create()
            assert store is not None
            admit, lengths = store.admit, iter((64, 128))

            async def admit_late(*asked: Any) -> None:
                await admit(*asked)
                old = gate.deployment("a")
                file.write_text(f"models: {{a: {{flags: {{max-model-len: {next(lengths)}}}}}}}")
                gate.server.reload()
                await until(lambda: old.has_ended)

            store.admit = admit_late  # type: ignore[method-assign]
            for path in ("/v1/chat/completions", "/api/generate"):
                assert (await gate.http.post(path, json={"model": "a"}, headers=headers)).status_code == 200, path
            assert (await keys.used(key_id))[0] == 2
            await keys.http.aclose()

    clock.run(run())


def test_a_fault_of_the_gateways_own_is_an_answer_to_admins_too(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(gate: Gateway, keys: Keys) -> None:
        gate.server.store.keys = None  # type: ignore[union-attr, method-assign, assignment]
        failed = await keys.http.get("/keys")
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "internal_error"
        assert "TypeError" in caplog.text

    with_keys(clock, tmp_path, test)


def test_keys_of_flags_have_no_limits_and_admins_a_port_of_their_own(clock: Clock, tmp_path: Path) -> None:
    async def test(gate: Gateway, keys: Keys) -> None:
        assert (await gate.ask()).status_code == 401
        plain = {"x-api-key": "plain"}
        gate.server.store.find = None  # type: ignore[assignment,union-attr]  # they need no store
        assert (await gate.http.post("/v1/completions", json={"model": "a"}, headers=plain)).status_code == 200
        elsewhere = await gate.http.get("/keys", headers=plain)
        assert elsewhere.status_code == 404 and "admin port" in elsewhere.text
        for headers in ({"authorization": "Bearer plain"}, {"authorization": ""}):
            assert (await keys.http.get("/keys", headers=headers)).status_code == 401
        for body, says in (
            (b"{", "JSON"), (b"{}", "name"), (b'{"name": "k", "requests_per_day": -1}', "requests_per_day"),
            (b'{"name": "k", "colour": 1}', "colour"), (b'{"name": ' + b"[" * 99_999, "nested"),
            (b'{"name": "a\\nb"}', "printable"), (b'{"name": "k", "expires_at": -1}', "expires_at"),
            (b'{"name": "k", "expires_at": 1795994424000}', "milliseconds"),
            (b'{"name": "k", "priority": 2147483648}', "priority"),
        ):  # fmt: skip
            refused = await keys.http.post("/keys", content=body)
            assert refused.status_code == 400 and says in refused.json()["error"]["message"]
        assert (await keys.http.get("/keys/none")).status_code == 404
        for query in ("since=today", "format=xml", "from=2026-11-01", "since=2026-12-01&until=2026-11-01"):
            assert (await keys.http.get(f"/usage?{query}")).status_code == 400, query
        assert (await keys.http.get("/keys")).json() == {"data": []}

    with_keys(clock, tmp_path, test, api_key=["plain"])
