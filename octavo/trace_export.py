"""The way of spans to an OpenTelemetry collector, for servers and the gateway.

The packages are an extra (`scripts/install otel`) and are imported only with `--otlp-traces-endpoint`.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
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


def make_provider(endpoint: str, service: str, exporter: SpanExporter | None = None) -> TracerProvider:
    """Return what makes tracers, whose spans go to the endpoint, or to `exporter`. OTEL_SERVICE_NAME replaces
    `service`."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", service)})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter or _make_exporter(endpoint)))
    return provider


def _make_exporter(endpoint: str) -> SpanExporter:
    if _protocol() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        is_plain = endpoint.startswith(("http://", "grpc://"))
        return GrpcExporter(endpoint=endpoint, insecure=True if is_plain else None)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint)
