"""Write the Grafana dashboards of this folder from the metrics that Octavo describes: `python deploy/grafana/make.py`.

A panel names a metric; its kind (gauge, counter, histogram), its help and the unit in its name make query, text and
axis. Every metric must be in a panel or in `LEFT_OUT`, so a new one cannot be forgotten. The tests run this and compare
with what is checked in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.metrics.http_metrics import HttpMetrics
from octavo.metrics.prometheus import EngineMetrics

if TYPE_CHECKING:
    from prometheus_client import Metric

FOLDER = Path(__file__).parent / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
QUANTILES = (0.5, 0.95, 0.99)
WIDTH, HEIGHT = 8, 8  # of a panel, on Grafana's grid of 24 columns
# Metrics without a panel: older names of others, shares that a panel computes itself, and labels that hold text.
LEFT_OUT = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
    "vllm:avg_prompt_throughput_toks_per_s": "rate of vllm:prompt_tokens_total",
    "vllm:avg_generation_throughput_toks_per_s": "rate of vllm:generation_tokens_total",
    "vllm:prompt_tokens_cached": "vllm:prefix_cache_hits",
    "vllm:prompt_tokens_by_source": "vllm:prompt_tokens and vllm:prefix_cache_hits",
    "vllm:request_prefill_kv_computed_tokens": "the same, by request",
    "vllm:num_requests_waiting_by_reason": "vllm:num_requests_waiting",
    "vllm:engine_sleep_state": "state, as labels",
    "vllm:lora_requests_info": "names of adapters, as labels",
    "process_virtual_memory_bytes": "process_resident_memory_bytes",
    "process_start_time_seconds": "time since it is shown",
    "process_max_fds": "shown beside process_open_fds",
}


@dataclass(frozen=True)
class Panel:
    """A picture: queries with their legends. `metrics` are those that it is there to show."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    description: str = ""
    metrics: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Dashboard:
    """A page of rows of panels."""

    uid: str
    title: str
    description: str
    rows: Mapping[str, list[Panel]] = field(default_factory=dict)


def described() -> dict[str, Metric]:
    """The metrics of a server, by name (a counter's without `_total`)."""
    metrics = EngineMetrics("model", 4096)
    metrics.others.append(HttpMetrics())
    return {metric.name: metric for metric in metrics.collect()}


METRICS = described()


def unit_of(name: str) -> str:
    """Grafana's unit for a metric, by the end of its name, as Prometheus's conventions have it."""
    for end, unit in {
        "_seconds": "s",
        "_bytes": "bytes",
        "_perc": "percentunit",
        "step_time_error": "percentunit",
    }.items():
        if name.endswith(end):
            return unit
    return "s" if name.startswith("octavo:step_time") else "short"


def select(name: str) -> str:
    """Label matchers: metrics of the process and of HTTP know no model."""
    is_of_model = name.startswith(("vllm:", "octavo:")) and "http" not in name
    of_model = 'model_name=~"$model_name", ' if is_of_model else ""
    return f'{{{of_model}instance=~"$instance"}}'


def rate(name: str, by: str = "", end: str = "_total") -> str:
    return f"sum {f'by ({by}) ' if by else ''}(rate({name}{end}{select(name)}[$__rate_interval]))"


def quantile(name: str, q: float, by: str = "") -> str:
    return f"histogram_quantile({q}, {rate(name, f'{by}, le' if by else 'le', '_bucket')})"


def mean(name: str) -> str:
    return f"{rate(name, end='_sum')} / {rate(name, end='_count')}"


