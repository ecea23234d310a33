"""The metrics: their names, what is counted when, and that two engines do not meet."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from octavo.metrics.prometheus import EngineMetrics, Histogram, length_bounds
from octavo.outputs import RequestMetrics
from octavo.sampling_params import SamplingParams
from octavo.stats import EngineStats

GAUGES = {
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "gpu_cache_usage_perc",
    "kv_cache_usage_perc",
    "cpu_cache_usage_perc",
    "avg_prompt_throughput_toks_per_s",
    "avg_generation_throughput_toks_per_s",
    "cache_config_info",
    "lora_requests_info",
    "engine_sleep_state",
    "num_requests_waiting_by_reason",
}
COUNTERS = {
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "prompt_tokens_by_source_total",
    "generation_tokens_total",
    "request_success_total",
    "num_preemptions_total",
    "admission_rejections_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "mm_cache_queries_total",
    "mm_cache_hits_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "spec_decode_num_accepted_tokens_total",
}
HISTOGRAMS = {
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_prefill_kv_computed_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_num_preemptions",
    "request_params_n",
    "request_params_max_tokens",
    "iteration_tokens_total",
}


OWN_HISTOGRAMS = {"step_time", "step_time_predicted", "step_time_error"}


def test_times_of_steps_are_beside_what_was_predicted() -> None:
    metrics = EngineMetrics("model", 100)
    metrics.record_step(EngineStats(step_s=0.04, predicted_step_s=0.05))
    metrics.record_step(EngineStats())  # nothing ran
    found = samples(metrics)
    assert {name: found[f"octavo:{name}_count"] for name in OWN_HISTOGRAMS} == dict.fromkeys(OWN_HISTOGRAMS, 1)
    assert (found["octavo:step_time_sum"], found["octavo:step_time_predicted_sum"]) == (0.04, 0.05)
    assert abs(found["octavo:step_time_error_sum"] - 0.25) < 1e-9


def test_accepted_guesses_are_counted_by_their_place() -> None:
    metrics = EngineMetrics("model", 100)
    metrics.record_step(
        EngineStats(num_drafts=1, num_draft_tokens=4, num_accepted_tokens=2, num_accepted_by_position=[1, 1])
    )
    metrics.record_step(
        EngineStats(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=1, num_accepted_by_position=[1])
    )
    found = samples(metrics)
    names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")
    assert [found[f"spec_decode_{name}"] for name in names] == [3, 10, 3]
    by_place = [found[f"spec_decode_num_accepted_tokens_per_pos_total{{position={i}}}"] for i in (0, 1)]
    assert by_place == [2, 1]


def samples(metrics: EngineMetrics) -> dict[str, float]:
    """Values by name and labels other than model_name and engine, without those of the process."""
    result = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            if family.name.startswith("process_"):
                continue
            assert (sample.labels["model_name"], sample.labels["engine"]) == (metrics.model_name, "0")
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("engine", "model_name"))
            result[sample.name.removeprefix("vllm:") + (f"{{{labels}}}" if labels else "")] = sample.value
    return result


def finished(**times: float) -> RequestMetrics:
    return RequestMetrics(**{"arrival_time": 10.0, **times})  # type: ignore[arg-type]


def test_every_metric_has_its_name_and_type_from_the_start() -> None:
    metrics = EngineMetrics("m", 100)
    metrics.cache_config = {"block_size": 16}
    types = dict(re.findall(r"# TYPE vllm:(\S+) (\S+)", metrics.render()[0].decode()))
    assert types == (
        dict.fromkeys(GAUGES, "gauge") | dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(HISTOGRAMS, "histogram")
    )


def test_gauges_are_of_the_last_step_and_counters_of_all() -> None:
    metrics = EngineMetrics("m", 100)
    metrics.record_step(
        EngineStats(
            num_running=5, num_preemptions=1, num_prompt_tokens=30, num_computed_tokens=22, num_prefix_queries=40
        )
    )
    metrics.record_step(
        EngineStats(
            num_running=2,
            num_waiting=3,
            num_deferred=1,
            num_swapped=1,
            num_blocks=10,
            num_blocks_used=4,
            num_host_blocks=8,
            num_host_blocks_used=2,
            num_generation_tokens=5,
            num_computed_tokens=5,
            num_prefix_queries=10,
            num_prefix_hits=16,
        )
    )
    values = samples(metrics)
    assert (values["num_requests_running"], values["num_requests_waiting"], values["num_requests_swapped"]) == (2, 3, 1)
    assert values["kv_cache_usage_perc"] == values["gpu_cache_usage_perc"] == 0.4
    assert values["cpu_cache_usage_perc"] == 0.25
    assert (values["prompt_tokens_total"], values["generation_tokens_total"]) == (30, 5)
    assert (values["prefix_cache_queries_total"], values["prefix_cache_hits_total"]) == (50, 16)
    assert [values[f"num_requests_waiting_by_reason{{reason={name}}}"] for name in ("capacity", "deferred")] == [2, 1]
    sources = [
        values[f"prompt_tokens_by_source_total{{source={name}}}"] for name in ("local_compute", "local_cache_hit")
    ]
    assert (sources, values["prompt_tokens_cached_total"]) == ([14, 16], 16)
    assert values["num_preemptions_total"] == 1
    assert (values["iteration_tokens_total_count"], values["iteration_tokens_total_sum"]) == (2, 35), (
        "prompts and answers"
    )


def test_a_finished_request_is_cut_into_its_phases() -> None:
    metrics = EngineMetrics("m", 100)
    times = finished(first_scheduled_time=10.5, first_token_time=12.0, last_token_time=14.0, finished_time=14.25)
    metrics.record_finished(times, 7, [5], SamplingParams(n=1, max_tokens=50), "length", 4)
    values = samples(metrics)
    assert values["request_queue_time_seconds_sum"] == 0.5
    assert values["request_prefill_time_seconds_sum"] == 1.5
    assert values["request_decode_time_seconds_sum"] == 2.0
    assert values["request_inference_time_seconds_sum"] == 3.5
    assert values["e2e_request_latency_seconds_sum"] == 4.25
    assert values["request_time_per_output_token_seconds_sum"] == 0.5, "four tokens after the first, in two seconds"
    assert (values["request_prompt_tokens_sum"], values["request_prefill_kv_computed_tokens_sum"]) == (7, 3)
    assert values["request_generation_tokens_sum"] == 5
    assert values["request_params_max_tokens_sum"] == 50
    assert values["request_success_total{finished_reason=length}"] == 1
    assert values["request_success_total{finished_reason=stop}"] == 0


def test_a_request_aborted_in_the_queue_counts_no_phase_that_it_never_reached() -> None:
    metrics = EngineMetrics("m", 100)
    metrics.record_finished(finished(finished_time=11.0), 7, [0], SamplingParams(max_tokens=None), "abort")
    values = samples(metrics)
    assert values["request_success_total{finished_reason=abort}"] == 1
    assert values["e2e_request_latency_seconds_count"] == 1
    for name in ("request_queue_time", "request_prefill_time", "request_decode_time", "request_time_per_output_token"):
        assert values[f"{name}_seconds_count"] == 0
    assert values["request_params_max_tokens_count"] == values["request_prefill_kv_computed_tokens_count"] == 0


def test_a_request_for_vectors_has_no_settings_of_sampling() -> None:
    metrics = EngineMetrics("m", 100)
    times = finished(first_scheduled_time=10.5, first_token_time=12.0, last_token_time=12.0, finished_time=12.0)
    metrics.record_finished(times, 7, [], None, "stop")
    values = samples(metrics)
    assert values["request_success_total{finished_reason=stop}"] == values["request_prompt_tokens_count"] == 1
    assert values["request_params_n_count"] == values["request_params_max_tokens_count"] == 0


def test_latencies_are_recorded_a_step_at_a_time() -> None:
    metrics = EngineMetrics("m", 100)
    metrics.ttft_s.observe_all([0.05, 0.2])
    metrics.inter_token_latency_s.observe_all([0.02] * 64)
    values = samples(metrics)
    assert values["time_to_first_token_seconds_count"] == 2
    assert values["time_to_first_token_seconds_bucket{le=0.06}"] == 1
    assert values["inter_token_latency_seconds_count"] == 64
    assert values["inter_token_latency_seconds_bucket{le=0.01}"] == 0
    assert values["inter_token_latency_seconds_bucket{le=0.025}"] == 64
    assert values["time_per_output_token_seconds_count"] == 64, "the older name"
    assert values["request_time_per_output_token_seconds_count"] == 0


def test_a_bucket_includes_its_bound() -> None:
    histogram = Histogram((1, 2))
    histogram.observe_all([1, 2, 3])
    assert histogram.cumulative() == [("1.0", 1), ("2.0", 2), ("+Inf", 3)]


def test_length_buckets_go_up_to_the_longest_sequence() -> None:
    assert length_bounds(100) == [1, 2, 5, 10, 20, 50, 100]
    assert length_bounds(2048) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]


def test_two_engines_count_apart() -> None:
    one, two = EngineMetrics("a", 100), EngineMetrics("b", 100)
    one.record_step(EngineStats(num_generation_tokens=3))
    assert samples(one)["generation_tokens_total"] == 3
    assert samples(two)["generation_tokens_total"] == 0


def test_names_that_labels_cannot_hold_are_escaped() -> None:
    metrics = EngineMetrics('a "quoted"\\path', 100)
    assert samples(metrics)["num_requests_running"] == 0


def test_the_documentation_names_every_metric() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    missing = [name for name in GAUGES | COUNTERS | HISTOGRAMS if name not in text]
    assert not missing
