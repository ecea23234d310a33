"""Reads a chat's answer as deltas: first reasoning, then content and tool calls.

The request, its prompt and the server's flags decide how answers are read and what they must contain. A grammar applies
only after the reasoning. A whole answer is the sum of its deltas. Deltas belong to no API: each API writes them in its
own form.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from octavo.call_arguments import with_whole_pairs
from octavo.entrypoints.chat.reasoning import Reasoning, Splitter, new_splitter
from octavo.entrypoints.chat.tools.call_ids import CallIdForm, CallIds
from octavo.entrypoints.chat.tools.call_spelling import arguments_only, list_of_calls, spelling
from octavo.entrypoints.chat.tools.forced_calls import ForcedCallsReader
from octavo.entrypoints.chat.tools.format_detection import ModelFormats
from octavo.entrypoints.chat.tools.format_parser import FormatParser, trigger_marks
from octavo.entrypoints.chat.tools.tool_formats import HARMONY, ToolFormat
from octavo.entrypoints.chat.tools.tool_parser_base import Call, Piece, ToolParser
from octavo.entrypoints.openai.custom_tools import CustomInput, whole_input
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest
from octavo.entrypoints.openai.tool_choice import NamedToolChoice
from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.structured_output.answer_parts import ReasoningMarks, Spelling, ThinkingBudget, ToolCalls
from octavo.structured_output.channel_grammar import has_marks
from octavo.structured_output.final_check import CallChecks
from octavo.structured_output.grammar_builder import WantedGrammar


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A new call (`id` and `name`), or more of the arguments of the last one. With `is_custom` it calls a custom tool,
    and the arguments are its input."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""
    is_custom: bool = False
    is_whole: bool = False  # nothing of an input is left to come


Delta = ReasoningDelta | TextDelta | CallDelta
_NO_CHECKS = CallChecks({})


class AnswerFormat(msgspec.Struct, frozen=True):
    """How to read the answers to one request."""

    reasoning: Reasoning | None = None
    include_reasoning: bool = True
    new_tool_parser: Callable[[], ToolParser] | None = None
    marks: tuple[str, ...] = ()  # texts that the reader looks for; must be detokenized even if they are special tokens
    has_one_call: bool = False  # further calls are dropped
    call_marks: tuple[str, ...] = ()  # begin only calls: such a mark ends open reasoning
    call_ids: CallIdForm = CallIdForm.LONG
    used_ids: tuple[str, ...] = ()  # ids of earlier calls in the conversation
    custom_tools: frozenset[str] = frozenset()  # names of tools whose calls have an input instead of arguments
    checks: CallChecks = _NO_CHECKS  # of calls that a grammar may hold only in part

    @property
    def is_plain(self) -> bool:
        """Return whether the whole text is content."""
        return self.reasoning is None and self.new_tool_parser is None

    def new_splitter(self) -> Splitter | None:
        """Return a splitter for one answer; None if its format has no reasoning."""
        return None if self.reasoning is None else new_splitter(self.reasoning, self.call_marks, self.new_tool_parser)


def check_tool_choice(body: ChatCompletionRequest, formats: ModelFormats) -> None:
    """Raise `RequestError` if the model may choose to call tools, but the format of its calls is unknown."""
    if formats.why_no_choice and body.tool_choice in (None, "auto") and body.chosen_tools:
        raise RequestError(
            f'tool_choice "auto" is not possible: {formats.why_no_choice} "required", "none" and named functions are.',
            param="tool_choice",
        )


def answer_format(
    body: ChatCompletionRequest, formats: ModelFormats, prompt: str, *, checks_calls: bool = True
) -> AnswerFormat:
    """Return how to read the answers to `prompt`. With `checks_calls` they have the result in their `stop_reason`."""
    style = formats.reasoning
    begun = body.messages[-1].text if body.continue_final_message else None
    reasoning = None if style is None else Reasoning.after(prompt, style, begun)
    marks = () if reasoning is None else reasoning.style.marks
    include = body.include_reasoning is not False
    if not body.tools:
        return AnswerFormat(reasoning, include, None, marks)
    tools, form = body.chosen_tools, formats.tools
    checks = CallChecks(_checked_schemas(body) if checks_calls else {})
    ids = (formats.call_ids, _used_ids(body), frozenset(body.custom_inputs), checks)
    new_parser: Callable[[], ToolParser]
    if body.forces_calls:
        spelled = forced_spelling(body, form)
        if spelled.has_json_arguments:
            new_parser = partial(ForcedCallsReader, spelled)
            return AnswerFormat(reasoning, include, new_parser, (*marks, *spelled.marks), False, (), *ids)
    if tools and form is not None:
        thought_end = "" if style is None else style.end_beside_calls
        has_one, new_parser = body.parallel_tool_calls is False, partial(FormatParser, form, tools, thought_end)
        return AnswerFormat(reasoning, include, new_parser, (*marks, *form.marks), has_one, trigger_marks(form), *ids)
    return AnswerFormat(reasoning, include, None, marks)


def _checked_schemas(body: ChatCompletionRequest) -> dict[str, dict[str, Any]]:
    """Return the schemas of the functions whose arguments the request wants to be valid."""
    wanted = {tool.function.name for tool in body.tools or () if body.forces_calls or tool.function.strict}
    return {name: one for name, one in body.chosen_tools.items() if name in wanted - body.custom_inputs.keys()}


def _grammars(body: ChatCompletionRequest, names: Iterable[str]) -> dict[str, str]:
    """Return the Lark grammars of the custom tools in `names`."""
    return {name: text for name in names if (text := body.custom_inputs.get(name)) is not None}


def _used_ids(body: ChatCompletionRequest) -> tuple[str, ...]:
    return tuple(call.id or "" for message in body.messages for call in message.tool_calls or ())


def forced_spelling(body: ChatCompletionRequest, form: ToolFormat | None) -> Spelling:
    """Return the spelling of calls that a request forces: the model's own format if it can spell them, otherwise a list
    in JSON."""
    tools = body.chosen_tools
    if isinstance(body.tool_choice, NamedToolChoice):
        name = body.tool_choice.function.name
        tools = {name: tools[name]}
    spelled = None if form is None else spelling(form, tools, len(_used_ids(body)))
    if spelled is not None:
        return spelled
    return arguments_only(name) if isinstance(body.tool_choice, NamedToolChoice) else list_of_calls(tools)


def wanted_grammar(
    body: ChatCompletionRequest,
    form: AnswerFormat,
    formats: ModelFormats,
    structure: StructuredOutputsParams | None,
    special_tokens: Mapping[str, int],
    budget: ThinkingBudget | None,
) -> WantedGrammar | None:
    """Return the grammar of the answers, or None: the calls that the request forces, calls of `strict` functions if the
    model calls, or `structure`, in the place of which there may be calls. The `budget` bounds the reasoning."""
    content: ToolCalls | StructuredOutputsParams | None = structure
    or_calls = None
    is_parallel = body.parallel_tool_calls is not False
    if body.forces_calls:
        is_named = isinstance(body.tool_choice, NamedToolChoice)
        spelled = forced_spelling(body, formats.tools)
        content = ToolCalls(
            body.chosen_tools, spelled, is_parallel and not is_named, inputs=_grammars(body, spelled.calls)
        )
    elif _may_call_instead(body) and formats.tools is not None:
        or_calls = _optional_calls(body, formats, formats.tools, is_parallel, special_tokens, is_whole=True)
    elif content is None and formats.tools is not None and _has_strict_tools(body):
        content = _optional_calls(body, formats, formats.tools, is_parallel, special_tokens)
    if content is None:
        return None if budget is None else WantedGrammar(None, budget=budget)
    marks = None
    has_channels = isinstance(content, ToolCalls) and content.has_channels  # one of which is the reasoning's
    reasoning = form.reasoning
    if reasoning is not None and not has_channels and (not reasoning.is_ended or reasoning.has_header):
        style = reasoning.style
        marks = ReasoningMarks(
            None if reasoning.is_open else style.start, style.end, reasoning.is_optional, style.answer_start,
            style.answer_end,
        )  # fmt: skip
    return WantedGrammar(content, marks, body.structure_field, special_tokens, budget, or_calls, form.checks)


def may_want_grammar(body: ChatCompletionRequest) -> bool:
    """Return whether `wanted_grammar` may want one beside that of `structure_field`. Making it takes seconds: never do
    it in the event loop."""
    if body.thinking_token_budget is not None:
        return True
    return bool(body.tools) and (body.forces_calls or _has_strict_tools(body) or _may_call_instead(body))


def _may_call_instead(body: ChatCompletionRequest) -> bool:
    """Return whether an answer may be calls instead of the structure. A structural tag itself says where calls may
    stand."""
    structure = body.structure() if body.tools and body.chosen_tools and not body.forces_calls else None
    return structure is not None and structure[1].structural_tag is None


def _has_strict_tools(body: ChatCompletionRequest) -> bool:
    return body.tool_choice != "none" and any(tool.function.strict for tool in body.tools or ())


_ANY_OBJECT = {"type": "object", "additionalProperties": True}


def _is_object(body: ChatCompletionRequest) -> bool:
    """Return whether the wanted answer is either no JSON or a JSON object."""
    structure = body.structure()
    schema = None if structure is None else structure[1].json
    return schema is None or (isinstance(schema, dict) and schema.get("type") == "object")


def _optional_calls(
    body: ChatCompletionRequest,
    formats: ModelFormats,
    form: ToolFormat,
    is_parallel: bool,
    special_tokens: Mapping[str, int],
    *,
    is_whole: bool = False,
) -> ToolCalls | None:
    """Return a grammar of free text, optionally followed by calls; with `is_whole`, of calls alone. A function that is
    not strict, or whose arguments the format cannot spell, takes any object. None if no strict function is left
    (without `is_whole`), if the format cannot spell the calls, or if it spells them like a list of the structure."""
    has_channels = form is HARMONY and not is_whole
    if has_channels and not has_marks(special_tokens):
        return None
    tools, num_earlier = body.chosen_tools, len(_used_ids(body))
    strict = {tool.function.name for tool in body.tools or () if tool.function.strict}
    held = {name for name in strict if spelling(form, {name: tools[name]}) is not None}
    if not held and not is_whole:
        return None
    schemas = {name: schema if name in held else _ANY_OBJECT for name, schema in tools.items()}
    spelled = spelling(form, schemas, num_earlier, tools.keys() - held)
    if spelled is None or (is_whole and not trigger_marks(form) and spelled.keys is None and not _is_object(body)):
        return None
    marks = None if is_whole else trigger_marks(form)
    style = formats.reasoning
    text_marks = () if style is None or has_channels else style.text_marks
    text_marks += tuple(call.address for call in spelled.calls.values() if call.address)
    inputs = _grammars(body, held)
    return ToolCalls(schemas, spelled, is_parallel, marks, has_channels, inputs, text_marks, form.text_start)


class AnswerReader:
    """Reads the text of one choice in pieces. Ids of calls follow from `name`; "" stands for any."""

    def __init__(self, form: AnswerFormat, name: str = "") -> None:
        self.num_calls = 0
        self._has_one_call, self._drops = form.has_one_call, False  # whether the current call is dropped
        self._shows_reasoning = form.include_reasoning
        self._ids = CallIds(form.call_ids, form.used_ids, name)
        self._splitter = form.new_splitter()
        self._parser = None if form.new_tool_parser is None else form.new_tool_parser()
        self._custom_tools = form.custom_tools
        self._input: CustomInput | None = None  # of the call of a custom tool that is read in pieces
        self._checks = form.checks
        self._to_check: list[tuple[str, list[str]]] = []  # functions that were called, with pieces of their arguments
        self._arguments: list[str] | None = None  # the pieces of the call that is read, if it is checked

    def add(self, text: str, is_end: bool, *, is_cut: bool = False) -> list[Delta]:
        """Return the deltas that `text` completes; at the end, also those held back. `is_cut`: the model did not end
        the answer."""
        deltas = self._split(self._splitter.add(text)) if self._splitter is not None else self._content(text)
        if is_end:
            if self._splitter is not None:
                deltas += self._split(self._splitter.finish())
            if self._parser is not None:
                deltas += self._pieces(self._parser.finish(is_cut=is_cut))
        return deltas

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason in the API's words. A call that a stop string cuts off is not to be made."""
        return "tool_calls" if reason == "stop" and self.num_calls and not self._is_cut else reason

    @property
    def _is_cut(self) -> bool:
        """Return whether the text so far ends within a call."""
        return isinstance(self._parser, ForcedCallsReader) and self._parser.is_within_call

    def stop_reason(self, finish_reason: str | None, stop_reason: int | str | None) -> int | str | None:
        """Return the stop reason of an answer with this reason of the engine, or at its end that arguments of a call do
        not satisfy their schema."""
        if finish_reason == "stop" and not self._is_cut:
            found = self._checks.verdict((name, "".join(arguments)) for name, arguments in self._to_check)
            return stop_reason if found is None else found
        return stop_reason

    def _split(self, parts: tuple[str, str]) -> list[Delta]:
        reasoning, content = parts
        shown = bool(reasoning) and self._shows_reasoning
        return [*([ReasoningDelta(reasoning)] if shown else []), *self._content(content)]

    def _content(self, text: str) -> list[Delta]:
        if self._parser is None:
            return [TextDelta(text)] if text else []
        return self._pieces(self._parser.add(text)) if text else []

    def _pieces(self, pieces: list[Piece]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            if not isinstance(piece, Call):
                deltas.append(TextDelta(piece))
                continue
            if piece.name is not None:
                self._drops = self._has_one_call and self.num_calls > 0
            if self._drops:
                continue
            if piece.name is not None:
                self.num_calls += 1
                id, is_custom = self._ids.next(piece.name, piece.id), piece.name in self._custom_tools
                deltas.append(CallDelta(self.num_calls - 1, id=id, name=piece.name, is_custom=is_custom))
                self._input = CustomInput() if is_custom and not piece.arguments else None
                self._arguments = [] if piece.name in self._checks else None
                if self._arguments is not None:
                    self._to_check.append((piece.name, self._arguments))
                if is_custom and piece.arguments:
                    text = whole_input(piece.arguments)
                    deltas.append(CallDelta(self.num_calls - 1, text, is_custom=True, is_whole=True))
                    continue
            if self._arguments is not None:
                self._arguments.append(piece.arguments)
            if self._input is not None:
                was_whole, text = self._input.is_whole, self._input.add(piece.arguments)
                if text or (self._input.is_whole and not was_whole):
                    deltas.append(CallDelta(self.num_calls - 1, text, is_custom=True, is_whole=self._input.is_whole))
            elif piece.arguments:
                deltas.append(CallDelta(self.num_calls - 1, with_whole_pairs(piece.arguments)))
        return deltas
