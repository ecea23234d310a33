"""The server process: binds the port, starts the engine, serves, and stops on a signal.

The order is what makes the start fast. The port is bound first, so that a taken one costs no model load; then the
engine core's process is started, which imports torch while this process finds the model, and loads the model while this
process imports the tokenizer and the web framework; then the server answers, with 503 until the core is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from octavo.config import AsyncEngineArgs, EngineConfig
from octavo.engine.core_client import CoreProcess
from octavo.engine.wire import Ready
from octavo.entrypoints.openai.server_args import ServerArgs
from octavo.errors import ConfigError, OctavoError
from octavo.logs import configure_logging
from octavo.metrics.log_line import LogLine
from octavo.metrics.prometheus import EngineMetrics
from octavo.phases import Phases
from octavo.version import __version__

if TYPE_CHECKING:
    import uvicorn

    from octavo.engine.async_engine import AsyncLLMEngine

logger = logging.getLogger("octavo.server")

GRACE_S = 1.0  # how long answers under way may go on after the signal to stop
KEEP_ALIVE_S = 30  # idle connections; longer than HTTP clients keep theirs, so that it is they who close


def run_server(engine_args: AsyncEngineArgs, args: ServerArgs) -> None:
    """Serve until SIGINT or SIGTERM. Raises `OctavoError` when the server cannot start."""
    phases = Phases()
    args.check()
    configure_logging("server", names=("octavo", "uvicorn"))
    # Before the event loop takes signals over, one of them interrupts the start as Ctrl-C does.
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a parent may have had it ignored
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), _bind(args) as sock:
        registry = _start_prometheus(args)
        core = CoreProcess()
        gc.disable()  # until all is imported: collections would find nothing
        phases.end("core process")
        try:
            config = engine_args.create_engine_config()
        except BaseException:
            core.close()
            raise
        metrics = EngineMetrics(config.model.served_model_names[0], config.model.max_model_len)
        if registry is not None:
            registry.register(metrics)
        phases.end("configuration")
        from octavo.engine.async_engine import AsyncLLMEngine

        engine = AsyncLLMEngine(config, metrics=metrics, core=core)
        phases.end("tokenizer")
        try:
            import uvloop

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(engine, metrics, args, sock, phases))
        finally:
            engine.shutdown()


async def _serve(
    engine: AsyncLLMEngine, metrics: EngineMetrics, args: ServerArgs, sock: socket.socket, phases: Phases
) -> None:
    server = _make_server(engine, args)
    phases.end("HTTP server")
    failure: list[OctavoError] = []

    async def watch_start() -> None:
        # What was imported stays: collections need not look at it again, which would take 100 ms each time.
        gc.collect()
        gc.freeze()
        gc.enable()
        try:
            ready = await engine.wait_ready()
        except OctavoError as error:
            failure.append(error)
            server.should_exit = True
            return
        phases.end("wait for core")
        metrics.record_startup("server", phases.seconds)
        _print_banner(engine.config, ready, args, sock, phases.total)
        await LogLine(metrics, time.monotonic()).run(log=engine.config.log_stats)

    watcher = asyncio.create_task(watch_start())
    try:
        await server.serve(sockets=[sock])
    finally:
        watcher.cancel()
    if failure:
        raise failure[0]
    if engine.has_died:
        raise OctavoError("the engine died while the server ran; the log says when and how.")
    if watcher.done() and not watcher.cancelled() and (error := watcher.exception()):
        raise error


def _make_server(engine: AsyncLLMEngine, args: ServerArgs) -> uvicorn.Server:
    """uvicorn with our way to stop: answers under way get a moment, then an error; the exit code is 0."""
    import uvicorn

    from octavo.entrypoints.openai.app import build_app

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            # uvicorn's own would raise the signal again after a clean stop, which makes the exit code -15.
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self.stop)
            yield

        def stop(self) -> None:
            self.force_exit = self.should_exit  # the second signal does not wait
            self.should_exit = True
            app.state.octavo.is_stopping = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            for listener in self.servers:
                listener.close()
            if self.server_state.tasks and not self.force_exit:
                await asyncio.wait(set(self.server_state.tasks), timeout=GRACE_S)
            engine.shutdown()  # what is left ends with an error event
            await super().shutdown(sockets)

    app = build_app(engine, args)
    options: dict[str, Any] = {
        "loop": "none",
        "http": "httptools",
        "ws": "none",
        "lifespan": "off",
        "interface": "asgi3",
        "log_config": None,
        "server_header": False,
    }
    return Server(
        uvicorn.Config(
            app,
            log_level=args.uvicorn_log_level,
            access_log=args.uvicorn_log_level in ("info", "debug", "trace"),
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
            **options,
        )
    )


@contextlib.contextmanager
def _bind(args: ServerArgs) -> Iterator[socket.socket]:
    """The listening socket. It listens at once, because a port that is only bound can be bound a second time."""
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((args.host, args.port))
            sock.listen(2048)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {args.host}:{args.port}: {error.strerror or error}. Choose another --port or --host."
            ) from None
        yield sock


def _start_prometheus(args: ServerArgs) -> Any:
    """The registry of the extra metrics port, or None."""
    if args.prometheus_port is None:
        return None
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    try:
        prometheus_client.start_http_server(args.prometheus_port, args.host, registry)
    except OSError as error:
        raise ConfigError(f"cannot listen at --prometheus-port {args.prometheus_port}: {error.strerror}.") from None
    return registry


def _print_banner(config: EngineConfig, ready: Ready, args: ServerArgs, sock: socket.socket, seconds: float) -> None:
    """What is served, what it may hold, and where."""
    model = config.model
    num_slots = ready.num_blocks * ready.block_size
    host, port = sock.getsockname()[:2]
    shown_host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    scheme = "https" if args.ssl_certfile else "http"
    lines = {
        "model": f"{', '.join(model.served_model_names)} ({model.checkpoint.format}, {model.dtype}, {config.device})",
        "context": f"{model.max_model_len:,} tokens of prompt and output together",
        "KV cache": f"{ready.num_blocks:,} blocks of {ready.block_size} = {num_slots:,} tokens: "
        f"{num_slots / model.max_model_len:.1f} requests of full length",
        "API": f"{scheme}://{shown_host}:{port}{args.root_path}/v1",
    }
    print(f"Octavo {__version__}, ready in {seconds:.1f} s", flush=True)
    for name, text in lines.items():
        print(f"  {name:<9} {text}", flush=True)