def panel(name: str, title: str = "", by: str = "", of_engines: str = "max") -> Panel:
    """One metric, a line per value of `by`: a gauge as it is, a counter's rate, a histogram's quantiles and mean. Of
    engines that share a line gauges show the highest, or what `of_engines` says."""
    metric, unit = METRICS[name], unit_of(name)
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", ") if label) or "all"
    queries: tuple[tuple[str, str], ...]
    if metric.type == "histogram":
        queries = (*((quantile(name, q), f"p{q * 100:g}") for q in QUANTILES), (mean(name), "mean"))
    elif metric.type == "counter":
        queries, unit = ((rate(name, by), legend),), "percentunit" if unit == "s" else "cps"
    else:
        by = by or "instance"
        queries = ((f"{of_engines} by ({by}) ({name}{select(name)})", legend if legend != "all" else "{{instance}}"),)
    return Panel(title or readable(name), queries, unit, metric.documentation, frozenset({name}))


def readable(name: str) -> str:
    words = name.removeprefix("vllm:").removeprefix("octavo:").replace("_perc", "").removesuffix("_total").split("_")
    words = [word for word in words if word not in ("num", "seconds", "bytes")]
    return " ".join(words).capitalize()


def together(title: str, unit: str, queries: dict[str, str], *names: str) -> Panel:
    """Several metrics in one panel: legends with their queries."""
    text = " ".join(f"{name}: {METRICS[name].documentation}" for name in names)
    return Panel(title, tuple((query, legend) for legend, query in queries.items()), unit, text, frozenset(names))


def share(title: str, part: str, whole: str) -> Panel:
    queries = {"share": f"{rate(part)} / {rate(whole)}"}
    return together(title, "percentunit", queries, part, whole)


def total(name: str) -> str:
    return f"sum ({name}{select(name)})"


def service() -> Dashboard:
    """What users of the service notice; titles as vLLM's dashboard has them."""
    http = "http_requests"
    return Dashboard("octavo-service", "Octavo: service", "What users of the service notice.", {
        "Latency": [
            panel("vllm:e2e_request_latency_seconds", "E2E Request Latency"),
            panel("vllm:time_to_first_token_seconds", "Time To First Token Latency"),
            panel("vllm:inter_token_latency_seconds", "Time Per Output Token Latency"),
            panel("vllm:request_time_per_output_token_seconds", "Mean Time Per Output Token of a Request"),
            together("Requests Prefill and Decode Time", "s", {
                "prefill": mean("vllm:request_prefill_time_seconds"),
                "decode": mean("vllm:request_decode_time_seconds"),
            }, "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds"),
            panel("vllm:request_queue_time_seconds", "Queue Time"),
        ],
        "Load": [
            together("Token Throughput", "cps", {
                "prompt": rate("vllm:prompt_tokens"), "generation": rate("vllm:generation_tokens"),
            }, "vllm:prompt_tokens", "vllm:generation_tokens"),
            together("Scheduler State", "short", {
                f"{word}": total(f"vllm:num_requests_{word}") for word in ("running", "waiting", "swapped")
            }, *(f"vllm:num_requests_{word}" for word in ("running", "waiting", "swapped"))),
            panel("vllm:kv_cache_usage_perc", "Cache Utilization"),
            panel("vllm:request_success", "Finish Reason", "finished_reason"),
            panel("vllm:admission_rejections", "Refused because of the Load", "reason"),
            panel("vllm:request_prompt_tokens", "Request Prompt Length"),
            panel("vllm:request_generation_tokens", "Request Generation Length"),
            panel("vllm:request_max_num_generation_tokens", "Max Generation Token in Sequence Group"),
            panel("vllm:request_params_max_tokens", "max_tokens of Requests"),
            panel("vllm:request_params_n", "n of Requests"),
        ],
        "HTTP": [
            panel(http, "Answers by Status", "status"),
            panel(http, "Answers by Route", "handler"),
            panel("octavo:http_errors", "Errors by Code", "code"),
            panel("http_request_duration_seconds", "Duration of Answers"),
        ],
        "Servers": [
            Panel("Up", (('up{instance=~"$instance"}', "{{instance}}"),), description="1 where a scrape succeeded."),
            panel("octavo:engine_restarts", "Engine Restarts", "instance"),
            panel("octavo:requests_continued", "Requests that outlived an Engine", "instance"),
            Panel("Time since Start", ((f"time() - process_start_time_seconds{select('')}", "{{instance}}"),), "s"),
        ],
    })  # fmt: skip


