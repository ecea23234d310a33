"""The server process: binds the port, starts the engine, serves, and stops on a signal.

The order makes the start fast. The port is bound first, so that a taken port costs no loading of a model; then the
engine core's process is started, which imports its modules while this process finds the model, and loads the model
while this process reads the tokenizer and imports the web framework; then the server answers, with 503 until the core
is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.config import AsyncEngineArgs, EngineConfig
from octavo.engine.core_client import CoreProcess
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.errors import ConfigError, OctavoError
from octavo.logs import configure_logging
from octavo.metrics.log_line import LogLine
from octavo.metrics.prometheus import EngineMetrics
from octavo.phases import Phases
from octavo.processes import allow_files, bind, collect_rarely, event_loop_factory
from octavo.variables import COUNTERPARTS, HARMLESS

if TYPE_CHECKING:
    from octavo.engine.engine_client import EngineClient
    from octavo.engine.engine_hub import EngineHub
    from octavo.entrypoints.http.front_ends import FrontEnds
    from octavo.entrypoints.http.start_display import StartDisplay

logger = logging.getLogger("octavo.server")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOGGERS = ("octavo", "uvicorn", "asyncio", "opentelemetry")


class _Started(NamedTuple):
    """The parts of a server that exist before the event loop runs."""

    engine: EngineClient
    metrics: EngineMetrics
    args: ServerArgs
    sock: socket.socket
    phases: Phases
    display: StartDisplay


class _StartedHub(NamedTuple):
    """The parts of a server with several front ends that exist before the event loop runs."""

    hub: EngineHub
    front_ends: FrontEnds
    metrics: EngineMetrics
    phases: Phases
    display: StartDisplay


def run_server(engine_args: AsyncEngineArgs, args: ServerArgs) -> None:
    """Serve until SIGINT or SIGTERM. Raises `OctavoError` if the server cannot start."""
    if _is_headless(engine_args, args):
        run_headless(engine_args, args)
        return
    with (
        contextlib.suppress(KeyboardInterrupt),
        _start(engine_args, args) as started,
        asyncio.Runner(loop_factory=event_loop_factory()) as runner,
    ):
        runner.run(_serve(started) if isinstance(started, _Started) else _serve_by_several(started))


async def serve(engine_args: AsyncEngineArgs, args: ServerArgs) -> None:
    """Do the same as `run_server` in a running event loop of the main thread. Cancelling the task stops serving too.
    The loop's other tasks stand still while the model is found and the tokenizer read."""
    if _is_headless(engine_args, args):
        run_headless(engine_args, args)
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        with contextlib.suppress(KeyboardInterrupt), _start(engine_args, args) as started:
            await (_serve(started) if isinstance(started, _Started) else _serve_by_several(started))
    finally:
        for number, handler in handlers.items():
            asyncio.get_running_loop().remove_signal_handler(number)
            if handler is not None:  # None: the handler was not Python's, and Python cannot restore it
                signal.signal(number, handler)
        gc.enable()  # if the start has failed
        gc.unfreeze()


def _is_headless(engine_args: AsyncEngineArgs, args: ServerArgs) -> bool:
    starts_later = engine_args.data_parallel_start_rank and not engine_args.data_parallel_hybrid_lb
    return bool(args.headless or engine_args.node_rank or starts_later)


