"""What a request does after all replicas of a model were tried."""

from types import SimpleNamespace
from typing import Any

import pytest

from octavo.gateway.retry_state import Attempt, NextStep, RetryState

FOREVER = 1e12


@pytest.mark.parametrize(
    ("state", "lost_stream", "cannot_resume", "pinned", "is_canary", "may_start_again", "wanted"),
    [
        ("ready", True, False, False, False, True, NextStep.WAIT),  # the replica may come back
        ("ready", True, True, False, False, True, NextStep.GIVE_UP),  # no replica can resume the stream
        ("ready", False, False, False, False, True, NextStep.GIVE_UP),  # each replica is asked once
        ("stopped", False, False, False, False, True, NextStep.START_AGAIN),
        ("stopped", False, False, False, False, False, NextStep.GIVE_UP),  # it was started again before
        ("stopped", False, False, True, False, True, NextStep.GIVE_UP),  # another replica cannot answer
        ("stopped", False, False, False, True, True, NextStep.GIVE_UP),  # the canary's model answers
        ("stopped", True, False, False, True, False, NextStep.WAIT),
    ],
)  # fmt: skip
def test_after_the_last_replica(
    state: str, lost_stream: bool, cannot_resume: bool, pinned: bool, is_canary: bool, may_start_again: bool,
    wanted: NextStep,
) -> None:  # fmt: skip
    replica: Any = "a replica"
    deployment: Any = SimpleNamespace(state=state, replicas=[replica], restarting=[])
    retry = RetryState(tried={replica}, cannot_resume={replica} if cannot_resume else set())
    retry.resume_deadline = FOREVER if lost_stream else None
    client: Any = SimpleNamespace(has_answer=lost_stream)
    request: Any = None
    attempt = Attempt(deployment, replica if pinned else None, request, client, retry, is_canary)
    assert attempt.after_last_replica(may_start_again=may_start_again) is wanted
