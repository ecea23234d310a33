"""What the random workloads share."""

from __future__ import annotations

import pytest

from octavo.scheduling import time_limit


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts of the workloads are short: what they get at least is less, so that time cuts them."""
    monkeypatch.setattr(time_limit, "MIN_CHUNK_TOKENS", 2)
