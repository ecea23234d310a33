"""The orders of waiting requests: `--scheduling-policy`.

A request keeps its place for good, so a preempted sequence returns to it. Under `fair` and `deadline` no request
starves: those that arrive later get later turns, and later deadlines after a while.
"""

from octavo.kv_cache.manager import KVCacheManager
from octavo.sequence import Sequence
from octavo.step_cost import StepCost, StepWork

# Without `max_ttft_s` the first token is due after this multiple of the time that the prompt takes alone. Of two
# requests that arrive together the shorter goes first. Queueing theory calls the factor slowdown and shows what short
# requests gain (M. Harchol-Balter, "Performance Modeling and Design of Computer Systems", 2013, ch. 33).
_SLOWDOWN = 10.0
LONGEST_WAIT_S = 30.0  # upper bound of that time, for prompts of any length


class Policy:
    """The order `fcfs`, first come, first served, and the base of the other orders."""

    def sort_key(self, seq: Sequence) -> float:
        """Return the first part of a new sequence's sort key. Smaller numbers go first; equal numbers go by arrival."""
        return 0

    def started(self, seq: Sequence) -> None:
        """Note that a sequence has started, perhaps not for the first time."""

    def ended(self, seq: Sequence) -> None:
        """Note that a sequence has ended, started or not."""


class ByPriority(Policy):
    """The order `priority`: lower numbers go first."""

    def sort_key(self, seq: Sequence) -> float:
        return seq.request.priority


class ByDeadline(Policy):
    """The order `deadline`: first tokens that are due sooner go first."""

    def __init__(self, cost: StepCost, cache: KVCacheManager) -> None:
        self._cost, self._cache = cost, cache

    def sort_key(self, seq: Sequence) -> float:
        """Return when the first token is due, in seconds of `time.monotonic`: after the request's `max_ttft_s`,
        otherwise after a multiple of the time that its prompt takes alone; at the latest when the request times out."""
        request = seq.request
        wait_s = request.max_ttft_s
        if wait_s is None:
            num_cached = self._cache.find_prefix(seq).num_tokens
            prompt_s = self._cost.seconds(StepWork().plus(num_cached, seq.num_tokens - num_cached, 1))
            wait_s = min(_SLOWDOWN * prompt_s, LONGEST_WAIT_S)
        due = request.arrival_time + wait_s
        return due if request.deadline is None else min(due, request.deadline)


class FairTurns(Policy):
    """The order `fair`: clients take turns of one request each.

    A client's next request gets the turn after that of its last waiting request; without a waiting request, the turn
    after the one that starts now. This is start-time fair queueing (P. Goyal, H. Vin, H. Cheng, 1996) with requests of
    equal size, except that a new client begins with the next turn.
    """

    def __init__(self) -> None:
        self._present = 0  # the highest turn of a request that has started
        # Turns of requests that have not started, by client and request id, in ascending order.
        self._turns: dict[str | None, dict[str, int]] = {}

    def sort_key(self, seq: Sequence) -> float:
        waiting = self._turns.setdefault(seq.request.client, {})
        last = waiting[next(reversed(waiting))] if waiting else 0
        waiting[seq.request_id] = turn = max(self._present, last) + 1
        return turn

    def started(self, seq: Sequence) -> None:
        self._present = max(self._present, int(seq.key[0]))
        self.ended(seq)

    def ended(self, seq: Sequence) -> None:
        """Forget a request that waited, so that its client's next request need not come after it."""
        client = seq.request.client
        if (waiting := self._turns.get(client)) is not None:
            waiting.pop(seq.request_id, None)
            if not waiting:
                del self._turns[client]


def make_policy(name: str, cache: KVCacheManager, cost: StepCost | None) -> Policy:
    """Return the policy that `--scheduling-policy` names. `deadline` needs a `cost` model."""
    if name == "deadline":
        assert cost is not None, "the deadline policy needs a cost model"
        return ByDeadline(cost, cache)
    return {"fcfs": Policy, "priority": ByPriority, "fair": FairTurns}[name]()
