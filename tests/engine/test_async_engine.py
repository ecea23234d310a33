"""`AsyncLLMEngine` with the default model and a real core process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from octavo import AsyncEngineArgs, AsyncLLMEngine, PoolingParams, RequestOutput, SamplingParams
from octavo.engine.pooling_input import PoolingInput, Text
from octavo.errors import EngineDeadError, OctavoError, RequestError
from octavo.kv_cache.block_pool import BlockState
from octavo.pooling.vectors import finished
from octavo.sampling_params import RequestOutputKind
from tests.waiting import until, within

pytestmark = pytest.mark.slow

ARGS = {"max_model_len": 512, "num_gpu_blocks_override": 256}
LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


def with_engine(use: Callable[[AsyncLLMEngine], Awaitable[None]], **args: object) -> None:
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**{**ARGS, **args}))
    try:
        asyncio.run(asyncio.wait_for(use(engine), within(120)))
    finally:
        engine.shutdown()


async def collect(engine: AsyncLLMEngine, prompt: object, params: SamplingParams, name: str) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, name)]


async def until_idle(engine: AsyncLLMEngine) -> None:
    await until(lambda: not (engine.stats.num_running or engine.stats.num_waiting or engine.stats.num_blocks_used))


def test_output_kinds_agree_and_deltas_add_up() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        assert engine.model_config is await engine.get_model_config()
        params = {
            kind: SamplingParams(max_tokens=30, temperature=0.7, seed=3, n=2, logprobs=1, output_kind=kind)
            for kind in RequestOutputKind
        }
        runs = {kind: await collect(engine, "The sea is", params[kind], str(kind)) for kind in params}
        final = runs[RequestOutputKind.FINAL_ONLY]
        assert len(final) == 1
        for completion in final[0].outputs:
            last = runs[RequestOutputKind.CUMULATIVE][-1].outputs[completion.index]
            assert (last.text, last.token_ids, last.logprobs) == (
                completion.text, completion.token_ids, completion.logprobs
            )  # fmt: skip
            deltas = [
                part
                for output in runs[RequestOutputKind.DELTA]
                for part in output.outputs
                if part.index == completion.index
            ]
            assert "".join(part.text for part in deltas) == completion.text
            assert [token for part in deltas for token in part.token_ids] == completion.token_ids
            assert [p for part in deltas for p in part.logprobs] == completion.logprobs
            assert [part.finish_reason for part in deltas if part.finish_reason] == [completion.finish_reason]

    with_engine(use)


def test_what_vllms_programs_call_is_there() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        given = {"prompt_text": "shown", "tokenization_kwargs": None, "trace_headers": None, "data_parallel_rank": 0}
        params = SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)
        [output] = [one async for one in engine.generate({"prompt_token_ids": [504]}, params, "a", **given)]
        assert (output.request_id, output.prompt, output.lora_request) == ("a", "shown", None)
        for name in ("tokenization_kwargs", "trace_headers"):
            with pytest.raises(RequestError, match=f"{name} is not built"):
                await anext(engine.generate("a", params, "a", **{name: {"a": 1}}))
        with pytest.raises(TypeError, match="sampling_params must be SamplingParams, got dict"):
            await anext(engine.generate("a", {"temperature": 0}, "a"))  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="returns no vectors"):
            await anext(engine.encode("a", PoolingParams(), "a"))
        with pytest.raises(RequestError, match="reset_running_requests is not built"):
            await engine.reset_prefix_cache(reset_running_requests=True)
        with pytest.raises(AttributeError, match="AsyncLLMEngine has no collective_rpc: workers run no methods"):
            _ = engine.collective_rpc
        await engine.pause_generation(wait_for_inflight_requests=True)
        assert await engine.is_paused() and not await engine.is_sleeping()
        await engine.resume_generation()
        assert engine.vllm_config.cache_config.num_gpu_blocks == ARGS["num_gpu_blocks_override"]
        assert await engine.get_supported_tasks() == ("generate",) and not await engine.is_tracing_enabled()
        await engine.do_log_stats()

    with_engine(use)


def test_a_model_that_pools_encodes() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        outputs = [one async for one in engine.encode("A text", PoolingParams(), "mine")]
        assert [(one.request_id, one.finished, one.outputs.data.shape) for one in outputs] == [("mine", True, (576,))]
        assert await engine.get_supported_tasks() == ("embed",)
        for name in ("use_activation", "activation", "normalize", "softmax"):  # the others are older
            plain = [one async for one in engine.encode("A text", PoolingParams(**{name: False}), "mine")]
            assert abs((plain[0].outputs.data ** 2).sum() - 1) > 0.01

    with_engine(use, runner="pooling")


def test_vectors_of_tokens_are_made_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text may have millions of numbers."""

    def off_loop(*args: Any) -> Any:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return finished(*args)

    async def use(engine: AsyncLLMEngine) -> None:
        [request] = PoolingInput(engine.inputs).process([Text.of("A text")], PoolingParams(task="token_embed"))
        vectors = (await engine.pool(request)).outputs.data
        assert len(vectors) == len(request.prompt.token_ids)
        assert np.allclose(np.square(vectors).sum(1), 1, atol=1e-5)

    monkeypatch.setattr("octavo.pooling.vectors.finished", off_loop)
    with_engine(use, runner="pooling", enable_chunked_prefill=False)


