"""A request that goes to all replicas, as it is not known which of them have what it is about."""

import asyncio
import contextlib
import logging

from octavo.errors import RequestError
from octavo.gateway.client import Client
from octavo.gateway.deployment import Deployment
from octavo.gateway.gateway_metrics import GatewayMetrics
from octavo.gateway.models import Models
from octavo.gateway.proxy_request import ProxyRequest, check_use
from octavo.gateway.replica import Replica
from octavo.gateway.upstream import UpstreamError

logger = logging.getLogger("octavo.gateway")

_TIMEOUT_S = 30.0  # for all replicas to answer
_MAX_ANSWER_BYTES = 1 << 16


class Broadcast:
    """Sends requests to all replicas. With `keeps_keys` they do not get the clients' keys."""

    def __init__(self, models: Models, metrics: GatewayMetrics, *, keeps_keys: bool) -> None:
        self._models, self._metrics, self._keeps_keys = models, metrics, keeps_keys

    async def answer(self, request: ProxyRequest, client: Client) -> None:
        """Send the request to all running replicas of the model that a header names, or of all models that the client
        may use. Answer with a success if one of them did. Raises `RequestError` if one gave no answer, as it may have
        done nothing."""
        name, key = request.named_model, None if request.usage_counter is None else request.usage_counter.key
        await self._models.look_for(name)
        deployments = list(self._models) if name is None else [self._models.find(name)]
        if key is not None and name is not None:
            check_use(key, deployments[0])
        deployments = [one for one in deployments if one.may_be_used_by(key)]
        if request.usage_counter is not None and deployments:
            await request.usage_counter.admit(deployments[0].name)
        with contextlib.ExitStack() as held:
            for one in deployments:
                if one.replicas:
                    held.enter_context(one.hold())
            every = [(one, replica) for one in deployments for replica in one.replicas]
            places = {
                (its.upstream.address, its.api_key): (one, its) for one, its in every
            }.values()  # servers, once each
            answers = await asyncio.gather(*(self._whole_answer(*place, request) for place in places))
        lost = [replica.name for (_, replica), answer in zip(places, answers, strict=True) if answer[0] >= 500]
        if lost:
            raise RequestError(
                f"{', '.join(lost)} gave no answer, and may still have it; try again.", status=503, code="replica_lost"
            )
        if not answers:
            raise RequestError("No model that could keep it is running.", status=404, code="not_found")
        await client.reply(*min(answers, key=lambda answer: (answer[0] >= 300, answer[0] != 404)))

    async def _whole_answer(
        self, deployment: Deployment, replica: Replica, request: ProxyRequest
    ) -> tuple[int, bytes, bytes]:
        """Return the status, content type and body of a replica's answer; 503 if there is none."""
        status, content_type, body = 503, b"", b""
        try:
            with deployment.in_flight(replica):
                async with asyncio.timeout(_TIMEOUT_S):
                    headers = request.headers_for(replica, keeps_keys=self._keeps_keys)
                    answer = await replica.upstream.send(request.method, request.target, headers, request.body.parts())
                    try:
                        body = await answer.read_all(_MAX_ANSWER_BYTES)
                        status, content_type = answer.status, answer.header(b"content-type")
                    finally:
                        answer.close()
        except (UpstreamError, TimeoutError) as error:
            logger.warning("%s: replica %s gave no answer: %s", deployment.name, replica.name, error)
        self._metrics.requests.labels(deployment.name, replica.name, status).inc()
        return status, content_type, body
