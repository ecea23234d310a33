"""The engines of a server that has several front ends (`--api-server-count`), in the process that owns them.

The hub starts the cores, watches them and starts them again with `Supervisor`, as `AsyncLLMEngine` does. Each front end
is a process with its own `AsyncLLMEngine` over `hub_link.HubCore`. It has a connection to the hub, which passes
messages on: a request's id begins with the number of its front end, so that the hub knows where its outputs go. When a
front end ends, its requests are aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.engine import wire
from octavo.engine.core_client import CoreProcess
from octavo.engine.hub_link import Answering, Channels, CoreEnded
from octavo.engine.prompt_notes import PromptNotes
from octavo.engine.sleep_names import PAUSE_MODES, SLEEP_MODES, SLEEPERS, check_level, check_mode, woken_by
from octavo.engine.supervisor import Supervisor, record_ready
from octavo.errors import EngineDeadError, OctavoError
from octavo.metrics.prometheus import EngineMetrics
from octavo.metrics.summed import Snapshot, render_sum, snapshot, sum_of
from octavo.request import EngineRequest, SequenceOutput
from octavo.stats import EngineStats

logger = logging.getLogger(__name__)

_MAX_UNSENT_BYTES = 256 << 20  # messages for a front end that does not read them
# A front end that has not finished a call after `_PROBE_S` is asked for a sign of life, and is given up if it does not
# answer within `_HANGS_S`: a call may wait hours for running requests, but no front end is busy for a minute.
_PROBE_S, _HANGS_S = 10.0, 60.0
_SNAPSHOT_S = 2.0  # for a front end to send its metrics; otherwise its last metrics count
_LOAD, _UNLOAD = "load_lora_adapter", "unload_lora_adapter"

_encode_raw = msgspec.msgpack.Encoder().encode


class _Outputs(msgspec.Struct, tag="step"):
    """`StepOutputs` for one front end. The part that is equal for all is encoded once."""

    outputs: list[SequenceOutput]
    stats: msgspec.Raw
    adapters: list[wire.AdapterLoaded]


class FrontEnd:
    """One front end, as the hub sees it."""

    def __init__(self, hub: EngineHub, number: int) -> None:
        self.number = number
        self.prefix = f"{number}-"
        self.channels = Channels(partial(hub.take, self), lambda ended: None, partial(hub.detach, self))
        self.channels.answering = hub.answering
        self.last = Snapshot()  # its metrics at the last request

    def send(self, rank: int, data: bytes) -> None:
        """Pass a message on. A front end that does not read is given up."""
        self.channels.send(rank, data)
        if self.channels.num_unsent_bytes > _MAX_UNSENT_BYTES:
            self._give_up("does not read its messages")

    async def call(self, name: str, **args: Any) -> Any:
        """Have the front end do something, which may take long, and return the result. A front end that answers no
        probe meanwhile is given up. Raises its `OctavoError`, and `EngineDeadError` if it ends."""
        asked = asyncio.ensure_future(self.channels.call(name, **args))
        try:
            while not (await asyncio.wait((asked,), timeout=_PROBE_S))[0]:
                try:
                    await asyncio.wait_for(self.channels.call("snapshot"), _HANGS_S)
                except TimeoutError:
                    self._give_up("does not answer")
                except OctavoError:
                    pass  # the front end has ended, and `asked` raises the error
            return await asked
        finally:
            asked.cancel()

    def _give_up(self, reason: str) -> None:
        logger.error("front end %d %s and is given up", self.number, reason)
        self.channels.close()


class _Engine:
    """One engine: its supervisor, and the front ends that wait for answers of its core."""

    def __init__(
        self, hub: EngineHub, config: EngineConfig, core: CoreProcess | None, metrics: EngineMetrics, **options: Any
    ) -> None:
        self._hub, self.metrics = hub, metrics
        self.rank = config.data_parallel_rank
        self.supervisor = Supervisor(
            config, core, handle=self._handle, on_core_ended=self._core_ended, is_busy=self._is_busy, **options
        )
        self._ready = b""  # the `Ready` message of the last core
        self.has_core = False  # a core is ready
        self.has_ended = asyncio.Event()  # set from the end of a core until the next one is ready
        self._resets: deque[FrontEnd] = deque()  # front ends that wait for an answer; the core answers in order
        self._views: deque[FrontEnd] = deque()
        self._has_requests = self._is_paused = False
        self._untold: set[FrontEnd] = set()  # front ends that have not reported yet how many requests they want to try
        self._num_trials: dict[FrontEnd, int] = {}
        self._without_core: dict[FrontEnd, None] = {}  # front ends that wait for their turn with a new core, in order
        self._on_trial: FrontEnd | None = None
        self._held: dict[str, tuple[FrontEnd, bytes]] = {}  # requests of other front ends meanwhile, by id

    def attach(self, front: FrontEnd) -> None:
        """Give a new front end the core, if it is ready. While the core sleeps, the front end is told that it is ready,
        so that it can fall asleep too; `say_ended` follows."""
        if self._hub.is_asleep:
            front.send(self.rank, self._ready)
            return
        self._without_core[front] = None
        self._give_core()

    def detach(self, front: FrontEnd) -> None:
        """Abort the requests of a front end that has ended, and wait for it no more."""
        self._untold.discard(front)
        self._num_trials.pop(front, None)
        self._without_core.pop(front, None)
        self._held = {request_id: one for request_id, one in self._held.items() if one[0] is not front}
        self.supervisor.tell(wire.AbortAll(front.prefix))
        if self._on_trial is front:
            self._on_trial = None
        self._give_core()

    def take(self, front: FrontEnd, data: bytes) -> None:
        """Pass a front end's message on to the core."""
        message = wire.decode_frontend_message(data)
        match message:
            case wire.Trials(number):
                self._num_trials[front] = number
                self._untold.discard(front)
                if self._on_trial is front and not number:
                    self._on_trial = None
                self._give_core()
                return
            case EngineRequest() | wire.ResetCache() | wire.DropCacheSession() | wire.GetLiveView() if (
                not self.has_core or front in self._untold
            ):
                return  # sent before the front end knew of the core's end; it will ask the next core
            case wire.ResetCache() | wire.DropCacheSession():
                self._resets.append(front)
            case wire.GetLiveView():
                self._views.append(front)
            case wire.SetPaused(is_paused):
                self._is_paused = is_paused
            case EngineRequest(request_id) if self._on_trial not in (None, front):
                self._held[request_id] = front, data
                return
            case wire.Abort(request_id) if self._held.pop(request_id, None) is not None:
                return  # the core never had it
            case EngineRequest():
                self._has_requests = True
        self.supervisor.tell(message)

    def _handle(self, message: wire.CoreMessage) -> None:
        fronts = self._hub.fronts
        match message:
            case wire.StepOutputs(outputs, stats, adapters):
                self._has_requests = stats.num_running + stats.num_waiting + stats.num_swapped > 0
                of_front: dict[str, list[SequenceOutput]] = {number: [] for number in fronts}
                for output in outputs:
                    if (own := of_front.get(output.request_id.partition("-")[0])) is not None:
                        own.append(output)
                encoded = msgspec.Raw(_encode_raw(stats))
                for number, front in fronts.items():
                    front.send(self.rank, _encode_raw(_Outputs(of_front[number], encoded, adapters)))
                self.metrics.record_step(stats)
            case wire.StepBegins(request_ids=request_ids):
                for front in fronts.values():
                    own_ids = [one for one in request_ids if one.startswith(front.prefix)]
                    front.send(self.rank, wire.encode_message(wire.StepBegins(own_ids)))
            case wire.Loading(share=share):
                self._hub.on_loading(self.rank, share)
            case wire.LiveView():
                self._views.popleft().send(self.rank, wire.encode_message(message))
            case wire.CacheWasReset():
                self._resets.popleft().send(self.rank, wire.encode_message(message))
            case wire.Ready():
                self._ready, self.has_core = wire.encode_message(message), True
                self.has_ended.clear()
                record_ready(self.metrics, message, self.supervisor.config)
                self._without_core = dict.fromkeys(fronts.values())
                self._give_core()

    def _give_core(self) -> None:
        """Give the core to the front ends that wait for it: first to those that have requests to try, one after the
        other, then to all others."""
        if not self.has_core or self._untold or self._on_trial is not None:
            return
        for front in self._without_core:
            if self._num_trials.get(front):
                self._on_trial = front
                del self._without_core[front]
                front.send(self.rank, self._ready)
                return
        for front in self._without_core:
            front.send(self.rank, self._ready)
        self._without_core.clear()
        held, self._held = self._held, {}
        for front, data in held.values():
            self.take(front, data)

    def _core_ended(self, error: OctavoError) -> None:
        """Tell all front ends that the core has ended. Each of them answers with the number of requests that it wants
        to try."""
        self.has_core, self._on_trial = False, None
        self.has_ended.set()
        for queue in (self._resets, self._views, self._held, self._without_core):
            queue.clear()
        self._has_requests = False
        fronts = self._hub.fronts
        is_final = self.supervisor.fatal_error is not None
        self._untold = set() if is_final else set(fronts.values())
        self.metrics.num_restarts = self.supervisor.num_restarts
        self.metrics.record_step(EngineStats())
        for front in fronts.values():
            front.channels.say(CoreEnded(self.rank, self.supervisor.end_reason, is_final))

    def _is_busy(self) -> bool:
        return self._has_requests and (not self._is_paused or bool(self._views))

    def say_ended(self, front: FrontEnd) -> None:
        """Tell a front end that started while the core sleeps that there is no core."""
        if not self.has_core:
            front.channels.say(CoreEnded(self.rank, self.supervisor.end_reason, False))


