"""Takes a request to a replica of its model, and the answer to the client. If a replica is lost before the answer's
first byte, another one is asked. Later, another replica, or the same one once it is back, goes on with the stream if
both are Octavo servers; else the stream ends with an error event. A request that had two replicas when they were lost
is refused, as it may have ended them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from octavo.errors import RequestError, similar
from octavo.gateway.client import Client
from octavo.gateway.deployment import Deployment
from octavo.gateway.gateway_metrics import GatewayMetrics
from octavo.gateway.keep_alive import KeepAlive
from octavo.gateway.keys import Key
from octavo.gateway.meter import Meter
from octavo.gateway.models import Models
from octavo.gateway.prefill import BLOCKS_AT, ONLY_PROMPT, Prefill
from octavo.gateway.replica import Replica
from octavo.gateway.request_body import RequestBody
from octavo.gateway.router import CreatedIds
from octavo.gateway.stream_progress import CUT_OFF, RESUMABLE, RESUMABLE_PATHS
from octavo.gateway.upstream import HOP_BY_HOP, Answer, Headers, UnreachableError, UpstreamError, end_to_end

logger = logging.getLogger("octavo.gateway")

MODEL_HEADER = b"x-octavo-model"  # names the model of a request without one in its body
SESSION_HEADER = b"x-session-id"
_ADDRESS_HEADERS = frozenset({
    b"x-forwarded-for", b"forwarded", b"x-real-ip", b"x-client-ip", b"true-client-ip", b"cf-connecting-ip",
    b"cf-connecting-ipv6", b"fly-client-ip", b"x-cluster-client-ip", b"x-envoy-external-address",
    b"x-original-forwarded-for",
})  # fmt: skip
_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
_NOT_PASSED_ON = HOP_BY_HOP | {
    b"host", b"content-length", b"expect", b"accept-encoding", MODEL_HEADER, ONLY_PROMPT, BLOCKS_AT, RESUMABLE,
}  # fmt: skip
_KEEPS = re.compile(
    r"/v1/(?:responses|conversations|chat/completions|files|batches)(?:/(?!(?:input_tokens|compact|render|derender|batch)$)([^/]+))?"
)
_CREATED = re.compile(
    rb'"(?:id|output_file_id|error_file_id)"\s*:\s*"((?:resp|conv|chatcmpl|file|batch)[-_][\w-]{1,100})"'
)
_CACHE_SESSIONS = "/v1/cache/sessions/"
_CACHE_BLOCKS = "/v1/cache/blocks/"  # for servers alone: blocks of all clients
_EVERYWHERE_S = 30.0  # for all replicas to answer
_MAX_ANSWER_BYTES = 1 << 16
_GENERATING_PATHS = RESUMABLE_PATHS | {"/invocations", "/generate"}  # whose whole answers may be cut off
_BUSY = (429, 503)
_PAUSE_S = 1.0  # until it is seen again whether a replica can go on with a stream
_MAX_LOST = 2  # replicas that a request may lose: it may be what ends them
# Known routes, and what is true of each: `priority` is a field of its body; its streams have a `usage` only where it is
# asked for; its answers are `uncounted`, as they have no usage; it `lists` with GET what one server keeps.
_ROUTES: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("priority", "usage", "lists"),
    **dict.fromkeys(("/v1/completions", "/invocations"), ("priority", "usage")),
    **dict.fromkeys((
        "/v1/responses", "/v1/messages", "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score",
        "/rerank", "/v1/rerank", "/v2/rerank", "/v1/chat/completions/render", "/v1/completions/render",
    ), ("priority",)),
    "/generate": ("priority", "uncounted"),
    "/v1/files": ("lists",),
    "/v1/batches": ("uncounted", "lists"),
    **dict.fromkeys((
        "/v1/conversations", "/v1/models", "/v1/audio", "/v1/cache/sessions", "/tokenize", "/detokenize", "/api/chat",
        "/api/generate", "/api/embed", "/api/embeddings", "/api/tags", "/api/ps", "/api/show", "/api/pull",
        "/api/delete", "/api/version",
    ), ()),
}  # fmt: skip


@dataclass(frozen=True)
class ProxyRequest:
    """A request with its whole body. `target` is the path and query as the client wrote them."""

    method: str
    path: str
    target: bytes
    headers: Headers
    body: RequestBody
    arrival: float  # time.monotonic
    meter: Meter | None = None  # if the client has a key of the store
    blocks_at: str | None = None  # the address of a server that has computed the prompt

    @property
    def owner(self) -> str | None:
        """The id of the client's key."""
        return None if self.meter is None else self.meter.key.id

    @property
    def model(self) -> str | None:
        """The model that the body or else a header names."""
        header = self.header(MODEL_HEADER)
        return self.body.model if self.body.model is not None or header is None else header.decode("latin-1")

    @property
    def session(self) -> bytes | None:
        """A digest of the client's session, which is used like a prefix's hash."""
        said = self.body.session_id
        given = self.header(SESSION_HEADER) if said is None else said.encode()
        return None if not given else hashlib.blake2b(b"session " + given, digest_size=16).digest()

    @property
    def traits(self) -> Collection[str]:
        """What `_ROUTES` says about the path."""
        return _ROUTES.get(self.path, ())

    def header(self, name: bytes) -> bytes | None:
        return next((value for own, value in self.headers if own == name), None)


