"""Takes a request to a replica of its model, and the answer to the client. If a replica is lost before the answer's
first byte, another one is asked. Later, another replica, or the same one once it is back, goes on with the stream if
both are Octavo servers; else the stream ends with an error event. A request is refused once two replicas were lost
while they had it: it may be what ends them.

Every level here returns when the client has its answer, and raises otherwise: `RequestError` for an error that the
client gets, `_ReplicaError` if another replica may answer or go on.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

from octavo.errors import RequestError
from octavo.gateway.broadcast import Broadcast
from octavo.gateway.client import Client
from octavo.gateway.deployment import Deployment
from octavo.gateway.gateway_metrics import GatewayMetrics
from octavo.gateway.keep_alive import KeepAlive
from octavo.gateway.models import Models
from octavo.gateway.placement import Placement
from octavo.gateway.prefill import Prefill
from octavo.gateway.proxy_request import ProxyRequest, check_use, metered, route_of
from octavo.gateway.replica import Replica
from octavo.gateway.stream_progress import CUT_OFF, RESUMABLE, RESUMABLE_PATHS
from octavo.gateway.upstream import Answer, UnreachableError, UpstreamError

logger = logging.getLogger("octavo.gateway")

_CACHE_SESSIONS = "/v1/cache/sessions/"
_CACHE_BLOCKS = "/v1/cache/blocks/"  # for servers alone: blocks of all clients
_GENERATING_PATHS = RESUMABLE_PATHS | {"/invocations", "/generate"}  # whose whole answers may be cut off
_BUSY = (429, 503)
_PAUSE_S = 1.0  # until it is seen again whether a replica can go on with a stream
_MAX_LOST = 2  # replicas that a request may lose: it may be what ends them


@dataclass(frozen=True)
class WaitLimits:
    """How many requests may wait for models to start, and for how long; how often a silent stream gets a comment."""

    max_waiting: int = 256
    max_wait_s: float = 300.0
    stream_keep_alive_s: float = 5.0


class _ReplicaError(Exception):
    """A replica has not answered, or its answer broke off. Another one may answer, or go on."""


@dataclass
class _Turn:
    """A request's turn at a model."""

    deployment: Deployment
    keeper: Replica | None  # the only replica that can answer, if there is one
    request: ProxyRequest
    client: Client
    tried: set[Replica] = field(default_factory=set)
    why: str = "no replica takes requests"  # the last reason why there is no answer yet

    def others(self) -> list[Replica]:
        """Return the replicas that may answer and have not been tried."""
        if self.keeper is not None:
            return []
        return [one for one in self.deployment.replicas if one not in self.tried and one.takes_requests()]

    def may_wait(self) -> bool:
        """Return whether a stream that has lost its replica waits: for a busy one, for the lost one to come back, or
        for one that is being started."""
        if time.monotonic() >= self.client.waits_until:
            return False
        may_come = not self.deployment.replicas or bool(self.deployment.restarting)
        return may_come or not self.client.unable.issuperset(self.deployment.replicas)

    def forget_tries(self) -> None:
        """Let the replicas be tried again that were busy, or have passed a health check since they were lost."""
        client = self.client
        tried = self.tried - client.unable
        self.tried -= {one for one in tried if one in client.busy or one.well_at > client.failed_at}
        client.busy.clear()


