"""The asynchronous engine: text in, streams of `RequestOutput` out, with the core in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.config import AsyncEngineArgs, EngineArgs, EngineConfig, ModelConfig
from octavo.engine.core_client import CoreClient, CoreProcess
from octavo.engine.forecast import FirstTokenForecast
from octavo.engine.input_processor import InputProcessor, PromptInput
from octavo.engine.off_loop import MAX_INLINE_LENGTH, run_off_loop
from octavo.engine.output_processor import OutputProcessor, RequestFailed
from octavo.engine.request_log import log_request
from octavo.engine.restarts import Restarts
from octavo.engine.sleeping import SLEEPERS, check_level, woken_by
from octavo.engine.wire import (
    Abort,
    AdapterLoaded,
    BlockMap,
    CacheWasReset,
    CoreMessage,
    Failed,
    FrontendMessage,
    GetBlockMap,
    LoadAdapter,
    Ready,
    ResetCache,
    SetPaused,
    StepOutputs,
    UnloadAdapter,
)
from octavo.errors import EngineDeadError, EngineRestartingError, EngineStoppingError, OctavoError, RequestError
from octavo.loading.tokenizer import load_tokenizer
from octavo.lora.request import LoRARequest
from octavo.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from octavo.request import AdapterSource, EngineRequest
from octavo.sampling_params import SamplingParams, is_unicode
from octavo.stats import EngineStats

if TYPE_CHECKING:
    from octavo.loading.tokenizer import ModelTokenizer
    from octavo.metrics.prometheus import EngineMetrics

logger = logging.getLogger(__name__)

PAUSE_MODES = ("abort", "wait", "keep")
_BLOCK_MAP_TIMEOUT_S = 5.0  # a step of the core, and then some


Output = RequestOutput | PoolingRequestOutput[PoolingOutput]


def _length(prompt: PromptInput) -> int:
    given = prompt.get("prompt_token_ids") or prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return len(given) if isinstance(given, str | list | tuple) else 0


class _Stream(asyncio.Queue[Output | OctavoError]):
    """Outputs of one request on their way to its caller, or the error that ended it."""

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self.request_id = request_id  # the core's


class AsyncLLMEngine:
    """Many requests at once over one engine core.

    Make it with `from_engine_args`; servers start the `core` before they have a configuration. All coroutines belong to
    one event loop, that of the first call.

    A core that has been ready once and dies fails the requests under way. Then it is started again, up to
    `max_restarts` quick deaths in a row (`Restarts`); after that, and by default at once, the engine has died. A core
    that has work and finishes no step for `step_timeout_s`, or that loads for longer than `ready_timeout_s`, counts as
    dead, and is killed.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        metrics: EngineMetrics | None = None,
        core: CoreProcess | None = None,
        max_restarts: int = 0,
        step_timeout_s: float | None = None,
        ready_timeout_s: float | None = None,
        logs_requests: bool = False,
        max_log_len: int | None = None,
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.stats = EngineStats()  # of the core's last step
        self.forecast = FirstTokenForecast()
        if metrics is not None and config.lora is not None:
            metrics.max_loras = config.lora.max_loras
        self._restarts = Restarts(max_restarts)
        self._step_timeout_s = step_timeout_s
        self._ready_timeout_s = ready_timeout_s
        self._logs_requests, self._max_log_len = logs_requests, max_log_len
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
        self._adapters: dict[int, AdapterSource] = {}  # by `lora_int_id`
        self._loading: dict[str, list[asyncio.Future[None]]] = {}  # who waits for an adapter, by its identity
        self._supervisor: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._num_messages = 0  # from the core
        self._end_reason: str | None = None  # why the core is about to end, if that is known
        self._ready: Ready | None = None
        self._ready_event = asyncio.Event()  # ready, or it will never be
        self._outage: EngineRestartingError | None = None  # while the core is started again
        self._failure: OctavoError | None = None  # for good
        self._failure_event = asyncio.Event()
        self._block_map: asyncio.Future[BlockMap] | None = None
        self._resets: list[asyncio.Future[None]] = []  # that wait for the core
        self._is_open = asyncio.Event()  # to new requests; not while paused or asleep
        self._is_open.set()
        self._asleep: frozenset[str] = frozenset()  # of `SLEEPERS`
        self._wake: asyncio.Event | None = None  # set to go on with a core again after one has ended to sleep
        self._next_core: CoreProcess | None = None  # meanwhile: it has imported what it needs, and no model
        self._is_closed = False

    @classmethod
    def from_engine_args(
        cls, args: AsyncEngineArgs | EngineArgs, *, metrics: EngineMetrics | None = None
    ) -> AsyncLLMEngine:
        """Find the model, start the core's process and load the tokenizer. Returns before the core is ready; requests
        made before that wait."""
        if isinstance(args, AsyncEngineArgs):
            log: Any = {"logs_requests": args.logs_requests, "max_log_len": args.max_log_len}
        else:
            log = {}
        return cls(args.create_engine_config(), metrics=metrics, **log)

    @property
    def has_died(self) -> bool:
        """Whether the core has ended for good without `shutdown`."""
        return self._failure is not None and not isinstance(self._failure, EngineStoppingError)

    @property
    def is_ready(self) -> bool:
        return self._ready is not None and self._failure is None and self._outage is None

    async def wait_ready(self) -> Ready:
        """Return when the core takes requests, with what it has. Raises what kept it from starting, and
        `EngineRestartingError` while it is started again."""
        self._listen()
        await self._ready_event.wait()
        await self.check_health()
        assert self._ready is not None
        return self._ready

    async def check_health(self) -> None:
        """Raise `EngineDeadError`, or the error that kept the core from starting, if it is not running."""
        if (error := self._failure or self._outage) is not None:
            raise error

    async def wait_failed(self) -> None:
        """Return when the engine has died and will not come back."""
        self._listen()
        await self._failure_event.wait()

    def stop_restarting(self) -> None:
        """Do not start a core that dies from now on again."""
        self._restarts.limit = 0

    async def get_model_config(self) -> ModelConfig:
        return self.config.model

    async def get_tokenizer(self) -> ModelTokenizer:
        return self.tokenizer

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None,
        request_id: str,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs as they come (`SamplingParams.output_kind` says how much each holds), computed with
        an adapter if one is named.

        Raises `RequestError` for a request that cannot run, `EngineDeadError` when the core has gone. Closing the
        generator, or cancelling the task that iterates it, aborts the request and frees its blocks.
        """
        if not isinstance(request_id, str) or not is_unicode(request_id):
            raise RequestError(f"the request id {request_id!r} is not valid Unicode text.", param="request_id")
        arrival_time = time.monotonic()
        adapter = None if lora_request is None else await self._find_adapter(lora_request)
        request = await run_off_loop(
            lambda: self.inputs.process(
                prompt, sampling_params, priority=priority, arrival_time=arrival_time, adapter=adapter
            ),
            length=_length(prompt),
            has_grammar=sampling_params is not None and sampling_params.structured_outputs is not None,
        )
        if self._logs_requests:
            log_request(logger, request_id, request.prompt, request.params, self._max_log_len)
        async with contextlib.aclosing(self.generate_from(request, request_id)) as outputs:
            async for output in outputs:
                yield output

    async def generate_from(
        self, request: EngineRequest, shown_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """`generate` for a request that `inputs.process` has made. Outputs bear `shown_id`, if that is not its own.

        At the request's `deadline` it ends with what it has: finish reason "abort", stop reason "timeout".
        """
        async with contextlib.aclosing(self._outputs_of(request, shown_id)) as outputs:
            async for output in outputs:
                assert isinstance(output, RequestOutput)
                yield output

    async def pool(self, request: EngineRequest) -> PoolingRequestOutput[PoolingOutput]:
        """What a request for pooling gives, which `PoolingInput.process` has made. Raises as `generate_from` does, and
        `RequestError` (408) at the request's `deadline`."""
        async with contextlib.aclosing(self._outputs_of(request)) as outputs:
            async for output in outputs:
                if isinstance(output, PoolingRequestOutput):
                    return output
        raise RequestError("the request was not answered in the time that it may take.", status=408, code="timeout")

    async def _outputs_of(self, request: EngineRequest, shown_id: str | None = None) -> AsyncGenerator[Output, None]:
        await self._is_open.wait()
        await self.wait_ready()
        shown_id = shown_id or request.request_id
        if request.params.logits_processors:
            raise RequestError(
                "logits_processors are Python callables and run only with LLM, in its process; use logit_bias here.",
                param="logits_processors",
            )
        if shown_id in self._streams:
            raise RequestError(f"request id {shown_id!r} is in use.", param="request_id")
        stream = self._streams[shown_id] = _Stream(request.request_id)
        timer: asyncio.TimerHandle | None = None
        try:
            self._outputs.add(request, shown_id)
            if request.deadline is not None:
                delay_s = max(0.0, request.deadline - time.monotonic())
                timer = asyncio.get_running_loop().call_later(delay_s, self._expire, stream)
            prompt = msgspec.structs.replace(request.prompt, text=None)  # which the core has no use for
            self._core.send(msgspec.structs.replace(request, prompt=prompt))
            self.forecast.add(request.request_id, len(prompt.token_ids))
            while True:
                output = await stream.get()
                if isinstance(output, OctavoError):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            if timer is not None:
                timer.cancel()
            self.forecast.end(request.request_id)
            del self._streams[shown_id]
            self._abort_now(stream)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams end with what they have, finish reason "abort". Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            stream = self._streams.get(one)
            if stream is not None and (output := self._abort_now(stream)) is not None:
                stream.put_nowait(output)

    async def end_all(self) -> None:
        """End every request, because the server stops: those that have begun keep what they have, with finish reason
        "abort"; the others raise `EngineStoppingError`."""
        for stream in list(self._streams.values()):
            output = self._abort_now(stream)
            if output is not None:
                has_begun = output.metrics is not None and output.metrics.first_token_time is not None
                stream.put_nowait(output if has_begun else EngineStoppingError("the server is stopping."))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Bring an adapter to the host and check it, before a request asks for it. Raises `RequestError` if it cannot
        be served."""
        await self.load_adapter(await self._find_adapter(lora_request))
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget the adapter of a `lora_int_id`. Whether there was one."""
        found = self._adapters.pop(lora_id, None)
        if found is not None and all(one.identity != found.identity for one in self._adapters.values()):
            self.unload_adapter(found.identity)
        return found is not None

    async def list_loras(self) -> set[int]:
        """The `lora_int_id`s that have been asked for and not removed."""
        return set(self._adapters)

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep the adapter of a `lora_int_id` on the host, and on the device while others can make room."""
        found = self._adapters.get(lora_id)
        if found is None:
            raise RequestError(f"there is no adapter {lora_id}; add it first.", param="lora_id")
        await self.load_adapter(found, pins=True)
        return True

    async def load_adapter(self, source: AdapterSource, pins: bool = False) -> None:
        """Return when an adapter is on the host. Raises `RequestError` if it cannot be served."""
        await self.wait_ready()
        waiting = self._loading.setdefault(source.identity, [])
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(ready)
        self._core.send(LoadAdapter(source, pins))
        await ready

    def unload_adapter(self, identity: str) -> None:
        """Free an adapter's memory when no request uses it."""
        self._tell(UnloadAdapter(identity))

    async def _find_adapter(self, asked: LoRARequest) -> AdapterSource:
        found = await run_off_loop(lambda: self.inputs.find_adapter(asked), length=MAX_INLINE_LENGTH + 1)
        self._adapters[asked.lora_int_id] = found
        return found

    async def block_map(self) -> BlockMap | None:
        """What each KV block is used for, between two steps; None from a core that takes too long to say.

        Callers that ask at the same time share one answer; without a caller nothing is gathered.
        """
        await self.wait_ready()
        if self._block_map is None or self._block_map.done():
            self._block_map = asyncio.get_running_loop().create_future()
            self._tell(GetBlockMap())
        asked = self._block_map
        await asyncio.wait((asked,), timeout=_BLOCK_MAP_TIMEOUT_S)
        if not asked.done():
            self._block_map = None
            return None
        return asked.result()

    @property
    def is_paused(self) -> bool:
        return not self._is_open.is_set()

    @property
    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    async def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Let new requests wait until `resume_generation`. Those under way end with what they have (`mode` "abort"),
        run to their end first ("wait"), or stand still ("keep"; the cache is not cleared then)."""
        if mode not in PAUSE_MODES:
            raise RequestError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}.", param="mode")
        await self.wait_ready()
        self._is_open.clear()
        if mode == "keep":
            self._tell(SetPaused(True))
            return
        if mode == "abort":
            await self.abort(list(self._streams))
        while self._outputs.requests:  # noqa: ASYNC110 - nothing tells that the last one has ended
            await asyncio.sleep(0.01)
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Take requests again, and go on with those that stand still. Nothing happens while the engine sleeps."""
        if not self._asleep:
            self._tell(SetPaused(False))
            self._is_open.set()

    async def reset_prefix_cache(self, *, frees_memory: bool = False) -> bool:
        """Forget what has been computed for others to share. False if the core ended meanwhile, and its cache too."""
        await self.wait_ready()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resets.append(done)
        self._tell(ResetCache(frees_memory))
        try:
            while not done.done() and self.is_ready:
                await asyncio.wait((done,), timeout=0.2)
        finally:
            if not done.done():
                self._resets.remove(done)
        return done.done()

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free memory until `wake_up`; requests wait.

        Level 1 keeps the weights and frees the KV cache. Level 2 ends the core's process, with all that it holds;
        another one waits, with nothing but its modules. On GPUs, whose memory a process gives back only at its end,
        level 1 does as level 2, and weights are read again from the page cache.
        """
        check_level(level)
        if mode not in ("abort", "wait"):
            raise RequestError(f"mode must be abort or wait, got {mode!r}.", param="mode")
        if self._asleep:
            return
        await self.pause_generation(mode, clear_cache=False)
        self._asleep = SLEEPERS
        if level == 1 and self.config.device == "cpu":
            await self.reset_prefix_cache(frees_memory=True)
        else:
            self._wake = asyncio.Event()
            self._ready_event.clear()
            self._core.end()
            await asyncio.to_thread(self._core.process.wait)
            self._next_core = CoreProcess()
        logger.info("the engine sleeps (level %d)", level)

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Have memory again, for "weights", the "kv_cache", or both. Requests go on when both have it."""
        woken = woken_by(tags)
        if not self._asleep:
            return
        if self._wake is not None:
            self._wake.set()
        await self.wait_ready()
        self._asleep -= woken
        await self.resume_generation()

    def shutdown(self) -> None:
        """End the core's process. Streams still open raise `EngineDeadError`."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in (self._supervisor, self._watchdog):
            if task is not None and not task.get_loop().is_closed():
                task.cancel()
        self._fail(EngineStoppingError("the engine has been shut down."))
        self._core.close()
        if self._next_core is not None:
            self._next_core.close()

    def _expire(self, stream: _Stream) -> None:
        if (output := self._abort_now(stream, stop_reason="timeout")) is not None:
            stream.put_nowait(output)

    def _abort_now(self, stream: _Stream, stop_reason: str | None = None) -> RequestOutput | None:
        output = self._outputs.abort(stream.request_id, stop_reason)
        if output is not None and self.is_ready:
            self._tell(Abort(stream.request_id))
        return output

    def _tell(self, message: FrontendMessage) -> None:
        """Send a message that may be lost: if the core has just died, the supervisor notices."""
        with contextlib.suppress(EngineDeadError):
            self._core.send(message)

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        if self._supervisor is None:
            self._supervisor = loop.create_task(self._supervise())
            if self._step_timeout_s is not None:
                self._watchdog = loop.create_task(self._watch_steps(self._step_timeout_s))
        elif self._supervisor.get_loop() is not loop:
            raise RuntimeError("this AsyncLLMEngine belongs to another event loop; make one engine for each loop.")

    async def _supervise(self) -> None:
        """Take in the core's messages, and start it again when it dies, until it is given up."""
        try:
            while True:
                reason = await self._follow_core()
                self._core.close()
                if self._wake is not None:  # it has ended to sleep
                    await self._wake.wait()
                    self._core, self._next_core = CoreClient(self.config, self._next_core), None
                    self._wake = None
                    continue
                delay_s = self._restarts.next_delay(time.monotonic()) if self._ready is not None else None
                if delay_s is None:
                    self._fail(EngineDeadError(f"{reason}."))
                    return
                self._suspend(reason)
                await asyncio.sleep(delay_s)
                self._core = CoreClient(self.config)
        except asyncio.CancelledError:
            raise
        except Exception as e:
            logger.exception("the engine core cannot be started again")
            self._fail(EngineDeadError(f"the engine core cannot be started again: {type(e).__name__}."))

    async def _follow_core(self) -> str:
        """Take in the messages of one core until it has ended. Returns why it did."""
        self._end_reason = None
        timer: asyncio.TimerHandle | None = None
        if (timeout_s := self._ready_timeout_s) is not None:
            timer = asyncio.get_running_loop().call_later(timeout_s, self._check_start, timeout_s)
        try:
            await self._core.receive(self._handle)
        except Exception as e:
            logger.exception("the engine's front end failed")
            self._core.process.kill()
            self._end_reason = f"the engine's front end failed ({type(e).__name__})"
        finally:
            if timer is not None:
                timer.cancel()
        status = self._core.process.wait()
        return self._end_reason or f"the engine core has ended (exit status {status})"

    def _check_start(self, timeout_s: float) -> None:
        """Kill a core that is still not ready."""
        if not (self.is_ready and self._ready_event.is_set()) and self._end_reason is None:
            self._end_reason = f"the engine core was not ready after {timeout_s:g} s and was killed"
            self._core.process.kill()

    async def _watch_steps(self, timeout_s: float) -> None:
        """Kill a core that has work and has sent nothing for `timeout_s`; the supervisor starts it again."""
        seen, since = self._num_messages, time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, timeout_s / 4))
            now = time.monotonic()
            if not self._outputs.requests or not self.is_ready or self.is_paused or self._num_messages != seen:
                seen, since = self._num_messages, now
            elif now - since > timeout_s:
                self._end_reason = f"the engine core has finished no step for {timeout_s:g} s and was killed"
                self._core.process.kill()
                since = now

    def _handle(self, message: CoreMessage) -> None:
        self._num_messages += 1
        match message:
            case StepOutputs(outputs, stats, adapters):
                self.stats = stats
                for loaded in adapters:
                    self._end_loading(loaded)
                self.forecast.record_step(outputs, stats)
                results, aborts = self._outputs.process(outputs)
                for abort in aborts:
                    self._tell(abort)
                for result in results:
                    if (stream := self._streams.get(result.request_id)) is not None:
                        stream.put_nowait(result.error if isinstance(result, RequestFailed) else result)
                if self.metrics is not None:
                    self.metrics.record_step(stats)
            case BlockMap():
                if self._block_map is not None and not self._block_map.done():
                    self._block_map.set_result(message)
            case CacheWasReset():
                if self._resets:
                    self._resets.pop(0).set_result(None)
            case Ready():
                if self._outage is not None:
                    logger.info(
                        "the engine core takes requests again, %.1f s after its start", sum(message.startup.values())
                    )
                self._ready, self._outage = message, None
                self.config = self.config.with_max_model_len(message.max_model_len)
                self.inputs.model = self.config.model
                self._restarts.record_ready(time.monotonic())
                if self.metrics is not None:
                    self.metrics.record_startup("core", message.startup)
                    self.metrics.memory_bytes = {"weights": message.weight_bytes, "kv_cache": message.cache_bytes}
                    self.metrics.cache_config = {
                        "block_size": message.block_size,
                        "num_gpu_blocks": message.num_blocks,
                        "num_cpu_blocks": message.num_host_blocks,
                        "enable_prefix_caching": self.config.cache.enable_prefix_caching,
                    }
                self._ready_event.set()
            case Failed(text, expected=True) if self._ready is None:
                self._fail(OctavoError(text))
            case Failed(text):
                # Clients learn that it failed, and only the log how.
                logger.error("the engine core failed: %s", text)
                self._end_reason = "the engine core has failed"
                self._outage = EngineRestartingError("the engine core has failed.")  # until its end has been seen
                self._drop_requests(EngineDeadError("the engine core has failed; the request is lost."))
                self._core.process.kill()  # it has nothing more to say, and might not manage to end

    def _end_loading(self, loaded: AdapterLoaded) -> None:
        for ready in self._loading.pop(loaded.identity, []):
            if ready.done():
                continue
            if loaded.error is None:
                ready.set_result(None)
            else:
                ready.set_exception(RequestError(loaded.error, param="lora_path"))

    def _suspend(self, reason: str) -> None:
        """The core has ended and will be started again."""
        self._outage = EngineRestartingError(f"{reason}; it is being started again.")
        logger.error("%s (%d of %d quick deaths in a row are allowed)", self._outage, *self._restarts.count)
        if self.metrics is not None:
            self.metrics.num_restarts += 1
        self._drop_requests(EngineDeadError(f"{reason}; the request is lost."))

    def _fail(self, error: OctavoError) -> None:
        """End the engine for good, with `error` as the reason."""
        if self._failure is not None:
            return
        self._failure = error
        self._ready_event.set()
        self._failure_event.set()
        if not isinstance(error, EngineStoppingError):
            logger.error("%s", error)
        self._drop_requests(error)

    def _drop_requests(self, error: OctavoError) -> None:
        """Fail all requests under way."""
        for waiting in self._loading.values():
            for ready in waiting:
                if not ready.done():
                    ready.set_exception(error)
        self._loading.clear()
        self.stats = EngineStats()  # nothing runs, waits or holds a block any more
        if self.metrics is not None:
            self.metrics.record_step(self.stats)
        for stream in self._streams.values():
            if self._outputs.drop(stream.request_id):
                stream.put_nowait(error)
