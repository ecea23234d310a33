"""Makes the grammar of a request's answer, in llguidance's own form: JSON text with Lark grammars and JSON schemas. The
front end makes and checks a grammar before the request is queued; it crosses the wire as text, and
`octavo.structured_output.grammar_matching` follows it. llguidance tries grammars out in a process of its own (`trial`).
"""

from __future__ import annotations

import atexit
import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from octavo.errors import RequestError
from octavo.sampling_params import STRUCTURES, StructuredOutputsParams
from octavo.structured_output import context_free, lark, structural_tag
from octavo.structured_output.answer_parts import (
    CUSTOM_INPUT,
    CallText,
    KeyedChoice,
    KeyedList,
    KeyedObject,
    KeyedScalar,
    KeyedValue,
    ParameterList,
    ParameterText,
    ReasoningMarks,
    TextRule,
    ThinkingBudget,
    ToolCalls,
)
from octavo.structured_output.channel_grammar import channel_rules
from octavo.structured_output.final_check import CallChecks, FinalCheck
from octavo.structured_output.flat_objects import flat_objects
from octavo.structured_output.lark import escaped, pieces
from octavo.structured_output.lark_in_calls import lark_before, lark_without, quoted_lark
from octavo.structured_output.schema_keywords import IN_PLACE, SILENT
from octavo.structured_output.schema_lowering import lower
from octavo.structured_output.trial import GrammarTrial, TrialFailed, TrialsBusy, limits

MAX_CHARACTERS = 1 << 20  # the most characters of a schema or a grammar
# The most characters of one regular expression, choice, constant or pattern. A mask takes a microsecond a character,
# and streams wait for it.
MAX_PIECE_CHARACTERS = 1 << 14
# JSON allows any amount of whitespace, and small models may write it for ever. People write a line break and an
# indentation, or a few spaces.
DEFAULT_WHITESPACE = r"\r?\n(?: {0,24}|\t{0,6})| {1,2}"
MAX_CALLS = 32  # in one answer
_MAX_DEPTH = 100  # of a schema
_MAX_SIMPLE_CHARACTERS = 1 << 16  # the most characters of a grammar that is not tried in another process
# llguidance's errors for references that it merges without end, or multiplies by each other too often.
_TOO_MANY_MERGES = (
    "circular references with sibling keys", "Schema intersection stack level exceeded", "schema too large",
)  # fmt: skip
_EMPTY_DEFINITION = re.compile(r"^Unsatisfiable.* while processing \S*#/\$defs/(\d+)$")
_WHERE = re.compile(r" while processing \S*#/\$defs/\d+\S*$")  # a place with numbers that mean nothing to callers
_MAX_ROUNDS = 8  # each round finds one empty definition, and tries the whole schema
_COMMENTS = ("$comment", "title", "description", "examples")  # keywords of a schema that cost nothing
_PIECES = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/')  # strings and regular expressions in Lark

_trial = GrammarTrial()
atexit.register(_trial.close)


class WantedGrammar(NamedTuple):
    """The wanted form of an answer: `content` or `calls`, after `reasoning` if there is any. Without content only the
    `budget` limits the answer."""

    content: StructuredOutputsParams | ToolCalls | None
    reasoning: ReasoningMarks | None = None
    field: str | None = None  # name of the structure's field in errors, if not `structured_outputs`
    special_tokens: Mapping[str, int] | None = None  # ids by text: grammars name these tokens by id
    budget: ThinkingBudget | None = None
    calls: ToolCalls | None = None
    checks: CallChecks | None = None  # functions whose arguments the grammar holds completely are left out of these


class MadeGrammar(NamedTuple):
    """A grammar that can be followed, and the check of the parts of a schema that it does not enforce."""

    text: str
    check: FinalCheck | None = None


