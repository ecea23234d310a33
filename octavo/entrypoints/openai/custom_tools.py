"""OpenAI's custom tools, whose calls have a text instead of arguments: the input, free or by a grammar.

The model sees and calls such a tool as a function with one parameter for the text. `ChatMessage` and `Tool` turn
requests into functions, and `CustomInput` turns the arguments of a call into the input.
"""

import json
import re
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from octavo.call_arguments import read_arguments, with_whole_pairs, without_open_escape
from octavo.entrypoints.http.body_fields import RequestBody, Text
from octavo.structured_output.answer_parts import CUSTOM_INPUT
from octavo.structured_output.lark_in_calls import regex_as_lark

_BEGIN = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_INNER = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)  # of a text in JSON
_NAMES = {"lark": "Lark grammar", "regex": "regular expression"}


class InputGrammar(RequestBody):
    """What inputs of a custom tool must match."""

    definition: Text
    syntax: Literal["lark", "regex"]


class InputFormat(RequestBody):
    """The form of inputs. Responses have the fields of a grammar beside the type."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None

    @model_validator(mode="before")
    @classmethod
    def _nest(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") == "grammar" and "grammar" not in data:
            return {"type": "grammar", "grammar": {name: one for name, one in data.items() if name != "type"}}
        return data

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        if (self.type == "grammar") != (self.grammar is not None):
            raise ValueError('needs "type": "grammar" and its definition and syntax, or "type": "text"')
        return self

    def flat(self) -> dict[str, Any]:
        """Return the format as Responses have it."""
        return {"type": self.type, **({} if self.grammar is None else self.grammar.model_dump())}


class CustomDefinition(RequestBody):
    """A custom tool that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: Text | None = None
    format: InputFormat | None = None

    @property
    def grammar(self) -> str | None:
        """Return the Lark grammar of inputs, or None if any text is one."""
        if self.format is None or (grammar := self.format.grammar) is None:
            return None
        return grammar.definition if grammar.syntax == "lark" else regex_as_lark(grammar.definition)

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the schema of the function that the model sees."""
        description = "The whole input of the tool, as it is."
        if self.format is not None and (grammar := self.format.grammar) is not None:
            description += f" It follows this {_NAMES[grammar.syntax]}:\n{grammar.definition}"
        text = {"type": "string", "description": description}
        return {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}


def as_arguments(text: str) -> dict[str, str]:
    """Return the arguments of the function that the model sees for an input."""
    return {CUSTOM_INPUT: text}


def whole_input(arguments: str) -> str:
    """Return the input that the arguments of a call have. Where a model has named the text otherwise it is the only
    text, and without any the arguments as they are."""
    value = read_arguments(arguments)
    if not isinstance(value, dict):
        return arguments
    texts = [one for one in value.values() if isinstance(one, str)]
    found = value.get(CUSTOM_INPUT, texts[0] if len(texts) == len(value) == 1 else None)
    return found if isinstance(found, str) else arguments if value else ""


class CustomInput:
    """Reads the input from arguments that come in pieces, which begin as grammars write them."""

    def __init__(self) -> None:
        self._held = ""
        self._is_open = False
        self.is_whole = False

    def add(self, arguments: str) -> str:
        """Return the text that `arguments` add to the input."""
        self._held += arguments
        if not self._is_open:
            if (begin := _BEGIN.match(self._held)) is None:
                return ""
            self._held, self._is_open = self._held[begin.end() :], True
        if self.is_whole:
            return ""
        inner = _INNER.match(without_open_escape(self._held))
        assert inner is not None
        self._held = self._held[inner.end() :]
        self.is_whole = self._held.startswith('"')
        try:
            return str(json.loads(f'"{with_whole_pairs(inner[0])}"', strict=False))
        except ValueError:  # an escape that JSON has not
            return inner[0]
