"""What the tests of the gateway share."""

from __future__ import annotations

import pytest

from tests.waiting import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that passes when nothing else can happen: `clock.run` a test's coroutine."""
    return Clock(monkeypatch, grace_s=0.001)
