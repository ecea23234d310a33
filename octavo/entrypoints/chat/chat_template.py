"""Renders a conversation with the tokenizer's chat template as the text that the model continues. `LLM` and the server
call it.

A prompt has one format of calls. If the template cannot render tools or calls, this module renders them as text: tools
in words, and calls in the model's format, or Hermes' if it is unknown. Results of calls then become messages of the
user, the only role that every template has.

`_adapt_messages` changes the messages by the template's traits. Then three layers render them, and change more only if
the template refuses: `render_restated`, within it `_rendered_with_developers`, within it `_rendered_with_nulls`. They
catch `TemplateRefusalError` alone, which only an error around the template's own rendering becomes.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from octavo.call_arguments import read_arguments
from octavo.entrypoints.chat.restatements import (
    Messages,
    TemplateRefusalError,
    Tools,
    render_restated,
    with_single_calls,
)
from octavo.entrypoints.chat.template_traits import TemplateTraits, template_traits
from octavo.entrypoints.chat.tools.call_ids import short_id, with_counted_ids
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
    """Import Jinja, compile the model's own template and find its traits, so that the first chat need not wait for
    them."""
    with suppress(Exception):  # a wrong template fails chats, not the server
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
    """Return the prompt of a conversation. `chat_template`, a template or the name of one of the model's, replaces the
    model's own. `template_options` are variables for the template. The template describes `tools`, in OpenAI's form; if
    it does not, the system message describes them, or the user's first message if the template takes no system message.
    If the template does not write calls, they are written in `tool_format`, or in the recognised format.
    `content_format` says whether the template gets texts as they are ("string") or as lists of one part ("openai");
    "auto" follows the template. Parts other than text become texts of `placeholders` if the template does not know
    their type.

    Raises `RequestError` if there is no template or the template refuses the messages.
    """
    if not (chat_template or tokenizer.chat_template):
        raise RequestError(
            "This model has no chat template: give one (--chat-template FILE, or chat_template of LLM.chat), or send "
            "a text as prompt or input in place of messages.",
            param="messages",
        )
    try:
        template = tokenizer.get_chat_template(chat_template, tools or None)
        compile_template(template)
    except ValueError as error:
        raise RequestError(str(error), param="messages") from None
    except Exception as error:  # an exception of Jinja, which is imported with the first template
        param = "chat_template" if chat_template else None  # the model's own template is no field of the request
        raise RequestError(f"The chat template is not valid: {error}", param=param) from None
    options = dict(template_options or {})
    parameters = _parameters(type(tokenizer).apply_chat_template)
    if reserved := options.keys() & parameters:
        raise RequestError(
            f"chat_template_kwargs must not set {', '.join(sorted(reserved))}.", param="chat_template_kwargs"
        )
    if "keeps_null_content" in parameters:  # tokenizers of `transformers` omit null contents
        options["keeps_null_content"] = True
    traits = template_traits(tokenizer, template)
    conversation, tools = _adapt_messages(
        messages, tools, traits, template, content_format=content_format, placeholders=placeholders,
        tool_format=tool_format, model_tool_format=partial(_model_tool_format, tokenizer),
    )  # fmt: skip

    def apply_template(tools: Tools, conversation: Messages) -> str:
        described = None if tools is None else [dict(tool) for tool in tools]
        try:
            prompt = tokenizer.apply_chat_template(
                conversation,
                tools=described,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **options,
            )
            prompt.encode()
        except Exception as error:  # the template is a program of the model: it may raise anything
            raise TemplateRefusalError from error
        return str(prompt)

    def render_with_fallbacks(tools: Tools, conversation: Messages) -> str:
        knows_role = "developer" in template
        return _rendered_with_developers(partial(apply_template, tools), conversation, knows_role=knows_role)

    as_text = traits.takes_text_arguments
    try:
        return render_restated(render_with_fallbacks, tools or None, conversation, takes_text_arguments=as_text)
    except TemplateRefusalError as refusal:
        cause = refusal.__cause__
        lines = str(cause).splitlines() or [type(cause).__name__]
        raise RequestError(f"The chat template refuses these messages: {lines[0]}", param="messages") from cause


def _adapt_messages(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    traits: TemplateTraits,
    template: str,
    *,
    content_format: str,
    placeholders: Mapping[str, str] | None,
    tool_format: ToolFormat | None,
    model_tool_format: Callable[[], ToolFormat | None],
) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]] | None]:
    """Return the messages as the template takes them, and the tools that it is to describe. The order of the steps
    matters. `model_tool_format` finds the format of the model if `tool_format` is None."""
    # 1. All messages get the usual fields, because each later step reads the calls and the contents.
    conversation = [_normalised(message, as_text=traits.takes_text_arguments) for message in messages]
    # 2. Ids get the form that the template or the model's format of calls shows. Ids also appear in tool results, so
    #    both change before results become texts (8).
    if traits.needs_short_ids:
        conversation = [_with_short_ids(message) for message in conversation]
    if traits.needs_counted_ids or (tool_format is not None and tool_format.counts_calls):
        conversation = with_counted_ids(conversation)
    # 3. Media without placeholders are refused before any step adds parts of its own.
    has_parts = any(isinstance(message.get("content"), list) for message in conversation)
    if has_parts and placeholders is None and (types := _other_part_types(conversation)):
        raise RequestError(
            f"parts of the type {', '.join(sorted(types))} are not supported here. Images: chat completions, "
            "Responses, Messages, LLM.chat. Audio: the same without Messages. Videos: chat completions, LLM.chat.",
            param="messages",
        )
    # 4. An empty text beside calls becomes null where the template writes calls only beside a null: then it loses no
    #    calls, and step 6 leaves them.
    if traits.writes_calls and not traits.renders_calls_with_empty_content:
        conversation = [
            {**message, "content": message.get("content") or None} if message.get("tool_calls") else message
            for message in conversation
        ]
    # 5. Tools that the template does not describe are described in a message, in the format of step 6.
    loses_calls = any(_loses_calls(message, traits) for message in conversation if "tool_calls" in message)
    if tool_format is None and ((tools and not traits.describes_tools) or loses_calls):
        tool_format = model_tool_format()
    if tools and not traits.describes_tools:
        conversation, tools = _describe_tools(conversation, tools, tool_format, traits), None
    # 6. Calls that the template does not write become text.
    if loses_calls:
        conversation = [
            _with_written_calls(message, tool_format) if _loses_calls(message, traits) else message
            for message in conversation
        ]
    # 7. The calls that are left get a message each where the template writes only the first of a message. Each result
    #    comes after its call, so this is done while results have their role.
    if traits.loses_second_call:
        conversation = [dict(message) for message in with_single_calls(conversation)]
    # 8. Results become messages of the user where the template does not write results.
    has_results = "tool" in [message.get("role") for message in conversation]
    if has_results and not (traits.writes_results and (traits.describes_tools or traits.writes_calls)):
        conversation = _tool_results_as_user_messages(conversation)
    # 9. Media become their placeholders where the template does not read their parts. Results (8) may have media.
    if has_parts and placeholders is not None:
        reads_parts = content_format != "string" and _template_mentions_part_types(template, conversation)
        if not reads_parts:
            conversation = [_with_placeholders(message, placeholders) for message in conversation]
    # 10. At last contents become lists of parts, or texts, as each role takes them: the steps before add to both.
    if content_format == "openai" or (content_format == "auto" and traits.takes_only_parts):
        conversation = [_with_parts(message) for message in conversation]
    elif has_parts:
        takes_parts = frozenset[str]() if content_format == "string" else traits.parts_of
        conversation = [
            message
            if ("calls" if message.get("tool_calls") else _usual_role(message)) in takes_parts
            else _with_text(message)
            for message in conversation
        ]
    return conversation, tools


def _model_tool_format(tokenizer: ModelTokenizer) -> ToolFormat | None:
    from octavo.entrypoints.chat.tools.format_detection import model_formats  # not needed by chats without tools

    return model_formats(tokenizer).tools


@cache
def _parameters(apply: Callable[..., Any]) -> frozenset[str]:
    """Return the parameters of `apply_chat_template` that are not variables of the template."""
    return frozenset(inspect.signature(apply).parameters) - {"kwargs", "self"}


def _usual_role(message: Mapping[str, Any]) -> object:
    """Return the role of a message. Models call OpenAI's "developer" role "system"."""
    return "system" if message.get("role") == "developer" else message.get("role")