async def _end_core(engine: _Engine) -> None:
    await engine.supervisor.end_core()
    await engine.has_ended.wait()


class EngineHub:
    """All engines of a server. All coroutines belong to one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        metrics: EngineMetrics,
        core: CoreProcess | None = None,
        on_loading: Callable[[int, float], None] = lambda rank, share: None,
        **options: Any,
    ) -> None:
        """`on_loading(rank, share)` is called when an engine has loaded `share` of its weights. `options` are
        `Supervisor`'s: restarts and timeouts."""
        self.on_loading = on_loading
        self.metrics = metrics
        self.fronts: dict[str, FrontEnd] = {}  # by number
        self._numbers = itertools.count(1)
        self._retired = Snapshot()  # counts of front ends that have ended
        # Calls that a new front end must make too, by topic ("pause", "adapter NAME", ...): name and arguments.
        self._standing: dict[str, tuple[str, dict[str, Any]]] = {}
        self._num_holding = self._num_resumes = 0  # pauses under way; resumes so far
        self._prompt_notes = PromptNotes()
        self.answering: dict[str, Answering] = {
            "pause_generation": self._pause,
            "resume_generation": self._resume,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            _LOAD: partial(self._change_adapter, _LOAD),
            _UNLOAD: partial(self._change_adapter, _UNLOAD),
            "metrics": self._render,
            "note_prompt": self._note_prompt,
            "read_notes": self._read_notes,
            "named_adapters_loaded": self._note_named_adapters,
        }
        self._named_adapters = asyncio.Event()  # set when a front end has loaded them, or one has failed
        self._named_adapter_error: str | None = None
        ranks = config.served_ranks
        length = config.model.max_model_len
        metrics.of_engines += [EngineMetrics(metrics.model_name, length, rank) for rank in ranks[1:]]
        self._engines: dict[int, _Engine] = {}
        self._asleep: frozenset[str] = frozenset()  # of `SLEEPERS`
        try:
            for place, rank in enumerate(ranks):
                own = metrics.of_engines[place]
                own.max_loras = 0 if config.lora is None else config.lora.max_loras
                self._engines[rank] = _Engine(self, config.replica(rank), core if place == 0 else None, own, **options)
        except BaseException:
            if core is not None and not self._engines:
                core.close()
            self.shutdown()
            raise

    @property
    def config(self) -> EngineConfig:
        """The configuration of the first engine; once the engine is ready, with its measured sizes."""
        return next(iter(self._engines.values())).supervisor.config

    @property
    def has_failed(self) -> bool:
        """Whether an engine has failed to start, or all have died."""
        errors = [engine.supervisor.fatal_error for engine in self._engines.values()]
        all_were_ready = all(engine.supervisor.ready is not None for engine in self._engines.values())
        return all(errors) if all_were_ready else any(errors)

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    async def wait_ready(self) -> wire.Ready:
        """Return when all engines have been ready, with the sizes of one."""
        ready: list[wire.Ready] = await self._all_engines(lambda engine: engine.supervisor.wait_ready())
        return ready[0]

    async def wait_failed(self) -> None:
        """Return when all engines have died."""
        await self._all_engines(lambda engine: engine.supervisor.wait_failed())

    async def wait_named_adapters(self) -> str | None:
        """Return when the adapters of --lora-modules are loaded, with the reason if one cannot be served."""
        await self._named_adapters.wait()
        return self._named_adapter_error

    async def _note_named_adapters(self, error: str | None) -> None:
        self._named_adapter_error = error
        self._named_adapters.set()

    def stop_restarting(self) -> None:
        for engine in self._engines.values():
            engine.supervisor.stop_restarting()

    def shutdown(self) -> None:
        for engine in self._engines.values():  # so that they save their blocks at the same time
            engine.supervisor.begin_shutdown()
        for engine in self._engines.values():
            engine.supervisor.shutdown()
        for front in list(self.fronts.values()):
            front.channels.close()

    def new_number(self) -> int:
        """Return the number of the next front end. Numbers are never used again, so that messages for an ended front
        end go nowhere."""
        return next(self._numbers)

    async def attach(self, sock: socket.socket, number: int) -> FrontEnd:
        """Serve the front end at the other end of the connection."""
        front = FrontEnd(self, number)
        await front.channels.open(sock)
        self.fronts[str(number)] = front
        for engine in self._engines.values():
            engine.attach(front)
        return front

    async def begin(self, front: FrontEnd) -> None:
        """Wait until a front end has started, and repeat the others' standing calls there. A call that fails, for
        example because an adapter's files are gone, is logged and skipped. Raises `EngineDeadError` if the front end
        ends."""
        await front.channels.call("snapshot")
        for topic in list(self._standing):
            if topic not in self._standing or (topic == "pause" and self.is_asleep):
                continue  # it was undone meanwhile, or nobody answers, and waking ends the pause
            name, args = self._standing[topic]
            try:
                await front.channels.call(name, **args)
            except EngineDeadError:
                raise
            except OctavoError as error:
                logger.error("front end %d is without %s: %s", front.number, args.get("lora_name", name), error)
        if self.is_asleep:
            for engine in self._engines.values():
                engine.say_ended(front)

    def detach(self, front: FrontEnd) -> None:
        """Forget a front end that has ended, and abort its requests. Its counters stay in the metrics."""
        if self.fronts.pop(str(front.number), None) is None:
            return
        self._retired = sum_of([self._retired, front.last])
        for engine in self._engines.values():
            engine.detach(front)

    def take(self, front: FrontEnd, rank: int, data: bytes) -> None:
        """Pass a front end's message on to the core of an engine."""
        self._engines[rank].take(front, data)

    async def _all_engines(self, ask: Callable[[_Engine], Awaitable[Any]]) -> list[Any]:
        return await asyncio.gather(*map(ask, self._engines.values()))

    async def tell_all(self, name: str, **args: Any) -> list[Any]:
        """Have every front end do something, and return the results. A front end that ends meanwhile gives none. Raises
        the first error."""
        results = await asyncio.gather(
            *(front.call(name, **args) for front in list(self.fronts.values())), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EngineDeadError):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    async def _hold(self, **args: Any) -> bool:
        """Have every front end pause. Returns False if they were resumed meanwhile. If one of them fails, all resume:
        requests of paused front ends would wait for ever."""
        if args["mode"] != "keep" and "pause" in self._standing:  # a front end that starts meanwhile halts no core
            name, standing = self._standing["pause"]
            self._standing["pause"] = name, {**standing, "mode": args["mode"]}
        self._num_holding += 1
        num_resumes = self._num_resumes
        try:
            await self.tell_all("pause_generation", **args)
        except OctavoError:
            if self._num_holding == 1 and not self._standing.keys() & {"pause", "sleep"}:
                await self.tell_all("resume_generation")
            raise
        finally:
            self._num_holding -= 1
        return self._num_resumes == num_resumes

    async def _pause(self, **args: Any) -> None:
        check_mode(args["mode"], PAUSE_MODES)
        if await self._hold(**args):
            self._standing["pause"] = "pause_generation", {**args, "clear_cache": False}

    async def _resume(self) -> None:
        self._num_resumes += 1
        self._standing.pop("pause", None)
        await self.tell_all("resume_generation")

    async def _sleep(self, level: int, mode: str) -> None:
        """See `PauseAndSleep.sleep`. The memory is freed when no front end has requests any more."""
        check_level(level)
        check_mode(mode, SLEEP_MODES)
        while not await self._hold(mode=mode, clear_cache=False):
            pass
        try:
            await self.tell_all("sleep", level=level, mode=mode)
        except OctavoError:
            if not self.is_asleep:
                await self._undo_sleep()
            raise
        if self.is_asleep:
            return
        self._asleep = SLEEPERS
        self._standing["sleep"] = "sleep", {"level": level, "mode": mode}
        if level != 1 or self.config.device != "cpu":
            await self._all_engines(_end_core)
        self._record_sleep(level)

    async def _undo_sleep(self) -> None:
        """Wake every front end, and leave it paused only if it was before."""
        paused = self._standing.get("pause")
        await self._wake_up(None)
        if paused is None:
            await self.tell_all("resume_generation")
        else:
            await self._pause(**paused[1])

    async def _wake_up(self, tags: Iterable[str] | None) -> None:
        chosen = None if tags is None else list(tags)
        woken = woken_by(chosen)
        for engine in self._engines.values():
            engine.supervisor.start_core()
        await self.tell_all("wake_up", tags=chosen)
        self._asleep -= woken
        if not self._asleep:
            self._standing.pop("sleep", None)
            self._standing.pop("pause", None)
            self._num_resumes += 1
            self._record_sleep(0)

    def _record_sleep(self, level: int) -> None:
        for metrics in self.metrics.of_engines:
            metrics.sleep_level = level

    async def _change_adapter(self, name: str, **args: Any) -> str:
        said = await self.tell_all(name, **args)
        about = f"adapter {args['lora_name']}"
        self._standing.pop(about, None)
        if name == _LOAD:
            self._standing[about] = name, {**args, "load_inplace": False}
        return str(said[0])

    async def _note_prompt(self, names: str) -> None:
        self._prompt_notes.add(names)

    async def _read_notes(self, **place: Any) -> tuple[dict[str, Any], list[str]]:
        """Return the notes of gateways and the names of the adapters on a device."""
        resident = [name for engine in self.metrics.of_engines for name in engine.last.resident_adapters]
        return self._prompt_notes.read(**place), resident

    async def _render(self) -> tuple[bytes, str]:
        """Return the metrics of the engines and of all front ends together: a text, and its content type."""

        async def ask(front: FrontEnd) -> None:
            with contextlib.suppress(OctavoError, TimeoutError):
                found = await asyncio.wait_for(front.channels.call("snapshot"), _SNAPSHOT_S)
                front.last = msgspec.convert(found, Snapshot)

        await asyncio.gather(*map(ask, self.fronts.values()))
        now = [front.last for front in self.fronts.values()]  # front ends that have ended meanwhile are in `_retired`
        return await asyncio.to_thread(lambda: render_sum(snapshot(self.metrics), sum_of([self._retired, *now])))
