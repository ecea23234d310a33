"""A conversation as the text that the model continues, by the tokenizer's chat template. For `LLM` and the server.

A prompt has one format of calls. What a template does not write is written here in the model's format (Hermes' where
nobody knows another one): the description of tools, in words, and the calls of the conversation. Results of calls are
then messages of the user, the one role that every template has.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from octavo.entrypoints.chat.template_traits import TemplateTraits, template_traits
from octavo.errors import RequestError
from octavo.loading.jinja_template import compile_template

if TYPE_CHECKING:
    from octavo.entrypoints.chat.tools.tool_formats import ToolFormat
    from octavo.loading.tokenizer import ModelTokenizer

_INSTRUCTIONS = """You may call one or more functions to assist with the user query. You are provided with function \
signatures within <tools></tools> tags:
<tools>
{tools}
</tools>
"""
_HERMES_INSTRUCTIONS = """For each function call return a JSON object with the function's name and arguments within \
<tool_call></tool_call> tags:
<tool_call>
{"name": <function name>, "arguments": <arguments as a JSON object>}
</tool_call>"""


def compile_chat_template(tokenizer: ModelTokenizer) -> None:
    """Import Jinja, compile the model's own template and find out its traits, so that the first chat waits for none."""
    with suppress(Exception):  # a wrong template is the chats' error, not the server's
        template_traits(tokenizer, tokenizer.get_chat_template())


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
    tool_format: ToolFormat | None = None,
) -> str:
    """The prompt of a conversation. `chat_template`, a template or the name of one of the model's, takes the place of
    the model's own; `template_options` are variables that the template may read. `tools`, in OpenAI's form, are the
    template's to describe; if it does not, they are described in the system's message, or in the user's first one where
    the template takes no system's. Calls are written in `tool_format`, or in the one that is recognised, where the
    template does not write them. By `content_format` the template gets texts as they are ("string") or as lists of one
    part ("openai"); "auto" is what it reads. To a template that knows nothing of parts of their type, those that are
    not text are what `placeholders` has for it.

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
    parameters = _parameters(type(tokenizer).apply_chat_template)
    if reserved := options.keys() & parameters:
        raise RequestError(
            f"chat_template_kwargs must not set {', '.join(sorted(reserved))}.", param="chat_template_kwargs"
        )
    if "keeps_null_content" in parameters:  # the tokenizers of `transformers` leave a null out
        options["keeps_null_content"] = True
    traits = template_traits(tokenizer, template)
    conversation = [_normalised(message, as_text=traits.takes_text_arguments) for message in messages]
    if placeholders is None and any(_has_other_parts(message) for message in conversation):
        raise RequestError(
            "parts of messages other than text are not built here; chats, Responses, Messages and LLM.chat have "
            "pictures, and all but Messages sounds.",
            param="messages",
        )
    has_calls = any(message.get("tool_calls") for message in conversation)
    if tool_format is None and ((tools and not traits.describes_tools) or (has_calls and not traits.writes_calls)):
        from octavo.entrypoints.chat.tools.format_detection import model_formats  # chats without tools need none

        tool_format = model_formats(tokenizer).tools
    if tools and not traits.describes_tools:
        conversation, tools = _describe_tools(conversation, tools, tool_format, traits), None
    if not traits.writes_calls:
        conversation = [_with_written_calls(message, tool_format) for message in conversation]
    if not traits.writes_results or not (traits.describes_tools or traits.writes_calls):
        conversation = [_with_result_as_user(message) for message in conversation]
    # OpenAI's "developer" is what models know as "system"; a template that knows it by name gets it as it is.
    if "developer" not in template:
        for message in conversation:
            if message.get("role") == "developer":
                message["role"] = "system"
    if placeholders is not None and (content_format == "string" or not _knows(template, conversation)):
        conversation = [_with_placeholders(message, placeholders) for message in conversation]
    if content_format == "openai" or (content_format == "auto" and traits.takes_only_parts):
        conversation = [_with_parts(message) for message in conversation]
    elif content_format == "string":
        conversation = [_with_text(message) for message in conversation]
    else:
        conversation = [
            message if message.get("role") in traits.parts_of else _with_text(message) for message in conversation
        ]

    def render(conversation: Sequence[Mapping[str, Any]]) -> str:
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
        return str(prompt)

    try:
        return _rendered_with_nulls(render, conversation)
    except Exception as error:  # the template is the model's program, run on the caller's data
        lines = str(error).splitlines() or [type(error).__name__]
        raise RequestError(f"The chat template refuses these messages: {lines[0]}", param="messages") from error


@cache
def _parameters(apply: Callable[..., Any]) -> frozenset[str]:
    """The names that `apply_chat_template` has for something else than the template's variables."""
    return frozenset(inspect.signature(apply).parameters) - {"kwargs", "self"}


