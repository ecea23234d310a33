"""What a request does after all replicas of a model were tried."""

from types import SimpleNamespace
from typing import Any

import pytest

from octavo.gateway.retry_state import Attempt, NextStep, RetryState

OVER, FOREVER = 0.0, 1e12


@pytest.mark.parametrize(
    ("state", "resume_deadline", "cannot_resume", "pinned", "is_canary", "may_start_again", "wanted"),
    [
        ("ready", FOREVER, False, False, False, True, NextStep.WAIT),  # the replica may come back
        ("ready", FOREVER, True, False, False, True, NextStep.GIVE_UP),  # no replica can resume the stream
        ("ready", None, False, False, False, True, NextStep.GIVE_UP),  # each replica is asked once
        ("stopped", None, False, False, False, True, NextStep.START_AGAIN),
        ("stopped", None, False, False, False, False, NextStep.GIVE_UP),  # it was started again before
        ("stopped", None, False, True, False, True, NextStep.GIVE_UP),  # another replica cannot answer
        ("stopped", None, False, False, True, True, NextStep.GIVE_UP),  # the canary's model answers
        ("stopped", FOREVER, False, False, True, False, NextStep.WAIT),
        ("stopped", OVER, False, False, False, True, NextStep.GIVE_UP),  # its time to be resumed is over
    ],
)  # fmt: skip
def test_after_the_last_replica(
    state: str, resume_deadline: float | None, cannot_resume: bool, pinned: bool, is_canary: bool,
    may_start_again: bool, wanted: NextStep,
) -> None:  # fmt: skip
    replica: Any = "a replica"
    deployment: Any = SimpleNamespace(state=state, replicas=[replica], restarting=[])
    retry = RetryState(tried={replica}, cannot_resume={replica} if cannot_resume else set())
    retry.resume_deadline = resume_deadline
    client: Any = SimpleNamespace(has_answer=resume_deadline is not None)
    request: Any = None
    attempt = Attempt(deployment, replica if pinned else None, request, client, retry, is_canary)
    assert attempt.after_last_replica(may_start_again=may_start_again) is wanted
