"""A worker other than the first, as a process: `python -m octavo.execution.follower`, started by `HostWorkers`.

Its standard input brings one line of JSON (`FollowerArgs`) and stays open. When it closes, the parent process has ended
and the worker ends too. It builds its shard of the model and computes every plan of the first worker, until their
connection closes."""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
from collections import deque
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from octavo.errors import ConfigError, OctavoError
from octavo.execution import worker_messages
from octavo.execution.cache_fingerprint import identify_weights, node_identity
from octavo.execution.executor import LocalExecutor
from octavo.execution.host_workers import FollowerArgs
from octavo.execution.submitted_step import SubmittedStep
from octavo.execution.worker_group import Follower, has_hung_up
from octavo.logs import configure_logging
from octavo.processes import follow_parent

logger = logging.getLogger("octavo.execution.follower")  # not __name__, which is __main__

_GRACE_S = 10.0


def main() -> None:
    lines = queue.SimpleQueue[bytes]()
    threading.Thread(target=follow_parent, args=(lines,), daemon=True).start()
    args = msgspec.json.decode(lines.get(), type=FollowerArgs)
    leader = Connection(args.control)
    try:
        _run(leader, args)
    except (EOFError, OSError):
        # The first worker or a worker of another stage has ended. Wait for the first worker's end to see which it was.
        has_hung_up(leader, _GRACE_S)
        os._exit(0)
    except Exception:
        if has_hung_up(leader):  # the leader has ended in the middle of a step
            os._exit(0)
        logger.exception("worker failed")
        os._exit(1)


def _run(leader: Connection, args: FollowerArgs) -> None:
    configure_logging(f"worker {args.worker_rank.number}", args.log_level, log_format=args.log_format)
    worker_group = Follower(leader, args)
    disk, rank = args.config.cache.disk, args.worker_rank
    try:
        weights = None
        if disk is not None and rank.node and not rank.on_host.rank:
            # While they are loaded. Other nodes than node 0 load no draft model.
            weights = identify_weights(replace(args.config, draft=None), disk)
        executor = LocalExecutor(args.config, worker_group=worker_group)
        node = "" if weights is None else node_identity(weights.result()[0])
    except OctavoError as e:
        worker_group.tell(worker_messages.CannotStart(str(e), isinstance(e, ConfigError)))
        return
    worker_group.tell(worker_messages.WorkerReady(list(executor.block_bytes), executor.hardware[0], node))
    gc.freeze()
    steps: deque[SubmittedStep] = deque()  # steps whose tokens are not known yet
    while True:
        match worker_group.hear():
            case worker_messages.Plan(plan):
                step = executor.worker.runner.submit(plan)
                if step.gathered.shape.samples and executor.worker.runner.pooling_table is None:
                    steps.append(step)
            case worker_messages.SampledTokens() as sampled:
                step = steps.popleft()
                step.take_tokens(sampled.tokens)
                step.result()
            case worker_messages.TowerRows() as media:
                executor.worker.take_rows(media.rows)
            case worker_messages.PrepareAdapter(source):
                executor.prepare_adapter(source).add_done_callback(partial(worker_group.tell_read, source.identity))
            case worker_messages.ForgetAdapter(identity):
                executor.forget_adapter(identity)
            case worker_messages.ReleaseCache():
                executor.release_cache()
            case worker_messages.MoveBlocks(moves):
                executor.move_blocks(moves)
            case worker_messages.ReadBlocks(pool, blocks):
                worker_group.tell(worker_messages.BlockContents(executor.read_blocks(pool, blocks).tobytes()))
            case worker_messages.WriteBlocks(pool, blocks, contents):
                parts = np.frombuffer(contents, np.uint8).reshape(len(blocks), -1)
                executor.write_blocks(pool, blocks, parts)
            case worker_messages.Number() | worker_messages.AgreedSizes() as other:
                raise AssertionError(f"nobody has asked for {other}")


if __name__ == "__main__":
    main()
