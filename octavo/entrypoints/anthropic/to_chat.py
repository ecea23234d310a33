"""Turns a Messages request into a chat: turns become messages; blocks become content, reasoning and calls."""

import json
from collections.abc import Sequence
from typing import Any

from octavo.entrypoints.anthropic import messages_protocol
from octavo.entrypoints.chat.chat_run import make_chat
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest
from octavo.errors import RequestError
from octavo.field_names import FieldNames

# Names of the chat's fields in errors.
NAMES = FieldNames({
    "stop": "stop_sequences",
    "tools[].function.name": "tools[].name",
    "tools[].function.description": "tools[].description",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function.strict": "tools[].strict",
    "tool_choice.function.name": "tool_choice.name",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
})  # fmt: skip
_CLEAR_THINKING = "clear_thinking_20251015"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(body: messages_protocol.CountTokensRequest) -> ChatCompletionRequest:
    """Return the chat that `body` asks for, with a stream of one answer. Raises `RequestError`."""
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
        "stream": True,
        "chat_template_kwargs": body.chat_template_kwargs,
        "reuse_answers": body.reuse_answers,
    }
    if body.messages[-1].role == "assistant":
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    tools = _seen_tools(body)
    if tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description_for_model,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in tools
        ]
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
        if choice.type in ("auto", "none") and not tools:
            fields["tool_choice"] = None  # there are no tools to choose from
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    output = body.output_config
    if output is not None and output.format is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": output.format.schema_}}
    if body.thinking is not None and body.thinking.type == "disabled":
        fields |= {"reasoning_effort": "none", "include_reasoning": False}
    elif body.thinking is not None or (output is not None and output.effort is not None):
        fields["reasoning_effort"] = "medium" if output is None or output.effort is None else output.effort
    if isinstance(body, messages_protocol.MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens,
            "resume": body.resume,
            "priority": body.priority,
            "structured_outputs": body.structured_outputs and body.structured_outputs.model_dump(exclude_none=True),
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    return make_chat(fields)


def _seen_tools(body: messages_protocol.CountTokensRequest) -> list[messages_protocol.ToolDefinition]:
    """Return the tools that the model sees: without deferred ones that nothing has named, and without removed ones."""
    added: dict[str, bool] = {}
    for turn in body.messages:
        for block in turn.content:
            if isinstance(block, messages_protocol.ToolChangeBlock):
                added[block.tool.name] = block.type == "tool_addition"
            elif isinstance(block, messages_protocol.ToolResultBlock):
                named = (one for one in block.content or () if isinstance(one, messages_protocol.ToolReferenceBlock))
                added |= dict.fromkeys((one.tool_name for one in named), True)
    return [tool for tool in body.tools or () if added.get(tool.name, not tool.defer_loading)]


def _messages(body: messages_protocol.CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    num_cleared = _num_without_thinking(body)
    num_users = sum(turn.role == "user" for turn in body.messages)  # turns of the user from here on
    for turn in body.messages:
        num_users -= turn.role == "user"
        if turn.clear_at == "next_user_message" and num_users:
            continue
        if turn.role == "assistant":
            num_cleared -= 1
            _add_answer(messages, turn, shows_thinking=num_cleared < 0)
        else:
            _add_input(messages, turn)
    return messages


def _add_input(messages: list[dict[str, Any]], turn: messages_protocol.Message) -> None:
    """Append a turn to `messages`. Each result of a tool is a message of its own; the other blocks of a role form one
    message. Texts of one turn are parts, which the chat template joins; those of adjacent turns are lines."""
    is_first = True
    for block in _spelled_out(turn.content):
        if isinstance(block, messages_protocol.ToolResultBlock):
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _tool_result(block)})
        elif isinstance(block, messages_protocol.TextBlock):
            _append_text(messages, turn.role, block.text, as_part=not is_first)
            is_first = False
        elif isinstance(block, messages_protocol.ImageBlock):
            _append_image(messages, turn.role, block)
    if not turn.content:
        _append_text(messages, turn.role, "")


