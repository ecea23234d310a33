"""OpenTelemetry: a span for each request with a valid key, between the client's span and the server's
(`octavo.tracing`), which `traceparent` joins to one trace."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from octavo.gateway.client import Client
from octavo.gateway.client_keys import Key
from octavo.gateway.upstream import Headers
from octavo.trace_export import SpanMaker

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_CONTEXT_HEADERS = (b"traceparent", b"tracestate")


class RequestSpans(SpanMaker):
    """Makes the spans of a gateway."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        super().__init__(endpoint, "octavo-gateway")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, route: str, headers: Headers, arrival: float) -> tuple[Span, Headers]:
        """Return a span that continues the trace of a request's headers, and the headers with which a server continues
        the span. `arrival` is of `time.monotonic`."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        given = {name.decode(): value.decode("latin-1") for name, value in headers if name in _CONTEXT_HEADERS}
        span = self._tracer.start_span(
            f"{method} {route}", self._propagator.extract(given), SpanKind.SERVER,
            {"http.request.method": method, "http.route": route},
            start_time=self._wall_ns(arrival),
        )  # fmt: skip
        own = dict[str, str]()
        self._propagator.inject(own, set_span_in_context(span))
        others = [header for header in headers if header[0] not in _CONTEXT_HEADERS]
        return span, [*others, *((name.encode(), value.encode("latin-1")) for name, value in own.items())]

    def end(self, span: Span, client: Client, key: Key | None) -> None:
        """End a request's span: say who answered, with which status, and how long the request waited for models."""
        from opentelemetry.trace import StatusCode

        if client.status:
            span.set_attribute("http.response.status_code", client.status)
        if client.answered_by is not None:
            model, replica = client.answered_by
            span.set_attributes({"octavo.model": model, "octavo.replica": replica})
        if key is not None:
            span.set_attribute("octavo.key", key.settings.name)
        if client.loads_s:
            span.set_attribute("octavo.wait_for_model_s", sum(client.loads_s))
        if client.has_failed or client.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(self._wall_ns(time.monotonic()))
