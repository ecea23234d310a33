"""An `AsyncLLMEngine` over `stub_core.py`, which does what the first token of a prompt says. The fixture `with_engine`
makes one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from octavo import SamplingParams
from octavo.engine.async_engine import AsyncLLMEngine
from tests.waiting import until

ANSWER, FAIL, EXIT, HANG, THREE_CORES = [1], [2], [3], [4], [5]
Use = Callable[[AsyncLLMEngine], Awaitable[None]]


async def ask(engine: AsyncLLMEngine, prompt: list[int], name: str = "r", deadline: float | None = None) -> str | None:
    """The finish reason."""
    request = engine.inputs.process({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1))
    reason = None
    request.deadline = deadline
    async for output in engine.generate_from(request, name):
        reason = output.outputs[0].finish_reason
    return reason


async def until_ready(engine: AsyncLLMEngine) -> None:
    await until(lambda: engine.is_ready)