@dataclass(frozen=True)
class WaitLimits:
    """How many requests may wait for models to start, and for how long; how often a waiting stream gets a comment."""

    max_waiting: int = 256
    max_wait_s: float = 300.0
    stream_keep_alive_s: float = 5.0


class Proxy:
    """Passes requests on."""

    def __init__(
        self, models: Models, metrics: GatewayMetrics, limits: WaitLimits, *, keeps_keys: bool, several_gateways: bool
    ) -> None:
        """With `keeps_keys` no replica gets the clients' keys. With `several_gateways` others route to the same
        replicas."""
        self._models, self._metrics, self._limits = models, metrics, limits
        self._keeps_keys, self._several_gateways = keeps_keys, several_gateways
        self._created = CreatedIds()
        self._prefill = Prefill(models, metrics, self._headers_for)
        self._keep_alive = KeepAlive(limits.stream_keep_alive_s)
        self._num_waiting = 0
        self.is_stopping = False

    async def answer(self, request: ProxyRequest, client: Client) -> None:
        """Answer a request. Raises `RequestError` where the gateway itself has to refuse."""
        if request.method == "DELETE" and request.path.startswith(_CACHE_SESSIONS):
            await self._answer_everywhere(request, client)
            return
        if _CACHE_BLOCKS in request.path:
            raise RequestError(f"{request.path:.200} is no route for clients.", status=404, code="not_found")
        await self._models.look_for(request.model)
        deployment, keeper = self._place(request)
        if (meter := request.meter) is None:
            await self._answer_with_any(deployment, keeper, request, client)
            return
        key = meter.key
        check_use(key, deployment)
        request = _metered(request, key, client)
        await meter.admit(deployment.name)
        deployment, keeper = self._place(request)  # again, as the catalogue may have changed meanwhile
        check_use(key, deployment)
        try:
            await self._answer_with_any(deployment, keeper, request, client)
        finally:
            await meter.finish(client.progress.num_tokens)

    async def _answer_everywhere(self, request: ProxyRequest, client: Client) -> None:
        """Send the request to all running replicas of the model that a header names, or of all models that the client
        may use. Answer with a success if one of them did. Raises `RequestError` if one gave no answer, as it may have
        done nothing."""
        name, key = request.header(MODEL_HEADER), None if request.meter is None else request.meter.key
        await self._models.look_for(None if name is None else name.decode("latin-1"))
        deployments = list(self._models) if name is None else [self._models.find(name.decode("latin-1"))]
        if key is not None and name is not None:
            check_use(key, deployments[0])
        deployments = [one for one in deployments if one.may_be_used_by(key)]
        if request.meter is not None and deployments:
            await request.meter.admit(deployments[0].name)
        with contextlib.ExitStack() as held:
            for one in deployments:
                if one.replicas:
                    held.enter_context(one.hold())
            places = [(one, replica) for one in deployments for replica in one.replicas]
            answers = await asyncio.gather(*(self._whole_answer(*place, request) for place in places))
        lost = [replica.name for (_, replica), answer in zip(places, answers, strict=True) if answer[0] >= 500]
        if lost:
            raise RequestError(
                f"{', '.join(lost)} gave no answer, and may still have it; try again.", status=503, code="replica_lost"
            )
        if not answers:
            raise RequestError("No model runs that could have it.", status=404, code="not_found")
        await client.reply(*min(answers, key=lambda answer: (answer[0] >= 300, answer[0] != 404)))

    async def _whole_answer(
        self, deployment: Deployment, replica: Replica, request: ProxyRequest
    ) -> tuple[int, bytes, bytes]:
        """Return the status, content type and body of a replica's answer; 503 if there is none."""
        status, content_type, body = 503, b"", b""
        replica.num_in_flight += 1
        try:
            async with asyncio.timeout(_EVERYWHERE_S):
                headers = self._headers_for(replica, request)
                answer = await replica.upstream.send(request.method, request.target, headers, request.body.data)
                try:
                    body = await answer.read_all(_MAX_ANSWER_BYTES)
                    status, content_type = answer.status, answer.header(b"content-type")
                finally:
                    answer.close()
        except (UpstreamError, TimeoutError) as error:
            logger.warning("%s: replica %s gave no answer: %s", deployment.name, replica.name, error)
        finally:
            replica.num_in_flight -= 1
            deployment.close_if_gone(replica)
        self._metrics.requests.labels(deployment.name, replica.name, status).inc()
        return status, content_type, body

    async def _answer_with_any(
        self, deployment: Deployment, keeper: Replica | None, request: ProxyRequest, client: Client
    ) -> None:
        errors: list[RequestError] = []
        for one in self._in_turn(deployment, keeper, request):
            if request.meter is not None:
                await request.meter.admit(one.name)
            try:
                with one.hold():
                    if await self._answer_with(one, keeper, request, client):
                        return
            except RequestError as error:
                if error.status not in _BUSY or client.has_answer:
                    raise
                errors = errors or [error]
        raise errors.pop()  # popped, as a variable would make a cycle with its traceback

    def _in_turn(self, deployment: Deployment, keeper: Replica | None, request: ProxyRequest) -> Iterator[Deployment]:
        """Yield a model and its fallbacks. Each is looked up in its turn, as the catalogue may change meanwhile."""
        yield deployment
        for name in deployment.entry.fallbacks if keeper is None else ():
            one = self._models.names().get(name)
            if one is not None and one.may_be_used_by(None if request.meter is None else request.meter.key):
                yield one

    def _place(self, request: ProxyRequest) -> tuple[Deployment, Replica | None]:
        """Return the model, and the replica if only one can answer because it keeps what the request is about. Raises
        `RequestError`."""
        path = _KEEPS.match(request.path)
        path_id = path[1] if path is not None else None
        named = request.model
        home = self._created.find(path_id or request.body.refers_to or "")
        if home is not None and home[2] != request.owner:
            raise RequestError(f"{path_id or request.body.refers_to} is not known here.", status=404, code="not_found")
        if home is not None and (named is None or self._models.find(named).name == home[0]):
            deployment = self._models.find(home[0])
            # By name: a server whose address left and came back is another `Replica`.
            name = None if deployment.entry.is_local else home[1].name
            keepers = [one for one in deployment.replicas if one is home[1] or one.name == name]
            if not keepers:
                raise RequestError(
                    f"{path_id or request.body.refers_to} was kept by a replica of {home[0]} that has stopped.",
                    status=404, code="not_found",
                )  # fmt: skip
            return deployment, keepers[0]
        if named is not None:
            deployment = self._models.find(named)
        elif len(self._models) == 1:
            deployment = next(iter(self._models))
        elif path_id is not None:
            raise RequestError(
                f"{path_id:.200} is not known here: the gateway remembers what was made through it since it started. "
                f"Name the model that keeps it in the header {MODEL_HEADER.decode()}.",
                status=404, code="not_found",
            )  # fmt: skip
        else:
            raise RequestError(
                f"{request.path:.200} names no model, and there are {len(self._models)}: give it as `model` in the "
                f"body, or in the header {MODEL_HEADER.decode()}.",
                param="model",
            )
        lists = request.method == "GET" and "lists" in request.traits
        if lists and request.meter is not None:
            raise RequestError(f"{request.path} lists what other clients keep, too.", status=403, code="not_allowed")
        if lists and deployment.entry.may_be_several:
            raise RequestError(
                f"{request.path} lists what one server keeps, and {deployment.name} has several replicas: ask for one "
                "thing by its id."
            )
        return deployment, None

    async def _answer_with(
        self, deployment: Deployment, keeper: Replica | None, request: ProxyRequest, client: Client
    ) -> bool:
        """Have a replica of the model answer, only the `keeper` if there is one. Raises `RequestError` if none does."""
        tried: set[Replica] = set()
        why = "no replica takes requests"
        await deployment.discovered()
        num_rounds = 2  # a model whose last replica died meanwhile is started once more
        while num_rounds:
            num_rounds -= 1
            has_failed = False
            if deployment.state != "ready":
                try:
                    await self.until_ready(deployment, client)
                except RequestError as refusal:
                    if refusal.code != "start_failed" or time.monotonic() >= client.waits_until:
                        raise
                    has_failed, why = True, str(refusal)
            if keeper is None and not tried and self._prefill.is_wanted(deployment, request):
                work = self._prefill.compute(deployment, request, client)
                request = replace(
                    request, blocks_at=await self._keep_alive.during(work, "the prompt is computed", client)
                )
            if deployment.is_cut:  # meanwhile
                raise _stopping()
            # Every try excludes one replica, so the loop ends.
            while (replica := keeper or self._choose(deployment, request, tried)) not in tried and replica is not None:
                tried.add(replica)
                error = await self._try(deployment, replica, request, client, tried, keeper is not None)
                if error is None:
                    return True
                if self.is_stopping:
                    raise _stopping()
                if client.num_lost >= _MAX_LOST:
                    raise RequestError(
                        f"{client.num_lost} replicas of {deployment.name} were lost while they had this request; it is "
                        "refused, as it may end another one.", status=500, code="request_kills_replicas",
                    )  # fmt: skip
                why = error
            await deployment.settle(tried)
            if _may_wait(deployment, client):
                if has_failed or deployment.state == "ready":
                    await self._keep_alive.during(asyncio.sleep(_PAUSE_S), "no replica can go on yet", client)
                back = {one for one in tried - client.unable if one in client.busy or one.well_at > client.failed_at}
                tried -= back
                client.busy.clear()
                num_rounds += 1
                continue
            if keeper is not None or deployment.state == "ready":
                break
        waits = [one.breaker.wait_s() for one in deployment.replicas]
        raise RequestError(
            f"The model {deployment.name} cannot answer: {why}.", status=503, code="no_replica",
            retry_after_s=max(1, round(min(waits, default=1.0))),
        )  # fmt: skip

    def _choose(self, deployment: Deployment, request: ProxyRequest, tried: set[Replica]) -> Replica | None:
        if not deployment.entry.may_be_several and deployment.entry.prefill_model is None:
            return deployment.router.choose(deployment.replicas, {}, tried)
        (prefixes, shared), session = request.body.prefixes, request.session
        agreed = (session or shared) if self._several_gateways else None
        return deployment.router.choose(deployment.replicas, prefixes, tried, session, agreed)

    async def _try(
        self, deployment: Deployment, replica: Replica, request: ProxyRequest, client: Client, tried: set[Replica],
        is_only: bool,
    ) -> str | None:  # fmt: skip
        """Have a replica answer. Returns None, or if another replica may answer or go on, why this one did not or
        stopped."""
        body = client.progress.resumed(request.body.naming(replica.served_name))
        replica.num_in_flight += 1
        answer: Answer | None = None
        silence = self._keep_alive.in_silence(client, replica)
        try:
            try:
                headers = self._headers_for(replica, request)
                answer = await replica.upstream.send(request.method, request.target, headers, body)
                silence.answer = answer
                data = await answer.read()
            except UpstreamError as error:
                replica.breaker.fail()
                client.num_lost += not isinstance(error, UnreachableError)
                client.failed_at = time.monotonic()
                self._metrics.retries.labels(deployment.name, replica.name).inc()
                logger.warning("%s: replica %s gave no answer: %s", deployment.name, replica.name, error)
                return f"replica {replica.name}: {error}"
            others = _others(deployment, tried)
            is_whole = request.path in _GENERATING_PATHS and not request.body.streams
            is_cut_off = answer.header(CUT_OFF) and (answer.status >= 500 or is_whole)
            may_wait = answer.status in (*_BUSY, 502, 504) and time.monotonic() < client.waits_until
            if (answer.status in _BUSY or is_cut_off or may_wait) and (others or may_wait) and not is_only:
                if may_wait:
                    client.busy.add(replica)
                if answer.status == 500:  # its engine has died, maybe of this request
                    replica.breaker.fail()
                    client.num_lost += 1
                self._metrics.retries.labels(deployment.name, replica.name).inc()
                return f"replica {replica.name} " + ("is ending" if is_cut_off else f"answered {answer.status}")
            if answer.status in (502, 503, 504):
                replica.breaker.fail()
            else:
                replica.breaker.succeed()
            if not client.can_take(answer, is_last=is_only or not others):
                client.unable.add(replica)
                return f"replica {replica.name} cannot continue another replica's stream"
            if client.progress.is_resumable and answer.header(RESUMABLE):
                self._metrics.resumed.labels(deployment.name, replica.name).inc()
            if not client.has_answer:
                self._metrics.requests.labels(deployment.name, replica.name, answer.status).inc()
                self._metrics.first_byte.labels(deployment.name).observe(time.monotonic() - request.arrival)
            if answer.status < 300 and _KEEPS.match(request.path):
                created = [one.decode() for one in _CREATED.findall(data[:8192])]
                for one in created if not client.progress.is_resumable else [client.progress.id]:
                    self._created.add(one, deployment.name, replica, request.owner)
            return await self._pass_on(deployment, replica, answer, data, client, None if is_only else tried)
        finally:
            replica.num_in_flight -= 1
            if answer is not None:
                answer.close()
            deployment.close_if_gone(replica)
            await silence.end()

    async def _pass_on(
        self, deployment: Deployment, replica: Replica, answer: Answer, data: bytes, client: Client,
        tried: set[Replica] | None,
    ) -> str | None:  # fmt: skip
        """Send an answer to the client. Returns None, or if another replica than those `tried` can go on with the
        answer, why it broke off; with None no other one may. Raises `RequestError` if it broke off and none can."""
        try:
            await client.begin(answer)
            if not client.add(data):
                await client.flush()
            while await answer.pass_to(client.add):
                await client.flush()
            if client.progress.is_given_up:
                raise UpstreamError("it stops or its engine has died")
            await client.end()
            return None
        except UpstreamError as error:
            replica.breaker.fail()
            self._metrics.broken_streams.labels(deployment.name, replica.name).inc()
            logger.warning("%s: replica %s was lost amid an answer: %s", deployment.name, replica.name, error)
            if client.progress.has_ended:  # only the connection's end is missing
                await client.end()
                return None
            may_go_on = client.progress.lose() and tried is not None and not self.is_stopping
            is_ended = client.progress.is_given_up and answer.is_whole  # by the replica, in its way
            if is_ended and not (may_go_on and _others(deployment, tried or ())):
                await client.end()
                return None
            if may_go_on:
                client.failed_at = client.silent_since = time.monotonic()
                client.waits_until = client.failed_at + self._limits.max_wait_s
                return f"replica {replica.name} was lost amid the answer: {error}"
            reason = "the gateway is stopping" if self.is_stopping else "its replica was lost amid the answer"
            raise RequestError(
                f"The model {deployment.name} did not end its answer: {reason}.", status=503, code="replica_lost"
            ) from None

    def _headers_for(self, replica: Replica, request: ProxyRequest) -> list[tuple[bytes, bytes]]:
        own = replica.auth_headers()
        dropped = _NOT_PASSED_ON | _KEY_HEADERS if own or self._keeps_keys else _NOT_PASSED_ON
        if not replica.upstream.is_near:  # a foreign API is not told the client's address
            dropped |= _ADDRESS_HEADERS
        # Of a stream that a client resumes, the gateway does not know the tokens before.
        if request.body.streams and request.path in RESUMABLE_PATHS and not request.body.is_resumed:
            own.append((RESUMABLE, b"1"))
        if request.blocks_at is not None:
            own.append((BLOCKS_AT, request.blocks_at.encode()))
        own.append((b"accept-encoding", b"identity"))  # the gateway reads events and usages in the answer
        return end_to_end(request.headers, dropped) + own

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


