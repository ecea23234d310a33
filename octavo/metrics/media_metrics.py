"""Counts of media in the front end, and the times to fetch, decode and process them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from threading import Lock
from typing import TYPE_CHECKING

from octavo.errors import RequestError
from octavo.metrics.prometheus import Histogram

if TYPE_CHECKING:
    from prometheus_client import Metric

BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class MediaMetrics:
    """The media metrics of one front end. Threads may share it."""

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds
        self._lock = Lock()
        self._counts: Counter[tuple[str, str]] = Counter()  # by kind and outcome
        self._seconds: dict[tuple[str, str], Histogram] = {}  # by kind and phase

    def count(self, kind: str, outcome: str) -> None:
        with self._lock:
            self._counts[kind, outcome] += 1

    @contextmanager
    def phase(self, kind: str, name: str) -> Iterator[None]:
        """Time a phase of one medium, or of all fetches of a prompt. A `RequestError` ends the phase and counts as
        refused."""
        start = time.monotonic()
        try:
            yield
        except RequestError:
            self.count(kind, "refused")
            raise
        finally:
            with self._lock:
                self._seconds.setdefault((kind, name), Histogram(BOUNDS_S)).observe(time.monotonic() - start)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics: Prometheus's collector protocol."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        counts = CounterMetricFamily("octavo:media", "Media of requests, by kind and outcome.",
                                     labels=["kind", "outcome"])  # fmt: skip
        times = HistogramMetricFamily("octavo:media_seconds", "Seconds that media took in the front end, by phase.",
                                      labels=["kind", "phase"])  # fmt: skip
        with self._lock:
            for labels in product(self._kinds, ("taken", "refused")):
                counts.add_metric(labels, self._counts[labels])
            for labels, seconds in sorted(self._seconds.items()):
                times.add_metric(labels, seconds.cumulative(), seconds.sum)
        yield counts
        yield times
