"""Exports spans to an OpenTelemetry collector. `tracing.py` (servers) and `gateway/request_spans.py` make the spans.

The packages are an extra (`scripts/install otel`) and are imported only with `--otlp-traces-endpoint`.
"""

from __future__ import annotations

import importlib.util
import os
import time
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

PROTOCOLS = ("grpc", "http/protobuf")


def check_endpoint(endpoint: str) -> None:
    """Raise `ConfigError` if spans cannot be sent to this endpoint."""
    if "://" not in endpoint:
        raise ConfigError(f"--otlp-traces-endpoint must be a URL such as http://localhost:4317, got {endpoint}.")
    if _protocol() not in PROTOCOLS:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must be one of {', '.join(PROTOCOLS)}.")
    exporter = "opentelemetry.exporter.otlp.proto." + _protocol().partition("/")[0]
    try:
        found = importlib.util.find_spec("opentelemetry.sdk") and importlib.util.find_spec(exporter)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry; run scripts/install otel")


def _protocol() -> str:
    """Return the protocol of OpenTelemetry's variables. The default is gRPC, as in vLLM."""
    environ = os.environ
    return (
        environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or PROTOCOLS[0]
    )


class SpanMaker:
    """Makes spans, whose times are of `time.monotonic`, and sends them to the endpoint, or to `exporter`.
    OTEL_SERVICE_NAME replaces `service`."""

    def __init__(self, endpoint: str, service: str, exporter: SpanExporter | None = None) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", service)})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _make_exporter(endpoint)))
        self._tracer = self._provider.get_tracer(service)
        self._wall_offset_ns = time.time_ns() - time.monotonic_ns()

    def _wall_ns(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._wall_offset_ns

    def flush(self, timeout_s: float) -> None:
        """Send the finished spans. Blocks."""
        self._provider.force_flush(int(timeout_s * 1000))


def _make_exporter(endpoint: str) -> SpanExporter:
    if _protocol() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        is_plain = endpoint.startswith(("http://", "grpc://"))
        return GrpcExporter(endpoint=endpoint, insecure=True if is_plain else None)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint)
