"""Replicas by the records of a DNS name, and by the endpoints of a Kubernetes service.

`ApiServer` is asked and told what a test says. `Player` sends the bytes of data/kubernetes_api.jsonl, most of which
a real API server has sent; the first line names their source. Each further line has a request, the bytes that answer
it, and the replicas that follow from them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import socket
import ssl
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import pytest

from octavo.errors import ConfigError
from octavo.gateway import discovery
from octavo.gateway.discovery import DnsName, KubernetesService, follow, read_source
from octavo.gateway.gateway_metrics import FORGET_S
from tests.entrypoints.http.test_tls import certificate
from tests.gateway.fakes import Asked, FakeLaunch, FakeServer, answer_plainly, fake_servers, gateway, until
from tests.waiting import Clock

__all__ = ["certificate"]  # the fixture
SERVICE = KubernetesService("models", "qwen", "http")
SLICES = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
PLAYED = [
    json.loads(line) for line in (Path(__file__).parent / "data" / "kubernetes_api.jsonl").read_text().splitlines()[1:]
]


def test_sources_are_read() -> None:
    assert read_source("dns+http://qwen.models.svc:8000") == DnsName("qwen.models.svc", 8000)
    assert read_source("kubernetes://models/qwen:http") == SERVICE
    assert read_source("kubernetes:///qwen:8000") == KubernetesService("", "qwen", "8000")
    for text in (
        "http://h:1", "dns+http://h:x", "dns+http://h:1/v1", "kubernetes://a/B:1", "kubernetes://a/b/c:1", "",
        "kubernetes://A/b:1", "kubernetes://u@a/b:1", "kubernetes://a/b:1?x", "kubernetes://a/b:1#x",
        "dns+http://u@h:1", "dns+http://h:1?x", "dns+http://h:1#x", "dns+http://a b:1", "dns+http://h\n:1",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="neither"):
            read_source(text)


def test_a_name_that_cannot_be_one_is_said_and_asked_again(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    async def run() -> None:
        with caplog.at_level(logging.WARNING, logger="octavo.gateway"):
            following = asyncio.ensure_future(follow(read_source("dns+http://replicas..svc:8000"), lambda _: None))
            await until(lambda: "replicas..svc has no address now" in caplog.text)
            assert not following.done()
            following.cancel()

    clock.run(run())


def test_a_fault_does_not_end_the_search_for_replicas(
    caplog: pytest.LogCaptureFixture, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(*_: Any, **options: Any) -> list[Any]:
        return [(0, 0, 0, "", ("127.0.0.1", 1))]

    told: list[list[str]] = []

    def take(addresses: list[str]) -> None:
        told.append(addresses)
        if len(told) == 1:
            raise ValueError("odd")

    async def run() -> None:
        following = asyncio.ensure_future(follow(read_source("dns+http://replicas:8000"), take))
        await until(lambda: len(told) == 2 or following.done())
        assert not following.done() and "ValueError: odd" in caplog.text
        following.cancel()

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    clock.run(run())


def test_records_come_and_go_while_requests_go_on(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[str] = ["127.0.0.1"]
    num_failures = 0

    async def resolve(_: Any, host: str, port: int, **options: Any) -> list[Any]:
        assert host == "replicas"
        nonlocal num_failures
        if not records:
            num_failures += 1
            raise socket.gaierror("no such name")
        return [(0, 0, 0, "", (ip, port)) for ip in [*records, *records]]  # as one record a kind of socket

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    may_end = asyncio.Event()

    async def behave(asked: Asked) -> None:
        if asked.json.get("waits"):
            await may_end.wait()
        asked.reply(b"{}")

    async def run() -> None:
        async with fake_servers(behave) as (server,):
            port = server.address.rpartition(":")[2]
            here, there = server.address, f"http://[::2]:{port}"
            async with gateway({"a": {"discover": f"dns+http://replicas:{port}", "health": "/health"}}) as gate:
                deployment = gate.deployment("a")
                names = lambda: [one.name for one in deployment.replicas]  # noqa: E731
                assert names() == [here], "before the first request"
                kept = deployment.replicas[0]
                assert (await gate.ask()).status_code == 200
                records.append("::2")
                await until(lambda: names() == [here, there])
                assert deployment.replicas[0] is kept
                records.clear()
                await until(lambda: num_failures == 2)  # nobody knows the name for a while
                assert names() == [here, there]
                waiting = asyncio.ensure_future(gate.ask(waits=True))
                await until(lambda: kept.num_in_flight == 1)
                records.append("::2")
                await until(lambda: names() == [there])
                may_end.set()
                assert (await waiting).status_code == 200, "a replica that has gone ends what it has begun"
                assert not kept.upstream._open, "and is hung up on"

    clock.run(run())


def test_the_series_of_a_replica_that_has_gone_end_and_nothing_that_was_counted_is_lost(clock: Clock) -> None:
    """The first replica answers twice and is gone for good; the other one is away for a while."""

    def series(text: str, replica: str) -> list[str]:
        return [line for line in text.splitlines() if f'replica="{replica}"' in line]

    async def run() -> None:
        async with fake_servers(answer_plainly, answer_plainly) as servers:
            first, other = (server.address for server in servers)
            async with gateway({"a": {"discover": "dns+http://replicas..svc:1"}}) as gate:
                deployment = gate.deployment("a")

                async def read() -> str:
                    return (await gate.http.get("/metrics")).text

                deployment._move_to([first])
                for _ in range(2):
                    assert (await gate.ask()).status_code == 200
                deployment._move_to([other])
                assert (await gate.ask()).status_code == 200
                assert series(await read(), first), "its last values can be read"
                clock.advance(FORGET_S - 1)
                deployment._move_to([])
                before = await read()
                assert series(before, first) and series(before, other)
                clock.advance(2)
                text = await read()
                assert not series(text, first)
                gone = 'octavo_gateway_gone_replicas_total{counter="requests",model="a",status="200"}'
                assert f"{gone} 2.0" in text
                deployment._move_to([other])
                clock.advance(FORGET_S)
                text = await read()
                assert f'requests_total{{model="a",replica="{other}",status="200"}} 1.0' in text
                stats = (await gate.http.get("/ui/stats")).json()
                assert stats["models"][0]["answered"] == 3
                deployment._move_to([first])
                assert (await gate.ask()).status_code == 200
                assert f'requests_total{{model="a",replica="{first}",status="200"}} 1.0' in await read()

    clock.run(run())


def test_series_of_models_that_have_left_the_catalogue_end_and_those_of_stopped_models_stay(
    clock: Clock, tmp_path: Path
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {a: {keep_alive: 1}, b: {}}")

    async def run() -> None:
        async with gateway(str(file)) as gate:
            await gate.ask("a")
            await gate.ask("b")
            file.write_text("models: {a: {keep_alive: 1}}")
            gate.server.reload()
            await until(lambda: not gate.launch.running("a") and not gate.launch.running("b"))
            for _ in range(2):
                text = (await gate.http.get("/metrics")).text
                clock.advance(FORGET_S)
            assert 'requests_total{model="a",replica="0",status="200"} 1.0' in text
            assert 'model="b",replica="0"' not in text

    clock.run(run())


def slice_of(name: str, *ips: str, ready: bool | None = True, port: int = 8000) -> dict[str, Any]:
    """As Kubernetes 1.30 writes it, less what nobody reads."""
    return {
        "metadata": {"name": name, "namespace": "models", "resourceVersion": "7",
                     "labels": {"kubernetes.io/service-name": "qwen"}},
        "addressType": "IPv6" if ":" in ips[0] else "IPv4",
        "endpoints": [
            {"addresses": [ip], "conditions": {"ready": ready, "serving": True, "terminating": False},
             "nodeName": "n", "targetRef": {"kind": "Pod", "name": "p", "uid": f"of {ip}"}} for ip in ips
        ],
        "ports": [{"name": "metrics", "protocol": "TCP", "port": 9}, {"name": "http", "protocol": "TCP", "port": port}],
    }  # fmt: skip


class ApiServer(FakeServer):
    """Lists `slices`, and sends the events of `events`; None ends a watch."""

    def __init__(self, certificate: tuple[str, str]) -> None:
        super().__init__(self.answer)
        self._certificate = certificate
        self.slices: list[dict[str, Any]] = []
        self.events: asyncio.Queue[tuple[str, dict[str, Any]] | None] = asyncio.Queue()
        self.status = 200

    async def start(self) -> ApiServer:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self._certificate)
        self._writers: list[asyncio.StreamWriter] = []
        self.exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def answer(self, asked: Asked) -> None:
        assert asked.headers["authorization"] == "Bearer token-1"
        path, _, query = asked.target.partition("?")
        assert path == SLICES
        assert "labelSelector=kubernetes.io%2Fservice-name%3Dqwen" in query
        if self.status != 200:
            asked.reply(b'{"kind": "Status"}', self.status)
        elif "watch=1" not in query:
            found = {"kind": "EndpointSliceList", "metadata": {"resourceVersion": "41"}, "items": self.slices}
            asked.reply(json.dumps(found).encode())
        else:
            assert "resourceVersion=41" in query
            asked.begin_stream()
            while (event := await self.events.get()) is not None:
                line = json.dumps({"type": event[0], "object": event[1]}).encode() + b"\n"
                asked.piece(line[:30])  # lines are cut anywhere
                await asked.writer.drain()
                asked.piece(line[30:])
            asked.piece(b"")


@pytest.fixture
def cluster(
    certificate: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ApiServer:  # what a pod finds
    monkeypatch.setattr(discovery, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setattr(discovery, "MIN_PAUSE_S", 0.0)
    (tmp_path / "ca.crt").write_text(Path(certificate[0]).read_text())
    (tmp_path / "token").write_text("token-1\n")
    (tmp_path / "namespace").write_text("models")
    return ApiServer(certificate)


@pytest.mark.parametrize("namespace", ["models", ""])
def test_ready_endpoints_are_followed(cluster: ApiServer, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        server = await cluster.start()
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        server.slices = [slice_of("a", "10.0.0.1", "10.0.0.2"), slice_of("b", "10.0.0.3", ready=False)]
        told: asyncio.Queue[list[str]] = asyncio.Queue()
        following = asyncio.ensure_future(follow(SERVICE._replace(namespace=namespace), told.put_nowait))
        assert await told.get() == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
        server.events.put_nowait(("BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": "42"}}))
        server.events.put_nowait(("MODIFIED", slice_of("b", "10.0.0.3", ready=None)))
        assert await told.get() == [f"http://10.0.0.{i}:8000" for i in (1, 2, 3)]
        server.events.put_nowait(("DELETED", slice_of("a", "10.0.0.1")))
        assert await told.get() == ["http://10.0.0.3:8000"]
        server.events.put_nowait(("ADDED", slice_of("c", "fd00::1")))
        assert await told.get() == ["http://10.0.0.3:8000", "http://[fd00::1]:8000"]
        for end in (("ERROR", {"kind": "Status", "code": 410}), None):  # both are followed by a new list
            server.slices = [slice_of("d", "10.0.0.4" if end else "10.0.0.5")]
            server.events.put_nowait(end)
            if end:
                server.events.put_nowait(None)  # for the server's own loop
            assert await told.get() == ["http://10.0.0.4:8000" if end else "http://10.0.0.5:8000"]
        await until(lambda: server.num_hung_up == server.num_connections - 1)  # of each list only the last is open
        following.cancel()
        server.die()

    asyncio.run(run())


def test_a_refusal_says_what_to_do_and_keeps_what_is_known(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        server = await cluster.start()
        told: asyncio.Queue[list[str]] = asyncio.Queue()
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        following = asyncio.ensure_future(follow(SERVICE, told.put_nowait))
        await until(lambda: "outside of a cluster" in caplog.text)
        server.status = 403
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        await until(lambda: "answered 403; let its service account list and watch endpointslices" in caplog.text)
        assert told.empty()
        server.slices, server.status = [slice_of("a", "10.0.0.1")], 200
        assert await told.get() == ["http://10.0.0.1:8000"]
        following.cancel()
        server.die()

    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    asyncio.run(run())


def test_a_refusal_with_an_absurd_retry_after_is_said(
    cluster: ApiServer, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(asked: Asked) -> None:
        asked.reply(b"Too many requests", 429, retry_after="9" * 5000)

    async def run() -> None:
        cluster.behave = refuse
        server = await cluster.start()
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        following = asyncio.ensure_future(follow(SERVICE, lambda _: None))
        await until(lambda: bool(caplog.records))
        following.cancel()
        server.die()

    clock.run(run())
    assert "answered 429 (Too many requests)" in caplog.records[0].getMessage()


def test_a_list_in_pages_is_read_whole_and_again_if_a_page_is_too_old(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_too_old = True

    async def answer(asked: Asked) -> None:
        nonlocal is_too_old
        query = dict(parse_qsl(asked.target.partition("?")[2]))
        if "watch" in query:
            assert query["resourceVersion"] == "41"
            asked.begin_stream()
            return
        place, following = {"": (1, "p/2="), "p/2=": (2, "3"), "3": (3, "")}[query.get("continue", "")]
        if place == 2 and is_too_old:
            is_too_old = False
            asked.reply(b'{"kind": "Status", "reason": "Expired", "code": 410}', 410)
            return
        metadata = {"resourceVersion": "41", "continue": following, "remainingItemCount": 3 - place}
        items = [slice_of(str(place), f"10.0.0.{place}")]
        asked.reply(json.dumps({"kind": "EndpointSliceList", "metadata": metadata, "items": items}).encode())

    async def run() -> None:
        cluster.behave = answer
        server = await cluster.start()
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        told: asyncio.Queue[list[str]] = asyncio.Queue()
        following = asyncio.ensure_future(follow(SERVICE, told.put_nowait))
        assert await told.get() == [f"http://10.0.0.{place}:8000" for place in (1, 2, 3)]
        following.cancel()
        server.die()

    asyncio.run(run())
    assert not is_too_old


def test_a_clusters_certificate_may_lack_what_a_strict_check_wants(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts are strict by default from Python 3.13 on."""
    create, created = ssl.create_default_context, list[ssl.SSLContext]()

    def create_strict(*args: Any, **options: Any) -> ssl.SSLContext:
        created.append(create(*args, **options))
        created[-1].verify_flags |= ssl.VERIFY_X509_STRICT
        return created[-1]

    async def run() -> None:
        server = await cluster.start()
        monkeypatch.setattr(ssl, "create_default_context", create_strict)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        server.slices = [slice_of("a", "10.0.0.1")]
        told: asyncio.Queue[list[str]] = asyncio.Queue()
        following = asyncio.ensure_future(follow(SERVICE, told.put_nowait))
        assert await told.get() == ["http://10.0.0.1:8000"]
        following.cancel()
        server.die()

    asyncio.run(run())
    assert created and not any(one.verify_flags & ssl.VERIFY_X509_STRICT for one in created)
    assert all(one.verify_mode == ssl.CERT_REQUIRED and one.check_hostname for one in created)


