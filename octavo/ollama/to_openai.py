"""Turns requests of Ollama's API to a model into requests of OpenAI's API.

Every answer is asked for as a stream, as Ollama's answers say how long the prompt and the answer took.
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from octavo.body_errors import plain_reason
from octavo.errors import RequestError
from octavo.json_size import refuse_json
from octavo.ollama import OPTIONS, TRUNCATION_HEADER, plain_name

logger = logging.getLogger("octavo.ollama")

Kind = Literal["chat", "generate", "embed", "embeddings"]
PATHS: dict[str, Kind] = {
    "/api/chat": "chat", "/api/generate": "generate", "/api/embed": "embed", "/api/embeddings": "embeddings",
}  # fmt: skip
FOREVER = math.inf
_FIELDS = {option: name for name, option in OPTIONS.items()}
# Samplers that Octavo does not have, and the values that turn them off.
_UNBUILT_OPTIONS = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}
# Options of a model's start, and of samplers that are off. Editors send them with every request.
_WITHOUT_EFFECT = frozenset((
    "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "logits_all",
    "vocab_only", "use_mmap", "use_mlock", "embedding_only", "num_keep", "repeat_last_n", "penalize_newline",
    "mirostat_eta", "mirostat_tau",
))  # fmt: skip
# Of a body that the gateway parses: one call takes some 50 ms, and its event loop waits, also for a thread.
_MAX_NODES = 1 << 18
_MAX_DEPTH = 128
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([-+]?)((?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+)")
# The first letters of a file in base64.
_IMAGE_TYPES = {"/9j/": "jpeg", "iVBOR": "png", "R0lGOD": "gif", "UklGR": "webp", "Qk": "bmp"}


@dataclass(frozen=True, slots=True)
class Translated:
    """A request of OpenAI's API. `name` is the model as the client wrote it, `model` is its plain name. A request that
    `only_loads` has no prompt. `keep_alive` is in seconds, None if the client did not say. `headers` go
    with the request. One that `thinks` asks for thinking."""

    kind: Kind
    name: str
    model: str
    path: str
    body: dict[str, Any]
    streams: bool
    only_loads: bool
    keep_alive: float | None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    thinks: bool = False


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | str | None = None


class _ToolCall(msgspec.Struct):
    function: _CalledFunction
    id: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class _Request(msgspec.Struct):
    model: str
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class _Generation(_Request):
    stream: bool | None = None
    format: dict[str, Any] | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None


class _Chat(_Generation):
    messages: list[_Message] | None = None
    tools: list[dict[str, Any]] | None = None


class _Generate(_Generation):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    context: list[int] | None = None


class _Embed(_Request):
    input: str | list[str] = ""
    truncate: bool | None = None
    dimensions: int | None = None


class _Embeddings(_Request):
    prompt: str | None = None


_BODIES: dict[Kind, type[_Request]] = {
    "chat": _Chat, "generate": _Generate, "embed": _Embed, "embeddings": _Embeddings,
}  # fmt: skip


def translate(path: str, data: bytes) -> Translated:
    """Return the request of OpenAI's API for the body of a request for one of `PATHS`. Raises `RequestError`."""
    refuse_json(data, _MAX_NODES, _MAX_DEPTH)
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: {error}.", code="invalid_body") from None
    except RecursionError:
        raise RequestError(f"{path}: the body is nested too deeply.", code="invalid_body") from None
    return translate_value(path, body)


def translate_value(path: str, given: Any) -> Translated:
    """`translate` for a body that has been parsed."""
    kind = PATHS[path]
    try:
        body = msgspec.convert(given, type=_BODIES[kind])
    except msgspec.ValidationError as error:
        raise RequestError(f"{plain_reason(error)}.", code="invalid_body") from None
    if not body.model:
        raise RequestError("model is required.", param="model")
    only_loads = False
    streams = False
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(body, _Chat | _Generate):
        streams = body.stream is not False
        only_loads = not (body.messages if isinstance(body, _Chat) else _says_something(body))
        headers = [(TRUNCATION_HEADER.encode(), b"disabled" if body.truncate is False else b"auto")]
        inner, fields = _chat(body) if isinstance(body, _Chat) else _generate(body)
        fields |= {"stream": True, "stream_options": {"include_usage": True}} | _fields_of(body.options or {})
    else:
        inner, fields = "/v1/embeddings", _embedding(body)
        only_loads = not fields["input"]
    model = plain_name(body.model)
    keep_alive = read_duration(body.keep_alive)
    return Translated(
        kind, body.model, model, inner, {"model": model, **fields}, streams, only_loads, keep_alive, headers,
        thinks=isinstance(body, _Generation) and bool(body.think),
    )  # fmt: skip


