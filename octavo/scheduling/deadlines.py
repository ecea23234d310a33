"""When the first token of a request is due, which is the order of `--scheduling-policy deadline`.

The order of a request does not change while it waits. So sequences that lose their place find it again, and nobody
starves: who comes after the time at which another is due goes behind that.
"""

from __future__ import annotations

from octavo.request import EngineRequest

# For requests that say nothing: a first token may take so many times what computing the prompt takes alone.
# Of two that come together the shorter one goes first. Queueing theory calls this the slowdown, and shows what it is
# worth to the short ones (M. Harchol-Balter, "Performance Modeling and Design of Computer Systems", 2013, ch. 33).
_SLOWDOWN = 10.0
LONGEST_WAIT_S = 30.0  # but no prompt is so long that it has to wait longer for others


def first_token_deadline(request: EngineRequest, prompt_s: float) -> float:
    """Of `time.monotonic`: when the request says, or else in proportion to the time that its prompt takes alone; at the
    latest when the request times out."""
    wait_s = request.max_ttft_s
    if wait_s is None:
        wait_s = min(_SLOWDOWN * prompt_s, LONGEST_WAIT_S)
    due = request.arrival_time + wait_s
    return due if request.deadline is None else min(due, request.deadline)