class Player(ApiServer):
    """Sends the bytes of PLAYED in pieces of these sizes."""

    def __init__(self, certificate: tuple[str, str], account: Path, sizes: tuple[int, ...]) -> None:
        super().__init__(certificate)
        self._rest, self._sizes = iter(PLAYED), itertools.cycle(sizes)
        self._account = account
        self.told: list[list[str]] = []
        self.asked_at: dict[str, float] = {}  # by what is asked about
        self.is_over = False

    async def answer(self, asked: Asked) -> None:
        played = next(self._rest)
        self.asked_at[played["what"]] = time.monotonic()
        path, _, query = asked.target.partition("?")
        given = dict(parse_qsl(query))
        assert asked.headers["authorization"] == f"Bearer {played['token']}", played["what"]
        assert path == SLICES and given.pop("labelSelector") == "kubernetes.io/service-name=qwen"
        if played["asks"]:
            assert given.pop("allowWatchBookmarks") == "true" and given.pop("timeoutSeconds") == "300"
        assert given == played["asks"], played["what"]
        (self._account / "token").write_text("token-2\n")  # renewed, before the one that has just been used has expired
        for sent in played["sends"]:
            data, num_told = sent["bytes"].encode(), len(self.told)
            while data:
                size = next(self._sizes)
                asked.writer.write(data[:size])
                await asked.writer.drain()
                data = data[size:]
            if sent["replicas"] is not None:
                await until(lambda num=num_told: len(self.told) > num)  # type: ignore[misc]
                assert self.told[num_told:] == [sent["replicas"]], played["what"]
        if played["connection"] == "cut":
            asked.die()
        self.is_over = played["connection"] == "open"


