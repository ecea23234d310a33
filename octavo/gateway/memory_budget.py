"""How much memory the models that run here may take together. A model that needs memory waits in line; idle models make
room, the least recently used first, and memory is free only when their processes have ended."""

import asyncio
from collections import deque
from typing import Protocol


class Tenant(Protocol):
    """A model that may hold memory."""

    last_used: float

    @property
    def is_idle(self) -> bool: ...

    @property
    def is_stopping(self) -> bool: ...

    def begin_stop(self) -> None: ...  # at its end it calls `release`


class MemoryBudget:
    """Lends memory, never more than `total_gib`; None is no limit."""

    def __init__(self, total_gib: float | None) -> None:
        self.total_gib = total_gib
        self.num_evictions = 0
        self._held: dict[Tenant, float] = {}
        self._line: deque[tuple[Tenant, float, asyncio.Future[None]]] = deque()

    @property
    def held_gib(self) -> float:
        return sum(self._held.values())

    def has_room(self, gib: float) -> bool:
        """Return whether there is memory now: nobody waits, and nobody has to stop."""
        return not self._line and self._fits(self.held_gib + gib)

    async def reserve(self, tenant: Tenant, gib: float) -> None:
        """Wait in line until the tenant has the memory. A tenant that is cancelled leaves the line."""
        turn = asyncio.get_running_loop().create_future()
        self._line.append((tenant, gib, turn))
        self.look()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(tenant)
            raise
        finally:
            self._line = deque(entry for entry in self._line if entry[2] is not turn)
            self.look()

    def release(self, tenant: Tenant) -> None:
        """Take the memory back, once the tenant's processes have ended."""
        self._held.pop(tenant, None)
        self.look()

    def look(self) -> None:
        """Serve the line as far as there is memory, and stop idle tenants for the first that waits. Call it whenever a
        tenant becomes idle."""
        while self._line:
            tenant, gib, turn = self._line[0]
            if turn.done() or self._fits(self.held_gib + gib):
                self._line.popleft()
                if not turn.done():
                    self._held[tenant] = gib
                    turn.set_result(None)
                continue
            self._make_room(gib)
            return

    def _fits(self, gib: float) -> bool:
        return self.total_gib is None or gib <= self.total_gib + 1e-9

    def _make_room(self, gib: float) -> None:
        """Stop idle tenants if that frees enough; otherwise they go on, as their end would not help yet."""
        staying = self.held_gib - sum(gib for one, gib in self._held.items() if one.is_stopping)
        leaving = []
        for tenant in sorted((one for one in self._held if one.is_idle), key=lambda one: one.last_used):
            if self._fits(staying + gib):
                break
            staying -= self._held[tenant]
            leaving.append(tenant)
        if self._fits(staying + gib):
            for tenant in leaving:
                self.num_evictions += 1
                tenant.begin_stop()
