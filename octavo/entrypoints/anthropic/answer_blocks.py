"""Builds an answer as content blocks, and as the events of a stream.

Order: `message_start`; for each block `content_block_start`, `content_block_delta`*, `content_block_stop`;
`message_delta` with the stop reason; `message_stop`. A whole message is the sum of its events.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from octavo.entrypoints.anthropic.messages_protocol import MessagesRequest
from octavo.entrypoints.chat.answer_reader import CallDelta, Delta, ReasoningDelta, TextDelta
from octavo.entrypoints.chat.chat_run import AnswerPart

Event = dict[str, Any]


class MessageBuilder:
    """Builds the answer to one request."""

    def __init__(self, body: MessagesRequest, message_id: str, model: str) -> None:
        self._max_tokens = body.max_tokens
        self._stops = body.stop_sequences or []
        self._hides_thinking = body.thinking is not None and body.thinking.display == "omitted"
        self._arguments = ""  # arguments of the open call
        self._is_open = False  # whether the last block is open
        self.message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }

    def add(self, part: AnswerPart) -> list[Event]:
        """Return the events that `part` adds."""
        events: list[Event] = []
        if not self.message["usage"]:
            self.message["usage"] = _usage(part)
            none = {"output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
            start = {**self.message, "content": [], "usage": self.message["usage"] | none}
            events.append({"type": "message_start", "message": start})
        for delta in part.deltas:
            events += self._add_delta(delta)
        if part.finish_reason is not None:
            events += self._finish(part)
        return events

    def _add_delta(self, delta: Delta) -> list[Event]:
        if isinstance(delta, CallDelta):
            events = []
            if delta.name:
                events = self._open({"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
            if delta.arguments:
                self._arguments += delta.arguments
                events.append(self._delta({"type": "input_json_delta", "partial_json": delta.arguments}))
            return events
        if isinstance(delta, ReasoningDelta):
            events = self._continue({"type": "thinking", "thinking": "", "signature": ""})
            block = self.message["content"][-1]
            if not self._hides_thinking:
                block["thinking"] += delta.text
                events.append(self._delta({"type": "thinking_delta", "thinking": delta.text}))
            return events
        assert isinstance(delta, TextDelta)
        events = self._continue({"type": "text", "text": ""})
        self.message["content"][-1]["text"] += delta.text
        return [*events, self._delta({"type": "text_delta", "text": delta.text})]

    def _continue(self, block: dict[str, Any]) -> list[Event]:
        """Continue the last block if it is open and of the same kind, otherwise open `block`. Return the events."""
        if self._is_open and self.message["content"][-1]["type"] == block["type"]:
            return []
        return self._open(block)

    def _open(self, block: dict[str, Any]) -> list[Event]:
        events = self._close()
        self.message["content"].append(block)
        self._is_open = True
        self._arguments = ""
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        block = self.message["content"][-1]
        events = []
        if block["type"] == "thinking":
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            events.append(self._delta({"type": "signature_delta", "signature": block["signature"]}))
        elif block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _finish(self, part: AnswerPart) -> list[Event]:
        reason, sequence = self._stop_reason(part)
        usage = _usage(part)
        self.message |= {"stop_reason": reason, "stop_sequence": sequence, "usage": usage}
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [*self._close(), {"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]

    def _stop_reason(self, part: AnswerPart) -> tuple[str, str | None]:
        match part.finish_reason:
            case "tool_calls":
                return "tool_use", None
            case "length":
                fits = part.num_tokens >= self._max_tokens
                return "max_tokens" if fits else "model_context_window_exceeded", None
            case "abort":  # the request ran out of time
                return "pause_turn", None
        if isinstance(part.stop_reason, str) and part.stop_reason in self._stops:
            return "stop_sequence", part.stop_reason
        return "end_turn", None

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1


def _usage(part: AnswerPart) -> dict[str, Any]:
    """Return Anthropic's usage. Input tokens are only the computed ones; cached tokens are counted separately."""
    return {
        "input_tokens": part.num_prompt_tokens - part.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": part.num_cached_tokens,
        "output_tokens": part.num_tokens,
        "output_tokens_details": {"thinking_tokens": part.num_reasoning_tokens},
    }


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; empty if the answer ended within them."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
