"""Turns errors into bodies, in the form of OpenAI or of another API, and into HTTP statuses.

Every error that leaves the server passes through here: `RequestError` and friends from the engine, pydantic's
validation errors, unknown routes, and any unforeseen exception, for which the client sees only "internal error".
"""

import copy
import json
import logging
import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.entrypoints.http.body_fields import ResponseModel, is_field
from octavo.errors import (
    RETRY_AFTER_S,
    EngineDeadError,
    EngineRestartingError,
    EngineStoppingError,
    RequestError,
    error_code,
    error_type,
    similar,
)  # fmt: skip
from octavo.ollama import UNBUILT as UNBUILT_IN_OLLAMA
from octavo.ollama import unbuilt_message as unbuilt_in_ollama
from octavo.sampling_params import StructuredOutputsParams
from octavo.structured_output.schema_keywords import LISTS, MAPS, ONE, SILENT

logger = logging.getLogger("octavo.server")

# Header of answers that are not whole, or errors, because the server stops or its engine has died.
CUT_OFF_HEADER = "X-Octavo-Cut-Off"
# Unknown fields that users often send, most of them another API's, and what they mean. What begins with a field of the
# API counts, and of several the first.
_SUGGESTED_FIELDS = {
    "choice": ("structured_outputs.choice",),
    "enable_thinking": ('chat_template_kwargs {"enable_thinking": ...}',),
    "format": ("response_format", "text.format", "output_config.format"),
    "grammar": ("structured_outputs.grammar",),
    "input": ("messages", "prompt"),
    "instructions": ("system", 'messages, whose first may have the role "system"'),
    "lora_request": ("model, which is the adapter's name",),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "max_tokens": ("max_output_tokens",),
    "messages": ("input", "prompt"),
    "num_predict": ("max_tokens", "max_output_tokens"),
    "output_config": ("response_format", "text.format"),
    "prompt": ("input", "messages"),
    "prompt_token_ids": ("prompt, which takes token ids too",),
    "reasoning": ("reasoning_effort", "thinking"),
    "reasoning_effort": ("reasoning.effort", "output_config.effort"),
    "repeat_penalty": ("repetition_penalty",),
    "response_format": ("text.format", "output_config.format"),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "system": ("instructions", 'messages, whose first may have the role "system"'),
    "thinking": ('chat_template_kwargs {"thinking": ...}',),
}
# Fields that tools in the form of Responses or Messages lack in chats.
_OF_TOOLS = re.compile(r"tools\[\d+\]\.(type|function)", re.ASCII)
_FORM_OF_TOOLS = ': a tool is {"type": "function", "function": {"name": ..., "parameters": {...}}}'
_EXAMPLES = {"response_format": ' such as {"type": "json_object"}'}
_JSON_SCHEMA = "response_format.json_schema."
_STRUCTURED = "structured_outputs."
_OF_STRUCTURED = StructuredOutputsParams.__struct_fields__
_BESIDE_SCHEMA = ("name", "description", "schema", "strict")
# Keywords that show that a client sent a bare schema instead of the object around it.
_OF_SCHEMAS = ONE | LISTS | MAPS | SILENT | {"type", "required", "items", "enum", "const", "format", "pattern", "$ref"}
# Routes of OpenAI's and vLLM's servers that Octavo does not have.
_TRANSFER = "/sleep?level=2, new files and /wake_up change a model's weights."
_PROFILE = "/ui and /metrics show where time goes."
UNBUILT_PATHS = {
    **dict.fromkeys((
        "/v1/audio/speech", "/v1/realtime", "/v1/images/generations", "/v1/images/edits", "/v1/images/variations",
        "/v1/videos", "/v1/containers", "/v1/evals",
        "/v1/moderations", "/v1/fine_tuning/jobs", "/v1/uploads", "/v1/vector_stores",
        "/v1/assistants", "/v1/threads", "/v1/responses/compact",
        "/v1/completions/derender", "/v1/chat/completions/derender", "/v1/systemone",
        "/fault_tolerance/apply", "/fault_tolerance/status", "/get_world_size", "/is_scaling_elastic_ep",
        "/scale_elastic_ep",
    ), ""),
    **dict.fromkeys((
        "/init_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update", "/update_weights",
        "/finish_weight_update", "/shutdown_weight_transfer_engine", "/update_weight_version", "/weight_info",
        "/weight_checker",
    ), _TRANSFER),
    **dict.fromkeys(("/start_profile", "/stop_profile"), _PROFILE),
    **dict.fromkeys(("/abort_requests", "/inference/v1/abort_requests"), "A closed connection ends its request."),
    **dict.fromkeys(("/cohere/v2/chat", "/cohere/v2/chat/render"), "/v1/chat/completions is the route of chats."),
    **dict.fromkeys(
        ("/v1/messages/render", "/v1/responses/render"), "/v1/chat/completions/render gives a prompt's tokens."
    ),
    **dict.fromkeys(("/reset_mm_cache", "/reset_encoder_cache"), "Media are kept within --mm-processor-cache-gb."),
    "/collective_rpc": "Workers run no methods of callers.",
    "/generative_scoring": "/v1/completions with logprob_token_ids gives the probabilities of labels.",
    "/inference/v1/generate": "/v1/completions takes token ids as prompt, and return_token_ids.",
    "/kv_event_sources": "--kv-events-config has the addresses.",
    "/release_kv_cache_memory": "/sleep?level=1 frees the KV cache.",
    "/server_info": "/v1/models and /metrics tell the settings.",
    "/v1/chat/completions/batch": "Send several requests at once, or a file to /v1/batches.",
    "/v1/messages/batches": "/v1/batches takes files of /v1/messages requests.",
}  # fmt: skip
# Routes of `engine_control`, which exist with --enable-server-dev-mode only.
DEV_MODE_PATHS = frozenset({
    "/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused", "/reset_prefix_cache",
})  # fmt: skip
# Ollama's routes that add or remove models.
_OF_THE_GATEWAY = frozenset({"/api/pull", "/api/delete"})
# Scope keys of an error's field and code, for the request's log line and the metrics. They have no text of a client.
REFUSED_NAMES = "octavo.refused_names"
ERROR_CODE = "octavo.error_code"
_FIRST_NAME = re.compile(r"\w*", re.ASCII)
MAX_MESSAGE_LENGTH = 1000  # messages quote values of clients, which may be megabytes