def test_an_aborted_request_for_vectors_says_whether_its_time_was_up() -> None:
    """While it waits for the engine too."""

    async def use(engine: AsyncLLMEngine) -> None:
        await engine.wait_ready()
        await engine.pause_generation("keep")
        for is_late in (False, True):
            [request] = PoolingInput(engine.inputs).process([Text.of("A text")], PoolingParams())
            if is_late:
                request.deadline = 0.0
            task = asyncio.ensure_future(engine.pool(request, "mine"))
            await asyncio.sleep(0)
            if not is_late:
                await engine.abort("mine")
            with pytest.raises(RequestError) as raised:
                await task
            assert (raised.value.status, raised.value.code) == ((408, "timeout") if is_late else (503, "aborted"))

    with_engine(use, runner="pooling")


@pytest.mark.parametrize("is_stop", [False, True])
def test_a_request_that_goes_on_has_its_tokens_though_it_is_aborted_while_it_waits(is_stop: bool) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        await engine.wait_ready()
        await engine.pause_generation("keep")
        token_ids = list[int]()

        async def resumed(**params: Any) -> list[RequestOutput]:
            request = engine.inputs.process("The sea", structs.replace(LONG, **params))
            request.already_sent_token_ids = [[504], [505, 506]]

            async def collect() -> list[RequestOutput]:
                return [output async for output in engine.generate_from(request, "mine", None, token_ids)]

            answer = asyncio.ensure_future(collect())
            await until(lambda: bool(engine._streams) and engine._streams["mine"].open_waiter is not None)
            await (engine.abort_all_for_shutdown() if is_stop else engine.abort("mine"))
            return await answer

        outputs = [output.outputs[0] for output in await resumed()]
        assert [one.token_ids for one in outputs] == [[504], [505, 506], []]
        assert [one.finish_reason for one in outputs] == [None, None, "abort"]
        assert token_ids == [504, 505, 506]
        with pytest.raises(RequestError, match="the tokens of resume end the answer"):
            await resumed(stop=[engine.tokenizer.decode([504])])

    with_engine(use)


@pytest.mark.parametrize("waits", [False, True])
def test_a_request_whose_tokens_end_the_answer_has_failed_and_is_not_aborted(waits: bool) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        reasons = list[str | None]()
        engine._output_processor._log_end = lambda state: reasons.append(state.finish_reason)
        request = engine.inputs.process("The sea", structs.replace(LONG, stop=[engine.tokenizer.decode([504])]))
        request.already_sent_token_ids = [[504]]
        if not waits:
            await engine.wait_ready()
        with pytest.raises(RequestError, match="the tokens of resume end the answer"):
            async for _ in engine.generate_from(request):
                pass
        assert reasons == ["error"]

    with_engine(use)


