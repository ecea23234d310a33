"""What the tests of the gateway share."""

from __future__ import annotations

import pytest

from octavo.gateway import key_store
from tests.waiting import Clock, within


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that passes when nothing else can happen: `clock.run` a test's coroutine."""
    return Clock(monkeypatch, grace_s=0.001)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A database is not lost because the machine is busy."""
    monkeypatch.setattr(key_store, "TIMEOUT_S", within(60))