@pytest.mark.parametrize("sizes", [(1,), (7, 2, 61, 1), (1 << 20,)])
def test_the_answers_of_an_api_server_are_read_byte_for_byte(
    cluster: ApiServer, certificate: tuple[str, str], tmp_path: Path, clock: Clock, sizes: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    async def run() -> Player:
        player = Player(certificate, tmp_path, sizes)
        await player.start()
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(player.port))
        following = asyncio.ensure_future(follow(SERVICE, player.told.append))
        await until(lambda: player.is_over or following.done())
        following.cancel()
        player.die()
        return player

    monkeypatch.setattr(discovery, "MIN_PAUSE_S", 1.0)
    with caplog.at_level(logging.INFO, logger="octavo.gateway"):
        player = clock.run(run())
    assert player.told == [sent["replicas"] for one in PLAYED for sent in one["sends"] if sent["replicas"] is not None]
    assert player.asked_at["no role may list"] - player.asked_at["too many requests"] >= 7, "as Retry-After says"
    said = [(one.levelname, one.getMessage()) for one in caplog.records if one.name == "octavo.gateway"]
    for words in (
        "answered 401 (Unauthorized)", "answered 429 (Too many requests, please try again later.); next try in 7 s",
        "answered 403 (endpointslices.discovery.k8s.io is forbidden: User ", "let its service account list and watch",
        "answered 504 (Timeout: Too large resource version", "the server hung up", "etcdserver: no leader",
    ):  # fmt: skip
        assert any(level == "WARNING" and words in message for level, message in said), words
    assert [level for level, message in said if "answered 410" in message] == ["INFO"] * 2, "versions become too old"
    assert not any(level == "ERROR" for level, _ in said)


