"""The base classes of request and response bodies, the types of request fields, and the list of fields that are not
built.

Types are checked strictly ("5" is no number). A field of either API that is not built yet is refused by name unless its
value asks for nothing.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import cache
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    model_validator,
)
from pydantic_core import CoreSchema
from typing_extensions import TypedDict

from octavo.entrypoints.chat.media_parts import MEDIA_PARTS, SoundFormat, as_part, is_embeds, read_embeds, read_part
from octavo.errors import RequestError

MAX_SESSION_LENGTH = 1024  # characters of a session_id
SESSION_PATTERN = r"^[!-.0-~]{1,200}$"  # printable ASCII without /: the id becomes a part of a path
ID_PATTERN = r"^[!-~]{1,200}$"  # printable ASCII: the id becomes a header and a part of other ids
_MAX_UNKNOWN = 100  # most unknown fields of an object
MAX_METADATA = 16  # most pairs of metadata with an object

# Fields of OpenAI's, vLLM's and SGLang's APIs that are not built, with the values that ask for nothing. null always
# does. Routers for SGLang and vLLM write some of them into every request.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "documents": ([],),
    "ebnf": (),
    "ec_transfer_params": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_decoding_backend": ("auto", "guidance"),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "lora_path": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "no_stop_trim": (False,),
    "prompt_cache_options": ({}, {"mode": "implicit"}, {"ttl": "30m"}, {"mode": "implicit", "ttl": "30m"}),
    "prompt_cache_retention": ("in_memory", "24h"),  # the cache itself decides how long
    "prompt_embeds": (),
    "regex": (),
    "repetition_detection": (),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_mm_kwargs": (True, False),  # for routes that only render
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_routed_experts": (False,),
    "rid": (),
    "routed_experts_prompt_start": (0,),
    "separate_reasoning": (True,),
    "service_tier": ("auto", "default"),
    "session_params": (),
    "stream_interval": (1,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "truncation_side": ("left",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
# For some of these fields, what to do instead.
_INSTEAD = {
    "ebnf": "use structured_outputs.grammar",
    "documents": 'chat_template_kwargs {"documents": [...]} gives them to the chat template',
    "function_call": "tool_choice takes its place",
    "functions": "tools takes functions",
    "guided_decoding_backend": "structured outputs are always made by llguidance",
    "logits_processors": "SamplingParams takes some, from Python",
    "lora_path": "model names the adapter",
    "media_io_kwargs": "--media-io-kwargs is the server's",
    "mm_processor_kwargs": "the model's own settings are taken",
    "prompt_embeds": "completions take them, and messages as parts of type prompt_embeds, with --enable-prompt-embeds",
    "regex": "use structured_outputs.regex",
    "repetition_detection": "frequency_penalty and repetition_penalty keep answers from repeating themselves",
    "rid": "X-Request-Id names a request",
    "stream_interval": "--stream-interval is the server's",
    "vllm_xargs": "nothing reads it",
}


def refuse_unbuilt(
    data: Any, built: Container[str] = (), unbuilt: Mapping[str, tuple[Any, ...]] = _NOT_BUILT, within: str = ""
) -> Any:
    """Return a request body without the fields of `unbuilt`, except those in `built`, which this route has. Raises
    `RequestError` for the first such field whose value asks for something. If `data` is a part of a body, `within` is
    the prefix of its fields' names."""
    if not isinstance(data, dict) or data.keys().isdisjoint(unbuilt):
        return data
    found = [name for name in data if name in unbuilt and name not in built]
    for name in found:
        value = data[name]
        if isinstance(value, dict):
            value = {key: one for key, one in value.items() if one is not None}
        if value is not None and not any(type(value) is type(idle) and value == idle for idle in unbuilt[name]):
            said = f"is not a field here: {_INSTEAD[name]}" if name in _INSTEAD else "is not built yet; leave it out"
            raise RequestError(f"{within}{name} {said}.", param=within + name)
    return {name: value for name, value in data.items() if name not in found} if found else data


