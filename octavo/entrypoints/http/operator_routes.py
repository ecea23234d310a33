"""Routes for operators: /health, /ping, /version, /load, /metrics. They need no key, no body and no ready engine."""

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from octavo.entrypoints.http.body_fields import ResponseModel
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import state_of
from octavo.errors import RETRY_AFTER_S
from octavo.version import __version__

router = Router(tags=["operations"])


class Health(ResponseModel):
    """`ok`, or the state that keeps the server from taking requests, and why."""

    status: str
    reason: str | None = None


@router.get("/health", response_model=Health, responses={503: {"model": Health}})
@router.get("/ping", response_model=Health, responses={503: {"model": Health}})
@router.post("/ping", include_in_schema=False)
async def health(request: Request) -> Response:
    """Answer 200 while requests are taken; 503 with the reason while the model loads and after the engine has died."""
    unavailable = await state_of(request).unavailable()
    if unavailable is None:
        return JSONResponse({"status": "ok"})
    status, reason = unavailable
    return JSONResponse({"status": status, "reason": reason}, 503, headers={"Retry-After": str(RETRY_AFTER_S)})


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of Octavo."""
    return {"version": __version__}


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Count the requests of the engine whose answers are not complete, including waiting ones."""
    return {"server_load": state_of(request).num_all_engine_requests}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus's text format."""
    state = state_of(request)
    engine_metrics = state.engine.metrics
    if engine_metrics is None:
        return Response(status_code=404)
    # In a thread: it takes some 10 ms for each engine.
    rendered = asyncio.to_thread(engine_metrics.render) if state.hub is None else state.hub.call("metrics")
    body, content_type = await rendered
    return Response(body, media_type=content_type)