def test_kubernetes_own_client_reads_the_same_from_the_bytes() -> None:
    kubernetes, urllib3 = pytest.importorskip("kubernetes"), pytest.importorskip("urllib3")

    def serve(listening: socket.socket, played: dict[str, Any]) -> None:
        connection, _ = listening.accept()
        with connection:
            while b"\r\n\r\n" not in connection.recv(65536):
                pass
            connection.sendall("".join(sent["bytes"] for sent in played["sends"]).encode())

    def ready(slices: Iterable[Any]) -> set[str]:
        """As the types of the client have it, for slices whose pods have an IPv4 address each."""
        return {
            f"http://{endpoint.addresses[0]}:{port.port}"
            for one in slices
            if one.address_type == "IPv4"
            for endpoint in one.endpoints or ()
            if endpoint.conditions.ready in (True, None)
            for port in one.ports
            if port.name == "http"
        }

    known: dict[str, Any] = {}
    for played in PLAYED:
        told = [set(sent["replicas"]) for sent in played["sends"] if sent["replicas"] is not None]
        refusal = re.search(r'HTTP/1.1 (4..|5..)|"code":(\d+)', "".join(sent["bytes"] for sent in played["sends"]))
        refused, is_cut = None, False
        with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
            answering = pool.submit(serve, listening, played)
            settings = kubernetes.client.Configuration(host=f"http://127.0.0.1:{listening.getsockname()[1]}")
            settings.retries = False
            ask = kubernetes.client.DiscoveryV1Api(kubernetes.client.ApiClient(settings)).list_namespaced_endpoint_slice
            try:
                if not played["asks"]:
                    known = {one.metadata.name: one for one in ask("models").items}
                else:
                    version = played["asks"]["resourceVersion"]
                    watch = kubernetes.watch.Watch()
                    for event in watch.stream(ask, "models", resource_version=version, timeout_seconds=1):
                        one = event["object"]
                        if event["type"] == "DELETED":
                            del known[one.metadata.name]
                        elif event["type"] != "BOOKMARK":
                            known[one.metadata.name] = one
            except kubernetes.client.ApiException as error:
                refused = str(error.status)
            except urllib3.exceptions.ProtocolError:
                is_cut = True
            answering.result()
        assert refused == (refusal and (refusal[1] or refusal[2])), played["what"]
        assert is_cut == (played["connection"] != "kept"), played["what"]
        assert not told or ready(known.values()) == told[-1], played["what"]


