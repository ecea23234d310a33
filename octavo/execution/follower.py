"""A worker beside the first, as a process: `python -m octavo.execution.follower`, started by `team.Leader`.

It builds its share of the model and computes every plan that the first worker does, until that hangs up.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections import deque
from multiprocessing.connection import Connection

from octavo.errors import ConfigError, LoadError, OctavoError
from octavo.execution.executor import LocalExecutor
from octavo.execution.runner import SubmittedStep
from octavo.execution.team import (
    Follower,
    ForgetAdapter,
    Orders,
    PictureRows,
    PrepareAdapter,
    ReleaseCache,
    SampledTokens,
    Sizes,
    has_hung_up,
)
from octavo.logs import configure_logging
from octavo.plan import StepPlan
from octavo.processes import ignore_stop_signals

logger = logging.getLogger(__name__)

_GRACE_S = 10.0


def main() -> None:
    ignore_stop_signals()
    leader = Connection(int(sys.argv[1]))
    try:
        _run(leader)
    except (EOFError, OSError):
        # The first worker has gone, or is about to, as one of another stage has: it must see who was the first to go.
        has_hung_up(leader, _GRACE_S)
        os._exit(0)
    except Exception:
        if has_hung_up(leader):  # in the middle of a step
            os._exit(0)
        logger.exception("worker failed")
        os._exit(1)


def _run(leader: Connection) -> None:
    orders: Orders = leader.recv()
    configure_logging(f"worker {orders.seat.number}", orders.log_level, log_format=orders.log_format)
    team = Follower(leader, orders)
    try:
        executor = LocalExecutor(orders.config, team=team)
    except OctavoError as e:
        leader.send(ConfigError(str(e)) if isinstance(e, ConfigError) else LoadError(str(e)))
        return
    leader.send(None)
    gc.freeze()
    steps: deque[SubmittedStep] = deque()  # whose tokens are not known yet
    while True:
        message = leader.recv()
        match message:
            case StepPlan():
                step = executor.worker.runner.submit(message)
                if len(step.samples.rows):
                    steps.append(step)
                else:
                    step.result()
            case SampledTokens(tokens):
                step = steps.popleft()
                step.take_tokens(tokens)
                step.result()
            case PictureRows(rows):
                executor.worker.take_rows(rows)
            case PrepareAdapter(source):
                executor.prepare_adapter(source).add_done_callback(team.tell_read)
            case ForgetAdapter(identity):
                executor.forget_adapter(identity)
            case ReleaseCache():
                executor.release_cache()
            case Sizes():
                raise AssertionError("sizes are agreed on once")


if __name__ == "__main__":
    main()
