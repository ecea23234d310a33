"""Routes for other servers, which copy blocks of the KV cache from this server's disk (`kv_cache.peer_blocks`).

A block's name is a hash of everything that its contents depend on, so only who knows a prompt can ask for its blocks.
The server must have an API key.
"""

import asyncio
import os
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import state_of
from octavo.errors import RequestError
from octavo.kv_cache.block_files import block_paths
from octavo.kv_cache.peer_blocks import BLOCKS_PATH, CHUNK_BYTES, MAX_NAMES, PIECE_BYTES

_BINARY = "application/octet-stream"
_MAX_BODY_BYTES = 140 * MAX_NAMES
_MAX_ANSWER_BYTES = 2 * CHUNK_BYTES  # or one block
_answers = asyncio.Semaphore(8)  # answers with blocks that are in memory

router = Router(tags=["Octavo"], include_in_schema=False)


@router.post(BLOCKS_PATH + "/{fingerprint}/find")
async def find_blocks(fingerprint: str, raw: Request) -> Response:
    """Return a byte for each file that the body, a JSON list, names: 1 if it is here, 0 if not."""
    paths = await _paths(fingerprint, raw)
    found = await asyncio.to_thread(lambda: bytes(ord("1") if os.path.exists(path) else ord("0") for path in paths))
    return Response(found, media_type=_BINARY)


@router.post(BLOCKS_PATH + "/{fingerprint}/read")
async def read_blocks(fingerprint: str, raw: Request) -> Response:
    """Return the contents of the files that the body names, one after the other, up to the first one that is not
    here."""
    return _FilesResponse(await _paths(fingerprint, raw))


class _FilesResponse(Response):
    """Sends the contents of files. It waits until few others do, and reads the files then."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__(media_type=_BINARY)
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _answers:
            body = await asyncio.to_thread(_read, self._paths)
            self.headers["content-length"] = str(len(body))
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # Each piece waits until the client has read those before: one large piece would leave here at once.
            for at in range(0, len(body), PIECE_BYTES):
                await send({"type": "http.response.body", "body": body[at : at + PIECE_BYTES], "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


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
    paths = await asyncio.to_thread(_paths_of, disk.folder, fingerprint, await raw.body())
    if paths is None:
        said = f"The body must be a JSON list of 1 to {MAX_NAMES} different names of blocks."
        raise RequestError(said, code="invalid_body")
    return paths


def _paths_of(folder: str, fingerprint: str, body: bytes) -> list[str] | None:
    """Return the paths of the files that a body names; None if it is not of the right form."""
    if len(body) > _MAX_BODY_BYTES:
        return None
    try:
        names = msgspec.json.decode(body, type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not 0 < len(names) <= MAX_NAMES or len(set(names)) < len(names):
        return None
    return block_paths(folder, fingerprint, names)


def _read(paths: list[str]) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    for path in paths:
        try:
            num_bytes += os.path.getsize(path)
            if parts and num_bytes > _MAX_ANSWER_BYTES:
                break
            parts.append(Path(path).read_bytes())
        except OSError:
            break
    return b"".join(parts)
