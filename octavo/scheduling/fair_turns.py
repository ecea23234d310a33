"""The order of `--scheduling-policy fair`: clients take turns of one request each.

A client's next request gets the turn after the last one that it has waiting, or else after the turn that starts now. A
request keeps its turn when it is preempted. Nobody starves: requests that arrive after a turn has begun get a later
one. This is start-time fair queueing (P. Goyal, H. Vin, H. Cheng, 1996) with requests of equal size, but that a new
client begins with the next turn.
"""

from __future__ import annotations


class FairTurns:
    """Gives each request its turn. Smaller turns go first."""

    def __init__(self) -> None:
        self._present = 0  # the highest turn of a request that has started
        self._clients: dict[str, str | None] = {}  # of requests that have not started, by id
        self._turns: dict[str | None, dict[str, int]] = {}  # of these requests, by client and id, in ascending order

    def add(self, request_id: str, client: str | None) -> int:
        """Return the turn of a client's next request."""
        self._clients[request_id] = client
        waiting = self._turns.setdefault(client, {})
        last = waiting[next(reversed(waiting))] if waiting else 0
        waiting[request_id] = turn = max(self._present, last) + 1
        return turn

    def started(self, request_id: str, turn: int) -> None:
        """A request has started, perhaps not for the first time."""
        self._present = max(self._present, turn)
        self.remove(request_id)

    def remove(self, request_id: str) -> None:
        """A request waits no longer, if it did: its client's next one does not count it."""
        if request_id in self._clients:
            client = self._clients.pop(request_id)
            del self._turns[client][request_id]
            if not self._turns[client]:
                del self._turns[client]
