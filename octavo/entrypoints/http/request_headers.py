"""The headers of a request and its id, for `AuthAndLimits`, the application and the routes."""

import os
import re
from typing import Any, TypeVar, overload

from starlette.datastructures import Headers
from starlette.types import Scope

from octavo.entrypoints.http.body_fields import ID_PATTERN

T = TypeVar("T")
ID_HEADER = "X-Request-Id"
HEADERS = "octavo.headers"  # scope key of the headers as they arrived


class RequestHeaders(Headers):
    """Headers in a dictionary by name, as Starlette searches a list. Of a repeated header the first counts.

    `request_id` is the id under which the client and the log know the request: X-Request-Id, or a new one."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self._first = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(self._list)}
        given = self.get(ID_HEADER)
        self.request_id = given if given is not None and re.match(ID_PATTERN, given) else os.urandom(16).hex()

    def __getitem__(self, key: str) -> str:
        return self._first[key.lower()]

    def __contains__(self, key: Any) -> bool:
        return key.lower() in self._first

    @overload
    def get(self, key: str, default: None = None, /) -> str | None: ...
    @overload
    def get(self, key: str, default: str | T, /) -> str | T: ...
    def get(self, key: str, default: Any = None, /) -> Any:
        return self._first.get(key.lower(), default)
