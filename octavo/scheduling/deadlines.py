"""When the first token of a request is due: the order of `--scheduling-policy deadline`.

A request's deadline never changes. So a preempted sequence returns to its old place, and no request starves: those that
arrive after its deadline come after it.
"""

from __future__ import annotations

from octavo.request import EngineRequest

# Without `max_ttft_s` a first token may take so many times as long as computing the prompt alone. Of two requests that
# arrive together the shorter goes first. Queueing theory calls the factor slowdown and shows what short requests gain
# (M. Harchol-Balter, "Performance Modeling and Design of Computer Systems", 2013, ch. 33).
_SLOWDOWN = 10.0
LONGEST_WAIT_S = 30.0  # the latest deadline, however long the prompt is


def first_token_deadline(request: EngineRequest, prompt_s: float) -> float:
    """Return the deadline, in the time of `time.monotonic`: as the request says, otherwise in proportion to `prompt_s`,
    the time that its prompt takes alone; at the latest when the request times out."""
    wait_s = request.max_ttft_s
    if wait_s is None:
        wait_s = min(_SLOWDOWN * prompt_s, LONGEST_WAIT_S)
    due = request.arrival_time + wait_s
    return due if request.deadline is None else min(due, request.deadline)
