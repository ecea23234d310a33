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
MAX_LIST_BYTES, MAX_STATUS_BYTES = 64 << 20, 64 << 10
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
        if re.fullmatch(r"dns\+http://[\w.:\[\]-]+/?", text, re.ASCII) and parts.hostname and parts.port:
            return DnsName(parts.hostname, parts.port)
        if found := re.fullmatch(r"kubernetes://([a-z0-9-]*)/([a-z0-9.-]+):([a-z0-9-]+)", text):
            return KubernetesService(*found.groups())
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
    protocol: str | None = None  # by default TCP
    port: int | None = None  # None: any


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None  # unknown counts as ready, as Kubernetes advises; false for pods that are terminating


class _Target(msgspec.Struct, frozen=True):
    uid: str = ""


class _Endpoint(msgspec.Struct, frozen=True):
    addresses: list[str] = []
    conditions: _Conditions | None = None
    targetRef: _Target | None = None  # Kubernetes' names, here and below


class _Metadata(msgspec.Struct, frozen=True, rename={"next_page": "continue"}):
    name: str = ""
    resourceVersion: str = ""
    next_page: str = ""  # of a list that is not complete


class _Slice(msgspec.Struct, frozen=True):
    """The fields of an EndpointSlice (discovery.k8s.io/v1) that are needed."""

    metadata: _Metadata = _Metadata()
    addressType: str = "IPv4"
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _Slices(msgspec.Struct, frozen=True):
    metadata: _Metadata
    items: list[_Slice] | None


class _Details(msgspec.Struct, frozen=True):
    retryAfterSeconds: int = 0


class _Status(msgspec.Struct, frozen=True):
    """The API server's errors, as the body of an answer and as the object of an ERROR event."""

    code: int = 0
    message: str | None = None
    details: _Details | None = None


class _Event(msgspec.Struct, frozen=True):
    type: str  # ADDED, MODIFIED, DELETED, BOOKMARK or ERROR
    object: msgspec.Raw


class _RefusedError(UpstreamError):
    """An error of the API server."""

    def __init__(self, status: _Status) -> None:
        said = f" ({status.message:.500})" if status.message else ""
        advice = "; let its service account list and watch endpointslices" if status.code == 403 else ""
        super().__init__(f"the API server answered {status.code}{said}{advice}")
        self.is_gone = status.code == 410  # the version to watch from is too old
        self.retry_after_s = float(min(status.details.retryAfterSeconds if status.details else 0, WATCH_S))


async def _follow_service(service: KubernetesService, take: Take) -> None:
    pause_s = MIN_PAUSE_S
    while True:
        try:
            api = _EndpointApi(service)  # anew each time, as certificates and tokens are renewed in their files
            with contextlib.closing(api):
                slices, version = await api.list()
                take(_ready_addresses(slices.values(), service))
                async for event in api.watch(version):
                    if event.type == "ERROR":
                        raise _RefusedError(msgspec.json.decode(event.object, type=_Status))
                    pause_s = MIN_PAUSE_S
                    if event.type == "BOOKMARK":
                        continue
                    one = msgspec.json.decode(event.object, type=_Slice)
                    if event.type == "DELETED":
                        slices.pop(one.metadata.name, None)
                    else:
                        slices[one.metadata.name] = one
                    take(_ready_addresses(slices.values(), service))
        except (UpstreamError, OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            is_usual, wait_s = False, pause_s
            if isinstance(error, _RefusedError):
                is_usual, wait_s = error.is_gone, max(pause_s, error.retry_after_s)
            logger.log(
                logging.INFO if is_usual else logging.WARNING,
                "the endpoints of %s are not known: %s; next try in %g s, and its replicas stay as they are",
                service.name, error, wait_s,
            )  # fmt: skip
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            continue
        pause_s = MIN_PAUSE_S
        await asyncio.sleep(pause_s)  # a server that ends each watch at once is not asked without end


def _ready_addresses(slices: Iterable[_Slice], service: KubernetesService) -> list[str]:
    """Return an address for each ready pod: its IPv4 address, if slices of both kinds have the pod. While the pod moves
    from one slice to another, both have it, an earlier one with its earlier address, and the slice that was written
    last is not known: one that says "ready" is enough."""
    found = dict[str, tuple[str, str, bool]]()  # by pod
    other_ports = set[str]()
    for one in sorted(slices, key=lambda each: each.addressType):  # IPv4 before IPv6
        if one.addressType == "FQDN" or not one.endpoints:
            continue
        if (port := _port_number(one, service.port)) is None:
            other_ports.update(f"{each.name or each.port} ({each.protocol or 'TCP'})" for each in one.ports or ())
            continue
        for endpoint in one.endpoints:
            if not endpoint.addresses:
                continue
            address = _address(endpoint.addresses[0], port)  # the others are the same pod's
            pod = (endpoint.targetRef and endpoint.targetRef.uid) or address
            is_ready = endpoint.conditions is None or endpoint.conditions.ready is not False
            kind, _, was_ready = found.get(pod, (one.addressType, "", False))
            if kind == one.addressType and not was_ready:
                found[pod] = kind, address, is_ready
    if other_ports and not found:
        logger.warning(
            "no endpoint of %s has the port %s (TCP), but %s",
            service.name,
            service.port,
            ", ".join(sorted(other_ports)),
        )
    return sorted({address for _, address, is_ready in found.values() if is_ready})


def _port_number(one: _Slice, wanted: str) -> int | None:
    """Return the number of the wanted port, None if the slice lacks it. A service without ports has them all."""
    for port in one.ports or [_Port()]:
        if port.protocol not in (None, "TCP"):
            continue
        if port.port is None and wanted.isdecimal():
            return int(wanted)
        if wanted in (port.name, str(port.port)):
            return port.port
    return None


class _EndpointApi:
    """The API server of the cluster that this pod runs in, asked with the pod's service account."""

    def __init__(self, service: KubernetesService) -> None:
        """Raises `UpstreamError` outside of a cluster, and `OSError` without a service account."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise UpstreamError("KUBERNETES_SERVICE_HOST is not set, as outside of a cluster")
        trusted = ssl.create_default_context(cafile=str(SERVICE_ACCOUNT / "ca.crt"))
        # Python 3.13 turned this on. Many clusters' certificates lack the authority's key identifier that it wants.
        trusted.verify_flags &= ~ssl.VERIFY_X509_STRICT
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
        slices, query = dict[str, _Slice](), dict[str, str]()
        while True:
            answer = await self._get(query)
            try:
                found = msgspec.json.decode(await answer.read_all(MAX_LIST_BYTES), type=_Slices)
            finally:
                answer.close()
            slices |= {one.metadata.name: one for one in found.items or ()}
            if not found.metadata.next_page:
                return slices, found.metadata.resourceVersion
            query = {"continue": found.metadata.next_page}

    async def watch(self, version: str) -> AsyncIterator[_Event]:
        """Yield the changes, one a line, until the server ends the watch."""
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
                if len(rest) > MAX_LIST_BYTES:
                    raise UpstreamError(f"the API server sent an event of more than {MAX_LIST_BYTES} bytes")
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
        try:
            body = await answer.read_all(MAX_STATUS_BYTES)
        finally:
            answer.close()
        try:
            message = msgspec.json.decode(body, type=_Status).message
        except msgspec.DecodeError:  # the refusals of a server with too many requests are plain texts
            message = body.decode(errors="replace").strip()
        seconds = answer.header(b"retry-after")
        details = _Details(int(seconds)) if seconds.isdigit() and len(seconds) < 10 else None
        raise _RefusedError(_Status(answer.status, message, details))
