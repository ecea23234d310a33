"""An engine without a model: it says what the test tells it to, through the real tokenizer, checks and text output."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from octavo.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.forecast import FirstTokenForecast
from octavo.engine.input_processor import InputProcessor
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.request_log import log_request
from octavo.engine.request_stream import Sink
from octavo.engine.wire import LiveView
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.uvicorn_server import HttpServer
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.tokenizer import load_tokenizer
from octavo.metrics.prometheus import EngineMetrics
from octavo.outputs import RequestOutput
from octavo.request import EngineRequest, SequenceOutput, TokenLogprobs
from octavo.sampling_params import SamplingParams
from octavo.stats import EngineStats, SequenceProgress
from tests.waiting import until

MODEL = "org/fake"
MAX_MODEL_LEN = 512
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse me' %}{{ raise_exception('No such talk.') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if shout %}LOUD {% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class FakeEngine:
    """Has the interface of `AsyncLLMEngine`. Completion `i` is `answer`, followed by `i` if that is not 0."""

    def __init__(self, tokenizer_folder: Path, max_model_len: int = MAX_MODEL_LEN) -> None:
        checkpoint = Checkpoint(MODEL, "dummy", str(tokenizer_folder), [], str(tokenizer_folder), {})
        model = ModelConfig(checkpoint, [MODEL, "alias"], "float32", max_model_len, 259, None)
        self.config = EngineConfig(
            model=model,
            cache=CacheConfig(16, None, 0.3, 0.9, 0, True, "bfloat16"),
            scheduler=SchedulerConfig(8, 256, True, "fcfs", "recompute"),
            device="cpu",
            log_stats=False,
        )
        self.metrics = EngineMetrics(MODEL, max_model_len)
        self.tokenizer = load_tokenizer(checkpoint, TEMPLATE)
        self.reset()

    def reset(self) -> None:
        """Back to what a test expects at its start."""
        self.inputs = InputProcessor(self.config, self.tokenizer)  # numbers requests from 0
        self.answer = "Hello there"
        self.is_ready = True
        self.fatal_error: Exception | None = None
        self.fails_after: tuple[int, Exception] | None = None  # tokens, and what happens then
        self.may_begin: Callable[[], bool] = lambda: True  # asked before the first token, until it says yes
        self.is_paused = False  # after the first token
        self.is_cut_off = False  # by the server's end
        self.max_log_len: int | None = None
        self.active: set[str] = set()
        self.seen: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.deadlines: list[float | None] = []
        self.clients: list[str | None] = []
        self.stats = EngineStats()
        self.forecast = FirstTokenForecast()

    def shutdown(self) -> None:
        pass

    def stop_restarting(self) -> None:
        pass

    async def abort_all_for_shutdown(self) -> None:
        self.is_cut_off = True

    async def check_health(self) -> None:
        if self.fatal_error is not None:
            raise self.fatal_error

    async def drop_cache_session(self, session: str, salt: str | None = None) -> int | None:
        return 3 if (session, salt) == ("mine", "salt") else None

    async def live_view(self) -> LiveView:
        return LiveView(
            bytes([3, 2, 2, 1, 0, 0, 0, 0]), [SequenceProgress("chatcmpl-0123456789", True, 20, 16, 0, 2, 16)]
        )

    async def generate_from(
        self, request: EngineRequest, external_id: str | None = None, sink: Sink | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        params, request_id = request.params, request.request_id
        others = {
            "priority": request.priority, "salt": request.prompt.cache_salt, "rank": request.data_parallel_rank,
            "session": request.session_id, "cache_session": request.cache_session, "cache_ttl_s": request.cache_ttl_s,
            "blocks_from": request.blocks_from,
        }  # fmt: skip
        self.seen.append((request.prompt.token_ids, params, others))
        self.deadlines.append(request.deadline)
        self.clients.append(request.client)
        log_end = partial(log_request, max_length=self.max_log_len)
        outputs = OutputProcessor(self.tokenizer, self.metrics, makes_logprobs_later=True, log_end=log_end)
        state = outputs.add(request, external_id)
        for group in request.already_sent_token_ids:
            replayed = outputs.replay(state, group)
            assert isinstance(replayed, RequestOutput)
            yield replayed
        self.active.add(request_id)
        try:
            scripts = [
                self._tokens(self.answer_to(request), i, request.max_tokens) for i in range(params.num_completions)
            ]
            for step in range(sum(map(len, request.already_sent_token_ids)), max(map(len, scripts))):
                await asyncio.sleep(0)
                await until(
                    lambda step=step: self.is_cut_off or (not self.is_paused if step > 0 else self.may_begin())  # type: ignore[misc]
                )
                if self.is_cut_off:
                    aborted = outputs.abort(request_id)
                    assert aborted is not None
                    result = aborted.take()
                    assert isinstance(result, RequestOutput)
                    yield result
                    return
                if self.fails_after is not None and step == self.fails_after[0]:
                    raise self.fails_after[1]
                new = [
                    self._output(request_id, i, script, step, request.max_tokens, params, request.prompt.token_ids)
                    for i, script in enumerate(scripts)
                    if step < len(script)
                ]
                for state in outputs.update(new)[0]:
                    if sink is not None and sink.is_open and not state.is_over:
                        sink.take(state)
                        continue
                    result = state.take()
                    assert isinstance(result, RequestOutput)
                    yield result
                    if result.finished:
                        return
        finally:
            self.active.discard(request_id)

    def answer_to(self, request: EngineRequest) -> str:
        """Return the text of completion 0."""
        return self.answer

    def _tokens(self, answer: str, index: int, max_tokens: int) -> list[int]:
        text = answer + (str(index) if index else "")
        return [*self.inputs.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id][:max_tokens]

    def _output(
        self,
        request_id: str,
        index: int,
        script: list[int],
        step: int,
        max_tokens: int,
        params: SamplingParams,
        prompt: list[int],
    ) -> SequenceOutput:
        token = script[step]
        is_end = token == self.tokenizer.eos_token_id
        wants_prompt = params.prompt_logprobs is not None and step == 0
        return SequenceOutput(
            request_id,
            index,
            [token],
            finish_reason="stop" if is_end else "length" if step + 1 == max_tokens else None,
            logprobs=[_logprobs(token, params.logprobs or 0, params.logprob_token_ids)]
            if params.wants_logprobs
            else None,
            prompt_logprobs=[_logprobs(t, params.prompt_logprobs or 0) for t in prompt[1:]] if wants_prompt else None,
            num_cached_tokens=3,
            first_scheduled_time=time.monotonic(),
        )


def _logprobs(token: int, num_top: int, asked: list[int] | None = None) -> TokenLogprobs:
    """The token at -0.5 as the second most likely, after its successor at -0.25; the last one cannot be. Those that are
    asked for have -1 each."""
    if asked:
        return TokenLogprobs([token, *asked], [-0.5, *[-1.0] * len(asked)], 2)
    top = [((token + 1) % 259, -0.25), (token, -0.5), ((token + 2) % 259, float("-inf"))][:num_top]
    return TokenLogprobs([token, *(t for t, _ in top)], [-0.5, *(p for _, p in top)], 2)


class Address(str):
    """Where a server in a thread of this process listens, and what it knows."""

    server: HttpServer

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    @property
    def num_in_flight(self) -> int:
        """Requests whose head has come, and that have no whole answer."""
        return self.server.state.num_in_flight


@contextlib.contextmanager
def serving(engine: FakeEngine, **args: Any) -> Iterator[Address]:
    """The address of a real HTTP server, in a thread, that answers with `engine`."""
    server = HttpServer(engine, ServerArgs(**args))  # type: ignore[arg-type]
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    scheme = "https" if "ssl_certfile" in args else "http"
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=lambda: uvloop.run(server.serve([sock])))
        thread.start()
        try:
            address = Address(f"{scheme}://127.0.0.1:{sock.getsockname()[1]}")
            address.server = server
            yield address
        finally:
            server.should_exit = True
            thread.join()