def _rendered_with_developers(
    render: Callable[[Sequence[Mapping[str, Any]]], str], conversation: Sequence[Mapping[str, Any]], *, knows_role: bool
) -> str:
    """Render a conversation with "system" in the place of the role "developer", unless the template `knows_role`. If
    the template refuses or leaves out such a message, retry with the other role; keep it only if the text appears."""
    developers = [message for message in conversation if message.get("role") == "developer"]
    if not developers:
        return _rendered_with_nulls(render, conversation)
    renamed = [{**message, "role": _usual_role(message)} for message in conversation]
    first, second = (conversation, renamed) if knows_role else (renamed, conversation)
    prompt, refusal = "", None
    try:
        prompt = _rendered_with_nulls(render, first)
    except TemplateRefusalError as error:
        refusal = error
    if refusal is not None or not _writes(prompt, developers):
        with suppress(TemplateRefusalError):
            other = _rendered_with_nulls(render, second)
            if _writes(other, developers):
                return other
    if refusal is not None:
        raise refusal
    return prompt


def _writes(prompt: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a prompt has all texts of `messages`."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    texts += [content for content in contents if isinstance(content, str)]
    return all(text.strip() in prompt for text in texts if isinstance(text, str))


def _rendered_with_nulls(
    render: Callable[[Sequence[Mapping[str, Any]]], str], conversation: Sequence[Mapping[str, Any]]
) -> str:
    """Render a conversation whose contents may be null. If the template fails because of a null, or writes "None", it
    gets an empty text instead."""
    contents = [message.get("content", "") for message in conversation]
    if None not in contents:
        return render(conversation)
    with_texts = [
        {**message, "content": ""} if content is None else message
        for message, content in zip(conversation, contents, strict=True)
    ]
    try:
        prompt = render(conversation)
    except TemplateRefusalError:
        return render(with_texts)
    if "None" in prompt:
        with suppress(TemplateRefusalError):
            other = render(with_texts)
            # Both must have the same calls: some templates write calls only beside a null.
            return other if _without_nones(other) == _without_nones(prompt) else prompt
    return prompt


def _without_nones(prompt: str) -> str:
    return "".join(prompt.replace("None", "").split())


def _with_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(message)


def _other_part_types(messages: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the types of the parts of `messages` that are no texts."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return {str(part.get("type", "text")) for part in parts if isinstance(part, Mapping)} - {"text"}


def _template_mentions_part_types(template: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the template names the types of all parts of `messages`."""
    return all(f"'{one}'" in template or f'"{one}"' in template for one in _other_part_types(messages))


def _with_placeholders(message: Mapping[str, Any], placeholders: Mapping[str, str]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    kinds = [part.get("type", "text") for part in content]
    texts = [part["text"] if kind == "text" else placeholders[kind] for kind, part in zip(kinds, content, strict=True)]
    return {**message, "content": "\n".join(texts)}


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in which a content of text parts only is joined into one text."""
    content = message.get("content")
    if isinstance(content, list) and content and not _other_part_types([message]):
        return {**message, "content": "\n".join(str(part.get("text", "")) for part in content)}
    return dict(message)


def _normalised(message: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Return a message as templates expect it: no empty list of calls, a content that is null and not absent, and the
    arguments of calls as objects, or as JSON text."""
    result = dict(message)
    if result.get("role") == "assistant":
        result.setdefault("content", None)
    if not result.get("tool_calls"):
        result.pop("tool_calls", None)
        return result
    result["tool_calls"] = [{**call, "function": dict(call.get("function") or {})} for call in result["tool_calls"]]
    for call in result["tool_calls"]:
        arguments = read_arguments(call["function"].get("arguments"))
        is_object = isinstance(arguments, Mapping)
        call["function"]["arguments"] = (
            json.dumps(arguments, ensure_ascii=False) if as_text and is_object else arguments
        )
    return result


def _with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(message)
    if calls := result.get("tool_calls"):
        result["tool_calls"] = [{**call, "id": short_id(call.get("id"))} for call in calls]
    if result.get("role") == "tool":
        result["tool_call_id"] = short_id(result.get("tool_call_id"))
    return result


def _describe_tools(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], form: ToolFormat | None, traits: TemplateTraits
) -> list[dict[str, Any]]:
    """Return `messages` with the description of `tools` in the system message, or in the user's first message if the
    template takes no system message."""
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


def _loses_calls(message: Mapping[str, Any], traits: TemplateTraits) -> bool:
    """Return whether a message has calls that the template does not write. Some write none beside a text."""
    is_written = traits.writes_calls_beside_text if message.get("content") else traits.writes_calls
    return bool(message.get("tool_calls")) and not is_written


def _with_written_calls(message: Mapping[str, Any], form: ToolFormat | None) -> dict[str, Any]:
    """Return `message` with its calls as text, in the model's format."""
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


def _tool_results_as_user_messages(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation in which adjacent results of calls are one message of the user, with the user's own text if
    it follows: templates without a role for results may want an answer to each message of the user."""
    found, follows_result = list[tuple[dict[str, Any], list[Any]]](), False  # messages, each with its contents
    for message in conversation:
        one = _with_result_as_user(message)
        if follows_result and one.get("role") == "user":
            found[-1][1].append(one.get("content") or "")
        else:
            found.append((one, [one.get("content")]))
        follows_result = message.get("role") == "tool"
    return [one if len(contents) == 1 else {**one, "content": _joined(contents)} for one, contents in found]


def _joined(contents: Sequence[Any]) -> Any:
    """Return the contents of several messages as one: lines, or a list of parts if a content is one."""
    texts = list(takewhile(lambda content: isinstance(content, str), contents))
    if len(texts) == len(contents):
        return "\n".join(texts)
    contents = ["\n".join(texts), *contents[len(texts) :]] if texts else contents
    return [part for content in contents for part in _with_parts({"content": content})["content"]]


def _with_result_as_user(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return `message`; the result of a call becomes a message of the user."""
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
