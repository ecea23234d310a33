"""The metrics of several front ends together. Each gives a snapshot of what it counts, and the process that owns the
engines adds them to its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from prometheus_client import Metric

    from octavo.metrics.prometheus import EngineMetrics

_OF_PROCESSES = "process_"  # metrics of a process; only the owner's are shown


class Family(msgspec.Struct):
    """One metric, and its samples by name and labels."""

    kind: str
    help: str
    samples: list[tuple[str, dict[str, str], float]]


class Snapshot(msgspec.Struct):
    """The metrics of a process at a moment."""

    families: dict[str, Family] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics: Prometheus's collector protocol."""
        from prometheus_client import Metric

        for name, family in self.families.items():
            metric = Metric(name, family.help, family.kind)
            for sample, labels, value in family.samples:
                metric.add_sample(sample, labels, value)
            yield metric


def snapshot(metrics: EngineMetrics) -> Snapshot:
    """Return the present values of `metrics` and of the collectors beside them."""
    return Snapshot(
        {
            metric.name: Family(
                metric.type, metric.documentation, [(one.name, dict(one.labels), one.value) for one in metric.samples]
            )
            for metric in metrics.collect()
        }
    )


def sum_of(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Return the sums of samples with the same name and labels."""
    total = Snapshot({})
    for one in snapshots:
        for name, family in one.families.items():
            into = total.families.setdefault(name, Family(family.kind, family.help, []))
            places = {(sample, *sorted(labels.items())): i for i, (sample, labels, _) in enumerate(into.samples)}
            for sample, labels, value in family.samples:
                place = places.get((sample, *sorted(labels.items())))
                if place is None:
                    into.samples.append((sample, labels, value))
                else:
                    into.samples[place] = sample, labels, into.samples[place][2] + value
    return total


def render_sum(own: Snapshot, fronts: Snapshot) -> tuple[bytes, str]:
    """Return the owner's metrics and the sums of its front ends together, in Prometheus's text format, and the content
    type. If the owner has a gauge, the owner's value counts."""
    from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

    added = {
        name: family
        for name, family in fronts.families.items()
        if not name.startswith(_OF_PROCESSES) and not (family.kind == "gauge" and name in own.families)
    }
    total = sum_of([own, Snapshot(added)])
    return generate_latest(total), CONTENT_TYPE_PLAIN_0_0_4
