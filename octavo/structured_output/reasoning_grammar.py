"""The grammar of reasoning before an answer, within its budget if it has one."""

import json
from collections.abc import Mapping
from functools import partial

from octavo.errors import RequestError
from octavo.structured_output import lark
from octavo.structured_output.answer_parts import ReasoningMarks, ThinkingBudget
from octavo.structured_output.lark import pieces


def of_budget(budget: ThinkingBudget) -> str:
    """Return the grammar of reasoning within its budget, then anything."""
    lines = ["start: thought free*", budget.rule(ends_with_call=True), f"free: {budget.tokens_but()}"]
    if budget.start is not None:
        lines[0] = f"start: <[{budget.start}]> thought free* | (other free*)?"
        lines.append(f"other: {budget.tokens_but(budget.start)}")
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}]})


def after_reasoning(
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
    answer = "@answer" if is_call else f"{literal(marks.answer_start)} @answer {literal(marks.answer_end)}"
    if or_calls is not None:
        answer = f"({answer} | @calls)"
    if not marks.end:
        return joined(f"start: {answer}", grammar, or_calls, field)
    end, *more = pieces(marks.end, special_tokens)
    after = " ".join(map(literal, more))
    start = literal(marks.start or "")
    if budget is not None:
        thought = budget.rule()
        start = start if budget.start is None else f"<[{budget.start}]>"
    elif end in special_tokens:
        thought = f"thought: /(.|\\n)*/ {literal(end)} {after}"
    else:
        thought = f"thought: upto {after}\nupto[lazy]: /(.|\\n)*/ {literal(end)}"
    rules = (
        f"start: {'reasoning?' if marks.is_optional else 'reasoning'} {answer}\n"
        f"reasoning: {start} thought SPACE?\n{thought}\nSPACE: /\\n{{1,2}}/\n"
    )
    return joined(rules, grammar, or_calls, field)


def joined(rules: str, grammar: str, or_calls: str | None, field: str) -> str:
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
