"""A conversation as the text that the model continues, through the tokenizer's chat template."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from octavo.entrypoints.openai.protocol import ChatCompletionRequest, ChatMessage
from octavo.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def render_chat(tokenizer: PreTrainedTokenizerFast, body: ChatCompletionRequest) -> str:
    """The prompt of a chat request. Raises `RequestError` when there is no template or the template refuses."""
    template = tokenizer.chat_template
    if not template:
        raise RequestError(
            "This model has no chat template: start the server with --chat-template FILE, or use /v1/completions.",
            param="messages",
        )
    options = dict(body.chat_template_kwargs or {})
    reserved = options.keys() & (inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"kwargs"})
    if reserved:
        raise RequestError(
            f"chat_template_kwargs must not set {', '.join(sorted(reserved))}.", param="chat_template_kwargs"
        )
    # OpenAI's "developer" is what models know as "system"; a template that knows it by name gets it as it is.
    knows_developer = "developer" in str(template)
    messages = [_as_dict(message, knows_developer=knows_developer) for message in body.messages]
    continues = bool(body.continue_final_message)
    try:
        prompt = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            **options,
        )
        prompt.encode()
    except Exception as error:  # the template is the model's program, run on the client's data
        lines = str(error).splitlines() or [type(error).__name__]
        raise RequestError(f"The chat template refuses these messages: {lines[0]}", param="messages") from error
    return str(prompt)


def _as_dict(message: ChatMessage, *, knows_developer: bool) -> dict[str, Any]:
    result = message.model_dump(exclude_none=True)
    if message.role == "developer" and not knows_developer:
        result["role"] = "system"
    return result
