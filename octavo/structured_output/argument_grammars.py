"""The grammars of a call's arguments, as each model writes them: a JSON object, a list of parameters with marks, keys
without quotes, or the one text of a custom tool."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from octavo.errors import RequestError
from octavo.structured_output import lark
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
    TextRule,
)
from octavo.structured_output.flat_objects import flat_objects
from octavo.structured_output.grammar_check import MAX_CHARACTERS, checked_lark, problem_of
from octavo.structured_output.lark import escaped, pieces
from octavo.structured_output.lark_in_calls import lark_before, lark_without, quoted_lark
from octavo.structured_output.schema_grammar import GrammarDraft, NoValueError, schema_grammar
from octavo.structured_output.schema_keywords import IN_PLACE, SILENT

_ANY_SCALAR = {"type": ["number", "boolean", "null"]}


class ArgumentGrammars:
    """Writes the arguments of one set of functions; `index` is a function's place among the tools."""

    def __init__(self, draft: GrammarDraft) -> None:
        self._draft = draft
        self._special_tokens = draft.special_tokens
        self._literal = partial(lark.literal, special_tokens=draft.special_tokens)

    def of_arguments(self, schema: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return the grammar of a function's arguments: an object without properties that the schema does not name."""
        field = field_of_arguments(index)
        if not describes_object(schema):
            raise RequestError(f"{field} must describe an object, not {schema['type']!r:.100}.", param=field)
        schema = {**schema, "type": "object"}
        if schema.keys() <= {"type", "properties", *SILENT} and not schema.get("properties"):
            schema["additionalProperties"] = False  # a function without parameters: any argument would be made up
        start = None
        if not schema.keys().isdisjoint(IN_PLACE) and (flats := flat_objects(schema)) is not None:
            start = {"anyOf": flats}  # whose objects can be closed
        return schema_grammar(self._draft, schema, field, start=start)

    def of_free_arguments(self, call: CallText, index: int) -> list[str]:
        """Return the rules for a function's free arguments, with the text after them."""
        literal = self._literal
        if call.free:
            return [f"rest{index}: FREE{index} {literal(call.after)}", f"FREE{index}: /{call.free}/"]
        if not call.after:
            return [f"rest{index}: /(.|\\n)*/"]
        first, *rest = pieces(call.after.lstrip(), self._special_tokens)
        after = literal("".join(rest))
        if first in self._special_tokens:
            return [f"rest{index}: /(.|\\n)*/ {literal(first)} {after}"]
        return [f"rest{index}: free{index} {after}", f"free{index}[lazy]: /(.|\\n)*{escaped(first)}/"]

    def of_parameters(
        self, call: CallText, wanted: ParameterList, schema: Mapping[str, Any], index: str
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Return the rules for one of a function's lists of parameters, in the order of its schema, and the grammars
        that the rules name."""
        literal, form, field = self._literal, call.parameter, field_of_arguments(index.partition("_")[0])
        assert form is not None
        lines, grammars = [], list[dict[str, Any]]()
        for j, (name, kind) in enumerate(wanted.kinds.items()):
            here = f"{index}_{j}"
            after_value = form.after_value.replace("{key}", name)
            before = form.before_key + name + (form.after_key_of_json if kind is None else form.after_key_of_text)
            head, end = literal(before), literal(after_value)
            if kind is None:
                # References are to the whole schema.
                try:
                    grammar = schema_grammar(self._draft, dict(schema), field, start=wanted.schemas[name])
                except NoValueError:
                    if name in wanted.required:
                        raise
                    lines += [f"{rule}{here}: {rule}{index}_{j + 1}" for rule in ("first", "more")]  # it is left out
                    continue
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
                    grammar = schema_grammar(self._draft, dict(schema), field, start=dict(kind.or_json))
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

    def of_keyed(
        self, value: KeyedValue, call: CallText, here: str, lines: list[str], grammars: list[dict[str, Any]]
    ) -> str:
        """Add the rules for a value, `here` being their place, to `lines`, and the grammars that they name. Return the
        name of the value's rule."""
        literal, form, rule = self._literal, call.parameter, f"keyed{here}"
        assert form is not None
        quote = form.after_value
        if isinstance(value, TextRule):
            more, text = self._of_text(call, value, here, quote)
            lines += [*more, f"{rule}: {literal(quote)} {text}"]
        elif isinstance(value, tuple):
            lines.append(f"{rule}: {' | '.join(literal(quote + text + quote) for text in value)}")
        elif isinstance(value, KeyedScalar):
            grammar = schema_grammar(self._draft, dict(value.schema), field_of_arguments(here.partition("_")[0]))
            grammars.append({**grammar, "name": f"scalar{here}"})
            lines.append(f"{rule}: @scalar{here}")
        elif isinstance(value, KeyedList):
            item = self.of_keyed(value.item, call, f"{here}_0", lines, grammars)
            least, most = max(0, value.least - 1), "" if value.most is None else max(0, value.most - 1)
            items = "" if value.most == 0 else f'{item} ("," {item}){{{least},{most}}}'
            lines.append(f'{rule}: "[" {items if value.least or not items else f"({items})?"} "]"')
        elif isinstance(value, KeyedObject) and value.fields is not None:
            lines.append(f'{rule}: "{{" first{here}_0 "}}"')
            for j, (name, (one, is_required)) in enumerate(value.fields.items()):
                following, num_lines = f"{here}_{j + 1}", len(lines)
                try:
                    pair = f"{literal(name + ':')} {self.of_keyed(one, call, f'{here}_{j}', lines, grammars)}"
                except NoValueError:
                    if is_required:
                        raise
                    del lines[num_lines:]
                    lines += [f"{rule}{here}_{j}: {rule}{following}" for rule in ("first", "more")]  # it is left out
                    continue
                lines.append(f"first{here}_{j}: {pair} more{following}{'' if is_required else f' | first{following}'}")
                lines.append(
                    f'more{here}_{j}: "," {pair} more{following}{"" if is_required else f" | more{following}"}'
                )
            last = len(value.fields)
            lines += [f'first{here}_{last}: ""', f'more{here}_{last}: ""']
        elif isinstance(value, KeyedChoice) and value.options:
            options = (self.of_keyed(one, call, f"{here}_{j}", lines, grammars) for j, one in enumerate(value.options))
            lines.append(f"{rule}: {' | '.join(options)}")
        else:
            text = self.of_keyed(TextRule(), call, f"{here}_0", lines, grammars)
            scalar = self.of_keyed(KeyedScalar(_ANY_SCALAR), call, f"{here}_1", lines, grammars)
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
        form, literal = call.parameter, self._literal
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

    def of_input(self, call: CallText, text: str, index: int) -> tuple[str, dict[str, Any]]:
        """Return the rule for the one argument of a custom tool, a text that follows the Lark grammar `text`, and the
        grammar that the rule names."""
        literal, form, name = self._literal, call.parameter, f"input{index}"
        field = f"tools[{index}].custom.format.grammar"
        if len(text) > MAX_CHARACTERS:
            raise RequestError(f"{field} has {len(text)} characters; {MAX_CHARACTERS} is the most.", param=field)
        draft, end = self._draft, ""
        draft.is_simple, draft.has_parts = False, True
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
            given = checked_lark(text)
            # A grammar that is too much as terminals is tried again as it is.
            if draft.tries_each and (problem := problem_of(lark.as_grammar(given), field)):
                raise ValueError(problem.rstrip("."))
            if form is not None and end:
                grammar, end = self._of_text_before(given, end, _ends_of_text(form, call, end))
            else:
                grammar = quoted_lark(given, as_terminals=not draft.tries_each)
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
        if not self._draft.tries_each:
            whole = lark_before(grammar, kept_out, lead if is_token else lead + mark, is_end=not is_token)
        if whole is None:
            return lark_without(grammar, kept_out), end
        return whole, mark + rest if is_token else rest


def field_of_arguments(index: int | str) -> str:
    return f"tools[{index}].function.parameters"


def _ends_of_text(form: ParameterText, call: CallText, after_value: str) -> set[str]:
    """Return the marks at which readers end a text without quotes."""
    return {after_value.strip(), form.before_key.strip(), call.after.strip().partition("\n")[0]} - {""}


def describes_object(schema: Mapping[str, Any]) -> bool:
    """Return whether arguments may have a schema: it allows objects, perhaps among other types."""
    kinds = schema.get("type")
    return kinds is None or "object" in (kinds if isinstance(kinds, list) else [kinds])
