"""Reads sentencepiece's `tokenizer.model`: the fields of its protocol buffer that a tokenizer needs.

The fields are from sentencepiece_model.proto (https://github.com/google/sentencepiece), the wire format is from
https://protobuf.dev/programming-guides/encoding. `tokenizer_parts` builds the tokenizer.
"""

import struct
from collections.abc import Iterator

from octavo.errors import LoadError
from octavo.loading.tokenizer_parts import BYTE, CONTROL, NORMAL, UNKNOWN, SentencePieces

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_ROLES = {41: ("bos_token", 1), 42: ("eos_token", 2), 43: ("pad_token", -1)}  # fields of TrainerSpec, with defaults

Value = int | bytes


def is_sentencepiece(data: bytes) -> bool:
    """Return True if a file's bytes begin as a sentencepiece model does: with a piece, which is field 1."""
    return data[:1] == b"\x0a" and b"\x0a" in data[1:4]


def read_sentencepiece(path: str, prefixes_every_part: bool) -> SentencePieces:
    """Return the model in a file. Raises `LoadError` for a damaged file, or a kind of model that is not built."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        return _parse(path, data, prefixes_every_part)
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, AttributeError) as e:
        raise LoadError(f"{path} is damaged, or no sentencepiece model ({e}); fetch it again.") from None


def _parse(path: str, data: bytes, prefixes_every_part: bool) -> SentencePieces:
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Value] = {}
    normalizer: dict[int, Value] = {}
    for field, value in _fields(data):
        if field == 1:
            piece = dict(_fields(_message(value)))
            pieces.append(_message(piece.get(1, b"")).decode())
            scores.append(struct.unpack("<f", _message(piece.get(2, b"\0\0\0\0")))[0])
            types.append(int(piece.get(3, NORMAL)))
        elif field == 2:
            trainer = dict(_fields(_message(value)))
        elif field == 3:
            normalizer = dict(_fields(_message(value)))
    kind = trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE) or trainer.get(24) or not normalizer.get(5, 1):
        raise LoadError(
            f"{path} is a sentencepiece model of kind {kind!r}, or has blanks elsewhere than in front of words; "
            "unigram (1) and BPE (2) with blanks in front are built. Pass --tokenizer with a folder that has a "
            "tokenizer.json."
        )
    if not pieces or not any(t in (UNKNOWN, BYTE) for t in types):
        raise IndexError(f"{len(pieces)} pieces and none for unknown text")
    ids = {"unk_token": types.index(UNKNOWN)} if UNKNOWN in types else {}
    for field, (role, default) in _ROLES.items():
        index = _signed(trainer.get(field, default))
        if 0 <= index < len(pieces) and types[index] in (CONTROL, UNKNOWN):
            ids[role] = index
    return SentencePieces(
        pieces, scores, types,
        is_unigram=kind == _UNIGRAM,
        unk_id=ids.get("unk_token", 0),
        charsmap=_message(normalizer.get(2, b"")),
        adds_prefix=bool(normalizer.get(3, 1)),
        prefixes_every_part=prefixes_every_part,
        collapses_blanks=bool(normalizer.get(4, 1)),
        ids=ids,
    )  # fmt: skip


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Yield the fields of a message in order: number and value. Raises `IndexError` for a damaged message."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if wire not in (_FIXED64, _BYTES, _FIXED32):
            raise IndexError(f"wire type {wire} at byte {position}")
        size = 8 if wire == _FIXED64 else 4
        if wire == _BYTES:
            size, position = _varint(data, position)
        if position + size > len(data):
            raise IndexError(f"{size} bytes from byte {position} of {len(data)}")
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
        if shift > 63:
            raise IndexError(f"a number without end at byte {position}")


def _message(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a number where a message or text is expected")
    return value


def _signed(value: Value) -> int:
    number = int(value) if isinstance(value, int) else -1
    return number - (1 << 64) if number >= 1 << 63 else number
