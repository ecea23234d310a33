"""What a late caller finds of its request."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest

from octavo.engine.request_stream import RequestStream
from octavo.errors import OctavoError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import RequestOutputKind, SamplingParams


def stream_of(kind: RequestOutputKind) -> RequestStream:
    params = SamplingParams(max_tokens=500, n=2, output_kind=kind)
    return RequestStream(EngineRequest("a", Prompt([1]), params, [], 500, 0.0), "a", cast(Any, None))


def delta(tokens: list[tuple[int, int]], finished: bool = False) -> RequestOutput:
    """New tokens of completions, each (completion, token)."""
    parts = []
    for index in sorted({index for index, _ in tokens}):
        own = [token for i, token in tokens if i == index]
        logprobs: list[Any] = [{token: None} for token in own]
        reason = "length" if finished else None
        parts.append(CompletionOutput(index, "".join(map(chr, own)), own, -float(own[-1]), logprobs, reason))
    return RequestOutput("a", None, [1], parts, finished)


@pytest.mark.parametrize("seed", range(20))
def test_deltas_add_up_to_the_same_however_late_they_are_read(seed: int) -> None:
    rng = random.Random(seed)
    news = [[(rng.randrange(2), 97 + rng.randrange(26)) for _ in range(rng.randint(1, 3))] for _ in range(100)]

    async def use() -> None:
        stream = stream_of(RequestOutputKind.DELTA)
        read: list[RequestOutput] = []
        for i, tokens in enumerate(news):
            is_last = i == len(news) - 1
            stream.put(delta(tokens, finished=is_last))
            if is_last or rng.random() < 0.3:
                output = await stream.get()
                assert isinstance(output, RequestOutput)
                read.append(output)
        assert len(read) < len(news) and [output.finished for output in read] == [False] * (len(read) - 1) + [True]
        for index in (0, 1):
            expected = [token for tokens in news for i, token in tokens if i == index]
            parts = [part for output in read for part in output.outputs if part.index == index]
            assert [token for part in parts for token in part.token_ids] == expected
            assert "".join(part.text for part in parts) == "".join(map(chr, expected))
            assert [token for part in parts for found in part.logprobs or () for token in found] == expected
            assert parts[-1].cumulative_logprob == -expected[-1]

    asyncio.run(use())


def test_a_late_caller_finds_the_last_of_outputs_that_say_all_and_then_the_error() -> None:
    async def use() -> None:
        stream = stream_of(RequestOutputKind.CUMULATIVE)
        reading = asyncio.ensure_future(stream.get())
        await asyncio.sleep(0)
        assert not reading.done()
        for count in (1, 2, 3):
            stream.put(delta([(0, 97)] * count))
        stream.put(OctavoError("lost"))
        output = await reading
        assert isinstance(output, RequestOutput) and output.outputs[0].text == "aaa"
        with pytest.raises(OctavoError, match="lost"):
            await stream.get()

    asyncio.run(use())
