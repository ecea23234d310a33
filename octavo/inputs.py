"""The forms of a prompt besides plain text, as types of dictionaries."""

from __future__ import annotations

from typing import Any, NotRequired, TypeAlias, TypedDict


class TextPrompt(TypedDict):
    """A text, which the tokenizer cuts."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]  # {"image": PIL.Image, or a list of them}
    multi_modal_uuids: NotRequired[dict[str, Any]]  # {"image": its name for later prompts, or a list of such}


class TokensPrompt(TypedDict):
    """Token ids; `prompt` is what `RequestOutput.prompt` shows."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, Any]]


PromptType: TypeAlias = str | list[int] | TextPrompt | TokensPrompt
"""What `LLM.generate` takes as a prompt: token ids may stand for themselves."""
