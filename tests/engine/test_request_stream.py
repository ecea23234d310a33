"""What callers and sinks find of a request, however late they are."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any, cast

import pytest

from octavo.engine import async_engine
from octavo.engine.async_engine import AsyncLLMEngine
from octavo.engine.output_processor import OutputProcessor, RequestState
from octavo.engine.request_stream import RequestStream
from octavo.engine.wire import StepOutputs
from octavo.entrypoints.http.streaming import merge
from octavo.errors import OctavoError, RequestError
from octavo.outputs import RequestOutput
from octavo.request import EngineRequest, Prompt, SequenceOutput, TokenLogprobs
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.stats import EngineStats
from tests.engine.stub_engine import HANG
from tests.garbage import counted_garbage
from tests.waiting import until

TOKENS = 60  # of each completion


class Followed:
    """A request of two completions, its stream, and its sink, which is open when the test says so."""

    def __init__(self, tokenizer: Any, sink: bool = False, interval: int = 1, **params: Any) -> None:
        sampling = SamplingParams(max_tokens=TOKENS, n=2, **params)
        request = EngineRequest("a", Prompt([1]), sampling, [], TOKENS, 0.0)
        self.outputs = OutputProcessor(tokenizer, makes_logprobs_later=True, stream_interval=interval)
        self.stream = RequestStream(request, "a", cast(Any, None), self if sink else None)
        self.stream.follow(self.outputs.add(request))
        self.is_open = True
        self.pushed: list[RequestOutput] = []

    def take(self, state: RequestState) -> None:
        output = state.take()
        assert isinstance(output, RequestOutput)
        self.pushed.append(output)

    def step(self, tokens: list[tuple[int, int]], ended: set[int] | None = None) -> None:
        """The core's message: tokens, each (completion, token). Those `ended` have their last one."""
        outputs = [
            SequenceOutput(
                "a", index, [token for i, token in tokens if i == index], "length" if index in (ended or ()) else None,
                logprobs=[TokenLogprobs([token], [-1.0], 1) for i, token in tokens if i == index],
            )
            for index in sorted({index for index, _ in tokens})
        ]  # fmt: skip
        for state in self.outputs.update(outputs)[0]:
            assert state.stream is not None
            state.stream.deliver()

    async def get(self) -> RequestOutput:
        output = await self.stream.get()
        assert isinstance(output, RequestOutput)
        return output


def random_steps(rng: random.Random) -> list[list[tuple[int, int]]]:
    left, steps = {0: TOKENS, 1: TOKENS}, []
    while left:
        steps.append([(index, rng.randrange(300, 900)) for index in left if rng.random() < 0.8])
        for index, _ in steps[-1]:
            left[index] -= 1
            if not left[index]:
                del left[index]
    return steps


