"""A conversation as the text that the model continues, by the tokenizer's chat template. For `LLM` and the server.

To templates that know nothing of tools, tools are described in words, in Hermes' format. Calls in the conversation are
then written as the model would have written them, and their results as messages of the user, the one role that every
template has.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError
from octavo.loading.jinja_template import compile_template

if TYPE_CHECKING:
    from octavo.loading.tokenizer import ModelTokenizer

_CONTENT = r"""\w+(?:\.content|\[["']content["']\])"""
_LOOP_OVER_CONTENT = re.compile(rf"\bfor\s+\w+\s+in\s+{_CONTENT}")
_ASKS_FOR_TEXT = re.compile(r"\bis\s+(?:not\s+)?(?:string|iterable|sequence|mapping)\b")

_INSTRUCTIONS = """You may call one or more functions to assist with the user query. You are provided with function \
signatures within <tools></tools> tags:
<tools>
{tools}
</tools>
For each function call return a JSON object with the function's name and arguments within <tool_call></tool_call> tags:
<tool_call>
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""


def compile_chat_template(tokenizer: ModelTokenizer) -> None:
    """Import Jinja and compile the model's own template, so that the first chat waits for neither."""
    with suppress(Exception):  # a wrong template is the chats' error, not the server's
        compile_template(tokenizer.get_chat_template())


def render_chat(
    tokenizer: ModelTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_options: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    content_format: str = "auto",
    placeholders: Mapping[str, str] | None = None,
) -> str:
    """The prompt of a conversation. `chat_template`, a template or the name of one of the model's, takes the place of
    the model's own; `template_options` are variables that the template may read. `tools`, in OpenAI's form, are the
    template's to describe; if it does not know of any, they are described in the system's message. By
    `content_format` the template gets texts as they are ("string") or as lists of one part ("openai"); "auto" is what
    it reads. To a template that knows nothing of parts of their type, those that are not text are what
    `placeholders` has for it.

    Raises `RequestError` when there is no template or the template refuses the messages.
    """
    if not (chat_template or tokenizer.chat_template):
        raise RequestError(
            "This model has no chat template: start the server with --chat-template FILE, or use completions.",
            param="messages",
        )
    try:
        template = tokenizer.get_chat_template(chat_template, tools or None)
        compile_template(template)
    except ValueError as error:
        raise RequestError(str(error), param="messages") from None
    except Exception as error:  # Jinja's own, which is imported with the first template
        param = "chat_template" if chat_template else None  # the model's own is no field of the request's
        raise RequestError(f"The chat template is not valid: {error}", param=param) from None
    options = dict(template_options or {})
    if reserved := options.keys() & _parameters(type(tokenizer).apply_chat_template):
        raise RequestError(
            f"chat_template_kwargs must not set {', '.join(sorted(reserved))}.", param="chat_template_kwargs"
        )
    conversation = [_with_objects(message) for message in messages]
    if placeholders is None and any(_has_other_parts(message) for message in conversation):
        raise RequestError(
            "parts of messages other than text are not built here; chats, Responses, Messages and LLM.chat have "
            "pictures, and all but Messages sounds.",
            param="messages",
        )
    if tools and "tools" not in template:
        conversation, tools = _describe_tools(conversation, tools), None
    if "tool_calls" not in template:
        conversation = [_without_tool_roles(message) for message in conversation]
    # OpenAI's "developer" is what models know as "system"; a template that knows it by name gets it as it is.
    if "developer" not in template:
        for message in conversation:
            if message.get("role") == "developer":
                message["role"] = "system"
    if placeholders is not None and (content_format == "string" or not _knows(template, conversation)):
        conversation = [_with_placeholders(message, placeholders) for message in conversation]
    if content_format == "openai" or (content_format == "auto" and _reads_parts_only(template)):
        conversation = [_with_parts(message) for message in conversation]
    try:
        prompt = tokenizer.apply_chat_template(
            conversation,
            tools=[dict(tool) for tool in tools] if tools else None,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **options,
        )
        prompt.encode()
    except Exception as error:  # the template is the model's program, run on the caller's data
        lines = str(error).splitlines() or [type(error).__name__]
        raise RequestError(f"The chat template refuses these messages: {lines[0]}", param="messages") from error
    return str(prompt)


@cache
def _parameters(apply: Callable[..., Any]) -> frozenset[str]:
    """The names that `apply_chat_template` has for something else than the template's variables."""
    return frozenset(inspect.signature(apply).parameters) - {"kwargs", "self"}


def _reads_parts_only(template: str) -> bool:
    """Whether it goes through a message's content as a list of parts, and does not ask whether it is one."""
    return _LOOP_OVER_CONTENT.search(template) is not None and not _ASKS_FOR_TEXT.search(template)


def _with_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(message)


def _has_other_parts(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get("type", "text") != "text" for part in content
    )


def _knows(template: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it reads the types of all parts of `messages`."""
    contents = [message.get("content") for message in messages]
    kinds = {part.get("type", "text") for content in contents if isinstance(content, list) for part in content}
    return all(f"'{kind}'" in template or f'"{kind}"' in template for kind in kinds - {"text"})


def _with_placeholders(message: Mapping[str, Any], placeholders: Mapping[str, str]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    kinds = [part.get("type", "text") for part in content]
    texts = [part["text"] if kind == "text" else placeholders[kind] for kind, part in zip(kinds, content, strict=True)]
    return {**message, "content": "\n".join(texts)}


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as objects, which is what templates expect, not as JSON text."""
    result = dict(message)
    if calls := message.get("tool_calls"):
        result["tool_calls"] = [{**call, "function": dict(call.get("function") or {})} for call in calls]
        for call in result["tool_calls"]:
            arguments = call["function"].get("arguments")
            if isinstance(arguments, str):
                with suppress(ValueError, RecursionError):
                    value = json.loads(arguments or "{}")
                    call["function"]["arguments"] = value if isinstance(value, dict) else arguments
    return result


def _describe_tools(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with the description of `tools` in the system's message."""
    text = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0].get("role") in ("system", "developer"):
        content = f"{messages[0].get('content') or ''}\n\n{text}".lstrip()
        return [{**messages[0], "content": content}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _without_tool_roles(message: Mapping[str, Any]) -> dict[str, Any]:
    """`message` with calls and their results as text."""
    result = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    if message.get("role") == "tool":
        result["role"] = "user"
        content = message.get("content") or ""
        if isinstance(content, list):
            start, end = ({"type": "text", "text": text} for text in ("<tool_response>\n", "\n</tool_response>"))
            result["content"] = [start, *content, end]
        else:
            result["content"] = f"<tool_response>\n{content}\n</tool_response>"
    elif calls := message.get("tool_calls"):
        texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
        content = message.get("content")
        lines = [*([content] if content else []), *(f"<tool_call>\n{text}\n</tool_call>" for text in texts)]
        result["content"] = "\n".join(lines)
    return result
