"""Describes the API: GET /openapi.json with examples, streams and errors beside the routes' types, and GET /docs.

FastAPI makes the description from routes and models with the first request for it, and is imported only then. /docs
shows the description, to read and to try. Its files come with a package, so it works offline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from octavo.entrypoints.anthropic.anthropic_errors import AnthropicError
from octavo.entrypoints.http.error_responses import ErrorResponse
from octavo.entrypoints.http.router import LazyRoute, Router, RouteSpec
from octavo.entrypoints.http.streaming import encode_json
from octavo.messages_errors import MESSAGES_PREFIX
from octavo.version import __version__

router = Router(include_in_schema=False)

PAGE_FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")

OVERVIEW = """\
OpenAI's API over the model that this server serves, with vLLM's extra fields and routes, and Anthropic's Messages.

Any OpenAI client works with it: set its base URL to this server's `/v1`. Anthropic's clients take the server's address
without `/v1`. Where the server has API keys, send one as `Authorization: Bearer KEY` or `x-api-key: KEY`. Errors have
OpenAI's body, `{"error": {"message", "type", "param", "code"}}`, and those of Messages Anthropic's.
"""

_ERRORS = {
    "400": "A field has a wrong type or value, the prompt does not fit, or a field is unknown or not built yet.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model here.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "The body is not sent as `Content-Type: application/json`.",
    "429": "Too many requests wait; `Retry-After` says when to come back.",
    "500": "A bug, with its traceback in the server's log; or the engine died with this request.",
    "503": "The model is still being loaded, the engine has died, or the server stops; see `Retry-After`.",
}

_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk or an error as JSON, and [DONE] at the end."}},
    "required": ["data"],
}
# By path: the media type, the schema of each event or line, and an example of a stream.
_STREAMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "/v1/completions": (
        "text/event-stream",
        _EVENT,
        'data: {"id":"cmpl-1","object":"text_completion","created":1767225600,"model":"SmolLM2-135M-Instruct",'
        '"system_fingerprint":"fp_0","choices":[{"index":0,"text":" Paris","logprobs":null,"finish_reason":null}]}\n\n'
        "data: [DONE]\n\n",
    ),
    "/v1/chat/completions": (
        "text/event-stream",
        _EVENT,
        'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1767225600,'
        '"model":"SmolLM2-135M-Instruct","system_fingerprint":"fp_0","choices":[{"index":0,"delta":'
        '{"content":"Paris"},"logprobs":null,"finish_reason":null}]}\n\ndata: [DONE]\n\n',
    ),
    "/v1/responses": (
        "text/event-stream",
        _EVENT,
        'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":4,'
        '"item_id":"msg_1_0","output_index":0,"content_index":0,"delta":"Paris","logprobs":[]}\n\n',
    ),
    "/v1/messages": (
        "text/event-stream",
        _EVENT,
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":"Paris"}}\n\n',
    ),
    "/generate": (
        "application/x-ndjson",
        {"$ref": "#/components/schemas/GenerateResponse"},
        '{"text":["The capital of France is Par"]}\n',
    ),
}

_QUESTION = [{"role": "user", "content": "Name the capital of France."}]
_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "A prompt": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
        "Several prompts, streamed": {"prompt": ["Once upon a time", "Two plus two is"], "stream": True},
        "Scoring a prompt": {"prompt": "The capital of France is Paris", "max_tokens": 0, "echo": True, "logprobs": 1},
        "Beam search": {"prompt": "Once upon a time", "n": 2, "best_of": 4, "use_beam_search": True},
    },
    "/v1/chat/completions": {
        "A question": {"messages": _QUESTION},
        "Streamed, with the usage": {
            "messages": [{"role": "system", "content": "Be brief."}, *_QUESTION],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "Three answers of one seed": {"messages": _QUESTION, "n": 3, "temperature": 0.8, "seed": 7, "max_tokens": 40},
    },
    "/v1/responses": {
        "A question": {"input": "Name the capital of France.", "instructions": "Be brief."},
        "Streamed, without being kept": {"input": _QUESTION, "stream": True, "store": False},
        "JSON of a schema": {
            "input": "Name the capital of France.",
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "capital",
                    "schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
                }
            },
        },
    },
    "/v1/messages": {
        "A question": {"messages": _QUESTION, "max_tokens": 20},
        "Streamed": {"messages": _QUESTION, "system": "Be brief.", "max_tokens": 20, "stream": True},
    },
    "/v1/messages/count_tokens": {"A question": {"messages": _QUESTION}},
    "/generate": {"A prompt": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}},
    "/tokenize": {
        "A prompt": {"prompt": "The capital of France is", "return_token_strs": True},
        "A conversation": {"messages": _QUESTION},
    },
    "/detokenize": {"Token ids": {"tokens": [504, 3575, 282, 4649, 314]}},
}


class Description:
    """The description of routes for /openapi.json."""

    def __init__(self, specs: Sequence[RouteSpec | LazyRoute]) -> None:
        self._specs = specs

    @cached_property
    def schema(self) -> dict[str, Any]:
        """Return the description, which the first call makes."""
        from fastapi import FastAPI

        bug = {"model": ErrorResponse, "description": "A bug; the server's log has the traceback."}
        app = FastAPI(title="Octavo", version=__version__, description=OVERVIEW, responses={500: bug})
        for route in self._specs:
            one = route.load() if isinstance(route, LazyRoute) else route
            app.add_api_route(one.path, one.handler, methods=[one.method], **one.description)
        return _complete(app.openapi())


def _complete(schema: dict[str, Any]) -> dict[str, Any]:
    """Add examples, streams and errors to FastAPI's description, in place, and return it."""
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            _add_errors(operation, "AnthropicError" if path.startswith(MESSAGES_PREFIX) else "ErrorResponse")
            if path in _EXAMPLES and "requestBody" in operation:
                content = operation["requestBody"]["content"]["application/json"]
                content["examples"] = {name: {"value": value} for name, value in _EXAMPLES[path].items()}
            if path in _STREAMS:
                media_type, item, example = _STREAMS[path]
                answer = operation["responses"]["200"]
                answer["description"] = f"The answer; with `stream: true` a stream of {media_type}."
                answer["content"][media_type] = {"schema": item, "example": example}
    models = schema["components"]["schemas"]
    models["AnthropicError"] = AnthropicError.model_json_schema(ref_template="#/components/schemas/{model}")
    models.update(models["AnthropicError"].pop("$defs"))
    for name in ("HTTPValidationError", "ValidationError"):
        models.pop(name, None)
    return schema