def _may_wait(deployment: Deployment, client: Client) -> bool:
    """Return whether a stream that has lost its replica waits: for a busy one, for the lost one to come back, or for
    one that is being started."""
    if time.monotonic() >= client.waits_until:
        return False
    may_come = not deployment.replicas or bool(deployment.restarting)
    return may_come or not client.unable.issuperset(deployment.replicas)


def _others(deployment: Deployment, tried: Collection[Replica]) -> list[Replica]:
    """Return the model's replicas that take requests and are not among those `tried`."""
    return [one for one in deployment.replicas if one not in tried and one.takes_requests()]


def route_of(path: str) -> str | None:
    """Return the known route of a path, without ids."""
    if path in _ROUTES:
        return path
    return next((route for route in _ROUTES if path.startswith(route + "/")), None)


def check_use(key: Key, deployment: Deployment) -> None:
    """Raise `RequestError` if a key is not for a model."""
    if not deployment.may_be_used_by(key):
        raise RequestError(
            f"The API key {key.settings.name} is not for the model {deployment.name}.", param="model", status=403,
            code="model_not_allowed",
        )  # fmt: skip


def _metered(request: ProxyRequest, key: Key, client: Client) -> ProxyRequest:
    """Return the request as a replica is to get it: with the key's priority, and asking for a usage. Raises
    `RequestError` for requests that the key may not send, such as those whose tokens are limited but not counted."""
    body, settings = request.body, key.settings
    kept = _KEEPS.match(request.path)
    if request.method != "POST" or (kept is not None and kept[1] is not None):
        client.meter = None  # the usage in a kept answer was counted when it was made
    has_budget = settings.tokens_per_day is not None or settings.tokens_per_minute is not None
    # A server in front of a replica may read `/v1/audio/../../generate` as `/generate`.
    is_plain = not {"", ".", ".."} & set(request.path.split("/")[1:])
    is_uncounted = not is_plain or "uncounted" in request.traits
    if has_budget and request.method == "POST" and is_plain and route_of(request.path) is None:
        meant = similar(request.path, _ROUTES)
        perhaps = f"; what is meant is perhaps {meant}." if meant else "."
        raise RequestError(
            f"{request.path:.200} is no route that the gateway knows, and others are not for the API key "
            f"{settings.name}, which has a limit of tokens{perhaps}", status=404, code="not_found",
        )  # fmt: skip
    if has_budget and (body.is_background or (request.method == "POST" and is_uncounted)):
        raise RequestError(
            f"The API key {settings.name} has a limit of tokens, and those of batches, background responses and "
            "/generate are not counted.", status=403, code="not_allowed",
        )  # fmt: skip
    if body.is_resumed and request.path == "/v1/responses":
        raise RequestError("resume would give a response an id of another key's.", param="resume", status=403)
    if body.is_json and settings.priority is not None and "priority" in request.traits:
        body = body.having(priority=settings.priority)
    if body.streams and not body.wants_usage and "usage" in request.traits:
        body = body.having(stream_options={"include_usage": True})
        client.hides_usage = True
    return replace(request, body=body)
