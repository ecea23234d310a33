"""Reads pictures, videos and sounds in conversations: parts of messages become media, and templates get placeholders
for them. `LLM` and the server call it.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from octavo.errors import RequestError
from octavo.media_kinds import AUDIO, IMAGE, KINDS, VIDEO, SentEmbeddings, SentMedium, checked_uuid

# Types of parts, with an example of each.
MEDIA_PARTS = {
    "image_url": '{"type": "image_url", "image_url": {"url": "data:..."}}',
    "video_url": '{"type": "video_url", "video_url": {"url": "data:..."}}',
    "audio_url": '{"type": "audio_url", "audio_url": {"url": "data:..."}}',
    "input_audio": '{"type": "input_audio", "input_audio": {"data": "base64 ...", "format": "wav"}}',
    "image_embeds": '{"type": "image_embeds", "image_embeds": "base64 ..."}',
    "audio_embeds": '{"type": "audio_embeds", "audio_embeds": "base64 ..."}',
    "video_embeds": '{"type": "video_embeds", "video_embeds": {"video_embeds": "base64 ...", "video_grid_thw": [...]}}',
}
_VALUE_PARTS = {"image_pil": '{"type": "image_pil", "image_pil": PIL.Image}'}  # only from scripts
_KIND_OF = {
    **{kind.part: kind for kind in KINDS.values()},
    **{"input_audio": AUDIO, "image_pil": IMAGE, "image_embeds": IMAGE, "audio_embeds": AUDIO},
    "video_embeds": VIDEO,
}
SoundFormat = Literal["wav", "mp3", "flac", "ogg"]
EMBEDS_PART = '{"type": "prompt_embeds", "data": "base64 ..."}'  # embeddings in place of a text
# Templates get this text in place of embeddings. It is random and secret, so no message can contain it.
_EMBEDS_TEXT = f"[prompt_embeds {secrets.token_hex(16)}]"


def read_part(part: Mapping[str, Any]) -> SentMedium:
    """Return the medium of a part whose type is in `MEDIA_PARTS`. A file in base64 becomes a data: URL. Raises
    `ValueError` with a text about the part, and `RequestError`."""
    kind = part["type"]
    if others := set(part) - {"type", kind, "uuid"}:
        raise ValueError(f"has a part with {', '.join(sorted(map(str, others)))}, which is not built yet")
    uuid, given = checked_uuid(part.get("uuid")), part.get(kind)
    try:
        if uuid is not None and (given is None or given == {}):
            return SentMedium(_KIND_OF[kind], None, uuid)
        return SentMedium(_KIND_OF[kind], _value_of(kind, given), uuid)
    except _WrongShape as error:
        raise ValueError(f"has a part that is not like {error}") from None


class _WrongShape(Exception):
    """A part has the wrong form. The text shows the right form."""


def _value_of(kind: str, given: object) -> Any:
    if kind in _VALUE_PARTS:
        if given is None or isinstance(given, str):
            raise _WrongShape(_VALUE_PARTS[kind])
        return given
    if kind == "input_audio":
        if not isinstance(given, Mapping) or set(given) != {"data", "format"} or not isinstance(given["data"], str):
            raise _WrongShape(MEDIA_PARTS[kind])
        if given["format"] not in get_args(SoundFormat):
            raise _WrongShape(f"{MEDIA_PARTS[kind]}, with the format {', '.join(get_args(SoundFormat))}")
        return f"data:audio/{given['format']};base64,{given['data']}"
    if kind.endswith("_embeds"):
        if not isinstance(given, str | Mapping):
            raise _WrongShape(MEDIA_PARTS[kind])
        return SentEmbeddings(given)
    known = {"url", "detail"} if kind == "image_url" else {"url"}  # `detail` has no effect: models have one size
    if isinstance(given, Mapping) and not set(given) - known:
        given = given.get("url")
    if not isinstance(given, str):
        raise _WrongShape(MEDIA_PARTS[kind])
    return given


def as_part(medium: SentMedium) -> dict[str, Any]:
    """Return the part of a message for a medium that has been read."""
    return {"type": "medium", "medium": medium}


def as_sent(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part that has been read in the form of a request. Sounds in base64 have become URLs."""
    if (medium := _medium_in(part)) is None:
        return part
    given, kind = medium.given, medium.kind.part
    if isinstance(given, SentEmbeddings):
        given, kind = given.value, f"{medium.kind.name}_embeds"
    elif given is not None:
        given = {"url": given}
    return {"type": kind, kind: given} | ({} if medium.uuid is None else {"uuid": medium.uuid})


def media_of(contents: Sequence[object]) -> list[SentMedium]:
    """Return the media in the contents of messages, in order. The parts have been read."""
    return [
        medium
        for content in contents
        if isinstance(content, list)
        for part in content
        if (medium := _medium_in(part)) is not None
    ]


def _medium_in(part: object) -> SentMedium | None:
    found = part.get("medium") if isinstance(part, Mapping) else None
    return found if isinstance(found, SentMedium) else None


def is_embeds(part: object) -> bool:
    """Return whether a part of a message is embeddings in place of a text."""
    return isinstance(part, Mapping) and part.get("type") == "prompt_embeds"


def read_embeds(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checked part with embeddings. Raises `ValueError` with a text about the part."""
    if part.keys() != {"type", "data"} or part["data"] is None:
        raise ValueError(f"has a part that is not like {EMBEDS_PART}")
    return dict(part)


def embeds_of(contents: Sequence[object]) -> list[Any]:
    """Return the embeddings in the contents of messages, in order."""
    return [part["data"] for content in contents if isinstance(content, list) for part in content if is_embeds(part)]


def with_embeds(text: str, embeds: Sequence[Any]) -> dict[str, Any]:
    """Return the prompt of a rendered `text`, with the embeddings in their places. Raises `RequestError`."""
    texts = text.split(_EMBEDS_TEXT)
    if len(texts) != len(embeds) + 1:
        raise RequestError("the chat template does not have every part of type prompt_embeds once.", param="messages")
    return {"prompt_embeds": list(embeds), "prompt": texts}


def content_for_template(content: str | list[dict[str, Any]] | None) -> Any:
    """Return a message's content as templates expect it. Its parts have been read."""
    return [_for_template(part) for part in content] if isinstance(content, list) else content


def _for_template(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part as templates expect it. Templates of Qwen2-Audio look for a key, others for a type."""
    if is_embeds(part):
        return {"type": "text", "text": _EMBEDS_TEXT}
    if (medium := _medium_in(part)) is None:
        return part
    kind = medium.kind
    return {"type": kind.name, kind.name: ""} if kind is AUDIO else {"type": kind.name}


def read_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message of a script's conversation, with its media read. Raises `RequestError`."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            part = {"type": "text", **part}
        kind = part.get("type") if isinstance(part, Mapping) else None
        is_medium = isinstance(kind, str) and kind in MEDIA_PARTS | _VALUE_PARTS
        if is_medium:
            check_role(message.get("role"))
        try:
            if is_medium:
                part = as_part(read_part(part))
            elif is_embeds(part):
                part = read_embeds(part)
        except ValueError as error:
            raise RequestError(f"messages: the content {error}.", param="messages") from None
        parts.append(part)
    return {**message, "content": parts}


def message_for_template(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message as templates expect it. Its media have been read."""
    content = message.get("content")
    return {**message, "content": content_for_template(content)} if isinstance(content, list) else message


def check_role(role: object) -> None:
    """Raise `RequestError` for media in a message of a role that may not have any."""
    if role not in ("user", "tool"):
        raise RequestError("only messages of the user and of tools have pictures, videos or sounds.", param="messages")
