"""Counts and times of one engine in Prometheus's text format, under vLLM's metric names, or `octavo:` names if vLLM has
none.

The engine's front end records once a step or once a request, never once a token. Recording adds to plain Python
numbers; only a scrape (`render`), which threads may do meanwhile, builds Prometheus's objects. Nothing here is global,
so two engines in one process stay apart.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.outputs import RequestMetrics
from octavo.sampling_params import SamplingParams
from octavo.stats import EngineStats

if TYPE_CHECKING:
    from prometheus_client import Metric

# Bounds of vLLM's histograms, which existing dashboards and alerts expect.
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
STEP_BOUNDS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.125, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)
ERROR_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# fmt: on
PARAMS_N_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTION_BOUNDS = (1, 2, 3, 4, 5, 10, 20)
REJECTIONS = ("queue_full", "first_token_too_late")  # codes of errors 429
POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos"
FINISH_REASONS = ("stop", "length", "abort", "error")
# Fields of `EngineStats` that are summed, with the names and help texts of their metrics.
_COUNTERS = {
    "num_prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens, as they are computed or found in the cache."),
    "num_generation_tokens": ("vllm:generation_tokens", "Tokens generated."),
    "num_preemptions": ("vllm:num_preemptions", "Times that a request gave its blocks back."),
    "num_prefix_queries": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "num_prefix_hits": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "num_drafts": ("vllm:spec_decode_num_drafts", "Verified drafts, of one token or several."),
    "num_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Tokens of these drafts."),
    "num_media_queries": ("vllm:mm_cache_queries", "Media looked up among those whose rows are kept."),
    "num_media_hits": ("vllm:mm_cache_hits", "Media whose rows were found there."),
    "num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Draft tokens that the model sampled too."),
    "tower_s": ("octavo:tower_seconds", "Seconds that towers took to make rows of media."),
    "num_host_hits": ("octavo:host_cache_hits", "Prompt tokens whose blocks were copied back from host memory."),
    "num_host_copied": ("octavo:host_cache_blocks_copied", "Blocks of the KV cache that were copied to host memory."),
    "num_host_dropped": ("octavo:host_cache_blocks_dropped", "Blocks not kept: too many at once, or no room."),
    "num_disk_hits": ("octavo:disk_cache_hits", "Prompt tokens whose blocks were read from disk."),
    "disk_read_bytes": ("octavo:disk_cache_read_bytes", "Bytes of these blocks."),
    "disk_copied_bytes": ("octavo:disk_cache_copied_bytes", "Bytes of blocks copied from other servers."),
    "num_disk_written": ("octavo:disk_cache_blocks_written", "Blocks of the KV cache that were written to disk."),
    "disk_written_bytes": ("octavo:disk_cache_written_bytes", "Bytes of these blocks."),
    "num_disk_dropped": (
        "octavo:disk_cache_blocks_dropped",
        "Blocks not kept: the disk was slow or failed, or the engine had no time.",
    ),
    "num_disk_damaged": ("octavo:disk_cache_blocks_damaged", "Files that were found damaged, and removed."),
    "num_adapter_reads": ("octavo:adapter_reads", "Adapters read from disk."),
    "adapter_read_s": (
        "octavo:adapter_read_seconds",
        "Seconds from the request for an adapter until it is on the host.",
    ),
    "num_adapter_loads": ("octavo:adapter_loads", "Adapters copied to the device."),
    "num_adapter_evictions": ("octavo:adapter_evictions", "Adapters that gave their device memory to others."),
}
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by sleep level; 0 is awake
# Values of `RequestMetrics.intervals`, with the names and help texts of their metrics.
_INTERVALS = {
    "e2e": ("e2e_request_latency_seconds", "Arrival to end."),
    "time_in_queue": ("request_queue_time_seconds", "Arrival to first scheduled."),
    "time_in_model_prefill": ("request_prefill_time_seconds", "First scheduled to first token."),
    "time_in_model_decode": ("request_decode_time_seconds", "First to last token."),
    "time_in_model_inference": ("request_inference_time_seconds", "First scheduled to last token."),
}


def length_bounds(max_model_len: int) -> list[int]:
    """Return bounds for lengths: 1, 2, 5, 10, 20, 50, … up to the longest sequence."""
    return [m * 10**e for e in range(len(str(max_model_len))) for m in (1, 2, 5) if m * 10**e <= max_model_len]


class Histogram:
    """Counts of values by upper bound, like Prometheus's `le`."""

    def __init__(self, bounds: Sequence[float], name: str = "", help: str = "") -> None:
        self.bounds, self.name, self.help = bounds, name, help
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def observe_all(self, values: Iterable[float]) -> None:
        for value in values:
            self.observe(value)

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (`le`, number of values up to it) for every bound and infinity."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


