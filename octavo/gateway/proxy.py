"""Takes a request to a replica of its model, and the answer to the client. If a replica is lost before the answer's
first byte, another one is asked. After the first byte, another Octavo replica (or the same one after a restart) resumes
the stream; the stream of another server ends with an error event. A request is refused once two replicas were lost
while they had it: it may crash them.

The states of a request at a model, and the methods that move it there:

    starting   waits for the model's start                      `_start_if_needed`
    sending    a replica has it; no byte of the answer is here  `_ask`
    streaming  the client gets the answer                       `_forward_answer`
    lost       the replica was lost amid the client's stream,   `_handle_lost_replica`, which sets `resume_deadline`
               which can be resumed
    waiting    lost, and no replica can resume the stream yet   `_try_model`, until `resume_deadline`
    resumed    sending again, with the tokens that the client   `_try_replicas`, as a first replica is asked;
               has; then streaming again                        `StreamProgress` has the tokens
    failed     the client gets an error                         `_try_replicas`, `_handle_lost_replica`,
                                                                `_try_model`
    answered   the client has the whole answer                  `_forward_answer`

`RetryState` has all that is remembered from one replica to the next. `Attempt.classify` decides what an answer means,
and `Proxy._record` records it with the breaker, the metrics and the retry state. The methods here write `tried`,
`last_failure` and `resume_deadline` of the retry state. `prefill` and `broadcast` ask replicas themselves, and record
that themselves.

Every level here returns when the client has its answer, and raises otherwise: `RequestError` for an error that the
client gets, `_TryAnother` if another replica may answer or resume the stream.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import assert_never
from urllib.parse import unquote

from octavo.errors import RequestError
from octavo.gateway.broadcast import Broadcast
from octavo.gateway.client import Client
from octavo.gateway.client_keys import WITHOUT_LIMITS, Key
from octavo.gateway.deployment import Deployment
from octavo.gateway.gateway_metrics import GatewayMetrics
from octavo.gateway.keep_alive import KeepAlive
from octavo.gateway.kept_items import KeptItems
from octavo.gateway.models import Models
from octavo.gateway.notes import written_names
from octavo.gateway.prefill import Prefill
from octavo.gateway.proxy_request import PROMPT_NAMES, ProxyRequest, check_use, counted_request, has_prefix, route_of
from octavo.gateway.replica import BUSY_STATUSES, NOTES_PATH, Replica
from octavo.gateway.retry_state import Attempt, NextStep, Outcome, RetryState
from octavo.gateway.stream_progress import CUT_OFF, RESUMABLE
from octavo.gateway.upstream import Answer, UnreachableError, UpstreamError

logger = logging.getLogger("octavo.gateway")

_CACHE_SESSIONS = "/v1/cache/sessions/"
_NOT_FOR_CLIENTS = ("/v1/cache/blocks/", NOTES_PATH + "/")  # for servers or gateways alone
# Routes of Octavo's and vLLM's servers that change a server for all its clients. Keys of the store may not use them.
_OF_OPERATORS = tuple(
    f"/{name}/" for name in (
        "sleep", "wake_up", "pause", "resume", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache",
        "abort_requests", "collective_rpc", "start_profile", "stop_profile", "scale_elastic_ep", "update_weights",
        "init_weight_transfer_engine", "start_weight_update", "finish_weight_update", "v1/load_lora_adapter",
        "v1/unload_lora_adapter",
    )
)  # fmt: skip
_PAUSE_S = 1.0  # between two looks for a replica that can resume a stream
_MAX_LOST = 2  # a request with which so many replicas were lost is refused: it may crash them


@dataclass(frozen=True)
class WaitLimits:
    """How many requests may wait for models to start, and for how long; how often a silent stream gets a comment."""

    max_waiting: int = 256
    max_wait_s: float = 300.0
    stream_keep_alive_s: float = 5.0


class _TryAnother(Exception):
    """A replica has not answered, or its answer broke off. Another one may answer, or resume the stream."""


class Proxy:
    """Passes requests on."""

    def __init__(
        self, models: Models, metrics: GatewayMetrics, limits: WaitLimits, *, keeps_keys: bool, several_gateways: bool
    ) -> None:
        """With `keeps_keys` no replica gets the clients' keys. With `several_gateways` others route to the same
        replicas."""
        self._models, self._metrics, self._limits = models, metrics, limits
        self._keeps_keys, self._several_gateways = keeps_keys, several_gateways
        self._kept_items = KeptItems(models)
        self._broadcast = Broadcast(models, metrics, keeps_keys=keeps_keys)
        self._prefill = Prefill(models, metrics, keeps_keys=keeps_keys)
        self._keep_alive = KeepAlive(limits.stream_keep_alive_s)
        self._num_waiting = 0
        self.is_stopping = False

    async def answer(self, request: ProxyRequest, client: Client) -> None:
        """Answer a request."""
        if request.method == "DELETE" and request.path.startswith(_CACHE_SESSIONS):
            await self._broadcast.answer(request, client)
            return
        path = unquote(request.path) + "/"  # decoded once more, as a proxy between here and the server may do
        if any(route in path for route in _NOT_FOR_CLIENTS):
            raise RequestError(f"{request.path:.200} is no route for clients.", status=404, code="not_found")
        counter = request.usage_counter
        # A replica with --root-path /llm also answers /llm/sleep and /llm/v1/files/x.
        if counter is not None and (path.endswith(_OF_OPERATORS) or has_prefix(path)):
            raise RequestError(
                f"{request.path:.200} is not for keys of --keys; {WITHOUT_LIMITS}.", status=403, code="not_allowed"
            )
        await self._models.look_for(request.model)
        deployment, pinned_replica = self._kept_items.place(request)
        if counter is None:
            await self._try_models(deployment, pinned_replica, request, client)
            return
        check_use(counter.key, deployment)
        self._check_batch(request, counter.key, deployment)
        request = counted_request(request, counter.key, client)
        await counter.admit(deployment.name)
        try:
            # Again: the catalogue may have changed while the store answered.
            deployment, pinned_replica = self._kept_items.place(request)
            check_use(counter.key, deployment)
            await self._try_models(deployment, pinned_replica, request, client)
        finally:
            await counter.finish(client.progress.num_tokens)

    def _check_batch(self, request: ProxyRequest, key: Key, deployment: Deployment) -> None:
        """Raise `RequestError` for a new batch if its servers also have models that the key may not use. The lines of a
        batch name models, and the gateway does not read them. Models of the same servers share a `Load`."""
        if request.method == "POST" and route_of(request.path) == "/v1/batches" and request.kept_id is None:
            load = deployment.router.load
            for model in self._models:
                if model.router.load is load and not model.may_be_used_by(key):
                    raise RequestError(
                        f"A batch for {deployment.name} could also use {model.name}, which the API key "
                        f"{key.settings.name} is not for.", param="model", status=403, code="model_not_allowed",
                    )  # fmt: skip

    async def _try_models(
        self, deployment: Deployment, pinned_replica: Replica | None, request: ProxyRequest, client: Client
    ) -> None:
        """Have the request's model answer: a canary is asked first, then the model, then its fallbacks, each if those
        before could not answer. If none can, the client gets the model's own error."""
        errors: list[RequestError] = []
        retry = RetryState()
        if deployment.entry.canaries:
            await request.body.prepare(None, reads_prefixes=True)
        canary = self._canary_of(deployment, pinned_replica, request)
        for model in self._models_to_try(canary, deployment, pinned_replica, request):
            if request.usage_counter is not None:
                request.usage_counter.model = model.name
            retry.begin_model()
            try:
                with model.hold():
                    await self._try_model(Attempt(model, pinned_replica, request, client, retry, model is canary))
                    return
            except RequestError as error:
                if error.status not in BUSY_STATUSES or client.has_answer or self.is_stopping:
                    raise
                if model is deployment or not errors:
                    errors = [error]
        raise errors.pop()  # popped: the traceback has this frame, and `errors` would close a reference cycle

    def _canary_of(
        self, deployment: Deployment, pinned_replica: Replica | None, request: ProxyRequest
    ) -> Deployment | None:
        """Return the canary that answers this conversation, if there is one and it is ready. A canary that does
        not run is started if the model itself runs; this request does not wait for it. Requests about something that a
        replica keeps (files, batches, conversations, stored answers) go to the model."""
        is_for_model = (
            pinned_replica is not None or request.kept_id is not None or request.body.refers_to is not None
            or route_of(request.path) in ("/v1/files", "/v1/batches", "/v1/conversations")
        )  # fmt: skip
        if not deployment.entry.canaries or request.method != "POST" or is_for_model:
            return None
        canary = self._models.names().get(deployment.canary_of(request.conversation) or "")
        if canary is None or (canary.state == "ready" and canary.replicas):
            return canary
        if deployment.state == "ready":  # else the canary could take the memory that the model needs
            self._models.start_aside(canary)
        return None

    def _models_to_try(
        self, canary: Deployment | None, deployment: Deployment, pinned_replica: Replica | None, request: ProxyRequest
    ) -> Iterator[Deployment]:
        """Yield a canary, if there is one, then the model, and its fallbacks. Each fallback is looked up in its turn,
        as the catalogue may change meanwhile."""
        if canary is not None:
            yield canary
        yield deployment
        key = None if request.usage_counter is None else request.usage_counter.key
        for name in deployment.entry.fallbacks if pinned_replica is None else ():
            model = self._models.names().get(name)
            if model is not None and model.may_be_used_by(key):
                yield model

    async def _try_model(self, attempt: Attempt) -> None:
        """Have a replica of the model answer."""
        deployment, retry = attempt.deployment, attempt.retry
        await deployment.wait_for_addresses()
        await attempt.request.body.prepare(deployment.served_name, reads_prefixes=_reads_prefixes(deployment))
        may_start_again = True  # once, if the model has stopped: its last replica died while it was asked
        while True:
            try:
                # 1. Start the model, and have a long prompt computed elsewhere.
                await self._start_if_needed(attempt)
                attempt = await self._prefill_elsewhere(attempt)
                if deployment.has_cut_off_requests:  # while this request waited above
                    raise _stopping_error()
                # 2. Ask its replicas.
                await self._try_replicas(attempt)
                return
            except _TryAnother as error:
                retry.last_failure = str(error)
            # 3. All replicas were tried.
            await deployment.base.wait_for_exits(retry.tried)
            match attempt.after_last_replica(may_start_again=may_start_again):
                case NextStep.WAIT:
                    if deployment.state == "ready":  # else its start is waited for
                        await self._pause(attempt)
                    retry.allow_again()
                case NextStep.START_AGAIN:
                    may_start_again = False
                case NextStep.GIVE_UP:
                    break
        breaker_waits_s = [replica.breaker.wait_s() for replica in deployment.replicas]
        raise RequestError(
            f"The model {deployment.name} cannot answer: {retry.last_failure}.", status=503, code="no_replica",
            retry_after_s=max(1, round(min(breaker_waits_s, default=1.0))),
        )  # fmt: skip

    async def _start_if_needed(self, attempt: Attempt) -> None:
        """Start the model if it does not run. For a stream that has lost its replica, a failed start is retried like a
        failed replica, until `resume_deadline`."""
        retry = attempt.retry
        if attempt.deployment.state == "ready":
            return
        if retry.resume_deadline is not None and not retry.may_still_resume:
            raise _TryAnother(retry.last_failure)
        try:
            await self.wait_until_ready(attempt.deployment, attempt.client, retry.resume_deadline)
        except RequestError as refusal:
            if refusal.code != "start_failed" or not retry.may_still_resume:
                raise
            await self._pause(attempt)
            raise _TryAnother(str(refusal)) from None

    async def _pause(self, attempt: Attempt) -> None:
        await self._keep_alive.during(asyncio.sleep(_PAUSE_S), "no replica can go on yet", attempt.client)
        if self.is_stopping:
            raise _stopping_error()

    async def _prefill_elsewhere(self, attempt: Attempt) -> Attempt:
        """Have another model's replica compute a long prompt, before a replica gets the request. Return the attempt
        with the place of its blocks, which all replicas that are asked later are told."""
        deployment, request, retry = attempt.deployment, attempt.request, attempt.retry
        if attempt.pinned_replica is not None or retry.tried or not self._prefill.is_wanted(deployment, request):
            return attempt
        work = self._prefill.compute(deployment, request, retry)
        blocks_at = await self._keep_alive.during(work, "the prompt is computed", attempt.client)
        return replace(attempt, request=replace(request, blocks_at=blocks_at))

    async def _try_replicas(self, attempt: Attempt) -> None:
        """Have a replica answer, one after another. Each round adds one to `retry.tried`, so the loop ends."""
        retry = attempt.retry
        while (replica := self._next_replica(attempt)) is not None:
            retry.tried.add(replica)
            try:
                await self._ask(attempt, replica)
                return
            except _TryAnother as error:
                retry.last_failure = str(error)
            if self.is_stopping:
                raise _stopping_error()
            if attempt.is_unanswered_canary and retry.num_lost:
                break
            if retry.num_lost >= _MAX_LOST:
                raise RequestError(
                    f"{retry.num_lost} replicas were lost while they had this request; it is refused, as it may crash "
                    "another one.", status=500, code="request_kills_replicas",
                )  # fmt: skip
        raise _TryAnother(retry.last_failure)

    def _next_replica(self, attempt: Attempt) -> Replica | None:
        """Return the replica to ask next; None if all were tried."""
        if (pinned := attempt.pinned_replica) is not None:
            return None if pinned in attempt.retry.tried else pinned
        deployment, body, tried = attempt.deployment, attempt.request.body, attempt.retry.tried
        if not _reads_prefixes(deployment):
            return deployment.router.choose(deployment.replicas, {}, tried)
        (prefixes, shared_prefix), session = body.prefixes, attempt.request.session
        placement_hash = (session or shared_prefix) if self._several_gateways else None
        return deployment.router.choose(deployment.replicas, prefixes, tried, session, placement_hash)

    async def _ask(self, attempt: Attempt, replica: Replica) -> None:
        """Have a replica answer, or resume the stream that the client has."""
        request, client = attempt.request, attempt.client
        body = request.body.parts(replica.served_name, client.progress.resume_fields())
        headers = request.headers_for(replica, keeps_keys=self._keeps_keys)
        if replica.has_notes and not attempt.deployment.base.entry.is_local:  # no other gateway asks a local one
            names = written_names(replica.served_name, request.body.prefixes[0], request.session)
            headers += [(PROMPT_NAMES, names)] if names else []
        # Outermost, as its exit may wait for a comment that is being sent: if that wait is cancelled, the answer is
        # already closed and the replica no longer counted as busy.
        async with self._keep_alive.watch_silence(client, replica) as silence_timer:
            with attempt.deployment.in_flight(replica), contextlib.ExitStack() as closes_answer:
                try:
                    answer = await replica.upstream.send(
                        request.method, request.target, headers, body, may_be_repeated=request.may_be_repeated
                    )
                    closes_answer.callback(answer.close)
                    silence_timer.answer = answer
                    data = await answer.read()
                except UpstreamError as error:
                    raise self._without_answer(attempt, replica, error) from None
                outcome = attempt.classify(answer)
                self._record(attempt, replica, outcome, answer)
                if outcome is not Outcome.DELIVER:
                    raise _why_try_another(replica, outcome, answer)
                if answer.status < 300:
                    stream_id = client.progress.id if client.progress.is_resumable else None
                    self._kept_items.note_created(request, attempt.deployment, replica, data, stream_id)
                await self._forward_answer(attempt, replica, answer, data)

    def _without_answer(self, attempt: Attempt, replica: Replica, error: UpstreamError) -> Exception:
        """Record that a replica has sent no byte of an answer. Returns the error to raise."""
        request, is_unreachable = attempt.request, isinstance(error, UnreachableError)
        self._record(attempt, replica, Outcome.UNREACHABLE if is_unreachable else Outcome.LOST)
        logger.warning("%s: replica %s gave no answer: %s", attempt.deployment.name, replica.name, error)
        if request.may_be_repeated or is_unreachable:
            return _TryAnother(f"replica {replica.name}: {error}")
        return RequestError(
            f"Replica {replica.name} was lost while it had this request, and may have done it: look before you send "
            f"it again. {request.method} {request.path:.200} is sent to one replica only.",
            status=502, code="replica_lost",
        )  # fmt: skip

    def _record(self, attempt: Attempt, replica: Replica, outcome: Outcome, answer: Answer | None = None) -> None:
        """Record the outcome with the breaker, the metrics and the retry state. Decides nothing. `answer` is what
        `Attempt.classify` has judged; connections that were lost come without one."""
        metrics, retry, progress, name = self._metrics, attempt.retry, attempt.client.progress, attempt.deployment.name
        match outcome:
            case Outcome.UNREACHABLE | Outcome.LOST:
                replica.breaker.fail()
                retry.record_lost(had_request=outcome is Outcome.LOST)
                metrics.retries.labels(name, replica.name).inc()
            case Outcome.ENGINE_DIED:
                assert answer is not None
                replica.record_in_breaker(answer)
                retry.record_lost()
                metrics.retries.labels(name, replica.name).inc()
            case Outcome.BUSY:
                # Not counted by the breaker: a lost stream asks again every second, and 502 or 504 of a proxy that
                # waits for its replica would open the breaker for everyone.
                retry.busy.add(replica)
                metrics.retries.labels(name, replica.name).inc()
            case Outcome.CANNOT_RESUME:
                assert answer is not None
                replica.record_in_breaker(answer)
                retry.cannot_resume.add(replica)
            case Outcome.BROKEN:
                replica.breaker.fail()
                retry.record_lost(has_new_tokens=progress.take_growth())
                metrics.broken_streams.labels(name, replica.name).inc()
            case Outcome.CUT_AFTER_END:
                replica.breaker.fail()
            case Outcome.DELIVER:
                assert answer is not None
                replica.record_in_breaker(answer)
                attempt.client.answered_by = (name, replica.name)
                if progress.is_resumable and answer.header(RESUMABLE):
                    metrics.resumed.labels(name, replica.name).inc()
                if not attempt.client.has_answer:
                    metrics.requests.labels(name, replica.name, answer.status).inc()
                    metrics.first_byte.labels(name).observe(time.monotonic() - attempt.request.arrival)
            case _:
                assert_never(outcome)

    async def _forward_answer(self, attempt: Attempt, replica: Replica, answer: Answer, data: bytes) -> None:
        """Send an answer to the client. `data` is its beginning."""
        client = attempt.client
        try:
            await client.begin(answer)
            if not client.add(data):
                await client.flush()
            while await answer.pass_to(client.add):
                await client.flush()
            if client.progress.is_given_up:
                raise UpstreamError("it stops or its engine has died")
        except UpstreamError as error:
            self._handle_lost_replica(attempt, replica, answer, error)
        await client.end()

    def _handle_lost_replica(self, attempt: Attempt, replica: Replica, answer: Answer, error: UpstreamError) -> None:
        """Decide about an answer whose replica was lost amid it. Raises `_TryAnother` if another replica is to resume
        the stream, and `RequestError` if none can. Returns if the client's answer ends here: it has the last event, or
        the replica's own error event."""
        client, retry, name = attempt.client, attempt.retry, attempt.deployment.name
        if client.progress.has_ended:
            self._record(attempt, replica, Outcome.CUT_AFTER_END)
            return
        self._record(attempt, replica, Outcome.BROKEN)
        logger.warning("%s: replica %s was lost amid an answer: %s", name, replica.name, error)
        may_lose_another = retry.num_lost < _MAX_LOST and not self.is_stopping
        another_may_resume = client.progress.is_resumable and attempt.pinned_replica is None and may_lose_another
        # The replica ended the stream itself, with its own error event.
        has_own_error = client.progress.is_given_up and answer.is_whole
        if has_own_error and not (another_may_resume and attempt.untried_replicas()):
            client.has_failed = True
            return
        if another_may_resume:
            client.silent_since = time.monotonic()
            retry.resume_deadline = client.silent_since + self._limits.max_wait_s
            raise _TryAnother(f"replica {replica.name} was lost amid the answer: {error}")
        reason = "the gateway is stopping" if self.is_stopping else "its replica was lost amid the answer"
        raise RequestError(f"The model {name} did not end its answer: {reason}.", status=503, code="replica_lost")

    async def wait_until_ready(
        self, deployment: Deployment, client: Client, resume_deadline: float | None = None
    ) -> None:
        """Wait for a model, with comments for a client that streams; until `resume_deadline` for a stream that has lost
        its replica. Raises `RequestError`."""
        retry_after_s = max(1, round(deployment.base.start_s))
        if self._num_waiting >= self._limits.max_waiting and resume_deadline is None:
            raise RequestError(
                f"{self._num_waiting} requests wait for models that are not loaded (--max-waiting); try again in "
                f"about {retry_after_s} s.", status=429, code="queue_full", retry_after_s=retry_after_s,
            )  # fmt: skip
        self._num_waiting += 1
        begin = time.monotonic()
        limit_s = self._limits.max_wait_s if resume_deadline is None else resume_deadline - begin
        try:
            async with asyncio.timeout(limit_s):
                await self._keep_alive.during(deployment.ready(), f"{deployment.name} is being loaded", client)
        except TimeoutError:
            what = "memory, which other models are using" if deployment.state == "waiting" else "its start"
            raise RequestError(
                f"The model {deployment.name} was not there within {self._limits.max_wait_s:g} s (--max-wait): it "
                f"waits for {what}.", status=503, code="model_not_ready", retry_after_s=retry_after_s,
            ) from None  # fmt: skip
        finally:
            self._num_waiting -= 1
            client.loads_s.append(time.monotonic() - begin)


def _reads_prefixes(deployment: Deployment) -> bool:
    return deployment.entry.may_be_several or deployment.entry.prefill_model is not None


def _why_try_another(replica: Replica, outcome: Outcome, answer: Answer) -> _TryAnother:
    if outcome is Outcome.CANNOT_RESUME:
        return _TryAnother(f"replica {replica.name} cannot continue another replica's stream")
    return _TryAnother(
        f"replica {replica.name} " + ("is ending" if answer.header(CUT_OFF) else f"answered {answer.status}")
    )


def _stopping_error() -> RequestError:
    return RequestError("The gateway is stopping.", status=503, code="stopping")
