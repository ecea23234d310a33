"""Spans of requests, as an OpenTelemetry collector receives them."""

from __future__ import annotations

import importlib.util
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from octavo.entrypoints.http.server_args import ServerArgs
from octavo.errors import ConfigError, EngineDeadError
from tests.entrypoints.fake_engine import MODEL, FakeEngine, serving
from tests.leaving import ask_and_leave
from tests.waiting import wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Receives spans over OTLP: `spans` of requests with their attributes, `phases` below them, `resources` as the
    attributes of the senders."""

    def __init__(self) -> None:
        self.spans: list[tuple[Any, dict[str, Any]]] = []
        self.phases: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.url = ""

    def take(self, message: Any) -> None:
        for resource in message.resource_spans:
            self.resources.append(attributes(resource.resource.attributes))
            spans = [span for group in resource.scope_spans for span in group.spans]
            self.spans += [(span, attributes(span.attributes)) for span in spans if span.name == "llm_request"]
            self.phases += [span for span in spans if span.name != "llm_request"]


class HttpCollector(Collector):
    def __init__(self) -> None:
        super().__init__()
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                collector.take(service.ExportTraceServiceRequest.FromString(data))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class GrpcCollector(Collector):
    def __init__(self) -> None:
        super().__init__()
        grpc = pytest.importorskip("grpc")
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        name = service.DESCRIPTOR.services_by_name["TraceService"].full_name

        def export(message: Any, context: object) -> Any:
            self.take(message)
            return service.ExportTraceServiceResponse()

        handler = grpc.unary_unary_rpc_method_handler(
            export,
            request_deserializer=service.ExportTraceServiceRequest.FromString,
            response_serializer=service.ExportTraceServiceResponse.SerializeToString,
        )
        self.server = grpc.server(ThreadPoolExecutor(1))
        self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, {"Export": handler})])
        self.url = f"http://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def stop(self) -> None:
        self.server.stop(None).wait()


def attributes(items: Any) -> dict[str, Any]:
    result = {}
    for item in items:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        result[item.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return result


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    collector = HttpCollector()
    yield collector
    collector.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_of_its_callers_trace(collector: Collector, engine: FakeEngine, stream: bool) -> None:
    before = time.time_ns()
    with serving(engine, otlp_traces_endpoint=collector.url) as url:  # its end flushes
        httpx.post(
            url + "/v1/completions",
            json={"prompt": "abc", "max_tokens": 5, "temperature": 0.5, "stream": stream, "request_id": "r"},
            headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
        )
    ((span, found),) = collector.spans
    assert span.name == "llm_request"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert before <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns()
    assert collector.resources[0]["service.name"] == "octavo"
    expected = {
        "gen_ai.response.model": MODEL, "gen_ai.request.id": "r", "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.n": 1, "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 5, "gen_ai.response.finish_reasons": ["length"],
    }  # fmt: skip
    assert expected.items() <= found.items()
    latency = {name.rpartition(".")[2]: value for name, value in found.items() if "latency" in name}
    assert latency["time_in_queue"] + latency["time_in_model_prefill"] == pytest.approx(latency["time_to_first_token"])
    assert latency["time_to_first_token"] <= latency["e2e"]
    assert latency["time_in_model_inference"] >= latency["time_in_model_decode"] >= 0
    phases = sorted(collector.phases, key=lambda phase: phase.start_time_unix_nano)
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    assert {(phase.trace_id.hex(), phase.parent_span_id) for phase in phases} == {(TRACE, span.span_id)}
    assert phases[0].start_time_unix_nano == span.start_time_unix_nano
    for phase, following in itertools.pairwise(phases):
        assert phase.end_time_unix_nano == following.start_time_unix_nano, "without a gap"
    for phase, name in zip(phases, ("time_in_queue", "time_in_model_prefill", "time_in_model_decode"), strict=True):
        took = (phase.end_time_unix_nano - phase.start_time_unix_nano) / 1e9
        assert took == pytest.approx(latency[name], abs=1e-6)


def test_spans_go_over_grpc_unless_told_otherwise(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL", raising=False)
    collector = GrpcCollector()
    try:
        with serving(engine, otlp_traces_endpoint=collector.url) as url:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            httpx.post(url + "/v1/completions", json={"prompt": "abc", "max_tokens": 5}, headers=headers)
    finally:
        collector.stop()
    ((span, found),) = collector.spans
    assert (span.name, span.trace_id.hex(), found["gen_ai.usage.completion_tokens"]) == ("llm_request", TRACE, 5)
    assert collector.resources[0]["service.name"] == "octavo"


def test_a_request_that_fails_or_is_left_is_a_span_too(collector: Collector, engine: FakeEngine) -> None:
    with serving(engine, otlp_traces_endpoint=collector.url) as url:
        engine.fails_after = (2, EngineDeadError("the engine core has ended (exit status -9)."))
        assert httpx.post(url + "/v1/completions", json={"prompt": "a"}).status_code == 500
        engine.reset()
        engine.may_begin = lambda: False
        ask_and_leave(url, "/v1/completions", {"prompt": "a"}, once=lambda: engine.active)
        wait_until(lambda: not engine.active)
        assert httpx.post(url + "/v1/completions", json={"prompt": 5}).status_code == 400
    reasons = [(found["gen_ai.response.finish_reasons"], span.status.code) for span, found in collector.spans]
    assert reasons == [(["error"], 2), (["abort"], 0)], "and one that is refused is none"
    # The second had no token: nothing is known of when it was scheduled.
    assert {phase.parent_span_id for phase in collector.phases} <= {collector.spans[0][0].span_id}


def test_without_the_extra_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"scripts/install otel"):
        ServerArgs(otlp_traces_endpoint="http://localhost:4317").check()


@pytest.mark.parametrize(("endpoint", "protocol"), [("localhost", "grpc"), ("http://localhost", "smoke signals")])
def test_an_endpoint_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, protocol: str
) -> None:
    pytest.importorskip("opentelemetry.exporter")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    with pytest.raises(ConfigError):
        ServerArgs(otlp_traces_endpoint=endpoint).check()
