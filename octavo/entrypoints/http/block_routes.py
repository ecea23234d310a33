"""Routes for other servers, which copy blocks of the KV cache from this server's disk (`kv_cache.peer_blocks`).

A block's name is a hash of everything that its contents depend on, so only who knows a prompt can ask for its blocks.
The server must have an API key.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import state_of
from octavo.errors import RequestError
from octavo.kv_cache.block_files import block_path
from octavo.kv_cache.peer_blocks import BLOCKS_PATH, MAX_NAMES

_MAX_ANSWER_BYTES = 64 << 20
_reads = asyncio.Semaphore(4)  # answers that are in memory

router = Router(tags=["Octavo"], include_in_schema=False)


@router.post(BLOCKS_PATH + "/{fingerprint}/find")
async def find_blocks(fingerprint: str, raw: Request) -> Response:
    """Return a byte for each file that the body, a JSON list, names: 1 if it is here, 0 if not."""
    paths = await _paths(fingerprint, raw)
    found = await asyncio.to_thread(lambda: bytes(ord("1") if os.path.exists(path) else ord("0") for path in paths))
    return Response(found, media_type="application/octet-stream")


@router.post(BLOCKS_PATH + "/{fingerprint}/read")
async def read_blocks(fingerprint: str, raw: Request) -> Response:
    """Return the contents of the files that the body names, one after the other, up to the first one that is not
    here."""
    paths = await _paths(fingerprint, raw)
    async with _reads:
        return Response(await asyncio.to_thread(_read, paths), media_type="application/octet-stream")


async def _paths(fingerprint: str, raw: Request) -> list[str]:
    """Return the paths of the files that a request names. Raises `RequestError`."""
    state = state_of(raw)
    disk = state.engine.config.cache.disk
    if disk is None or not state.args.api_keys:
        raise RequestError(
            "Other servers get blocks from a server with --kv-cache-disk and an --api-key.",
            status=404,
            code="not_found",
        )
    try:
        names = msgspec.json.decode(await raw.body(), type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError):
        names = []
    paths = [block_path(disk.folder, fingerprint, name) for name in names[: MAX_NAMES + 1]]
    if not 0 < len(paths) <= MAX_NAMES or None in paths:
        raise RequestError(f"The body must be a JSON list of 1 to {MAX_NAMES} names of blocks.")
    return [path for path in paths if path is not None]


def _read(paths: list[str]) -> bytes:
    parts, num_bytes = [], 0
    for path in paths:
        try:
            num_bytes += os.path.getsize(path)
            if num_bytes > _MAX_ANSWER_BYTES:
                break
            parts.append(Path(path).read_bytes())
        except OSError:
            break
    return b"".join(parts)
