"""The engine core as a process: `python -m octavo.engine.core_process`, started by `AsyncLLMEngine`.

Its standard input brings one line of JSON (`CoreProcessArgs`) and then stays open: when it closes, the parent has gone
and so does the core. Messages go over two ZeroMQ sockets. The loop is a single thread; while it has work it looks for
messages between steps, otherwise it sleeps until one comes.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.wire import Abort, EngineRequest, Failed, Ready, decode_frontend_message, encode_message
from octavo.errors import OctavoError
from octavo.logs import configure_logging

logger = logging.getLogger(__name__)


class CoreProcessArgs(msgspec.Struct):
    """What the parent writes to the core's standard input."""

    config: EngineConfig
    input_address: str  # the core receives here
    output_address: str  # and sends here
    started_at: float  # time.monotonic when the parent started the process
    log_level: int


def main() -> None:
    """Run until the parent goes or something fails; exit status 1 says that a `Failed` message was sent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    args = msgspec.json.decode(sys.stdin.buffer.readline(), type=CoreProcessArgs)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    configure_logging("core", args.log_level)
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receiver.connect(args.input_address)
    sender.setsockopt(zmq.SNDHWM, 0)
    sender.connect(args.output_address)
    try:
        _run(args, receiver, sender)
    except OctavoError as e:
        sender.send(encode_message(Failed(str(e), expected=True)))
    except BaseException as e:
        logger.exception("the engine core failed")
        sender.send(encode_message(Failed(f"{type(e).__name__}: {e}", expected=False)))
    context.destroy(linger=2000)
    sys.exit(1)


def _run(args: CoreProcessArgs, receiver: zmq.Socket[bytes], sender: zmq.Socket[bytes]) -> None:
    imported = time.monotonic()
    core = EngineCore(args.config)
    startup = {"process": imported - args.started_at, **core.executor.startup}
    startup["total"] = time.monotonic() - args.started_at
    sender.send(
        encode_message(
            Ready(core.executor.num_blocks, core.executor.num_host_blocks, args.config.cache.block_size, startup)
        )
    )
    while True:
        if not core.has_work:
            _handle(core, receiver.recv())
        while is_readable(receiver):
            _handle(core, receiver.recv())
        # A step without work still tells the front end that aborts have emptied the engine.
        sender.send(encode_message(core.step()))


def _handle(core: EngineCore, data: bytes) -> None:
    match decode_frontend_message(data):
        case EngineRequest() as request:
            core.add(request)
        case Abort(request_id, index):
            core.abort(request_id, index)


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. A non-blocking receive would say so with an exception, which costs ten times as much."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
