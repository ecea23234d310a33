"""The state that routes share: the engine, its served names, and the admission of requests."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import re
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import msgspec
from starlette.requests import Request

from octavo.engine.off_loop import MAX_INLINE_LENGTH, NUM_TEXT_THREADS, run_off_loop
from octavo.engine.prompt_notes import PromptNotes
from octavo.engine.request_log import brief, shown_id
from octavo.entrypoints.chat.reasoning import Reasoning
from octavo.entrypoints.chat.tools.format_detection import ModelFormats, model_formats
from octavo.entrypoints.http.body_fields import MAX_SESSION_LENGTH, SESSION_PATTERN
from octavo.entrypoints.http.error_responses import PromptSavedError
from octavo.entrypoints.http.json_worker import JsonWorker
from octavo.entrypoints.http.request_headers import HEADERS, ID_HEADER, RequestHeaders
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.shared_counts import ENGINE_REQUESTS, SharedCounts
from octavo.entrypoints.openai.request_bodies import SamplingRequest, TokenRequest
from octavo.errors import RETRY_AFTER_S, EngineRestartingError, OctavoError, RequestError
from octavo.logs import LineLimit
from octavo.metrics.http_metrics import HttpMetrics
from octavo.outputs import RequestOutput
from octavo.peer_addresses import BLOCKS_AT, BLOCKS_PROOF, address_proof
from octavo.request import MAX_CACHE_TTL_S, AdapterSource, BlockPeer, EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.structured_output.answer_parts import ThinkingBudget
from octavo.structured_output.grammar_builder import WantedGrammar
from octavo.tracing import Tracer
from octavo.version import __version__

if TYPE_CHECKING:
    from PIL.Image import Image

    from octavo.engine.engine_client import EngineClient
    from octavo.engine.hub_link import Channels
    from octavo.engine.request_stream import Sink
    from octavo.entrypoints.chat.answer_memory import AnswerMemory
    from octavo.entrypoints.http.background_jobs import BackgroundJobs
    from octavo.entrypoints.http.store import Store
    from octavo.lora.names import AdapterNames

logger = logging.getLogger("octavo.server")

MAX_RETRY_AFTER_S = 120
MAX_TRANSCRIPTIONS = 16  # transcribed at once; other sounds wait as files
MAX_MEDIA_FETCHES = 32  # requests with fetched media in memory; others wait before they fetch
RANK_HEADER = "X-data-parallel-rank"
SESSION_HEADER = "X-Session-ID"
ONLY_PROMPT_HEADER = "X-Octavo-Only-Prompt"  # compute the prompt for another server, which gets its blocks from disk
CACHE_SESSION_HEADER, CACHE_TTL_HEADER = "X-Cache-Session", "X-Cache-TTL"
_CACHE_TTL_S = 3600.0
_TOKENIZING_RETRY_S = 1


class Arrival(msgspec.Struct, frozen=True):
    """The time at which a request was complete (`time.monotonic`), its headers, and the size of its body."""

    at: float
    headers: RequestHeaders
    num_bytes: int  # size of the body
    client: str | None = None  # its sender, for --scheduling-policy fair


class HasRequestId(Protocol):
    """A request body that may have an id."""

    request_id: str | None


class PreparedPrompt(msgspec.Struct, frozen=True):
    """One prompt of a request, with settings of its answer that are not in `SamplingParams`."""

    prompt: str | list[int] | dict[str, Any]  # text, token ids, or an object with `prompt_embeds`
    add_special_tokens: bool
    grammar: WantedGrammar | None = None
    media: dict[str, list[Image]] | None = None  # `multi_modal_data`
    shows_special_tokens: bool = False  # whatever `skip_special_tokens` says: readers of the answer look for some


ARRIVAL: ContextVar[Arrival | None] = ContextVar("arrival", default=None)  # of the current task's request


def num_body_bytes() -> int:
    """Return the size of the current request's body; 0 outside of a request."""
    arrival = ARRIVAL.get()
    return 0 if arrival is None else arrival.num_bytes


