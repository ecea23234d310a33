"""Counts and times of one engine, under vLLM's metric names (`octavo:` where it has none), in Prometheus's text format.

The engine's front end calls the `record_…` methods, once a step or once a request, never once a token: they add to
plain Python numbers, and only a scrape (`render`) builds Prometheus's objects. Nothing here is global, so two engines
in one process do not meet.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from octavo.outputs import RequestMetrics
from octavo.sampling_params import SamplingParams
from octavo.stats import EngineStats

if TYPE_CHECKING:
    from prometheus_client import Metric

# Bounds of vLLM's histograms, which dashboards and alerts are written for.
# fmt: off
TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)
TOKEN_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_BOUNDS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# fmt: on
PARAMS_N_BOUNDS = (1, 2, 5, 10, 20)
FINISH_REASONS = ("stop", "length", "abort", "error")


def length_bounds(max_model_len: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, … up to the longest sequence."""
    return [m * 10**e for e in range(len(str(max_model_len))) for m in (1, 2, 5) if m * 10**e <= max_model_len]


class Histogram:
    """Counts of values by upper bound, as Prometheus's `le` has it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        for value in values:
            self.observe(value)

    def cumulative(self) -> list[tuple[str, float]]:
        """(`le`, values up to it) for every bound and infinity."""
        total, result = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            result.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return result


class EngineMetrics:
    """All metrics of one engine. Times are differences of `time.monotonic`, in seconds."""

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self.model_name = model_name
        self.last = EngineStats()  # the gauges of the last step
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.prompt_tokens_per_s = 0.0  # these three are set by `log_line`, over its interval
        self.generation_tokens_per_s = 0.0
        self.requests_per_s = 0.0
        self.num_finished = dict.fromkeys(FINISH_REASONS, 0)
        self.cache_config: dict[str, str] = {}
        self.startup_s: dict[tuple[str, str], float] = {}  # by process and phase
        self.memory_bytes: dict[str, int] = {}
        self.num_restarts = 0
        lengths = length_bounds(max_model_len)
        self.ttft_s = Histogram(TTFT_BOUNDS_S)
        self.request_time_per_token_s = Histogram(TOKEN_BOUNDS_S)
        self.inter_token_latency_s = Histogram(TOKEN_BOUNDS_S)
        self.e2e_s = Histogram(REQUEST_BOUNDS_S)
        self.queue_s = Histogram(REQUEST_BOUNDS_S)
        self.prefill_s = Histogram(REQUEST_BOUNDS_S)
        self.decode_s = Histogram(REQUEST_BOUNDS_S)
        self.inference_s = Histogram(REQUEST_BOUNDS_S)
        self.prompt_lengths = Histogram(lengths)
        self.generation_lengths = Histogram(lengths)
        self.params_n = Histogram(PARAMS_N_BOUNDS)
        self.params_max_tokens = Histogram(lengths)
        self.step_tokens = Histogram(STEP_TOKEN_BOUNDS)

    def record_cache_config(self, **config: object) -> None:
        """The labels of `vllm:cache_config_info`, known when the core is ready."""
        self.cache_config = {name: str(value) for name, value in config.items()}

    def record_startup(self, process: str, seconds: dict[str, float]) -> None:
        """How long the phases of a process's start took, in order."""
        self.startup_s |= {(process, phase): value for phase, value in seconds.items()}

    def record_memory(self, **num_bytes: int) -> None:
        """What the core holds for as long as it lives, by kind."""
        self.memory_bytes |= num_bytes

    def record_restart(self) -> None:
        """The core has died and is started again."""
        self.num_restarts += 1

    def record_step(self, stats: EngineStats) -> None:
        """One step of the core, as it reports it."""
        self.last = stats
        self.num_steps += 1
        self.num_prompt_tokens += stats.num_prompt_tokens
        self.num_generation_tokens += stats.num_generation_tokens
        self.num_preemptions += stats.num_preemptions
        self.num_prefix_queries += stats.num_prefix_queries
        self.num_prefix_hits += stats.num_prefix_hits
        if stats.num_computed_tokens:
            self.step_tokens.observe(stats.num_computed_tokens)

    def record_first_tokens(self, ttft_s: Iterable[float]) -> None:
        """Arrival to first token in the client's queue, of each request that got its first token in this step."""
        self.ttft_s.observe_all(ttft_s)

    def record_tokens(self, latencies_s: Iterable[float]) -> None:
        """Time since the sequence's last output, of each sequence that got a further one in this step."""
        self.inter_token_latency_s.observe_all(latencies_s)

    def record_finished(
        self,
        metrics: RequestMetrics,
        num_prompt: int,
        num_generation: int,
        params: SamplingParams,
        finish_reason: str | None,
    ) -> None:
        """The end of a request. Phases that it never reached (an abort in the queue) are not counted."""
        reason = finish_reason or "abort"
        self.num_finished[reason] = self.num_finished.get(reason, 0) + 1
        self.prompt_lengths.observe(num_prompt)
        self.generation_lengths.observe(num_generation)
        self.params_n.observe(params.n)
        if params.max_tokens is not None:
            self.params_max_tokens.observe(params.max_tokens)
        scheduled, first, last = metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time
        if scheduled is not None:
            self.queue_s.observe(scheduled - metrics.arrival_time)
            if first is not None:
                self.prefill_s.observe(first - scheduled)
            if last is not None:
                self.inference_s.observe(last - scheduled)
        if first is not None and last is not None:
            self.decode_s.observe(last - first)
            num_per_sequence = num_generation / params.num_sequences
            if num_per_sequence > 1:
                self.request_time_per_token_s.observe((last - first) / (num_per_sequence - 1))
        if metrics.finished_time is not None:
            self.e2e_s.observe(metrics.finished_time - metrics.arrival_time)

    def render(self) -> tuple[bytes, str]:
        """The exposition and its content type."""
        from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

        return generate_latest(self), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[Metric]:
        """Prometheus's collector protocol."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        labels = [self.model_name]
        for name, help, number in self._gauges():
            gauge = GaugeMetricFamily("vllm:" + name, help, labels=["model_name"])
            gauge.add_metric(labels, number)
            yield gauge
        for name, help, number in self._counters():
            counter = CounterMetricFamily("vllm:" + name, help, labels=["model_name"])
            counter.add_metric(labels, number)
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, number in self.num_finished.items():
            success.add_metric([self.model_name, reason], number)
        yield success
        for name, help, values in self._histograms():
            histogram = HistogramMetricFamily("vllm:" + name, help, labels=["model_name"])
            histogram.add_metric(labels, values.cumulative(), values.sum)
            yield histogram
        if self.cache_config:
            info = GaugeMetricFamily(
                "vllm:cache_config_info", "The KV cache's configuration.", labels=["model_name", *self.cache_config]
            )
            info.add_metric([self.model_name, *self.cache_config.values()], 1)
            yield info
        lora = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of the requests that run and wait, as labels; the value is the time.",
            labels=["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        lora.add_metric([self.model_name, "0", "", ""], time.time())  # no adapters yet
        yield lora
        yield from self._start()

    def _start(self) -> Iterator[Metric]:
        """What vLLM has no names for."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        seconds = GaugeMetricFamily(
            "octavo:startup_seconds", "Time of the phases of the start.", labels=["model_name", "process", "phase"]
        )
        for (process, phase), value in self.startup_s.items():
            seconds.add_metric([self.model_name, process, phase], value)
        num_bytes = GaugeMetricFamily(
            "octavo:memory_bytes", "Packed weights and KV cache, used or not.", labels=["model_name", "kind"]
        )
        for kind, number in self.memory_bytes.items():
            num_bytes.add_metric([self.model_name, kind], number)
        restarts = CounterMetricFamily(
            "octavo:engine_restarts", "Times that the engine core died and was started again.", labels=["model_name"]
        )
        restarts.add_metric([self.model_name], self.num_restarts)
        yield seconds
        yield num_bytes
        yield restarts

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        last = self.last
        kv_usage = last.num_blocks_used / last.num_blocks if last.num_blocks else 0.0
        host_usage = last.num_host_blocks_used / last.num_host_blocks if last.num_host_blocks else 0.0
        yield "num_requests_running", "Requests in the running batch.", last.num_running
        yield "num_requests_waiting", "Requests that wait to be scheduled.", last.num_waiting
        yield "num_requests_swapped", "Requests whose blocks are in host memory.", last.num_swapped
        yield "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", kv_usage
        yield "gpu_cache_usage_perc", "The same as kv_cache_usage_perc, under its older name.", kv_usage
        yield "cpu_cache_usage_perc", "Share of host (swap) blocks in use, 0 to 1.", host_usage
        yield (
            "avg_prompt_throughput_toks_per_s",
            "Prompt tokens computed per second, lately.",
            self.prompt_tokens_per_s,
        )
        yield (
            "avg_generation_throughput_toks_per_s",
            "Tokens generated per second, lately.",
            self.generation_tokens_per_s,
        )

    def _counters(self) -> Iterator[tuple[str, str, float]]:
        yield "prompt_tokens", "Prompt tokens of requests that were scheduled.", self.num_prompt_tokens
        yield "generation_tokens", "Tokens generated.", self.num_generation_tokens
        yield "num_preemptions", "Times that a request gave its blocks back.", self.num_preemptions
        yield "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", self.num_prefix_queries
        yield "prefix_cache_hits", "Prompt tokens found in the prefix cache.", self.num_prefix_hits
        # Nothing drafts yet: the series are there, so that dashboards and alerts which name them find them.
        yield "spec_decode_num_draft_tokens", "Tokens drafted by speculative decoding.", 0
        yield "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", 0

    def _histograms(self) -> Iterator[tuple[str, str, Histogram]]:
        yield "time_to_first_token_seconds", "Arrival to first token.", self.ttft_s
        yield "inter_token_latency_seconds", "Time between outputs of a sequence.", self.inter_token_latency_s
        yield (
            "time_per_output_token_seconds",
            "The same as inter_token_latency_seconds, under its older name.",
            self.inter_token_latency_s,
        )
        yield (
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, a value a request.",
            self.request_time_per_token_s,
        )
        yield "e2e_request_latency_seconds", "Arrival to end.", self.e2e_s
        yield "request_queue_time_seconds", "Arrival to first scheduled.", self.queue_s
        yield "request_prefill_time_seconds", "First scheduled to first token.", self.prefill_s
        yield "request_decode_time_seconds", "First to last token.", self.decode_s
        yield "request_inference_time_seconds", "First scheduled to last token.", self.inference_s
        yield "request_prompt_tokens", "Prompt tokens of a request.", self.prompt_lengths
        yield "request_generation_tokens", "Generated tokens of a request.", self.generation_lengths
        yield "request_params_n", "n of a request.", self.params_n
        yield "request_params_max_tokens", "max_tokens of a request.", self.params_max_tokens
        yield "iteration_tokens_total", "Tokens computed in a step.", self.step_tokens