def engine() -> Dashboard:
    """What the engine does in its steps."""
    drafts, accepted = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
    return Dashboard("octavo-engine", "Octavo: engine", "What the engine does in its steps, and with its memory.", {
        "Steps": [
            panel("octavo:step_time"),
            panel("octavo:step_time_predicted"),
            panel("octavo:step_time_error"),
            panel("vllm:iteration_tokens_total", "Tokens of a step"),
            panel("vllm:request_inference_time_seconds"),
        ],
        "KV cache": [
            share("Prompt tokens found in the cache", "vllm:prefix_cache_hits", "vllm:prefix_cache_queries"),
            panel("vllm:num_preemptions"),
            panel("vllm:request_num_preemptions", "Preemptions of a request"),
            panel("vllm:cpu_cache_usage_perc", "Host cache usage"),
            panel("octavo:disk_cache_hits", "Prompt tokens read from disk"),
            panel("octavo:host_cache_hits", "Prompt tokens copied from host memory"),
            together("Cache in host memory: blocks", "cps", {
                word: rate(f"octavo:host_cache_blocks_{word}") for word in ("copied", "dropped")
            }, *(f"octavo:host_cache_blocks_{word}" for word in ("copied", "dropped"))),
            together("Cache on disk: traffic", "Bps", {
                "read": rate("octavo:disk_cache_read_bytes"), "written": rate("octavo:disk_cache_written_bytes"),
                "copied": rate("octavo:disk_cache_copied_bytes"),
            }, "octavo:disk_cache_read_bytes", "octavo:disk_cache_written_bytes", "octavo:disk_cache_copied_bytes"),
            together("Cache on disk: blocks", "cps", {
                word: rate(f"octavo:disk_cache_blocks_{word}") for word in ("written", "dropped", "damaged")
            }, *(f"octavo:disk_cache_blocks_{word}" for word in ("written", "dropped", "damaged"))),
            together("Size of the cache on disk", "bytes", {
                "all": total("octavo:disk_cache_bytes"), "of sessions": total("octavo:disk_cache_kept_bytes"),
            }, "octavo:disk_cache_bytes", "octavo:disk_cache_kept_bytes"),
            panel("octavo:disk_cache_sessions", "Sessions on disk"),
        ],
        "Speculation": [
            share("Share of draft tokens accepted", accepted, drafts),
            panel("vllm:spec_decode_num_drafts", "Drafts"),
            panel("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted by place", "position"),
        ],
        "Adapters": [
            panel("octavo:adapters", by="place", of_engines="sum"),
            panel("octavo:adapter_reads"),
            panel("octavo:adapter_read_seconds", "Time of reading adapters"),
            panel("octavo:adapter_loads"),
            panel("octavo:adapter_evictions"),
        ],
        "Pictures": [
            together(  # a share would be nothing where there are no pictures
                "Pictures, and those whose rows were kept", "cps",
                {"pictures": rate("vllm:mm_cache_queries"), "kept": rate("vllm:mm_cache_hits")},
                "vllm:mm_cache_queries", "vllm:mm_cache_hits",
            ),
            panel("octavo:tower_seconds", "Time of towers"),
        ],
        "Process": [
            panel("octavo:memory_bytes", by="instance, kind", of_engines="sum"),
            panel("process_resident_memory_bytes", "Resident memory of the front end"),
            panel("process_cpu_seconds", "Processors that the front end takes", "instance"),
            together("Open files of the front end", "short", {
                "{{instance}} open": f"process_open_fds{select('process_')}",
                "{{instance}} allowed": f"process_max_fds{select('process_')}",
            }, "process_open_fds"),
            panel("octavo:startup_seconds", "Time of the last start", "process, phase"),
        ],
    })  # fmt: skip


