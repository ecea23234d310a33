"""Pictures or sounds that came, and what it took to fetch, decode and process them, in the front end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from octavo.errors import RequestError
from octavo.metrics.prometheus import Histogram

if TYPE_CHECKING:
    from prometheus_client import Metric

BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class MediaMetrics:
    """Of one front end. Threads may share it."""

    def __init__(self, kind: str = "image") -> None:
        self._kind = kind
        self._lock = Lock()
        self._counts: Counter[str] = Counter()  # by what became of them
        self._seconds: dict[str, Histogram] = {}  # by phase

    def count(self, outcome: str) -> None:
        with self._lock:
            self._counts[outcome] += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Of one picture or sound, or of all that a prompt has to fetch; a refusal ends it too, and is counted."""
        start = time.monotonic()
        try:
            yield
        except RequestError:
            self.count("refused")
            raise
        finally:
            with self._lock:
                self._seconds.setdefault(name, Histogram(BOUNDS_S)).observe(time.monotonic() - start)

    def collect(self) -> Iterator[Metric]:
        """Prometheus's collector protocol."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        counts = CounterMetricFamily("octavo:media", "Media of requests, by kind and what became of them.",
                                     labels=["kind", "outcome"])  # fmt: skip
        times = HistogramMetricFamily("octavo:media_seconds", "Seconds that media took in the front end, by phase.",
                                      labels=["kind", "phase"])  # fmt: skip
        with self._lock:
            for outcome in ("taken", "refused"):
                counts.add_metric((self._kind, outcome), self._counts[outcome])
            for name, seconds in sorted(self._seconds.items()):
                times.add_metric((self._kind, name), seconds.cumulative(), seconds.sum)
        yield counts
        yield times
