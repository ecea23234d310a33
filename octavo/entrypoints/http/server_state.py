"""What the routes share: the engine, the names it is served under, and how a request is admitted to it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from octavo.engine.off_loop import MAX_INLINE_LENGTH, run_off_loop
from octavo.engine.request_log import brief, log_request
from octavo.entrypoints.chat.reasoning import Reasoning
from octavo.entrypoints.chat.tools.format_detection import ModelFormats, model_formats
from octavo.entrypoints.http.body_fields import ID_PATTERN
from octavo.entrypoints.http.error_responses import RETRY_AFTER_S
from octavo.entrypoints.http.json_worker import JsonWorker
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.openai.request_bodies import SamplingRequest
from octavo.errors import EngineRestartingError, OctavoError, RequestError
from octavo.metrics.http_metrics import HttpMetrics
from octavo.outputs import RequestOutput
from octavo.request import AdapterSource, EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.structured_output.grammar import ThinkingBudget, WantedGrammar
from octavo.tracing import Tracer
from octavo.version import __version__

if TYPE_CHECKING:
    from PIL.Image import Image

    from octavo.engine.engine_client import EngineClient
    from octavo.entrypoints.http.background_jobs import BackgroundJobs
    from octavo.entrypoints.http.store import Store
    from octavo.lora.names import AdapterNames

logger = logging.getLogger("octavo.server")

MAX_RETRY_AFTER_S = 120
MAX_SOUNDS_HELD = 16  # that are being heard at once; others wait as files
MAX_FETCHED_HELD = 32  # requests whose media are being fetched, or wait to be decoded; others wait as addresses
ID_HEADER = "X-Request-Id"
RANK_HEADER = "X-data-parallel-rank"


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request was whole (`time.monotonic`), its headers, and the size of its body."""

    at: float
    headers: Headers
    num_bytes: int  # of the body


