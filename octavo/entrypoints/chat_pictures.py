"""Pictures in the conversations of scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import RequestError


def take_pictures(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """The messages with {"type": "image"} in the place of each picture, as templates know it, and the pictures in
    order: URLs and PIL.Images. Raises `RequestError`."""
    pictures: list[Any] = []
    return [_without_pictures(message, pictures) for message in messages], pictures


def _without_pictures(message: Mapping[str, Any], pictures: list[Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("image_url", "image_pil"):
            parts.append(part)
            continue
        if message.get("role") != "user":
            raise RequestError("only messages of the user have pictures.", param="messages")
        given = part.get(kind)
        if kind == "image_url" and isinstance(given, Mapping):
            given = given.get("url")
        if given is None or (kind == "image_url") != isinstance(given, str):
            raise RequestError(
                'a picture is {"type": "image_url", "image_url": {"url": "..."}} or {"type": "image_pil", "image_pil": '
                "PIL.Image}.",
                param="messages",
            )
        pictures.append(given)
        parts.append({"type": "image"})
    return {**message, "content": parts}
