"""A worker beside the first, as a process: `python -m octavo.execution.follower`, started by `team.Leader`.

It builds its share of the model and computes every plan that the first worker does, until that hangs up.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from multiprocessing.connection import Connection

from octavo.errors import ConfigError, LoadError, OctavoError
from octavo.execution.executor import LocalExecutor
from octavo.execution.team import (
    Follower,
    ForgetAdapter,
    Orders,
    PictureRows,
    PrepareAdapter,
    ReleaseCache,
    Sizes,
    has_hung_up,
)
from octavo.logs import configure_logging
from octavo.plan import StepPlan
from octavo.processes import ignore_stop_signals

logger = logging.getLogger(__name__)


def main() -> None:
    ignore_stop_signals()
    leader = Connection(int(sys.argv[1]))
    try:
        _run(leader)
    except (EOFError, OSError):
        os._exit(0)  # the first worker has gone
    except Exception:
        if has_hung_up(leader):  # in the middle of a step
            os._exit(0)
        logger.exception("worker failed")
        os._exit(1)


def _run(leader: Connection) -> None:
    orders: Orders = leader.recv()
    configure_logging(f"worker {orders.share.rank}", orders.log_level, log_format=orders.log_format)
    team = Follower(leader, orders)
    try:
        executor = LocalExecutor(orders.config, team=team)
    except OctavoError as e:
        leader.send(ConfigError(str(e)) if isinstance(e, ConfigError) else LoadError(str(e)))
        return
    leader.send(None)
    gc.freeze()
    while True:
        message = leader.recv()
        match message:
            case StepPlan():
                executor.submit(message).result()
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