def models() -> Dashboard:
    """Many models side by side: a line each."""
    by, legend = "model_name", "{{model_name}}"

    def each(title: str, query: str, unit: str = "short") -> Panel:
        return Panel(title, ((query, legend),), unit)

    failed = f'vllm:request_success_total{{finished_reason="error", {select("vllm:")[1:]}'
    return Dashboard("octavo-models", "Octavo: models", "Many models side by side, a line each.", {
        "Load": [
            each("Servers", f"count by ({by}) (max by ({by}, instance) (vllm:num_requests_running{select('vllm:')}))"),
            each("Requests running", f"sum by ({by}) (vllm:num_requests_running{select('vllm:')})"),
            each("Requests waiting", f"sum by ({by}) (vllm:num_requests_waiting{select('vllm:')})"),
            each("Tokens generated", rate("vllm:generation_tokens", by), "cps"),
            each("Prompt tokens", rate("vllm:prompt_tokens", by), "cps"),
            each("Fullest KV cache", f"max by ({by}) (vllm:kv_cache_usage_perc{select('vllm:')})", "percentunit"),
        ],
        "Latency and errors": [
            each("Time to first token, p95", quantile("vllm:time_to_first_token_seconds", 0.95, by), "s"),
            each("Time between tokens, p95", quantile("vllm:inter_token_latency_seconds", 0.95, by), "s"),
            each("Whole request, p95", quantile("vllm:e2e_request_latency_seconds", 0.95, by), "s"),
            each("Requests finished", rate("vllm:request_success", by), "cps"),
            each("Requests failed", f"sum by ({by}) (rate({failed}[$__rate_interval]))", "cps"),
            each("Engine restarts", rate("octavo:engine_restarts", by), "cps"),
        ],
    })  # fmt: skip


def dashboards() -> dict[str, Dashboard]:
    """By file name; raises if a metric is in none of them."""
    made = {"service": service(), "engine": engine(), "models": models()}
    shown = {name for dashboard in made.values() for row in dashboard.rows.values() for p in row for name in p.metrics}
    if missing := METRICS.keys() - shown - LEFT_OUT.keys():
        raise ValueError(f"no panel shows {', '.join(sorted(missing))}: add one in {__file__}, or name it in LEFT_OUT")
    return made


def variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name, "type": "query", "datasource": DATASOURCE, "query": {"query": query, "refId": name},
        "definition": query, "refresh": 2, "multi": True, "includeAll": True, "sort": 1,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }  # fmt: skip


def as_json(dashboard: Dashboard) -> dict[str, Any]:
    """Grafana's model of a dashboard, schema version 39 (Grafana 10.4 and later)."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["octavo"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "DS_PROMETHEUS", "label": "Data source", "type": "datasource", "query": "prometheus"},
                variable("model_name", "label_values(vllm:num_requests_running, model_name)"),
                variable("instance", 'label_values(vllm:num_requests_running{model_name=~"$model_name"}, instance)'),
            ]
        },
        "panels": list(_panels(dashboard)),
    }


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for title, row in dashboard.rows.items():
        number += 1
        yield {
            "id": number, "type": "row", "title": title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
        }  # fmt: skip
        y += 1
        per_line = 24 // WIDTH
        for i, made in enumerate(row):
            number += 1
            yield {
                "id": number,
                "type": "timeseries",
                "title": made.title,
                "description": made.description,
                "datasource": DATASOURCE,
                "gridPos": {"x": i % per_line * WIDTH, "y": y + i // per_line * HEIGHT, "w": WIDTH, "h": HEIGHT},
                "fieldConfig": {"defaults": {"unit": made.unit, "min": 0}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
                "targets": [
                    {"refId": chr(ord("A") + j), "datasource": DATASOURCE, "expr": query, "legendFormat": legend}
                    for j, (query, legend) in enumerate(made.queries)
                ],
            }
        y += -(-len(row) // per_line) * HEIGHT


def files() -> dict[str, str]:
    """What belongs in `dashboards/`, by file name."""
    return {f"{name}.json": json.dumps(as_json(made), indent=1) + "\n" for name, made in dashboards().items()}


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).write_text(text)
