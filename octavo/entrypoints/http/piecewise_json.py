"""JSON of large answers, such as log-probabilities of a long prompt or many embeddings.

A serializer holds the interpreter's lock for as long as it is at it. Here it is called for some values at a time, so
that an event loop goes on while a thread writes the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

MAX_PIECE_VALUES = 1000  # that are written in one call; a text counts for one


def is_large(value: object) -> bool:
    """Whether `value` has more than `MAX_PIECE_VALUES` values."""
    return _left_of(value, MAX_PIECE_VALUES) < 0


def encode_in_pieces(value: Any) -> bytes:
    """`value`, made of models, maps, lists and what JSON has, as JSON."""
    return b"".join(_pieces(value))


def _pieces(value: Any) -> Iterator[bytes]:
    if not is_large(value):
        yield to_json(value, inf_nan_mode="null")
    elif isinstance(value, BaseModel | Mapping):
        yield b"{"
        for number, (name, one) in enumerate(_fields(value)):
            yield (b"," if number else b"") + to_json(str(name)) + b":"
            yield from _pieces(one)
        yield b"}"
    else:
        yield b"["
        for begin in range(0, len(value), MAX_PIECE_VALUES):
            yield b"," if begin else b""
            part = value[begin : begin + MAX_PIECE_VALUES]
            if not is_large(part):
                yield to_json(part, inf_nan_mode="null")[1:-1]
                continue
            for number, one in enumerate(part):
                yield b"," if number else b""
                yield from _pieces(one)
        yield b"]"


def _fields(value: BaseModel | Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, Mapping) else ((name, getattr(value, name)) for name in _names(value))


def _names(value: BaseModel) -> Iterable[str]:
    return type(value).model_fields


def _left_of(value: object, left: int) -> int:
    """What is left of a number of values; below zero, it may be any."""
    if isinstance(value, BaseModel):
        if type(value).__pydantic_decorators__.model_serializers:
            return left - 1  # it is written by itself, whole
        inner: Iterable[object] = (one for _, one in _fields(value))
    elif isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple):
        if len(value) > left:
            return -1
        inner = value
    else:
        return left - 1
    for one in inner:
        if left < 0:
            break
        left = _left_of(one, left)
    return left - 1
