"""Prometheus's rules: each alert fires when it should, says what it means, and is silent on a server that does well."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.samples import Sample

from octavo.gateway.catalogue import Catalogue
from octavo.gateway.gateway_metrics import GatewayMetrics
from octavo.gateway.memory_budget import MemoryBudget
from octavo.gateway.models import Models
from octavo.gateway.serve_process import ServeProcess
from octavo.metrics.http_metrics import HttpMetrics
from octavo.metrics.prometheus import EngineMetrics

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus"
ALERTS = {rule["alert"]: rule for rule in yaml.safe_load((RULES / "alerts.yml").read_text())["groups"][0]["rules"]}
GATEWAY = 'instance="a:8000",job="octavo",model="m"'
SERVER, ENGINE = 'instance="a:8000",job="octavo"', 'engine="0",instance="a:8000",job="octavo",model_name="m"'


@dataclass(frozen=True)
class Case:
    """Series (without the labels of a server) by which an alert fires at the end of `minutes`, and others by which it
    does not. Values are a minute apart, in promtool's notation: 0+3x20 is 0, 3, 6, …"""

    bad: dict[str, str]
    good: dict[str, str]
    summary: str
    minutes: int = 20
    labels: str = ENGINE


def histogram(name: str, slow: float, fast: float) -> tuple[dict[str, str], dict[str, str]]:
    """Ten values a minute, all between the bounds `fast` and `slow`, or all below `fast`."""
    buckets = [f'vllm:{name}_bucket{{le="{bound}"}}' for bound in (fast, slow, "+Inf")]
    return dict(zip(buckets, ("0x20", "0+10x20", "0+10x20"), strict=True)), dict.fromkeys(buckets, "0+10x20")


