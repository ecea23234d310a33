"""What the routes share: the engine, the names it is served under, and how a request is admitted to it."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from octavo.engine.wire import EngineRequest
from octavo.entrypoints.openai.protocol import ID_PATTERN, GenerationRequest, PromptTokensDetails, Usage
from octavo.entrypoints.openai.server_args import ServerArgs
from octavo.errors import OctavoError, RequestError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncLLMEngine

logger = logging.getLogger("octavo.server")

MAX_INLINE_LENGTH = 8192  # characters or tokens; longer prompts go to a thread, so that streams do not wait for them


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
        self.is_stopping = False
        self._sequence = itertools.count()

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokens whose text is not shown, by their text."""
        added = self.engine.tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    async def unavailable(self) -> tuple[str, str] | None:
        """(status, reason) while no request can be taken: loading, dead or stopping."""
        if self.is_stopping:
            return "stopping", "The server is stopping."
        try:
            await self.engine.check_health()
        except OctavoError as error:
            return "dead", str(error) or "The engine has died."
        return None if self.engine.is_ready else ("loading", "The model is still being loaded; try again in a moment.")

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

    def response_id(self, prefix: str, body: GenerationRequest, raw: Request) -> tuple[str, dict[str, str]]:
        """The response's id and headers: from the body's `request_id` or the header X-Request-Id, or a new one."""
        given = body.request_id or raw.headers.get("x-request-id")
        if given is None:
            request_id = uuid.uuid4().hex
        elif re.match(ID_PATTERN, given):
            request_id = given
        else:
            raise RequestError("X-Request-Id must be 1 to 200 printable ASCII characters.", param="request_id")
        return f"{prefix}-{request_id}", {"X-Request-Id": request_id}

    async def submit(
        self,
        response_id: str,
        body: GenerationRequest,
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
        arrival_time = time.monotonic()

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
                f"max_tokens is {params.max_tokens}, but the prompt has {len(request.prompt_token_ids)} tokens and the "
                f"model takes {limit} of both together; leave it out to get as many as fit.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if not self.args.disable_log_requests:
            self._log_request(request_id, prompt, request.prompt_token_ids, params)
        return request.prompt_token_ids, self.engine.generate_from(request)

    def _log_request(
        self, request_id: str, prompt: str | list[int], token_ids: list[int], params: SamplingParams
    ) -> None:
        limit = self.args.max_log_len
        shown = "" if limit == 0 else f": {prompt[:limit]!r}{'...' if len(prompt[:limit]) < len(prompt) else ''}"
        logger.info("%s: %d prompt tokens%s %s", request_id, len(token_ids), shown, msgspec.to_builtins(params))


def _renamed(error: RequestError, body: GenerationRequest) -> RequestError:
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
