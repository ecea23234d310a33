"""Counts and durations of HTTP requests, under the names of prometheus-fastapi-instrumentator, which vLLM uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from octavo.metrics.prometheus import Histogram

if TYPE_CHECKING:
    from prometheus_client import Metric

BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Monitors request these every few seconds: they would be most of the counts.
EXCLUDED = frozenset({"/metrics", "/health", "/ping", "/version"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpMetrics:
    """The HTTP metrics of one server. Labels have few values: a route is its declared pattern or "none", a status "2xx"
    or the like."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()  # by route, method, status
        self._errors: Counter[str] = Counter()  # by code
        self._seconds: dict[tuple[str, str], Histogram] = {}  # by route and method

    def record(self, method: str, route: str, status: int, seconds: float, code: str | None = None) -> None:
        """Record an answer. A stream's answer ends with its last event. `code` is an error's, one of Octavo's own."""
        if route in EXCLUDED:
            return
        method = method if method in _METHODS else "other"
        self._counts[route, method, f"{status // 100}xx"] += 1
        if code is not None:
            self._errors[code] += 1
        self._seconds.setdefault((route, method), Histogram(BOUNDS_S)).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics: Prometheus's collector protocol."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        counts = CounterMetricFamily(
            "http_requests", "HTTP requests by route, method and status.", labels=["handler", "method", "status"]
        )
        for labels, number in sorted(self._counts.items()):
            counts.add_metric(labels, number)
        yield counts
        errors = CounterMetricFamily("octavo:http_errors", "Answers that are errors, by code.", labels=["code"])
        for code, number in sorted(self._errors.items()):
            errors.add_metric([code], number)
        yield errors
        times = HistogramMetricFamily(
            "http_request_duration_seconds", "Seconds from a request's head to the end of its answer.",
            labels=["handler", "method"],
        )  # fmt: skip
        for (route, method), seconds in sorted(self._seconds.items()):
            times.add_metric((route, method), seconds.cumulative(), seconds.sum)
        yield times
