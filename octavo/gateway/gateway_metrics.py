"""What the gateway counts, by model and replica, for Prometheus. Models are labelled by their names in the catalogue,
never by a client's text."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, Sample

from octavo.gateway.client_keys import Key
from octavo.gateway.key_store import KeyStore
from octavo.gateway.models import Models

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
FORGET_S = 300.0  # that the series of a replica that has gone stay, so that everybody reads their last values
_PREFIX = "octavo_gateway_"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class GatewayMetrics:
    """Counters are incremented by the code that they count; gauges are read from `models` when Prometheus asks. The use
    of keys is shown on request only, as it tells the names of clients."""

    def __init__(self, models: Models, store: KeyStore | None = None) -> None:
        self._registry = CollectorRegistry()
        self._models = models
        on = self._registry
        labels = ["model", "replica"]
        self.requests = Counter(
            "octavo_gateway_requests", "Answers by model, replica (none: the gateway's own) and status.",
            [*labels, "status"], registry=on,
        )  # fmt: skip
        self.first_byte = Histogram(
            "octavo_gateway_first_byte_seconds", "Seconds from a request's arrival to the first byte of its answer.",
            ["model"], buckets=_SECONDS, registry=on,
        )  # fmt: skip
        self.retries = Counter(
            "octavo_gateway_retries",
            "Requests whose replica was lost before the first byte, or was too busy.",
            labels,
            registry=on,
        )
        self.broken_streams = Counter(
            "octavo_gateway_broken_answers", "Answers that were cut off because the replica was lost.",
            labels, registry=on,
        )  # fmt: skip
        self.resumed = Counter(
            "octavo_gateway_resumed_streams", "Streams that the replica continued after another one was lost.",
            labels, registry=on,
        )  # fmt: skip
        self.disconnects = Counter(
            "octavo_gateway_disconnects", "Requests whose client hung up before the end of the answer.", registry=on
        )
        self.of_gone = Counter(
            "octavo_gateway_gone_replicas", "Values of the other counters for replicas whose series were removed.",
            ["counter", "model", "status"], registry=on,
        )  # fmt: skip
        self._gone_since: dict[tuple[str, str], float] = {}  # when it was first seen that a replica has gone
        self._registry.register(self)
        self._of_keys = CollectorRegistry()
        self.key_refusals = Counter(
            "octavo_gateway_key_refusals",
            "Requests of a key that were refused: a limit, the error's code, or the status of a replica's answer.",
            ["key", "reason"], registry=self._of_keys,
        )  # fmt: skip
        self._of_keys.register(_KeyMetrics(store))

    def render(self, *, shows_keys: bool = False) -> bytes:
        """Return the metrics in Prometheus's text format."""
        self._forget_gone()
        return generate_latest(self._registry) + (generate_latest(self._of_keys) if shows_keys else b"")

    def _forget_gone(self) -> None:
        """Remove the series of replicas that have gone some time ago, and add their values to one series for all."""
        now, present = time.monotonic(), self._models.replica_names()
        for counter in (self.requests, self.retries, self.broken_streams, self.resumed):
            for sample in totals(counter):
                labels = sample.labels
                place = labels["model"], labels["replica"]
                if place in present or labels["replica"] == "none":
                    self._gone_since.pop(place, None)
                elif now - self._gone_since.setdefault(place, now) >= FORGET_S:
                    counter.remove(*labels.values())
                    what = sample.name.removeprefix(_PREFIX).removesuffix("_total")
                    self.of_gone.labels(what, labels["model"], labels.get("status", "")).inc(sample.value)
        self._gone_since = {place: since for place, since in self._gone_since.items() if now - since < FORGET_S}

    def collect(self) -> Iterator[Metric]:
        """Prometheus's collector protocol."""
        prefix = _PREFIX
        in_flight = GaugeMetricFamily(
            prefix + "requests_in_flight", "Requests that a replica is answering.", labels=["model", "replica"]
        )
        up = GaugeMetricFamily(prefix + "replica_up", "1 if the replica takes requests.", labels=["model", "replica"])
        ready = GaugeMetricFamily(prefix + "model_ready", "1 if the model has been started.", labels=["model"])
        held = GaugeMetricFamily(
            prefix + "model_requests", "Requests that wait for the model or are answered by it.", labels=["model"]
        )
        starts = CounterMetricFamily(
            prefix + "starts", "Starts of a model, and of a replica that had ended.", labels=["model"]
        )
        failed = CounterMetricFamily(prefix + "failed_starts", "Starts that failed.", labels=["model"])
        affine = CounterMetricFamily(
            prefix + "affine_requests", "Requests that went to a replica that knows their beginning.",
            labels=["model"],
        )  # fmt: skip
        for deployment in self._models:
            name = [deployment.name]
            ready.add_metric(name, deployment.state == "ready")
            held.add_metric(name, deployment.num_requests)
            starts.add_metric(name, deployment.num_starts)
            failed.add_metric(name, deployment.num_failed_starts)
            affine.add_metric(name, deployment.router.num_affine)
            for replica in deployment.replicas:
                for counter in (self.retries, self.broken_streams, self.resumed):
                    counter.labels(*name, replica.name)  # 0 from the start: alerts do not see how a series begins
                in_flight.add_metric([*name, replica.name], replica.num_in_flight)
                up.add_metric([*name, replica.name], replica.takes_requests())
            for restarting in deployment.restarting:
                up.add_metric([*name, restarting], 0)
        yield from (in_flight, up, ready, held, starts, failed, affine)
        budget = self._models.budget
        yield GaugeMetricFamily(prefix + "memory_held_gib", "Memory of the models that run here.", budget.held_gib)
        yield CounterMetricFamily(
            prefix + "evictions", "Models that stopped because another needed the memory.", budget.num_evictions
        )


def totals(counter: Counter) -> list[Sample]:
    """Return the values of a counter's series."""
    return [sample for sample in next(iter(counter.collect())).samples if sample.name.endswith("_total")]


class _KeyMetrics:
    """The requests and tokens of a store's keys."""

    def __init__(self, store: KeyStore | None) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """Prometheus's collector protocol."""
        requests = CounterMetricFamily(_PREFIX + "key_requests", "Requests of a key, ever.", labels=["key"])
        tokens = CounterMetricFamily(_PREFIX + "key_tokens", "Tokens of a key, ever.", labels=["key", "kind"])
        by_name: dict[str, list[Key]] = {}
        for key in () if self._store is None else self._store.counted():
            by_name.setdefault(key.settings.name, []).append(key)
        for label, keys in by_name.items():
            requests.add_metric([label], sum(key.num_requests for key in keys))
            tokens.add_metric([label, "prompt"], sum(key.num_prompt_tokens for key in keys))
            tokens.add_metric([label, "completion"], sum(key.num_completion_tokens for key in keys))
        yield from (requests, tokens)