class RequestBody(BaseModel):
    """A request's body. Unknown fields are refused unless they are null: newer clients write null for what they do not
    ask for."""

    # Pydantic builds the validator with the first body of a class, not while the server starts.
    model_config = ConfigDict(strict=True, extra="forbid", defer_build=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _end_at_first_error(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _leave_out_unknown_nulls(cls, data: Any) -> Any:
        """Refuse an object of so many unknown fields that naming or overlooking them would take long."""
        if not isinstance(data, dict) or data.keys() <= (known := _names_of(cls)):
            return data
        if len(data) > (most := len(known) + _MAX_UNKNOWN):
            raise ValueError(f"should have at most {most} fields, not {len(data)}")
        return {name: value for name, value in data.items() if value is not None or name in known}


@cache
def _names_of(body: type[RequestBody]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in body.model_fields.items())


_OF_QUERIES_AND_FORMS = ("after", "before", "file", "limit", "order", "purpose")


def is_field(name: str) -> bool:
    """Return whether bodies, queries or forms have a field of this name. All other names are a client's own."""
    classes = [RequestBody]
    for one in classes:  # grows
        if name in one.__annotations__:
            return True
        classes += one.__subclasses__()
    return name in _OF_QUERIES_AND_FORMS


def _end_at_first_error(schema: object) -> None:
    """Make lists and objects fail at their first wrong item: collecting 100,000 errors would take a second."""
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ():
        _end_at_first_error(part)
    if isinstance(schema, dict) and schema.get("type") in ("list", "dict"):
        schema["fail_fast"] = True


class ResponseModel(BaseModel):
    """A response's body."""

    # Pydantic builds the serializer with the first object of a class, not while the server starts.
    model_config = ConfigDict(defer_build=True)


def described(meaning: str, *, default: Any = None, **limits: float) -> Any:
    """Return an optional field of a request body, with its meaning. `limits` (`minimum`, `maximum`) only go into the
    description: `SamplingParams` checks them."""

    def add_limits(schema: dict[str, Any]) -> None:
        for kind in schema.get("anyOf", [schema]):
            if kind.get("type") in ("integer", "number"):
                kind.update(limits)

    return Field(default, description=meaning, json_schema_extra=add_limits)


def check_text(text: str) -> str:
    """Return the text. Raises `ValueError` if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("should be valid Unicode, without lone surrogates") from None
    return text


def _check_json(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object that can be written as JSON again. Raises `ValueError`."""
    try:
        msgspec.json.encode(value)
    except UnicodeEncodeError:
        raise ValueError("should have valid Unicode, without lone surrogates") from None
    return value


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, str | list):
        return [value] if isinstance(value, str) else value
    raise ValueError("should be a string or a list of strings")


def _whole(value: Any) -> Any:
    """Turn 16.0 into 16. JSON Schema calls 16.0 an integer, and so do clients whose language has one kind of number."""
    return int(value) if type(value) is float and value.is_integer() else value


# An integer of up to 64 bits, as the wire and the arrays have.
Int = Annotated[int, Field(ge=-(2**63), lt=2**64), BeforeValidator(_whole)]
Priority = Annotated[Int, Field(ge=-(2**31), lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, AfterValidator(check_text)]
Metadata = Annotated[dict[Text, Text], Field(max_length=MAX_METADATA)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_check_json)]  # of an answer, too
Texts = Annotated[list[Text], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]
Id = Annotated[str, Field(pattern=ID_PATTERN)]


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)


def _check_prompt(value: Any) -> list[str | list[int]]:
    """Turn the API's four forms of prompts into a list of prompts, each a text or token ids. Raises `ValueError`."""
    prompts = [value] if isinstance(value, str) or (value and _is_token_ids(value)) else value
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) or _is_token_ids(prompt) for prompt in prompts):
        raise ValueError("should be a string, a list of token ids, or a list of strings or of lists of token ids")
    if not prompts:
        raise ValueError("should not be empty")
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text(prompt)
    return prompts


_TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(
        _check_prompt,
        json_schema_input_type=str
        | Annotated[list[str], Field(min_length=1)]
        | _TokenIds
        | Annotated[list[_TokenIds], Field(min_length=1)],
    ),
]


def _check_one_prompt(value: Any) -> str | list[int]:
    if isinstance(value, str):
        return check_text(value)
    if not _is_token_ids(value):
        raise ValueError("should be a string or a list of token ids")
    if not value:
        raise ValueError("should not be empty")
    return list(value)


Prompt = Annotated[str | list[int], PlainValidator(_check_one_prompt, json_schema_input_type=str | _TokenIds)]


def _check_content(value: Any) -> str:
    """Return a text, or the texts of a list of parts, joined by line breaks as in vLLM. Raises `ValueError`."""
    if isinstance(value, str):
        return check_text(value)
    if not isinstance(value, list):
        raise ValueError("should be a string or a list of parts of type text")
    return "\n".join(map(_check_text_part, value))


_PARTS = f"text, {', '.join(MEDIA_PARTS)} and prompt_embeds are"
_TEXT_PARTS_OF_RESPONSES = ("input_text", "output_text")


def _check_text_part(part: Any, built: str = "only text is") -> str:
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return check_text(part["refusal"])
    if isinstance(kind, str) and kind != "text":
        if kind in _TEXT_PARTS_OF_RESPONSES:
            raise ValueError(
                f"has a part of type {kind!r}, which belongs to Responses; here a text has the type 'text'"
            )
        raise ValueError(f"has a part of type {kind!r:.60}, which is not built yet; {built}")
    if kind is None or not isinstance(part.get("text"), str):
        raise ValueError('should be a string or a list of parts like {"type": "text", "text": "..."}')
    return check_text(part["text"])