@pytest.mark.parametrize("seed", range(20))
def test_deltas_add_up_to_the_same_however_late_they_are_read_and_whoever_reads_them(tokenizer: Any, seed: int) -> None:
    rng = random.Random(seed)
    steps = random_steps(rng)
    expected = {index: [token for step in steps for i, token in step if i == index] for index in (0, 1)}

    async def use() -> None:
        stops = ["\0"] if seed % 2 else []
        given = Followed(tokenizer, bool(seed % 3), output_kind=RequestOutputKind.DELTA, logprobs=0, stop=stops)
        seen: list[RequestOutput] = given.pushed  # in order: the caller puts what it gets there too
        reading: asyncio.Task[RequestOutput] | None = None
        num_left = dict.fromkeys((0, 1), TOKENS)
        for step in steps:
            if reading is None and rng.random() < 0.3:
                reading = asyncio.ensure_future(given.get())
                await asyncio.sleep(0)
            given.is_open = rng.random() < 0.7
            for index, _ in step:
                num_left[index] -= 1
            given.step(step, {index for index, _ in step if not num_left[index]})
            if reading is not None and rng.random() < 0.7:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                if reading.done():
                    seen.append(reading.result())
                    reading = None
        while not seen[-1:] or not seen[-1].finished:
            seen.append(await (reading or given.get()))
            reading = None
        assert len(seen) < len(steps) and [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
        for index in (0, 1):
            parts = [part for output in seen for part in output.outputs if part.index == index]
            assert [token for part in parts for token in part.token_ids] == expected[index]
            assert "".join(part.text for part in parts) == tokenizer.decode(expected[index])
            assert [token for part in parts for found in part.logprobs or () for token in found] == expected[index]
            assert parts[-1].cumulative_logprob == -TOKENS

    asyncio.run(use())


def test_a_late_caller_finds_the_last_of_outputs_that_say_all_and_then_the_error(tokenizer: Any) -> None:
    async def use() -> None:
        given = Followed(tokenizer, output_kind=RequestOutputKind.CUMULATIVE)
        reading = asyncio.ensure_future(given.get())
        await asyncio.sleep(0)
        assert not reading.done()
        for _ in range(3):
            given.step([(0, 300)])
        given.stream.fail(OctavoError("lost"))
        output = await reading
        assert output.outputs[0].text == tokenizer.decode([300] * 3)
        with pytest.raises(OctavoError, match="lost"):
            await given.get()

    asyncio.run(use())


def test_a_sink_that_fails_ends_its_request_alone(tokenizer: Any) -> None:
    async def use() -> None:
        given = Followed(tokenizer, sink=True)
        given.pushed = None  # type: ignore[assignment]
        reading = asyncio.ensure_future(given.get())
        await asyncio.sleep(0)
        given.step([(0, 300)])
        with pytest.raises(AttributeError):
            await reading

    asyncio.run(use())


def test_a_caller_that_has_gone_is_told_nothing(tokenizer: Any) -> None:
    async def use() -> None:
        given = Followed(tokenizer, sink=True)
        reading = asyncio.ensure_future(given.get())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait((reading,))
        given.step([(0, 300)])
        assert given.pushed == []
        given.stream.close()
        assert given.outputs.requests["a"].stream is None

    asyncio.run(use())


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_outputs_have_the_interval_of_new_tokens_but_for_the_first_and_the_last(
    tokenizer: Any, kind: RequestOutputKind
) -> None:
    given = Followed(tokenizer, interval=8, output_kind=kind)
    numbers: list[int] = []  # of all tokens, at each output
    for step in range(1, 31):
        output = SequenceOutput("a", 0, [300], "length" if step == 30 else None)
        other = [SequenceOutput("a", 1, [300], "length")] if step == 30 else []
        for result in given.outputs.process([output, *other])[0]:
            assert isinstance(result, RequestOutput)
            new = sum(len(part.token_ids) for part in result.outputs)
            numbers.append(new + (numbers[-1] if numbers and kind is RequestOutputKind.DELTA else 0))
    assert numbers == [1, 9, 17, 25, 31]


def test_failed_requests_leave_no_cycles(with_engine: Callable[..., Any]) -> None:
    """In which they would be held until a collection."""

    async def fail(engine: AsyncLLMEngine, number: int) -> None:
        async def collect() -> None:
            requests = [engine.inputs.process({"prompt_token_ids": HANG}, SamplingParams()) for _ in range(number)]
            with contextlib.suppress(RequestError):  # pytest's `raises` is in a cycle with the error
                async for _ in merge([engine.generate_from(one) for one in requests]):
                    raise AssertionError("they fail")

        asked = asyncio.ensure_future(collect())
        await until(lambda: len(engine._output_processor.requests) == number)
        outputs = [SequenceOutput(one, 0, [], "error", error="it broke") for one in engine._output_processor.requests]
        engine._on_core_message(StepOutputs(outputs, EngineStats()))
        await asked

    async def use(engine: AsyncLLMEngine) -> None:
        for number in (1, 2):
            await fail(engine, number)  # the first ones import modules
            with counted_garbage("octavo") as left:
                await fail(engine, number)
                await asyncio.sleep(0)  # the loop lets go of the tasks
            assert not left

    with_engine(use)


def test_a_first_output_goes_before_those_of_streams_that_have_begun(with_engine: Callable[..., Any]) -> None:
    """A thousand streams may take many turns of the event loop."""

    async def use(engine: AsyncLLMEngine) -> None:
        params = SamplingParams(max_tokens=TOKENS, output_kind=RequestOutputKind.DELTA)
        requests = [engine.inputs.process({"prompt_token_ids": HANG}, params) for _ in range(5)]
        order: list[str] = []

        async def read(request: EngineRequest) -> None:
            async for _ in engine.generate_from(request):
                order.append(request.request_id)

        reading = [asyncio.ensure_future(read(request)) for request in requests]
        await until(lambda: len(engine._output_processor.requests) == len(requests))

        def step(*numbers: int) -> None:
            ids = [requests[number].request_id for number in numbers]
            engine._on_core_message(StepOutputs([SequenceOutput(one, 0, [300]) for one in ids], EngineStats()))

        step(0, 1, 2)
        await until(lambda: len(order) == 3)
        step(0, 1)
        step(0, 1, 2, 3, 4)
        await until(lambda: len(order) == 8)
        assert order[3:] == [requests[number].request_id for number in (3, 4, 0, 1, 2)]
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)

    with_engine(use)


def test_a_turn_of_the_loop_delivers_to_few_streams(
    with_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New requests and aborts are handled between turns."""
    monkeypatch.setattr(async_engine, "_DELIVERY_S", 0.0)
    num_streams, most = 40, async_engine._STREAMS_PER_CLOCK_READING

    async def use(engine: AsyncLLMEngine) -> None:
        params = SamplingParams(max_tokens=TOKENS, output_kind=RequestOutputKind.DELTA)
        requests = [engine.inputs.process({"prompt_token_ids": HANG}, params) for _ in range(num_streams)]
        num_delivered = 0

        class Sink:
            is_open = True

            def take(self, state: RequestState) -> None:
                nonlocal num_delivered
                state.take()
                num_delivered += 1

        async def read(request: EngineRequest) -> None:
            async for _ in engine.generate_from(request, sink=Sink()):
                raise AssertionError("the sink takes everything")

        reading = [asyncio.ensure_future(read(request)) for request in requests]
        await until(lambda: len(engine._output_processor.requests) == num_streams)
        engine._on_core_message(
            StepOutputs([SequenceOutput(one.request_id, 0, [300]) for one in requests], EngineStats())
        )
        by_turn = [0]
        while num_delivered < num_streams:
            await asyncio.sleep(0)
            by_turn.append(num_delivered)
        assert max(after - before for before, after in itertools.pairwise(by_turn)) == most
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)

    with_engine(use)
