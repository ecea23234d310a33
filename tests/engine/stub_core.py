"""A core process without a model, which does what the first token of a prompt says: 1 answers, 2 fails and never ends,
3 ends without a word, 4 says nothing, 5 answers three tokens and ends after each of the first two. It answers resets of
the cache and reads no adapters. While the file that its argument names is there, it is never ready."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import msgspec
import zmq

from octavo.engine.wire import (
    CacheWasReset,
    CoreProcessArgs,
    Failed,
    GetLiveView,
    LiveView,
    Ready,
    ResetCache,
    StepBegins,
    StepOutputs,
    decode_frontend_message,
    encode_message,
)
from octavo.request import EngineRequest, SequenceOutput
from octavo.stats import EngineStats


def follow_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    if not (line := sys.stdin.buffer.readline()):  # its parent has no use for it
        return
    args = msgspec.json.decode(line, type=CoreProcessArgs)
    threading.Thread(target=follow_parent, daemon=True).start()
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receiver.connect(args.input_address)
    sender.connect(args.output_address)
    if Path(sys.argv[1]).exists():
        threading.Event().wait()
    sender.send(encode_message(Ready(args.config.model.max_model_len, 10, 0, 16, 0, 0, {})))
    while True:
        message = decode_frontend_message(receiver.recv())
        if isinstance(message, ResetCache):
            sender.send(encode_message(CacheWasReset()))
        if isinstance(message, GetLiveView):
            sender.send(encode_message(LiveView(b"")))
        if not isinstance(message, EngineRequest):
            continue
        what = message.prompt.token_ids[0]
        sender.send(encode_message(StepBegins([message.request_id])))
        if what in (1, 5):
            num_before = len(message.output_token_ids.get(0, []))
            end = "length" if what == 1 or num_before == 2 else None
            output = SequenceOutput(
                message.request_id, 0, [70 + num_before], end, first_scheduled_time=time.monotonic()
            )
            sender.send(encode_message(StepOutputs([output], EngineStats(num_blocks=10))))
            if end is None:
                context.destroy(linger=2000)
                os._exit(7)
        elif what == 2:
            sender.send(encode_message(Failed("ValueError: /secret/path", expected=False)))
        elif what == 3:
            context.destroy(linger=2000)
            os._exit(7)


if __name__ == "__main__":
    main()
