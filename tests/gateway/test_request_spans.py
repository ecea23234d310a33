"""Spans of the gateway: between the client's and the server's, with the model, the replica and the key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import trace_export
from octavo.errors import ConfigError
from octavo.gateway.server import GatewayArgs
from tests.gateway.fakes import Asked, FakeLaunch, Gateway, answer_plainly, fake_servers, gateway
from tests.gateway.test_client_keys import Keys, with_keys
from tests.waiting import Clock

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FLAGS = {"otlp_traces_endpoint": "http://127.0.0.1:1"}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The finished spans, which go nowhere else."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    monkeypatch.setattr(trace_export, "_make_exporter", lambda endpoint: memory)
    monkeypatch.setattr(memory, "shutdown", lambda: None)
    return memory.get_finished_spans


async def break_off(asked: Asked) -> None:
    asked.begin_stream()
    asked.piece(b"data: 1\n\n")
    await asked.writer.drain()
    asked.die()


def run(clock: Clock, work: Callable[[Gateway, Any], Awaitable[None]], behave: Any) -> None:
    async def within() -> None:
        async with (
            fake_servers(behave) as (server,),
            gateway({"a": {"addresses": [server.address]}, "b": {}}, FakeLaunch(), **FLAGS) as gate,
        ):
            await work(gate, server)

    clock.run(within())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_a_trace_goes_from_the_client_by_the_gateway_to_the_server(clock: Clock, spans: Any, path: str) -> None:
    async def work(gate: Gateway, server: Any) -> None:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "x=y"}
        await gate.http.post(path, json={"model": "a"}, headers=headers)
        await gate.http.post(path, json={"model": "b"})
        sent.append((server.address, server.asked[0].headers))

    sent: list[tuple[str, dict[str, str]]] = []
    run(clock, work, answer_plainly)
    first, second = spans()
    [(address, headers)] = sent
    assert headers["traceparent"] == f"00-{TRACE}-{first.context.span_id:016x}-01" and headers["tracestate"] == "x=y"
    assert (f"{first.context.trace_id:032x}", f"{first.parent.span_id:016x}") == (TRACE, PARENT)
    assert first.name == f"POST {path}" and first.resource.attributes["service.name"] == "octavo-gateway"
    assert dict(first.attributes) == {
        "http.request.method": "POST", "http.route": path, "http.response.status_code": 200, "octavo.model": "a",
        "octavo.replica": address,
    }  # fmt: skip
    assert second.parent is None and "octavo.wait_for_model_s" in second.attributes
    assert second.start_time <= second.end_time and second.status.is_unset


def test_failures_are_marked_and_refusals_are_not(clock: Clock, spans: Any) -> None:
    async def work(gate: Gateway, server: Any) -> None:
        await gate.ask("a", stream=True)
        await gate.ask("none")
        await gate.http.get("/no/such/route")
        server.die()
        await gate.ask("a")

    run(clock, work, break_off)
    found = [(one.attributes["http.response.status_code"], one.status.is_ok, one.status.is_unset) for one in spans()]
    assert found == [(200, False, False), (404, True, True), (404, True, True), (503, False, False)]
    assert "octavo.replica" not in spans()[-1].attributes and "/no" not in spans()[2].name


def test_the_keys_name_is_told_and_clients_without_a_key_make_no_span(clock: Clock, spans: Any, tmp_path: Path) -> None:
    async def test(gate: Gateway, keys: Keys) -> None:
        _, headers = await keys.create()
        assert (await gate.http.post("/v1/completions", json={"model": "a"}, headers=headers)).status_code == 200
        assert (await gate.http.post("/v1/completions", json={"model": "a"})).status_code == 401
        for method, more, status in (("HEAD", {}, 405), ("POST", {"content-encoding": "gzip"}, 415)):
            refused = await gate.http.request(method, "/v1/completions", headers={**headers, **more})
            assert refused.status_code == status

    with_keys(clock, tmp_path, test, answer_plainly, **FLAGS)
    assert {span.attributes["octavo.key"] for span in spans()} == {"k"}
    assert [span.attributes["http.response.status_code"] for span in spans()] == [200, 405, 415]


def test_an_endpoint_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a URL"):
        GatewayArgs(otlp_traces_endpoint="localhost").check()