def test_no_request_slips_past_a_pause_that_follows_a_resumption() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        await engine.wait_ready()
        await engine.pause_generation()
        answer = asyncio.ensure_future(collect(engine, "The sea", SamplingParams(max_tokens=1), "waits"))
        await until(lambda: bool(engine._streams) and engine._streams["waits"].open_waiter is not None)
        await engine.resume_generation()
        await asyncio.sleep(0)
        await engine.pause_generation("abort")
        for _ in range(5):
            await asyncio.sleep(0)
        assert not engine._output_processor.requests, "the core has no request"
        await engine.resume_generation()
        assert (await answer)[-1].finished

    with_engine(use)


def test_the_wait_for_a_first_token_is_predicted_from_the_prompts_that_wait() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        assert engine.forecast.seconds(100) == 0.0, "nothing is known yet"
        await collect(engine, "The sea is wide and " * 20, SamplingParams(max_tokens=2), "first")
        alone_s = engine.forecast.seconds(100)
        assert 0.0 < alone_s < math.inf
        stream = engine.generate("A ship that sails " * 30, LONG, "second")
        first = asyncio.ensure_future(anext(stream))
        while engine.forecast.seconds(100) == alone_s:  # noqa: ASYNC110 (until it is on its way)
            await asyncio.sleep(0)
        assert engine.forecast.seconds(100) > alone_s
        await first
        assert 2 * engine.forecast.seconds(100) == pytest.approx(engine.forecast.seconds(200)), "nobody waits any more"
        await stream.aclose()

    with_engine(use)


def test_the_live_view_follows_requests() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        assert (await engine.live_view()).blocks == bytes(256)
        stream = engine.generate("The sea is wide and " * 20, LONG, "one-0")  # as the server names request 0
        await anext(stream)
        maps = await asyncio.gather(engine.live_view(), engine.live_view())
        assert maps[0] is maps[1]
        assert maps[0].blocks.count(BlockState.USED) > 5
        [one] = maps[0].sequences
        assert one.request_id == "one" and one.is_running and one.num_step_tokens >= 1
        assert one.num_computed_tokens == one.num_prompt_tokens > 80
        assert one.num_output_tokens >= 1 and one.num_blocks > 5
        await stream.aclose()
        await until_idle(engine)
        rest = (await engine.live_view()).blocks
        assert rest.count(BlockState.CACHED) > 4
        assert rest.count(BlockState.USED) == 0

    with_engine(use)


def test_abort_ends_the_stream_and_closing_it_frees_the_blocks() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        aborted = asyncio.create_task(collect(engine, "One", LONG, "aborted"))
        cancelled = asyncio.create_task(collect(engine, "Two", LONG, "cancelled"))
        closed = engine.generate("Three", LONG, "closed")
        for _ in range(3):
            await anext(closed)
        assert engine.stats.num_running == 3
        await engine.abort("aborted")
        await engine.abort("never heard of")
        cancelled.cancel()
        await closed.aclose()
        outputs = await aborted
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        await until_idle(engine)
        assert (await collect(engine, "Four", SamplingParams(max_tokens=2), "four"))[-1].finished

    with_engine(use)


def test_a_bad_request_fails_alone() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        good = asyncio.create_task(collect(engine, "Hello", LONG, "good"))
        await asyncio.sleep(0)
        for prompt, params in (
            ("", SamplingParams()),
            ("word " * 600, SamplingParams()),
            ({"prompt_token_ids": [10**9]}, SamplingParams()),
            ({"prompt_token_ids": []}, SamplingParams()),
            ({}, SamplingParams()),
            (5, SamplingParams()),
            ("Hello", SamplingParams(logit_bias={10**8: 1.0})),
            ("Hello", SamplingParams(logits_processors=[lambda prompt, output, logits: logits])),
        ):
            with pytest.raises(RequestError):
                await collect(engine, prompt, params, "bad")
        first = engine.generate("Hello", LONG, "twice")
        await anext(first)
        with pytest.raises(RequestError, match="in use"):
            await collect(engine, "Hello", LONG, "twice")
        await first.aclose()
        outputs = await good
        assert sum(len(part.token_ids) for output in outputs for part in output.outputs) == 400

    with_engine(use)