@contextlib.contextmanager
def _start(engine_args: AsyncEngineArgs, args: ServerArgs) -> Iterator[_Started | _StartedHub]:
    """Start everything up to the event loop. Raises `OctavoError`, and `KeyboardInterrupt` for a signal before the
    event loop handles signals."""
    phases = Phases()
    args.check()
    configure_logging("server", names=LOGGERS, log_format=args.log_format)
    _warn_of_vllm_variables()
    allow_files(args.max_connections + 256)  # the limit of files must not end connections before --max-connections does
    for number in _SIGNALS:  # SIGINT too: a parent may have had it ignored
        signal.signal(number, signal.default_int_handler)
    with _bind(args, listens=args.api_server_count == 1) as sock:
        registry = start_prometheus(args)
        core = CoreProcess()
        gc.disable()  # until all modules are imported: collections would find nothing
        phases.end("core process")
        try:
            config = engine_args.create_engine_config()
            if args.kv_cache_peers and config.cache.disk is None:
                raise ConfigError("--kv-cache-peers copies blocks into the folder of --kv-cache-disk; name one.")
        except BaseException:
            core.close()
            raise
        name, length = config.model.served_model_names[0], config.model.max_model_len
        metrics = EngineMetrics(name, length, config.served_ranks.start)
        if registry is not None:
            registry.register(metrics)
        phases.end("configuration")
        if args.api_server_count > 1:
            with _start_hub(config, args, metrics, core, sock, phases) as started:
                yield started
            return
        from octavo.engine.async_engine import EngineHooks
        from octavo.engine.engine_client import make_engine
        from octavo.entrypoints.chat.chat_template import compile_chat_template
        from octavo.entrypoints.http.start_display import StartDisplay

        display = StartDisplay(config, args, sock)
        engine = make_engine(
            config,
            metrics=metrics,
            core=core,
            on_engine_death=args.on_engine_death,
            hooks=EngineHooks(on_loading=display.show_loading),
            logs_requests=args.logs_requests,
            max_log_len=args.max_log_len,
            **_supervision(args),
        )
        compile_chat_template(engine.tokenizer)
        phases.end("tokenizer")
        try:
            yield _Started(engine, metrics, args, sock, phases, display)
        finally:
            display.clear()
            engine.shutdown()


def _supervision(args: ServerArgs) -> dict[str, Any]:
    """Return the arguments of `Supervisor` that flags decide."""
    return {
        "max_restarts": args.max_engine_restarts,
        "step_timeout_s": args.engine_step_timeout or None,
        "ready_timeout_s": args.engine_ready_timeout or None,
    }


@contextlib.contextmanager
def _start_hub(
    config: EngineConfig, args: ServerArgs, metrics: EngineMetrics, core: CoreProcess, sock: socket.socket,
    phases: Phases,
) -> Iterator[_StartedHub]:  # fmt: skip
    """Start the engines that several front ends share."""
    from octavo.engine.engine_hub import EngineHub
    from octavo.entrypoints.http.front_ends import FrontEnds, check_engines, one_store, share_port
    from octavo.entrypoints.http.start_display import StartDisplay

    with contextlib.ExitStack() as stack:
        try:
            check_engines(config, args)
            several = share_port(sock, args.api_server_count, is_path=args.uds is not None)
            sockets = stack.enter_context(several)
            own_args, store_folder = stack.enter_context(one_store(args))
        except BaseException:
            core.close()
            raise
        display = StartDisplay(config, args, sockets[0])
        hub = EngineHub(config, metrics=metrics, core=core, on_loading=display.show_loading, **_supervision(args))
        phases.end("engines")
        try:
            fronts = FrontEnds(hub, config, own_args, sockets, LOGGERS, store_folder)
            yield _StartedHub(hub, fronts, metrics, phases, display)
        finally:
            display.clear()
            hub.shutdown()


def run_headless(engine_args: AsyncEngineArgs, args: ServerArgs) -> None:
    """Run as a node beside node 0, until node 0 ends or SIGINT or SIGTERM. Raises `OctavoError` if the node cannot
    join."""
    args.check()
    first, rank = engine_args.data_parallel_start_rank, engine_args.node_rank
    if not args.headless:
        if rank:
            raise ConfigError(f"--node-rank {rank} serves nothing, and needs --headless; node 0 serves.")
        raise ConfigError(
            f"--data-parallel-start-rank {first} serves nothing, and needs --headless; engine 0's host serves. Or each "
            "host has a server of its own: --data-parallel-hybrid-lb."
        )
    if engine_args.data_parallel_hybrid_lb:
        raise ConfigError(
            "--data-parallel-hybrid-lb starts a server on each host, --headless starts none: leave one out."
        )
    if not rank and not first:
        raise ConfigError(
            "--headless is for other nodes than node 0, which serves; add --node-rank or --data-parallel-start-rank."
        )
    name = f"node {rank}" if rank else f"host of engine {first}"
    configure_logging(name, names=LOGGERS, log_format=args.log_format)
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        config = engine_args.create_engine_config()
        if rank:
            from octavo.execution.node import run_node

            run_node(config, args.engine_ready_timeout or None)
            return
        from octavo.engine.engine_node import EngineNode

        EngineNode(
            config,
            max_restarts=args.max_engine_restarts,
            ready_timeout_s=args.engine_ready_timeout or None,
            shutdown_timeout_s=args.shutdown_timeout,
        ).run()


