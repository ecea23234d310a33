"""The budget holds under every order of requests, starts and ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from octavo.gateway.memory_budget import MemoryBudget


@dataclass(eq=False)
class FakeTenant:
    gib: float
    is_idle: bool = False
    is_stopping: bool = False
    last_used: float = 0.0

    def begin_stop(self) -> None:
        assert self.is_idle and not self.is_stopping
        self.is_stopping, self.is_idle = True, False


steps = st.lists(st.tuples(st.sampled_from(["want", "idle", "end", "leave"]), st.integers(0, 5)), max_size=60)


@given(steps, st.lists(st.integers(1, 4), min_size=6, max_size=6))
def test_it_is_never_exceeded_and_no_one_waits_for_free_memory(steps: list[tuple[str, int]], sizes: list[int]) -> None:
    async def run() -> None:
        budget = MemoryBudget(5)
        tenants = [FakeTenant(size) for size in sizes]
        wants: dict[int, asyncio.Task[None]] = {}
        for time, (step, i) in enumerate(steps):
            tenant = tenants[i]
            holds = tenant in budget._held
            if step == "want" and not holds and i not in wants:
                tenant.is_idle = tenant.is_stopping = False
                wants[i] = asyncio.ensure_future(budget.reserve(tenant, tenant.gib))
            elif step == "idle" and holds and not tenant.is_stopping:
                tenant.is_idle, tenant.last_used = True, time
                budget.look()
            elif step == "end" and tenant.is_stopping:
                tenant.is_stopping = False
                budget.release(tenant)
            elif step == "leave" and i in wants:
                wants.pop(i).cancel()
            for _ in range(4):
                await asyncio.sleep(0)
            wants = {i: want for i, want in wants.items() if not want.done()}
            held = sum(one.gib for one in budget._held)
            assert budget.held_gib == held <= 5
            if wants:
                first = next(iter(wants))
                assert held + sizes[first] > 5, "the first in line has room"
                staying = sum(one.gib for one in budget._held if not one.is_idle and not one.is_stopping)  # type: ignore[attr-defined]
                leaving = sum(one.gib for one in budget._held if one.is_stopping)  # type: ignore[attr-defined]
                assert staying + sizes[first] > 5 or held - leaving + sizes[first] <= 5, "idle ones make room"
        for want in wants.values():
            want.cancel()
        await asyncio.gather(*wants.values(), return_exceptions=True)
        assert not budget._line

    asyncio.run(run())


def test_those_that_stop_already_are_counted_on() -> None:
    async def run() -> None:
        budget = MemoryBudget(2)
        leaving, idle = FakeTenant(1), FakeTenant(1)
        for tenant in (leaving, idle):
            await budget.reserve(tenant, 1)
            tenant.is_idle = True
        leaving.begin_stop()
        waiting = asyncio.ensure_future(budget.reserve(FakeTenant(1), 1))
        await asyncio.sleep(0)
        assert not idle.is_stopping
        budget.release(leaving)
        await waiting

    asyncio.run(run())


def test_the_least_recently_used_leave_and_no_more_than_must() -> None:
    async def run() -> None:
        budget = MemoryBudget(4)
        tenants = [FakeTenant(1, last_used=used) for used in (3, 1, 2, 4)]
        for tenant in tenants:
            await budget.reserve(tenant, 1)
            tenant.is_idle = True
        waiting = asyncio.ensure_future(budget.reserve(FakeTenant(2), 2))
        await asyncio.sleep(0)
        assert [one.is_stopping for one in tenants] == [False, True, True, False]
        budget.release(tenants[1])
        await asyncio.sleep(0)
        assert not waiting.done(), "memory is free when the processes have ended"
        budget.release(tenants[2])
        await waiting

    asyncio.run(run())
