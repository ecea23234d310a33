"""Grafana's dashboards: what is checked in is what the program makes, and each of their queries finds data."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import openai
import pytest

from tests.e2e.prometheus import MISSING, Prometheus, running_prometheus
from tests.e2e.server import MODEL, Server, running_server
from tests.waiting import wait_until

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("octavo_dashboards", GRAFANA / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
    return module


def test_what_is_checked_in_is_what_the_program_makes(make: ModuleType) -> None:
    checked_in = {path.name: path.read_text() for path in (GRAFANA / "dashboards").iterdir()}
    assert checked_in == make.files(), "run python deploy/grafana/make.py"


def test_a_metric_without_a_panel_is_noticed(make: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(make.METRICS, "octavo:new_seconds", next(iter(make.METRICS.values())))
    with pytest.raises(ValueError, match="no panel shows octavo:new_seconds"):
        make.dashboards()


def test_panels_stand_beside_each_other_and_explain_themselves() -> None:
    for path in (GRAFANA / "dashboards").iterdir():
        places = set()
        panels = json.loads(path.read_text())["panels"]
        for panel in panels:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & places and max(x for x, _ in cells) < 24, panel["title"]
            places |= cells
        assert len({panel["id"] for panel in panels}) == len(panels)


def wait_for(prometheus: Prometheus, expression: str, value: float) -> None:
    def found() -> list[float]:
        return [number for _, number in prometheus.query(expression)]

    wait_until(lambda: found() == [value], of_what=lambda: f"{expression} is {found()}, not {value}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("dashboards"), "--max-model-len", "512") as server:
        yield server


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has scraped the server before and after it answered."""
    with running_prometheus(
        tmp_path_factory.mktemp("prometheus"), octavo=server.url.removeprefix("http://")
    ) as prometheus:
        if prometheus is None:
            pytest.skip(MISSING)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 32, "temperature": 0.0}
        extra: dict[str, object] = {"ignore_eos": True}
        for wave in (1, 2):  # the first value of a series is no increase
            answer = client.completions.create(**asked, extra_body=extra).choices[0].text  # type: ignore[call-overload]
            with pytest.raises(openai.NotFoundError):  # for the panel of errors
                client.models.retrieve("none")
            wait_for(prometheus, "sum(vllm:request_success_total)", wave)
            wait_for(prometheus, "sum(http_requests_total)", 2 * wave)
            extra["prediction"] = {"type": "content", "content": answer}  # guesses, for the panels that show them
        yield prometheus


def finds_data(prometheus: Prometheus, query: str) -> bool:
    query = query.replace("$__rate_interval", "5m")
    assert "$" not in query
    return any(math.isfinite(value) for _, value in prometheus.query(query))


@pytest.mark.slow
@pytest.mark.long
def test_every_query_of_every_panel_finds_data(prometheus: Prometheus) -> None:
    empty = []
    for path in sorted((GRAFANA / "dashboards").iterdir()):
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"].replace("$model_name", ".+").replace("$instance", ".+")
                if not finds_data(prometheus, query):
                    empty.append(f"{dashboard['title']}, {panel['title']}: {query}")
    assert not empty, "\n".join(empty)


# What the panels of vLLM's own dashboard ask for (its examples' prometheus_grafana/grafana.json), and the newer name of
# one metric. OF is the model's label as they have it.
OF = f'{{model_name="{MODEL}"}}'
LATENCIES = ("e2e_request_latency_seconds", "time_per_output_token_seconds", "time_to_first_token_seconds")
RATES = (
    "prompt_tokens_total", "generation_tokens_total", "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum",
)  # fmt: skip
LENGTHS = ("request_prompt_tokens", "request_generation_tokens")
NOW = ("num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc", "kv_cache_usage_perc")
VLLM_QUERIES = [
    *(
        f"histogram_quantile({share}, sum by(le) (rate(vllm:{name}_bucket{OF}[$__rate_interval])))"
        for name in LATENCIES
        for share in (0.99, 0.95, 0.9, 0.5)
    ),
    *(
        f"rate(vllm:{name}_sum{OF}[$__rate_interval]) / rate(vllm:{name}_count{OF}[$__rate_interval])"
        for name in LATENCIES
    ),
    *(f"rate(vllm:{name}{OF}[$__rate_interval])" for name in RATES),
    *(f"sum by(le) (increase(vllm:{name}_bucket{OF}[$__rate_interval]))" for name in LENGTHS),
    f"sum by(finished_reason) (increase(vllm:request_success_total{OF}[$__rate_interval]))",
    *(f"vllm:{name}{OF}" for name in NOW),
]


@pytest.mark.long
@pytest.mark.slow
def test_no_panel_of_vllms_dashboard_is_empty(prometheus: Prometheus) -> None:
    assert [query for query in VLLM_QUERIES if not finds_data(prometheus, query)] == []
