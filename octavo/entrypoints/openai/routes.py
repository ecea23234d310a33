"""Routes: how a request reaches its handler, and how what the handler returns becomes an answer.

Handlers are declared as for FastAPI, which describes them for /openapi.json (see `description`) when that is first
asked for. It has no part in answering: importing it would be a quarter of the server's start.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from octavo.engine.off_loop import run_off_loop
from octavo.entrypoints.openai.errors import validation_error
from octavo.errors import RequestError

MAX_INLINE_BYTES = 8192  # of a body that is read in the event loop: about a millisecond at worst, a list of messages

Handler = Callable[..., Awaitable[Any]]
H = TypeVar("H", bound=Handler)


@dataclass(frozen=True, slots=True)
class Declared:
    """A handler takes the request, and by name the parameters of the path and the body as an object of its class."""

    method: str
    path: str
    handler: Handler
    description: dict[str, Any]  # more that FastAPI's `add_api_route` is told

    def route(self) -> Route:
        """The route that answers."""
        hints = get_type_hints(self.handler)
        hints.pop("return")
        of_request = [name for name, kind in hints.items() if kind is Request]
        of_body = {name: kind for name, kind in hints.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}

        async def answer(request: Request) -> Response:
            bodies = {name: await _read_body(request, kind) for name, kind in of_body.items()}
            result = await self.handler(**request.path_params, **dict.fromkeys(of_request, request), **bodies)
            if isinstance(result, Response):
                return result
            if isinstance(result, BaseModel):
                return Response(result.model_dump_json(), media_type="application/json")
            return JSONResponse(result)

        return Route(self.path, answer, methods=[self.method])


class Router:
    """The routes of a module."""

    def __init__(self, *, tags: Sequence[str] = (), include_in_schema: bool = True) -> None:
        self.declared: list[Declared] = []
        self._common = {"tags": list(tags), "include_in_schema": include_in_schema}

    def get(self, path: str, **description: Any) -> Callable[[H], H]:
        """Declare the handler of GET and HEAD."""
        return self._declare("GET", path, description)

    def post(self, path: str, **description: Any) -> Callable[[H], H]:
        """Declare the handler of POST."""
        return self._declare("POST", path, description)

    def _declare(self, method: str, path: str, description: dict[str, Any]) -> Callable[[H], H]:
        def declare(handler: H) -> H:
            self.declared.append(Declared(method, path, handler, self._common | description))
            return handler

        return declare


async def _read_body(request: Request, kind: type[BaseModel]) -> BaseModel:
    """Raises `RequestError`."""
    body = await request.body()
    if len(body) <= MAX_INLINE_BYTES:
        return _parse(body, kind)
    return await run_off_loop(lambda: _parse(body, kind), length=len(body))


def _parse(body: bytes, kind: type[BaseModel]) -> BaseModel:
    if not body:
        raise RequestError("The request has no body; send a JSON object.")
    try:
        parsed = json.loads(body)
    except json.JSONDecodeError as error:
        raise RequestError(f"The body is not valid JSON: {error.msg} at character {error.pos}.") from None
    except UnicodeDecodeError:
        raise RequestError("The body is not valid UTF-8.") from None
    except RecursionError:
        raise RequestError("The body is nested too deeply.") from None
    except ValueError:
        raise RequestError("The body is not valid JSON: a number has too many digits.") from None
    try:
        return kind.model_validate(parsed)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)) from None
