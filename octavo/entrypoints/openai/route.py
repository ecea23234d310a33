"""How bodies become request objects: as FastAPI does it, but that of long ones, which can take seconds, in a thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from octavo.engine.off_loop import run_off_loop

MAX_INLINE_BYTES = 8192  # about a millisecond at worst, which is a list of messages


class BodyRoute(APIRoute):
    """A route whose only parameter besides the request is its body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()
        assert self.body_field is not None
        kind: type[BaseModel] = self.body_field.field_info.annotation  # type: ignore[assignment]

        async def handle(request: Request) -> Response:
            body = await request.body()
            if len(body) > MAX_INLINE_BYTES:
                try:
                    # FastAPI takes what it finds here for the parsed JSON, and an object of the right class as it is.
                    request._json = await run_off_loop(lambda: _read(body, kind), length=len(body))
                except ValidationError as error:
                    found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
                    raise RequestValidationError(found) from None
                except (ValueError, RecursionError):  # no JSON: FastAPI sees it, too, and answers
                    pass
            return await answer(request)

        return handle


def _read(body: bytes, kind: type[BaseModel]) -> BaseModel:
    return kind.model_validate(json.loads(body))
