"""Pictures and sounds in conversations: the parts of messages that they are, what templates get in their place, and the
media themselves in order. For `LLM` and the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from octavo.errors import RequestError
from octavo.media_kinds import KINDS, MediaKind

# Types of parts, and how one of each looks.
MEDIA_PARTS = {
    "image_url": '{"type": "image_url", "image_url": {"url": "data:..."}}',
    "audio_url": '{"type": "audio_url", "audio_url": {"url": "data:..."}}',
    "input_audio": '{"type": "input_audio", "input_audio": {"data": "base64 ...", "format": "wav"}}',
}
_VALUE_PARTS = {"image_pil": '{"type": "image_pil", "image_pil": PIL.Image}'}  # of scripts
SoundFormat = Literal["wav", "mp3", "flac", "ogg"]
_BY_PART = {kind.part: kind for kind in KINDS.values()}


def url_of(kind: str, given: object) -> tuple[str, str]:
    """What a part of the type `kind` has, as that of a part with a URL, and the URL: a file in base64 becomes a data:
    URL. Raises `ValueError`, whose text is how such a part looks."""
    if kind == "input_audio":
        if not isinstance(given, Mapping) or set(given) != {"data", "format"} or not isinstance(given["data"], str):
            raise ValueError(MEDIA_PARTS[kind])
        if given["format"] not in get_args(SoundFormat):
            raise ValueError(f"{MEDIA_PARTS[kind]}, with the format {', '.join(get_args(SoundFormat))}")
        return "audio_url", f"data:audio/{given['format']};base64,{given['data']}"
    known = {"url", "detail"} if kind == "image_url" else {"url"}  # one size is all that models here know
    if isinstance(given, Mapping) and not set(given) - known:
        given = given.get("url")
    if not isinstance(given, str):
        raise ValueError(MEDIA_PARTS[kind])
    return kind, given


def urls_by_kind(contents: Sequence[object]) -> tuple[MediaKind | None, list[str]]:
    """The URLs of the media of messages whose parts have been checked, and what kind of media they are. Raises
    `RequestError` where they are of several, which no model here takes."""
    parts = [part for content in contents if not isinstance(content, str) for part in _media_of(content)]
    return one_kind({_BY_PART[part["type"]].name for part in parts}), [part[part["type"]]["url"] for part in parts]


def _media_of(content: Any) -> Iterator[dict[str, Any]]:
    return (part for part in content if part["type"] in _BY_PART)


def one_kind(names: set[str]) -> MediaKind | None:
    """The one kind of a conversation's media, if it has any. Raises `RequestError` for several."""
    if len(names) > 1:
        raise RequestError("a conversation has pictures or sounds; no model here takes both.", param="messages")
    return KINDS[names.pop()] if names else None


def for_template(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part as templates know it: those of Qwen2-Audio look for a key, others for a type."""
    if (kind := _BY_PART.get(part["type"])) is None:
        return part
    return {"type": kind.name, kind.name: ""} if kind.name == "audio" else {"type": kind.name}


def take_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], MediaKind | None, list[Any]]:
    """Of the conversation of a script: the messages as templates know them, and the media in order, URLs and values,
    and of what kind they are. Raises `RequestError`."""
    media: list[Any] = []
    names: set[str] = set()
    taken = [_without_media(message, names, media) for message in messages]
    return taken, one_kind(names), media


def _without_media(message: Mapping[str, Any], names: set[str], media: list[Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in MEDIA_PARTS | _VALUE_PARTS:
            parts.append(part)
            continue
        check_role(message.get("role"))
        try:
            name, found = _value_of(kind, part.get(kind))
        except ValueError as error:
            raise RequestError(f"messages have a part that is not like {error}.", param="messages") from None
        names.add(_BY_PART[name].name)
        media.append(found)
        parts.append(for_template({"type": name}))
    return {**message, "content": parts}


def _value_of(kind: str, given: object) -> tuple[str, Any]:
    if kind not in _VALUE_PARTS:
        return url_of(kind, given)
    if given is None or isinstance(given, str):
        raise ValueError(_VALUE_PARTS[kind])
    return "image_url", given


def check_role(role: object) -> None:
    """Raise `RequestError` where messages of a role have no media."""
    if role != "user":
        raise RequestError("only messages of the user have pictures or sounds.", param="messages")
