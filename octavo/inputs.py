"""The forms of a prompt besides plain text, as types of dictionaries."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A text, which the tokenizer cuts."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]  # {"image": PIL.Image, or a list of them}


class TokensPrompt(TypedDict):
    """Token ids; `prompt` is what `RequestOutput.prompt` shows."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
