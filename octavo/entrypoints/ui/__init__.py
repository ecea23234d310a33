"""The page at /ui, a chat and a live view of the engine: its static files, and GET /ui/stats, which the live view
requests about once a second.

The page's addresses are relative, so that it works under any path of a proxy. `/ui/stats` is for the page alone and may
change with it; dashboards read /metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby
from typing import Any

from msgspec.structs import asdict
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import state_of
from octavo.errors import EngineDeadError
from octavo.metrics.prometheus import EngineMetrics, Histogram
from octavo.page_files import SHARED, page_file
from octavo.stats import SequenceProgress

router = Router(include_in_schema=False)

# The page's files need no key: they hold no secrets, and the page can do nothing without one.
FILES = ("index.html", "style.css", "app.js", "api.js", "chat.js", "markdown.js", "media.js", "engine.js", "charts.js",
         "theme.js", "compare.html", "compare.js", "icon.svg")  # fmt: skip
OPEN_PATHS = frozenset({"/ui", "/ui/", *(f"/ui/{name}" for name in FILES)})


@router.get("/ui")
async def page() -> Response:
    return page_file(SHARED / "index.html")


@router.get("/ui/")
async def page_with_slash() -> Response:
    """The page's relative addresses are those of /ui."""
    return RedirectResponse("../ui", 308)


@router.get("/ui/stats")
async def stats(request: Request) -> Response:
    """Return the engine's present state, and the counters from which the page makes rates."""
    state = state_of(request)
    engine, metrics = state.engine, state.engine.metrics
    if metrics is None:
        raise HTTPException(404)
    try:
        view = await engine.live_view()
    except EngineDeadError:
        view = None
    engines, media = metrics.of_engines, engine.inputs.media

    def total(name: str) -> float:
        return sum(one.totals[name] for one in engines)

    def count_and_sum(find: Callable[[EngineMetrics], Histogram]) -> list[float]:
        return [sum(sum(find(one).counts) for one in engines), sum(find(one).sum for one in engines)]

    body: dict[str, Any] = {
        "model": state.model_names[0],
        "media": [] if media is None else [kind.name for kind in media.kinds],
        "max_model_len": engine.config.model.max_model_len,
        "block_size": engine.config.cache.block_size,
        "time_s": time.monotonic(),
        "running": sum(one.last.num_running for one in engines),
        "waiting": sum(one.last.num_waiting for one in engines),
        "swapped": sum(one.last.num_swapped for one in engines),
        "prompt_tokens": total("num_prompt_tokens"),
        "generation_tokens": total("num_generation_tokens"),
        "preemptions": total("num_preemptions"),
        "prefix_queries": total("num_prefix_queries"),
        "prefix_hits": total("num_prefix_hits"),
        "guessed": total("num_draft_tokens"),
        "accepted": total("num_accepted_tokens"),
        "finished": {reason: sum(one.num_finished[reason] for one in engines) for reason in metrics.num_finished},
        "ttft": count_and_sum(lambda one: one.ttft_s),
        "itl": count_and_sum(lambda one: one.inter_token_latency_s),
        "step": count_and_sum(lambda one: one.step_times["taken"]),
        "predicted_step": count_and_sum(lambda one: one.step_times["predicted"]),
        "blocks": None if view is None else _runs(view.blocks),
        "sequences": [] if view is None else [_shown(one) for one in view.sequences],
    }
    return JSONResponse(body, headers={"Cache-Control": "no-store"})


@router.get("/ui/{name}")
async def file(name: str) -> Response:
    if name not in FILES or name == "index.html":
        raise HTTPException(404)
    return page_file(SHARED / name)


def _shown(progress: SequenceProgress) -> dict[str, Any]:
    """Return a row of the page's table. The whole id would let others fetch or cancel the request."""
    return {**asdict(progress), "request_id": progress.request_id[-6:]}


def _runs(states: bytes) -> list[list[int]]:
    """Return runs of equal blocks as [state, length]; most maps are a few runs."""
    return [[state, sum(1 for _ in run)] for state, run in groupby(states)]
