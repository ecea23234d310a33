"""Models that pool, shared by several workers: vectors have the bits that one worker's have, for shares of layers and
stages of them; on devices that are late they are as near as sums of halves are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.execution.executor import MultiprocExecutor
from tests.execution.late_worker_group import late_followers
from tests.execution.test_late_pooling import config_of, folder, requests, run, vectors

__all__ = ["folder"]


@pytest.fixture
def start() -> Iterator[Callable[[EngineConfig], EngineCore]]:
    """Cores of several workers, which are ended."""
    executors = []

    def start(config: EngineConfig) -> EngineCore:
        executor = MultiprocExecutor(config)
        executors.append(executor)
        return EngineCore(config, executor)

    yield start
    for executor in executors:
        executor.worker_group.close()


@pytest.mark.parametrize(
    ("size", "num_stages", "flags"),
    [
        (2, 1, {}),
        (1, 2, {}),
        pytest.param(4, 1, {"dtype": "bfloat16"}, marks=pytest.mark.long),
        pytest.param(2, 2, {"dtype": "bfloat16", "enforce_eager": True}, marks=pytest.mark.long),
    ],
)
def test_every_vector_has_the_bits_of_one_worker(
    folder: Path, tiny_tokenizer: Path, start: Callable[[EngineConfig], EngineCore], size: int, num_stages: int,
    flags: dict[str, Any],
) -> None:  # fmt: skip
    config = config_of(folder, tiny_tokenizer, **flags)
    expected = run(EngineCore(config), requests(config))
    sizes: dict[str, Any] = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages}
    config = config_of(folder, tiny_tokenizer, reproducible_parallel=True, **sizes, **flags)
    found = run(start(config), requests(config))
    assert found.keys() == expected.keys()
    for key, output in expected.items():
        assert np.array_equal(vectors(found[key]), vectors(output))


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.long)])
@pytest.mark.long
def test_devices_that_are_late_pool_likewise(
    folder: Path, tiny_tokenizer: Path, start: Callable[[EngineConfig], EngineCore], size: int, num_stages: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = config_of(folder, tiny_tokenizer)
    expected = run(EngineCore(config), requests(config))
    late_followers(monkeypatch)
    sizes: dict[str, Any] = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages}
    found = run(start(config_of(folder, tiny_tokenizer, device="cuda", dtype="float32", **sizes)), requests(config))
    assert found.keys() == expected.keys()
    for key, output in expected.items():
        np.testing.assert_allclose(vectors(found[key]), vectors(output), atol=1e-4)