def read_duration(value: float | str | None) -> float | None:
    """Return seconds of a `keep_alive`: a number of seconds or a text such as "5m"; `FOREVER` for a negative one.
    Raises `RequestError`."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            seconds = float(value)
        except ValueError:
            found = _DURATION.fullmatch(value)
            if found is None:
                raise RequestError(
                    f'keep_alive must be seconds or a text such as "5m", got {value!r:.60}.', param="keep_alive"
                ) from None
            parts = re.findall(r"([\d.]+)([^\d.]+)", found[2])
            seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts) * (-1 if found[1] == "-" else 1)
    else:
        seconds = value
    return FOREVER if seconds < 0 or math.isnan(seconds) else seconds


def _chat(body: _Chat) -> tuple[str, dict[str, Any]]:
    fields = {"messages": _messages(body.messages or ())} | _common(body, is_chat=True)
    if body.tools:
        fields["tools"] = [_tool(one) for one in body.tools]
    return "/v1/chat/completions", fields


def _generate(body: _Generate) -> tuple[str, dict[str, Any]]:
    if body.context:
        raise RequestError("context is not built; /api/chat takes the conversation.", param="context")
    if body.template:
        raise RequestError("template is not built; write the whole prompt, with raw.", param="template")
    if not body.raw and not body.suffix:
        system = [_Message("system", body.system)] if body.system else []
        messages = [*system, _Message("user", body.prompt, images=body.images)]
        return "/v1/chat/completions", {"messages": _messages(messages)} | _common(body, is_chat=True)
    for name in ("images", "system") if body.raw else ("images",):
        if getattr(body, name):
            raise RequestError(f"{name} cannot be in a prompt with raw or suffix.", param=name)
    fields = {"prompt": body.prompt or ""} | _common(body, is_chat=False)
    if body.suffix:
        fields["suffix"] = body.suffix
    return "/v1/completions", fields


def _says_something(body: _Generate) -> bool:
    return bool(body.prompt or body.suffix or body.images)


def _common(body: _Generation, *, is_chat: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if isinstance(body.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format}}
    elif body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        raise RequestError(f'format must be "json" or a JSON schema, got {body.format!r:.60}.', param="format")
    if body.think is not None and is_chat:
        fields["reasoning_effort"] = body.think if isinstance(body.think, str) else "medium" if body.think else "none"
    if body.logprobs and is_chat:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    elif body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    return fields


def _fields_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAI's fields for Ollama's options. Raises `RequestError` for samplers that are not built."""
    fields: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name in _FIELDS:
            fields |= _field_of(name, value)
        elif name in _UNBUILT_OPTIONS:
            if value != _UNBUILT_OPTIONS[name]:
                raise RequestError(f"options.{name} is not built; leave it out.", param=f"options.{name}")
        else:
            logger.warning("the unknown option %.60s of a request is ignored, as Ollama does", name)
    if type(fields.get("top_p")) in (int, float) and fields["top_p"] == 0:
        del fields["top_p"]
        fields["top_k"] = 1  # the likeliest token alone
    return fields


def _field_of(name: str, value: Any) -> dict[str, Any]:
    """Return OpenAI's field for one of Ollama's options; empty if its value asks for nothing."""
    is_number = type(value) in (int, float)
    if name == "num_predict":
        value = int(value) if type(value) is float and value.is_integer() else value
        if type(value) is not int:
            raise RequestError(
                f"options.num_predict must be a number of tokens, or -1 for as many as fit, got {value!r:.60}.",
                param="options.num_predict",
            )
        return {"max_tokens": value} if value > 0 else {}
    if name == "repeat_penalty" and is_number and value == 0:
        return {}
    if name == "stop" and isinstance(value, str | list):
        value = [one for one in ([value] if isinstance(value, str) else value) if one != ""]
    return {_FIELDS[name]: value}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool without null fields, which Ollama's clients write."""
    tool = {name: value for name, value in tool.items() if value is not None}
    for name in ("function", "parameters"):
        if isinstance(tool.get(name), dict):
            tool[name] = _tool(tool[name])
    return tool


def _messages(messages: Sequence[_Message]) -> list[dict[str, Any]]:
    """Return OpenAI's messages. Ollama's calls have no ids, so each call gets one, and results of tools are matched to
    calls in order, or by the tool's name."""
    found: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # ids and names of calls without a result
    num_calls = 0
    for message in messages:
        content: str | list[dict[str, Any]] | None = message.content or (
            None if message.role == "assistant" and (message.tool_calls or message.thinking) else ""
        )
        if message.images:
            text = [{"type": "text", "text": message.content}] if message.content else []
            content = [*map(_image_part, message.images), *text]
        if message.role == "tool":
            chosen = next((one for one in waiting if one[1] == message.tool_name), waiting[0] if waiting else None)
            if chosen is not None:
                waiting.remove(chosen)
            call_id = message.tool_call_id or (chosen[0] if chosen else "call_0")
            found.append({"role": "tool", "tool_call_id": call_id, "content": content or ""})
            continue
        one: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            one["reasoning_content"] = message.thinking
        for call in message.tool_calls or ():
            num_calls += 1
            arguments = call.function.arguments or {}
            text_arguments = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
            call_id = call.id or f"call_{num_calls}"
            waiting.append((call_id, call.function.name))
            function = {"name": call.function.name, "arguments": text_arguments}
            one.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        found.append(one)
    return found


def _image_part(image: str) -> dict[str, Any]:
    kind = next((kind for begin, kind in _IMAGE_TYPES.items() if image.startswith(begin)), "png")
    url = image if image.startswith("data:") else f"data:image/{kind};base64,{image}"
    return {"type": "image_url", "image_url": {"url": url}}


def _embedding(body: _Request) -> dict[str, Any]:
    if isinstance(body, _Embeddings):
        return {"input": body.prompt or "", "truncate_prompt_tokens": -1}
    assert isinstance(body, _Embed)
    fields: dict[str, Any] = {"input": body.input}
    if body.truncate is not False:
        fields["truncate_prompt_tokens"] = -1
    if body.dimensions:
        fields["dimensions"] = body.dimensions
    return fields
