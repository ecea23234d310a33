"""The order of `--scheduling-policy fair`: clients take turns, one request each, however many one of them sends.

This is start-time fair queueing (P. Goyal, H. Vin, H. Cheng, 1996) with requests of equal size, but that a new client
begins with the next turn. A request's turn never changes, so a preempted sequence returns to its old place. Nobody
starves: once the first request of a turn has started, those that arrive have a later one.
"""

from __future__ import annotations

_MIN_PRUNED = 64


class FairTurns:
    """Gives each request its turn. Smaller turns go first."""

    def __init__(self) -> None:
        self._present = 0  # the turn of the last request that has started
        self._last: dict[str | None, int] = {}  # the last turn of each client
        self._num_pruned = 0  # clients that were left after the last look for those of past turns

    def next(self, client: str | None) -> int:
        """Return the turn of a client's next request."""
        turn = max(self._present, self._last.get(client, 0)) + 1
        self._last[client] = turn
        return turn

    def started(self, turn: int) -> None:
        """A request has started."""
        self._present = max(self._present, turn)
        if len(self._last) >= 2 * self._num_pruned + _MIN_PRUNED:
            self._last = {client: last for client, last in self._last.items() if last > self._present}
            self._num_pruned = len(self._last)
