"""Routes: they call the handler of a request, and turn its result into an answer.

Handlers are declared as for FastAPI, which describes them with the first request for /openapi.json (see `openapi`).
FastAPI takes no part in answering: importing it would take a quarter of the server's start.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from octavo.engine.off_loop import run_off_loop
from octavo.entrypoints.http.error_responses import (
    PromptSavedError,
    error_fields,
    error_response,
    http_error_response,
    refusal,
    validation_error,
)
from octavo.entrypoints.http.json_worker import is_large, parse_json
from octavo.entrypoints.http.request_headers import HEADERS, RequestHeaders
from octavo.entrypoints.http.streaming import encode_off_loop
from octavo.errors import EngineDeadError, RequestError

UnknownFields = Literal["error", "warn", "ignore"]
_MAX_NAMED = 8  # fields in one warning
MAX_INLINE_BYTES = 8192  # largest body for the event loop: about a millisecond at worst, for a list of messages

logger = logging.getLogger("octavo.server")

Handler = Callable[..., Awaitable[Any]]
Endpoint = Callable[[Request], Awaitable[Response]]
H = TypeVar("H", bound=Handler)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """A declared route. Its handler takes the request, the parameters of the path by name, and the body as an object of
    its class."""

    method: str
    path: str
    handler: Handler
    description: dict[str, Any]  # further arguments of FastAPI's `add_api_route`

    def endpoint(self) -> Endpoint:
        """Return the function that answers a request."""
        hints = get_type_hints(self.handler)
        hints.pop("return")
        of_request = [name for name, kind in hints.items() if kind is Request]
        of_body = {name: kind for name, kind in hints.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}

        async def endpoint(request: Request) -> Response:
            bodies = {name: await _read_body(request, kind) for name, kind in of_body.items()}
            result = await self.handler(**request.path_params, **dict.fromkeys(of_request, request), **bodies)
            if isinstance(result, Response):
                return result
            if isinstance(result, BaseModel):
                return Response(await encode_off_loop(result), media_type="application/json")
            return JSONResponse(result)

        return endpoint


@dataclass(slots=True)
class LazyRoute:
    """A route of a module that is imported with the first request for the route, or for the description."""

    module: str  # has a `router`
    method: str
    path: str
    _endpoint: Endpoint | None = field(default=None, init=False)

    def load(self) -> RouteSpec:
        """Import the module and return the route."""
        router: Router = importlib.import_module(self.module).router
        return next(one for one in router.specs if (one.method, one.path) == (self.method, self.path))

    def endpoint(self) -> Endpoint:
        """Return the function that answers a request."""

        async def endpoint(request: Request) -> Response:
            if self._endpoint is None:
                self._endpoint = (await asyncio.to_thread(self.load)).endpoint()
            return await self._endpoint(request)

        return endpoint


def make_routes(specs: Sequence[RouteSpec | LazyRoute]) -> list[Route]:
    """Return Starlette's routes, one for each path."""
    by_path: dict[str, dict[str, Endpoint]] = {}
    for one in specs:
        by_path.setdefault(one.path, {})[one.method] = one.endpoint()
    return [Route(path, _Application(endpoints), methods=list(endpoints)) for path, endpoints in by_path.items()]


class _Application:
    """Answers the requests for a path. Starlette would wrap a function in three others."""

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self._endpoints = endpoints  # by method

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, headers = Request(scope, receive, send), scope[HEADERS]
        # Instead of Starlette's. A middleware may have replaced them.
        request._headers = headers if headers.raw == scope["headers"] else RequestHeaders(scope)
        response = await self.answer(request)
        await response(scope, receive, send)

    async def answer(self, request: Request) -> Response:
        """Return the answer to a request, or to its error."""
        method: str = request.scope["method"]
        try:
            return await self._endpoints["GET" if method == "HEAD" else method](request)
        except (RequestError, EngineDeadError, HTTPException) as error:
            error.__traceback__ = None  # of an error that is raised again, each time would add to it
            return http_error_response(request, error) if isinstance(error, HTTPException) else refusal(error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody sees it; metrics do
        except PromptSavedError:
            return Response(status_code=204)
        except Exception as error:  # answered here, so that CORS headers are still added
            return error_response(**error_fields(error))


def methods_of(path: str, routes: Sequence[Route]) -> set[str] | None:
    """Return the methods that a path has; None if there is no such path."""
    scope = {"type": "http", "method": "", "path": path}
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            return route.methods
    return None


class Router:
    """The routes of a module."""

    def __init__(self, *, tags: Sequence[str] = (), include_in_schema: bool = True) -> None:
        self.specs: list[RouteSpec] = []
        self._common = {"tags": list(tags), "include_in_schema": include_in_schema}

    def get(self, path: str, **description: Any) -> Callable[[H], H]:
        """Declare the handler of GET and HEAD."""
        return self._add("GET", path, description)

    def post(self, path: str, **description: Any) -> Callable[[H], H]:
        """Declare the handler of POST."""
        return self._add("POST", path, description)

    def delete(self, path: str, **description: Any) -> Callable[[H], H]:
        """Declare the handler of DELETE."""
        return self._add("DELETE", path, description)

    def _add(self, method: str, path: str, description: dict[str, Any]) -> Callable[[H], H]:
        def declare(handler: H) -> H:
            self.specs.append(RouteSpec(method, path, handler, self._common | description))
            return handler

        return declare


async def whole_body(request: Request) -> bytes:
    """Return the body of a request, which can be read only once. `request.body()` would keep a copy until the answer is
    complete."""
    parts = list[bytes]()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _read_body(request: Request, kind: type[BaseModel]) -> BaseModel:
    """Return the body of a request as an object of `kind`. Raises `RequestError`."""
    unknown: UnknownFields = request.app.state.octavo.args.unknown_fields
    return await read_json(request, await whole_body(request), lambda parsed: validate_body(parsed, kind, unknown))


async def read_json(request: Request, body: bytes, use: Callable[[Any], T]) -> T:
    """Parse a body and return the result of `use`. A long body is parsed and used in a thread, a large one is parsed in
    another process. Raises `RequestError`, also for a body beyond the server's limits."""
    state = request.app.state.octavo
    if not body:
        raise RequestError("The request has no body; send a JSON object.", code="invalid_body")

    def parse(parser: Callable[[], Any]) -> T:
        parsed = parser()
        state.args.refuse_fields(parsed)
        return use(parsed)

    if is_large(body):
        return await run_off_loop(lambda: parse(lambda: state.json_worker.parse(body)), length=len(body), is_json=True)
    length = len(body) if len(body) > MAX_INLINE_BYTES else 0
    return await run_off_loop(lambda: parse(lambda: parse_json(body, state.args)), length=length)


def validate_body(parsed: Any, kind: type[BaseModel], unknown: UnknownFields) -> BaseModel:
    """Return a parsed body as an object of `kind`. Raises `RequestError`."""
    try:
        return kind.model_validate(parsed)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        extra = [".".join(map(str, one["loc"])) for one in errors if one["type"] == "extra_forbidden"]
        if unknown == "error" or not extra:
            raise validation_error(errors, kind.model_fields) from None
    try:
        body = kind.model_validate(parsed, extra="ignore", context={"extra": "ignore"})
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False), kind.model_fields) from None
    if unknown == "warn":  # of a list's items, the first that has unknown fields is named
        logger.warning("Unknown fields of a request are ignored: %.300s", ", ".join(extra[:_MAX_NAMED]))
    return body
