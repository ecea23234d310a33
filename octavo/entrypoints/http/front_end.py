"""One of several front ends of a server, as a process: `python -m octavo.entrypoints.http.front_end`, started by
`front_ends.py`.

It serves HTTP as the process of a server with one front end does, but its engines' cores are the hub's. Its parent
gives it its listening socket, its connection to the hub and the memory of the shared counts. It ends with its parent.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import mmap
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec

from octavo.config import EngineConfig
from octavo.engine.async_engine import EngineHooks
from octavo.engine.engine_client import make_engine
from octavo.engine.hub_link import HubLink
from octavo.engine.shared_engine import SharedEngine
from octavo.entrypoints.chat.chat_template import compile_chat_template
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.shared_counts import REQUESTS_PER_S, WAITING_TOKENS, SharedCounts, num_bytes
from octavo.logs import configure_logging
from octavo.metrics.log_line import INTERVAL_S, LogLine
from octavo.metrics.prometheus import EngineMetrics
from octavo.metrics.summed import snapshot
from octavo.processes import allow_files, collect_rarely, event_loop_factory

if TYPE_CHECKING:
    from octavo.engine.engine_client import EngineClient

logger = logging.getLogger("octavo.server")

_PARENT_END_S = 1.0  # from the end of a killed parent's connections to the end of its process


class FrontEndArgs(msgspec.Struct):
    """The arguments of a front end: JSON on its standard input."""

    config: EngineConfig
    args: ServerArgs
    number: int  # of this process; its replacement gets another
    place: int  # among the front ends, from 0
    parent: int  # the process that owns the hub
    listening: int  # file descriptors
    link: int
    counts: int
    loggers: list[str]
    store_folder: str | None = None  # folder of a store that ends with its server


def main() -> None:
    """Run until the hub stops or ends."""
    given = msgspec.json.decode(sys.stdin.buffer.readline(), type=FrontEndArgs)
    args = given.args
    gc.disable()  # until all modules are imported: collections would find nothing
    configure_logging(f"front end {given.place}", names=tuple(given.loggers), log_format=args.log_format)
    args.check()  # it also runs the file of --tool-parser-plugin
    allow_files(args.max_connections + 256)
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(_serve(given))


def _end_with_hub(store_folder: str | None, parent: int) -> None:
    """End this process, as its connection has ended: its parent has ended too, or has given up this front end. If the
    parent was killed, delete the folder of its store."""
    deadline = time.monotonic() + _PARENT_END_S
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.01)
    if os.getppid() != parent and store_folder is not None:
        shutil.rmtree(store_folder, ignore_errors=True)
    os._exit(1)


async def _serve(given: FrontEndArgs) -> None:
    from octavo.entrypoints.http.uvicorn_server import HttpServer
    from octavo.entrypoints.openai import lora_adapters
    from octavo.entrypoints.openai.request_bodies import LoadAdapterRequest, UnloadAdapterRequest

    config, args = given.config, given.args
    counts = _counts(given)
    metrics = EngineMetrics(config.model.served_model_names[0], config.model.max_model_len, config.served_ranks.start)
    metrics.counts_steps, metrics.total_rate = False, partial(counts.total, REQUESTS_PER_S)
    link = HubLink(partial(_end_with_hub, given.store_folder, given.parent))
    channels = link.channels
    engine = make_engine(
        config, metrics=metrics, hooks=EngineHooks(make_core=link.make_core), on_engine_death=args.on_engine_death,
        logs_requests=args.logs_requests, max_log_len=args.max_log_len,
    )  # fmt: skip
    for place, forecast in enumerate(engine.forecasts):
        forecast.share = counts.sharing(WAITING_TOKENS + place)
    engine.inputs.be_one_of_several(given.number, given.place)
    compile_chat_template(engine.tokenizer)
    shared = SharedEngine(engine, channels)
    server = HttpServer(cast("EngineClient", shared), args, counts, takes_signals=False)
    state = server.state
    state.hub = channels

    async def tell_counts() -> Any:
        return await asyncio.to_thread(lambda: msgspec.to_builtins(snapshot(metrics)))

    async def stop() -> None:
        server.stop()

    async def load(**body: Any) -> str:
        return await lora_adapters.load(state, LoadAdapterRequest(**body))

    async def unload(**body: Any) -> str:
        return await lora_adapters.unload(state, UnloadAdapterRequest(**body))

    channels.answering = {
        **shared.own_parts,
        "snapshot": tell_counts,
        "stop": stop,
        "load_lora_adapter": load,
        "unload_lora_adapter": unload,
    }
    await channels.open(socket.socket(fileno=given.link))

    async def watch() -> None:
        collect_rarely(has_middlewares=bool(args.middleware))
        await engine.wait_ready()
        if given.place == 0:
            await channels.call("named_adapters_loaded", error=await lora_adapters.load_named(state))
        lines = [LogLine(one, time.monotonic()) for one in metrics.of_engines]
        while True:
            await asyncio.sleep(INTERVAL_S)
            _sample(metrics, lines, counts, time.monotonic())

    watching = asyncio.ensure_future(watch())
    try:
        await server.serve(sockets=[socket.socket(fileno=given.listening)])
    finally:
        watching.cancel()


def _sample(metrics: EngineMetrics, lines: Sequence[LogLine], counts: SharedCounts, now: float) -> None:
    """Set the gauges of recent averages, and tell the other front ends how many requests a second this one gets."""
    for line in lines:
        line.sample(now)
    counts.share(REQUESTS_PER_S, metrics.own_requests_per_s)


def _counts(given: FrontEndArgs) -> SharedCounts:
    num_front_ends = given.args.api_server_count
    memory = mmap.mmap(given.counts, num_bytes(num_front_ends, len(given.config.served_ranks)))
    return SharedCounts(memory, given.place, num_front_ends)


if __name__ == "__main__":
    main()
