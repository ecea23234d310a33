"""The asynchronous engine. It takes text and yields `RequestOutput`s. The core runs in its own process.

The path of a request is here. `supervisor.py` runs the core's process, `engine_admin.py` has all other calls: adapters,
pause, sleep and the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from octavo.config import AsyncEngineArgs, EngineArgs, EngineConfig
from octavo.engine.adapter_requests import AdapterRequests
from octavo.engine.core_client import Core, CoreProcess
from octavo.engine.engine_admin import EngineAdmin
from octavo.engine.engine_calls import EngineCalls, GenerateArgs, length_of
from octavo.engine.forecast import FirstTokenForecast
from octavo.engine.input_processor import InputProcessor
from octavo.engine.off_loop import MAX_INLINE_LENGTH, run_off_loop
from octavo.engine.output_processor import OutputProcessor, RequestState
from octavo.engine.pause_and_sleep import PauseAndSleep
from octavo.engine.request_log import log_request, shown_id
from octavo.engine.request_stream import RequestStream, Sink, Stage
from octavo.engine.resubmission import Resubmission
from octavo.engine.supervisor import Supervisor, record_ready
from octavo.engine.vllm_names import refuse_kwargs
from octavo.engine.wire import Abort, CacheWasReset, CoreMessage, LiveView, Loading, Ready, StepBegins, StepOutputs
from octavo.errors import EngineStoppingError, OctavoError, RequestError
from octavo.loading.tokenizer import load_tokenizer
from octavo.logs import configure_logging
from octavo.metrics.log_line import LogLine
from octavo.metrics.prometheus import EngineMetrics
from octavo.outputs import Output, PoolingOutput, PoolingRequestOutput, RequestOutput
from octavo.request import EngineRequest
from octavo.sampling_params import is_unicode
from octavo.stats import EngineStats

if TYPE_CHECKING:
    from octavo.compat.usage import UsageContext

logger = logging.getLogger(__name__)

# The most time in one turn of the event loop for delivering outputs. Short, as a new request needs some six turns until
# its first token; not shorter, as each turn costs some 10 µs.
_DELIVERY_S = 0.00025
_STREAMS_PER_CLOCK_READING = 8  # each takes some 10 µs with its write to the socket


def _media_kinds(prompt: object) -> Collection[str]:
    """Return the kinds of a prompt's media, before `InputProcessor` has checked the prompt."""
    media = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if media is None:
        return ()
    # A wrong type is refused later; until then it counts as an image, so that a thread handles it.
    return media if isinstance(media, Mapping) else ("image",)


@dataclass(frozen=True, slots=True)
class EngineHooks:
    """Functions that an engine calls."""

    on_loading: Callable[[int, float], None] | None = None  # (engine, share): it has loaded a share of its weights
    on_core_death: Callable[[], None] | None = None  # the core has died, and its cache with it
    # Returns another engine that can continue a running request, or None.
    find_takeover_engine: Callable[[EngineRequest], AsyncLLMEngine | None] | None = None
    make_core: Callable[[EngineConfig, CoreProcess | None], Core] | None = None  # see `Supervisor`


NO_HOOKS = EngineHooks()


