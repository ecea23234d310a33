"""Fixtures of the engine's tests: the default model's tokenizer, as the engine loads it; an engine on a stub core."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.config import CacheConfig, EngineConfig, EngineHostsConfig, ModelConfig, SchedulerConfig
from octavo.engine import core_client, supervisor
from octavo.engine.engine_client import make_engine
from octavo.engine.wire import FrontendMessage
from octavo.loading.checkpoint import Checkpoint, resolve
from octavo.loading.tokenizer import load_tokenizer
from octavo.metrics.prometheus import EngineMetrics
from tests.engine.stub_engine import Use
from tests.waiting import Clock


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    return resolve("")


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Checkpoint) -> Any:
    return load_tokenizer(checkpoint)


@pytest.fixture
def hang(tmp_path: Path) -> Path:
    """While this file is there, a core that starts is never ready."""
    return tmp_path / "hang"


@pytest.fixture
def cores() -> list[subprocess.Popen[bytes]]:
    """The processes of an engine's cores, as they are started."""
    return []


@pytest.fixture
def stub_config(
    tiny_tokenizer: Path, hang: Path, monkeypatch: pytest.MonkeyPatch, cores: list[subprocess.Popen[bytes]]
) -> EngineConfig:
    """Of engines whose cores are the stub."""

    class StubProcess(core_client.CoreProcess):
        def __init__(self, environment: Mapping[str, str] | None = None) -> None:
            command = [sys.executable, str(Path(__file__).with_name("stub_core.py")), str(hang)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | (environment or {}))
            cores.append(self.process)

    monkeypatch.setattr(core_client, "CoreProcess", StubProcess)
    monkeypatch.setattr(supervisor, "CoreProcess", StubProcess)
    checkpoint = Checkpoint("stub", "dummy", str(tiny_tokenizer), [], str(tiny_tokenizer), {})
    return EngineConfig(
        model=ModelConfig(checkpoint, ["stub"], "float32", 64, 259, None),
        cache=CacheConfig(16, None, 0.3, 0.9, 0, True, "bfloat16"),
        scheduler=SchedulerConfig(8, 256, True, "fcfs", "recompute"),
        device="cpu",
        log_stats=False,
    )


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[FrontendMessage]:
    """What engines send to their cores, as they send it."""
    messages, send = list[FrontendMessage](), core_client.CoreClient.send
    monkeypatch.setattr(
        core_client.CoreClient, "send", lambda core, message: (messages.append(message), send(core, message))[1]
    )
    return messages


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def with_engine(stub_config: EngineConfig) -> Callable[..., EngineMetrics]:
    """Calls a function with an engine whose core is the stub."""

    def run(
        use: Use,
        replicas: int = 1,
        engine_hosts: EngineHostsConfig | None = None,
        changes: Mapping[str, Any] | None = None,
        **options: object,
    ) -> EngineMetrics:
        own = replace(stub_config, data_parallel_size=replicas, engine_hosts=engine_hosts, **(changes or {}))
        metrics = EngineMetrics("stub", 64, own.served_ranks.start)
        engine: Any = make_engine(own, metrics=metrics, **options)
        try:
            asyncio.run(use(engine))
        finally:
            engine.shutdown()
        return metrics

    return run
