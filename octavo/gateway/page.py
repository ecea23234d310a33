"""The page at /ui: models, replicas, memory, queues and keys, live. It reads its numbers from /ui/stats, which may
change with the page; dashboards read /metrics. The page is on the clients' port, or with --keys on the admin port,
because it shows every key.
"""

import time
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import RedirectResponse
from starlette.types import Receive, Scope, Send

from octavo.errors import RequestError
from octavo.gateway.client import Client
from octavo.gateway.deployment import Deployment
from octavo.gateway.gateway_metrics import GatewayMetrics, totals
from octavo.gateway.key_store import KeyStore
from octavo.gateway.models import Models
from octavo.page_files import SHARED, page_file
from octavo.version import __version__

_OWN = Path(__file__).parent / "static"
# The files need no key: they hold no secrets, and the page shows nothing without one.
FILES = {name: _OWN / name for name in ("gateway.html", "gateway.css", "gateway.js")} | {
    name: SHARED / name for name in ("style.css", "api.js", "charts.js", "theme.js", "icon.svg")
}
STATS_PATH = "/ui/stats"


def is_of_page(path: str) -> bool:
    """Return whether a path is the page's: its files, and `STATS_PATH`, which needs a key."""
    return path == "/ui" or path.startswith("/ui/")


class Page:
    """Answers the requests of the page."""

    def __init__(self, models: Models, metrics: GatewayMetrics, store: KeyStore | None) -> None:
        """The page shows the keys of a `store`."""
        self._models, self._metrics, self._store = models, metrics, store

    async def send_file(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a file. Raises `RequestError`."""
        path: str = scope["path"]
        if path == "/ui/":  # the page's relative addresses are those of /ui
            await RedirectResponse("../ui", 308)(scope, receive, send)
            return
        name = "gateway.html" if path == "/ui" else path.removeprefix("/ui/")
        if scope["method"] not in ("GET", "HEAD") or name not in FILES or path == "/ui/gateway.html":
            raise RequestError(f"Invalid URL ({scope['method']} {path:.200})", status=404)
        await page_file(FILES[name])(scope, receive, send)

    async def send_stats(self, client: Client) -> None:
        """Answer with the gateway as it is now, and counters from which the page makes rates."""
        budget, answers = self._models.budget, self._answers()
        body: dict[str, Any] = {
            "version": __version__,
            "time_s": time.monotonic(),
            "memory": {"held_gib": budget.held_gib, "total_gib": budget.total_gib, "evictions": budget.num_evictions},
            "refused": sum(answers.pop("none", {}).values()),  # by the gateway, before a model was found
            "first_byte": self._first_byte(),
            "models": [_model(one, answers.get(one.name, {})) for one in self._models],
            "keys": None if self._store is None else [
                {
                    "id": key.id, "name": key.settings.name, "is_enabled": key.settings.is_enabled,
                    "requests": key.num_requests, "prompt_tokens": key.num_prompt_tokens,
                    "completion_tokens": key.num_completion_tokens,
                }
                for key in await self._store.keys()
            ],
        }  # fmt: skip
        await client.reply(200, b"application/json", msgspec.json.encode(body))

    def _answers(self) -> dict[str, dict[str, int]]:
        """Return the number of answers by model and by the first digit of their status."""
        found: dict[str, dict[str, int]] = {}
        for sample in totals(self._metrics.requests) + totals(self._metrics.of_gone):
            if sample.labels.get("counter", "requests") == "requests":
                of_model = found.setdefault(sample.labels["model"], {})
                kind = sample.labels["status"][0]
                of_model[kind] = of_model.get(kind, 0) + int(sample.value)
        return found

    def _first_byte(self) -> list[float]:
        """Return the number of answers that have begun, and the sum of the seconds that their clients waited."""
        totals = {"count": 0.0, "sum": 0.0}
        for sample in next(iter(self._metrics.first_byte.collect())).samples:
            kind = sample.name.rpartition("_")[2]
            if kind in totals:
                totals[kind] += sample.value
        return [totals["count"], totals["sum"]]


def _model(deployment: Deployment, answers: dict[str, int]) -> dict[str, Any]:
    entry = deployment.entry
    in_flight = sum(replica.num_in_flight for replica in deployment.replicas)
    return {
        "name": deployment.name,
        "aliases": entry.aliases,
        "state": deployment.state,
        "is_local": entry.is_local,
        "memory_gib": entry.total_gib if entry.is_local and entry.memory_gib is not None else None,
        "in_flight": in_flight,
        "waiting": max(0, deployment.num_requests - in_flight),
        "answered": sum(answers.values()),
        "failed": answers.get("5", 0),
        "starts": deployment.num_starts,
        "failed_starts": deployment.num_failed_starts,
        "affine": deployment.router.num_affine,
        "replicas": [
            {"name": one.name, "in_flight": one.num_in_flight,
             "state": "not healthy" if not one.is_healthy else "failing" if one.breaker.is_open() else "up"}
            for one in deployment.replicas
        ],
    }  # fmt: skip
