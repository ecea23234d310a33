"""The texts around the calls and the reasoning of an answer. `grammar_builder` makes grammars from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

CUSTOM_INPUT = "input"  # the one argument of custom tools: the text that they get


@dataclass(frozen=True, slots=True)
class ParameterText:
    """The texts around a parameter's key and its value, which is plain text or JSON. `{key}` in `after_value` is the
    key again."""

    before_key: str
    after_key_of_text: str
    after_key_of_json: str
    after_value: str
    separator: str = ""

    @property
    def says_types(self) -> bool:
        """Return whether the text before a value says if it is a text."""
        return self.after_key_of_text != self.after_key_of_json


@dataclass(frozen=True, slots=True)
class TextRule:
    """Regular expressions that a whole text must match. With `or_null` the text may also be `null`, with `or_json` JSON
    of this schema."""

    expressions: tuple[str, ...] = ()
    or_null: bool = False
    or_json: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class KeyedScalar:
    """A number, a truth value or null, by its schema."""

    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KeyedList:
    """`[item,item]`, with at least `least` and at most `most` items."""

    item: KeyedValue
    least: int = 0
    most: int | None = None


@dataclass(frozen=True, slots=True)
class KeyedObject:
    """`{key:value,key:value}`: for each key its value, and whether it must be there. None: any keys and values."""

    fields: Mapping[str, tuple[KeyedValue, bool]] | None


@dataclass(frozen=True, slots=True)
class KeyedChoice:
    """One of several values; without any, every value."""

    options: tuple[KeyedValue, ...] = ()


# A value of `KeyedValues`; a tuple is of texts, one of which it is.
KeyedValue = TextRule | tuple[str, ...] | KeyedScalar | KeyedList | KeyedObject | KeyedChoice


# The kind of a parameter's value: a text that follows a rule, a list of allowed texts, or None for JSON.
ValueKind = list[str] | TextRule | None


@dataclass(frozen=True, slots=True)
class ParameterList:
    """Parameters that a call may have together."""

    kinds: Mapping[str, ValueKind]
    required: Collection[str]
    schemas: Mapping[str, Any]  # of those that are JSON


@dataclass(frozen=True, slots=True)
class CallText:
    """The texts around a function's arguments. The arguments are one JSON object, or separate parameters (`parameter`),
    or any text (`free`). Those of `keyed` are between braces, with the marks of `parameter` around texts."""

    before: str
    after: str
    parameter: ParameterText | None = None
    lists: tuple[ParameterList, ...] = ()  # a call has the parameters of one of them
    keyed: KeyedValue | None = None  # an object, or a choice of objects
    free: str | None = None  # a regular expression for free arguments; "" is any text up to `after`
    address: str = ""  # text before the call; optional calls have any text instead
    is_held: bool = True  # arguments of this form are valid


@dataclass(frozen=True, slots=True)
class Spelling:
    """How calls are written: `open call separator call close`, with the texts of each call by function name."""

    open: str
    close: str
    separator: str
    calls: Mapping[str, CallText]
    # Only for calls that are plain JSON objects: the keys of the name and of the arguments.
    keys: tuple[str, str] | None = None

    @property
    def has_json_arguments(self) -> bool:
        return all(call.parameter is None and call.free is None for call in self.calls.values())

    @property
    def marks(self) -> tuple[str, ...]:
        """Return every text that may contain special tokens which must be shown."""
        texts = [self.open, self.close, self.separator]
        return (*texts, *(text for call in self.calls.values() for text in (call.before, call.after)))


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """An answer that calls functions, in one spelling. The model chooses the layout of argument values only."""

    schemas: Mapping[str, Mapping[str, Any]]  # schemas of the functions' arguments, by name
    spelling: Spelling
    is_parallel: bool = True  # more than one call is allowed
    # None: there must be calls. Otherwise calls are optional, and these are the marks that only calls begin with; () if
    # calls make up the whole answer.
    marks: tuple[str, ...] | None = None
    has_channels: bool = False  # optional calls stand among Harmony's messages
    inputs: Mapping[str, str] = field(default_factory=dict)  # Lark grammars of the texts that custom tools get, by name
    # Of an answer with optional calls: marks that its text may contain, and a text without which it begins with a call.
    text_marks: tuple[str, ...] = ()
    text_start: str = ""

    @property
    def heads(self) -> dict[str, str]:
        """Return, by function, the beginning of an answer that calls this function first."""
        return {name: self.spelling.open + call.address + call.before for name, call in self.spelling.calls.items()}


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts around the reasoning at the beginning of an answer. Without an `end` it has none."""

    start: str | None  # None if the answer begins inside of the reasoning
    end: str
    is_optional: bool
    answer_start: str = ""  # texts around the content after the reasoning
    answer_end: str = ""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The most tokens of the reasoning at the beginning of an answer; after them only the token `end` is allowed."""

    num_tokens: int
    start: int | None  # None if the answer begins inside of the reasoning
    end: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    calls: tuple[int, ...] = ()  # tokens that begin calls

    def rule(self, *, ends_with_call: bool = False) -> str:
        """Return the rule `thought`: the reasoning up to its end, which may be a call. It counts tokens, whatever their
        texts are. The end never comes within a call."""
        counted = f"token{{0,{self.num_tokens}}} " if self.num_tokens else ""
        ends = ",".join(map(str, (self.end, *(self.calls if ends_with_call else ()))))
        return f"thought: {counted}<[{ends}]>\ntoken: {self.tokens_but(self.end, *self.calls)}"

    def tokens_but(self, *others: int) -> str:
        """Return an expression for every token except `others` and those that end an answer."""
        ranges, begin = [], 0
        for token in sorted({*others, *self.eos_token_ids, self.vocab_size}):
            if begin < token <= self.vocab_size:
                ranges.append(f"{begin}-{token - 1}")
            begin = token + 1
        return f"<[{','.join(ranges)}]>"
