"""What the routes share: the engine, the names it is served under, and how a request is admitted to it."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.responses import Response

from octavo.entrypoints.openai.errors import RETRY_AFTER_S
from octavo.entrypoints.openai.fields import ID_PATTERN
from octavo.entrypoints.openai.protocol import SamplingRequest
from octavo.entrypoints.openai.responses import PromptTokensDetails, Usage
from octavo.entrypoints.openai.server_args import ServerArgs
from octavo.errors import EngineRestartingError, OctavoError, RequestError
from octavo.outputs import RequestOutput
from octavo.request import EngineRequest
from octavo.sampling_params import SamplingParams
from octavo.tracing import Tracer
from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncLLMEngine

logger = logging.getLogger("octavo.server")

MAX_INLINE_LENGTH = 8192  # characters or tokens; longer prompts go to a thread, so that streams do not wait for them
MAX_RETRY_AFTER_S = 120


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request was whole (`time.monotonic`), and what it brought besides its body."""

    at: float
    headers: Headers
    num_bytes: int  # of the body


ARRIVAL: ContextVar[Arrival | None] = ContextVar("arrival", default=None)  # of the request that a task answers


class ServerState:
    """One server's engine and settings; `state_of(request)` finds it from a route."""

    def __init__(self, engine: AsyncLLMEngine, args: ServerArgs) -> None:
        self.engine = engine
        self.args = args
        self.created = int(time.time())
        model = engine.config.model
        self.model_names = model.served_model_names
        setup = f"{__version__}|{model.checkpoint.name}|{model.dtype}|{engine.config.device}"
        self.fingerprint = "fp_" + hashlib.sha256(setup.encode()).hexdigest()[:10]
        self.tracer: Tracer | None = None
        if args.otlp_traces_endpoint is not None:
            self.tracer = Tracer(args.otlp_traces_endpoint, self.model_names[0])
        self.is_stopping = False
        self.num_in_flight = 0  # requests whose answers are not complete
        self.num_queued = 0  # those of them that are whole, and that the engine answers
        self._sequence = itertools.count()

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokens whose text is not shown, by their text."""
        added = self.engine.tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    async def unavailable(self) -> tuple[str, str] | None:
        """(status, reason) while no request can be taken: loading, restarting, dead or stopping."""
        if self.is_stopping:
            return "stopping", "The server is stopping."
        try:
            await self.engine.check_health()
        except EngineRestartingError as error:
            return "restarting", str(error)
        except OctavoError as error:
            return "dead", str(error) or "The engine has died."
        return None if self.engine.is_ready else ("loading", "The model is still being loaded; try again in a moment.")

    def queue_full(self) -> int | None:
        """Seconds after which a client should come back while as many requests wait as may, or None.

        That is the time in which the requests that wait now will have been served, at the rate of late.
        """
        limit = self.args.max_queue_len
        if limit is None:
            return None
        stats = self.engine.stats
        # The core's count is a step old; what has come since then is bounded by the slots.
        num_beyond_slots = self.num_queued - self.engine.config.scheduler.max_num_seqs
        num_waiting = max(stats.num_waiting + stats.num_swapped, num_beyond_slots)
        if num_waiting < max(limit, 1) and num_beyond_slots < limit:
            return None
        rate = 0.0 if self.engine.metrics is None else self.engine.metrics.requests_per_s
        return min(max(math.ceil(num_waiting / rate), 1), MAX_RETRY_AFTER_S) if rate > 0 else RETRY_AFTER_S

    def resolve_model(self, name: str | None) -> str:
        """The name to answer under. Raises `RequestError` (404) for a model that is not served here."""
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        raise RequestError(
            f"The model {name!r} does not exist here; this server has {', '.join(map(repr, self.model_names))}.",
            param="model",
            status=404,
            code="model_not_found",
        )

    def response_id(self, prefix: str, body: SamplingRequest, raw: Request) -> tuple[str, dict[str, str]]:
        """The response's id and headers: from the body's `request_id` or the header X-Request-Id, or a new one."""
        given = body.request_id or raw.headers.get("x-request-id")
        if given is None:
            request_id = uuid.uuid4().hex
        elif re.match(ID_PATTERN, given):
            request_id = given
        else:
            raise RequestError("X-Request-Id must be 1 to 200 printable ASCII characters.", param="request_id")
        return f"{prefix}-{request_id}", {"X-Request-Id": request_id}

    def deadline(self, body: SamplingRequest) -> float | None:
        """When the request's time is up (`time.monotonic`): the smaller of its own limit and the server's, if any."""
        limits_s = [limit for limit in (body.timeout, self.args.max_request_time) if limit is not None]
        if not limits_s:
            return None
        arrival = ARRIVAL.get()
        return (time.monotonic() if arrival is None else arrival.at) + min(limits_s)

    async def submit(
        self,
        response_id: str,
        body: SamplingRequest,
        params: SamplingParams,
        prompt: str | list[int],
        *,
        add_special_tokens: bool,
        grammar: Callable[[], str] | None = None,
    ) -> tuple[list[int], AsyncGenerator[RequestOutput, None]]:
        """Check one prompt and make its generator, which starts the request when it is first asked for an output.

        `grammar` makes what the answer must follow, in the place of what `params` say of it; it runs in a thread.
        Returns the prompt's token ids too. Raises `RequestError` here, before any response has been started.
        """
        inputs = self.engine.inputs
        # Clients choose response ids and may repeat them; the engine's are unique.
        request_id = f"{response_id}-{next(self._sequence)}"
        arrival = ARRIVAL.get()
        arrival_time = time.monotonic() if arrival is None else arrival.at

        def process() -> EngineRequest:
            wanted = params
            if grammar is not None:
                wanted = msgspec.structs.replace(params, grammar=grammar(), structured_outputs=None)
            asked: dict[str, Any] = {"cache_salt": body.cache_salt}
            if not isinstance(prompt, str):
                asked["prompt_token_ids"] = prompt
            elif add_special_tokens:
                asked["prompt"] = prompt
            else:
                asked["prompt_token_ids"] = inputs.encode(prompt, add_special_tokens=False)
            return inputs.process(asked, wanted, request_id, priority=body.priority, arrival_time=arrival_time)[1]

        structure = params.structured_outputs
        try:
            is_slow = len(prompt) > MAX_INLINE_LENGTH or structure is not None or grammar is not None
            request = await asyncio.to_thread(process) if is_slow else process()
        except RequestError as error:
            if structure is None or not (error.param or "").startswith("structured_outputs"):
                raise
            raise _renamed(error, body) from None
        if params.max_tokens is not None and params.max_tokens > request.max_tokens:
            limit = self.engine.config.model.max_model_len
            raise RequestError(
                f"max_tokens is {params.max_tokens}, but the prompt has {len(request.prompt.token_ids)} tokens and the "
                f"model takes {limit} of both together; leave it out to get as many as fit.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if not self.args.disable_log_requests:
            self._log_request(request_id, prompt, request.prompt.token_ids, params)
        outputs = self.engine.generate_from(request, deadline=self.deadline(body))
        if self.tracer is not None:
            outputs = self.tracer.trace(request, outputs, {} if arrival is None else arrival.headers)
        return request.prompt.token_ids, outputs

    def _log_request(
        self, request_id: str, prompt: str | list[int], token_ids: list[int], params: SamplingParams
    ) -> None:
        limit = self.args.max_log_len
        shown = "" if limit == 0 else f": {prompt[:limit]!r}{'...' if len(prompt[:limit]) < len(prompt) else ''}"
        options = msgspec.to_builtins(params)
        fields = {"request_id": request_id, "num_prompt_tokens": len(token_ids), "sampling_params": options}
        logger.info("%s: %d prompt tokens%s %s", request_id, len(token_ids), shown, options, extra=fields)


def _renamed(error: RequestError, body: SamplingRequest) -> RequestError:
    """An error about a grammar under the name of the field that it came from."""
    field = body.structure_field
    return error if field is None else RequestError(str(error).replace(str(error.param), field, 1), param=field)


def state_of(request: Request) -> ServerState:
    """The state of the server that `request` came to."""
    state: ServerState = request.app.state.octavo
    return state


def make_usage(num_prompt: int, num_completion: int, num_cached: int) -> Usage:
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
    )


def json_response(body: BaseModel, headers: dict[str, str] | None = None) -> Response:
    """`body` as JSON; written by pydantic directly, which is several times faster than through Python objects."""
    return Response(body.model_dump_json(), headers=headers, media_type="application/json")