def requested_rank() -> int | None:
    """Return the engine that the current request's header names, or None. Raises `RequestError` if it is no number."""
    arrival = ARRIVAL.get()
    given = None if arrival is None else arrival.headers.get(RANK_HEADER)
    if given is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", given):
        raise RequestError(f"{RANK_HEADER} must be the number of an engine, got {given!r:.80}.", param=RANK_HEADER)
    return int(given)


def external_id(request: EngineRequest, response_id: str) -> str:
    """Return the engine's name of one prompt of the current request: the request's id, which a client may repeat, and
    the engine's. Outside a request, the `response_id` takes the place of its id."""
    arrival = ARRIVAL.get()
    own_id = response_id if arrival is None else arrival.headers.request_id
    return f"{own_id}-{request.request_id}"


class ServerState:
    """One server's engine and settings; `state_of(request)` finds it from a route."""

    def __init__(self, engine: EngineClient, args: ServerArgs, counts: SharedCounts | None = None) -> None:
        """`counts` are shared with the server's other front ends."""
        self.engine = engine
        self.args = args
        self.counts = counts or SharedCounts.alone()
        self.hub: Channels | None = None  # in one of several front ends
        self.prompt_notes = PromptNotes()
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
        self.transcription_slots = asyncio.Semaphore(MAX_TRANSCRIPTIONS)
        self.media_fetch_slots = asyncio.Semaphore(MAX_MEDIA_FETCHES)
        self.is_stopping = False
        self.has_cut_off = False  # the requests under way, as the time to stop is over
        self.num_in_flight = 0  # requests whose answers are not complete
        self._num_engine_requests = 0
        self._peers, self._peer_key = args.peers, args.peer_key or ""
        self._ignored_peers = LineLimit()
        self.num_tokenizing = 0  # complete requests that only need this front end's tokenizer

    def note_prompt(self, names: str) -> None:
        """Note a prompt for gateways, by the names of its beginnings. The prompt's request does not wait for the
        hub: the queue has a place for the request, and does not count it yet."""
        if self.hub is None:
            self.prompt_notes.add(names)
        else:
            self.hub.tell("note_prompt", names=names)

    @property
    def num_engine_requests(self) -> int:
        """Complete requests of this front end that the engine answers."""
        return self._num_engine_requests

    @num_engine_requests.setter
    def num_engine_requests(self, number: int) -> None:
        self._num_engine_requests = number
        self.counts.share(ENGINE_REQUESTS, number)

    @property
    def num_all_engine_requests(self) -> int:
        """Complete requests of all front ends that the engine answers."""
        return int(self.counts.total(ENGINE_REQUESTS))

    @cached_property
    def store(self) -> Store:
        """Return the store of objects kept between requests. It is opened with the first use."""
        from octavo.entrypoints.http.store import Store

        return Store(self.args.response_store, self.args.response_store_bytes)

    @cached_property
    def answers(self) -> AnswerMemory | None:
        """Return the memory of the tokens of answers; None if there is none."""
        from octavo.entrypoints.chat.answer_memory import AnswerMemory

        args = self.args
        if not args.answer_memory_bytes:
            return None
        return AnswerMemory(args.answer_memory_bytes, None if args.response_store is None else self.store)

    @cached_property
    def card(self) -> dict[str, Any]:
        """Return the model's card. The first call makes it, in a thread."""
        from octavo.entrypoints.model_card import model_card

        return model_card(self.engine.config, self.engine.tokenizer, self.formats)

    @cached_property
    def background(self) -> BackgroundJobs:
        """Return the jobs that outlive their requests."""
        from octavo.entrypoints.http.background_jobs import BackgroundJobs

        return BackgroundJobs(self)

    @cached_property
    def json_worker(self) -> JsonWorker:
        """Return the process that parses large bodies."""
        return JsonWorker(self.args)

    async def background_ended(self) -> None:
        """Wait until background jobs have stored their progress."""
        if "background" in self.__dict__:
            await self.background.wait_ended()

    def close(self) -> None:
        """Close the store and the process, if they were opened."""
        if "store" in self.__dict__:
            self.store.close()
        if "json_worker" in self.__dict__:
            self.json_worker.close()

    @cached_property
    def formats(self) -> ModelFormats:
        """Return the formats of the model's tool calls and reasoning: those that flags name, or recognised ones."""
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
        """Return the tokens that begin and end the model's reasoning; None unless each mark is one token."""
        style, tokenizer = self.formats.reasoning, self.engine.tokenizer.backend_tokenizer
        if style is None or style.has_channels:
            return None
        start, end = tokenizer.token_to_id(style.start), tokenizer.token_to_id(style.end)
        return None if start is None or end is None else (start, end)

    def thinking_budget(
        self, num_tokens: int | None, reasoning: Reasoning | None, call_marks: Iterable[str]
    ) -> ThinkingBudget | None:
        """Return the budget that bounds the `reasoning` of an answer, or None. A mark of calls that is a token ends the
        reasoning, too. Raises `RequestError` if one token cannot end the reasoning."""
        if num_tokens is None or reasoning is None or reasoning.is_ended:
            return None
        if num_tokens >= self.engine.config.model.max_model_len:
            return None
        if self.thinking_tokens is None:
            raise RequestError(
                "The marks of this model's reasoning are not single tokens, so the server cannot end the reasoning; "
                "leave thinking_token_budget out.",
                param="thinking_token_budget",
            )
        start, end = self.thinking_tokens
        inputs, size = self.engine.inputs, len(self.engine.tokenizer)
        ids = map(self.engine.tokenizer.backend_tokenizer.token_to_id, call_marks)
        return ThinkingBudget(
            num_tokens, None if reasoning.is_open else start, end, tuple(inputs.eos_token_ids), size,
            calls=tuple(sorted({token for token in ids if token is not None})),
        )  # fmt: skip

    async def unavailable(self) -> tuple[str, str] | None:
        """Return (status, reason) while no request can be taken (loading, restarting, dead or stopping); otherwise
        None."""
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
        """Return the seconds after which a client should come back if the queue is full, otherwise None.

        The time is the number of waiting requests divided by the recent rate of finished requests.
        """
        limit = self.args.max_queue_len
        if limit is None:
            return None
        stats = self.engine.stats
        # The core's count is a step old. Requests beyond the slots must wait, whatever the count says.
        num_beyond_slots = self.num_all_engine_requests - self.engine.config.num_slots
        num_waiting = max(stats.num_waiting + stats.num_swapped, num_beyond_slots)
        if num_waiting < max(limit, 1) and num_beyond_slots < limit:
            return None
        rate = 0.0 if self.engine.metrics is None else self.engine.metrics.all_requests_per_s
        return min(max(math.ceil(num_waiting / rate), 1), MAX_RETRY_AFTER_S) if rate > 0 else RETRY_AFTER_S

    def tokenizing_retry_after_s(self) -> int | None:
        """Return the seconds after which a client should come back if as many requests wait for the threads that
        tokenize as may wait for the engine, otherwise None."""
        limit = self.args.max_queue_len
        return None if limit is None or self.num_tokenizing - NUM_TEXT_THREADS < limit else _TOKENIZING_RETRY_S

    def count_rejection(self, reason: str) -> None:
        """Count a request that is refused because of the load."""
        if self.engine.metrics is not None:
            self.engine.metrics.num_rejected[reason] += 1

    def check_ttft(self, num_tokens: int, wanted_s: float | None = None) -> None:
        """Raise `RequestError` (429) if earlier requests would delay a prompt's first token beyond `wanted_s` or
        --max-ttft. The time to come back in the error assumes that no other requests arrive."""
        limits_s = [limit for limit in (wanted_s, self.args.max_ttft) if limit is not None]
        if not limits_s:
            return
        limit_s, forecast, stats = min(limits_s), self.engine.forecast, self.engine.stats
        predicted_s = forecast.seconds(num_tokens)
        rate = 0.0 if self.engine.metrics is None else self.engine.metrics.all_requests_per_s
        if stats.num_running >= self.engine.config.num_slots and rate > 0:  # a running request must end first
            predicted_s = max(predicted_s, (stats.num_waiting + stats.num_swapped + 1) / rate)
        if predicted_s <= limit_s:
            return
        self.count_rejection("first_token_too_late")
        if (alone_s := forecast.seconds_alone(num_tokens)) > limit_s:
            raise RequestError(
                f"The prompt's {num_tokens} tokens alone take about {alone_s:.1f} s; the limit for the first token is "
                f"{limit_s:g} s. Shorten the prompt.",
                code="first_token_too_late",
            )
        retry_after_s = min(max(math.ceil(predicted_s - limit_s), 1), MAX_RETRY_AFTER_S)
        raise RequestError(
            f"The first token would come after about {predicted_s:.1f} s; the limit is {limit_s:g} s. Try again in "
            f"about {retry_after_s} s.",
            status=429,
            code="first_token_too_late",
            retry_after_s=retry_after_s,
        )

    def resolve_model(self, name: str | None) -> str:
        """Return the model name for the answer. Raises `RequestError` (404) for a model that is not served here."""
        if not name:  # some clients send "" for any model
            return self.model_names[0]
        if name in self.model_names:
            return name
        if self.adapters is not None and name in self.adapters:
            return name
        names = [*self.model_names, *([] if self.adapters is None else self.adapters.named)]
        raise RequestError(
            f"The model {brief(name)!r} does not exist here; this server has {', '.join(map(repr, names))}. Send one "
            "of these names, or start the server with --served-model-name and yours.",
            param="model",
            status=404,
            code="model_not_found",
        )

    async def _adapter_of(self, name: str | None) -> AdapterSource | None:
        """Return the adapter that a request names as its model, or None."""
        names = self.adapters
        if not name or names is None or name in self.model_names:
            return None
        if name in names.named:
            return names.named[name].source
        return await run_off_loop(lambda: names.find(name), length=MAX_INLINE_LENGTH + 1)  # reads a file

    def log_pooling(self, response_id: str, requests: Sequence[EngineRequest]) -> None:
        """Log one line about the texts of a request to a model that pools."""
        if not self.args.logs_requests:
            return
        num_tokens = sum(len(request.prompt.token_ids) for request in requests)
        options = brief(msgspec.to_builtins(requests[0].pooling))
        arrival = ARRIVAL.get()
        name = response_id if arrival is None else arrival.headers.request_id
        fields = {
            "request_id": name, "response_id": response_id, "num_prompt_tokens": num_tokens, "pooling_params": options,
        }  # fmt: skip
        logger.info("%s: %d texts of %d tokens %s", name, len(requests), num_tokens, options, extra=fields)

    def response_id(self, prefix: str, body: HasRequestId, raw: Request) -> tuple[str, dict[str, str]]:
        """Return the response's id and headers. The id comes from the body's `request_id` or the header X-Request-Id,
        or is new."""
        headers: RequestHeaders = raw.scope[HEADERS]
        if body.request_id:
            headers.request_id = body.request_id
        elif headers.get(ID_HEADER, headers.request_id) != headers.request_id:
            raise RequestError("X-Request-Id must be 1 to 200 printable ASCII characters.", param="request_id")
        request_id = headers.request_id
        return f"{prefix}-{request_id}", {ID_HEADER: request_id} if self.args.enable_request_id_headers else {}

    def _with_few_logprobs(self, request: EngineRequest) -> EngineRequest:
        """Return the request, limited so that its answer has no more log-probabilities than --max-logprob-entries. A
        request with `max_tokens` raises `RequestError` if its tokens would have too many; another request gets a
        smaller `max_tokens`."""
        params, num_prompt = request.params, len(request.prompt.token_ids)
        self.args.refuse_entries("prompt_logprobs", params.prompt_logprobs, num_prompt)
        if (num_each := params.num_logprobs) is None:
            return request
        if params.max_tokens is not None:
            self.args.refuse_entries("logprobs", num_each, request.max_tokens * params.num_sequences)
        most = self.args.max_logprob_entries // ((1 + num_each) * params.num_sequences)
        return msgspec.structs.replace(request, max_tokens=max(1, min(request.max_tokens, most)))

    def _resumed(self, request: EngineRequest, tokens: list[list[int]]) -> EngineRequest:
        """Return the request with the tokens that another server has sent. Raises `RequestError`."""
        vocab_size = self.engine.config.model.vocab_size
        if any(token >= vocab_size for group in tokens for token in group):
            raise RequestError(f"resume has token ids beyond the model's {vocab_size}.", param="resume")
        if sum(map(len, tokens)) >= request.max_tokens:
            raise RequestError(f"resume has all {request.max_tokens} tokens that the answer may have.", param="resume")
        return msgspec.structs.replace(request, already_sent_token_ids=tokens)

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
        sink: Sink | None = None,
        only_renders: bool = False,
    ) -> tuple[Prompt, AsyncGenerator[RequestOutput, None]]:
        """Check one prompt of a request, and return its generator. The generator submits the request when it is asked
        for its first output. The `sink` takes outputs that the generator then does not yield.

        `prepare` makes the prompt. For long bodies, and with a grammar, it runs in a thread. A body of several prompts
        gives the `length` of each. Returns the prompt too. With `only_renders` the generator is not
        used, and load refuses nothing. Raises `RequestError` here, before any response has been started.
        """
        self.engine.inputs.refuse_if_it_pools()
        arrival = ARRIVAL.get()
        structure = params.structured_outputs
        rank = requested_rank()
        adapter = await self._adapter_of(getattr(body, "model", None))

        def process() -> EngineRequest:
            prepared = prepare()
            if prepared.shows_special_tokens:
                params.skip_special_tokens = False
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
        name = external_id(request, response_id)
        if not only_renders:
            self.check_ttft(len(request.prompt.token_ids), body.max_ttft)
        headers = {} if arrival is None else arrival.headers
        self._set_session_and_limits(request, body, headers)
        request.response_id = response_id
        request.client = None if arrival is None else arrival.client
        if (resume := getattr(body, "resume", None)) is not None:
            request = self._resumed(request, resume.tokens)
        if headers.get(ONLY_PROMPT_HEADER) and not only_renders:
            await self._save_prompt(request, name, num_prompts)
        return request.prompt, self.outputs_of(request, name, sink)

    def _set_session_and_limits(
        self, request: EngineRequest, body: SamplingRequest, headers: Mapping[str, str]
    ) -> None:
        """Set the deadline, the sessions and the peer of a request. Raises `RequestError`."""
        limits_s = [limit for limit in (body.timeout, self.args.max_request_time) if limit is not None]
        request.deadline = request.arrival_time + min(limits_s) if limits_s else None
        request.max_ttft_s = body.max_ttft
        session_id = body.session_id or headers.get(SESSION_HEADER)
        if session_id is not None and len(session_id) > MAX_SESSION_LENGTH:  # the header's; the body's has been checked
            raise RequestError(
                f"{SESSION_HEADER} must have {MAX_SESSION_LENGTH} characters at most, got {len(session_id)}.",
                param=SESSION_HEADER,
            )
        request.session_id = session_id or None
        request.cache_session, request.cache_ttl_s = self._cache_session(body, headers)
        if self._peers:
            request.blocks_from = self._peer(headers.get(BLOCKS_AT), headers.get(BLOCKS_PROOF, ""))

    def _peer(self, address: str | None, proof: str) -> BlockPeer | None:
        """Return the server at an address, if the operator allows to copy blocks from it: a client could name any."""
        if address is None:
            return None
        peer, needs_proof = self._peers.find(address)
        if peer is None:
            why = "it is not in --kv-cache-peers"
        elif not needs_proof or hmac.compare_digest(address_proof(self._peer_key, address).encode(), proof.encode()):
            return BlockPeer(peer, self._peer_key)
        else:
            why = "only a gateway whose api_key_env for it is OCTAVO_KV_CACHE_PEER_KEY may name hosts of a network"
        if self._ignored_peers.admits(time.monotonic()):
            logger.warning("no blocks are copied from %s: %s", brief(address), why)
        return None

    async def _save_prompt(self, request: EngineRequest, name: str, num_prompts: int) -> NoReturn:
        """Compute the prompt, for another server that goes on from its blocks on disk. Raises `PromptSavedError` when
        they are there, or `RequestError`."""
        if self.engine.config.cache.disk is None:
            raise RequestError(f"{ONLY_PROMPT_HEADER} needs a server with --kv-cache-disk.", param=ONLY_PROMPT_HEADER)
        if num_prompts > 1:
            raise RequestError(f"{ONLY_PROMPT_HEADER} takes one prompt, got {num_prompts}.", param=ONLY_PROMPT_HEADER)
        only_prompt = msgspec.structs.replace(
            request, params=SamplingParams(max_tokens=1), max_tokens=1, prediction=[], final_check=None,
            saves_prompt=True,
        )  # fmt: skip
        reason: str | None = None
        async for output in self.outputs_of(only_prompt, name):
            reason = output.outputs[0].finish_reason
        if reason not in ("length", "stop"):
            raise RequestError("The prompt was not computed to its end.", status=503)
        raise PromptSavedError

    def outputs_of(
        self, request: EngineRequest, name: str, sink: Sink | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return the engine's outputs of a checked request, whose `name` is from `external_id`."""
        if self.tracer is None:
            return self.engine.generate_from(request, name, sink)
        arrival = ARRIVAL.get()  # without the sink: the tracer sees all outputs
        named = msgspec.structs.replace(request, request_id=shown_id(name, request.request_id))
        headers = {} if arrival is None else arrival.headers
        return self.tracer.trace(named, self.engine.generate_from(request, name), headers)

    def _cache_session(self, body: TokenRequest, headers: Mapping[str, str]) -> tuple[str | None, float]:
        """Return the id under which a request keeps its blocks, None if it does not, and the seconds for which it does.
        Raises `RequestError`."""
        session = body.cache_session or headers.get(CACHE_SESSION_HEADER) or None
        if session is not None and not re.match(SESSION_PATTERN, session):
            raise RequestError(
                f"{CACHE_SESSION_HEADER} must be 1 to 200 printable ASCII characters without /, got {session!r:.80}.",
                param=CACHE_SESSION_HEADER,
            )
        ttl_s, given = body.cache_ttl_s, headers.get(CACHE_TTL_HEADER)
        if ttl_s is None and given is not None:
            try:
                ttl_s = float(given)
            except ValueError:
                ttl_s = -1.0
            if not 0 < ttl_s <= MAX_CACHE_TTL_S:
                raise RequestError(
                    f"{CACHE_TTL_HEADER} must be above 0 and at most {MAX_CACHE_TTL_S} seconds, got {given!r:.80}.",
                    param=CACHE_TTL_HEADER,
                )
        if session is None:
            if ttl_s is not None:
                raise RequestError("cache_ttl_s needs cache_session.", param="cache_ttl_s")
            return None, 0.0
        self.check_keeps_sessions()
        return session, _CACHE_TTL_S if ttl_s is None else ttl_s

    def check_keeps_sessions(self) -> None:
        """Raise `RequestError` if no blocks are kept for sessions."""
        if self.engine.config.cache.disk is None:
            raise RequestError("cache_session needs a server with --kv-cache-disk.", param="cache_session")


def state_of(request: Request) -> ServerState:
    """Return the state of the server that received `request`."""
    state: ServerState = request.app.state.octavo
    return state
