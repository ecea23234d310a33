"""Sends encoded messages of `wire.py` between hosts, each behind its length."""

import asyncio
import struct

_LENGTH = struct.Struct("<I")


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Return the next message. Raises `EOFError` at the end, and `OSError`. The length is not limited: media are long,
    and the sender has shown the token."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


def write_message(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send a message without waiting. Unsent messages are buffered until missing heartbeats end the connection."""
    if not writer.is_closing():
        writer.write(_LENGTH.pack(len(data)))
        writer.write(data)
