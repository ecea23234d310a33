"""The gateway's ASGI application: keys, limits of bodies, its own routes, and all others through the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Receive, Scope, Send

from octavo.api_keys import ApiKeys, sent_keys
from octavo.azure import read_as_openai
from octavo.errors import RequestError, error_code
from octavo.gateway.client import BrokenAnswerError, Client, ClientSend
from octavo.gateway.client_keys import Key, LimitError
from octavo.gateway.gateway_metrics import METRICS_TYPE, GatewayMetrics
from octavo.gateway.key_store import KeyStore
from octavo.gateway.models import Models
from octavo.gateway.ollama_routes import OllamaRoutes
from octavo.gateway.page import STATS_PATH, Page, is_of_page
from octavo.gateway.proxy import Proxy, WaitLimits
from octavo.gateway.proxy_request import ProxyRequest, plain_path, route_of
from octavo.gateway.request_body import LARGE_BYTES, RequestBody, read_body
from octavo.gateway.request_spans import RequestSpans
from octavo.gateway.upstream import Headers, is_encoded
from octavo.gateway.usage_counter import UsageCounter
from octavo.logs import UNKNOWN_ROUTE, LineLimit
from octavo.messages_errors import MESSAGES_PREFIX, VERSION_HEADER
from octavo.ollama import GREETING
from octavo.ollama import PREFIX as OLLAMA_PREFIX
from octavo.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger("octavo.gateway")

OPEN_PATHS = ("/", "/health", "/ping", "/metrics", "/version")
BODY_TIMEOUT_S = 60.0
_ID = re.compile(r"^[!-~]{1,200}$")
_VERSION_HEADER = VERSION_HEADER.encode()
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


class _ClientGoneError(Exception):
    """The client hung up before its request was complete."""


class GatewayApp:
    """The gateway as an ASGI application. `num_in_flight` counts requests whose answer has not ended."""

    def __init__(
        self, models: Models, keys: ApiKeys, limits: WaitLimits, *, max_body_bytes: int, store: KeyStore | None = None,
        several_gateways: bool = False, spans: RequestSpans | None = None,
    ) -> None:  # fmt: skip
        """Clients need one of the `keys`, which have no limits, or a key of the `store`, if either has any."""
        self.models, self._keys, self._store, self._spans = models, keys, store, spans
        self.metrics = GatewayMetrics(models, store)
        self._proxy = Proxy(
            models, self.metrics, limits, keeps_keys=bool(keys) or store is not None, several_gateways=several_gateways
        )
        self._ollama = OllamaRoutes(models, self._proxy)
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())
        self.num_in_flight = 0
        self._lines, self._lines_of_faults = LineLimit(), LineLimit()
        self._page = Page(models, self.metrics, None) if store is None else None

    @property
    def is_stopping(self) -> bool:
        return self._proxy.is_stopping

    def begin_stop(self) -> None:
        """Refuse new requests."""
        self._proxy.is_stopping = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        read_as_openai(scope)
        path: str = scope["path"]
        # After a broken answer uvicorn cuts the connection, as the answer is incomplete.
        with contextlib.suppress(_ClientGoneError, BrokenAnswerError):
            is_anthropic = any(name == _VERSION_HEADER for name, _ in scope["headers"])
            error_path = MESSAGES_PREFIX if is_anthropic else path
            client = Client(ClientSend(send), error_path, request_id=_request_id(scope))
            if path in OPEN_PATHS:
                await self._own(path, client, dict(scope["headers"]).get(b"accept", b""))
            elif is_of_page(path):
                await self._show_page(scope, receive, client)
            else:
                self.num_in_flight += 1
                try:
                    await self._answer(scope, receive, client, path)
                finally:
                    self.num_in_flight -= 1

    async def _answer(self, scope: Scope, receive: Receive, client: Client, path: str) -> None:
        arrival = time.monotonic()
        key: Key | None = None
        span: Span | None = None
        headers: Headers = _with_sender(scope)
        try:
            key = await self._find_key(scope)
            if self._spans is not None:
                route = route_of(path) or UNKNOWN_ROUTE
                span, headers = self._spans.begin(scope["method"], route, headers, arrival)
            self._check(scope, key)
            path = plain_path(path)
            if path == "/v1/models" or path.startswith("/v1/models/"):
                name = path.removeprefix("/v1/models").removeprefix("/")
                await self._list_models(scope["method"], name, key, client)
                return
            counter = None if self._store is None or key is None else UsageCounter(self._store, key)
            types = [value for name, value in headers if name == b"content-type"]
            data = await self._read(receive)
            query = scope["query_string"]
            target = scope["raw_path"] + (b"?" + query if query else b"")
            if path.startswith(OLLAMA_PREFIX):
                request = ProxyRequest(scope["method"], path, target, headers, RequestBody(data), arrival, counter)
                client, work = await self._ollama.begin(request, client)
            else:
                body = read_body(data, b", ".join(types).decode("latin-1"))
                client.streams = body.streams
                request = ProxyRequest(scope["method"], path, target, headers, body, arrival, counter)
                work = partial(self._proxy.answer, request, client)
            client.usage_counter = counter
            await self._unless_gone(work(), receive)
            if counter is not None and client.refusal is not None:
                status, request_id = client.refusal
                names = f"by {counter.model}", f"key {counter.key.settings.name}"
                request_id = request_id if _ID.match(request_id) else ""
                self._note(scope["method"], path, counter.key, status, str(status), names, request_id)
        except RequestError as error:
            if not client.has_answer:  # else a replica's answer was counted
                self.metrics.requests.labels("none", "none", error.status).inc()
            if not client.has_begun:
                self._note_refusal(scope["method"], path, key, error, client.request_id)
            await client.fail(error)
        except (_ClientGoneError, BrokenAnswerError):
            raise
        except Exception:  # a fault of the gateway's own
            logger.exception("Unexpected error while answering a request")
            if not client.has_answer:
                self.metrics.requests.labels("none", "none", 500).inc()
            await client.fail(RequestError("Internal error.", status=500, code="internal_error"))
        finally:
            if self._spans is not None and span is not None:
                self._spans.end(span, client, key)

    def _note_refusal(self, method: str, path: str, key: Key | None, error: RequestError, request_id: str) -> None:
        """Note that the gateway itself refuses a request."""
        code = error_code(error.status, error.param, error.code)
        reason = error.limit if isinstance(error, LimitError) else code
        names = error.param, reason, None if key is None else f"key {key.settings.name}"
        self._note(method, path, key, error.status, reason, names, request_id)

    def _note(
        self, method: str, path: str, key: Key | None, status: int, reason: str, names: Iterable[str | None],
        request_id: str,
    ) -> None:  # fmt: skip
        """Count a key's refusal (4xx) and log it. Of the client's own text the line has only the request's id."""
        if key is not None and status < 500:
            self.metrics.key_refusals.labels(key.settings.name, reason).inc()
        limit = self._lines_of_faults if status >= 500 else self._lines if status in (401, 404) else None
        if limit is not None and not limit.admits(time.monotonic()):
            return
        said = ", ".join(filter(None, (str(status), *names, request_id and f"request {request_id}")))
        logger.info("%s %s is refused: %s", method, route_of(path) or UNKNOWN_ROUTE, said)

    async def _find_key(self, scope: Scope) -> Key | None:
        """Return the client's key if it is in the store, else None. Raises `RequestError` for a client without any
        key."""
        headers = dict(scope["headers"])
        given = map(headers.get, (b"authorization", b"x-api-key"))
        sent = [None if value is None else value.decode("latin-1") for value in given]
        key = None
        is_admitted = self._keys.admit(*sent) if self._keys else self._store is None
        if not is_admitted and self._store is not None:
            for secret in sent_keys(*sent):
                key = key or await self._store.find(secret)
        if not is_admitted and key is None:
            raise RequestError(
                "Incorrect or missing API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                status=401, code="invalid_api_key",
            )  # fmt: skip
        return key

    def _check(self, scope: Scope, key: Key | None) -> None:
        """Raise `RequestError` for a key that may send no requests, and for a method, encoding or length of a
        body that no route takes."""
        if self._store is not None and key is not None:
            self._store.check(key)
        if scope["method"] not in _METHODS:
            allowed = ", ".join(_METHODS)
            message = f"Not allowed to {scope['method']} on {scope['path']:.200}; it takes {allowed}."
            raise RequestError(message, status=405, allow=allowed)
        if is_encoded(scope["headers"]):
            raise RequestError("The body must be sent as it is, without a Content-Encoding.", status=415)
        if any(name == b"content-length" and int(value) > self._max_body_bytes for name, value in scope["headers"]):
            raise self._too_long()
        if self.is_stopping:
            raise RequestError("The gateway is stopping.", status=503, code="stopping")

    async def _unless_gone(self, work: Awaitable[None], receive: Receive) -> None:
        """Do the `work` of answering. A client that hangs up ends it at once, at the replica too."""
        answering = asyncio.current_task()
        assert answering is not None
        is_gone = False

        async def watch() -> None:
            nonlocal is_gone
            while (await receive())["type"] != "http.disconnect":
                pass
            is_gone = True
            answering.cancel()

        watching = asyncio.ensure_future(watch())
        try:
            await work
        except asyncio.CancelledError:
            if not is_gone:
                raise
            answering.uncancel()
            self.metrics.disconnects.inc()
            raise _ClientGoneError from None
        finally:
            watching.cancel()

    async def _read(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGoneError
                    parts.append(message.get("body", b""))
                    num_bytes += len(parts[-1])
                    if num_bytes > self._max_body_bytes:
                        raise self._too_long()
                    if not message.get("more_body", False):
                        if num_bytes > LARGE_BYTES:
                            return await asyncio.to_thread(b"".join, parts)  # it lets the event loop run
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            raise RequestError(f"The body did not arrive within {BODY_TIMEOUT_S:g} s.", status=408) from None

    def _too_long(self) -> RequestError:
        return RequestError(f"The body has more than {self._max_body_bytes} bytes (--max-body-bytes).", status=413)

    async def _own(self, path: str, client: Client, accept: bytes) -> None:
        if path == "/metrics":
            await client.reply(200, METRICS_TYPE, self.metrics.render())
        elif path == "/version":
            await client.reply(200, b"application/json", msgspec.json.encode({"version": __version__}))
        elif self.is_stopping:
            await client.fail(RequestError("The gateway is stopping.", status=503, code="stopping"))
        elif path == "/" and b"text/html" not in accept:
            await client.reply(200, b"text/plain; charset=utf-8", GREETING.encode())
        else:
            await client.reply(200, b"application/json", b'{"status":"ok"}')

    async def _show_page(self, scope: Scope, receive: Receive, client: Client) -> None:
        try:
            if self._page is None:
                raise RequestError(
                    "The page is at the admin port (--admin-port), because it shows every key.",
                    status=404, code="not_enabled",
                )  # fmt: skip
            if scope["path"] == STATS_PATH:
                self._check(scope, await self._find_key(scope))
                await self._page.send_stats(client)
            else:
                await self._page.send_file(scope, receive, client.send)
        except RequestError as error:
            await client.fail(error)

    async def _list_models(self, method: str, name: str, key: Key | None, client: Client) -> None:
        if method != "GET":
            raise RequestError(f"Not allowed to {method} on /v1/models; it takes GET.", status=405, allow="GET")
        await self.models.look_for_more()
        if name and not self.models.find(name).may_be_used_by(key):
            raise RequestError(f"The API key is not for the model {name:.200}.", status=403, code="model_not_allowed")
        listed = [
            {"id": one, "object": "model", "created": self._created, "owned_by": "octavo", "root": deployment.name,
             "parent": deployment.entry.adapter_of, "state": deployment.state}
            for one, deployment in self.models.names().items()
            if deployment.may_be_used_by(key)
        ]  # fmt: skip
        found: Any = {"object": "list", "data": listed}
        if name:
            found = next(one for one in listed if one["id"] == name)
        await client.reply(200, b"application/json", msgspec.json.encode(found))


def _request_id(scope: Scope) -> str | None:
    """Return the client's own id of the request if there is one that may be sent on in a header, else None."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    return given if _ID.match(given) else None


def _with_sender(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the headers with the client's address appended to X-Forwarded-For. Replicas on this host use it to let
    clients take turns."""
    name = b"x-forwarded-for"
    way = [value for own, value in scope["headers"] if own == name]
    if scope["client"] is not None:
        way.append(scope["client"][0].encode())
    others = [(own, value) for own, value in scope["headers"] if own != name]
    return [*others, (name, b", ".join(way))] if way else others
