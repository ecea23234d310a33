"""What a real server counts under a known load, read from its text and through a real Prometheus that scrapes it."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.prometheus import MISSING, Prometheus, running_prometheus
from tests.e2e.server import MODEL, Server, running_server
from tests.ports import held_port
from tests.waiting import wait_until, within

pytestmark = pytest.mark.slow

NUM_REQUESTS = 12
PER_REQUEST = [
    "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
    "request_prompt_tokens", "request_generation_tokens", "request_params_n",
]  # fmt: skip


@dataclass
class Load:
    """What the clients of the load have seen."""

    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)


def prometheus_values(prometheus: Prometheus) -> dict[str, float]:
    """All samples of vLLM's names, as `text_values` has them."""
    rows = prometheus.query('{__name__=~"vllm:.*",job="server"}')
    return {sample_name(labels.pop("__name__"), labels): value for labels, value in rows}


def sample_name(name: str, labels: dict[str, str]) -> str:
    shown = {k: v for k, v in labels.items() if k not in ("engine", "model_name", "instance", "job") and v}
    inside = ",".join(f"{k}={float(v) if k == 'le' else v}" for k, v in sorted(shown.items()))
    return name.removeprefix("vllm:") + (f"{{{inside}}}" if inside else "")


def text_values(server: Server) -> dict[str, float]:
    """Values by name and labels other than `engine` and `model_name`."""
    families = text_string_to_metric_families(server.get("/metrics")[1])
    return {sample_name(s.name, s.labels): s.value for f in families for s in f.samples if s.name.startswith("vllm:")}


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return held_port()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[Server]:
    with running_server(
        tmp_path_factory.mktemp("metrics"), "--max-model-len", "1024", "--max-num-seqs", "4",
        "--enable-prometheus", "--prometheus-port", str(metrics_port),
        "--speculative-config.method", "none",  # each output is a token, so that times between them can be counted
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def prometheus(
    tmp_path_factory: pytest.TempPathFactory, server: Server, metrics_port: int
) -> Iterator[Prometheus | None]:
    """Scrapes the server from before its load; None where there is no Prometheus."""
    targets = {"server": server.url.removeprefix("http://"), "own port": f"127.0.0.1:{metrics_port}"}
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), **targets) as prometheus:
        yield prometheus


