"""Counts the values of a JSON body and their depth in its bytes, before a parser makes objects of them."""

import itertools
from collections.abc import Iterator

from octavo.errors import RequestError

CONTAINER_NODES = 8  # values that a list or an object counts for, by the cost to create and to collect it
PIECE_BYTES = 1 << 16  # counted in one go: a millisecond, or three with many short texts
_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))  # every byte but brackets
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def refuse_json(body: bytes, max_nodes: int, max_depth: int, flags: tuple[str, str] | None = None) -> None:
    """Raise `RequestError` for a body with too many values, or with values nested too deeply. `flags` names the flags
    of both limits, if a user can set them. Another thread can run between two pieces of a long body."""
    nodes_flag, depth_flag = ("", "") if flags is None else (f" ({flags[0]})", f" ({flags[1]})")
    num_nodes, depth = 1, 0
    if len(body) <= PIECE_BYTES:
        num_openers = body.count(b"[") + body.count(b"{")
        if num_openers <= max_depth and 1 + body.count(b",") + num_openers * CONTAINER_NODES <= max_nodes:
            return  # even if the signs in texts counted
    for piece in _outside_texts(body):
        num_openers = piece.count(b"[") + piece.count(b"{")
        num_nodes += piece.count(b",") + num_openers * CONTAINER_NODES
        if num_nodes > max_nodes:
            raise RequestError(
                f"The body has more than {max_nodes} values, the most that a request may have here{nodes_flag}; a list "
                f"or an object counts for {CONTAINER_NODES}.",
                code="request_too_large",
            )
        brackets = piece.translate(None, _BRACKETS)
        if depth + num_openers > max_depth:  # else all of them may be within each other
            deepest = max(itertools.accumulate(map(_STEPS.__getitem__, brackets), initial=depth))
            if deepest > max_depth:
                raise RequestError(
                    f"The body is nested too deeply: it has more than {max_depth} lists and objects within each "
                    f"other{depth_flag}.",
                    code="request_too_large",
                )
        depth += 2 * num_openers - len(brackets)


def _outside_texts(body: bytes) -> Iterator[bytes]:
    """Yield a body's pieces without its texts."""
    begin, is_in_text = 0, False
    while begin < len(body):
        piece = body[begin : begin + PIECE_BYTES]
        begin += len(piece)
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the cut is amid an escape
            piece += body[begin : begin + 1]
            begin += 1
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        yield b"".join(parts[is_in_text::2])
        is_in_text ^= len(parts) % 2 == 0
