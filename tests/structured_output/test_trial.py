"""Grammars that llguidance is not up to: they are refused, and nothing but the process that tries them is hurt."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.structured_output import grammar_check
from octavo.structured_output import trial as trial_module
from octavo.structured_output.answer_parts import CallText, Spelling, ToolCalls
from octavo.structured_output.grammar_check import MAX_PIECE_CHARACTERS
from octavo.structured_output.trial import GrammarTrial, TrialFailed
from tests.schemas import chained_schema
from tests.structured_output.grammars import check_grammar, make_grammar

FINE = json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]})
# Which of many regular expressions still hold is found out by trying their products.
ENDLESS = "start: A\nA: " + " & ".join(f"/(.|\\n)*a.{{{i}}}b(.|\\n)*/" for i in range(1, 30))


@pytest.fixture
def trial() -> Iterator[GrammarTrial]:
    trial = GrammarTrial()
    yield trial
    trial.close()


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def test_what_overflows_the_stack_ends_only_the_trial(trial: GrammarTrial) -> None:
    with pytest.raises(TrialFailed, match="nested too deep"):
        trial.problem(json.dumps({"grammars": [{"json_schema": chained_schema(5000)}]}))
    assert trial.problem(FINE) == ""


@pytest.mark.parametrize("start", ["A", '"<[1]>" /<|x|>/ <[5-300]> <|name|> A'])
def test_what_never_ends_is_given_up(start: str) -> None:
    trial = GrammarTrial(time_limit_s=1)
    with pytest.raises(TrialFailed, match="more than 1 s"):
        trial.problem(lark(ENDLESS.replace("A", start, 1)))
    trial.close()


def test_special_tokens_are_no_problem(trial: GrammarTrial) -> None:
    assert trial.problem(lark('start: <[300]> /a*/ "<[300]>" | <|im_end|>')) == ""


def test_a_process_that_has_gone_is_replaced(trial: GrammarTrial) -> None:
    assert trial.problem(FINE) == ""
    assert trial._process is not None
    trial._process.kill()
    trial._process.wait()
    assert trial.problem(FINE) == ""
    trial.close()
    assert trial.problem(FINE) == ""


def test_a_verdict_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a grammar takes too long, too: sent again, it costs nothing."""
    quick = GrammarTrial(time_limit_s=0)
    monkeypatch.setattr(grammar_check, "_trial", quick)
    text = lark('start: "tried once"')
    with pytest.raises(RequestError, match="tools cannot be followed: to compile it takes more than 0 s"):
        check_grammar(text, "tools")
    quick.close()
    monkeypatch.setattr(grammar_check, "_trial", None)
    with pytest.raises(RequestError, match="to compile it takes more than 0 s"):
        check_grammar(text, "tools")


def test_grammars_are_tried_beside_one_that_does_not_end(trial: GrammarTrial) -> None:
    ended = list[str]()

    def try_it() -> None:
        with pytest.raises(TrialFailed) as failed:
            trial.problem(lark(ENDLESS))
        ended.append(str(failed.value))

    slow = threading.Thread(target=try_it)
    assert trial.problem(FINE) == ""
    slow.start()
    for _ in range(20):
        assert trial.problem(FINE) == ""
    assert slow.is_alive()
    trial.close()
    slow.join()
    assert ended == ["the server ends."]


def test_of_many_slow_grammars_some_are_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "_MAX_SLOW", 0)
    trial = GrammarTrial()
    monkeypatch.setattr(grammar_check, "_trial", trial)
    with pytest.raises(RequestError, match=r"was not tried to its end: .* send it again later") as refused:
        check_grammar(lark(ENDLESS), "tools")
    assert refused.value.status == 503
    trial.close()


def test_schemas_and_tools_need_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance's work on a plain schema is bounded, and so is that on calls with such schemas."""
    monkeypatch.setattr(grammar_check, "_trial", None)
    schemas = {f"f{i}": {"type": "object", "properties": {f"p{i}": {"type": "string"}}} for i in range(64)}
    make_grammar(StructuredOutputsParams(json=schemas["f1"]))
    make_grammar(ToolCalls(schemas, Spelling("[", "]", ", ", {name: CallText(f"{name}(", ")") for name in schemas})))


def test_a_tool_set_is_tried_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[str]()
    monkeypatch.setattr(grammar_check, "_trial", SimpleNamespace(problem=lambda text: tried.append(text) or ""))
    both = {"type": "string", "allOf": [{"pattern": "^[a-z]+$"}, {"pattern": "[aeiou]"}]}
    schemas = {f"g{i}": {"type": "object", "properties": {"a": both}} for i in range(128)}
    make_grammar(ToolCalls(schemas, Spelling("[", "]", ", ", {name: CallText(f"{name}(", ")") for name in schemas})))
    assert len(tried) == 1


@pytest.mark.parametrize("name", ["regex", "choice", "json", "grammar"])
def test_no_piece_of_a_grammar_is_so_long_that_its_masks_hold_others_up(name: str) -> None:
    def make(size: int) -> str:
        text = "a" * size
        wanted: dict[str, Any] = {
            "regex": text,
            "choice": ["b", text],
            "json": {"enum": [1, text], "description": "c" * MAX_PIECE_CHARACTERS * 2},
            "grammar": f'start: "b" "{text}"',
        }
        return make_grammar(StructuredOutputsParams(**{name: wanted[name]}))

    make(MAX_PIECE_CHARACTERS - 2)
    with pytest.raises(RequestError, match=rf"structured_outputs\.{name} cannot be read: a part has"):
        make(MAX_PIECE_CHARACTERS + 1)
