"""The asynchronous engine: text in, streams of `RequestOutput` out, with the core in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING

import msgspec

from octavo.config import AsyncEngineArgs, EngineArgs, EngineConfig
from octavo.engine.core_client import CoreClient, CoreProcess
from octavo.engine.input_processor import InputProcessor, Prompt
from octavo.engine.output_processor import OutputProcessor, RequestFailed
from octavo.engine.wire import Abort, CoreMessage, EngineRequest, EngineStats, Failed, Ready, StepOutputs
from octavo.errors import EngineDeadError, EngineStoppingError, OctavoError, RequestError
from octavo.loading.tokenizer import load_tokenizer
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.metrics.prometheus import EngineMetrics

logger = logging.getLogger(__name__)

# Longer prompts are tokenized in a thread, so that they do not hold up the streams of others (about 2 ms).
_MAX_INLINE_CHARACTERS = 8192


class _Stream:
    """Outputs of one request on their way to its caller. `wire_id` is what the core knows the request by."""

    def __init__(self, wire_id: str) -> None:
        self.wire_id = wire_id
        self._items: deque[RequestOutput | RequestFailed | OctavoError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: RequestOutput | RequestFailed | OctavoError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput:
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._items.popleft()
        if isinstance(item, RequestFailed):
            raise RequestError(item.message)
        if isinstance(item, OctavoError):
            raise item
        return item


class AsyncLLMEngine:
    """Many requests at once over one engine core.

    Make it with `from_engine_args`; servers start the `core` before they have a configuration. All coroutines belong to
    one event loop, that of the first call.
    """

    def __init__(
        self, config: EngineConfig, *, metrics: EngineMetrics | None = None, core: CoreProcess | None = None
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.stats = EngineStats()  # of the core's last step
        self._core = CoreClient(config, core)
        try:
            # The core loads its model meanwhile.
            self.tokenizer = load_tokenizer(config.model.checkpoint, config.model.chat_template)
        except BaseException:
            self._core.close()
            raise
        self.inputs = InputProcessor(config, self.tokenizer)
        self._outputs = OutputProcessor(self.tokenizer, metrics)
        self._streams: dict[str, _Stream] = {}
        self._wire_ids = itertools.count()
        self._receiver: asyncio.Task[None] | None = None
        self._ready: Ready | None = None
        self._ready_event = asyncio.Event()
        self._failure: OctavoError | None = None
        self._is_closed = False

    @classmethod
    def from_engine_args(
        cls, args: AsyncEngineArgs | EngineArgs, *, metrics: EngineMetrics | None = None
    ) -> AsyncLLMEngine:
        """Find the model, start the core's process and load the tokenizer. Returns before the core is ready; requests
        made before that wait."""
        return cls(args.create_engine_config(), metrics=metrics)

    @property
    def has_died(self) -> bool:
        """Whether the core ended although nobody asked it to."""
        return self._failure is not None and not isinstance(self._failure, EngineStoppingError)

    @property
    def is_ready(self) -> bool:
        return self._ready is not None and self._failure is None

    async def wait_ready(self) -> Ready:
        """Return when the core takes requests, with what it has. Raises what kept it from starting."""
        self._listen()
        await self._ready_event.wait()
        await self.check_health()
        assert self._ready is not None
        return self._ready

    async def check_health(self) -> None:
        """Raise `EngineDeadError`, or the error that kept the core from starting, if it is not running."""
        if self._failure is not None:
            raise self._failure

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs as they come (`SamplingParams.output_kind` says how much each holds).

        Raises `RequestError` for a request that cannot run, `EngineDeadError` when the core has gone. Closing the
        generator, or cancelling the task that iterates it, aborts the request and frees its blocks.
        """
        arrival_time = time.monotonic()
        is_long = isinstance(prompt, str) and len(prompt) > _MAX_INLINE_CHARACTERS
        if is_long or (sampling_params is not None and sampling_params.structured_outputs is not None):
            text, request = await asyncio.to_thread(
                self.inputs.process, prompt, sampling_params, request_id, priority=priority, arrival_time=arrival_time
            )
        else:
            text, request = self.inputs.process(
                prompt, sampling_params, request_id, priority=priority, arrival_time=arrival_time
            )
        async with contextlib.aclosing(self.generate_from(request, text)) as outputs:
            async for output in outputs:
                yield output

    async def generate_from(
        self, request: EngineRequest, prompt: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """`generate` for a request that `inputs.process` has made; `prompt` is its text, which outputs repeat."""
        await self.wait_ready()
        request_id = request.request_id
        if request.params.logits_processors:
            raise RequestError(
                "logits_processors are Python callables and run only with LLM, in its process; use logit_bias here.",
                param="logits_processors",
            )
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is in use.", param="request_id")
        # The core is a step ahead: it may still report on a request whose id the caller uses again.
        request = msgspec.structs.replace(request, request_id=str(next(self._wire_ids)))
        stream = self._streams[request_id] = _Stream(request.request_id)
        try:
            self._outputs.add(request, prompt, request_id)
            self._core.send(request)
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            del self._streams[request_id]
            self._abort_now(stream)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams end with what they have, finish reason "abort". Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            stream = self._streams.get(one)
            if stream is not None and (output := self._abort_now(stream)) is not None:
                stream.put(output)

    def shutdown(self) -> None:
        """End the core's process. Streams still open raise `EngineDeadError`."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._receiver is not None and not self._receiver.get_loop().is_closed():
            self._receiver.cancel()
        self._fail(EngineStoppingError("the engine has been shut down."))
        self._core.close()

    def _abort_now(self, stream: _Stream) -> RequestOutput | None:
        output = self._outputs.abort(stream.wire_id)
        if output is not None and self._failure is None:
            self._core.send(Abort(stream.wire_id))
        return output

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        if self._receiver is None:
            self._receiver = loop.create_task(self._receive())
        elif self._receiver.get_loop() is not loop:
            raise RuntimeError("this AsyncLLMEngine belongs to another event loop; make one engine for each loop.")

    async def _receive(self) -> None:
        try:
            await self._core.receive(self._handle)
            status = self._core.process.wait()
            self._fail(EngineDeadError(f"the engine core has ended (exit status {status})."))
        except asyncio.CancelledError:
            raise
        except Exception as e:
            logger.exception("the engine's front end failed")
            self._fail(EngineDeadError(f"the engine's front end failed: {e}"))

    def _handle(self, message: CoreMessage) -> None:
        match message:
            case StepOutputs(outputs, stats):
                self.stats = stats
                results, aborts = self._outputs.process(outputs)
                for abort in aborts:
                    self._core.send(abort)
                for result in results:
                    if (stream := self._streams.get(result.request_id)) is not None:
                        stream.put(result)
                if self.metrics is not None:
                    self.metrics.record_step(stats)
            case Ready():
                self._ready = message
                if self.metrics is not None:
                    self.metrics.record_startup("core", message.startup)
                    self.metrics.record_memory(weights=message.weight_bytes, kv_cache=message.cache_bytes)
                    self.metrics.record_cache_config(
                        block_size=message.block_size,
                        num_gpu_blocks=message.num_blocks,
                        num_cpu_blocks=message.num_host_blocks,
                        enable_prefix_caching=self.config.cache.enable_prefix_caching,
                    )
                self._ready_event.set()
            case Failed(text, expected):
                self._fail(OctavoError(text) if expected else EngineDeadError(f"the engine core failed: {text}"))

    def _fail(self, error: OctavoError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self._ready_event.set()
        if self.metrics is not None:
            self.metrics.record_step(EngineStats())  # nothing runs, waits or holds a block any more
        if not isinstance(error, EngineStoppingError):
            logger.error("%s", error)
        for stream in self._streams.values():
            stream.put(error)
