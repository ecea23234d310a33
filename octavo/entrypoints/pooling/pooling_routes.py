"""The routes of models that pool: embeddings, classes, scores, rankings, and other vectors of texts.

A model that generates refuses these routes, and a model that pools refuses the generating routes.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import ml_dtypes  # noqa: F401 - NumPy knows its types by their names then
import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.off_loop import run_off_loop
from octavo.engine.pooling_input import PoolingInput, Scores, prompt_for
from octavo.engine.pooling_input import Text as InputText
from octavo.entrypoints.chat.message_rendering import render_messages
from octavo.entrypoints.http.piecewise_json import encode_in_pieces
from octavo.entrypoints.http.resumable import PROMPT_TOKENS
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import ARRIVAL, external_id, num_body_bytes, requested_rank, state_of
from octavo.entrypoints.http.streaming import run_until_disconnect, spread
from octavo.entrypoints.pooling import pooling_protocol
from octavo.errors import RequestError
from octavo.outputs import PoolingOutput, PoolingRequestOutput
from octavo.pooling_params import EMBED_DTYPES, PoolingParams
from octavo.request import EngineRequest

if TYPE_CHECKING:
    from octavo.outputs import Vectors

router = Router(tags=["Pooling"])

Outputs = Sequence[PoolingRequestOutput[PoolingOutput]]
_Output = TypeVar("_Output")
_Made = TypeVar("_Made")
BYTES = "application/octet-stream"
_IN_BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {BYTES: {"schema": {"type": "string", "format": "binary"}}}}
}


@router.post("/v1/embeddings", response_model=pooling_protocol.EmbeddingResponse, responses=_IN_BYTES)
async def create_embedding(body: pooling_protocol.EmbeddingRequest, raw: Request) -> Response:
    """Return an embedding of each text."""
    return await _vectors(PoolingJob(body, raw, "embd"), body, "embed", ("embedding", "embedding"))


@router.post("/pooling", response_model=pooling_protocol.PoolingResponse, responses=_IN_BYTES)
async def pool(body: pooling_protocol.PoolingRequest, raw: Request) -> Response:
    """Return the model's vectors for each text: one, or one for each token."""
    return await _vectors(PoolingJob(body, raw, "pool"), body, body.task, ("pooling", "data"))


@router.post("/v2/embed", response_model=pooling_protocol.CohereEmbedResponse)
async def create_cohere_embedding(body: pooling_protocol.CohereEmbedRequest, raw: Request) -> Response:
    """Return an embedding of each text in the requested forms: Cohere's route."""
    job = PoolingJob(body, raw, "embd")
    texts, purpose = body.all_texts, body.input_type and prompt_for(job.inputs.config, body.input_type)
    cut = body.cut(job.max_model_len)
    params = body.params(task="embed", dimensions=body.output_dimension, **cut)
    given = [InputText(text, None, purpose) for text in texts]
    requests = await job.named(given, params, "inputs" if body.texts is None else "texts")

    def write(found: Outputs) -> dict[str, Any]:
        vectors = [one.outputs.data for one in found]
        kinds = body.embedding_types or ["float"]
        meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": _num_tokens(found)}}
        return {
            "id": job.response_id, "embeddings": {kind: [_WRITERS[kind](one) for one in vectors] for kind in kinds},
            "texts": texts, "response_type": "embeddings_by_type", "meta": meta,
        }  # fmt: skip

    return await job.answer(requests, write)


async def _vectors(
    job: PoolingJob, body: pooling_protocol.EmbeddingRequest, task: str | None, names: tuple[str, str]
) -> Response:
    """Answer with the vectors of each text. `names` are the kind of the objects and the name of their field."""
    kind, field = names
    requests = await job.texts(body, body.params(task=task, dimensions=body.dimensions))
    form = body.encoding_format or "float"
    if form.startswith("bytes"):
        return await job.answer_in_bytes(requests, body)
    shown = _WRITERS["float"] if form == "float" else lambda vectors: _base64(_to_bytes(vectors, body))
    return await job.answer(
        requests,
        lambda found: job.listed(found, lambda index, data: {"object": kind, "index": index, field: shown(data)}),
    )


@router.post("/classify", response_model=pooling_protocol.ClassifyResponse)
async def classify(body: pooling_protocol.ClassifyRequest, raw: Request) -> Response:
    """Return the probabilities of the model's classes for each text, and the likeliest class."""
    job = PoolingJob(body, raw, "classify")
    requests = await job.texts(body, body.params(task="classify"))
    labels = job.inputs.config.labels

    def written(index: int, data: Vectors) -> dict[str, Any]:
        label = labels[int(data.argmax())] if len(labels) == len(data) else None
        return {"index": index, "label": label, "probs": data.tolist(), "num_classes": len(data)}

    return await job.answer(requests, lambda found: job.listed(found, written))


