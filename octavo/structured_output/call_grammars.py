"""The grammar of an answer that is calls, or text that may have calls."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from octavo.errors import RequestError
from octavo.structured_output import lark
from octavo.structured_output.answer_parts import ToolCalls
from octavo.structured_output.argument_grammars import ArgumentGrammars, field_of_arguments
from octavo.structured_output.channel_grammar import channel_rules
from octavo.structured_output.lark import escaped, pieces
from octavo.structured_output.schema_grammar import GrammarDraft, NoValueError

MAX_CALLS = 32  # in one answer


def calls_grammar(draft: GrammarDraft, calls: ToolCalls, *, is_beside_json: bool = False) -> str:
    """Return the grammar of calls. With `is_beside_json`, calls that are JSON objects are written as schemas,
    because the lexer cannot tell their first texts from other JSON."""
    draft.is_certain = False  # the rules for calls may be refused
    special_tokens, arguments = draft.special_tokens, ArgumentGrammars(draft)
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
            grammars.append({**_of_whole_call(arguments, name, spelling.keys, schema, i), "name": f"whole{i}"})
            lines += [f"call{i}: @whole{i}", f"next{i}: {literal(spelling.separator)} @whole{i}"]
            continue
        if name in calls.inputs:
            line, grammar = arguments.of_input(call, calls.inputs[name], i)
            lines.append(line)
            grammars.append(grammar)
        elif call.keyed is not None:
            lines.append(
                f"rest{i}: {arguments.of_keyed(call.keyed, call, str(i), lines, grammars)} {literal(call.after)}"
            )
        elif call.free is not None:
            lines += arguments.of_free_arguments(call, i)
        elif call.parameter is None:
            lines.append(f"rest{i}: @arguments{i} {literal(call.after)}")
            grammars.append({**arguments.of_arguments(schema, i), "name": f"arguments{i}"})
        else:
            lists, problem = list[str](), None
            for j, one in enumerate(call.lists):
                here = f"{i}_{j}"
                try:
                    more, their_grammars = arguments.of_parameters(call, one, schema, here)
                except NoValueError as e:
                    problem = e
                    continue
                lists.append(f"first{here}_0 {literal(call.after)}")
                lines += more
                grammars += their_grammars
            if problem is not None and not lists:
                raise problem
            lines.append(f"rest{i}: {' | '.join(lists)}")
        lines.append(f"call{i}: {literal(call.address + call.before)} rest{i}")
        # Separator and the text before a call are one lexeme, because the lexer cannot go back to the end of a
        # shorter one.
        lines.append(f"next{i}: {literal(spelling.separator + call.address + call.before)} rest{i}")
    draft.held |= {
        name: calls.schemas[name]
        for name, call in spelling.calls.items()
        if call.free is None and call.is_held and field_of_arguments(indices[name]) not in draft.fields_held_in_part
    }
    names = " | ".join(f"call{indices[name]}" for name in spelling.calls)
    limit = MAX_CALLS - 1 if calls.is_parallel else 0
    more_calls = f"next_call{{0,{limit}}}" if limit else ""
    ending = f"{more_calls} {literal(spelling.close)}"
    lines += [f"call: {names}", f"next_call: {names.replace('call', 'next')}"]
    if calls.marks is None:
        start = [f"start: {literal(spelling.open)} call {ending}"]
    elif calls.has_channels:
        draft.is_simple = False
        start = channel_rules(indices, special_tokens)
    else:
        draft.is_simple = False
        start = _after_free_text(calls, ending, literal, special_tokens, indices)
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(start + lines)}, *grammars]})


def _of_whole_call(
    arguments: ArgumentGrammars, name: str, keys: tuple[str, str], schema: Mapping[str, Any], index: int
) -> dict[str, Any]:
    """Return the grammar of a call that is a JSON object."""
    grammar = arguments.of_arguments(schema, index)["json_schema"]
    beside = {key: grammar.pop(key) for key in ("$defs", "x-guidance") if key in grammar}
    properties = {keys[0]: {"const": name}, keys[1]: grammar}
    whole = {"type": "object", "properties": properties, "required": list(keys), "additionalProperties": False}
    return {"json_schema": {**whole, **beside}}


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
    heads = {name: spelling.open + call.before for name, call in spelling.calls.items()}
    if not marks:
        return [f"start: {literal(spelling.open)} call {ending} | FREE", "FREE: /(.|\\n)*/ & ~/\\s*[{\\[](.|\\n)*/"]
    if calls.text_start:
        trigger = spelling.separator
    else:
        trigger = next(text for text in sorted(marks, key=len) if all(head.startswith(text) for head in heads.values()))
    first, *_ = pieces(trigger, special_tokens)
    others = [text for text in marks if pieces(text, special_tokens)[0] not in special_tokens]
    kept_out = "".join(f" & ~/(.|\\n)*{escaped(text)}(.|\\n)*/" for text in others)
    free = f"FREE: /(.|\\n)*/{kept_out}"
    if first in special_tokens:
        trigger, before = first, f"before: FREE {literal(first)}"
    else:
        before = f"before[lazy]: /(.|\\n)*{escaped(trigger)}/"
    heads_left = [f"{literal(head.removeprefix(trigger))} rest{indices[name]}" for name, head in heads.items()]
    # Text after the calls must not begin with a blank, because blanks begin another call.
    after = f"AFTER: /[^ \\t\\r\\n](.|\\n)*/{kept_out}"
    begun = f"begun: {' | '.join(heads_left)}"
    if calls.text_start:
        spoken = f"{literal(calls.text_start)} (FREE | before begun {ending} AFTER?)"
        return [f"start: {spoken} | begun {ending} AFTER?", before, free, after, begun]
    # Free text contains no special tokens.
    marked = [
        literal(text) for text in calls.text_marks if not special_tokens.keys().isdisjoint(pieces(text, special_tokens))
    ]
    if not marked:
        return [f"start: FREE | before begun {ending} AFTER?", before, free, after, begun]
    answer = f"(FREE mark)* (FREE | before begun {ending} AFTER? (mark FREE)*)"
    return [f"start: {answer}", f"mark: {' | '.join(marked)}", before, free, after, begun]