def make_checked_grammar(wanted: WantedGrammar, *, closes_objects: bool = False) -> MadeGrammar:
    """Return the grammar of the wanted answers, and the check of what it leaves open. Every grammar is made here.

    `closes_objects`: objects whose schema names properties have no others, unless the schema or the request says
    otherwise. Raises `RequestError` with the reason if the grammar cannot be followed. The largest grammars take some
    seconds.
    """
    content, reasoning, field, special_tokens, budget, calls, checks = wanted
    is_call = isinstance(content, ToolCalls)
    if content is None:
        assert budget is not None
        field, reasoning = "thinking_token_budget", None
    elif isinstance(content, ToolCalls):
        field = "tools"
    elif field is None:
        field = "structured_outputs." + next(n for n in STRUCTURES if getattr(content, n) not in (None, False))
    problem = ""
    # A grammar is tried as a whole. If this fails, its schemas and inputs are tried one by one, to name the wrong
    # one, or to leave out parts that are too much for llguidance.
    for tries_each in (False, True):
        maker = _Maker(special_tokens or {}, closes_objects, tries_each)
        if content is None:
            assert budget is not None
            maker.is_certain = False
            grammar = _of_budget(budget)
        elif isinstance(content, ToolCalls):
            grammar = maker.of_tool_calls(content)
        else:
            grammar = maker.of_structure(content, field)
        or_calls = None if calls is None else maker.of_tool_calls(calls, is_beside_json=True)
        if reasoning is not None:
            maker.is_certain = False
            grammar = _after_reasoning(
                grammar, reasoning, special_tokens or {}, budget, or_calls, field, is_call=is_call
            )
        elif or_calls is not None:
            grammar = _joined("start: @answer | @calls", grammar, or_calls, field)
        is_simple = maker.is_simple and len(grammar) <= _MAX_SIMPLE_CHARACTERS
        problem = "" if is_simple and maker.is_certain else _problem(grammar, field, is_simple=is_simple)
        if not problem:
            check = None
            is_checked = bool(maker.unheld) or maker.has_open_objects
            if isinstance(content, StructuredOutputsParams) and content.json is not None and is_checked:
                check = _final_check(content, reasoning, field, maker.unheld, calls)
            if checks is not None:
                checks.leave_out(maker.held)
            return MadeGrammar(grammar, check)
        if not maker.has_parts:
            break
    raise RequestError(f"{field} cannot be followed: {_WHERE.sub('', problem)}", param=field)


def _final_check(
    content: StructuredOutputsParams,
    reasoning: ReasoningMarks | None,
    field: str,
    unheld: Collection[str],
    calls: ToolCalls | None,
) -> FinalCheck:
    if unheld and content.final_check == "refuse":
        raise RequestError(
            f"{field} has {', '.join(sorted(unheld))}, which a grammar cannot hold an answer to; with final_check "
            '"report" or "error" the answer is checked when it has ended.',
            param=field,
        )
    schema = content.json if isinstance(content.json, str) else json.dumps(content.json)
    heads = () if calls is None else tuple(calls.heads.values())
    check = FinalCheck(schema, content.final_check, calls=heads, is_of_names=not unheld)
    if reasoning is None:
        return check
    start = reasoning.start if reasoning.is_optional and reasoning.start is not None else ""
    return msgspec.structs.replace(
        check, after=reasoning.end, reasoning_start=start, start=reasoning.answer_start, end=reasoning.answer_end
    )