async def score(body: pooling_protocol.ScoreRequest, raw: Request) -> Response:
    """Return how well a query matches each document, or each of several queries its own document."""
    job = PoolingJob(body, raw, "score")
    queries, documents = body.sides
    scores = await job.scores(body, queries, documents, body.side_fields)

    def write(found: Outputs) -> dict[str, Any]:
        results = scores.results([one.outputs.data for one in found])
        return job.listed(found, data=[{"index": i, "object": "score", "score": s} for i, s in enumerate(results)])

    return await job.answer(scores.requests, write)


async def rerank(body: pooling_protocol.RerankRequest, raw: Request) -> Response:
    """Return the documents in the order in which they match the query, the best first."""
    job = PoolingJob(body, raw, "rerank")
    scores = await job.scores(body, [body.query], body.documents, ("query", "documents"))

    def write(found: Outputs) -> dict[str, Any]:
        results = scores.results([one.outputs.data for one in found])
        ranked = sorted(range(len(results)), key=lambda i: -results[i])[: body.top_n or None]
        shown = []
        for i in ranked:
            entry: dict[str, Any] = {"index": i, "relevance_score": results[i]}
            if body.return_documents is not False:
                entry["document"] = {"text": body.documents[i]}
            shown.append(entry)
        num_tokens = _num_tokens(found)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"id": job.response_id, "model": job.model, "usage": usage, "results": shown}

    return await job.answer(scores.requests, write)


for _path in ("/score", "/v1/score"):
    router.post(_path, response_model=pooling_protocol.ScoreResponse)(score)
for _path in ("/rerank", "/v1/rerank", "/v2/rerank"):
    router.post(_path, response_model=pooling_protocol.RerankResponse)(rerank)


