"""The metrics of engines as plain objects, for `LLM.get_metrics`. The classes are vLLM's, and so are the names of
metrics.

`octavo.metrics.prometheus` counts and names the metrics.
"""

from dataclasses import dataclass

from octavo.metrics.prometheus import POSITIONS, EngineMetrics
from octavo.metrics.prometheus import Histogram as Counts


@dataclass(slots=True)
class Metric:
    """The value of a metric for one set of labels."""

    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(slots=True)
class Vector(Metric):
    """Numbers that only grow, in order: accepted draft tokens by position in the draft."""

    values: list[int]


@dataclass(slots=True)
class Gauge(Metric):
    value: float


@dataclass(slots=True)
class Histogram(Metric):
    """The number of values up to each bound including "+Inf", the number of all values, and their sum."""

    count: int
    sum: float
    buckets: dict[str, int]


def snapshot(metrics: EngineMetrics) -> list[Metric]:
    """Return the current metrics of all engines."""
    found: list[Metric] = []
    for one in metrics.of_engines:
        own = {"model_name": metrics.model_name, "engine": str(one.engine)}
        for family in one.families():
            if not family.name.startswith("vllm:"):
                continue
            if family.name == POSITIONS:
                found.append(Vector(family.name, own.copy(), [int(value) for value in family.values.values()]))
                continue
            for of_labels, value in family.values.items():
                labels = own | dict(zip(family.labels, of_labels, strict=True))
                found.append(_metric(family.kind, family.name, labels, value))
    return found


def _metric(kind: str, name: str, labels: dict[str, str], value: float | Counts) -> Metric:
    if isinstance(value, Counts):
        buckets = {bound: int(number) for bound, number in value.cumulative()}
        return Histogram(name, labels, buckets["+Inf"], value.sum, buckets)
    return Counter(name, labels, int(value)) if kind == "counter" else Gauge(name, labels, float(value))
