"""The engine core as a process: `python -m octavo.engine.core_process`, started by `core_client.CoreProcess`.

It starts with its imports, while its parent makes the configuration. Then it reads one line of JSON (`CoreProcessArgs`)
from standard input, which stays open: when it closes, the parent has ended, and the core ends too. Messages go over two
ZeroMQ sockets. The loop is a single thread; while it has work it looks for messages between steps, otherwise it sleeps
until one comes.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import zmq

from octavo.engine import wire
from octavo.engine.core import EngineCore
from octavo.errors import OctavoError
from octavo.logs import configure_logging
from octavo.phases import Phases
from octavo.processes import follow_parent
from octavo.request import EngineRequest

if TYPE_CHECKING:
    from octavo.kv_cache.block_writer import BlockWriter

logger = logging.getLogger("octavo.engine.core_process")  # not __name__, which may be __main__

_LOSS_S = 1.0  # the watcher of the workers reports within this time which worker died first
_IDLE_MS = 1000  # without a message, after which work begins that holds up steps
_ORPHAN_SAVING_S = 2.0  # if the parent has died: the next server may need this process's memory

_goodbyes: list[Callable[[], object]] = []  # called before the process ends with its parent


def main() -> None:
    """Run until the parent ends or something fails. Exit status 1: a `Failed` message was sent."""
    started, log_format = sys.argv[1:]
    phases = Phases(float(started))
    lines = queue.SimpleQueue[bytes]()
    threading.Thread(target=follow_parent, args=(lines, _say_goodbye), daemon=True).start()
    phases.end("process")
    gc.disable()  # imported objects stay: collections would scan them for 0.2 s and free nothing
    from octavo.execution import executor  # noqa: F401

    phases.end("imports")
    args = msgspec.json.decode(lines.get(), type=wire.CoreProcessArgs)
    phases.end("wait for configuration")
    _goodbyes.append(partial(shutil.rmtree, os.path.dirname(args.end_path), ignore_errors=True))  # the parent's sockets
    configure_logging("core", args.log_level, log_format=log_format)
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receiver.connect(args.input_address)
    sender.setsockopt(zmq.SNDHWM, 0)
    sender.connect(args.output_address)
    try:
        _run(args, phases, receiver, sender, lines)
    except OctavoError as e:
        sender.send(wire.encode_message(wire.Failed(str(e), expected=True)))
    except BaseException as e:
        logger.exception("the engine core failed")
        sender.send(wire.encode_message(wire.Failed(f"{type(e).__name__}: {e}", expected=False)))
    context.destroy(linger=2000)
    sys.exit(1)


def _run(
    args: wire.CoreProcessArgs, phases: Phases, receiver: zmq.Socket[bytes], sender: zmq.Socket[bytes],
    lines: queue.SimpleQueue[bytes],
) -> None:  # fmt: skip
    core = EngineCore(args.config, on_loading=_LoadingReport(sender))
    from octavo.execution.executor import MultiprocExecutor

    gc.freeze()  # from here on collections scan only newer objects
    gc.enable()
    executor = core.executor
    if isinstance(executor, MultiprocExecutor):
        executor.worker_group.on_death(partial(_die, args.end_path))
        _goodbyes.append(executor.worker_group.say_goodbye)
    if core.disk is not None:
        _goodbyes.append(partial(_save_blocks, core.disk.writer, lines))
    ready = wire.Ready(
        max_model_len=executor.max_model_len,
        num_blocks=sum(executor.num_blocks),
        num_host_blocks=sum(executor.num_host_blocks),
        block_size=args.config.cache.block_size,
        weight_bytes=executor.weight_bytes,
        cache_bytes=executor.cache_bytes,
        startup=phases.seconds | executor.startup,
    )
    sender.send(wire.encode_message(ready))
    core.on_admission = lambda request_ids: sender.send(wire.encode_message(wire.StepBegins(request_ids)))
    try:
        _serve(core, receiver, sender, lacks_vocabulary=args.config.model.pooling is None)
    except Exception:
        if isinstance(executor, MultiprocExecutor):  # a worker may have died, which `_die` reports
            threading.Event().wait(_LOSS_S)
        raise


class _LoadingReport:
    """Sends the share of the weights that are loaded, at most fifty times in a start."""

    def __init__(self, sender: zmq.Socket[bytes]) -> None:
        self._sender, self._sent = sender, 0.0

    def __call__(self, share: float) -> None:
        if share - self._sent >= 0.02 or share == 1:
            self._sent = share
            self._sender.send(wire.encode_message(wire.Loading(share)))


def _serve(core: EngineCore, receiver: zmq.Socket[bytes], sender: zmq.Socket[bytes], *, lacks_vocabulary: bool) -> None:
    """Handle messages and run steps. A core that `lacks_vocabulary` for grammars makes it once it has nothing to do, so
    that the first request with a grammar does not hold up the steps of others."""
    while True:
        has_news = core.has_work
        if not has_news:
            while not wire.is_readable(receiver) and core.save_blocks():
                pass
            if lacks_vocabulary and not receiver.poll(_IDLE_MS):
                core.executor.load_vocabulary()
                lacks_vocabulary = False
            has_news = _handle(core, sender, receiver.recv())
        while wire.is_readable(receiver):
            has_news |= _handle(core, sender, receiver.recv())
        if core.has_work or (has_news and not core.is_paused):
            # A step without work still reports that aborts have emptied the engine.
            sender.send(wire.encode_message(core.step()))


def _handle(core: EngineCore, sender: zmq.Socket[bytes], data: bytes) -> bool:
    """Handle a message. Returns whether it may have given the core new work."""
    match wire.decode_frontend_message(data):
        case wire.GetLiveView():
            sender.send(wire.encode_message(core.live_view()))
            return False
        case wire.ResetCache(frees_memory):
            core.reset_prefix_cache(frees_memory=frees_memory)
            sender.send(wire.encode_message(wire.CacheWasReset()))
            return False
        case wire.DropCacheSession(session, salt):
            num_blocks = None if core.disk is None else core.disk.sessions.drop(session, salt)
            sender.send(wire.encode_message(wire.CacheWasReset(num_blocks)))
            return False
        case wire.SetPaused(is_paused):
            core.is_paused = is_paused
        case EngineRequest() as request:
            core.add(request)
        case wire.LoadAdapter(source, pins):
            core.load_adapter(source, pins)
        case wire.UnloadAdapter(identity):
            core.unload_adapter(identity)
        case wire.Abort(request_id, index):
            core.abort(request_id, index)
        case wire.AbortAll(prefix):
            core.abort_all(prefix)
        case wire.Trials():
            return False
    return True


def _say_goodbye() -> None:
    for say in _goodbyes:
        say()


def _save_blocks(writer: BlockWriter, lines: queue.SimpleQueue[bytes]) -> None:
    """Wait until the engine's thread has saved all blocks. The parent's last line says how long; one that has died has
    written none."""
    seconds = _ORPHAN_SAVING_S if lines.empty() else float(lines.get())
    if not writer.wait_until_saved(seconds):
        logger.warning("%d blocks of the KV cache were not saved on disk within %g s", writer.num_unwritten, seconds)


def _die(end_path: str, why: str) -> None:
    """End the process because a worker has died: the core may be waiting for it. The parent starts all workers again
    and tells clients the reason."""
    logger.error("%s; the engine core ends", why)
    with contextlib.suppress(OSError), open(end_path, "x", encoding="utf-8") as file:  # the first death
        file.write(why)
    os._exit(1)


if __name__ == "__main__":
    main()
