"""One request at one model: which replicas it has asked, and the meaning of their answers for it. Nothing here changes
a replica, a breaker or a metric: `proxy` and `prefill` do."""

import time
from dataclasses import dataclass, field
from enum import Enum

from octavo.gateway.client import Client
from octavo.gateway.deployment import Deployment
from octavo.gateway.proxy_request import ProxyRequest
from octavo.gateway.replica import BUSY_STATUSES, GATEWAY_STATUSES, Replica, has_lost_engine
from octavo.gateway.stream_progress import CUT_OFF, RESUMABLE_PATHS
from octavo.gateway.upstream import Answer

_GENERATING_PATHS = RESUMABLE_PATHS | {"/invocations", "/generate"}  # whose whole answers may be cut off


class Outcome(Enum):
    """The result of asking a replica. `Proxy._record` says what each means for the breaker and the metrics."""

    UNREACHABLE = "no connection: the replica has not seen the request"
    LOST = "the replica hung up before its answer's first byte"
    ENGINE_DIED = "the replica's engine died, maybe of this request; another replica is asked"
    BUSY = "the replica is busy or stops; another one is asked; a lost stream asks this one again later"
    CANNOT_RESUME = "the replica began the stream again, or refused to resume it"
    DELIVER = "the client gets the answer"
    BROKEN = "the replica was lost amid an answer that the client was getting"
    CUT_AFTER_END = "the client has the whole answer; only the end of the replica's connection is missing"


class NextStep(Enum):
    """What a request does after all replicas of a model were tried."""

    WAIT = "a stream that has lost its replica waits, and may then ask the same replicas again"
    START_AGAIN = "the model has stopped meanwhile: it is started once more"
    GIVE_UP = "no replica is asked twice: the request fails, or another model is asked"


@dataclass
class RetryState:
    """The replicas that a request has asked, and how they failed it. Times are of `time.monotonic`."""

    tried: set[Replica] = field(default_factory=set)  # of the model that is asked now
    last_failure: str = "no replica takes requests"
    # Replicas that were lost with the request, or whose engine died, since its last token.
    num_lost: int = 0
    failed_at: float = 0.0  # when a replica was last lost, or could not be asked
    busy: set[Replica] = field(default_factory=set)  # replicas to ask again soon
    cannot_resume: set[Replica] = field(default_factory=set)
    # Until then a stream that has lost its replica waits for one that resumes it; None: no stream has lost one.
    resume_deadline: float | None = None

    @property
    def may_still_resume(self) -> bool:
        """Whether the client's stream has lost its replica, and still has time to be resumed."""
        return self.resume_deadline is not None and time.monotonic() < self.resume_deadline

    def begin_model(self) -> None:
        """Begin with the replicas of another model. The lost replicas of the one before still count."""
        self.tried, self.last_failure = set(), RetryState.last_failure

    def record_lost(self, *, had_request: bool = True, has_new_tokens: bool = False) -> None:
        """Record the loss of a replica. New tokens since the last loss show that the request did not cause that one."""
        self.failed_at = time.monotonic()
        self.num_lost = (0 if has_new_tokens else self.num_lost) + had_request

    def allow_again(self) -> None:
        """Let replicas be asked again: busy ones, and ones healthy again since the last loss."""
        may_resume = self.tried - self.cannot_resume
        self.tried -= {one for one in may_resume if one in self.busy or one.checks.last_passed_at > self.failed_at}
        self.busy.clear()


@dataclass(frozen=True)
class Attempt:
    """One request at one model; each fallback model gets its own."""

    deployment: Deployment
    pinned_replica: Replica | None  # the only replica that can answer, if there is one
    request: ProxyRequest
    client: Client
    retry: RetryState  # of all attempts of the request
    is_canary: bool = False  # the model whose canary it is comes next

    @property
    def is_unanswered_canary(self) -> bool:
        """Whether the canary gives the request to its model if it cannot answer. A stream that has begun stays."""
        return self.is_canary and not self.client.has_answer

    def untried_replicas(self) -> list[Replica]:
        """Return the replicas that may answer and have not been tried."""
        if self.pinned_replica is not None:
            return []
        return [one for one in self.deployment.replicas if one not in self.retry.tried and one.takes_requests()]

    def may_wait_for_replica(self) -> bool:
        """Return whether a stream that has lost its replica waits: for a busy one, for the lost one to come back, or
        for one that is being started."""
        deployment, retry = self.deployment, self.retry
        another_may_come = not deployment.replicas or bool(deployment.restarting)
        return retry.may_still_resume and (another_may_come or not retry.cannot_resume.issuperset(deployment.replicas))

    def after_last_replica(self, *, may_start_again: bool) -> NextStep:
        """Return what to do after all replicas were tried. Changes nothing."""
        if self.may_wait_for_replica():
            return NextStep.WAIT
        has_stopped = self.deployment.state != "ready" and self.pinned_replica is None
        is_over = self.is_unanswered_canary or self.retry.resume_deadline is not None
        if has_stopped and may_start_again and not is_over:
            return NextStep.START_AGAIN
        return NextStep.GIVE_UP

    def classify(self, answer: Answer) -> Outcome:
        """Return what a replica's answer means for the request. Changes nothing."""
        request, status = self.request, answer.status
        has_others = self.is_unanswered_canary or bool(self.untried_replicas())
        wants_whole_answer = request.path in _GENERATING_PATHS and not request.body.streams
        # What the request was to make may be there, though its answer was cut off.
        is_cut_off = bool(answer.header(CUT_OFF)) and (status >= 500 or wants_whole_answer) and request.may_be_repeated
        asks_again_later = status in BUSY_STATUSES + GATEWAY_STATUSES and self.retry.may_still_resume
        if self.pinned_replica is None and (
            asks_again_later or (has_others and (status in BUSY_STATUSES or is_cut_off))
        ):
            return Outcome.ENGINE_DIED if has_lost_engine(answer) else Outcome.BUSY
        if not self.client.can_take(answer, is_last=not has_others):
            return Outcome.CANNOT_RESUME
        return Outcome.DELIVER
