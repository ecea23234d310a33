"""POST /invocations: the one route that SageMaker calls. As in vLLM, the body's fields decide which other route answers
the request."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.http.body_reader import replay_body
from octavo.entrypoints.http.router import Router, read_json, whole_body
from octavo.entrypoints.http.server_state import state_of
from octavo.errors import RequestError
from octavo.pooling_params import PoolingConfig

router = Router(tags=["vLLM"])

_SCORES = ("text_1", "data_1", "queries")


@router.post(
    "/invocations",
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}},
)
async def invocations(raw: Request) -> Response:
    """Answer as /v1/chat/completions does for `messages`, and /v1/completions for a `prompt`; a model that pools as
    /v1/embeddings, /classify or /pooling do, /score for pairs, or /rerank for a `query` and `documents`."""
    body = await whole_body(raw)
    path = await read_json(raw, body, lambda given: _path_of(given, state_of(raw).engine.config.model.pooling))
    again = Request(raw.scope, replay_body(body, raw.receive))
    response: Response = await raw.app.router.plain[path].endpoint.answer(again)
    return response


def _path_of(given: Any, pooling: PoolingConfig | None) -> str:
    """Return the path of the route for a body. Raises `RequestError`."""
    if isinstance(given, dict):
        if pooling is None:
            for name, path in {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}.items():
                if name in given:
                    return path
        elif any(name in given for name in _SCORES):
            return "/score"
        elif "query" in given:
            return "/rerank"
        elif "input" in given or "messages" in given:
            return {"embed": "/v1/embeddings", "classify": "/classify"}.get(pooling.task, "/pooling")
    fields = "messages or prompt" if pooling is None else "input, messages, query with documents, or text_1 with text_2"
    said = f"The body must be a JSON object with {fields}, which say which kind of request it is."
    raise RequestError(said, code="invalid_body")
