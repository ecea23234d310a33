"""Fixtures of the engine's tests: the default model's tokenizer, as the engine loads it."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.loading.checkpoint import Checkpoint, resolve
from octavo.loading.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    return resolve("")


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Checkpoint) -> Any:
    return load_tokenizer(checkpoint)