def _spelled_out(
    blocks: Sequence[messages_protocol.Block | messages_protocol.ToolReferenceBlock],
) -> list[messages_protocol.Block]:
    """Return `blocks` with documents, search results and references as the texts and pictures that the model reads."""
    return [
        one
        for block in blocks
        for one in (
            block.parts
            if isinstance(
                block,
                messages_protocol.DocumentBlock
                | messages_protocol.SearchResultBlock
                | messages_protocol.ToolReferenceBlock,
            )
            else [block]
        )
    ]


def _append_text(messages: list[dict[str, Any]], role: str, text: str, *, as_part: bool = False) -> None:
    is_same = bool(messages) and messages[-1]["role"] == role
    if is_same and as_part and isinstance(messages[-1]["content"], str):
        messages[-1]["content"] = [{"type": "text", "text": messages[-1]["content"]}]
    if is_same and isinstance(messages[-1]["content"], list):
        messages[-1]["content"].append({"type": "text", "text": text})
    elif is_same:
        messages[-1]["content"] = f"{messages[-1]['content']}\n{text}" if messages[-1]["content"] else text
    else:
        messages.append({"role": role, "content": text})


def _append_image(messages: list[dict[str, Any]], role: str, block: messages_protocol.ImageBlock) -> None:
    """Append a picture to the role's last message, whose content becomes a list of parts."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": ""})
    content = messages[-1]["content"]
    if isinstance(content, str):
        messages[-1]["content"] = content = [{"type": "text", "text": content}] if content else []
    content.append(_image_part(block))


def _image_part(block: messages_protocol.ImageBlock) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": block.url}}


def _tool_result(block: messages_protocol.ToolResultBlock) -> str | list[dict[str, Any]]:
    """Return the result of a tool: a text, or a list of parts if it has pictures."""
    blocks = _spelled_out(block.content or [])
    text = _text([one for one in blocks if isinstance(one, messages_protocol.TextBlock)])
    mark = "Error: " if block.is_error and not text.lower().startswith("error") else ""
    if not any(isinstance(one, messages_protocol.ImageBlock) for one in blocks):
        return mark + text
    parts = [
        _image_part(one) if isinstance(one, messages_protocol.ImageBlock) else {"type": "text", "text": one.text}
        for one in blocks
        if isinstance(one, messages_protocol.TextBlock | messages_protocol.ImageBlock)
    ]
    return [{"type": "text", "text": mark}, *parts] if mark else parts


def _add_answer(messages: list[dict[str, Any]], turn: messages_protocol.Message, *, shows_thinking: bool) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    message = messages[-1]
    if not turn.content:
        message["content"] = message["content"] or ""
    for block in turn.content:
        if isinstance(block, messages_protocol.TextBlock):
            message["content"] = (message["content"] or "") + block.text
        elif isinstance(block, messages_protocol.ThinkingBlock):
            if shows_thinking and block.thinking:
                message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
        elif isinstance(block, messages_protocol.ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            call = {"id": block.id, "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)


def _text(blocks: Sequence[messages_protocol.TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _num_without_thinking(body: messages_protocol.CountTokensRequest) -> int:
    """Return how many of the assistant's first messages lose their thinking, as the request's `context_management`
    says. Raises `RequestError`."""
    edits = (body.context_management or {}).get("edits") or []
    num_cleared = 0
    for edit in edits if isinstance(edits, list) else [edits]:
        kind = edit.get("type") if isinstance(edit, dict) else None
        if kind != _CLEAR_THINKING:
            raise RequestError(
                f"context_management: the edit {kind!r:.60} is not built; {_CLEAR_THINKING} is.",
                param="context_management",
            )
        keep = edit.get("keep") or {"type": "thinking_turns", "value": 1}
        if keep == "all" or keep == {"type": "all"}:
            continue
        num_kept = keep.get("value") if isinstance(keep, dict) and keep.get("type") == "thinking_turns" else None
        if type(num_kept) is not int or num_kept < 1:
            raise RequestError(
                'context_management: keep is "all" or {"type": "thinking_turns", "value": N}.',
                param="context_management",
            )
        thinking = [
            i
            for i, turn in enumerate(turn for turn in body.messages if turn.role == "assistant")
            if any(isinstance(block, messages_protocol.ThinkingBlock) for block in turn.content)
        ]
        if len(thinking) > num_kept:
            num_cleared = max(num_cleared, thinking[-num_kept])
    return num_cleared