def _rendered_with_nulls(
    render: Callable[[Sequence[Mapping[str, Any]]], str], conversation: Sequence[Mapping[str, Any]]
) -> str:
    """What `render` makes of a conversation whose contents may be null. A template that fails because of one, or writes
    its name, gets an empty text."""
    if not any(_is_null(message) for message in conversation):
        return render(conversation)
    with_texts = [{**message, "content": ""} if _is_null(message) else message for message in conversation]
    try:
        prompt = render(conversation)
    except Exception:  # whatever the template's reason
        return render(with_texts)
    if "None" in prompt:
        with suppress(Exception):
            other = render(with_texts)
            return other if other.count("None") < prompt.count("None") else prompt
    return prompt


def _is_null(message: Mapping[str, Any]) -> bool:
    return message.get("content", "") is None


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


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content, if it is parts that are all text, is one text."""
    content = message.get("content")
    if isinstance(content, list) and content and not _has_other_parts(message):
        return {**message, "content": "\n".join(str(part.get("text", "")) for part in content)}
    return dict(message)


def _normalised(message: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """A message as templates expect it: without an empty list of calls, with a content that is null rather than absent,
    and with the arguments of calls as objects, or as JSON text."""
    result = dict(message)
    if result.get("role") == "assistant":
        result.setdefault("content", None)
    if not result.get("tool_calls"):
        result.pop("tool_calls", None)
        return result
    result["tool_calls"] = [{**call, "function": dict(call.get("function") or {})} for call in result["tool_calls"]]
    for call in result["tool_calls"]:
        arguments = _arguments(call["function"].get("arguments"))
        is_object = isinstance(arguments, Mapping)
        call["function"]["arguments"] = (
            json.dumps(arguments, ensure_ascii=False) if as_text and is_object else arguments
        )
    return result


def _arguments(sent: Any) -> Any:
    """The arguments of a call as an object; what is no object stays as it was sent."""
    if isinstance(sent, str):
        if not sent.strip():
            return {}
        with suppress(ValueError, RecursionError):
            value = json.loads(sent)
            return {} if value is None else value if isinstance(value, dict) else sent
    return {} if sent is None else sent


def _describe_tools(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], form: ToolFormat | None, traits: TemplateTraits
) -> list[dict[str, Any]]:
    """`messages` with the description of `tools` in the system's message, or in the user's first one where the template
    has no place for a system's."""
    from octavo.entrypoints.chat.tools.call_spelling import written_calls
    from octavo.entrypoints.chat.tools.tool_formats import HERMES

    text = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if form is None or form == HERMES:
        text += _HERMES_INSTRUCTIONS
    else:
        example = written_calls(form, [("function_name", {"argument_name": "value"})])
        text += f"To call a function, write its name and its arguments in this format:\n{example}"
    roles = [message.get("role") for message in messages]
    if roles[:1] in (["system"], ["developer"]):
        content = messages[0].get("content")
        if isinstance(content, list):
            content = [*content, {"type": "text", "text": f"\n\n{text}"}]
        else:
            content = f"{content or ''}\n\n{text}".lstrip()
        return [{**messages[0], "content": content}, *messages[1:]]
    if traits.takes_system:
        return [{"role": "system", "content": text}, *messages]
    if "user" not in roles:
        return [{"role": "user", "content": text}, *messages]
    first = roles.index("user")
    content = messages[first].get("content")
    if isinstance(content, list):
        content = [{"type": "text", "text": f"{text}\n\n"}, *content]
    else:
        content = f"{text}\n\n{content or ''}"
    return [*messages[:first], {**messages[first], "content": content}, *messages[first + 1 :]]


def _with_written_calls(message: Mapping[str, Any], form: ToolFormat | None) -> dict[str, Any]:
    """`message` with its calls as text, in the model's format."""
    from octavo.entrypoints.chat.tools.call_spelling import written_calls
    from octavo.entrypoints.chat.tools.tool_formats import HERMES

    result = {name: value for name, value in message.items() if name != "tool_calls"}
    if calls := message.get("tool_calls"):
        functions = [call["function"] for call in calls]
        text = written_calls(form or HERMES, [(one.get("name", ""), one.get("arguments")) for one in functions])
        content = message.get("content")
        if isinstance(content, list):
            result["content"] = [*content, {"type": "text", "text": f"\n{text}"}]
        else:
            result["content"] = f"{content}\n{text}" if content else text
    return result


def _with_result_as_user(message: Mapping[str, Any]) -> dict[str, Any]:
    """`message`, if it is a call's result, as one of the user."""
    if message.get("role") != "tool":
        return dict(message)
    result = {name: value for name, value in message.items() if name != "tool_call_id"} | {"role": "user"}
    content = message.get("content") or ""
    if isinstance(content, list):
        start, end = ({"type": "text", "text": text} for text in ("<tool_response>\n", "\n</tool_response>"))
        result["content"] = [start, *content, end]
    else:
        result["content"] = f"<tool_response>\n{content}\n</tool_response>"
    return result
