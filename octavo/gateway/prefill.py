"""Prefill and decode apart: before a long prompt goes to a replica of its model, a replica of another entry of the
catalogue computes it, so that no replica that streams has to. The blocks are in a folder that both share
(`--kv-cache-disk`), or the second replica is told where to copy them from."""

import logging

from octavo.errors import RequestError
from octavo.gateway.deployment import Deployment
from octavo.gateway.gateway_metrics import GatewayMetrics
from octavo.gateway.models import Models
from octavo.gateway.proxy_request import ONLY_PROMPT, ProxyRequest
from octavo.gateway.replica import Replica, has_lost_engine
from octavo.gateway.request_body import BYTES_PER_TOKEN
from octavo.gateway.retry_state import RetryState
from octavo.gateway.upstream import Headers, UnreachableError, UpstreamError
from octavo.peer_addresses import BLOCKS_AT, BLOCKS_PROOF, address_proof

logger = logging.getLogger("octavo.gateway")

PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
_MAX_ERROR_BYTES = 4096


class Prefill:
    """Has prompts computed. With `keeps_keys` replicas do not get the clients' keys."""

    def __init__(self, models: Models, metrics: GatewayMetrics, *, keeps_keys: bool) -> None:
        self._models, self._metrics, self._keeps_keys = models, metrics, keeps_keys

    def is_wanted(self, deployment: Deployment, request: ProxyRequest) -> bool:
        """Return whether another entry is to compute the prompt: it is long, and no replica of the model has had it."""
        entry = deployment.entry
        if entry.prefill_model is None or request.method != "POST" or request.path not in PATHS:
            return False
        prefixes, _ = request.body.prefixes
        num_new = max(prefixes.values(), default=0) - deployment.router.num_known_bytes(prefixes)
        return num_new >= BYTES_PER_TOKEN * entry.prefill_min_tokens

    async def compute(self, deployment: Deployment, request: ProxyRequest, retry: RetryState) -> Headers:
        """Have the prompt computed, and return headers that name the server with its blocks, if other hosts can reach
        the server. If that fails, the model's own replica computes the prompt. A replica that is lost counts as one
        that the request may have crashed."""
        other = self._models.names().get(deployment.entry.prefill_model or "")
        if other is None:  # the catalogue has changed since
            return ()
        self._models.start_aside(other)  # this request does not wait for it
        prefixes, _ = request.body.prefixes
        with other.hold():
            replica = other.router.choose(other.replicas, prefixes, (), request.session)
            if replica is None:
                logger.warning("%s: no replica of %s takes the prompt", deployment.name, other.name)
                return ()
            status, said = 503, b""
            try:
                with other.in_flight(replica):
                    headers = [*request.headers_for(replica, keeps_keys=self._keeps_keys), (ONLY_PROMPT, b"1")]
                    await request.body.prepare(replica.served_name, reads_prefixes=False)
                    body = request.body.parts(replica.served_name)
                    answer = await replica.upstream.send(request.method, request.target, headers, body)
                    try:
                        status, said = answer.status, await answer.read_all(_MAX_ERROR_BYTES)
                    finally:
                        answer.close()
                    if has_lost_engine(answer):
                        raise UpstreamError("its engine has died")
                    replica.record_in_breaker(answer)
            except RequestError as error:  # the body hides the model's name
                status, said = error.status, str(error).encode()
            except UpstreamError as error:
                replica.breaker.fail()
                retry.record_lost(had_request=not isinstance(error, UnreachableError))
                said = str(error).encode()
        self._metrics.requests.labels(other.name, replica.name, status).inc()
        if status != 204:
            logger.warning(
                "%s: replica %s of %s did not compute the prompt: %d %s",
                deployment.name, replica.name, other.name, status, said[:200].decode("utf-8", "replace"),
            )  # fmt: skip
            return ()
        return () if other.entry.is_local else _blocks_at(replica)


def _blocks_at(replica: Replica) -> Headers:
    """Return headers that name a replica, and prove that the gateway has its key."""
    address, key = replica.upstream.address, replica.api_key
    proof = () if key is None else ((BLOCKS_PROOF.encode(), address_proof(key, address).encode()),)
    return ((BLOCKS_AT.encode(), address.encode()), *proof)
