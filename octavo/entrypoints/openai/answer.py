"""What an answer's text consists of: reasoning, content and tool calls, as a message or as the deltas of a stream.

A message is what its deltas add up to, so that a stream and a whole answer are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.entrypoints.openai.reasoning import Reasoning, ReasoningSplitter
from octavo.entrypoints.openai.responses import AssistantMessage, CalledFunction, ToolCall
from octavo.entrypoints.openai.tools.calls import Call, Piece, ToolParser, new_call_id


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers to one request are to be read."""

    reasoning: Reasoning | None = None
    include_reasoning: bool = True
    new_tool_parser: Callable[[], ToolParser] | None = None
    marks: tuple[str, ...] = ()  # texts that are looked for, and must be shown where they are special tokens

    @property
    def is_plain(self) -> bool:
        """Whether the text is the content as it is."""
        return self.reasoning is None and self.new_tool_parser is None


@dataclass(slots=True)
class AnswerReader:
    """Reads the text of one choice, in pieces."""

    format: AnswerFormat
    num_calls: int = 0
    _splitter: ReasoningSplitter | None = field(init=False)
    _parser: ToolParser | None = field(init=False)

    def __post_init__(self) -> None:
        self._splitter = None if self.format.reasoning is None else ReasoningSplitter(self.format.reasoning)
        self._parser = None if self.format.new_tool_parser is None else self.format.new_tool_parser()

    def add(self, text: str, is_end: bool) -> list[dict[str, Any]]:
        """The deltas that `text` brings, and at the end those that were held back."""
        deltas = self._split(self._splitter.add(text)) if self._splitter is not None else self._content(text)
        if is_end:
            if self._splitter is not None:
                deltas += self._split(self._splitter.finish())
            if self._parser is not None:
                deltas += self._pieces(self._parser.finish())
        return deltas

    def finish_reason(self, reason: str | None) -> str | None:
        """What ended the answer, as the API names it."""
        return "tool_calls" if reason == "stop" and self.num_calls else reason

    def message(self, role: str, text: str) -> AssistantMessage:
        """The whole message."""
        reasoning, content, calls = "", "", list[ToolCall]()
        for delta in self.add(text, is_end=True):
            reasoning += delta.get("reasoning_content", "")
            content += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    function = CalledFunction(name=call["function"]["name"], arguments="")
                    calls.append(ToolCall(id=call["id"], function=function))
                calls[-1].function.arguments += call["function"]["arguments"]
        return AssistantMessage(
            role=role,
            content=content or (None if reasoning or calls else ""),
            reasoning_content=reasoning or None,
            reasoning=reasoning or None,
            tool_calls=calls or None,
        )

    def _split(self, parts: tuple[str, str]) -> list[dict[str, Any]]:
        reasoning, content = parts
        shown = bool(reasoning) and self.format.include_reasoning
        deltas: list[dict[str, Any]] = [{"reasoning_content": reasoning, "reasoning": reasoning}] if shown else []
        return deltas + self._content(content)

    def _content(self, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        return [{"content": text}] if self._parser is None else self._pieces(self._parser.add(text))

    def _pieces(self, pieces: list[Piece]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for piece in pieces:
            if not isinstance(piece, Call):
                deltas.append({"content": piece})
                continue
            if piece.name is not None:
                self.num_calls += 1
                function = {"name": piece.name, "arguments": ""}
                deltas.append(self._call(id=new_call_id(), type="function", function=function))
            if piece.arguments:
                deltas.append(self._call(function={"arguments": piece.arguments}))
        return deltas

    def _call(self, **fields: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": self.num_calls - 1, **fields}]}
