"""Renders the messages of a request as its prompt text. `chat_run`, /tokenize and pooling call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.entrypoints.chat.chat_template import render_chat
from octavo.entrypoints.chat.media_parts import content_for_template, embeds_of
from octavo.entrypoints.openai.chat_messages import ChatMessage, Tool
from octavo.entrypoints.openai.request_bodies import TemplateRequest
from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.entrypoints.chat.tools.tool_formats import ToolFormat
    from octavo.loading.tokenizer import ModelTokenizer


def check_template_is_trusted(body: TemplateRequest, trusts_template: bool) -> None:
    """Raise `RequestError` if the request brings its own template and the server does not trust it. It must run
    before any code reads the template."""
    if body.chat_template is not None and not trusts_template:
        raise RequestError(
            "this server takes no chat_template from requests: start it with --trust-request-chat-template, or leave "
            "chat_template out.",
            param="chat_template",
        )


def render_messages(
    tokenizer: ModelTokenizer,
    body: TemplateRequest,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    options: Mapping[str, Any] | None = None,
    *,
    trusts_template: bool,
    generates: bool = True,
    content_format: str = "auto",
    placeholders: Mapping[str, str] | None = None,
    takes_embeds: bool = False,
    tool_format: ToolFormat | None = None,
) -> str:
    """Return the prompt text of `messages` and `tools`. `options` and the options of `body` go to the template; those
    of `body` win. The prompt ends with the generation prompt if the model `generates`, unless `body` says otherwise or
    continues the last message. A template that does not know a kind of media gets the kind's text from `placeholders`
    in its place. Raises `RequestError` for media without `placeholders`, for embeddings unless the caller
    `takes_embeds`, and for a template in `body` unless the caller `trusts_template`."""
    check_template_is_trusted(body, trusts_template)
    if not takes_embeds and embeds_of([message.content for message in messages]):
        raise RequestError(
            "parts of type prompt_embeds are supported only in chat completions and LLM.chat.", param="messages"
        )
    continues = bool(body.continue_final_message)
    adds_prompt = body.add_generation_prompt
    if adds_prompt is None:
        adds_prompt = generates and not continues
    return render_chat(
        tokenizer,
        [_template_message(message) for message in messages],
        chat_template=body.chat_template,
        add_generation_prompt=adds_prompt,
        continue_final_message=continues,
        template_options={**(options or {}), **(body.chat_template_kwargs or {})},
        tools=[tool.for_template() for tool in tools or ()],
        content_format=content_format,
        placeholders=placeholders,
        tool_format=tool_format,
    )


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message for the template: without null fields, and with `reasoning` renamed to `reasoning_content`."""
    fields = message.given_fields()
    fields.pop("content", None)
    if (reasoning := fields.pop("reasoning", None)) is not None:
        fields.setdefault("reasoning_content", reasoning)
    fields["content"] = content_for_template(message.content)
    return fields