async def _serve(started: _Started) -> None:
    engine, metrics, args, sock, phases, display = started
    from octavo.entrypoints.http.uvicorn_server import HttpServer
    from octavo.entrypoints.openai.lora_adapters import load_named

    server = HttpServer(engine, args)
    phases.end("HTTP server")

    async def watch() -> None:
        collect_rarely(has_middlewares=bool(args.middleware))
        await _watch(engine, partial(load_named, server.state), metrics, phases, display)

    def end(_: asyncio.Task[None]) -> None:
        server.should_exit = True

    watcher = asyncio.create_task(watch())
    watcher.add_done_callback(end)
    try:
        await server.serve(sockets=[sock])
    except asyncio.CancelledError:
        await server.shutdown(sockets=[sock])
        raise
    finally:
        watcher.cancel()
        await asyncio.wait((watcher,))
    error = None if watcher.cancelled() else watcher.exception()
    is_own_fault = isinstance(error, ConfigError) or not isinstance(error, OctavoError)
    if error is not None and (engine.has_failed or is_own_fault):
        raise error


async def _serve_by_several(started: _StartedHub) -> None:
    hub, front_ends, metrics, phases, display = started
    gc.enable()
    await front_ends.run(lambda: _watch(hub, hub.wait_named_adapters, metrics, phases, display))


async def _watch(
    engine: EngineClient | EngineHub,
    load_adapters: Callable[[], Awaitable[str | None]],
    metrics: EngineMetrics,
    phases: Phases,
    display: StartDisplay,
) -> None:
    """Show what is served when the engine is ready, and log a line about it now and then. Raises the error that keeps
    the engine from starting, `ConfigError` if `load_adapters` returns a reason, and later the error that ends the
    engine for good."""
    ready = await engine.wait_ready()
    phases.end("wait for core")
    if (reason := await load_adapters()) is not None:
        raise ConfigError(reason)
    metrics.record_startup("server", phases.seconds)
    display.show_ready(engine.config, ready, phases.total)
    log_lines = [
        asyncio.create_task(
            LogLine(one, time.monotonic(), f"engine {one.engine}: " if len(metrics.of_engines) > 1 else "").run(
                log=engine.config.log_stats
            )
        )
        for one in metrics.of_engines
    ]
    try:
        await engine.wait_failed()
    finally:
        for log_line in log_lines:
            log_line.cancel()
    raise OctavoError("the engine has died and the server gives up; the log says how.")


@contextlib.contextmanager
def _bind(args: ServerArgs, *, listens: bool = True) -> Iterator[socket.socket]:
    """Yield the listening socket. It listens immediately, because a port that is only bound could be bound a second
    time. With `listens` false a port is only bound: `share_port` follows."""
    if args.uds is not None:
        yield from _bind_path(args.uds)
        return
    with bind(args.host, args.port, listens=listens) as sock:
        yield sock


def _bind_path(path: str) -> Iterator[socket.socket]:
    """Yield a socket that listens at a path. The path is removed when the server ends. An existing socket without a
    listener is replaced."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if Path(path).is_socket():
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    Path(path).unlink()
        try:
            sock.bind(path)
            sock.listen(2048)
        except OSError as error:
            raise ConfigError(f"cannot listen at --uds {path}: {error.strerror or error}.") from None
        try:
            yield sock
        finally:
            with contextlib.suppress(OSError):
                Path(path).unlink()


def _warn_of_vllm_variables() -> None:
    """Warn of each of vLLM's variables that is set and has no effect here."""
    for name in sorted(os.environ):
        if name.startswith("VLLM_") and name not in HARMLESS:
            counterpart = COUNTERPARTS.get(name)
            instead = f"; use {counterpart}" if counterpart else ""
            logger.warning("%s is set and has no effect%s", name, instead)


def start_prometheus(args: ServerArgs) -> Any:
    """Return the registry of the extra metrics port, or None without one."""
    if args.prometheus_port is None:
        return None
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    try:
        prometheus_client.start_http_server(args.prometheus_port, args.host, registry)
    except OSError as error:
        raise ConfigError(f"cannot listen at --prometheus-port {args.prometheus_port}: {error.strerror}.") from None
    return registry
