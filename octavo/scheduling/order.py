"""Who goes first: `--scheduling-policy` as a number for each request, the smaller the earlier. Equals go by arrival.

A number does not change while its request waits. So the order is total, sequences that lose their place find it again,
and under `deadline` nobody starves: a request that comes after another's deadline goes behind it.
"""

from __future__ import annotations

from octavo.request import EngineRequest

# `deadline`, for requests that say nothing: a first token may take so many times what computing the prompt takes alone.
# Of two that come together the shorter one goes first. Queueing theory calls this the slowdown, and shows what it is
# worth to the short ones (M. Harchol-Balter, "Performance Modeling and Design of Computer Systems", 2013, ch. 33).
_SLOWDOWN = 10.0
LONGEST_WAIT_S = 30.0  # but no prompt is so long that it has to wait longer for others


def order_number(policy: str, request: EngineRequest, prompt_s: float) -> float:
    """`prompt_s` is how long the part of its prompt that is not cached takes alone."""
    if policy == "priority":
        return request.priority
    return first_token_deadline(request, prompt_s) if policy == "deadline" else 0


def first_token_deadline(request: EngineRequest, prompt_s: float) -> float:
    """When its first token is due (`time.monotonic`): the request says so, or its length does; before it times out."""
    wait_s = request.max_ttft_s
    if wait_s is None:
        wait_s = min(_SLOWDOWN * prompt_s, LONGEST_WAIT_S)
    due = request.arrival_time + wait_s
    return due if request.deadline is None else min(due, request.deadline)