class _Maker:
    """Writes the grammar of one request."""

    def __init__(self, special_tokens: Mapping[str, int], closes_objects: bool, tries_each: bool) -> None:
        self.unheld = set[str]()  # keywords of schemas that the grammar does not enforce
        self.has_open_objects = False  # some object allows other names: a known name may be written with escapes
        self.held: dict[str, Mapping[str, Any]] = {}  # functions whose arguments the grammar holds completely
        self.is_simple = True  # llguidance's work on the grammar is bounded by its size
        self.is_certain = True  # and llguidance never refuses such a grammar
        self.has_parts = False  # schemas or grammars, which may be tried one by one
        self._special_tokens = special_tokens
        self._closes_objects = closes_objects
        self._tries_each = tries_each
        self._fields_held_in_part = set[str]()

    def of_structure(self, wanted: StructuredOutputsParams, field: str) -> str:
        try:
            if wanted.structural_tag is not None:
                return self._of_structural_tag(wanted, field)
            return self._write(wanted, field)
        except RequestError:
            raise
        except RecursionError:
            raise RequestError(f"{field} cannot be read: it is nested too deep.", param=field) from None
        except ValueError as e:
            raise RequestError(f"{field} cannot be read: {_first_line(e)}.", param=field) from None

    def _of_structural_tag(self, wanted: StructuredOutputsParams, field: str) -> str:
        def part(kind: str, value: Any) -> dict[str, Any]:
            """Return the grammar of a schema, a regular expression or a grammar in the tag, with the request's
            options."""
            one = msgspec.structs.replace(wanted, structural_tag=None, **{kind: value})
            grammars: list[dict[str, Any]] = json.loads(self._write(one, field))["grammars"]
            return grammars[0]

        tag = wanted.structural_tag
        self.is_simple = False
        if isinstance(tag, str):
            if len(tag) > MAX_CHARACTERS:
                return tag  # is refused for its length
            tag = json.loads(tag)
        _check_parts(tag, (*_COMMENTS, "grammar"))  # parts of a "grammar" are checked where it is written
        return json.dumps({"grammars": structural_tag.grammars_of(tag, self._special_tokens, part)})

    def _write(self, wanted: StructuredOutputsParams, field: str) -> str:
        from llguidance import LLMatcher

        if wanted.json is None and not wanted.json_object:
            self.is_simple = False
        if wanted.regex is not None:
            _check_length(wanted.regex)
            return LLMatcher.grammar_from_regex(wanted.regex)
        if wanted.choice is not None:
            for text in wanted.choice:
                _check_length(text)
            alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
            # One terminal, from which the lexer makes an automaton; in a rule each choice would be an item of the
            # parser.
            return _of_lark(f"start: CHOICE\nCHOICE: {alternatives}")
        if wanted.grammar is not None:
            if len(wanted.grammar) > MAX_CHARACTERS or wanted.grammar.lstrip().startswith("{"):
                return wanted.grammar  # is refused for its length, or is in llguidance's own form
            return _of_lark(_checked_lark(wanted.grammar))
        schema: Any = {"type": "object"} if wanted.json is None else wanted.json
        if isinstance(schema, str):
            schema = json.loads(schema)
        if not isinstance(schema, dict):
            raise ValueError(f"a schema is an object, not {json.dumps(schema)[:40]}")
        if wanted.whitespace_pattern is not None and (
            problem := _first_line(_validated(LLMatcher.grammar_from_regex(wanted.whitespace_pattern)))
        ):
            name = "structured_outputs.whitespace_pattern"
            raise RequestError(f"{name} cannot be followed: {problem}", param=name)
        closes = wanted.disable_additional_properties
        closes = self._closes_objects if closes is None else closes
        return json.dumps({"grammars": [self._of_schema(schema, field, closes=closes, wanted=wanted)]})

    def _of_schema(
        self, schema: dict[str, Any], field: str, *, start: Any = None, closes: bool, wanted: StructuredOutputsParams
    ) -> dict[str, Any]:
        """Return the grammar of a schema, or of `start`, a part of it."""
        try:
            _check_parts(schema)
        except ValueError as e:
            raise RequestError(f"{field} cannot be read: {e}.", param=field) from None
        options: dict[str, Any] = {"whitespace_pattern": wanted.whitespace_pattern or DEFAULT_WHITESPACE}
        if wanted.disable_any_whitespace:
            options = {"whitespace_flexible": False}
        self.has_parts = True
        merges_references, levels = True, [{"is_coarse": True}, {"is_picky": True}, {}]
        empty, num_rounds = frozenset[str](), 0
        while True:
            try:
                lowered = lower(
                    schema, start=start, closes=closes, merges_references=merges_references, empty=empty, **levels[-1]
                )
            except RecursionError:
                raise RequestError(f"{field} cannot be followed: it is nested too deep.", param=field) from None
            except ValueError as e:
                raise RequestError(f"{field} cannot be followed: {e}.", param=field) from None
            grammar = {"json_schema": {**lowered.schema, "x-guidance": options}}
            if not self._tries_each:
                break
            text = json.dumps({"grammars": [grammar]})
            problem = _problem(text, field, is_simple=lowered.is_simple)
            if not problem:
                break
            # A definition that no value satisfies may be in a place that the schema does not need.
            of_definition = _EMPTY_DEFINITION.search(problem)
            if of_definition is not None and of_definition[1] not in empty:
                if num_rounds == _MAX_ROUNDS:
                    message = f"more than {_MAX_ROUNDS} of its definitions are satisfied by no value."
                    raise RequestError(f"{field} cannot be followed: {message}", param=field)
                empty |= {of_definition[1]}
                num_rounds += 1
                continue
            empty, num_rounds = frozenset(), 0  # definitions have other numbers at each level
            if merges_references and problem.startswith(_TOO_MANY_MERGES):
                merges_references = False
                continue
            levels.pop()
            # If no value satisfies a part of the schema, none satisfies the whole.
            if not levels or problem.startswith("Unsatisfiable"):
                raise RequestError(f"{field} cannot be followed: {_WHERE.sub('', problem)}", param=field)
        if lowered.unheld or lowered.has_open_objects:
            self._fields_held_in_part.add(field)
        self.unheld |= lowered.unheld
        self.has_open_objects |= lowered.has_open_objects
        self.is_simple &= lowered.is_simple and wanted.whitespace_pattern is None
        self.is_certain &= lowered.is_certain
        return grammar

    def of_tool_calls(self, calls: ToolCalls, *, is_beside_json: bool = False) -> str:
        """Return the grammar of calls. With `is_beside_json`, calls that are JSON objects are written as schemas,
        because the lexer cannot tell their first texts from other JSON."""
        self.is_certain = False  # the rules for calls may be refused
        special_tokens = self._special_tokens
        literal = partial(lark.literal, special_tokens=special_tokens)
        spelling, grammars, lines = calls.spelling, list[dict[str, Any]](), list[str]()
        indices = {name: i for i, name in enumerate(calls.schemas)}
        for name, call in spelling.calls.items():
            i, schema = indices[name], calls.schemas[name]
            if is_beside_json and spelling.keys is not None:
                if name in calls.inputs:
                    raise RequestError(
                        f"This model's calls have no marks, so a structure of the answer excludes {name}, whose input "
                        "has a grammar.", param="tools",
                    )  # fmt: skip
                grammars.append({**self._of_whole_call(name, spelling.keys, schema, i), "name": f"whole{i}"})
                lines += [f"call{i}: @whole{i}", f"next{i}: {literal(spelling.separator)} @whole{i}"]
                continue
            if name in calls.inputs:
                line, grammar = self._of_input(call, calls.inputs[name], i, literal)
                lines.append(line)
                grammars.append(grammar)
            elif call.keyed is not None:
                lines.append(
                    f"rest{i}: {self._of_keyed(call.keyed, call, str(i), lines, grammars)} {literal(call.after)}"
                )
            elif call.free is not None:
                lines += self._of_free_arguments(call, i, literal)
            elif call.parameter is None:
                lines.append(f"rest{i}: @arguments{i} {literal(call.after)}")
                grammars.append({**self._of_arguments(schema, i), "name": f"arguments{i}"})
            else:
                lists = []
                for j, one in enumerate(call.lists):
                    here = f"{i}_{j}"
                    lists.append(f"first{here}_0 {literal(call.after)}")
                    more, their_grammars = self._of_parameters(call, one, schema, here, literal)
                    lines += more
                    grammars += their_grammars
                lines.append(f"rest{i}: {' | '.join(lists)}")
            lines.append(f"call{i}: {literal(call.before)} rest{i}")
            # Separator and the text before a call are one lexeme, because the lexer cannot go back to the end of a
            # shorter one.
            lines.append(f"next{i}: {literal(spelling.separator + call.before)} rest{i}")
        self.held |= {
            name: calls.schemas[name]
            for name, call in spelling.calls.items()
            if call.free is None and _field_of_arguments(indices[name]) not in self._fields_held_in_part
        }
        names = " | ".join(f"call{indices[name]}" for name in spelling.calls)
        limit = MAX_CALLS - 1 if calls.is_parallel else 0
        more_calls = f"next_call{{0,{limit}}}" if limit else ""
        ending = f"{more_calls} {literal(spelling.close)}"
        lines += [f"call: {names}", f"next_call: {names.replace('call', 'next')}"]
        if calls.marks is None:
            start = [f"start: {literal(spelling.open)} call {ending}"]
        elif calls.has_channels:
            self.is_simple = False
            start = channel_rules(indices, special_tokens)
        else:
            self.is_simple = False
            start = _after_free_text(calls, ending, literal, special_tokens, indices)
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(start + lines)}, *grammars]})

    def _of_input(
        self, call: CallText, text: str, index: int, literal: Callable[[str], str]
    ) -> tuple[str, dict[str, Any]]:
        """Return the rule for the one argument of a custom tool, a text that follows the Lark grammar `text`, and the
        grammar that the rule names."""
        form, name, field = call.parameter, f"input{index}", f"tools[{index}].custom.format.grammar"
        if len(text) > MAX_CHARACTERS:
            raise RequestError(f"{field} has {len(text)} characters; {MAX_CHARACTERS} is the most.", param=field)
        self.is_simple, self.has_parts, end = False, True, ""
        if form is None:
            before, after = f'{{"{CUSTOM_INPUT}": "', '"}'
        elif form.after_value:
            before, after = form.before_key + CUSTOM_INPUT + form.after_key_of_text, ""
            end = form.after_value.replace("{key}", CUSTOM_INPUT)
            if call.keyed is not None:
                before, after = f"{{{before}", "}"
        else:
            before, after = f'{form.before_key}{CUSTOM_INPUT}{form.after_key_of_json}"', '"'
        try:
            given = _checked_lark(text)
            # A grammar that is too much as terminals is tried again as it is.
            if self._tries_each and (problem := _problem(_of_lark(given), field)):
                raise ValueError(problem.rstrip("."))
            if form is not None and end:
                grammar, end = self._of_text_before(given, end, _ends_of_text(form, call, end))
            else:
                grammar = quoted_lark(given, as_terminals=not self._tries_each)
        except ValueError as e:
            raise RequestError(f"{field} cannot be read: {e}.", param=field) from None
        after = end + after + call.after
        return f"rest{index}: {literal(before)} @{name} {literal(after)}", {"lark_grammar": grammar, "name": name}

    def _of_text_before(self, grammar: str, end: str, ends: set[str]) -> tuple[str, str]:
        """Return the grammar without texts that have one of `ends`, and what it leaves of the text `end` behind it."""
        mark = end.strip()
        lead, _, rest = end.partition(mark)
        is_token, kept_out = mark in self._special_tokens, sorted(ends - self._special_tokens.keys())
        whole = None
        if not self._tries_each:
            whole = lark_before(grammar, kept_out, lead if is_token else lead + mark, is_end=not is_token)
        if whole is None:
            return lark_without(grammar, kept_out), end
        return whole, mark + rest if is_token else rest

    def _of_whole_call(self, name: str, keys: tuple[str, str], schema: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return the grammar of a call that is a JSON object."""
        grammar = self._of_arguments(schema, index)["json_schema"]
        beside = {key: grammar.pop(key) for key in ("$defs", "x-guidance") if key in grammar}
        properties = {keys[0]: {"const": name}, keys[1]: grammar}
        whole = {"type": "object", "properties": properties, "required": list(keys), "additionalProperties": False}
        return {"json_schema": {**whole, **beside}}

    def _of_free_arguments(self, call: CallText, index: int, literal: Callable[[str], str]) -> list[str]:
        """Return the rules for a function's free arguments, with the text after them."""
        if call.free:
            return [f"rest{index}: FREE{index} {literal(call.after)}", f"FREE{index}: /{call.free}/"]
        if not call.after:
            return [f"rest{index}: /(.|\\n)*/"]
        first, *rest = pieces(call.after.lstrip(), self._special_tokens)
        after = literal("".join(rest))
        if first in self._special_tokens:
            return [f"rest{index}: /(.|\\n)*/ {literal(first)} {after}"]
        return [f"rest{index}: free{index} {after}", f"free{index}[lazy]: /(.|\\n)*{escaped(first)}/"]

    def _of_parameters(
        self,
        call: CallText,
        wanted: ParameterList,
        schema: Mapping[str, Any],
        index: str,
        literal: Callable[[str], str],
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Return the rules for one of a function's lists of parameters, in the order of its schema, and the grammars
        that the rules name."""
        form, field = call.parameter, _field_of_arguments(index.partition("_")[0])
        assert form is not None
        lines, grammars = [], list[dict[str, Any]]()
        for j, (name, kind) in enumerate(wanted.kinds.items()):
            here = f"{index}_{j}"
            after_value = form.after_value.replace("{key}", name)
            before = form.before_key + name + (form.after_key_of_json if kind is None else form.after_key_of_text)
            head, end = literal(before), literal(after_value)
            if kind is None:
                # References are to the whole schema.
                grammar = self._of_schema(dict(schema), field, start=wanted.schemas[name], closes=True, wanted=_PLAIN)
                grammars.append({**grammar, "name": f"value{here}"})
                lines.append(f"parameter{here}: {head} @value{here} {end}")
            elif isinstance(kind, list):
                lines.append(f"parameter{here}: {head} ({' | '.join(json.dumps(text) for text in kind)}) {end}")
            else:
                more, parameter = self._of_text(call, kind, here, after_value)
                lines += more
                other, of_json = "", literal(form.before_key + name + form.after_key_of_json)
                if kind.or_null and form.says_types:
                    other = f' | {of_json} "null" {end}'
                if kind.or_json is not None:
                    grammar = self._of_schema(dict(schema), field, start=dict(kind.or_json), closes=True, wanted=_PLAIN)
                    grammars.append({**grammar, "name": f"json{here}"})
                    other += f" | {of_json} @json{here} {end}"
                lines.append(f"parameter{here}: {head} {parameter}{other}")
            nothing_first = f" | first{index}_{j + 1}" if name not in wanted.required else ""
            nothing_more = f" | more{index}_{j + 1}" if name not in wanted.required else ""
            lines.append(f"first{here}: parameter{here} more{index}_{j + 1}{nothing_first}")
            lines.append(f"more{here}: {literal(form.separator)} parameter{here} more{index}_{j + 1}{nothing_more}")
        last = len(wanted.kinds)
        lines += [f'first{index}_{last}: ""', f'more{index}_{last}: ""']
        return lines, grammars

    def _of_keyed(
        self, value: KeyedValue, call: CallText, here: str, lines: list[str], grammars: list[dict[str, Any]]
    ) -> str:
        """Add the rules for a value, `here` being their place, to `lines`, and the grammars that they name. Return the
        name of the value's rule."""
        literal, form, rule = partial(lark.literal, special_tokens=self._special_tokens), call.parameter, f"keyed{here}"
        assert form is not None
        quote = form.after_value
        if isinstance(value, TextRule):
            more, text = self._of_text(call, value, here, quote)
            lines += [*more, f"{rule}: {literal(quote)} {text}"]
        elif isinstance(value, tuple):
            lines.append(f"{rule}: {' | '.join(literal(quote + text + quote) for text in value)}")
        elif isinstance(value, KeyedScalar):
            grammar = self._of_schema(
                dict(value.schema), _field_of_arguments(here.partition("_")[0]), closes=True, wanted=_PLAIN
            )
            grammars.append({**grammar, "name": f"scalar{here}"})
            lines.append(f"{rule}: @scalar{here}")
        elif isinstance(value, KeyedList):
            item = self._of_keyed(value.item, call, f"{here}_0", lines, grammars)
            least, most = max(0, value.least - 1), "" if value.most is None else max(0, value.most - 1)
            items = "" if value.most == 0 else f'{item} ("," {item}){{{least},{most}}}'
            lines.append(f'{rule}: "[" {items if value.least or not items else f"({items})?"} "]"')
        elif isinstance(value, KeyedObject) and value.fields is not None:
            lines.append(f'{rule}: "{{" first{here}_0 "}}"')
            for j, (name, (one, is_required)) in enumerate(value.fields.items()):
                pair = f"{literal(name + ':')} {self._of_keyed(one, call, f'{here}_{j}', lines, grammars)}"
                following = f"{here}_{j + 1}"
                lines.append(f"first{here}_{j}: {pair} more{following}{'' if is_required else f' | first{following}'}")
                lines.append(
                    f'more{here}_{j}: "," {pair} more{following}{"" if is_required else f" | more{following}"}'
                )
            last = len(value.fields)
            lines += [f'first{here}_{last}: ""', f'more{here}_{last}: ""']
        elif isinstance(value, KeyedChoice) and value.options:
            options = (self._of_keyed(one, call, f"{here}_{j}", lines, grammars) for j, one in enumerate(value.options))
            lines.append(f"{rule}: {' | '.join(options)}")
        else:
            text = self._of_keyed(TextRule(), call, f"{here}_0", lines, grammars)
            scalar = self._of_keyed(KeyedScalar(_ANY_SCALAR), call, f"{here}_1", lines, grammars)
            lines += [
                f"{rule}: {'object' if isinstance(value, KeyedObject) else 'any'}{here}",
                f"any{here}: {text} | {scalar} | list{here} | object{here}",
                f'list{here}: "[" (any{here} ("," any{here})*)? "]"',
                f'object{here}: "{{" (pair{here} ("," pair{here})*)? "}}"',
                f"pair{here}: /[A-Za-z_][A-Za-z0-9_-]{{0,63}}:/ any{here}",
            ]
        return rule

    def _of_text(self, call: CallText, rule: TextRule, here: str, after_value: str) -> tuple[list[str], str]:
        """Return the rules for a parameter's text, and the expression for the text and `after_value`."""
        form, literal = call.parameter, partial(lark.literal, special_tokens=self._special_tokens)
        assert form is not None
        mark = after_value.strip()
        lead, _, after = after_value.partition(mark)
        if not rule.expressions:
            if mark in self._special_tokens:
                return [], f"/(.|\\n)*/ {literal(mark)} {literal(after)}"
            return [f"value{here}[lazy]: /(.|\\n)*{escaped(mark)}/"], f"value{here} {literal(after)}"
        ends = _ends_of_text(form, call, after_value)
        out = "".join(f" & ~/(.|\\n)*{escaped(end)}(.|\\n)*/" for end in sorted(ends))
        null = ' | "null"' if rule.or_null and not form.says_types else ""
        lines = [f"TEXT{here}: {' & '.join(f'/{one}/' for one in rule.expressions)}{out}"]
        if mark in self._special_tokens:
            lines.append(f"VALUE{here}: (TEXT{here}{null}) {literal(lead)}")
            return lines, f"VALUE{here} {literal(mark)} {literal(after)}"
        lines.append(f"value{here}[lazy]: (TEXT{here}{null}) {literal(lead + mark)}")
        return lines, f"value{here} {literal(after)}"

    def _of_arguments(self, schema: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return the grammar of a function's arguments: an object without properties that the schema does not name."""
        field = _field_of_arguments(index)
        if not describes_object(schema):
            raise RequestError(f"{field} must describe an object, not {schema['type']!r:.100}.", param=field)
        schema = {**schema, "type": "object"}
        if schema.keys() <= {"type", "properties", *SILENT} and not schema.get("properties"):
            schema["additionalProperties"] = False  # a function without parameters: any argument would be made up
        start = None
        if not schema.keys().isdisjoint(IN_PLACE) and (flats := flat_objects(schema)) is not None:
            start = {"anyOf": flats}  # whose objects can be closed
        return self._of_schema(schema, field, start=start, closes=True, wanted=_PLAIN)


def _field_of_arguments(index: int | str) -> str:
    return f"tools[{index}].function.parameters"


def _ends_of_text(form: ParameterText, call: CallText, after_value: str) -> set[str]:
    """Return the marks at which readers end a text without quotes."""
    return {after_value.strip(), form.before_key.strip(), call.after.strip().partition("\n")[0]} - {""}


def describes_object(schema: Mapping[str, Any]) -> bool:
    """Return whether arguments may have a schema: it allows objects, perhaps among other types."""
    kinds = schema.get("type")
    return kinds is None or "object" in (kinds if isinstance(kinds, list) else [kinds])


def _after_free_text(
    calls: ToolCalls,
    ending: str,
    literal: Callable[[str], str],
    special_tokens: Mapping[str, int],
    indices: Mapping[str, int],
) -> list[str]:
    """Return the rules of an answer that is any text, with or without calls after it. Text that begins like a call must
    continue as one."""
    spelling, marks = calls.spelling, calls.marks or ()
    heads = calls.heads
    if not marks:
        start = [f"start: {literal(spelling.open)} call {ending} | FREE", "FREE: /(.|\\n)*/ & ~/\\s*[{\\[](.|\\n)*/"]
        return start
    trigger = next(text for text in sorted(marks, key=len) if all(head.startswith(text) for head in heads.values()))
    first, *_ = pieces(trigger, special_tokens)
    others = [text for text in marks if pieces(text, special_tokens)[0] not in special_tokens]
    kept_out = "".join(f" & ~/(.|\\n)*{escaped(text)}(.|\\n)*/" for text in others)
    free = f"FREE: /(.|\\n)*/{kept_out}"
    if first in special_tokens:
        trigger, before = first, f"before: FREE {literal(first)}"
    else:
        before = f"before[lazy]: /(.|\\n)*{escaped(trigger)}/"
    heads_left = [f"{literal(head[len(trigger) :])} rest{indices[name]}" for name, head in heads.items()]
    # Text after the calls must not begin with a blank, because blanks begin another call.
    after = f"AFTER: /[^ \\t\\r\\n](.|\\n)*/{kept_out}"
    begun = f"begun: {' | '.join(heads_left)}"
    return [f"start: FREE | before begun {ending} AFTER?", before, free, after, begun]


def _of_budget(budget: ThinkingBudget) -> str:
    """Return the grammar of reasoning within its budget, then anything."""
    lines = ["start: thought free*", budget.rule, f"free: {budget.tokens_but()}"]
    if budget.start is not None:
        lines[0] = f"start: <[{budget.start}]> thought free* | (other free*)?"
        lines.append(f"other: {budget.tokens_but(budget.start)}")
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}]})