MODEL = 'job="octavo",model_name="m"'
TTFT, ITL = histogram("time_to_first_token_seconds", 10, 2.5), histogram("inter_token_latency_seconds", 1, 0.1)
E2E = histogram("e2e_request_latency_seconds", 240, 60)
OF_MODEL, OF_REPLICA, OF_STATUS = (
    f"octavo_gateway_{{}}{{{{{labels}}}}}".format
    for labels in ('model="m"', 'model="m",replica="{}"', 'model="m",replica="0",status="{}"')
)
READY = {OF_MODEL("model_ready"): "1x20"}
OK_ANSWERS = {'http_requests_total{status="2xx"}': "0+100x20"}
CASES = {
    "OctavoDown": Case(
        {"up": "0x20"}, {"up": "1x20"}, "a:8000 has not answered its scrapes for two minutes.", labels=SERVER
    ),
    "OctavoAbsent": Case(
        {"other": "1x20"}, {"up": "0x20"}, "Prometheus has had no server to scrape for five minutes.", labels=""
    ),
    "OctavoEngineRestarted": Case(
        {"octavo:engine_restarts_total": "0x15 1x5"}, {"octavo:engine_restarts_total": "1x20"},
        "The engine of a:8000 (m) died and was started again.",
    ),
    "OctavoEngineStalled": Case(
        {"vllm:num_requests_running": "2x20", "vllm:iteration_tokens_total_count": "7x20"},
        {"vllm:num_requests_running": "2x20", "vllm:iteration_tokens_total_count": "0+7x20"},
        "a:8000 (m) has requests and has made no step for five minutes.",
    ),
    "OctavoQueueGrows": Case(
        {"vllm:num_requests_waiting": "11+1x20"}, {"vllm:num_requests_waiting": "50 0 50 0 50 0 50 0 50 0 50 0x10"},
        "26 or more requests have waited at a:8000 (m) for five minutes.",
    ),
    "OctavoQueueLong": Case(
        {"vllm:num_requests_waiting": "101x20"}, {"vllm:num_requests_waiting": "100x20"},
        "101 requests wait for m.", labels=MODEL,
    ),
    "OctavoFirstTokenSlow": Case(
        *TTFT, "One in twenty requests for m waits 9.625s or longer for its first token.", labels=MODEL
    ),
    "OctavoTokensSlow": Case(*ITL, "Streams of m stutter: 955ms between tokens.", labels=MODEL),
    "OctavoRequestsSlow": Case(*E2E, "One in a hundred requests for m takes 3m 58s or longer.", labels=MODEL),
    "OctavoCacheFull": Case(
        {"vllm:kv_cache_usage_perc": "0.96x20"}, {"vllm:kv_cache_usage_perc": "1 0.9 1 0.9x17"},
        "The KV cache of a:8000 (m) has been 96% full or more for five minutes.",
    ),
    "OctavoPreemptions": Case(
        {"vllm:num_preemptions_total": "0+12x20"}, {"vllm:num_preemptions_total": "0+3x20"},
        "a:8000 (m) takes blocks from running requests more than once in ten seconds.",
    ),
    "OctavoAnswersFail": Case(
        OK_ANSWERS | {'http_requests_total{status="5xx"}': "0+25x20"},
        OK_ANSWERS | {'http_requests_total{status="5xx"}': "0+5x20"},
        "20% of the answers of octavo are 5xx.", labels='job="octavo"',
    ),
    "OctavoRequestsEndInErrors": Case(
        {'vllm:request_success_total{finished_reason="error"}': "0x15 3x5"},
        {'vllm:request_success_total{finished_reason="error"}': "3x20",
         'vllm:request_success_total{finished_reason="stop"}': "0+9x20"},
        "Requests for m ended in an error of the engine.", labels=MODEL,
    ),
    "OctavoServerRestartsOften": Case(
        {"process_start_time_seconds": "1x5 2x5 3x5 4x5"}, {"process_start_time_seconds": "1x10 2x10"},
        "a:8000 was started 3 times in half an hour.", labels=SERVER,
    ),
    "OctavoFilesRunOut": Case(
        {"process_open_fds": "900x20", "process_max_fds": "1000x20"},
        {"process_open_fds": "700x20", "process_max_fds": "1000x20"},
        "a:8000 has 90% of the files open that it may have.", labels=SERVER,
    ),
    "OctavoGatewayModelDown": Case(
        READY | {OF_REPLICA("replica_up", 0): "0x20", OF_REPLICA("replica_up", 1): "0x20"},
        READY | {OF_REPLICA("replica_up", 0): "0x20", OF_REPLICA("replica_up", 1): "1x20"}
        | {'octavo_gateway_model_ready{model="stopped"}': "0x20"},
        "No replica of m has taken requests from a:8000 for two minutes.", labels=GATEWAY,
    ),
    "OctavoGatewayReplicaDown": Case(
        {OF_REPLICA("replica_up", 1): "0x20"}, {OF_REPLICA("replica_up", 1): "0x9 1 0x9"},
        "Replica 1 of m has taken no requests from a:8000 for ten minutes.", labels=GATEWAY + ',replica="1"',
    ),
    "OctavoGatewayStartsFail": Case(
        {OF_MODEL("failed_starts_total"): "0x15 1x5"}, {OF_MODEL("failed_starts_total"): "1x20"},
        "m could not be started.", labels='job="octavo",model="m"',
    ),
    "OctavoGatewayModelWaits": Case(
        {OF_MODEL("model_requests"): "1x20", OF_MODEL("model_ready"): "0x20"},
        {OF_MODEL("model_requests"): "1x20", OF_MODEL("model_ready"): "0x17 1 0x2"},
        "Requests at a:8000 have waited for m to be started for five minutes.", labels=GATEWAY,
    ),
    "OctavoGatewayAnswersFail": Case(
        {OF_STATUS("requests_total", 200): "0+80x20", OF_STATUS("requests_total", 503): "0+20x20"},
        {OF_STATUS("requests_total", status): "0+33x20" for status in (200, 404, 429)},
        "20% of the answers of octavo are 5xx.", labels='job="octavo"',
    ),
    "OctavoGatewayAnswersBreak": Case(
        {OF_REPLICA("broken_answers_total", 0): "0x3 2x17", OF_REPLICA("resumed_streams_total", 1): "0x3 1x17"},
        # The streams of m are about to continue, and those of n have.
        {OF_REPLICA("broken_answers_total", 0): "0x5 2x15", OF_REPLICA("resumed_streams_total", 1): "0x10 2x10",
         'octavo_gateway_broken_answers_total{model="n",replica="0"}': "0x3 2x17",
         'octavo_gateway_resumed_streams_total{model="n",replica="1"}': "0x3 2x17"},
        "Answers of m broke off, as their replica was lost and no other one continued them.", minutes=10,
        labels='job="octavo",model="m"',
    ),
}  # fmt: skip