def test_values_that_are_changed_after_their_check_do_not_reach_the_core() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        params = SamplingParams(max_tokens=2)
        params.ignore_eos = "yes"  # type: ignore[assignment]
        with pytest.raises(RequestError, match="ignore_eos must be true or false, got 'yes'"):
            await collect(engine, "Hello", params, "wrong")
        assert (await collect(engine, "Hello", SamplingParams(max_tokens=2), "right"))[-1].finished

    with_engine(use)


def test_higher_priority_goes_first() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        order: list[str] = []

        async def run(name: str, priority: int) -> None:
            params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
            async for _ in engine.generate(f"{name} says", params, name, priority=priority):
                pass
            order.append(name)

        await collect(engine, "Warm", SamplingParams(max_tokens=1), "warm")
        await asyncio.gather(run("first", 5), run("low", 9), run("high", -1), run("middle", 5))
        assert order.index("high") < order.index("middle") < order.index("low")

    with_engine(use, max_num_seqs=1, scheduling_policy="priority")


def test_a_core_that_cannot_start_says_why() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        with pytest.raises(OctavoError, match=r"holds 64 tokens, less than one request of --max-model-len 512"):
            await engine.wait_ready()

    with_engine(use, num_gpu_blocks_override=4)


def test_a_core_that_dies_fails_every_stream() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        streams = [engine.generate("Hello", LONG, str(i)) for i in range(3)]
        for stream in streams:
            await anext(stream)
        engine._supervisor.core.process.kill()
        for stream in streams:
            with pytest.raises(EngineDeadError):
                _ = [output async for output in stream]
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        assert (engine.errored, engine.is_running, engine.is_stopped) == (True, False, True)
        assert isinstance(engine.dead_error, EngineDeadError)

    with_engine(use)


def test_an_id_that_is_used_again_gets_its_own_tokens_only() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        expected = (await collect(engine, "Rain is", SamplingParams(max_tokens=8, temperature=0), "first"))[-1]
        for _ in range(10):
            closed = engine.generate("Once upon a time", LONG, "again")
            await anext(closed)
            await closed.aclose()  # the core is in the middle of its next step
            found = (await collect(engine, "Rain is", SamplingParams(max_tokens=8, temperature=0), "again"))[-1]
            assert found.request_id == "again"
            assert found.outputs[0].token_ids == expected.outputs[0].token_ids

    with_engine(use)


def test_what_fails_at_the_door_leaves_nothing_behind() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        with pytest.raises(RequestError, match="sequences at once"):
            await collect(engine, "Hi", SamplingParams(n=100), "n")
        with pytest.raises(RequestError, match="64-bit"):
            _ = [output async for output in engine.generate("Hi", None, "huge", priority=2**70)]
        engine._supervisor.core.process.kill()
        engine._supervisor.core.process.wait()
        with pytest.raises(EngineDeadError):
            await collect(engine, "Hi", SamplingParams(), "late")
        assert engine._streams == {}
        assert engine._output_processor.requests == {}

    with_engine(use, max_num_seqs=64)


def test_a_second_event_loop_is_told_that_it_needs_an_engine_of_its_own() -> None:
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**ARGS))
    try:
        assert asyncio.run(collect(engine, "Hi", SamplingParams(max_tokens=1), "one"))[-1].finished
        with pytest.raises(RuntimeError, match="another event loop"):
            asyncio.run(collect(engine, "Hi", SamplingParams(max_tokens=1), "two"))
    finally:
        engine.shutdown()
