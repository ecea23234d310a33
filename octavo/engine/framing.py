"""Messages of `wire.py`, encoded, over a connection between hosts: each with its length in front."""

from __future__ import annotations

import asyncio
import struct

_LENGTH = struct.Struct("<I")


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Raises `EOFError` at the end, and `OSError`. Of any length: pictures are long, and who sends knows the token."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


def write_message(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Never waits: what cannot be sent is kept, until the other host's silence is noticed."""
    if not writer.is_closing():
        writer.write(_LENGTH.pack(len(data)))
        writer.write(data)