class PoolingJob:
    """Takes one request through the engine. The constructor raises `RequestError` for a model that generates."""

    def __init__(self, body: pooling_protocol.PoolingFields, raw: Request, prefix: str) -> None:
        self._body, self._raw, self._state = body, raw, state_of(raw)
        self.model = self._state.resolve_model(body.model)
        self.inputs = PoolingInput(self._state.engine.inputs)
        self.max_model_len = self._state.engine.inputs.model.max_model_len
        self.response_id, self._headers = self._state.response_id(prefix, body, raw)
        arrival = ARRIVAL.get()
        self._scheduling: dict[str, Any] = {
            "priority": body.priority, "cache_salt": body.cache_salt,
            "arrival_time": None if arrival is None else arrival.at,
        }  # fmt: skip
        self._length = num_body_bytes()
        self._client = None if arrival is None else arrival.client

    async def texts(self, body: pooling_protocol.TextsRequest, params: PoolingParams) -> list[EngineRequest]:
        """Return the engine's requests for the texts of a body. Raises `RequestError`."""
        field = "input" if body.messages is None else "messages"

        def make() -> list[EngineRequest]:
            conversation = None
            if body.messages is not None:
                conversation = render_messages(
                    self._state.engine.tokenizer, body, body.messages, body.tools, generates=False,
                    trusts_template=self._state.args.trust_request_chat_template,
                    content_format=self._state.args.chat_template_content_format,
                )  # fmt: skip
            return self.inputs.process(
                body.texts(conversation), params, add_special_tokens=body.adds_special_tokens, sources=field,
                **self._scheduling,
            )  # fmt: skip

        return await self._made(make)

    async def named(self, texts: Sequence[InputText], params: PoolingParams, field: str) -> list[EngineRequest]:
        """Return the engine's requests for texts with names of prompts. `field` is the body's field that errors name.
        Raises `RequestError`."""
        return await self._made(lambda: self.inputs.process(texts, params, sources=field, **self._scheduling))

    async def scores(
        self,
        body: pooling_protocol.ScoreRequest | pooling_protocol.RerankRequest,
        queries: Sequence[str],
        documents: Sequence[str],
        fields: tuple[str, str],
    ) -> Scores:
        """Return the `Scores` of queries and documents, which came in `fields` of the body. Raises `RequestError`."""

        def make() -> Scores:
            return Scores(
                self.inputs,
                self.inputs.shortened(queries, body.max_tokens_per_query, fields[0]),
                self.inputs.shortened(documents, body.max_tokens_per_doc, fields[1]),
                body.params(), fields=fields, instruction=body.instruction, **self._scheduling,
            )  # fmt: skip

        return await self._made(make)

    async def _made(self, make: Callable[[], _Made]) -> _Made:
        try:
            return await run_off_loop(make, length=self._length)
        except RequestError as error:
            raise self._body.as_sent(error) from None

    async def answer(self, requests: Sequence[EngineRequest], write: Callable[[Outputs], dict[str, Any]]) -> Response:
        """Run the requests, and answer with the JSON that `write` makes of their outputs."""
        return await self._respond(requests, lambda found: (encode_in_pieces(write(found)), {}), "application/json")

    async def answer_in_bytes(
        self, requests: Sequence[EngineRequest], body: pooling_protocol.EmbeddingRequest
    ) -> Response:
        """Run the requests, and answer with the vectors as bytes, one after the other. A header has their places,
        unless only the bytes are wanted."""

        def write(found: Outputs) -> tuple[bytes, dict[str, str]]:
            pieces = [_to_bytes(one.outputs.data, body) for one in found]
            ends = np.cumsum([len(piece) for piece in pieces]).tolist()
            about = {"embed_dtype": body.embed_dtype or "float32", "endianness": body.endianness or "native"}
            data = [
                {"index": i, **about, "start": end - len(piece), "end": end, "shape": list(one.outputs.data.shape)}
                for i, (one, piece, end) in enumerate(zip(found, pieces, ends, strict=True))
            ]
            told = {} if body.encoding_format == "bytes_only" else self.listed(found, data=data)
            headers = {PROMPT_TOKENS: str(_num_tokens(found))}
            # Headers are Latin-1, and a model may have any name: `json` escapes it.
            return b"".join(pieces), headers | ({"metadata": json.dumps(told, separators=(",", ":"))} if told else {})

        return await self._respond(requests, write, BYTES)

    async def _respond(
        self, requests: Sequence[EngineRequest], write: Callable[[Outputs], tuple[bytes, dict[str, str]]], kind: str
    ) -> Response:
        """Run the requests, and answer with the body and the headers that `write` makes of their outputs."""
        limits_s = [limit for limit in (self._body.timeout, self._state.args.max_request_time) if limit is not None]
        if limits_s:
            requests = [
                msgspec.structs.replace(request, deadline=request.arrival_time + min(limits_s)) for request in requests
            ]
        if (rank := requested_rank()) is not None:
            self._state.engine.inputs.check_rank(rank)
            requests = [msgspec.structs.replace(request, data_parallel_rank=rank) for request in requests]
        requests = [msgspec.structs.replace(request, client=self._client) for request in requests]
        self._state.log_pooling(self.response_id, requests)

        async def work() -> tuple[bytes, dict[str, str]]:
            found = await _pool_all(self._pool, requests)
            return await run_off_loop(lambda: write(found), length=sum(one.outputs.data.size for one in found))

        try:
            content, headers = await run_until_disconnect(work(), self._raw.receive)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return Response(content, headers={**self._headers, **headers}, media_type=kind)

    def _pool(self, request: EngineRequest) -> Coroutine[Any, Any, PoolingRequestOutput[PoolingOutput]]:
        return self._state.engine.pool(request, external_id(request, self.response_id))

    def listed(
        self, outputs: Outputs, written: Callable[[int, Vectors], dict[str, Any]] | None = None,
        data: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return a list in OpenAI's form, with the usage of all texts. Its entries are `data`, or `written` makes them
        from each text's output."""
        if written is not None:
            data = [written(index, output.outputs.data) for index, output in enumerate(outputs)]
        num_tokens = _num_tokens(outputs)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
        about = {"id": self.response_id, "object": "list", "created": int(time.time()), "model": self.model}
        return about | {"data": data, "usage": usage}


async def _pool_all(
    pool: Callable[[EngineRequest], Coroutine[Any, Any, _Output]], requests: Sequence[EngineRequest]
) -> list[_Output]:
    """Return the results of all requests, in order. The first failure ends the others."""
    if len(requests) == 1:
        return [await pool(requests[0])]
    tasks: list[asyncio.Task[_Output]] = []
    async with asyncio.TaskGroup() as group:
        async for request in spread(requests):
            tasks.append(group.create_task(pool(request)))
    return [task.result() for task in tasks]


def _num_tokens(outputs: Outputs) -> int:
    return sum(len(output.prompt_token_ids) for output in outputs)


def _to_bytes(vectors: Vectors, body: pooling_protocol.EmbeddingRequest) -> bytes:
    """Return the numbers as bytes, in the type and byte order that the body asks for."""
    kind = np.dtype(EMBED_DTYPES[body.embed_dtype or "float32"])
    order = sys.byteorder if body.endianness in (None, "native") else body.endianness
    with np.errstate(over="ignore"):  # float16 ends at 65504
        found = np.ascontiguousarray(vectors.astype(kind))
    return (found if order == sys.byteorder else found.view(f"u{kind.itemsize}").byteswap()).tobytes()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


_WRITERS: dict[str, Callable[[Vectors], Any]] = {
    "float": lambda vectors: vectors.tolist() if vectors.ndim < 2 else [vector.tolist() for vector in vectors],
    "base64": lambda vectors: _base64(np.ascontiguousarray(vectors, "<f4").tobytes()),
    "ubinary": lambda vectors: np.packbits(vectors > 0).tolist(),
    "binary": lambda vectors: (np.packbits(vectors > 0).astype(np.int16) - 128).tolist(),
}