class AsyncLLMEngine(EngineAdmin, EngineCalls):
    """Serves many requests at once with one engine core.

    `from_engine_args` makes an engine. A server starts the `core` process earlier, before it has a configuration. All
    coroutines must run in the event loop of the first call.

    The methods that move a request to each `Stage`:

        WAITING            `_open_stream`
        RUNNING            `_register`; `take_over` has it run in this engine, `_hand_over` in another one
        ENDED, finished    `_apply_step_outputs`
        ENDED, aborted     `end_request`; the caller still gets the outputs so far
        ENDED, failed      `_apply_step_outputs`, `_core_ended`, `_register`

    If the engine fails, `_send_when_open` raises the error to the callers of WAITING requests.

    If the core dies, `Supervisor` starts another one, within `max_restarts`, and running requests keep running:
    `Resubmission` sends them to the next core with their tokens."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        metrics: EngineMetrics | None = None,
        core: CoreProcess | None = None,
        max_restarts: int = 0,
        step_timeout_s: float | None = None,
        ready_timeout_s: float | None = None,
        on_engine_death: Literal["continue", "fail"] = "continue",
        logs_requests: bool = False,
        max_log_len: int | None = None,
        input_processor: InputProcessor | None = None,
        hooks: EngineHooks = NO_HOOKS,
    ) -> None:
        """Start the core's process, and load the tokenizer. Raises `LoadError`.

        `metrics`: where steps are recorded; None: nowhere.
        `core`: a process that was started earlier, instead of a new one.
        `max_restarts`, `step_timeout_s`, `ready_timeout_s`: see `Supervisor`. A timeout of None is no limit.
        `on_engine_death`: with "fail" running requests fail when the core dies.
        `logs_requests`, `max_log_len`: log requests when they end, with so many characters of the prompt; None: all.
        `input_processor`: engines of one server share one; None: make one, with a tokenizer."""
        self.metrics, self._hooks = metrics, hooks
        self._continues_after_death = on_engine_death == "continue"
        self.stats = EngineStats()  # of the core's last step
        self.forecast = FirstTokenForecast()
        if metrics is not None and config.lora is not None:
            metrics.max_loras = config.lora.max_loras
        log_prefix = f"engine {config.data_parallel_rank}: " if len(config.served_ranks) > 1 else ""
        self._log_line = None if metrics is None else LogLine(metrics, time.monotonic(), log_prefix)
        self._supervisor = Supervisor(
            config, core, handle=self._on_core_message, on_core_ended=self._core_ended, is_busy=self._is_busy,
            max_restarts=max_restarts, step_timeout_s=step_timeout_s, ready_timeout_s=ready_timeout_s,
            make_core=hooks.make_core,
        )  # fmt: skip
        if input_processor is None:
            try:  # while the core loads the model
                tokenizer = load_tokenizer(config.model.checkpoint, config.model.chat_template)
                input_processor = InputProcessor(config, tokenizer)
            except BaseException:
                self._supervisor.core.close()
                raise
        self.inputs, self.tokenizer = input_processor, input_processor.tokenizer
        self._output_processor = OutputProcessor(
            self.tokenizer, metrics, makes_logprobs_later=True, stream_interval=config.scheduler.stream_interval,
            log_end=partial(log_request, max_length=max_log_len) if logs_requests else None,
        )  # fmt: skip
        # `tell` may lose a message to a core that dies. No harm: `core_is_ready` sends every running request again.
        self._resubmission = Resubmission(self._output_processor, self._supervisor.tell)
        # Requests by their external ids, from `_open_stream` or `take_over` until `close_stream` or `_hand_over`. Those
        # that are RUNNING are also in `_output_processor.requests`, by their internal ids.
        self._streams: dict[str, RequestStream] = {}
        self._undelivered = deque[RequestStream]()  # streams with new outputs, in order of delivery
        self._pause_and_sleep = PauseAndSleep(
            self._supervisor, lambda: not self._output_processor.requests, self._abort_all_running
        )
        self._adapters = AdapterRequests(self._supervisor, self.inputs)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs | EngineArgs,
        *,
        usage_context: UsageContext | None = None,
        metrics: EngineMetrics | None = None,
        stat_loggers: object = None,
    ) -> AsyncLLMEngine:
        """Find the model, start the core's process and load the tokenizer. Returns before the core is ready; requests
        made before that wait. Without `metrics` the engine makes its own, unless the arguments have
        `disable_log_stats`. With `data_parallel_size` the result is a `DataParallelEngine`, which has the same methods.
        `usage_context` has no effect: it is vLLM's, and no use is reported."""
        refuse_kwargs(stat_loggers=stat_loggers)
        if isinstance(engine_args, AsyncEngineArgs):
            options: Any = {"logs_requests": engine_args.logs_requests, "max_log_len": engine_args.max_log_len}
        else:
            options = {}
        return cls.from_vllm_config(engine_args.create_engine_config(), metrics=metrics, **options)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        *,
        usage_context: UsageContext | None = None,
        metrics: EngineMetrics | None = None,
        disable_log_stats: bool = False,
        **options: Any,
    ) -> AsyncLLMEngine:
        """Like `from_engine_args`, for the result of `create_engine_config`. With `disable_log_stats` the engine makes
        no metrics of its own. `options` go to the constructor."""
        configure_logging("engine")
        config = replace(vllm_config, log_stats=vllm_config.log_stats and not disable_log_stats)
        ranks = config.served_ranks
        if metrics is None and config.log_stats:
            metrics = EngineMetrics(config.model.served_model_name, config.model.max_model_len, ranks.start)
        if len(ranks) == 1:
            return cls(config.replica(ranks.start), metrics=metrics, **options)
        from octavo.engine.data_parallel import DataParallelEngine

        # No subclass: it has the same methods.
        return cast(AsyncLLMEngine, DataParallelEngine(config, metrics=metrics, **options))

    @property
    def config(self) -> EngineConfig:
        return self._supervisor.config

    @property
    def forecasts(self) -> list[FirstTokenForecast]:
        """The forecast of each engine."""
        return [self.forecast]

    @property
    def unavailable_error(self) -> OctavoError | None:
        """The reason that the engine takes no requests now; None if it takes them."""
        return self._supervisor.unavailable_error

    @property
    def has_failed(self) -> bool:
        """Whether the core has failed for good, and not by `shutdown`."""
        return self.fatal_error is not None and not isinstance(self.fatal_error, EngineStoppingError)

    @property
    def fatal_error(self) -> OctavoError | None:
        """The error of an engine that has failed for good; None otherwise."""
        return self._supervisor.fatal_error

    @property
    def is_ready(self) -> bool:
        """Whether the core takes requests."""
        return self._supervisor.is_ready

    @property
    def is_draining(self) -> bool:
        """Whether the core's host is about to stop. New requests should go to another engine."""
        return self._supervisor.is_draining

    async def wait_ready(self) -> Ready:
        """Wait until the core takes requests, and return its sizes. Raises the error that prevented its start, and
        `EngineRestartingError` during a restart."""
        return await self._supervisor.wait_ready()

    async def check_health(self) -> None:
        """Raise the present error, if there is one: `EngineDeadError`, `EngineRestartingError`, `EngineStoppingError`,
        or the error that prevented the start."""
        if self.unavailable_error is not None:
            raise self.unavailable_error

    async def wait_failed(self) -> None:
        """Wait until the engine has failed for good."""
        await self._supervisor.wait_failed()

    def stop_restarting(self) -> None:
        """From now on, do not start another core after a death."""
        self._supervisor.stop_restarting()

    async def do_log_stats(self) -> None:
        """Log one line: throughput and use since the last line. Logs nothing without metrics, or if nothing ran."""
        if self._log_line is not None:
            self._log_line.log(time.monotonic())

    def begin_shutdown(self) -> None:
        """Tell the core's process to end, without a wait. `shutdown` must follow."""
        self._supervisor.begin_shutdown()

    def shutdown(self) -> None:
        """End the core's process. Open streams raise `EngineStoppingError`."""
        self._supervisor.shutdown()

    # A request.

    async def prepare(self, args: GenerateArgs) -> EngineRequest:
        """Return the checked request, for `generate_from`. A thread handles long prompts, grammars and media. Raises
        `RequestError`."""
        request_id, lora_request = args.request_id, args.lora_request
        if not isinstance(request_id, str) or not is_unicode(request_id):
            raise RequestError(f"the request id {request_id!r} is not valid Unicode text.", param="request_id")
        arrival_time = time.monotonic()
        adapter = None
        if lora_request is not None:
            adapter = await self._adapters.find(lora_request)
            self.name_adapter(lora_request.lora_int_id, adapter)
        process = partial(
            self.inputs.process, args.prompt, args.sampling_params, priority=args.priority, arrival_time=arrival_time,
            adapter=adapter, data_parallel_rank=args.data_parallel_rank,
        )  # fmt: skip
        has_grammar = getattr(args.sampling_params, "structured_outputs", None) is not None
        return await run_off_loop(
            process, length=length_of(args.prompt), has_grammar=has_grammar, media=_media_kinds(args.prompt)
        )

    def generate_from(
        self, request: EngineRequest, external_id: str | None = None, sink: Sink | None = None,
        first_completion_token_ids: list[int] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:  # fmt: skip
        """Return the outputs of a request from `inputs.process`. The generator raises what `generate` raises. Outputs
        carry `external_id`, if given, instead of the request's own id. While the `sink` is open and the caller waits,
        outputs go to the sink; all others, and always the last one, go to the caller. `first_completion_token_ids`: an
        empty list; the engine appends the first completion's tokens to it.

        At its `deadline` the request ends with its tokens so far: finish reason "abort", stop reason "timeout".
        """
        return cast(
            AsyncGenerator[RequestOutput, None],
            self._outputs_of(request, external_id, sink, first_completion_token_ids),
        )

    async def pool(self, request: EngineRequest, external_id: str | None = None) -> PoolingRequestOutput[PoolingOutput]:
        """Return the result of a request from `PoolingInput.process`. Raises the errors of `generate_from`, and
        `RequestError`: 408 at the request's `deadline`, 503 if it is aborted."""
        async with contextlib.aclosing(self._outputs_of(request, external_id)) as outputs:
            async for output in outputs:
                if isinstance(output, PoolingRequestOutput):
                    if callable(make := output.outputs):  # `makes_logprobs_later`: vectors are made off the loop
                        output.outputs = PoolingOutput(await run_off_loop(make, length=MAX_INLINE_LENGTH + 1))
                    return output
        raise AssertionError("an aborted request raises an error")

    async def _outputs_of(
        self, request: EngineRequest, external_id: str | None = None, sink: Sink | None = None,
        first_completion_token_ids: list[int] | None = None,
    ) -> AsyncGenerator[Output, None]:  # fmt: skip
        """Yield the outputs of a checked request. Closing the generator aborts the request."""
        # 1. Give the request a stream. From here on it can be aborted.
        stream = self._open_stream(request, external_id or request.request_id, sink, first_completion_token_ids)
        timer: asyncio.TimerHandle | None = None
        try:
            # 2. Set the timer of its deadline.
            if request.deadline is not None:
                delay_s = max(0.0, request.deadline - time.monotonic())
                timer = asyncio.get_running_loop().call_later(delay_s, stream.abort, "timeout")
            # 3. Wait until the engine takes requests, and send it to the core.
            await self._send_when_open(stream)
            for output in stream.replayed_outputs:
                yield output
            # 4. Yield its outputs. `_on_core_message` brings them.
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            # 5. Close its stream, and abort it if it still runs.
            if timer is not None:
                timer.cancel()
            stream.engine.close_stream(stream)  # not `self`: another engine may have taken the request over
            del stream  # break the reference cycle stream → error → traceback → this frame

    def _open_stream(
        self, request: EngineRequest, external_id: str, sink: Sink | None, first_completion_token_ids: list[int] | None
    ) -> RequestStream:
        """Return the stream of a new request. Raises `RequestError` for an id in use and for Python callables."""
        if request.params.logits_processors:
            raise RequestError(
                "logits_processors are Python callables and run only with an LLM of one engine, in its process; use "
                "logit_bias here.",
                param="logits_processors",
            )
        if external_id in self._streams:
            raise RequestError(f"request id {external_id!r} is in use.", param="request_id")
        stream = RequestStream(request, external_id, self, sink, first_completion_token_ids)
        self._streams[external_id] = stream
        return stream

    async def _send_when_open(self, stream: RequestStream) -> None:
        """Send a request to the core when the engine takes requests, unless the request is aborted before. Raises the
        error of an engine that has failed or is being restarted, and the errors of `_register`."""
        self._supervisor.listen()
        # A loop: between the end of the wait and this task's next turn the engine may be paused again.
        while not self.is_ready or self._pause_and_sleep.is_paused:
            waiter = stream.open_waiter = asyncio.ensure_future(self._pause_and_sleep.wait_open())
            try:
                # Not `await waiter`: `end_request` cancels the waiter, and that would look like a cancelled task here.
                await asyncio.wait((waiter,))
            finally:
                stream.open_waiter = None
                waiter.cancel()
            if stream.stage is Stage.ENDED:  # aborted
                if not waiter.cancelled():
                    waiter.exception()  # asyncio logs errors that nobody asks for
                return
            waiter.result()
        self._send_to_core(self._register(stream))

    def _register(self, stream: RequestStream) -> RequestState:
        """Return the new state of a request, which is RUNNING now. The stream gets the outputs that another server has
        sent. Raises `RequestError` if these end the answer: the request has failed then."""
        request = stream.request
        state = self._output_processor.add(request, stream.external_id, stream.first_completion_token_ids)
        stream.follow(state)
        try:
            stream.replayed_outputs = [
                self._output_processor.replay(state, token_ids) for token_ids in request.already_sent_token_ids
            ]
        except RequestError as error:
            self._output_processor.drop(request.request_id, error)
            raise
        return state

    def _send_to_core(self, state: RequestState) -> None:
        """Send a request to the core, and count it in the forecast if it has no token yet."""
        if not state.num_tokens:
            self.forecast.add(state.request.request_id, len(state.request.prompt.token_ids))
        self._resubmission.submit(state)

    # Aborts. Each calls `end_request`, the first two through `RequestStream.abort`:
    #
    #   method                  ends                 and then
    #   abort                   the named requests   wakes the caller; a request for vectors fails
    #   _abort_all_running      all RUNNING ones     the same
    #   abort_all_for_shutdown  all, WAITING too     wakes the caller; a request without a token fails
    #   close_stream            one, if RUNNING      removes its stream: the caller has gone

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests. A stream of text gets its output so far, with the finish reason "abort"; `pool` raises
        `RequestError` (503). Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            if (stream := self._streams.get(one)) is not None:
                stream.abort()

    async def abort_all_for_shutdown(self) -> None:
        """Abort all requests as the server stops. A stream with a first token gets its output so far, with the finish
        reason "abort". Other streams raise `EngineStoppingError`."""
        for stream in list(self._streams.values()):
            state = self.end_request(stream)
            if state is not None and state.metrics.first_token_time is None and not state.num_tokens:
                stream.fail_without_output(EngineStoppingError("the server is stopping."))
            elif state is not None:
                stream.wake()

    def _abort_all_running(self) -> None:
        for stream in list(self._streams.values()):
            if stream.stage is Stage.RUNNING:
                stream.abort()

    # Called by `RequestStream` and by other engines.

    def end_request(self, stream: RequestStream, stop_reason: str | None = None) -> RequestState | None:
        """End a request. Returns the request's state, with its last output; the caller has to wake the stream. Returns
        None if there is nothing to wake: the request has ended before, or replaying `already_sent_token_ids` has
        failed, and the stream raises that error."""
        request_id = stream.request.request_id
        if stream.stage is Stage.WAITING:
            # The core does not have the request. The state made here only gives the caller its last output.
            if stream.open_waiter is not None:
                stream.open_waiter.cancel()
            try:
                self._register(stream)
            except RequestError as error:
                stream.fail(error)
        elif stream.stage is Stage.RUNNING and self.is_ready:  # otherwise no core has the request
            self._supervisor.tell(Abort(request_id))
        return self._output_processor.abort(request_id, stop_reason)

    def close_stream(self, stream: RequestStream) -> None:
        """Forget a request whose caller reads no further output. Abort it if it still runs. `_outputs_of` calls this
        exactly once for each stream, on the engine that has it then."""
        self.forecast.forget(stream.request.request_id)
        del self._streams[stream.external_id]
        if stream.stage is Stage.RUNNING:
            self.end_request(stream)
        stream.close()

    def take_over(self, stream: RequestStream, state: RequestState) -> None:
        """Continue a request of another engine whose core has died. External ids are unique among the engines of a
        `DataParallelEngine`, which checks them."""
        assert stream.external_id not in self._streams and stream.stage is Stage.RUNNING
        stream.engine = self
        self._streams[stream.external_id] = stream
        self._output_processor.adopt(state)
        self._count_continued(1)
        self._send_to_core(state)

    # The core's messages, and its death.

    def _on_core_message(self, message: CoreMessage) -> None:
        """Handle a message that `Supervisor` passes on."""
        match message:
            case StepOutputs():
                self._apply_step_outputs(message)
            case StepBegins(request_ids=request_ids):
                self._resubmission.step_begins(request_ids)
            case LiveView(sequences=sequences):
                for one in sequences:
                    state = self._output_processor.requests.get(one.request_id)
                    # "": a request of another front end
                    one.request_id = "" if state is None else shown_id(state.external_id, one.request_id)
                self._pause_and_sleep.take_live_view(message)
            case CacheWasReset():
                self._pause_and_sleep.cache_was_reset(message)
            case Loading(share=share):
                if self._hooks.on_loading is not None:
                    self._hooks.on_loading(self.config.place, share)
            case Ready():
                self._core_is_ready(message)

    def _apply_step_outputs(self, step: StepOutputs) -> None:
        """Add a step's outputs to their requests, and have the streams deliver them."""
        # 1. Note what the core says of itself and of adapters.
        self.stats = step.stats
        self.forecast.record_step(step.outputs, step.stats)
        if self.metrics is not None:
            self.metrics.record_step(step.stats)
        for loaded in step.adapters:
            self._adapters.adapter_loaded(loaded)
        # 2. Add tokens and text. Sequences that stop strings have ended are aborted in the core.
        changed, aborts = self._output_processor.update(step.outputs)
        for abort in aborts:
            self._supervisor.tell(abort)
        # 3. Have the streams deliver. First outputs go to the front: under load a delivery may take several turns of
        # `_DELIVERY_S`.
        is_delivery_scheduled, firsts = bool(self._undelivered), list[RequestStream]()
        for state in changed:
            stream = state.stream
            if stream is not None and not stream.is_undelivered:
                stream.is_undelivered = True
                is_first = state.metrics.first_token_time == state.last_token_time
                (firsts if is_first else self._undelivered).append(stream)
        self._undelivered.extendleft(reversed(firsts))
        if self._undelivered and not is_delivery_scheduled:
            asyncio.get_running_loop().call_soon(self._deliver)  # after the messages of the core that are here already
        # 4. Count the step. A request that is tried alone (`Resubmission`) may have passed its trial with it.
        self._resubmission.step_ended()

    def _deliver(self) -> None:
        """Deliver new outputs until `_DELIVERY_S` is over. The rest follows in the next turn of the event loop."""
        undelivered, end = self._undelivered, time.monotonic() + _DELIVERY_S
        assert undelivered, "this is scheduled while there are undelivered outputs, and only once"
        try:
            while undelivered:
                for _ in range(min(len(undelivered), _STREAMS_PER_CLOCK_READING)):
                    undelivered.popleft().deliver()
                if time.monotonic() >= end:
                    break
        finally:
            if undelivered:
                asyncio.get_running_loop().call_soon(self._deliver)

    def _core_is_ready(self, ready: Ready) -> None:
        """Give a new core the last core's halt, pinned adapters and requests, in this order: a request must find the
        core halted and its adapter pinned."""
        self._pause_and_sleep.halt_again()
        self._adapters.pin_again()
        if number := self._resubmission.core_is_ready():
            logger.info("%d requests go on with this engine core", number)
        self._count_continued(number)
        self.inputs.model = self.config.model  # `inputs` is shared by the engines of a server: all have one model
        if self.metrics is not None:
            record_ready(self.metrics, ready, self.config)

    def _is_busy(self) -> bool:
        """Return whether requests run, and the core may be in a step."""
        return bool(self._output_processor.requests) and self._pause_and_sleep.may_compute

    def _core_ended(self, error: OctavoError) -> None:
        """Give each running request to another engine, keep it for the next core, or fail it."""
        # 1. Fail callers that wait for the core's answers, and reset the stats to an idle engine's.
        self._pause_and_sleep.core_ended()
        self._adapters.core_ended(error)
        if self._hooks.on_core_death is not None:
            self._hooks.on_core_death()
        self.stats = EngineStats()
        if self.metrics is not None:
            self.metrics.num_restarts = self._supervisor.num_restarts
            self.metrics.record_step(self.stats)
        # 2. Find requests that crash the core.
        crash_errors = self._resubmission.core_ended()
        # 3. Decide about each running request.
        fatal_error = self.fatal_error
        may_continue = self._continues_after_death and not isinstance(fatal_error, EngineStoppingError)
        for stream in list(self._streams.values()):
            request_id, state = stream.request.request_id, stream.state
            if state is None or state.is_over:
                continue
            crash_error = crash_errors.get(request_id)
            if may_continue and crash_error is None:
                if self._hand_over(stream, state):
                    continue
                if fatal_error is None:
                    continue  # this engine's next core gets it
            self._output_processor.drop(request_id, crash_error or error)
            stream.fail(crash_error or error)

    def _hand_over(self, stream: RequestStream, state: RequestState) -> bool:
        """Let another engine continue a request. Returns False if no engine can, or if the request may crash cores."""
        request, find = state.request, self._hooks.find_takeover_engine
        if find is None or self._resubmission.is_suspect(request.request_id):
            return False
        if (other := find(request)) is None:
            return False
        self.forecast.forget(request.request_id)
        del self._streams[stream.external_id]
        self._output_processor.release(request.request_id)
        other.take_over(stream, state)
        return True

    def _count_continued(self, number: int) -> None:
        if self.metrics is not None:
            self.metrics.num_continued += number