def _after_reasoning(
    grammar: str,
    marks: ReasoningMarks,
    special_tokens: Mapping[str, int],
    budget: ThinkingBudget | None,
    or_calls: str | None,
    field: str,
    *,
    is_call: bool,
) -> str:
    """Return the grammar of reasoning (any text up to its end mark; it may be optional), then `grammar` or
    `or_calls`."""
    literal = partial(lark.literal, special_tokens=special_tokens)
    end, *more = pieces(marks.end, special_tokens)
    after = " ".join(map(literal, more))
    start = literal(marks.start or "")
    if budget is not None:
        thought = budget.rule
        start = start if budget.start is None else f"<[{budget.start}]>"
    elif end in special_tokens:
        thought = f"thought: /(.|\\n)*/ {literal(end)} {after}"
    else:
        thought = f"thought: upto {after}\nupto[lazy]: /(.|\\n)*/ {literal(end)}"
    answer = "@answer" if is_call else f"{literal(marks.answer_start)} @answer {literal(marks.answer_end)}"
    if or_calls is not None:
        answer = f"({answer} | @calls)"
    rules = (
        f"start: {'reasoning?' if marks.is_optional else 'reasoning'} {answer}\n"
        f"reasoning: {start} thought SPACE?\n{thought}\nSPACE: /\\n{{1,2}}/\n"
    )
    return _joined(rules, grammar, or_calls, field)


