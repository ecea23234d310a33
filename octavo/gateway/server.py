"""The gateway's process: its socket, its signals, the watch over the catalogue's file, and its end.

SIGTERM drains: new requests are refused while those under way go on; then the models stop. A second signal ends it at
once. SIGHUP reads the catalogue again.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from octavo.api_keys import ApiKeys, check_keys, key_of, with_environment
from octavo.errors import ConfigError, RequestError
from octavo.flags import Flags, flag
from octavo.gateway.admin import AdminApp
from octavo.gateway.app import GatewayApp
from octavo.gateway.catalogue import Catalogue, named_models, read_catalogue
from octavo.gateway.deployment import DISCOVERY_WAIT_S, Launch
from octavo.gateway.error_bodies import error_body
from octavo.gateway.key_store import OnLoss, open_keys
from octavo.gateway.memory_budget import MemoryBudget
from octavo.gateway.models import FindLocal, Models
from octavo.gateway.page import Page
from octavo.gateway.proxy import WaitLimits
from octavo.gateway.request_spans import RequestSpans
from octavo.gateway.serve_process import ServeProcess
from octavo.http_server import DrainingServer
from octavo.logs import configure_logging
from octavo.processes import allow_files, bind, collect_rarely, event_loop_factory
from octavo.trace_export import check_endpoint

logger = logging.getLogger("octavo.gateway")

LOOK_INTERVAL_S = 1.0  # between looks at the catalogue's file
NOTES_WAIT_S = 1.0  # for the notes of all servers, before the first request
WRITE_TIMEOUT_S = 60.0  # a client that reads nothing for so long is cut
MAX_CONNECTIONS = 16_384  # of clients
FLUSH_TIMEOUT_S = 2.0  # for the last spans, once all requests have ended


@dataclass(frozen=True, kw_only=True)
class GatewayArgs(Flags):
    """What a user can set about the gateway."""

    catalogue: str | None = flag(
        None, "YAML file of the models (docs/gateway.md); read again when it changes, and on SIGHUP."
    )
    models_dir: list[str] = flag(
        [], "Folders of GGUF files to serve, beside the hub's cache, if neither models nor a catalogue are given."
    )
    host: str | None = flag(
        None, "Address to listen at. Default: 0.0.0.0, and 127.0.0.1 where clients may pull and delete models."
    )
    port: int = flag(8000, "Port to listen at; 0 is any free one.")
    api_key: list[str] = flag(
        [], "Keys; a client must send one of them as bearer token. Also OCTAVO_API_KEY or VLLM_API_KEY."
    )
    keys: str | None = flag(
        None, "Store of keys with limits; clients then need a key, and the admin routes change keys. An SQLite file, "
        "made if it is not there; or a database that several gateways share: "
        "postgresql://USER:PASSWORD@HOST/DATABASE, valkey://HOST/0.",
    )  # fmt: skip
    on_keys_lost: OnLoss = flag(
        "refuse", "What happens to requests that cannot be counted because the store of --keys fails. refuse: they "
        "get 503. admit: those with a known key pass, whatever its limits, and are counted later.",
        needs="keys",
    )  # fmt: skip
    admin_port: int | None = flag(None, "Port of the admin routes for --keys; 0 is any free one.")
    admin_host: str = flag("127.0.0.1", "Address of the admin routes.", needs="admin_port")
    admin_key: list[str] = flag([], "Keys of the admin routes. Also OCTAVO_ADMIN_KEY.", needs="admin_port")
    memory_gib: float | None = flag(
        None, "GiB that all models that run here may take together, by their memory_gib in the catalogue. Default: "
        "no limit.", positive=True,
    )  # fmt: skip
    max_wait: float = flag(
        300.0, "Seconds that a request may wait until its model has started, or a stream that has lost its replica "
        "for another one; then it fails with 503.", positive=True,
    )  # fmt: skip
    max_waiting: int = flag(
        256, "The most requests that may wait for models to start; further ones get 429.", positive=True
    )
    stream_keep_alive: float = flag(5.0, "Seconds between two comments in a stream that is silent; 0: none.")
    health_interval: float = flag(
        5.0, "Seconds between two health checks of a replica, and within which it must answer one.", positive=True
    )
    replica_timeout: float = flag(
        600.0, "Seconds without a byte after which a replica that is answering counts as lost.", positive=True
    )
    several_gateways: bool = flag(
        False, "Other gateways route to the same replicas. All send a new conversation to the same replica "
        "(rendezvous hashing) if the load allows it. Leave it out before Octavo's servers, which tell gateways where "
        "conversations are.",
    )  # fmt: skip
    max_body_bytes: int = flag(100 << 20, "The most bytes of a request's body.", positive=True)
    max_connections: int = flag(
        MAX_CONNECTIONS, "The most connections of clients at once. A further one closes a connection without a "
        "request, or is refused.", positive=True,
    )  # fmt: skip
    shutdown_timeout: float = flag(20.0, "Seconds that running requests may take after SIGTERM.")
    otlp_traces_endpoint: str | None = flag(
        None, "URL of an OpenTelemetry collector, which gets a span for each request; needs scripts/install otel."
    )
    log_format: Literal["text", "json"] = flag("text", "Form of the log: text, or JSON objects, one a line.")

    def check(self) -> None:
        """Raise `ConfigError` for values that cannot be honoured."""
        self.check_flags()
        for name in ("stream_keep_alive", "shutdown_timeout"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be 0 or more, got {getattr(self, name):g}.")
        for name in ("api_key", "admin_key"):
            check_keys(f"--{name.replace('_', '-')}", getattr(self, name))
        if self.otlp_traces_endpoint is not None:
            check_endpoint(self.otlp_traces_endpoint)
        if self.admin_port is not None and self.keys is None:
            raise ConfigError("--admin-port needs --keys.")
        if self.admin_port is not None and not self.admin_keys:
            raise ConfigError("--admin-port needs --admin-key or OCTAVO_ADMIN_KEY.")

    @property
    def admin_keys(self) -> list[str]:
        return [*self.admin_key, *filter(None, [key_of("OCTAVO_ADMIN_KEY")])]


def run_gateway(args: GatewayArgs, models: list[str], find_local: FindLocal) -> None:
    """Serve until SIGINT or SIGTERM: the named models, those of the catalogue, or those that `find_local` finds. Raises
    `ConfigError`."""
    args.check()
    if args.catalogue is not None and models:
        raise ConfigError("octavo gateway takes either models, MODEL_A MODEL_B, or --catalogue FILE.")
    is_open = args.catalogue is None and not models
    if args.models_dir and not is_open:
        raise ConfigError("--models-dir is for a gateway without models and without --catalogue; leave it out.")
    if is_open and args.memory_gib is not None:
        raise ConfigError("--memory-gib needs the memory_gib of each model: write a --catalogue.")
    if is_open:
        catalogue = Catalogue(find_local())
    else:
        catalogue = named_models(models) if args.catalogue is None else read_catalogue(args.catalogue)
    host = args.host or ("127.0.0.1" if is_open else "0.0.0.0")
    configure_logging("gateway", names=("octavo", "uvicorn", "asyncio"), log_format=args.log_format)
    allow_files()
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(bind(host, args.port))
        admin_sock = None
        if args.admin_port is not None:
            admin_sock = stack.enter_context(bind(args.admin_host, args.admin_port, "--admin-port or --admin-host"))
        runner = stack.enter_context(asyncio.Runner(loop_factory=event_loop_factory()))
        runner.run(_serve(args, catalogue, sock, admin_sock, find_local if is_open else None))


async def _serve(
    args: GatewayArgs,
    catalogue: Catalogue,
    sock: socket.socket,
    admin_sock: socket.socket | None,
    find_local: FindLocal | None,
) -> None:
    server = GatewayServer(args, catalogue, find_local=find_local, admin_sock=admin_sock)
    if admin_sock is not None:
        logger.info("the admin routes listen at %s", address_of(admin_sock))
    names = ", ".join(catalogue.models) + ("" if find_local is None else " and models that are pulled")
    logger.info("the gateway listens at %s, for %s", address_of(sock), names)
    collect_rarely()
    await server.serve([sock])


def address_of(sock: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


_OPTIONS: dict[str, Any] = {
    "write_timeout_s": WRITE_TIMEOUT_S, "log_level": "warning", "access_log": False, "proxy_headers": False,
}  # fmt: skip


def _refusal(status: int, message: str, code: str | None) -> bytes:
    return error_body(RequestError(message, status=status, code=code), "", "")


class GatewayServer(DrainingServer):
    """`serve` returns when the gateway and every server that it started have stopped."""

    def __init__(
        self, args: GatewayArgs, catalogue: Catalogue, launch: Launch = ServeProcess.start,
        find_local: FindLocal | None = None, admin_sock: socket.socket | None = None,
    ) -> None:  # fmt: skip
        budget = MemoryBudget(args.memory_gib)
        self.models = Models(catalogue, budget, launch, replica_timeout_s=args.replica_timeout, find_local=find_local)
        limits = WaitLimits(args.max_waiting, args.max_wait, args.stream_keep_alive)
        self.store = None if args.keys is None else open_keys(args.keys, args.on_keys_lost)
        keys = ApiKeys(with_environment(args.api_key))
        endpoint = args.otlp_traces_endpoint
        self._spans = None if endpoint is None else RequestSpans(endpoint)
        self.app = GatewayApp(
            self.models, keys, limits, max_body_bytes=args.max_body_bytes, store=self.store,
            several_gateways=args.several_gateways, spans=self._spans,
        )  # fmt: skip
        self._args, self._admin_sock = args, admin_sock
        self._seen = self._file_stamp()
        super().__init__(
            self.app, lambda: self.app.num_in_flight, _refusal, max_connections=args.max_connections, **_OPTIONS
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        if self.store is not None:
            await self.store.open()
            if self._args.admin_port is None and not await self.store.keys():
                logger.warning("--keys has no key yet: --admin-port and --admin-key open the routes that make keys")
        self.models.preload()
        with self.capture_signals():  # signals drain from the first moment on
            await self.models.wait_discovered(DISCOVERY_WAIT_S)  # clients wait in the socket's queue
            await self.models.read_notes(NOTES_WAIT_S)  # it begins without a history of its own
        tasks = [asyncio.ensure_future(self._check_health()), asyncio.ensure_future(self._watch_file())]
        admin = None
        if self.store is not None and self._admin_sock is not None:
            page = Page(self.models, self.app.metrics, self.store)
            app = AdminApp(self.store, ApiKeys(self._args.admin_keys), page, self.app.metrics)
            admin = DrainingServer(
                app, lambda: 0, _refusal, max_connections=MAX_CONNECTIONS, signals=(), **_OPTIONS
            )  # it ends when this one does
            tasks.append(asyncio.ensure_future(admin.serve([self._admin_sock])))
        try:
            await super().serve(sockets)
        finally:
            if admin is not None:
                admin.should_exit = True
                await tasks.pop()
            for task in tasks:
                task.cancel()
            await self.models.close()
            if self.store is not None:
                await self.store.close()
            if self._spans is not None:
                await asyncio.to_thread(self._spans.flush, FLUSH_TIMEOUT_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)
        with super().capture_signals():
            yield

    def reload(self) -> None:
        """Read the catalogue again. If it has an error, log that and keep the present one."""
        if self._args.catalogue is None:
            logger.warning("there is no --catalogue to read again; the models stay")
            return
        if self._draining is not None:
            return  # nothing is started any more
        self._seen = self._file_stamp()
        try:
            self.models.apply(read_catalogue(self._args.catalogue))
        except ConfigError as error:
            logger.error("the catalogue that was read before still holds: %s", error)
            return
        logger.info("the catalogue was read again: %s", ", ".join(one.name for one in self.models))
        self.models.preload()

    async def drain(self) -> None:
        self.app.begin_stop()
        timeout_s = self._args.shutdown_timeout
        if self.app.num_in_flight:
            logger.info("stopping: %d requests have %g s to end", self.app.num_in_flight, timeout_s)
        if not await self.is_idle_within(timeout_s):
            logger.warning("stopping: %d requests are cut off", self.app.num_in_flight)
            self.models.cut_off_requests()
            await self.is_idle_within(1.0)
        self.should_exit = True

    async def _check_health(self) -> None:
        while True:
            await asyncio.sleep(self._args.health_interval)
            try:
                await self.models.check_health(self._args.health_interval)
            except Exception:  # a fault of the gateway's own, which must not end the checks
                logger.exception("Unexpected error while checking health")

    async def _watch_file(self) -> None:
        while self._args.catalogue is not None:
            await asyncio.sleep(LOOK_INTERVAL_S)
            if self._file_stamp() not in (None, self._seen):
                try:
                    self.reload()
                except Exception:
                    logger.exception("Unexpected error while reading the catalogue")

    def _file_stamp(self) -> tuple[int, int, int] | None:
        """Return numbers that change with the file; None while there is no file, as when an editor replaces it."""
        try:
            found = os.stat(self._args.catalogue or "")
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
