"""Types of dictionaries for the forms of a prompt besides plain text."""

from typing import Any, NotRequired, TypeAlias, TypedDict


class TextPrompt(TypedDict):
    """A text, which is tokenized."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]  # {"image": PIL.Image, or a list of them}
    multi_modal_uuids: NotRequired[dict[str, Any]]  # {"image": its name for later prompts, or a list of names}


class TokensPrompt(TypedDict):
    """Token ids; `prompt` is what `RequestOutput.prompt` shows."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, Any]]


class EmbedsPrompt(TypedDict):
    """Embeddings [tokens, hidden_size] in place of tokens, with `enable_prompt_embeds`: a tensor, an array, or base64
    of a tensor file."""

    prompt_embeds: Any
    prompt: NotRequired[str]  # what `RequestOutput.prompt` shows
    cache_salt: NotRequired[str]


PromptType: TypeAlias = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
"""A prompt of `LLM.generate`: text, a list of token ids, or one of the dictionaries above."""
