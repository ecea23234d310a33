"""How a team of workers ends where one of them does, or cannot start."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.engine.core import EngineCore
from octavo.errors import ConfigError, LoadError
from octavo.execution import host_workers
from octavo.execution.executor import MultiprocExecutor
from tests.execution.test_runner import config_of, model, requests, run
from tests.execution.test_worker_group import start, start_of
from tests.open_files import open_files
from tests.waiting import within

__all__ = ["model", "start", "start_of"]


def kill_amid_steps(core: EngineCore, victim: int) -> tuple[Sequence[subprocess.Popen[bytes]], list[str]]:
    """All processes of the core's workers, one of which is killed between two steps, and what is told of deaths."""
    assert isinstance(core.executor, MultiprocExecutor)
    worker_group = core.executor.worker_group
    told: list[str] = []
    worker_group.on_death(told.append)
    for request in requests(1, 3):
        core.add(request)
    core.step()
    processes = worker_group.processes
    processes[victim].kill()
    processes[victim].wait(within(60))
    return processes, told


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"tensor_parallel_size": 4}, "worker 2 of 4"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "worker 1 of 2 of stage 0 of 2"),
    ],
)
def test_a_worker_that_dies_ends_the_step_and_the_others(
    start: Callable[..., EngineCore], flags: dict[str, int], name: str
) -> None:
    core = start(**flags)
    processes, told = kill_amid_steps(core, 1)
    with pytest.raises(
        (RuntimeError, ConnectionError),
        match=r"another worker of this model has ended|of another stage has|of . has ended",
    ):
        run(core, [])
    core.executor.worker_group.close()  # type: ignore[attr-defined]
    assert [process.wait(within(60)) for process in processes] == [0, -9, 0]
    assert all(message == f"{name} ended with status -9" for message in told)


@pytest.mark.long
def test_what_a_worker_cannot_load_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here because the environment has changed since the first has read it."""
    monkeypatch.setenv("OCTAVO_CPU_ISA", "none such")
    with pytest.raises(ConfigError, match="'none such' is not one that this machine runs"):
        MultiprocExecutor(config_of(model, tensor_parallel_size=2))


@pytest.mark.long
def test_a_worker_that_ends_at_once_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has been told what to do; nothing is left open."""

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", ""], **options)
        process.wait(within(60))
        return process

    gc.collect()
    before = open_files()
    monkeypatch.setattr(host_workers, "subprocess", SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE))
    with pytest.raises(LoadError, match="worker 1 of 2 ended before it was ready"):
        MultiprocExecutor(config_of(model, tensor_parallel_size=2))
    gc.collect()
    assert open_files() <= before
