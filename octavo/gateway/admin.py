"""The admin routes: keys and what they have used, metrics, and the page at /ui. They have a port and a key of their
own."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import logging
import re
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.types import Receive, Scope, Send

from octavo.api_keys import ApiKeys
from octavo.errors import RequestError
from octavo.gateway.client import BrokenAnswerError, Client, ClientSend
from octavo.gateway.client_keys import Key, KeySettings, day_number
from octavo.gateway.gateway_metrics import METRICS_TYPE, GatewayMetrics
from octavo.gateway.key_store import KeyStore
from octavo.gateway.page import STATS_PATH, Page, is_of_page
from octavo.gateway.request_body import parse, reason_of

logger = logging.getLogger("octavo.gateway")

_MAX_BODY_BYTES = 1 << 20
_MAX_EXPIRY = 1e11  # seconds: the year 5138; milliseconds are more
_MAX_PRIORITY = 2**31 - 1  # that servers take
_UNKNOWN = re.compile(r"unknown field `(.*?)`")  # of msgspec's message; others begin with the field


class AdminApp:
    """Call it as an ASGI application."""

    def __init__(self, store: KeyStore, admin_keys: ApiKeys, page: Page, metrics: GatewayMetrics) -> None:
        self._store, self._admin_keys, self._page, self._metrics = store, admin_keys, page, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        client = Client(ClientSend(send), scope["path"])
        try:
            if is_of_page(scope["path"]) and scope["path"] != STATS_PATH:
                await self._page.send_file(scope, receive, client.send)
                return
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            if not self._admin_keys.admit(headers.get(b"authorization"), headers.get(b"x-api-key")):
                raise RequestError("Incorrect or missing admin key.", status=401, code="invalid_api_key")
            if scope["path"] == STATS_PATH:
                await self._page.send_stats(client)
                return
            body = b""
            while True:
                message = await receive()
                body += message.get("body", b"")
                if len(body) > _MAX_BODY_BYTES:
                    raise RequestError(f"The body has more than {_MAX_BODY_BYTES} bytes.", status=413)
                if message["type"] != "http.request" or not message.get("more_body", False):
                    break
            query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
            content_type, answer = await self._answer(scope["method"], scope["path"].strip("/").split("/"), body, query)
            await client.reply(200, content_type, answer)
        except RequestError as error:
            with contextlib.suppress(BrokenAnswerError):
                await client.fail(error)
        except BrokenAnswerError:
            pass  # uvicorn cuts the connection, as the answer is incomplete
        except Exception:  # a fault of the gateway's own
            logger.exception("Unexpected error while answering an admin")
            with contextlib.suppress(BrokenAnswerError):
                await client.fail(RequestError("Internal error.", status=500, code="internal_error"))

    async def _answer(self, method: str, way: list[str], body: bytes, query: dict[str, str]) -> tuple[bytes, bytes]:
        """Return the content type and the body of an answer. Raises `RequestError`."""
        match method, way:
            case "GET", ["keys"]:
                return _json({"data": [_shown(key) for key in await self._store.keys()]})
            case "POST", ["keys"]:
                key, secret = await self._store.create(_settings(body))
                return _json({**_shown(key), "key": secret})
            case "GET", ["keys", key_id]:
                return _json(_shown(await self._store.get(key_id)))
            case "PATCH", ["keys", key_id]:
                while True:  # until no other request has changed it meanwhile
                    key = await self._store.get(key_id)
                    if await self._store.change(key, _settings(body, key.settings)):
                        return _json(_shown(key))
            case "DELETE", ["keys", key_id]:
                await self._store.delete(await self._store.get(key_id))
                return _json({"id": key_id, "deleted": True})
            case "GET", ["metrics"]:
                return METRICS_TYPE, self._metrics.render(shows_keys=True)
            case "GET", ["usage"]:
                return await self._usage(query)
        raise RequestError(f"Invalid URL ({method} /{'/'.join(way):.200})", status=404)

    async def _usage(self, query: dict[str, str]) -> tuple[bytes, bytes]:
        if unknown := query.keys() - {"since", "until", "format"}:
            raise RequestError(
                f"/usage takes since, until and format, got {min(unknown):.200}.", param=min(unknown)[:200]
            )
        write = {"csv": _as_csv, "json": _as_json}.get(query.get("format", "json"))
        if write is None:
            raise RequestError("format must be csv or json.", param="format")
        try:
            since, until = (
                day_number(query.get(name, default))
                for name, default in (("since", "1970-01-01"), ("until", "9999-01-01"))
            )
        except ValueError:
            raise RequestError("since and until are days such as 2026-11-27.", param="since") from None
        if since > until:
            raise RequestError("since must not be after until.", param="since")
        return await asyncio.to_thread(write, await self._store.usage(since, until))


def _settings(body: bytes, before: KeySettings | None = None) -> KeySettings:
    """Return the settings in a body; fields that it lacks keep their value in `before`. Raises `RequestError`."""
    known = {} if before is None else msgspec.to_builtins(before)

    def read(data: bytes) -> KeySettings:
        given = msgspec.json.decode(data, type=dict[str, Any])
        try:
            found = msgspec.convert(known | given, KeySettings)
        except msgspec.ValidationError as error:
            reason = reason_of(error, KeySettings)
            unknown = _UNKNOWN.search(reason)
            param = unknown[1] if unknown else reason.split()[0]
            code = "unknown_parameter" if unknown else None
            raise RequestError(f"A key's settings: {reason}.", param=param, code=code) from None
        # Not in `KeySettings`, and only for given fields, as stores may have keys from before these checks.
        if "name" in given and not found.name.isprintable():  # it is in lines of the log
            raise RequestError("A key's name must have only printable characters and plain spaces.", param="name")
        if "expires_at" in given and found.expires_at is not None and not 0 <= found.expires_at < _MAX_EXPIRY:
            raise RequestError(
                f"expires_at is in seconds since 1970, and {found.expires_at:g} is not between 0 and {_MAX_EXPIRY:g}; "
                "are these milliseconds?", param="expires_at",
            )  # fmt: skip
        if "priority" in given and found.priority is not None and abs(found.priority) > _MAX_PRIORITY:
            raise RequestError(f"priority must be between -{_MAX_PRIORITY} and {_MAX_PRIORITY}.", param="priority")
        return found

    return parse(body, read, "The body must be a JSON object with a key's settings")


def _shown(key: Key) -> dict[str, Any]:
    used = {"requests": key.num_requests, "prompt_tokens": key.num_prompt_tokens,
            "completion_tokens": key.num_completion_tokens}  # fmt: skip
    return {"id": key.id, **msgspec.to_builtins(key.settings), "used": used}


def _as_json(rows: list[dict[str, Any]]) -> tuple[bytes, bytes]:
    return _json({"data": rows})


def _as_csv(rows: list[dict[str, Any]]) -> tuple[bytes, bytes]:
    text = io.StringIO()
    names = ("key", "name", "day", "model", "requests", "prompt_tokens", "completion_tokens")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    return b"text/csv; charset=utf-8", text.getvalue().encode()


def _json(value: Any) -> tuple[bytes, bytes]:
    return b"application/json", msgspec.json.encode(value)