def _add_errors(operation: dict[str, Any], body: str) -> None:
    """Replace FastAPI's own 422 by the errors of an operation. `body` is the schema of their bodies."""
    responses = operation["responses"]
    responses.pop("422", None)
    if body != "ErrorResponse":
        responses.pop("500", None)
    if "requestBody" in operation:
        statuses = set(_ERRORS)
    else:
        parameters = operation.get("parameters", ())
        is_asked = any(parameter["in"] == "query" for parameter in parameters)
        statuses = {"401", "500", "503", *(["404"] if parameters else []), *(["400"] if is_asked else [])}
    for status, meaning in _ERRORS.items():
        if status in statuses - responses.keys():
            error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body}"}}}
            responses[status] = {"description": meaning, "content": error}


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """Return the description of the API."""
    description: Description = request.app.state.openapi
    root = request.scope.get("root_path", "")

    def body() -> bytes:
        return encode_json({**description.schema, "servers": [{"url": root}]} if root else description.schema)

    return Response(await asyncio.to_thread(body), media_type="application/json")


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Swagger UI over /openapi.json."""
    return await asyncio.to_thread(_page, request.scope.get("root_path", ""))


@router.get("/docs/{name}")
async def docs_file(name: str) -> Response:
    """Return a file of the page /docs."""
    if name not in PAGE_FILES:
        raise HTTPException(404)
    return FileResponse(await asyncio.to_thread(_files) / name)


# These import FastAPI, which takes 0.15 s of a processor: they run in a thread.


def _page(root: str) -> Response:
    from fastapi.openapi.docs import get_swagger_ui_html

    script, style, icon = (f"{root}/docs/{name}" for name in PAGE_FILES)
    return get_swagger_ui_html(
        openapi_url=f"{root}/openapi.json",
        title="Octavo",
        swagger_js_url=script,
        swagger_css_url=style,
        swagger_favicon_url=icon,
    )


def _files() -> Path:
    import fastapi_offline  # has Swagger UI

    return Path(fastapi_offline.__file__).parent / "static"