class _Family(NamedTuple):
    """A metric of one engine, with a value for each combination of label values."""

    kind: str  # "counter", "gauge" or "histogram"
    name: str
    help: str
    values: Mapping[Any, Any]  # by labels: numbers, or `Histogram`s
    labels: tuple[str, ...] = ()


class EngineMetrics:
    """All metrics of one engine. The server's first engine also renders those of the others. Times are differences of
    `time.monotonic`, in seconds."""

    def __init__(self, model_name: str, max_model_len: int, engine: int = 0) -> None:
        self.model_name = model_name
        self.engine = engine  # number of the engine, vLLM's label `engine`
        self.last = EngineStats()  # the gauges of the last step
        self.num_steps = 0
        self.totals: dict[str, float] = dict.fromkeys(_COUNTERS, 0)
        self.accepted_by_position: list[int] = []  # accepted draft tokens, by position in the draft
        self.prompt_tokens_per_s = 0.0  # these three are set by `log_line`, over its interval
        self.generation_tokens_per_s = 0.0
        self.requests_per_s = 0.0
        self.num_finished = dict.fromkeys(FINISH_REASONS, 0)
        self.cache_config: dict[str, object] = {}  # labels of `vllm:cache_config_info`, known when the core is ready
        self.startup_s: dict[tuple[str, str], float] = {}  # by process and phase, in order
        self.memory_bytes: dict[str, int] = {}  # memory that the core holds all its life, by kind
        # The metrics of all engines behind the server, this one first.
        self.of_engines: list[EngineMetrics] = [self]
        # False in one of several front ends: the process that owns the engines counts steps, restarts and the like.
        self.counts_steps = True
        self.total_rate: Callable[[], float] | None = None  # requests a second of all front ends
        self.others: list[Any] = []  # collectors whose metrics are rendered too
        self.num_restarts = 0  # restarts of the core after it has died
        self.num_continued = 0  # requests that went on with another core
        self.max_loras = 0  # most adapters in a step
        self.sleep_level = 0  # 0 while the engine is awake
        lengths = length_bounds(max_model_len)
        # Arrival to first token in the client's queue.
        self.ttft_s = Histogram(TTFT_BOUNDS_S, "time_to_first_token_seconds", "Arrival to first token.")
        self.inter_token_latency_s = Histogram(
            TOKEN_BOUNDS_S, "inter_token_latency_seconds", "Time between outputs of a sequence."
        )
        self.request_time_per_token_s = Histogram(
            TOKEN_BOUNDS_S, "request_time_per_output_token_seconds",
            "Mean time per token after the first, a value a request.",
        )  # fmt: skip
        self.intervals_s = {
            name: Histogram(REQUEST_BOUNDS_S, metric, help) for name, (metric, help) in _INTERVALS.items()
        }
        self.prompt_lengths = Histogram(lengths, "request_prompt_tokens", "Prompt tokens of a request.")
        self.computed_prompt_lengths = Histogram(
            lengths, "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not in the cache."
        )
        self.generation_lengths = Histogram(lengths, "request_generation_tokens", "Generated tokens of a request.")
        self.longest_generations = Histogram(
            lengths, "request_max_num_generation_tokens", "Generated tokens of a request's longest sequence."
        )
        self.preemptions = Histogram(
            PREEMPTION_BOUNDS, "request_num_preemptions", "Times that a request gave its blocks back."
        )
        self.num_rejected = dict.fromkeys(REJECTIONS, 0)  # requests that were not admitted, by the error's code
        self.params_n = Histogram(PARAMS_N_BOUNDS, "request_params_n", "n of a request.")
        self.params_max_tokens = Histogram(lengths, "request_params_max_tokens", "max_tokens of a request.")
        self.step_tokens = Histogram(
            STEP_TOKEN_BOUNDS,
            "iteration_tokens_total",
            "Tokens of prompts that a step started, and tokens that it generated.",
        )

        self.step_times = {  # not in vLLM
            "taken": Histogram(STEP_BOUNDS_S, "step_time", "Seconds that a step took."),
            "predicted": Histogram(STEP_BOUNDS_S, "step_time_predicted", "Seconds that a step was expected to take."),
            "error": Histogram(
                ERROR_BOUNDS, "step_time_error", "Error of the expected time, as a share of the actual."
            ),
        }

    @property
    def all_requests_per_s(self) -> float:
        """Return the requests a second of all engines behind the server, by all of its front ends."""
        return self.own_requests_per_s if self.total_rate is None else self.total_rate()

    @property
    def own_requests_per_s(self) -> float:
        """Return the requests a second that this front end has given to all engines."""
        return sum(metrics.requests_per_s for metrics in self.of_engines)

    def record_startup(self, process: str, seconds: dict[str, float]) -> None:
        """Record the seconds of each phase of a process's start, in order."""
        # Not in place: a thread may be rendering.
        self.startup_s = self.startup_s | {(process, phase): value for phase, value in seconds.items()}

    def record_step(self, stats: EngineStats) -> None:
        """Record one step, as the core reports it."""
        self.last = stats
        if not self.counts_steps:
            return
        self.num_steps += 1
        for name in self.totals:
            self.totals[name] += getattr(stats, name)
        if by_position := stats.num_accepted_by_position:
            accepted = self.accepted_by_position
            accepted += [0] * (len(by_position) - len(accepted))
            for position, number in enumerate(by_position):
                accepted[position] += number
        if stats.num_computed_tokens:
            self.step_tokens.observe(stats.num_prompt_tokens + stats.num_generation_tokens)
        if stats.step_s > 0:
            self.step_times["taken"].observe(stats.step_s)
            self.step_times["predicted"].observe(stats.predicted_step_s)
            self.step_times["error"].observe(abs(stats.predicted_step_s / stats.step_s - 1))

    def record_finished(
        self,
        metrics: RequestMetrics,
        num_prompt: int,
        num_generated: Sequence[int],
        params: SamplingParams | None,
        finish_reason: str | None,
        num_cached: int = 0,
    ) -> None:
        """Record the end of a request: the number of prompt tokens, how many of them were cached, and the tokens of
        each sequence. Phases that the request never reached (an abort in the queue) are not counted. A request for
        vectors has no `params`."""
        reason = finish_reason or "abort"
        self.num_finished[reason] = self.num_finished.get(reason, 0) + 1
        self.prompt_lengths.observe(num_prompt)
        num_generation = sum(num_generated)
        self.generation_lengths.observe(num_generation)
        self.longest_generations.observe(max(num_generated, default=0))
        self.preemptions.observe(metrics.num_preemptions)
        if params is not None:
            self.params_n.observe(params.n)
        if params is not None and params.max_tokens is not None:
            self.params_max_tokens.observe(params.max_tokens)
        intervals = metrics.intervals()
        if "time_in_model_prefill" in intervals:
            self.computed_prompt_lengths.observe(num_prompt - num_cached)
        for name, histogram in self.intervals_s.items():
            if name in intervals:
                histogram.observe(intervals[name])
        num_per_sequence = num_generation / (1 if params is None else params.num_sequences)
        if "time_in_model_decode" in intervals and num_per_sequence > 1:
            self.request_time_per_token_s.observe(intervals["time_in_model_decode"] / (num_per_sequence - 1))

    def render(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus's text format, and their content type."""
        from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

        return generate_latest(self), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics: Prometheus's collector protocol."""
        from prometheus_client import ProcessCollector
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        found: dict[str, Any] = {}
        for metrics in self.of_engines:
            for family in metrics.families():
                if family.name not in found:
                    labels = ["model_name", "engine", *family.labels]
                    found[family.name] = kinds[family.kind](family.name, family.help, labels=labels)
                for of_labels, value in family.values.items():
                    labels = [self.model_name, str(metrics.engine), *of_labels]
                    if isinstance(value, Histogram):
                        found[family.name].add_metric(labels, value.cumulative(), value.sum)
                    else:
                        found[family.name].add_metric(labels, value)
        yield from found.values()
        for collector in (ProcessCollector(registry=None), *self.others):
            yield from collector.collect()

    def families(self) -> Iterator[_Family]:
        """Yield the metrics of this engine alone."""
        for name, help, number in self._gauges():
            yield _Family("gauge", f"vllm:{name}", help, {(): number})
        for field, (name, help) in _COUNTERS.items():
            yield _Family("counter", name, help, {(): self.totals[field]})
        num_hits = self.totals["num_prefix_hits"]
        yield _Family("counter", "vllm:prompt_tokens_cached", "Prompt tokens found in the cache.", {(): num_hits})
        sources = {("local_compute",): self.totals["num_prompt_tokens"] - num_hits, ("local_cache_hit",): num_hits}
        help = "Prompt tokens, computed or found in the cache."
        yield _Family("counter", "vllm:prompt_tokens_by_source", help, sources, ("source",))
        reasons = {("capacity",): self.last.num_waiting - self.last.num_deferred, ("deferred",): self.last.num_deferred}
        help = "Requests that wait for their turn, or until their grammar, adapter or media are prepared."
        yield _Family("gauge", "vllm:num_requests_waiting_by_reason", help, reasons, ("reason",))
        states = {(name,): int(level == self.sleep_level) for level, name in enumerate(SLEEP_STATES)}
        help = "1 for the state that the engine is in."
        yield _Family("gauge", "vllm:engine_sleep_state", help, states, ("sleep_state",))
        rejected = {(reason,): number for reason, number in self.num_rejected.items()}
        help = "Requests that were refused because of the load, by the code of the error."
        yield _Family("counter", "vllm:admission_rejections", help, rejected, ("reason",))
        accepted = {(str(position),): number for position, number in enumerate(self.accepted_by_position)}
        help = "Draft tokens that the model accepted, by position in the draft."
        yield _Family("counter", POSITIONS, help, accepted or {("0",): 0}, ("position",))
        finished = {(reason,): number for reason, number in self.num_finished.items()}
        help = "Requests that ended, by reason."
        yield _Family("counter", "vllm:request_success", help, finished, ("finished_reason",))
        for name, help, values in self._histograms():
            yield _Family("histogram", name, help, {(): values})
        if self.cache_config:
            config = {tuple(map(str, self.cache_config.values())): 1}
            help = "The KV cache's configuration."
            yield _Family("gauge", "vllm:cache_config_info", help, config, tuple(self.cache_config))
        help = "Adapters of the requests that run and wait, as labels; the value is the time."
        running, waiting = (",".join(names) for names in (self.last.running_adapters, self.last.waiting_adapters))
        adapters = {(str(self.max_loras), running, waiting): time.time()}
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        yield _Family("gauge", "vllm:lora_requests_info", help, adapters, labels)
        # Metrics that vLLM has no names for.
        help = "Time of the phases of the start."
        yield _Family("gauge", "octavo:startup_seconds", help, self.startup_s, ("process", "phase"))
        help = "Packed weights and KV cache, used or not."
        num_bytes = {(kind,): number for kind, number in self.memory_bytes.items()}
        yield _Family("gauge", "octavo:memory_bytes", help, num_bytes, ("kind",))
        help = "Blocks of the KV cache on disk, of all servers that share the folder."
        yield _Family("gauge", "octavo:disk_cache_bytes", help, {(): self.last.disk_bytes})
        help = "Blocks of the KV cache on disk that sessions keep."
        yield _Family("gauge", "octavo:disk_cache_kept_bytes", help, {(): self.last.disk_kept_bytes})
        help = "Sessions whose blocks this engine can free."
        yield _Family("gauge", "octavo:disk_cache_sessions", help, {(): self.last.num_disk_sessions})
        help = "Adapters that are held, by place."
        held = {("host",): self.last.num_adapters_on_host, ("device",): len(self.last.resident_adapters)}
        yield _Family("gauge", "octavo:adapters", help, held, ("place",))
        help = "Times that the engine core died and was started again."
        yield _Family("counter", "octavo:engine_restarts", help, {(): self.num_restarts * self.counts_steps})
        help = "Requests that continued in another engine core after theirs had died."
        yield _Family("counter", "octavo:requests_continued", help, {(): self.num_continued})

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
        help = "Prompt tokens computed per second, lately."
        yield "avg_prompt_throughput_toks_per_s", help, self.prompt_tokens_per_s
        help = "Tokens generated per second, lately."
        yield "avg_generation_throughput_toks_per_s", help, self.generation_tokens_per_s

    def _histograms(self) -> Iterator[tuple[str, str, Histogram]]:
        for histogram in (*vars(self).values(), *self.intervals_s.values()):
            if isinstance(histogram, Histogram):
                yield f"vllm:{histogram.name}", histogram.help, histogram
        help = "The same as inter_token_latency_seconds, under its older name."
        yield "vllm:time_per_output_token_seconds", help, self.inter_token_latency_s
        for histogram in self.step_times.values():
            yield f"octavo:{histogram.name}", histogram.help, histogram