def _joined(rules: str, grammar: str, or_calls: str | None, field: str) -> str:
    """Return the grammar of `rules`, in which `@answer` is `grammar` and `@calls` is `or_calls`."""
    try:
        whole = json.loads(grammar)
        first, *others = whole["grammars"]
        parts = [{**first, "name": "answer"}, *others]
    except (KeyError, TypeError, ValueError):
        raise RequestError(f"{field} cannot be read: it is no grammar, or too long.", param=field) from None
    if or_calls is not None:
        first, *others = json.loads(or_calls)["grammars"]
        parts += [{**first, "name": "calls"}, *others]
    return json.dumps({**whole, "grammars": [{"lark_grammar": rules}, *parts]})


def _checked_lark(text: str) -> str:
    """Return a request's grammar in llguidance's Lark. Raises `ValueError` if it cannot be read or a piece is too
    long."""
    for piece in _PIECES.finditer(text):
        _check_length(piece[0])
    return context_free.to_lark(text)


def _of_lark(text: str) -> str:
    return text if text.lstrip().startswith("{") else json.dumps({"grammars": [{"lark_grammar": text}]})


def _check_length(piece: str) -> None:
    if len(piece) > MAX_PIECE_CHARACTERS:
        raise ValueError(f"a part of it has {len(piece)} characters, and {MAX_PIECE_CHARACTERS} is the most")