@pytest.mark.parametrize(
    ("ports", "wanted", "found"),
    [
        ([{"name": "http", "port": 8000}], "8000", ["http://10.0.0.1:8000"]),
        ([{"name": "a", "port": 1}, {"name": "http", "port": 2}], "http", ["http://10.0.0.1:2"]),
        ([{"name": "http", "protocol": "UDP", "port": 8000}], "http", []),
        ([{"name": "http", "protocol": "UDP", "port": 8000}], "8000", []),
        ([{"name": "", "port": 8000}], "http", []),
        ([{"name": "http", "port": None}], "http", []),
        ([{"name": None, "port": None}], "8000", ["http://10.0.0.1:8000"]),
        (None, "8000", ["http://10.0.0.1:8000"]),
        ([], "8000", ["http://10.0.0.1:8000"]),
        (None, "http", []),
    ],
)
def test_a_port_is_found_by_its_name_or_number(
    ports: Any, wanted: str, found: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    conditions = [{"ready": None, "serving": None, "terminating": None}, None, {}, {"ready": True}]
    for one in conditions:
        endpoint = {"addresses": ["10.0.0.1", "10.0.0.2"], "conditions": one, "targetRef": None}
        slices = msgspec.convert([{"endpoints": [endpoint], "ports": ports}], list[discovery._Slice])
        assert discovery._ready_addresses(slices, SERVICE._replace(port=wanted)) == found
    assert (f"no endpoint of qwen has the port {wanted} (TCP), but " in caplog.text) == (bool(ports) and not found)


def test_a_pod_that_moves_has_the_address_of_the_slice_that_says_ready() -> None:
    def ready_addresses(*found: tuple[str, bool]) -> list[str]:
        slices = [slice_of("a", ip, ready=ready) for ip, ready in found]
        for one in slices:
            one["endpoints"][0]["targetRef"]["uid"] = "u"
        return discovery._ready_addresses(msgspec.convert(slices, list[discovery._Slice]), SERVICE)

    for first, later in itertools.permutations([("10.0.0.1", False), ("10.0.0.2", True)]):
        assert ready_addresses(first, later) == ["http://10.0.0.2:8000"]
        assert ready_addresses(first, later, ("fd00::1", True)) == ["http://10.0.0.2:8000"]
    assert ready_addresses(("10.0.0.1", False), ("fd00::1", True)) == []


def test_two_gateways_send_a_conversation_to_the_same_replica(clock: Clock) -> None:
    async def run() -> None:
        async with fake_servers(*[FakeLaunch().behave] * 4) as servers:
            models = {"a": {"addresses": [one.address for one in servers]}}
            async with gateway(models, several_gateways=True) as one, gateway(models, several_gateways=True) as other:
                for number in range(12):
                    first = [{"role": "user", "content": str(number)}]
                    later = [*first, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
                    await one.ask(messages=first)
                    await other.ask(messages=later)
                counts = [len(server.asked) for server in servers]
                assert sum(counts) == 24 and all(count % 2 == 0 for count in counts)
                asked = [{json.dumps(each.json["messages"][0]) for each in server.asked} for server in servers]
                assert sum(map(len, asked)) == 12, "each conversation is at one replica"

    clock.run(run())
