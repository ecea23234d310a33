"""Lists that clients read page by page, in OpenAI's form, and the parameters of queries."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from starlette.requests import Request

from octavo.entrypoints.http.body_fields import ResponseModel
from octavo.errors import RequestError

MAX_LIMIT = 100


@dataclass(frozen=True, slots=True)
class PageQuery:
    """The page that a client asks for."""

    after: str | None  # id of the previous page's last object
    limit: int
    is_ascending: bool


class Deleted(ResponseModel):
    """The answer about a deleted object."""

    id: str
    object: str
    deleted: bool = True


def page_parameters(most: int = MAX_LIMIT) -> list[dict[str, Any]]:
    """Return the description of a page's query, for lists of up to `most` objects."""
    return [
        {"name": "after", "in": "query", "schema": {"type": "string"}, "description": "The id to go on after."},
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": most}},
        {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
    ]


class Page(ResponseModel):
    """A page of a list of objects."""

    PARAMETERS: ClassVar[dict[str, Any]] = {"parameters": page_parameters()}

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False

    @classmethod
    def of(cls, found: Sequence[dict[str, Any]], query: PageQuery) -> Self:
        """Return the first page of `found`, which has at least one object more than the page if the list goes on."""
        data = list(found[: query.limit])
        ids = [one["id"] for one in data]
        return cls(
            data=data,
            first_id=ids[0] if ids else None,
            last_id=ids[-1] if ids else None,
            has_more=len(found) > len(data),
        )

    @classmethod
    def whole(cls, items: Sequence[dict[str, Any]]) -> Self:
        """Return all of `items` as one page."""
        return cls.of(items, PageQuery(None, len(items), is_ascending=True))

    @classmethod
    def of_whole(cls, items: Sequence[dict[str, Any]], query: PageQuery) -> Self:
        """Return a page of the whole list `items`, which are in the order of creation. Raises `RequestError`."""
        rest = list(items) if query.is_ascending else list(reversed(items))
        if query.after is not None:
            place = next((i for i, item in enumerate(rest) if item["id"] == query.after), None)
            if place is None:
                raise RequestError(f"There is no {query.after!r:.100} in this list.", param="after")
            rest = rest[place + 1 :]
        return cls.of(rest, query)


def page_query(raw: Request, *, limit: int = 20, most: int = MAX_LIMIT, order: str = "desc") -> PageQuery:
    """Return the page that a query asks for, of `limit` objects if it does not say. Raises `RequestError`."""
    order = raw.query_params.get("order", order)
    if order not in ("asc", "desc"):
        raise RequestError(f"order should be asc or desc, got {order!r:.60}.", param="order")
    limit = read_integer(raw, "limit", limit, least=1, most=most)
    return PageQuery(raw.query_params.get("after"), limit, order == "asc")


_BOOLEANS = {
    **dict.fromkeys(("true", "1", "yes", "on", "t", "y"), True),
    **dict.fromkeys(("false", "0", "no", "off", "f", "n"), False),
}


def read_boolean(text: str, name: str) -> bool:
    """Parse a boolean of a query or a form, in the spellings of HTTP clients. Raises `RequestError`."""
    found = _BOOLEANS.get(text.strip().lower())
    if found is None:
        raise RequestError(f"{name} must be true or false, got {text!r:.40}.", param=name)
    return found


def read_integer(raw: Request, name: str, default: int, *, least: int, most: int = 2**31) -> int:
    """Return an integer parameter of a query, or `default`. Raises `RequestError`."""
    text = raw.query_params.get(name)
    if text is None:
        return default
    if not re.fullmatch("-?[0-9]{1,11}", text) or not least <= int(text) <= most:
        raise RequestError(f"{name} should be an integer from {least} to {most}, got {text!r:.60}.", param=name)
    return int(text)