def _check_message_content(value: Any) -> str | list[dict[str, Any]] | None:
    """Return a text, or a list of parts in which media and embeddings have been read. Texts stay apart, because the
    chat template decides whether to join them. Raises `ValueError`."""
    if value is None or isinstance(value, str):
        return value and check_text(value)
    if not isinstance(value, list):
        raise ValueError("should be a string or a list of parts")
    return [_read_content_part(part) for part in value] or ""


def _read_content_part(part: Any) -> dict[str, Any]:
    if is_embeds(part):
        read = read_embeds(part)
        if not isinstance(read["data"], str):
            raise ValueError("has a part of type prompt_embeds whose data is no string")
        return read
    return as_part(read_part(part)) if _is_medium(part) else {"type": "text", "text": _check_text_part(part, _PARTS)}


def _is_medium(part: object) -> bool:
    return isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind in MEDIA_PARTS


# Types of parts for the API's description; `read_part` checks parts.


class TextPart(TypedDict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(TypedDict):
    """A refusal by the assistant instead of an answer. It counts as text."""

    type: Literal["refusal"]
    refusal: str


Uuid = Annotated[
    str,
    Field(
        min_length=1,
        max_length=256,
        description="A name for the medium. A later part with this name and no medium means the same one.",
    ),
]


class _NamedPart(TypedDict):
    uuid: NotRequired[Uuid | None]


class ImageUrl(TypedDict):
    """A picture, as a data: URL of a PNG, JPEG, WebP or GIF file, or the address of one."""

    url: str
    detail: NotRequired[str | None]


class ImagePart(_NamedPart):
    """A picture in a message."""

    type: Literal["image_url"]
    image_url: NotRequired[ImageUrl | str | None]


class MediaUrl(TypedDict):
    """A video or a sound, as a data: URL or the address of a file: mp4, mov, webm or mkv; wav, mp3, flac or ogg."""

    url: str


class VideoPart(_NamedPart):
    """A video in a message."""

    type: Literal["video_url"]
    video_url: NotRequired[MediaUrl | str | None]


class AudioUrlPart(_NamedPart):
    """A sound in a message."""

    type: Literal["audio_url"]
    audio_url: NotRequired[MediaUrl | str | None]


class InputAudio(TypedDict):
    """A sound's file in base64."""

    data: str
    format: SoundFormat


class InputAudioPart(_NamedPart):
    """A sound in a message, in OpenAI's form."""

    type: Literal["input_audio"]
    input_audio: NotRequired[InputAudio | None]


class ImageEmbeds(TypedDict):
    """Rows of a tower in base64, and their numbers of patches in time, height and width."""

    image_embeds: str
    image_grid_thw: NotRequired[str | list[int] | None]


class ImageEmbedsPart(_NamedPart):
    """A tower's output for a picture, instead of the picture: a tensor [tokens, hidden_size] as `torch.save` or
    safetensors write it."""

    type: Literal["image_embeds"]
    image_embeds: NotRequired[str | ImageEmbeds | None]


class AudioEmbedsPart(_NamedPart):
    """A tower's output for a sound, instead of the sound."""

    type: Literal["audio_embeds"]
    audio_embeds: NotRequired[str | None]


class VideoEmbeds(TypedDict):
    """Rows of a tower in base64, their numbers of patches in time, height and width, and the places of the frames in
    the video."""

    video_embeds: str
    video_grid_thw: str | list[int]
    fps: NotRequired[float | None]
    frames_indices: NotRequired[list[int] | None]
    total_num_frames: NotRequired[int | None]
    second_per_grid_ts: NotRequired[float | list[float] | None]


class VideoEmbedsPart(_NamedPart):
    """A tower's output for a video, instead of the video."""

    type: Literal["video_embeds"]
    video_embeds: NotRequired[VideoEmbeds | None]


class PromptEmbedsPart(TypedDict):
    """Embeddings instead of a text, with --enable-prompt-embeds: a tensor [tokens, hidden_size] in base64."""

    type: Literal["prompt_embeds"]
    data: str


Content = Annotated[str, PlainValidator(_check_content, json_schema_input_type=str | list[TextPart])]
MessageContent = Annotated[
    str | list[dict[str, Any]] | None,
    PlainValidator(
        _check_message_content,
        json_schema_input_type=str
        | list[
            TextPart
            | RefusalPart
            | ImagePart
            | VideoPart
            | AudioUrlPart
            | InputAudioPart
            | ImageEmbedsPart
            | AudioEmbedsPart
            | VideoEmbedsPart
            | PromptEmbedsPart
        ],
    ),
]