class HasRequestId(Protocol):
    """A body that may bring an id."""

    request_id: str | None


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt of a request, and what its answer must be where `SamplingParams` do not say it."""

    prompt: str | list[int] | dict[str, Any]  # text, token ids, or an object with `prompt_embeds`
    add_special_tokens: bool
    grammar: WantedGrammar | None = None
    media: dict[str, list[Image]] | None = None  # `multi_modal_data`


ARRIVAL: ContextVar[Arrival | None] = ContextVar("arrival", default=None)  # of the request that a task answers


def requested_rank() -> int | None:
    """The engine that the request at hand names by its header. Raises `RequestError` for what is no number."""
    arrival = ARRIVAL.get()
    given = None if arrival is None else arrival.headers.get(RANK_HEADER)
    if given is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", given):
        raise RequestError(f"{RANK_HEADER} must be the number of an engine, got {given!r:.80}.", param=RANK_HEADER)
    return int(given)


class ServerState:
    """One server's engine and settings; `state_of(request)` finds it from a route."""

    def __init__(self, engine: EngineClient, args: ServerArgs) -> None:
        self.engine = engine
        self.args = args
        self.created = int(time.time())
        model = engine.config.model
        self.model_names = model.served_model_names
        self.adapters: AdapterNames | None = None
        if engine.config.lora is not None and engine.config.lora.takes_requests:
            from octavo.lora.names import AdapterNames

            self.adapters = AdapterNames(engine.config.lora, self.model_names)
        setup = f"{__version__}|{model.checkpoint.name}|{model.dtype}|{engine.config.device}"
        self.fingerprint = "fp_" + hashlib.sha256(setup.encode()).hexdigest()[:10]
        self.tracer: Tracer | None = None
        if args.otlp_traces_endpoint is not None:
            self.tracer = Tracer(args.otlp_traces_endpoint, self.model_names[0])
        self.http_metrics = HttpMetrics()
        if engine.metrics is not None:
            engine.metrics.others.append(self.http_metrics)
            if engine.inputs.media is not None:
                engine.metrics.others.append(engine.inputs.media.metrics)
            if engine.inputs.listener is not None:
                engine.metrics.others.append(engine.inputs.listener.metrics)
        self.sounds_held = asyncio.Semaphore(MAX_SOUNDS_HELD)
        self.fetched_held = asyncio.Semaphore(MAX_FETCHED_HELD)
        self.is_stopping = False
        self.num_in_flight = 0  # requests whose answers are not complete
        self.num_engine_requests = 0  # those of them that are whole, and that the engine answers

    @cached_property
    def store(self) -> Store:
        """What is kept between requests; opened when something is first kept or looked for."""
        from octavo.entrypoints.http.store import Store

        return Store(self.args.response_store, self.args.response_store_bytes)

    @cached_property
    def background(self) -> BackgroundJobs:
        """Work that outlives its requests."""
        from octavo.entrypoints.http.background_jobs import BackgroundJobs

        return BackgroundJobs(self)

    @cached_property
    def json_worker(self) -> JsonWorker:
        """The process for large bodies."""
        return JsonWorker(self.args)

    async def background_ended(self) -> None:
        """Return when what works in the background has noted how far it is."""
        if "background" in self.__dict__:
            await self.background.ended()

    def close(self) -> None:
        """Give back what was opened."""
        if "store" in self.__dict__:
            self.store.close()
        if "json_worker" in self.__dict__:
            self.json_worker.close()

    @cached_property
    def formats(self) -> ModelFormats:
        """How the model calls tools and reasons: what the flags name, else what is recognised."""
        args, checkpoint, tokenizer = self.args, self.engine.config.model.checkpoint, self.engine.tokenizer
        found = model_formats(
            tokenizer,
            args.tool_call_parser,
            args.reasoning_parser,
            model_type=checkpoint.config.get("model_type"),
            response_template=getattr(tokenizer, "response_template", None),
        )
        if not args.enable_auto_tool_choice:
            found = replace(found, why_no_choice="the server was started with --no-enable-auto-tool-choice.")
        return found

    @cached_property
    def thinking_tokens(self) -> tuple[int, int] | None:
        """The tokens that begin and end the model's reasoning, where each is one."""
        style, tokenizer = self.formats.reasoning, self.engine.tokenizer.backend_tokenizer
        if style is None or style.has_channels:
            return None
        start, end = tokenizer.token_to_id(style.start), tokenizer.token_to_id(style.end)
        return None if start is None or end is None else (start, end)

    def thinking_budget(self, num_tokens: int | None, reasoning: Reasoning | None) -> ThinkingBudget | None:
        """What bounds the `reasoning` of an answer. Raises `RequestError` where it cannot be ended by one token."""
        if num_tokens is None or reasoning is None or num_tokens >= self.engine.config.model.max_model_len:
            return None
        if self.thinking_tokens is None:
            raise RequestError(
                "The marks of this model's reasoning are no tokens of its own, so that it cannot be ended; leave "
                "thinking_token_budget out.",
                param="thinking_token_budget",
            )
        start, end = self.thinking_tokens
        inputs, size = self.engine.inputs, len(self.engine.tokenizer)
        return ThinkingBudget(num_tokens, None if reasoning.is_open else start, end, tuple(inputs.eos_token_ids), size)

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

    def queue_retry_after_s(self) -> int | None:
        """Seconds after which a client should come back while as many requests wait as may, or None.

        That is the number of waiting requests divided by the rate at which requests have ended lately.
        """
        limit = self.args.max_queue_len
        if limit is None:
            return None
        stats = self.engine.stats
        # The core's count is a step old; what has come since then is bounded by the slots.
        num_beyond_slots = self.num_engine_requests - self.engine.config.num_slots
        num_waiting = max(stats.num_waiting + stats.num_swapped, num_beyond_slots)
        if num_waiting < max(limit, 1) and num_beyond_slots < limit:
            return None
        rate = 0.0 if self.engine.metrics is None else self.engine.metrics.all_requests_per_s
        return min(max(math.ceil(num_waiting / rate), 1), MAX_RETRY_AFTER_S) if rate > 0 else RETRY_AFTER_S

    def check_ttft(self, num_tokens: int, wanted_s: float | None = None) -> None:
        """Raise `RequestError` (429) if a prompt would have its first token later than `wanted_s` and --max-ttft allow,
        because of those that are before it. What it says of the time to come back holds if no others come."""
        limits_s = [limit for limit in (wanted_s, self.args.max_ttft) if limit is not None]
        if not limits_s:
            return
        limit_s, forecast, stats = min(limits_s), self.engine.forecast, self.engine.stats
        predicted_s = forecast.seconds(num_tokens)
        rate = 0.0 if self.engine.metrics is None else self.engine.metrics.all_requests_per_s
        if stats.num_running >= self.engine.config.num_slots and rate > 0:  # others must end before it
            predicted_s = max(predicted_s, (stats.num_waiting + stats.num_swapped + 1) / rate)
        if predicted_s <= limit_s:
            return
        if (alone_s := forecast.seconds_alone(num_tokens)) > limit_s:
            raise RequestError(
                f"The prompt's {num_tokens} tokens alone take about {alone_s:.1f} s, and the first token must come in "
                f"{limit_s:g} s.",
                code="first_token_too_late",
            )
        retry_after_s = min(max(math.ceil(predicted_s - limit_s), 1), MAX_RETRY_AFTER_S)
        raise RequestError(
            f"The first token would come in about {predicted_s:.1f} s, and it must in {limit_s:g} s; try again in "
            f"about {retry_after_s} s.",
            status=429,
            code="first_token_too_late",
            retry_after_s=retry_after_s,
        )

    def resolve_model(self, name: str | None) -> str:
        """The name to answer under. Raises `RequestError` (404) for a model that is not served here."""
        if not name:  # clients that have no use for it send ""
            return self.model_names[0]
        if name in self.model_names:
            return name
        if self.adapters is not None and name in self.adapters:
            return name
        names = [*self.model_names, *([] if self.adapters is None else self.adapters.named)]
        raise RequestError(
            f"The model {name!r} does not exist here; this server has {', '.join(map(repr, names))}.",
            param="model",
            status=404,
            code="model_not_found",
        )

    async def _adapter_of(self, name: str | None) -> AdapterSource | None:
        """The adapter that a request names as its model."""
        names = self.adapters
        if not name or names is None or name in self.model_names:
            return None
        if name in names.named:
            return names.named[name].source
        return await run_off_loop(lambda: names.find(name), length=MAX_INLINE_LENGTH + 1)  # it may be a large file

    def log_pooling(self, name: str, requests: Sequence[EngineRequest]) -> None:
        """One line for the texts of a request to a model that pools."""
        if not self.args.logs_requests:
            return
        num_tokens = sum(len(request.prompt.token_ids) for request in requests)
        options = brief(msgspec.to_builtins(requests[0].pooling))
        fields = {"request_id": name, "num_prompt_tokens": num_tokens, "pooling_params": options}
        logger.info("%s: %d texts of %d tokens %s", name, len(requests), num_tokens, options, extra=fields)

    def response_id(self, prefix: str, body: HasRequestId, raw: Request) -> tuple[str, dict[str, str]]:
        """The response's id and headers: from the body's `request_id` or the header X-Request-Id, or a new one."""
        given = body.request_id or raw.headers.get(ID_HEADER)
        if given is None:
            request_id = uuid.uuid4().hex
        elif re.match(ID_PATTERN, given):
            request_id = given
        else:
            raise RequestError("X-Request-Id must be 1 to 200 printable ASCII characters.", param="request_id")
        return f"{prefix}-{request_id}", {ID_HEADER: request_id} if self.args.enable_request_id_headers else {}

    def _with_few_logprobs(self, request: EngineRequest) -> EngineRequest:
        """A request whose answer has no more log-probabilities than it may: one that says how many tokens it wants is
        refused if these have more, with `RequestError`, and one that does not say ends where they would."""
        params, num_prompt = request.params, len(request.prompt.token_ids)
        self.args.refuse_entries("prompt_logprobs", params.prompt_logprobs, num_prompt)
        if params.logprobs is None:
            return request
        if params.max_tokens is not None:
            self.args.refuse_entries("logprobs", params.logprobs, request.max_tokens * params.num_sequences)
        most = self.args.max_logprob_entries // ((1 + params.logprobs) * params.num_sequences)
        return msgspec.structs.replace(request, max_tokens=max(1, min(request.max_tokens, most)))

    async def submit(
        self,
        response_id: str,
        body: SamplingRequest,
        params: SamplingParams,
        prepare: Callable[[], PreparedPrompt],
        *,
        has_grammar: bool = False,
        media: Collection[str] = (),
        length: int = 0,
        num_prompts: int = 1,
        clamps_max_tokens: bool = False,
        scores_prompt: bool = False,
    ) -> tuple[Prompt, AsyncGenerator[RequestOutput, None]]:
        """Check one prompt of a request, and make its generator, which starts it when it is first asked for an output.

        `prepare` says what is asked; for long bodies, and where there is a grammar, it runs in a thread. A body of
        several prompts brings a `length` for each. Returns the prompt too. Raises `RequestError` here, before any
        response has been started.
        """
        self.engine.inputs.refuse_if_it_pools()
        arrival = ARRIVAL.get()
        structure = params.structured_outputs
        rank = requested_rank()
        adapter = await self._adapter_of(getattr(body, "model", None))

        def process() -> EngineRequest:
            prepared = prepare()
            grammar = prepared.grammar
            if grammar is None and structure is not None:
                grammar = WantedGrammar(structure, None, body.structure_field, self.engine.inputs.special_tokens)
            prediction = None if body.prediction is None else body.prediction.content
            given = prepared.prompt
            if not isinstance(given, dict):
                given = {"prompt": given} if isinstance(given, str) else {"prompt_token_ids": given}
            return self.engine.inputs.process(
                {**given, "cache_salt": body.cache_salt, "prediction": prediction, "multi_modal_data": prepared.media},
                params,
                priority=body.priority,
                arrival_time=None if arrival is None else arrival.at,
                add_special_tokens=prepared.add_special_tokens,
                grammar=grammar,
                clamps_max_tokens=clamps_max_tokens,
                scores_prompt=scores_prompt,
                adapter=adapter,
                data_parallel_rank=rank,
            )

        if arrival is not None:
            length = max(length, arrival.num_bytes // num_prompts)
        request = await run_off_loop(
            process, length=length, has_grammar=has_grammar or structure is not None, media=media
        )
        request = self._with_few_logprobs(request)
        name = f"{response_id}-{request.request_id}"  # clients choose response ids and may repeat them
        if self.args.logs_requests:
            log_request(logger, name, request.prompt, params, self.args.max_log_len)
        limits_s = [limit for limit in (body.timeout, self.args.max_request_time) if limit is not None]
        deadline = request.arrival_time + min(limits_s) if limits_s else None
        self.check_ttft(len(request.prompt.token_ids), body.max_ttft)
        request = msgspec.structs.replace(request, deadline=deadline, max_ttft_s=body.max_ttft)
        outputs = self.engine.generate_from(request)
        if self.tracer is not None:
            named = msgspec.structs.replace(request, request_id=name)
            outputs = self.tracer.trace(named, outputs, {} if arrival is None else arrival.headers)
        return request.prompt, outputs


def state_of(request: Request) -> ServerState:
    """The state of the server that `request` came to."""
    state: ServerState = request.app.state.octavo
    return state