def labels_of(text: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', text))


def of_server(series: str) -> str:
    """With the labels that a scrape of a server gives it."""
    name, _, own = series.rstrip("}").partition("{")
    of_engine = name.startswith(("vllm:", "octavo:"))
    return f"{name}{{{','.join(filter(None, (ENGINE if of_engine else SERVER, own)))}}}"


def expected(name: str) -> dict[str, Any]:
    """The alert as Prometheus sends it."""
    return {
        "exp_labels": {**labels_of(CASES[name].labels), **ALERTS[name]["labels"]},
        "exp_annotations": {"summary": CASES[name].summary, "runbook": ALERTS[name]["annotations"]["runbook"]},
    }


def test_promtool_agrees(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool here (Debian: apt-get install --no-install-recommends prometheus)")
    tests = [
        {
            "name": f"{name}, {'bad' if bad else 'good'}",
            "interval": "1m",
            "input_series": [
                {"series": of_server(series), "values": values}
                for series, values in (case.bad if bad else case.good).items()
            ],
            "alert_rule_test": [
                {"alertname": name, "eval_time": f"{case.minutes}m", "exp_alerts": [expected(name)] if bad else []}
            ],
        }
        for name, case in CASES.items()
        for bad in (True, False)
    ]
    # What has been so for five minutes is not said of a server that started two minutes ago.
    tests += [
        {
            "name": f"{name}, young", "interval": "1m",
            "input_series": [
                {"series": of_server(series), "values": f"_x17 {values}"} for series, values in CASES[name].bad.items()
            ],
            "alert_rule_test": [{"alertname": name, "eval_time": "20m", "exp_alerts": []}],
        }
        for name in ALERTS if "min_over_time" in ALERTS[name]["expr"]
    ]  # fmt: skip
    # A model whose replicas are discovered, and there are none.
    name = "OctavoGatewayModelDown"
    tests.append(
        {
            "name": "no replicas",
            "interval": "1m",
            "input_series": [{"series": of_server(series), "values": values} for series, values in READY.items()],
            "alert_rule_test": [{"alertname": name, "eval_time": "20m", "exp_alerts": [expected(name)]}],
        }
    )
    # Releases of one name in two namespaces, of which the greater one does well.
    name = "OctavoAnswersFail"
    series = {("test", "5xx"): "0+5x20", ("test", "2xx"): "0+5x20", ("live", "2xx"): "0+1000x20"}
    failing = expected(name)
    failing["exp_labels"]["namespace"] = "test"
    failing["exp_annotations"]["summary"] = "50% of the answers of octavo are 5xx."
    tests.append({
        "name": "two namespaces", "interval": "1m",
        "input_series": [
            {"series": f'http_requests_total{{job="octavo",namespace="{where}",status="{status}"}}', "values": values}
            for (where, status), values in series.items()
        ],
        "alert_rule_test": [{"alertname": name, "eval_time": "20m", "exp_alerts": [failing]}],
    })  # fmt: skip
    rules = [str(RULES / name) for name in ("recording.yml", "alerts.yml")]
    (tmp_path / "tests.yml").write_text(json.dumps({"rule_files": rules, "evaluation_interval": "1m", "tests": tests}))
    for command in (
        ["check", "config", RULES / "prometheus.yml"],
        ["check", "rules", *rules],
        ["test", "rules", tmp_path / "tests.yml"],
    ):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_and_a_section_that_says_what_to_do() -> None:
    assert CASES.keys() == ALERTS.keys()
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / "alerts.md").read_text(), re.MULTILINE)
    for name, rule in ALERTS.items():
        assert name in headings
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{name.lower()}"


def test_rules_ask_for_series_that_a_server_has() -> None:
    engine = EngineMetrics("m", 128)
    http = HttpMetrics()
    http.record("POST", "/v1/completions", 200, 1.0)
    engine.others.append(http)
    samples: list[Sample] = [sample for metric in engine.collect() for sample in metric.samples]
    recorded = {rule["record"] for rule in yaml.safe_load((RULES / "recording.yml").read_text())["groups"][0]["rules"]}
    models = Models(Catalogue({}), MemoryBudget(None), ServeProcess.start, replica_timeout_s=1.0)
    of_gateway = re.findall(r"^# TYPE (\S+)", GatewayMetrics(models).render().decode(), re.MULTILINE)
    known = {sample.name for sample in samples} | recorded | {"up", *of_gateway}
    text = (RULES / "recording.yml").read_text() + (RULES / "alerts.yml").read_text()
    rules = [
        rule for part in text.split("groups:")[1:] for rule in yaml.safe_load("groups:" + part)["groups"][0]["rules"]
    ]
    asked = {
        name
        for rule in rules
        for name in re.findall(
            r"\b(?:vllm|octavo|model|job):\w+(?::\w+)?|\b(?:process|http|octavo)_\w+\b(?!:)", rule["expr"]
        )
    }
    assert asked, "the pattern finds names"
    assert asked <= known, asked - known
