"""Routes that control the engine, with vLLM's names: sleep, pause, prefix cache. They exist only with
--enable-server-dev-mode, because they can stop the server from answering."""

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.entrypoints.http.error_responses import error_response
from octavo.entrypoints.http.pagination import read_boolean
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import state_of
from octavo.errors import RequestError

router = Router(tags=["control"])

_WAIT = "wait_for_inflight_requests"
_OF_RUNNING = "reset_running_requests"


@router.post("/sleep")
async def sleep(request: Request) -> Response:
    """Free memory: `level` 1 the KV cache, 2 the weights too. `mode` is abort or wait. Requests wait until /wake_up."""
    query = _query(request, "level", "mode")
    level = query.get("level", "1")
    if level not in ("1", "2"):
        raise RequestError(f"level must be 1 or 2, got {level!r}.", param="level")
    await state_of(request).engine.sleep(int(level), query.get("mode", "abort"))
    return Response()


@router.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Take the memory again; with `tags` only the memory of `weights` or `kv_cache`."""
    tags = _query(request, "tags").getlist("tags")
    await state_of(request).engine.wake_up(tags or None)
    return Response()


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Return whether the engine sleeps."""
    return {"is_sleeping": await state_of(request).engine.is_sleeping()}


@router.post("/pause")
async def pause(request: Request) -> Response:
    """Let new requests wait until /resume. `mode` says what requests under way do: abort, wait (for their end) or
    keep. `wait_for_inflight_requests` is an older name of wait."""
    query = _query(request, "mode", "clear_cache", _WAIT)
    mode = "wait" if read_boolean(query.get(_WAIT, "false"), _WAIT) else query.get("mode", "abort")
    clears = read_boolean(query.get("clear_cache", "true"), "clear_cache")
    await state_of(request).engine.pause_generation(mode, clear_cache=clears)
    return JSONResponse({"status": "paused"})


@router.post("/resume")
async def resume(request: Request) -> Response:
    """Take requests again."""
    await state_of(request).engine.resume_generation()
    return JSONResponse({"status": "resumed"})


@router.get("/is_paused")
async def is_paused(request: Request) -> dict[str, bool]:
    """Return whether new requests wait."""
    return {"is_paused": await state_of(request).engine.is_paused()}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Empty the prefix cache, with or without `reset_external` also on disk."""
    query = _query(request, _OF_RUNNING, "reset_external")
    read_boolean(query.get("reset_external", "false"), "reset_external")
    resets_running = read_boolean(query.get(_OF_RUNNING, "false"), _OF_RUNNING)
    if not await state_of(request).engine.reset_prefix_cache(resets_running):
        return error_response("The engine ended meanwhile, and is started again with an empty cache.", 503)
    return Response()


def _query(request: Request, *names: str) -> QueryParams:
    """Return the query, which may have only these parameters. Raises `RequestError`: a pause must not abort requests
    because the parameter that spares them is misspelt."""
    for name in request.query_params:
        if name not in names:
            raise RequestError(
                f"{request.url.path} has no parameter {name!r:.60}; it takes {', '.join(names)}.",
                param=name, code="unknown_parameter",
            )  # fmt: skip
    return request.query_params
