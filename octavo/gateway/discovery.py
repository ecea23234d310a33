"""Finds the replicas of a model as they come and go: the records of a DNS name, or the endpoints of a Kubernetes
service. `Deployment` is told the addresses whenever they change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

import msgspec

from octavo.errors import ConfigError
from octavo.gateway.upstream import Answer, Upstream, UpstreamError

logger = logging.getLogger("octavo.gateway")

Take = Callable[[list[str]], None]  # called with all addresses, when they may have changed

DNS_INTERVAL_S = 5.0  # the resolver does not tell a time to live
WATCH_S = 300  # after which the API server ends a watch, and everything is listed again
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0  # between two tries
MAX_LIST_BYTES = 64 << 20
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # Kubernetes mounts it into every pod


class DnsName(NamedTuple):
    """`dns+http://HOST:PORT`: each address of the name is a replica."""

    host: str
    port: int


class KubernetesService(NamedTuple):
    """`kubernetes://NAMESPACE/SERVICE:PORT`: each ready endpoint is a replica. The default namespace is the pod's own;
    the port is the number at which the pods listen, or its name in the service."""

    namespace: str
    name: str
    port: str


def read_source(text: str) -> DnsName | KubernetesService:
    """Return the source that a text names. Raises `ConfigError`, which names the forms that are known."""
    try:
        parts = urlsplit(text)
        if parts.scheme == "dns+http" and parts.hostname and parts.port and parts.path in ("", "/"):
            return DnsName(parts.hostname, parts.port)
        if parts.scheme == "kubernetes" and (found := re.fullmatch(r"/([a-z0-9.-]+):([a-z0-9-]+)", parts.path)):
            return KubernetesService(parts.netloc, found[1], found[2])
    except ValueError:  # a port that is no number, or an IPv6 address without its end
        pass
    raise ConfigError(
        f"{text} is neither dns+http://HOST:PORT nor kubernetes://NAMESPACE/SERVICE:PORT (https is not built: its "
        "certificates are not for addresses)."
    )


async def follow(source: DnsName | KubernetesService, take: Take) -> None:
    """Call `take` with the addresses, and again whenever they change, until cancelled. If they cannot be found for a
    while, it is not called."""
    tell_once = _without_repeats(take)
    while True:
        try:
            if isinstance(source, DnsName):
                await _follow_dns(source, tell_once)
            else:
                await _follow_service(source, tell_once)
        except Exception:  # a fault of the gateway's own, which must not leave the replicas as they are for ever
            logger.exception("Unexpected error while looking for replicas")
        await asyncio.sleep(MAX_PAUSE_S)


def _without_repeats(take: Take) -> Take:
    last: list[str] | None = None

    def tell(addresses: list[str]) -> None:
        nonlocal last
        if addresses != last:
            take(addresses)
            last = addresses

    return tell


def _address(ip: str, port: int) -> str:
    return f"http://[{ip}]:{port}" if ":" in ip else f"http://{ip}:{port}"


async def _follow_dns(name: DnsName, take: Take) -> None:
    is_known = True
    while True:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
            take(sorted({_address(str(one[4][0]), name.port) for one in found}))
            is_known = True
        except (OSError, UnicodeError) as error:  # a label that is empty or too long is a UnicodeError
            if is_known:
                logger.warning("%s has no address now (%s); its replicas stay as they are", name.host, error)
            is_known = False
        await asyncio.sleep(DNS_INTERVAL_S)


class _Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None  # unknown counts as ready, as Kubernetes advises


class _Endpoint(msgspec.Struct, frozen=True):
    addresses: list[str] = []
    conditions: _Conditions = _Conditions()


class _Metadata(msgspec.Struct, frozen=True):
    name: str = ""
    resourceVersion: str = ""  # Kubernetes' names, here and below


class _Slice(msgspec.Struct, frozen=True):
    """The fields of an EndpointSlice (discovery.k8s.io/v1) that are needed."""

    metadata: _Metadata = _Metadata()
    addressType: str = "IPv4"
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _Slices(msgspec.Struct, frozen=True):
    metadata: _Metadata
    items: list[_Slice]


class _Event(msgspec.Struct, frozen=True):
    type: str  # ADDED, MODIFIED, DELETED, BOOKMARK or ERROR
    object: msgspec.Raw


async def _follow_service(service: KubernetesService, take: Take) -> None:
    pause_s = MIN_PAUSE_S
    while True:
        try:
            api = _EndpointApi(service)  # anew each time, as certificates and tokens are renewed in their files
            with contextlib.closing(api):
                slices, version = await api.list()
                take(_ready_addresses(slices.values(), service.port))
                pause_s = MIN_PAUSE_S
                async for event in api.watch(version):
                    if event.type == "ERROR":  # the version is too old
                        break
                    if event.type == "BOOKMARK":
                        continue
                    one = msgspec.json.decode(event.object, type=_Slice)
                    if event.type == "DELETED":
                        slices.pop(one.metadata.name, None)
                    else:
                        slices[one.metadata.name] = one
                    take(_ready_addresses(slices.values(), service.port))
        except (UpstreamError, OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning(
                "the endpoints of %s are not known: %s; next try in %g s, and its replicas stay as they are",
                service.name, error, pause_s,
            )  # fmt: skip
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            continue
        await asyncio.sleep(MIN_PAUSE_S)  # a server that ends each watch at once is not asked without end


def _ready_addresses(slices: Iterable[_Slice], wanted_port: str) -> list[str]:
    found = set[str]()
    for one in slices:
        ports = [p.port for p in one.ports or () if wanted_port in (p.name, str(p.port)) and p.port is not None]
        if not ports or one.addressType == "FQDN":
            continue
        for endpoint in one.endpoints or ():
            if endpoint.conditions.ready is not False:
                found.update(_address(ip, ports[0]) for ip in endpoint.addresses[:1])  # the others are the same pod's
    return sorted(found)


class _EndpointApi:
    """The API server of the cluster that this pod runs in, asked with the pod's service account."""

    def __init__(self, service: KubernetesService) -> None:
        """Raises `UpstreamError` outside of a cluster, and `OSError` without a service account."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise UpstreamError("KUBERNETES_SERVICE_HOST is not set, as outside of a cluster")
        trusted = ssl.create_default_context(cafile=str(SERVICE_ACCOUNT / "ca.crt"))
        address = _address(host, int(port)).replace("http:", "https:")
        self._upstream = Upstream(address, timeout_s=WATCH_S + 30, trusted=trusted)
        self._token = (SERVICE_ACCOUNT / "token").read_text().strip()
        namespace = service.namespace or (SERVICE_ACCOUNT / "namespace").read_text().strip()
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = {"labelSelector": f"kubernetes.io/service-name={service.name}"}

    def close(self) -> None:
        """Close the connections."""
        self._upstream.close()

    async def list(self) -> tuple[dict[str, _Slice], str]:
        """Return the service's slices by name, and the version to watch from."""
        answer = await self._get({})
        try:
            found = msgspec.json.decode(await answer.read_all(MAX_LIST_BYTES), type=_Slices)
        finally:
            answer.close()
        return {one.metadata.name: one for one in found.items}, found.metadata.resourceVersion

    async def watch(self, version: str) -> AsyncIterator[_Event]:
        """Yield the changes, until the server ends the watch."""
        asked = {
            "watch": "1",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
            "allowWatchBookmarks": "true",
        }
        answer = await self._get(asked)
        try:
            rest = b""
            while data := await answer.read():
                *lines, rest = (rest + data).split(b"\n")
                for line in filter(None, lines):
                    yield msgspec.json.decode(line, type=_Event)
        finally:
            answer.close()

    async def _get(self, query: dict[str, str]) -> Answer:
        target = f"{self._path}?{urlencode(self._selector | query)}".encode()
        headers = [(b"authorization", f"Bearer {self._token}".encode()), (b"accept", b"application/json")]
        answer = await self._upstream.send("GET", target, headers, b"")
        if answer.status == 200:
            return answer
        answer.close()
        advice = "; let its service account list and watch endpointslices" if answer.status in (401, 403) else ""
        raise UpstreamError(f"the API server answered {answer.status}{advice}")