def _check_parts(schema: Any, passed_over: Collection[str] = _COMMENTS) -> None:
    """Raise `ValueError` if a schema is too deep or one of its strings too long, except under the names
    `passed_over`."""
    level, depth = [schema], 0
    while level:
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
        depth += 1
        children: list[Any] = []
        for node in level:
            if isinstance(node, str):
                _check_length(node)
            elif isinstance(node, list):
                children += node
            elif isinstance(node, dict):
                children += node.keys()
                children += (value for name, value in node.items() if name not in passed_over)
        level = children


_ANY_SCALAR = {"type": ["number", "boolean", "null"]}
_PLAIN = StructuredOutputsParams(json={})  # options of JSON in calls
_verdicts: OrderedDict[bytes, str] = OrderedDict()  # by a grammar's hash: why it cannot be followed, or ""
_verdicts_lock = threading.Lock()
_MAX_VERDICTS = 8192


def _problem(grammar: str, field: str, *, is_simple: bool = False) -> str:
    """Return why a grammar cannot be followed, or "". Each grammar is tried once, even if it takes too long."""
    if len(grammar) > MAX_CHARACTERS:
        raise RequestError(f"{field} has {len(grammar)} characters; {MAX_CHARACTERS} is the most.", param=field)
    key = hashlib.blake2b(grammar.encode(), digest_size=20).digest()
    with _verdicts_lock:
        if (known := _verdicts.get(key)) is not None:
            _verdicts.move_to_end(key)
            return known
    try:
        problem = _first_line(_validated(grammar) if is_simple else _trial.problem(grammar))
    except TrialsBusy as e:
        raise RequestError(f"{field} was not tried to its end: {e}", param=field, status=503) from None
    except TrialFailed as e:
        problem = str(e)
    with _verdicts_lock:
        _verdicts[key] = problem
        while len(_verdicts) > _MAX_VERDICTS:
            _verdicts.popitem(last=False)
    return problem


def _validated(grammar: str) -> str:
    """Return llguidance's error for a grammar on which its work is bounded, or "". Releases the interpreter's lock."""
    from llguidance import LLMatcher

    try:
        return LLMatcher.validate_grammar(grammar, limits=limits())
    except BaseException as e:
        if type(e).__name__ != "PanicException":  # a panic of Rust, which is not an Exception
            raise
        return "llguidance fails on it."


_OF_REGEX = re.compile(r'(?:(?:at )?\d+\(\d+\): invalid regex (?P<regex>".*") \(in \w+\): )?regex parse error:')


def _first_line(problem: object) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    if not lines:
        return ""
    # For a regular expression, a drawing of the place comes before the reason.
    reasons = [line for line in lines[1:] if line.startswith(("error:", "while processing"))]
    if reasons and (found := _OF_REGEX.fullmatch(lines[0])):
        named = f"the regular expression {found['regex'] or '':.200}".rstrip()
        lines[0] = f"{named} cannot be read:"
        reasons[0] = reasons[0].removeprefix("error: ") + "."
    shown = " ".join([lines[0], *reasons[:1]])
    return shown if len(shown) <= 300 else shown[:300] + "..."
