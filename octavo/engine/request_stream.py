"""What a request has put out and its caller has not read yet. A caller that is late finds one output that says all, so
that nothing grows and an engine that is ahead of its callers has less to send.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from octavo.engine.generate import Output
from octavo.errors import OctavoError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.request import EngineRequest
from octavo.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncLLMEngine


class RequestStream:
    """The outputs of one request on their way to its caller: one at most, and an error that comes after it."""

    def __init__(self, request: EngineRequest, external_id: str, engine: AsyncLLMEngine) -> None:
        self.request, self.external_id = request, external_id
        self.engine = engine  # the one that computes it now
        self.opening: asyncio.Future[None] | None = None  # set while it waits for the engine to take requests
        self.has_ended_early = False  # ended while it waited
        self._output: Output | None = None
        self._error: OctavoError | None = None
        self._has_news = asyncio.Event()

    def put(self, news: Output | OctavoError) -> None:
        """Add what a step has brought to what has not been read."""
        self._has_news.set()
        if isinstance(news, OctavoError):
            self._error = news
            return
        is_delta = self.request.params.output_kind is RequestOutputKind.DELTA
        if is_delta and isinstance(self._output, RequestOutput) and isinstance(news, RequestOutput):
            news.outputs = _joined(self._output.outputs, news.outputs)
        self._output = news

    def abort(self, stop_reason: str | None = None) -> None:
        """End the request with what it has."""
        self.engine.abort_and_notify(self, stop_reason)

    async def get(self) -> Output:
        """Wait for an output. Raises the request's error once everything before it has been read."""
        await self._has_news.wait()
        if self._output is not None:
            output, self._output = self._output, None
            if self._error is None:
                self._has_news.clear()
            return output
        assert self._error is not None
        raise self._error


def _joined(earlier: list[CompletionOutput], later: list[CompletionOutput]) -> list[CompletionOutput]:
    """Deltas of two outputs as one: what is new of each completion."""
    by_index = {part.index: part for part in earlier}
    for part in later:
        before = by_index.get(part.index)
        by_index[part.index] = part
        if before is None:
            continue
        part.text = before.text + part.text
        part.token_ids = [*before.token_ids, *part.token_ids]
        if before.logprobs is not None:
            part.logprobs = [*before.logprobs, *(part.logprobs or ())]
    return [by_index[index] for index in sorted(by_index)]
