"""What a chat's request, its prompt and the server's flags say about its answers: how to read them, what they must be.

Reasoning comes first, then content and calls; a grammar is for what comes after the reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from octavo.entrypoints.openai.answer import AnswerFormat
from octavo.entrypoints.openai.protocol import ChatCompletionRequest, NamedToolChoice
from octavo.entrypoints.openai.reasoning import STYLES, Reasoning
from octavo.entrypoints.openai.server_args import ServerArgs
from octavo.entrypoints.openai.tools import MARKS, PARSERS
from octavo.entrypoints.openai.tools.forced import NamedCallReader, RequiredCallsReader
from octavo.errors import RequestError
from octavo.sampling.grammar import ReasoningMarks, ToolCalls, WantedGrammar, mark
from octavo.sampling_params import StructuredOutputsParams


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
