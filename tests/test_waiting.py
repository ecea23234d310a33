"""The clock that tests move, and waits that end."""

import asyncio
import time

import pytest

from tests import waiting
from tests.waiting import Clock, slowness, until, virtual_sleep, wait_until, within


def test_in_virtual_time_timers_end_in_their_order_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ended = Clock(monkeypatch), []
    begin = time.monotonic()

    async def wait(days: int) -> None:
        await virtual_sleep(86400 * days)
        ended.append(days)

    async def run() -> None:
        await asyncio.gather(wait(3), wait(1), wait(2))

    clock.run(run())
    assert ended == [1, 2, 3]
    assert time.monotonic() - begin >= 3 * 86400


def test_what_never_comes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert within(2) == 2 * slowness() >= 2
    monkeypatch.setattr(waiting, "slowness", lambda: 1e-4)
    assert wait_until(lambda: "there") == "there"
    with pytest.raises(AssertionError, match="did not come true in 0 s: seen"):
        wait_until(lambda: False, of_what=lambda: "seen")
    with pytest.raises(AssertionError, match="did not come true"):
        asyncio.run(until(lambda: False))