class ErrorInfo(ResponseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(ResponseModel):
    """Body of every answer that is not 2xx."""

    error: ErrorInfo


def error_body(
    message: str,
    status: int,
    *,
    param: str | None = None,
    code: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the error body in the form of the request's API. It is ASCII, so that a message may quote any string of a
    client."""
    form = ERROR_FORM.get()
    code = error_code(status, param, code)
    return json.dumps(form(_shorten(message), status, param and _shorten(param), code, details or {})).encode()


def openai_error(
    message: str, status: int, param: str | None, code: str | None, details: Mapping[str, Any]
) -> dict[str, Any]:
    """Return OpenAI's form of an error, `{"error": {...}}`, which has no `details`."""
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}


# A function from message, status, parameter, code and details to a body.
ErrorForm = Callable[[str, int, str | None, str | None, Mapping[str, Any]], dict[str, Any]]
ERROR_FORM: ContextVar[ErrorForm] = ContextVar("error_form", default=openai_error)  # of the request that a task answers


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_LENGTH else text[:MAX_MESSAGE_LENGTH] + "..."


class _ErrorAnswer(Response):
    """Tells the request's log line what the error is about."""

    names: tuple[str, ...] = ()
    code: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[REFUSED_NAMES], scope[ERROR_CODE] = self.names, self.code
        await super().__call__(scope, receive, send)


def error_response(
    message: str,
    status: int,
    *,
    param: str | None = None,
    code: str | None = None,
    details: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return an HTTP response with an error body. A 503 also says when to come back."""
    headers = dict(headers or {})
    if status == 503:
        headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    body = error_body(message, status, param=param, code=code, details=details)
    answer = _ErrorAnswer(body, status, headers=headers, media_type="application/json")
    field = _FIRST_NAME.match(param or "")
    # Further names of `param` may be the client's own.
    answer.code = error_code(status, param, code)
    answer.names = (field[0], answer.code) if field and is_field(field[0]) else (answer.code,)
    return answer


def error_fields(error: Exception) -> dict[str, Any]:
    """Return the arguments of `error_body` and `error_response` for an error. An unforeseen error is logged here, once,
    with its traceback."""
    if isinstance(error, RequestError):
        fields = {name: getattr(error, name) for name in ("status", "param", "code", "details")}
        return {"message": str(error), **fields}
    if isinstance(error, EngineStoppingError):
        return {"message": "The server is stopping.", "status": 503, "code": "engine_stopping"}
    if isinstance(error, EngineRestartingError):
        return {"message": str(error), "status": 503, "code": "engine_restarting"}
    if isinstance(error, EngineDeadError):
        message = str(error) or "The engine has died; this server cannot answer."
        # Not 503, after which balancers ask another server: this request may have ended the engine.
        return {"message": message, "status": 500, "code": "engine_dead"}
    logger.error("Unexpected error while answering a request", exc_info=error)
    return {"message": "Internal error.", "status": 500, "code": "internal_error"}


def stream_error_event(error: Exception) -> bytes:
    """Return the error as a server-sent event, for streams, whose status line was sent before the error."""
    return b"data: " + error_body(**error_fields(error)) + b"\n\n"


def validation_error(errors: Sequence[Mapping[str, Any]], fields: Collection[str] = ()) -> RequestError:
    """Return the first of pydantic's errors as a sentence that names the field. `fields` are those that the body may
    have."""
    error = errors[0]
    if error["type"] == "missing":  # its other API's name says more
        unknown = (one for one in errors if one["type"] == "extra_forbidden")
        error = next((one for one in unknown if _means(one["loc"], error["loc"], fields)), error)
    location = error["loc"]
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        # A copy: raised beside pydantic's error, which holds the cause outside of the collector's sight, the cause
        # itself would never be freed, nor the body in its traceback.
        return copy.copy(cause)
    if not location:
        said = f"{_predicate(error)}." if error["type"] == "value_error" else "must be a JSON object."
        return RequestError(f"The body {said}", code="invalid_body")
    base = location[:-1] if _is_type_label(location) else location
    of_field = [one for one in errors[1:] if one["loc"][: len(base)] == base and len(one["loc"]) > len(base)]
    if base != location and (inner := next((one for one in of_field if len(one["loc"]) > len(base) + 1), None)):
        # Of a field with several types the value has one, an object's, and what is wrong is in it.
        error, location = inner, (*base, *inner["loc"][len(base) + 1 :])
    param = _field_name(location)
    if error["type"] in _TAG_ERRORS:
        # A union of objects that one of their fields tells apart.
        name = _TAG_FIELD.search(error["msg"])[1]  # type: ignore[index]
        param = f"{param}.{name}"
        wanted, said = error["ctx"].get("expected_tags"), _SHOWN.repr(error["ctx"].get("tag"))
        if wanted is None:
            return RequestError(f"{param} is required.", param=param, code="missing_required_parameter")
        return RequestError(f"{param} should be {' or '.join(wanted.split(', '))}, got {said}.", param=param)
    if error["type"] == "extra_forbidden":
        if "ctx" in error:  # an unknown value
            return RequestError(f"{param} {error['msg']}.", param=param)
        meant = _meant_field(param, fields)
        said = f"; did you mean {meant}?" if meant else ""
        return RequestError(
            f"Unrecognized request argument supplied: {param}{said}", param=param, code="unknown_parameter"
        )
    if error["type"] == "missing":
        form = _FORM_OF_TOOLS if _OF_TOOLS.fullmatch(param) and "messages" in fields else ""
        return RequestError(f"{param} is required{form}.", param=param, code="missing_required_parameter")
    message = _predicate(error)
    if base != location:
        # A field with several types has an error for each type.
        others = [one for one in of_field if one["type"].endswith(("_type", "literal_error"))]
        message = " or ".join([message, *(_predicate(one).removeprefix("should be ") for one in others)])
    message += _EXAMPLES.get(param, "")
    return RequestError(f"{param} {message}, got {_SHOWN.repr(error.get('input'))}.", param=param)


def _means(unknown: Sequence[int | str], missing: Sequence[int | str], fields: Collection[str]) -> bool:
    """Return whether the unknown field stands for the missing one."""
    meant = _meant_field(_field_name(unknown), fields)
    return meant is not None and _FIRST_NAME.match(meant)[0] == _field_name(missing)  # type: ignore[index]


def _meant_field(unknown: str, fields: Collection[str]) -> str | None:
    """Return the field of `fields` that a client may have meant by an unknown name, or None."""
    if unknown.startswith(_JSON_SCHEMA):
        name = unknown.removeprefix(_JSON_SCHEMA)
        if name in _OF_SCHEMAS:
            return f"{_JSON_SCHEMA}schema, which holds the schema"
        meant = similar(name, _BESIDE_SCHEMA)
        return meant and _JSON_SCHEMA + meant
    for suggested in _SUGGESTED_FIELDS.get(unknown, ()):
        if _FIRST_NAME.match(suggested)[0] in fields:  # type: ignore[index]
            return suggested
    if unknown.startswith(_STRUCTURED):
        meant = similar(unknown.removeprefix(_STRUCTURED), _OF_STRUCTURED)
        return meant and _STRUCTURED + meant
    return similar(unknown, fields) if unknown.isidentifier() else None


class _JsonRepr(reprlib.Repr):
    """Writes a client's value in a bounded length, as JSON but for a text in single quotes."""

    def repr_str(self, x: str, level: int) -> str:
        if level == self.maxlevel:  # the value itself
            return super().repr_str(x, level)
        text = json.dumps(x[: self.maxstring], ensure_ascii=False)
        return text if len(x) <= self.maxstring else text[:-1] + '..."'

    def repr_bool(self, x: bool, level: int) -> str:
        return json.dumps(x)

    def repr_NoneType(self, x: None, level: int) -> str:  # reprlib calls it so
        return "null"


_SHOWN = _JsonRepr()
# Pydantic's names of a field's types, which a location contains as if they were fields.
_TYPE_LABEL = re.compile(r".*\[.*|(?:str|int|float|bool|list|dict|none|constrained-\w+)$")
_TAG_ERRORS = ("union_tag_not_found", "union_tag_invalid")
_TAG_FIELD = re.compile(r"(?:discriminator|using) '(\w+)'")


# Pydantic's words about Python ("a valid dictionary or instance of Tool") or its own work, which mean nothing to
# clients.
_WORDS_OF_PYTHON = re.compile(r"a valid dictionary(?: or (?:instance of|object to extract fields from) ?\w*)?")
_OF_VALIDATION = re.compile(r" after validation, not (?:more$|(?:more than )?\d+)")


def _field_name(location: Sequence[int | str]) -> str:
    name = str(location[0])
    for i, part in enumerate(location[1:], 1):
        if isinstance(part, int):
            name += f"[{part}]"
        elif i < len(location) - 1 or not _is_type_label(location):
            name += f".{part}"
    return name


def _is_type_label(location: Sequence[int | str]) -> bool:
    """Return whether a location ends with a name of a type."""
    return len(location) > 1 and isinstance(location[-1], str) and _TYPE_LABEL.match(location[-1]) is not None


def _predicate(error: Mapping[str, Any]) -> str:
    """Return pydantic's message without its subject ("Input should be a valid integer"); the field's name becomes the
    subject."""
    message = _WORDS_OF_PYTHON.sub("an object", str(error["msg"]).removeprefix("Value error, "))
    message = _OF_VALIDATION.sub("", message)
    return message[message.index(" should ") + 1 :] if " should " in message else message


def refusal(error: Exception) -> Response:
    """Return the response for an error that refuses a request."""
    retry_after_s = error.retry_after_s if isinstance(error, RequestError) else None
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    if isinstance(error, EngineDeadError):
        headers[CUT_OFF_HEADER] = "1"
    return error_response(**error_fields(error), headers=headers)


async def refuse_not_built(request: Request) -> Response:
    """Answer a request for one of `UNBUILT_PATHS`."""
    path = request.url.path
    instead = UNBUILT_PATHS[path.removeprefix(str(request.scope.get("root_path", "")))]
    return error_response(f"{path} is not built yet. {instead}".rstrip(), 404, code="not_built")


def unexpected_error_response() -> Response:
    return error_response("Internal error.", 500, code="internal_error")


class PromptSavedError(Exception):
    """Ends a request that only computes its prompt, for another server. The status is 204."""


def http_error_response(request: Request, error: HTTPException) -> Response:
    """Return the response for Starlette's errors: no such route, or no such method of it."""
    message, path = str(error.detail), request.url.path
    if error.status_code == 404:
        route = path.removeprefix(str(request.scope.get("root_path", "")))
        if route in DEV_MODE_PATHS:
            said = f"This server has no {path}: start it with --enable-server-dev-mode."
            return error_response(said, 404, code="not_enabled")
        message = f"Invalid URL ({request.method} {path})"
        if route in UNBUILT_IN_OLLAMA:
            message = unbuilt_in_ollama(route)
        elif route in _OF_THE_GATEWAY:
            message = f"{route} is for octavo gateway, which fetches and deletes models; octavo serve has one model."
        elif meant := similar(route, _paths(request) - UNBUILT_PATHS.keys()):
            message += f"; did you mean {meant}?"
    elif error.status_code == 405:
        message = method_not_allowed_message(request.method, path, (error.headers or {}).get("Allow", ""))
    return error_response(message, error.status_code, headers=error.headers)


def _paths(request: Request) -> set[str]:
    """Return the paths of the application's routes."""
    return {path for route in request.app.routes if isinstance(path := getattr(route, "path", None), str)}


def method_not_allowed_message(method: str, path: str, allowed: str) -> str:
    """`allowed` are the methods that the path takes, as in the header Allow."""
    return f"Not allowed to {method} on {path}" + (f"; it takes {allowed}." if allowed else "")