@pytest.fixture(scope="module")
def load(server: Server, prometheus: Prometheus | None) -> Load:
    """Twelve streams, and a request whose time is up at once."""
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=within(120))
    load = Load()

    async def stream(i: int) -> None:
        begun = time.monotonic()
        chunks = await client.completions.create(
            model=MODEL, prompt=f"{i} is a number. " * (i + 1), max_tokens=20 + i, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        first = None
        async for chunk in chunks:
            if chunk.choices and first is None:
                first = time.monotonic() - begun
            if chunk.usage is not None:
                load.prompt_tokens.append(chunk.usage.prompt_tokens)
                load.output_tokens.append(chunk.usage.completion_tokens)
        assert first is not None
        load.ttft_s.append(first)
        load.e2e_s.append(time.monotonic() - begun)

    async def run() -> None:
        streams = [asyncio.create_task(stream(i)) for i in range(NUM_REQUESTS)]
        begun = time.monotonic()
        left = await client.completions.create(model=MODEL, prompt="Left", extra_body={"timeout": 1e-6})
        load.e2e_s.append(time.monotonic() - begun)
        assert left.choices[0].finish_reason == "abort"
        await asyncio.gather(*streams)

    asyncio.run(run())
    server.wait_until_idle()
    return load


def check(values: dict[str, float], load: Load) -> None:
    """The metrics of a server that has had this load and nothing else."""

    def count(name: str) -> float:
        return values[f"{name}_count"]

    def total(name: str) -> float:
        return values[f"{name}_sum"]

    assert values["request_success_total{finished_reason=length}"] == NUM_REQUESTS
    assert values["request_success_total{finished_reason=abort}"] == 1
    assert values["request_success_total{finished_reason=error}"] == 0
    # The one whose time was up was never scheduled, or has had a step.
    for name in PER_REQUEST:
        assert NUM_REQUESTS <= count(name) <= NUM_REQUESTS + 1, name
        assert values[f"{name}_bucket{{le=inf}}"] == count(name)
    assert count("e2e_request_latency_seconds") == NUM_REQUESTS + 1
    assert count("request_time_per_output_token_seconds") == NUM_REQUESTS
    assert total("request_params_max_tokens") == sum(load.output_tokens) + 16
    for counted, name, seen in (
        ("prompt_tokens_total", "request_prompt_tokens", load.prompt_tokens),
        ("generation_tokens_total", "request_generation_tokens", load.output_tokens),
    ):
        assert sum(seen) <= values[counted] <= sum(seen) + 16, "as many as the other one may have"
        assert sum(seen) <= total(name) <= sum(seen) + 16
    num_later_tokens = sum(load.output_tokens) - NUM_REQUESTS
    assert num_later_tokens <= count("inter_token_latency_seconds") <= num_later_tokens + 16
    assert count("time_per_output_token_seconds") == count("inter_token_latency_seconds")
    # A request's phases are its time: sums of sums, whatever the machine.
    queue, prefill = total("request_queue_time_seconds"), total("request_prefill_time_seconds")
    decode = total("request_decode_time_seconds")
    assert total("time_to_first_token_seconds") == pytest.approx(queue + prefill, rel=1e-6)
    assert total("request_inference_time_seconds") == pytest.approx(prefill + decode, rel=1e-6)
    assert total("inter_token_latency_seconds") == pytest.approx(decode, rel=1e-6)
    assert queue + prefill + decode <= total("e2e_request_latency_seconds") * 1.000001
    # Eight of twelve waited for the first four, and nobody saw an answer before the server had it.
    assert queue > 0
    assert total("time_to_first_token_seconds") <= sum(load.ttft_s)
    assert total("e2e_request_latency_seconds") <= sum(load.e2e_s)
    # Now all is at rest.
    for gauge in ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc"):
        assert values[gauge] == 0


def test_the_text_says_what_the_clients_have_seen(server: Server, load: Load) -> None:
    check(text_values(server), load)


def test_the_port_of_its_own_says_the_same(server: Server, load: Load, metrics_port: int) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as response:
        own = response.read().decode()
    assert _without_time(own) == _without_time(server.get("/metrics")[1])


def _without_time(text: str) -> str:
    """Nor what the server's own process takes, or which requests for metrics it has answered meanwhile."""
    return re.sub(r"(?m)^(vllm:lora_requests_info\{.*\}|process_\w+) \S+$", r"\1", text)


def test_prometheus_has_scraped_what_the_clients_have_seen(
    server: Server, load: Load, prometheus: Prometheus | None
) -> None:
    if prometheus is None:
        pytest.skip(MISSING)
    expected = text_values(server)

    def has_all() -> bool:
        values = prometheus_values(prometheus)
        has_ended = not values["num_requests_running"]
        return has_ended and values["e2e_request_latency_seconds_count"] == NUM_REQUESTS + 1

    wait_until(has_all)
    values = prometheus_values(prometheus)
    assert values.keys() == expected.keys()
    check(values, load)
    types = {name: entries[0]["type"] for name, entries in prometheus.get("/api/v1/metadata").items()}
    found = {name: types[name.removesuffix("_total") if name not in types else name] for name in TYPES}
    assert found == TYPES
    # The questions that dashboards ask.
    ((_, running),) = prometheus.query('max_over_time(vllm:num_requests_running{job="server"}[5m])')
    assert 0 <= running <= 4
    ask = 'histogram_quantile(0.5, sum by (le) (vllm:{}_bucket{{job="server"}}))'
    ((_, median),) = prometheus.query(ask.format("time_to_first_token_seconds"))
    assert median > 0
    ((_, tokens),) = prometheus.query('increase(vllm:generation_tokens_total{job="server"}[5m])')
    assert tokens > 0


TYPES = {
    **dict.fromkeys((f"vllm:{name}" for name in PER_REQUEST), "histogram"),
    "vllm:iteration_tokens_total": "histogram",
    "vllm:num_requests_running": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:generation_tokens_total": "counter",
    "vllm:request_success_total": "counter",
    "vllm:prefix_cache_hits_total": "counter",
}  # fmt: skip
