"""Threads that read blocks for the engine's thread, which does not wait for a disk or another server."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Jobs = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class ReaderThreads:
    """Daemon threads, so that the process can end even if the disk hangs."""

    def __init__(self, num_threads: int, task: str) -> None:
        """`task` says in the log what they do, such as "read blocks"."""
        self._jobs: _Jobs = SimpleQueue()
        self._num_threads = num_threads
        for _ in range(num_threads):
            threading.Thread(target=_do_jobs, args=(self._jobs, task), name="block-reader", daemon=True).start()

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Have a thread do `work`, after all work before it."""
        future = Future[T]()
        self._jobs.put((future, work))
        return future

    def close(self) -> None:
        """End the threads, after the work that they have."""
        for _ in range(self._num_threads):
            self._jobs.put(None)


def _do_jobs(jobs: _Jobs, task: str) -> None:
    """Run jobs, and complete their futures, until there is a None."""
    while (job := jobs.get()) is not None:
        future, work = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except Exception as e:
                logger.exception("a thread could not %s", task)
                future.set_exception(e)
        del job, future, work  # otherwise they would keep the engine alive while the thread waits
