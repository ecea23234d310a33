"""Several gateways and one database of keys: limits and counts are those of all of them, whoever dies."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest

from octavo.errors import ConfigError, RequestError
from octavo.gateway import key_store
from octavo.gateway.client_keys import Key, KeySettings
from octavo.gateway.key_store import KeyDatabase, KeyStore, Operation, open_keys
from tests.entrypoints.http.test_tls import certificate
from tests.gateway.fakes import FakeLaunch, fake_servers, gateway
from tests.gateway.key_databases import SERVERS, Server, TlsPostgresqlServer, server
from tests.gateway.test_client_keys import ADMIN, Keys, Now, answer
from tests.waiting import until

__all__ = ["certificate"]  # the fixture


@pytest.fixture(scope="module", params=SERVERS)
def database(request: pytest.FixtureRequest) -> Iterator[Server]:
    with server(request.param) as running:
        yield running


async def opened(url: str, on_loss: Any = "refuse") -> KeyStore:
    store = open_keys(url, on_loss, Now())
    await store.open()
    return store


async def admitted(store: KeyStore, key: Key) -> bool:
    try:
        await store.admit(key, "m")
    except RequestError as error:
        if error.status != 429:
            raise
        return False
    return True


def test_two_gateways_admit_no_more_than_a_limit_together(database: Server) -> None:
    async def run() -> None:
        url = database.url()
        stores = await asyncio.gather(opened(url), opened(url), opened(url))  # tables are made once
        keys = [(await stores[0].create(KeySettings(name=name, requests_per_minute=40)))[0] for name in "ab"]
        asks = [admitted(store, key) for _ in range(30) for store in stores for key in keys]
        assert sum(await asyncio.gather(*asks)) == 80
        for key in keys:
            await asyncio.gather(*(store.add_tokens(key, "m", 2, 1) for store in stores for _ in range(10)))
        found = await stores[1].keys()
        assert [(one.num_requests, one.num_prompt_tokens, one.num_completion_tokens) for one in found] == [
            (40, 60, 30)
        ] * 2
        assert sum(key.num_requests for store in stores for key in store.counted()) == 80, "each its own"
        for store in stores:
            await store.close()

    asyncio.run(run())


def test_what_one_gateway_says_of_a_key_the_others_know(database: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        url = database.url()
        one, other = await opened(url), await opened(url)
        key, secret = await one.create(KeySettings(name="a"))
        found = await other.find(secret.encode())
        assert found is not None and found.id == key.id
        await one.change(key, KeySettings(name="a", is_enabled=False))
        with pytest.raises(RequestError, match="is disabled") as caught:
            await other.admit(found, "m")
        assert caught.value.status == 401, "at once, though the other one remembers it"
        await one.change(key, KeySettings(name="b"))
        await other.admit(found, "m")
        monkeypatch.setattr(key_store, "FRESH_S", 0.0)
        renamed = await other.find(secret.encode()), await other.find(secret.encode())
        assert renamed[1] is not None and renamed[1].settings.name == "b" and renamed[1].num_requests == 1
        await one.delete(key)
        with pytest.raises(RequestError):
            await other.admit(found, "m")
        with pytest.raises(RequestError, match="there is no key with the id"):
            await other.change(found, KeySettings(name="c"))
        assert [row["requests"] for row in await other.usage(0, 10**6)] == [1], "what it has used stays"
        await one.close()
        await other.close()

    asyncio.run(run())


def test_a_batch_whose_answer_is_lost_is_counted_once(database: Server) -> None:
    async def run() -> None:
        store = await opened(database.url())
        key, _ = await store.create(KeySettings(name="a", requests_per_minute=3))
        inner = store._database  # type: ignore[attr-defined]
        real: Callable[..., Awaitable[Any]] = inner.count
        lost = [2]

        async def lossy(*values: Any) -> Any:
            answers = await real(*values)
            if lost[0]:
                lost[0] -= 1
                raise key_store.LostError("the connection broke")
            return answers

        inner.count = lossy
        results = await asyncio.gather(
            *(store.admit(key, "m") for _ in range(2)), store.add_tokens(key, "m", 5, 6), return_exceptions=True
        )
        assert [getattr(one, "status", None) for one in results] == [503, 503, None]
        await until(lambda: store._is_idle.is_set())  # type: ignore[attr-defined]
        (found,) = await store.keys()
        used = found.num_requests, found.num_prompt_tokens, found.num_completion_tokens
        assert used == (0, 5, 6), "those that were refused are not counted"
        assert [await admitted(store, key) for _ in range(4)] == [True] * 3 + [False]
        await store.close()

    asyncio.run(run())


def test_tls_reaches_postgresql_with_the_certificate_that_was_named_alone(certificate: tuple[str, str]) -> None:
    async def run(url: str) -> None:
        store = await opened(url)
        key, _ = await store.create(KeySettings(name="a", requests_per_minute=1))
        assert await admitted(store, key) and not await admitted(store, key)
        await store.close()
        with pytest.raises(ConfigError, match="certificate verify failed"):
            await opened(url.replace(f"sslrootcert={certificate[0]}", "sslrootcert=system"))
        with pytest.raises(ConfigError, match="no encryption"):
            await opened(url.replace("sslmode=verify-full", "sslmode=disable"))

    with server("postgresql", lambda folder: TlsPostgresqlServer(folder, certificate)) as running:
        asyncio.run(run(running.url()))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_database_refuses_or_admits_and_loses_nothing(
    database: Server, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    async def run() -> None:
        url = database.url()
        strict, open_ = await opened(url), await opened(url, "admit")
        key, secret = await strict.create(KeySettings(name="a", requests_per_minute=5))
        assert await open_.find(secret.encode())
        await strict.admit(key, "m")
        monkeypatch.setattr(key_store, "TIMEOUT_S", 0.3)
        await asyncio.to_thread(database.kill) if how == signal.SIGKILL else database.signal(how)
        for _ in range(3):
            with pytest.raises(RequestError) as caught:
                await strict.admit(key, "m")
            assert (caught.value.status, caught.value.code) == (503, "keys_unavailable")
        await strict.add_tokens(key, "m", 7, 0)
        with pytest.raises(RequestError):
            await strict.keys()
        for _ in range(10):
            assert await open_.find(secret.encode()), "it is known"
            await open_.admit(key, "m")
        inner = strict._database  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.delattr(type(inner), "find")
            for store in (strict, open_):
                with pytest.raises(RequestError) as caught:
                    await store.find(b"another")
                assert caught.value.status == 503, "nobody waits for it"
        monkeypatch.setattr(key_store, "TIMEOUT_S", 60.0)
        await asyncio.to_thread(database.start) if how == signal.SIGKILL else database.signal(signal.SIGCONT)
        for store in (strict, open_):
            await until(lambda store=store: store._is_idle.is_set())  # type: ignore[misc]
        (found,) = await strict.keys()
        assert (found.num_requests, found.num_prompt_tokens) == (11, 7)
        assert not await admitted(open_, key), "limits hold again"
        await strict.close()
        await open_.close()

    asyncio.run(run())


def test_gateways_share_keys_by_their_admin_routes(database: Server) -> None:
    async def run() -> None:
        url = database.url()
        options: dict[str, Any] = {"keys": url, "admin_key": ["root"]}
        async with fake_servers(answer) as (replica,):
            models = {"a": {"addresses": [replica.address]}}
            async with (
                gateway(models, FakeLaunch(), **options) as one,
                gateway(models, FakeLaunch(), **options) as other,
            ):
                keys, others = Keys(one), Keys(other)
                for gate in (one, other):
                    gate.server.store._batch_now = Now()  # type: ignore[union-attr]
                async with keys.http, others.http:
                    key_id, headers = await keys.create(requests_per_day=4)
                    for gate in (one, other):
                        gate.http.headers.update(headers)
                    assert [(await gate.ask(stream=True)).status_code for gate in (one, other) * 3] == [200] * 4 + [
                        429
                    ] * 2
                    assert await keys.used(key_id) == await others.used(key_id) == (4, 16, 12)
                    assert len(replica.asked) == 4
                    for gate, http in ((one, keys.http), (other, others.http)):
                        assert await gate.metric('octavo_gateway_key_requests_total{key="k"}', http) == 2
                    stats = (await others.http.get("/ui/stats")).json()["keys"]
                    assert [(row["name"], row["requests"]) for row in stats] == [("k", 4)]
                    table = await others.http.get("/usage", headers=ADMIN)
                    assert [row["requests"] for row in table.json()["data"]] == [4]

    asyncio.run(run())


def test_what_cannot_be_counted_ends_no_counting(database: Server) -> None:
    async def run() -> None:
        store = await opened(database.url())
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"name": "a", "requests_per_day": 10**19}, KeySettings)
        for name, limit in ("a", 2**63 - 1), ("b", 10**19):  # which an earlier version may have kept
            key, _ = await store.create(KeySettings(name=name, requests_per_day=limit))
            await store.admit(key, "m")
        inner = store._database  # type: ignore[attr-defined]
        real = inner.count

        async def broken(*values: Any) -> Any:
            inner.count = real
            raise ValueError("out of range")

        inner.count = broken
        with pytest.raises(RequestError) as caught:
            await store.admit(key, "m")
        assert caught.value.status == 503
        await store.admit(key, "m")
        await store.close()

    asyncio.run(run())


class _Choosy(KeyDatabase):
    """Refuses batches with an operation of the model "wrong", and has counted what is in `counted`."""

    address = "a database"

    def __init__(self) -> None:
        self.counted: list[Operation] = []
        self.numbers: list[int] = []

    async def count(self, writer: str, number: int, now: float | None, operations: list[Operation]) -> list[Any]:
        self.numbers.append(number)
        if any(one[1] == "wrong" for one in operations):
            raise RequestError("the model is wrong")
        self.counted += operations
        return ["no" if one[1] == "refused" else None for one in operations]

    async def prepare(self) -> None: ...

    async def close(self) -> None: ...


def test_only_what_cannot_be_counted_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_Choosy, "__abstractmethods__", frozenset())

    async def run() -> None:
        database = _Choosy()  # type: ignore[abstract]
        store = KeyStore(database, "refuse", Now())
        await store.open()
        keys = [Key(f"key_{i}", KeySettings(name="a")) for i in range(5)]
        asks = [store.admit(key, "wrong" if key is keys[2] else "m") for key in keys]
        uses = [store.add_tokens(key, "refused" if key is keys[1] else "m", 5, 6) for key in keys]
        results = await asyncio.gather(*asks, *uses, return_exceptions=True)
        assert [getattr(one, "status", None) for one in results] == [None, None, 503, *[None] * 7]
        assert sorted(database.counted) == sorted(
            [(key.id, "refused" if key is keys[1] else "m", 0, 5, 6, False) for key in keys]
            + [(key.id, "m", 1, 0, 0, True) for key in keys if key is not keys[2]]
        )
        assert database.numbers == [*range(1, len(database.numbers) + 1)]
        await store.close()

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == [
        f"a database cannot count {used} of {place}, which are left out: {why}"
        for used, place, why in (
            ("0 requests, 5 prompt tokens and 6 completion tokens", "key_1 for refused", "no"),
            (
                "1 requests, 0 prompt tokens and 0 completion tokens",
                "key_2 for wrong",
                "RequestError: the model is wrong",
            ),
        )
    ]


def test_a_script_that_fails_amid_a_batch_counts_the_rest_once() -> None:
    async def run(running: Server) -> None:
        import redis

        store = await opened(running.url())
        good, bad = [(await store.create(KeySettings(name=name)))[0] for name in "gb"]
        with redis.Redis(unix_socket_path=str(running.folder / "socket")) as client:
            client.hset(f"{{octavo}}:key:{bad.id}", "completion_tokens", "no number")
        results = await asyncio.gather(*(store.admit(key, "m") for key in (good, bad, good)), return_exceptions=True)
        assert [getattr(one, "status", None) for one in results] == [None, 503, None]
        assert (await store.get(good.id)).num_requests == 2
        await store.close()

    with server("valkey") as running:
        asyncio.run(run(running))


def test_an_admin_who_waits_too_long_ends_no_counting(database: Server) -> None:
    async def run() -> None:
        store = await opened(database.url())
        key, secret = await store.create(KeySettings(name="a"))

        async def late(*values: Any) -> Any:
            raise key_store.LateError("it did not answer")

        store._database.used = late  # type: ignore[attr-defined]
        with pytest.raises(RequestError) as caught:
            await store.usage(0, 1)
        assert caught.value.status == 503
        await store.admit(key, "m")
        assert await store.find(secret.encode())
        await store.close()

    asyncio.run(run())


def test_two_changes_of_a_key_are_both_kept(database: Server) -> None:
    async def run() -> None:
        store = await opened(database.url())
        key, _ = await store.create(KeySettings(name="a"))
        one, other = await store.get(key.id), await store.get(key.id)
        inner = store._database  # type: ignore[attr-defined]
        before = await inner.get(key.id)
        assert await store.change(one, KeySettings(name="a", expires_at=1.5e18))
        assert not await store.change(other, KeySettings(name="b")), "it read the settings before"
        assert not await inner.change(key.id, before[1], before[1])
        other = await store.get(key.id)
        assert await store.change(other, KeySettings(name="b", expires_at=other.settings.expires_at))
        assert (await store.get(key.id)).settings == KeySettings(name="b", expires_at=1.5e18)
        await store.close()

    asyncio.run(run())


def test_what_is_taken_back_in_another_minute_admits_no_more_then(database: Server) -> None:
    async def run() -> None:
        store = await opened(database.url())
        key, _ = await store.create(KeySettings(name="a", requests_per_minute=1))
        store._use(key.id, "m", -1, 0, 0)  # type: ignore[attr-defined]
        assert [await admitted(store, key) for _ in range(2)] == [True, False]
        await store.close()

    asyncio.run(run())


def test_what_writers_left_long_ago_is_deleted() -> None:
    psycopg = pytest.importorskip("psycopg")

    async def start(url: str) -> None:
        await (await opened(url)).close()

    with server("postgresql") as running:
        url = running.url()
        asyncio.run(start(url))
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("INSERT INTO octavo_writers VALUES ('old', 1, NULL, now() - interval '8 days')")
            asyncio.run(start(url))
            assert connection.execute("SELECT id FROM octavo_writers WHERE id = 'old'").fetchall() == []


def test_a_valkey_that_hangs_is_late_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    redis = pytest.importorskip("redis")

    async def run() -> None:
        store = await opened(running.url())
        client, asked = store._database._client, []  # type: ignore[attr-defined]

        async def late(*words: Any, **options: Any) -> None:
            asked.append(words)
            raise redis.TimeoutError("Timeout reading from socket")

        with monkeypatch.context() as patch:
            patch.setattr(client, "execute_command", late)
            with pytest.raises(RequestError) as caught:
                await store.get("key_1")
            assert caught.value.status == 503 and len(asked) == 1
        await until(lambda: store._is_idle.is_set())  # type: ignore[attr-defined]
        await store.close()

    with server("valkey") as running:
        asyncio.run(run())


def test_a_valkey_that_drops_keys_is_refused() -> None:
    async def run(url: str) -> None:
        await open_keys(url).open()

    with server("valkey") as running:
        import redis

        with redis.Redis(unix_socket_path=str(running.folder / "socket")) as client:
            client.config_set("maxmemory", "100mb")
            client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(ConfigError, match="noeviction"):
            asyncio.run(run(running.url()))


@pytest.mark.parametrize(("url", "says"), [("postgresql://x", "needs psycopg"), ("valkey://x", "needs redis-py")])
def test_a_driver_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, url: str, says: str) -> None:
    from octavo.gateway import postgresql_keys, valkey_keys

    for module in (postgresql_keys, valkey_keys):
        monkeypatch.setattr(module, "_MISSING", "no module")
    with pytest.raises(ConfigError, match=says):
        open_keys(url)


@pytest.mark.parametrize("scheme", ["postgresql", "valkey"])
@pytest.mark.parametrize("user", ["u:secret@x", "u:secret/x", "u:12/secret", "u:secret?x", "u:secret#x"])
def test_no_error_tells_a_password(scheme: str, user: str) -> None:
    pytest.importorskip("psycopg" if scheme == "postgresql" else "redis")
    with pytest.raises(ConfigError, match="%40") as caught:
        open_keys(f"{scheme}://{user}@127.0.0.1:1/0")
    assert "secret" not in str(caught.value)


def test_a_valkey_may_have_any_name() -> None:
    pytest.importorskip("redis")
    store: Any = open_keys("redis://valkey:valkey@valkey/3")
    values = store._database._client.connection_pool.connection_kwargs
    assert [values[name] for name in ("username", "password", "host", "db")] == ["valkey"] * 3 + [3]


def test_an_address_that_is_wrong_ends_the_start() -> None:
    async def run(url: str) -> None:
        await open_keys(url).open()

    with pytest.raises(ConfigError, match="mysql"):
        asyncio.run(run("mysql://x"))
    pytest.importorskip("psycopg")
    with pytest.raises(ConfigError, match="cannot be used"):
        asyncio.run(run("postgresql://127.0.0.1:1/x"))
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        asyncio.run(run("postgresql://u:secret%zz@h/x"))
    assert "secret" not in str(caught.value)