class Proxy:
    """Passes requests on."""

    def __init__(
        self, models: Models, metrics: GatewayMetrics, limits: WaitLimits, *, keeps_keys: bool, several_gateways: bool
    ) -> None:
        """With `keeps_keys` no replica gets the clients' keys. With `several_gateways` others route to the same
        replicas."""
        self._models, self._metrics, self._limits = models, metrics, limits
        self._keeps_keys, self._several_gateways = keeps_keys, several_gateways
        self._placement = Placement(models)
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
        if _CACHE_BLOCKS in posixpath.normpath(unquote(request.path)) + "/":  # as a server in front of it may read it
            raise RequestError(f"{request.path:.200} is no route for clients.", status=404, code="not_found")
        await self._models.look_for(request.model)
        deployment, keeper = self._placement.place(request)
        if (meter := request.meter) is None:
            await self._answer_with_fallbacks(deployment, keeper, request, client)
            return
        check_use(meter.key, deployment)
        request = metered(request, meter.key, client)
        await meter.admit(deployment.name)
        deployment, keeper = self._placement.place(request)  # again, as the catalogue may have changed meanwhile
        check_use(meter.key, deployment)
        try:
            await self._answer_with_fallbacks(deployment, keeper, request, client)
        finally:
            await meter.finish(client.progress.num_tokens)

    async def _answer_with_fallbacks(
        self, deployment: Deployment, keeper: Replica | None, request: ProxyRequest, client: Client
    ) -> None:
        """Have a model answer, or else its fallbacks, or first its canary. The client gets the error of the model
        itself."""
        errors: list[RequestError] = []
        for one in self._models_in_turn(deployment, keeper, request):
            if request.meter is not None:
                await request.meter.admit(one.name)
            try:
                with one.hold():
                    await self._answer_with_model(_Turn(one, keeper, request, client))
                    return
            except RequestError as error:
                if error.status not in _BUSY or client.has_answer:
                    raise
                if one is deployment or not errors:
                    errors = [error]
        raise errors.pop()  # popped, as a variable would make a cycle with its traceback

    def _models_in_turn(
        self, deployment: Deployment, keeper: Replica | None, request: ProxyRequest
    ) -> Iterator[Deployment]:
        """Yield a model and its fallbacks, and before them the canary that answers this conversation. Each is looked up
        in its turn, as the catalogue may change meanwhile."""
        is_kept = route_of(request.path) in ("/v1/files", "/v1/batches", "/v1/conversations")
        if deployment.entry.canaries and keeper is None and request.method == "POST" and not is_kept:
            canary = deployment.canary_of(request.session or request.body.prefixes[1])
            if canary is not None and (one := self._models.names().get(canary)) is not None:
                yield one
        yield deployment
        for name in deployment.entry.fallbacks if keeper is None else ():
            one = self._models.names().get(name)
            if one is not None and one.may_be_used_by(None if request.meter is None else request.meter.key):
                yield one

    async def _answer_with_model(self, turn: _Turn) -> None:
        """Have a replica of the model answer."""
        deployment = turn.deployment
        await deployment.discovered()
        num_rounds = 2  # a model whose last replica died meanwhile is started once more
        while num_rounds:
            try:
                # 1. Start the model, and have a long prompt computed elsewhere.
                await self._start(turn)
                await self._have_prompt_computed(turn)
                if deployment.is_cut:  # meanwhile
                    raise _stopping()
                # 2. Ask its replicas.
                await self._answer_with_replicas(turn)
                return
            except _ReplicaError as error:
                turn.why = str(error)
            # 3. A stream that has lost its replica waits. Other requests try no replica twice.
            await deployment.settle(turn.tried)
            if turn.may_wait():
                if deployment.state == "ready":
                    await self._pause(turn)
                turn.forget_tries()
            elif turn.keeper is not None or deployment.state == "ready":
                break
            else:
                num_rounds -= 1
        waits = [one.breaker.wait_s() for one in deployment.replicas]
        raise RequestError(
            f"The model {deployment.name} cannot answer: {turn.why}.", status=503, code="no_replica",
            retry_after_s=max(1, round(min(waits, default=1.0))),
        )  # fmt: skip

    async def _start(self, turn: _Turn) -> None:
        """Start the model if it does not run. For a stream that has lost its replica a start that fails is like a
        replica that fails: it waits for the next start."""
        if turn.deployment.state == "ready":
            return
        try:
            await self.until_ready(turn.deployment, turn.client)
        except RequestError as refusal:
            if refusal.code != "start_failed" or time.monotonic() >= turn.client.waits_until:
                raise
            await self._pause(turn)
            raise _ReplicaError(str(refusal)) from None

    async def _pause(self, turn: _Turn) -> None:
        await self._keep_alive.during(asyncio.sleep(_PAUSE_S), "no replica can go on yet", turn.client)

    async def _have_prompt_computed(self, turn: _Turn) -> None:
        """Have another model's replica compute a long prompt, before a replica gets the request."""
        if turn.keeper is None and not turn.tried and self._prefill.is_wanted(turn.deployment, turn.request):
            work = self._prefill.compute(turn.deployment, turn.request, turn.client)
            blocks_at = await self._keep_alive.during(work, "the prompt is computed", turn.client)
            turn.request = replace(turn.request, blocks_at=blocks_at)

    async def _answer_with_replicas(self, turn: _Turn) -> None:
        """Have a replica answer, one after another. Each try excludes one, so the loop ends."""
        while (replica := turn.keeper or self._choose(turn)) is not None and replica not in turn.tried:
            turn.tried.add(replica)
            try:
                await self._answer_with_replica(turn, replica)
                return
            except _ReplicaError as error:
                turn.why = str(error)
            if self.is_stopping:
                raise _stopping()
            if turn.client.num_lost >= _MAX_LOST:
                raise RequestError(
                    f"{turn.client.num_lost} replicas of {turn.deployment.name} were lost while they had this request; "
                    "it is refused, as it may end another one.", status=500, code="request_kills_replicas",
                )  # fmt: skip
        raise _ReplicaError(turn.why)

    def _choose(self, turn: _Turn) -> Replica | None:
        deployment, body = turn.deployment, turn.request.body
        if not deployment.entry.may_be_several and deployment.entry.prefill_model is None:
            return deployment.router.choose(deployment.replicas, {}, turn.tried)
        (prefixes, shared), session = body.prefixes, turn.request.session
        agreed = (session or shared) if self._several_gateways else None
        return deployment.router.choose(deployment.replicas, prefixes, turn.tried, session, agreed)

    async def _answer_with_replica(self, turn: _Turn, replica: Replica) -> None:
        """Have a replica answer, or go on with the stream that the client has."""
        request, client = turn.request, turn.client
        body = client.progress.resumed(request.body.naming(replica.served_name))
        headers = request.headers_for(replica, keeps_keys=self._keeps_keys)
        replica.num_in_flight += 1
        silence = self._keep_alive.in_silence(client, replica)
        try:
            try:
                silence.answer = await replica.upstream.send(request.method, request.target, headers, body)
                data = await silence.answer.read()
            except UpstreamError as error:
                self._note_no_answer(turn, replica, error)
                raise _ReplicaError(f"replica {replica.name}: {error}") from None
            self._leave_to_others(turn, replica, silence.answer)
            self._note_answer(turn, replica, silence.answer, data)
            await self._pass_on(turn, replica, silence.answer, data)
        finally:
            replica.num_in_flight -= 1
            if silence.answer is not None:
                silence.answer.close()
            turn.deployment.close_if_gone(replica)
            await silence.end()

    def _note_no_answer(self, turn: _Turn, replica: Replica, error: UpstreamError) -> None:
        name = turn.deployment.name
        replica.breaker.fail()
        turn.client.num_lost += not isinstance(error, UnreachableError)
        turn.client.failed_at = time.monotonic()
        self._metrics.retries.labels(name, replica.name).inc()
        logger.warning("%s: replica %s gave no answer: %s", name, replica.name, error)

    def _leave_to_others(self, turn: _Turn, replica: Replica, answer: Answer) -> None:
        """Raise `_ReplicaError` for an answer that the client need not get: it says that the replica is busy, ends or
        cannot go on with the stream, and another replica may answer, or this one later."""
        request, client, others = turn.request, turn.client, turn.others()
        # 1. The replica is busy or ends.
        wants_whole_answer = request.path in _GENERATING_PATHS and not request.body.streams
        is_cut_off = answer.header(CUT_OFF) and (answer.status >= 500 or wants_whole_answer)
        may_wait = answer.status in (*_BUSY, 502, 504) and time.monotonic() < client.waits_until
        is_left = answer.status in _BUSY or is_cut_off or may_wait
        if is_left and (others or may_wait) and turn.keeper is None:
            if may_wait:
                client.busy.add(replica)
            if answer.status == 500:  # its engine has died, maybe of this request
                replica.breaker.fail()
                client.num_lost += 1
            self._metrics.retries.labels(turn.deployment.name, replica.name).inc()
            raise _ReplicaError(
                f"replica {replica.name} " + ("is ending" if is_cut_off else f"answered {answer.status}")
            )
        if answer.status in (502, 503, 504):
            replica.breaker.fail()
        else:
            replica.breaker.succeed()
        # 2. It cannot go on with the stream.
        if not client.can_take(answer, is_last=not others):
            client.unable.add(replica)
            raise _ReplicaError(f"replica {replica.name} cannot continue another replica's stream")

    def _note_answer(self, turn: _Turn, replica: Replica, answer: Answer, data: bytes) -> None:
        """Count an answer that the client is to get, and note what the replica keeps from now on. `data` is its
        beginning."""
        request, progress, name = turn.request, turn.client.progress, turn.deployment.name
        if progress.is_resumable and answer.header(RESUMABLE):
            self._metrics.resumed.labels(name, replica.name).inc()
        if not turn.client.has_answer:
            self._metrics.requests.labels(name, replica.name, answer.status).inc()
            self._metrics.first_byte.labels(name).observe(time.monotonic() - request.arrival)
        if answer.status < 300:
            stream_id = progress.id if progress.is_resumable else None
            self._placement.note_created(request, turn.deployment, replica, data, stream_id)

    async def _pass_on(self, turn: _Turn, replica: Replica, answer: Answer, data: bytes) -> None:
        """Send an answer to the client. `data` is its beginning."""
        client = turn.client
        try:
            await client.begin(answer)
            if not client.add(data):
                await client.flush()
            while await answer.pass_to(client.add):
                await client.flush()
            if client.progress.is_given_up:
                raise UpstreamError("it stops or its engine has died")
        except UpstreamError as error:
            self._note_loss(turn, replica, answer, error)
        await client.end()

    def _note_loss(self, turn: _Turn, replica: Replica, answer: Answer, error: UpstreamError) -> None:
        """Note that a replica was lost amid its answer. Returns if the answer ends here nevertheless."""
        client, name = turn.client, turn.deployment.name
        replica.breaker.fail()
        self._metrics.broken_streams.labels(name, replica.name).inc()
        logger.warning("%s: replica %s was lost amid an answer: %s", name, replica.name, error)
        if client.progress.has_ended:  # only the connection's end is missing
            return
        client.num_lost = 1 if client.progress.has_grown() else client.num_lost + 1
        may_go_on = client.progress.is_resumable and client.num_lost < _MAX_LOST
        may_go_on = may_go_on and turn.keeper is None and not self.is_stopping
        is_ended = client.progress.is_given_up and answer.is_whole  # by the replica, in its way
        if is_ended and not (may_go_on and turn.others()):
            return
        if may_go_on:
            client.failed_at = client.silent_since = time.monotonic()
            client.waits_until = client.failed_at + self._limits.max_wait_s
            raise _ReplicaError(f"replica {replica.name} was lost amid the answer: {error}")
        reason = "the gateway is stopping" if self.is_stopping else "its replica was lost amid the answer"
        raise RequestError(f"The model {name} did not end its answer: {reason}.", status=503, code="replica_lost")

    async def until_ready(self, deployment: Deployment, client: Client) -> None:
        """Wait for a model, with comments for a client that streams. Raises `RequestError`."""
        retry_after_s = max(1, round(deployment.start_s))
        left_s = client.waits_until - time.monotonic()
        is_admitted = left_s > 0  # a stream that has lost its replica
        if self._num_waiting >= self._limits.max_waiting and not is_admitted:
            raise RequestError(
                f"{self._num_waiting} requests wait for models that are not loaded (--max-waiting); try again in "
                f"about {retry_after_s} s.", status=429, code="queue_full", retry_after_s=retry_after_s,
            )  # fmt: skip
        self._num_waiting += 1
        begin = time.monotonic()
        try:
            async with asyncio.timeout(left_s if is_admitted else self._limits.max_wait_s):
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


def _stopping() -> RequestError:
    return RequestError("The gateway is stopping.", status=503, code="stopping")
