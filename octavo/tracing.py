"""OpenTelemetry: sends a span for each request to `--otlp-traces-endpoint`, with the attributes of vLLM's spans, and a
child span for each phase in the engine.

A request's `traceparent` header, if present, is the parent of its span.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING

from octavo.outputs import RequestMetrics, RequestOutput
from octavo.request import EngineRequest
from octavo.trace_export import SpanMaker

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span


class Tracer(SpanMaker):
    """Makes the spans of one server."""

    def __init__(self, endpoint: str, model_name: str, exporter: SpanExporter | None = None) -> None:
        super().__init__(endpoint, "octavo", exporter)
        self._model_name = model_name

    async def trace(
        self, request: EngineRequest, outputs: AsyncGenerator[RequestOutput, None], headers: Mapping[str, str]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs, and make its span when they end, also after an error."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            start_time=self._wall_ns(request.arrival_time),
        )
        num_tokens = 0
        reasons: dict[int, str] = {}
        metrics: RequestMetrics | None = None
        try:
            async for output in outputs:
                metrics = output.metrics
                for completion in output.outputs:
                    num_tokens += len(completion.token_ids)
                    if completion.finish_reason is not None:
                        reasons[completion.index] = completion.finish_reason
                yield output
        except Exception as error:
            reasons[0] = "error"
            span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        finally:
            await outputs.aclose()
            self._describe(span, request, num_tokens, list(reasons.values()) or ["abort"], metrics)
            span.end()

    def _describe(
        self, span: Span, request: EngineRequest, num_tokens: int, reasons: list[str], metrics: RequestMetrics | None
    ) -> None:
        from opentelemetry.trace import set_span_in_context

        params = request.params
        attributes: dict[str, str | int | float | list[str]] = {
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.n": params.n,
            "gen_ai.usage.num_sequences": params.num_sequences,
            # vLLM's names, and the newer names of the conventions.
            "gen_ai.usage.prompt_tokens": len(request.prompt.token_ids),
            "gen_ai.usage.input_tokens": len(request.prompt.token_ids),
            "gen_ai.usage.completion_tokens": num_tokens,
            "gen_ai.usage.output_tokens": num_tokens,
            "gen_ai.response.finish_reasons": reasons,
        }
        if metrics is not None:
            attributes |= {f"gen_ai.latency.{name}": seconds for name, seconds in metrics.intervals().items()}
            parent = set_span_in_context(span)
            for name, begin, end in metrics.phases():
                phase = self._tracer.start_span(name, parent, start_time=self._wall_ns(begin))
                phase.end(self._wall_ns(end))
        span.set_attributes(attributes)
