"""Writes the JSON of large answers, such as log-probabilities of a long prompt or many embeddings, and writes and reads
the lists of the store.

A serializer holds the interpreter's lock during a call. Here each call has a limited number of values, so that the
event loop runs between calls while a thread does the work.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic_core import to_json

_PLAIN = frozenset((int, float, str, bool, type(None)))  # types of single values
MAX_PIECE_VALUES = 1000  # written in one call; a text counts as one value
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def pack(values: Iterable[dict[str, Any]]) -> bytes:
    """Return objects as lines of JSON, which are written and read one by one: a call for all of them would hold the
    interpreter's lock, for a second if they are many."""
    return b"\n".join([_encode(value) for value in values])


def unpack(packed: bytes | None) -> list[dict[str, Any]]:
    """Return the objects that `pack` has packed."""
    if packed is not None and packed.startswith(b"["):  # a list of all, which earlier versions wrote
        whole: list[dict[str, Any]] = _decode(packed)
        return whole
    return [_decode(line) for line in packed.split(b"\n")] if packed else []


def is_large(value: object) -> bool:
    """Return whether `value` has more than `MAX_PIECE_VALUES` values."""
    return _left_of(value, MAX_PIECE_VALUES) < 0


def encode_in_pieces(value: Any) -> bytes:
    """Return `value` as JSON. It consists of models, mappings, lists and JSON's own types."""
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
        most = max(1, MAX_PIECE_VALUES - 1)  # their list is a value too
        for begin in range(0, len(value), most):
            yield b"," if begin else b""
            part = value[begin : begin + most]
            if (len(part) < MAX_PIECE_VALUES and _PLAIN.issuperset(map(type, part))) or not is_large(part):
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
    """Return `left` minus the number of values in `value`. Counting stops below zero."""
    if isinstance(value, BaseModel):
        if type(value).__pydantic_decorators__.model_serializers:
            return left - 1  # a model with its own serializer is written whole
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
