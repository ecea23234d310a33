"""The page at /ui, a chat and a live view of the engine: its static files, and GET /ui/stats, which the live view asks
for about once a second.

The page's addresses are relative, so that it works under any path of a proxy. `/ui/stats` is for the page alone and may
change with it; dashboards read /metrics.
"""

from __future__ import annotations

import time
from itertools import groupby
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response

from octavo.entrypoints.openai.routes import Router
from octavo.entrypoints.openai.state import state_of
from octavo.errors import EngineDeadError
from octavo.metrics.prometheus import Histogram

router = Router(include_in_schema=False)

STATIC = Path(__file__).parent / "static"
# Every file of the page, and its type. They hold no secrets: who has no key gets a page that can do nothing.
FILES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "api.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "engine.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
OPEN_PATHS = frozenset({"/ui", "/ui/", *(f"/ui/{name}" for name in FILES)})
# The page runs its own files and talks to its own server, and nothing else; no other page may frame it.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for again each time, and answered with 304
}


@router.get("/ui")
async def page() -> Response:
    return _file("index.html")


@router.get("/ui/")
async def page_with_slash() -> Response:
    """The page's relative addresses are those of /ui."""
    return RedirectResponse("../ui", 308)


@router.get("/ui/stats")
async def stats(request: Request) -> Response:
    """The engine as it is now, and the counters from which the page makes rates."""
    state = state_of(request)
    engine, metrics = state.engine, state.engine.metrics
    if metrics is None:
        raise HTTPException(404)
    try:
        blocks = await engine.block_map()
    except EngineDeadError:
        blocks = None
    last = metrics.last
    body: dict[str, Any] = {
        "model": state.model_names[0],
        "max_model_len": engine.config.model.max_model_len,
        "block_size": engine.config.cache.block_size,
        "time_s": time.monotonic(),
        "running": last.num_running,
        "waiting": last.num_waiting,
        "swapped": last.num_swapped,
        "prompt_tokens": metrics.totals["num_prompt_tokens"],
        "generation_tokens": metrics.totals["num_generation_tokens"],
        "preemptions": metrics.totals["num_preemptions"],
        "prefix_queries": metrics.totals["num_prefix_queries"],
        "prefix_hits": metrics.totals["num_prefix_hits"],
        "guessed": metrics.totals["num_draft_tokens"],
        "accepted": metrics.totals["num_accepted_tokens"],
        "finished": metrics.num_finished,
        "ttft": _count_and_sum(metrics.ttft_s),
        "itl": _count_and_sum(metrics.inter_token_latency_s),
        "step": _count_and_sum(metrics.step_times["taken"]),
        "predicted_step": _count_and_sum(metrics.step_times["predicted"]),
        "blocks": None if blocks is None else _runs(blocks.states),
    }
    return JSONResponse(body, headers={"Cache-Control": "no-store"})


@router.get("/ui/{name}")
async def file(name: str) -> Response:
    if name not in FILES or name == "index.html":
        raise HTTPException(404)
    return _file(name)


def _file(name: str) -> Response:
    return FileResponse(STATIC / name, media_type=FILES[name], headers=_HEADERS)


def _runs(states: bytes) -> list[list[int]]:
    """Runs of equal blocks, [state, length] one after the other: most maps are a few runs."""
    return [[state, sum(1 for _ in run)] for state, run in groupby(states)]


def _count_and_sum(histogram: Histogram) -> list[float]:
    return [sum(histogram.counts), histogram.sum]
