"""The OpenAI error body, and which error becomes which status.

Every error that leaves the server passes through here: `RequestError` and friends from the engine, pydantic's
validation errors, unknown routes, and whatever else escapes, of which the client sees "internal error" and no more.
"""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import EngineDeadError, EngineRestartingError, EngineStoppingError, RequestError

logger = logging.getLogger("octavo.server")

RETRY_AFTER_S = 5
MAX_MESSAGE_LENGTH = 1000  # messages quote what clients send, which may be megabytes


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> bytes:
    """`{"error": {...}}` in ASCII, so that a message may quote any string that a client sent."""
    kind = {429: "rate_limit_error"}.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": _cut(message), "type": kind, "param": param and _cut(param), "code": code}
    return json.dumps({"error": error}).encode()


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_LENGTH else text[:MAX_MESSAGE_LENGTH] + "..."


def error_response(
    message: str,
    status: int,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An HTTP response with the OpenAI error body; a 503 says when to come back."""
    headers = dict(headers or {})
    if status == 503:
        headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    return Response(
        error_body(message, status, param=param, code=code), status, headers=headers, media_type="application/json"
    )


def describe(error: Exception) -> dict[str, Any]:
    """What `error_body` and `error_response` take; an unforeseen error is logged here, with its traceback, once."""
    if isinstance(error, RequestError):
        return {"message": str(error), "status": error.status, "param": error.param, "code": error.code}
    if isinstance(error, EngineStoppingError):
        return {"message": "The server is stopping.", "status": 503, "code": "engine_stopping"}
    if isinstance(error, EngineRestartingError):
        return {"message": str(error), "status": 503, "code": "engine_restarting"}
    if isinstance(error, EngineDeadError):
        message = str(error) or "The engine has died; this server cannot answer."
        return {"message": message, "status": 503, "code": "engine_dead"}
    logger.error("Unexpected error while answering a request", exc_info=error)
    return {"message": "Internal error.", "status": 500, "code": "internal_error"}


def stream_error_event(error: Exception) -> bytes:
    """The error as a server-sent event: in mid-stream the status line has long been sent."""
    return b"data: " + error_body(**describe(error)) + b"\n\n"


def validation_error(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """The first of pydantic's errors in one sentence that names the field."""
    error, location = errors[0], errors[0]["loc"]
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return cause
    if not location:
        return RequestError("The body must be a JSON object.")
    param = str(location[0])
    for part in location[1:]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}"
    if error["type"] == "extra_forbidden":
        return RequestError(f"Unrecognized request argument supplied: {param}", param=param)
    if error["type"] == "missing":
        return RequestError(f"{param} is required.", param=param)
    message = str(error["msg"]).removeprefix("Value error, ")
    if " should " in message:  # as in "Input should be a valid integer": the field's name is the better subject
        message = message[message.index(" should ") + 1 :]
    return RequestError(f"{param} {message}, got {reprlib.repr(error.get('input'))}.", param=param)


async def _on_octavo_error(request: Request, error: Exception) -> Response:
    return refusal(error)


def refusal(error: Exception) -> Response:
    """The response to a request that is not taken."""
    retry_after_s = error.retry_after_s if isinstance(error, RequestError) else None
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return error_response(**describe(error), headers=headers)


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    # Starlette raises it again for uvicorn to log.
    return error_response("Internal error.", 500, code="internal_error")


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"Invalid URL ({request.method} {request.url.path})"
    elif error.status_code == 405:
        message = f"Not allowed to {request.method} on {request.url.path}"
    return error_response(message, error.status_code, headers=error.headers)


def add_error_handlers(app: Starlette) -> None:
    """Make every error of `app` an OpenAI error."""
    app.add_exception_handler(RequestError, _on_octavo_error)
    app.add_exception_handler(EngineDeadError, _on_octavo_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected_error)
