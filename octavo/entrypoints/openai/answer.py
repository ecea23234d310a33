"""What a chat's answer consists of: reasoning first, then content and tool calls, as a message or as a stream's deltas.

The request, its prompt and the server's flags say how answers are to be read, and what they must be; a grammar is for
what comes after the reasoning. A message is what its deltas add up to: a stream and a whole answer are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.entrypoints.openai.protocol import ChatCompletionRequest, NamedToolChoice
from octavo.entrypoints.openai.reasoning import STYLES, Reasoning, ReasoningSplitter
from octavo.entrypoints.openai.responses import AssistantMessage, CalledFunction, ToolCall
from octavo.entrypoints.openai.server_args import ServerArgs
from octavo.entrypoints.openai.tools import MARKS, PARSERS
from octavo.entrypoints.openai.tools.calls import Call, Piece, ToolParser, new_call_id
from octavo.entrypoints.openai.tools.forced import NamedCallReader, RequiredCallsReader
from octavo.errors import RequestError
from octavo.sampling.grammar import ReasoningMarks, ToolCalls, WantedGrammar, mark
from octavo.sampling_params import StructuredOutputsParams


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


def check_tool_choice(body: ChatCompletionRequest, args: ServerArgs) -> None:
    """Raise `RequestError` if the model may choose and the server does not know how it calls."""
    if body.chosen_tools and body.tool_choice in (None, "auto") and not args.enable_auto_tool_choice:
        raise RequestError(
            'tool_choice "auto" needs a server that was started with --enable-auto-tool-choice and --tool-call-parser; '
            '"required", "none" and named functions do not.',
            param="tool_choice",
        )


def answer_format(body: ChatCompletionRequest, args: ServerArgs, prompt: str) -> AnswerFormat:
    """How the answers to `prompt` are to be read."""
    reasoning = None
    if args.reasoning_parser is not None:
        reasoning = Reasoning.after(prompt, STYLES[args.reasoning_parser])
    marks = () if reasoning is None else (reasoning.style.start, reasoning.style.end)
    include = body.include_reasoning is not False
    if isinstance(body.tool_choice, NamedToolChoice):
        return AnswerFormat(reasoning, include, partial(NamedCallReader, body.tool_choice.function.name), marks)
    if body.tool_choice == "required":
        return AnswerFormat(reasoning, include, RequiredCallsReader, marks)
    if (tools := body.chosen_tools) and args.tool_call_parser is not None:
        new_parser = partial(PARSERS[args.tool_call_parser], tools)
        return AnswerFormat(reasoning, include, new_parser, (*marks, *MARKS))
    return AnswerFormat(reasoning, include, None, marks)


def wanted_grammar(
    body: ChatCompletionRequest,
    form: AnswerFormat,
    structure: StructuredOutputsParams | None,
    special_tokens: Mapping[str, int],
) -> WantedGrammar | None:
    """What the answers must be, if anything: the calls that the request insists on, or `structure`."""
    content: ToolCalls | StructuredOutputsParams | None = structure
    if body.forces_calls:
        name = body.tool_choice.function.name if isinstance(body.tool_choice, NamedToolChoice) else None
        content = ToolCalls(body.chosen_tools, name, is_parallel=body.parallel_tool_calls is not False)
    if content is None:
        return None
    marks = None
    if (reasoning := form.reasoning) is not None:
        start, end = (mark(text, special_tokens.get(text)) for text in (reasoning.style.start, reasoning.style.end))
        marks = ReasoningMarks(None if reasoning.is_open else start, end, reasoning.is_optional)
    return WantedGrammar(content, marks, body.structure_field)


class AnswerReader:
    """Reads the text of one choice, in pieces."""

    def __init__(self, form: AnswerFormat) -> None:
        self.num_calls = 0
        self._shows_reasoning = form.include_reasoning
        self._splitter = None if form.reasoning is None else ReasoningSplitter(form.reasoning)
        self._parser = None if form.new_tool_parser is None else form.new_tool_parser()

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
        shown = bool(reasoning) and self._shows_reasoning
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
