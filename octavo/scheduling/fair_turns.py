"""The order of `--scheduling-policy fair`: clients take turns of one request each.

A client's next request gets the turn after those that it has waiting, counted from the turn that starts now. A
request keeps its turn when it is preempted. Nobody starves: requests that arrive after a turn has begun get a later
one. This is start-time fair queueing (P. Goyal, H. Vin, H. Cheng, 1996) with requests of equal size, but that a new
client begins with the next turn.
"""

from __future__ import annotations

from collections import Counter


class FairTurns:
    """Gives each request its turn. Smaller turns go first."""

    def __init__(self) -> None:
        self._present = 0  # the highest turn of a request that has started
        self._clients: dict[str, str | None] = {}  # of requests that have not started, by id
        self._num_waiting: Counter[str | None] = Counter()  # of them, by client

    def add(self, request_id: str, client: str | None) -> int:
        """Return the turn of a client's next request."""
        self._clients[request_id] = client
        self._num_waiting[client] += 1
        return self._present + self._num_waiting[client]

    def started(self, request_id: str, turn: int) -> None:
        """A request has started, perhaps not for the first time."""
        self._present = max(self._present, turn)
        self.remove(request_id)

    def remove(self, request_id: str) -> None:
        """A request does not wait any more, or never did: its client's later ones count from where it would be."""
        if request_id in self._clients:
            client = self._clients.pop(request_id)
            self._num_waiting[client] -= 1
            if not self._num_waiting[client]:
                del self._num_waiting[client]
