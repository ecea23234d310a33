"""Finds what a chat template takes and writes, by rendering small conversations.

`chat_template` renders by these traits, and `format_detection` finds formats in the renderings. A template's text tells
less, because templates use macros and variables. It is searched only where no rendering tells: here for "tools" in a
template that refuses every conversation; for the role "developer" and types of media (`chat_template`), variables of
options (`reasoning_effort`), and marks of formats that the renderings leave open (`format_detection`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from octavo.loading.jinja_template import EndlessTemplateError, limited_lines, render_template

if TYPE_CHECKING:
    from octavo.loading.tokenizer import ModelTokenizer

QUESTION, ANSWER, THOUGHT, RESULT = "Qz7question", "Az7answer", "Tz7thought", "Rz7result"
_SYSTEM, _PARTS = "Sz7system", ("Pz7first", "Pz7second")
ASKED: dict[str, Any] = {"role": "user", "content": QUESTION}
ANSWERED: dict[str, Any] = {"role": "assistant", "content": ANSWER}


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """A call in the rendered conversations."""

    name: str
    arguments: dict[str, Any]
    short_id: str  # in the form of Mistral's templates
    counted_id: str  # in the form of Kimi K2's templates, with the name
    long_id: str

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the texts that a rendering of the call contains in every format."""
        return (self.name, *self.arguments, *map(str, self.arguments.values()))

    @property
    def tool(self) -> dict[str, Any]:
        kinds = {key: {"type": "string" if isinstance(value, str) else "integer", "description": "D."}
                 for key, value in self.arguments.items()}  # fmt: skip
        schema = {"type": "object", "properties": kinds}
        return {"type": "function", "function": {"name": self.name, "description": "D.", "parameters": schema}}


# The calls share no name, key, value or id, so text that two renderings share comes from the template.
CALLS = (
    ProbeCall("probe_name", {"first_key": "Vz7value", "second_key": 74}, "abcdefgh1", "functions.probe_name:0",
              "call_0123456789abcdef01234567"),
    ProbeCall("other_probe", {"third_key": "Wz8text", "fourth_key": 95}, "ijklmnop2", "functions.other_probe:1",
              "call_76543210fedcba9876543210"),
)  # fmt: skip
TOOLS = [call.tool for call in CALLS]


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text after the question in a rendering whose answer has calls."""

    calls: Sequence[ProbeCall]
    text: str
    says: str = ""  # content of the answer before the calls


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The traits of a template. `parts_of` has the roles whose content may be a list of parts, and whose texts the
    template then writes; "calls" is an assistant's message with calls. With `takes_only_parts` a user's content must be
    such a list."""

    describes_tools: bool
    writes_calls: bool
    writes_calls_beside_text: bool
    renders_calls_with_empty_content: bool  # otherwise their content must be null
    loses_second_call: bool  # of the calls of one message only the first is written
    writes_results: bool
    takes_system: bool
    takes_text_arguments: bool  # arguments of a call are JSON text and not an object
    needs_short_ids: bool  # ids of nine letters and digits
    needs_counted_ids: bool  # ids functions.NAME:N, which the template writes in the place of names
    parts_of: frozenset[str]
    takes_only_parts: bool


def template_traits(tokenizer: ModelTokenizer, template: str) -> TemplateTraits:
    """Return the traits of `template`. They are computed once for each template and set of special tokens."""
    return _traits(template, _special_tokens(tokenizer))


def rendered_calls(tokenizer: ModelTokenizer, template: str) -> list[Rendered]:
    """Return the template's renderings of one call, of another call, of both, and of a call after text. Calls that the
    template does not write are left out."""
    return list(_rendered(template, _special_tokens(tokenizer)))


def rendered_answer(tokenizer: ModelTokenizer, template: str, tools: Any = None, **fields: Any) -> str | None:
    """Return the text after the question in a rendering whose answer has `fields`."""
    answer = {**ANSWERED, **fields}
    return _after_question(_render(template, _special_tokens(tokenizer), [ASKED, answer], tools=tools))


def _special_tokens(tokenizer: ModelTokenizer) -> tuple[tuple[str, str], ...]:
    tokens = getattr(tokenizer, "special_tokens_map", {})
    return tuple([(role, str(token)) for role, token in tokens.items() if isinstance(token, str)])


_Special = tuple[tuple[str, str], ...]


def _render(template: str, special: _Special, messages: Sequence[Mapping[str, Any]], **options: Any) -> str | None:
    variables = {"add_generation_prompt": False, "tools": None, "documents": None, **dict(special), **options}
    if endless := _endless(template):
        raise EndlessTemplateError(endless[0])
    try:
        with limited_lines():
            return render_template(template, messages, keeps_null_content=True, **variables)
    except EndlessTemplateError as error:
        _endless(template).append(str(error))
        raise  # a chat would not end either
    except Exception:  # the template is a program of the model: it may raise anything
        return None


@lru_cache(maxsize=64)
def _endless(template: str) -> list[str]:
    """Return a list for the error of a template that runs on and on, so that no other chat renders it."""
    return []


def _render_anyhow(template: str, special: _Special, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a rendering without tools, or with tools if the template fails without."""
    text = _render(template, special, messages)
    return _render(template, special, messages, tools=TOOLS) if text is None else text


def _after_question(text: str | None) -> str | None:
    _, found, after = (text or "").rpartition(QUESTION)
    return after if found else None


def _calling(calls: Sequence[ProbeCall], id_field: str, *, as_text: bool, content: str | None) -> list[dict[str, Any]]:
    sent = [
        {
            "id": getattr(call, id_field),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments) if as_text else call.arguments},
        }
        for call in calls
    ]
    return [ASKED, {"role": "assistant", "content": content, "tool_calls": sent}]


def _result(call: ProbeCall, id_field: str) -> dict[str, Any]:
    return {"role": "tool", "name": call.name, "tool_call_id": getattr(call, id_field), "content": RESULT}


def _holds(text: str | None, calls: Sequence[ProbeCall]) -> bool:
    """Return whether a rendering has the calls, with arguments as a model writes them: not in Python's notation, and
    not JSON within JSON."""
    if text is None or not all(part in text for call in calls for part in call.texts):
        return False
    squeezed = "".join(text.split())
    keys = [key for call in calls for key in call.arguments]
    return not any(f"{{'{key}':" in squeezed or f'\\"{key}' in squeezed for key in keys)


@lru_cache(maxsize=64)
def _way_of_calls(template: str, special: _Special) -> tuple[str, bool, str | None, bool] | None:
    """Return how the template writes a call: the kind of id, whether arguments are text, the content, and whether a
    result must follow. None if it writes no calls."""
    call = CALLS[0]
    # Without a result first: where a template writes only the id of a call, results may have its name.
    for needs_result in (False, True):
        for id_field in ("short_id", "counted_id"):
            for as_text in (False, True):
                after = [_result(call, id_field)] if needs_result else []
                written = dict[str | None, str]()  # by content
                for content in (None, ""):
                    messages = _calling([call], id_field, as_text=as_text, content=content)
                    text = _after_question(_render(template, special, [*messages, *after], tools=TOOLS))
                    if text is not None and _holds(text, [call]):
                        written[content] = text
                if written:
                    # A template that writes a null as a word gets an empty text.
                    is_word = len(written) == 2 and _num_nulls(written[None]) > _num_nulls(written[""])
                    return id_field, as_text, "" if is_word else next(iter(written)), needs_result
    return None


def _num_nulls(text: str) -> int:
    return text.count("None") + text.count("null")


@lru_cache(maxsize=64)
def _rendered(template: str, special: _Special) -> tuple[Rendered, ...]:
    way = _way_of_calls(template, special)
    if way is None:
        return ()
    id_field, as_text, content, needs_result = way
    found = []
    for calls, says in ((CALLS[:1], ""), (CALLS[1:], ""), (CALLS, ""), (CALLS[:1], ANSWER)):
        messages = _calling(calls, id_field, as_text=as_text, content=says or content)
        results = [_result(call, id_field) for call in calls] if needs_result else []
        text = _after_question(_render(template, special, [*messages, *results], tools=TOOLS))
        if text is not None and _holds(text, calls) and 0 <= text.find(says) <= text.find(calls[0].name):
            found.append(Rendered(calls, text, says))
    return tuple(found)


@lru_cache(maxsize=64)
def _traits(template: str, special: _Special) -> TemplateTraits:
    call, way = CALLS[0], _way_of_calls(template, special)
    id_field, as_text, content, _ = way or ("short_id", False, "", False)
    calling = _calling([call], id_field, as_text=as_text, content=content)
    results = _render_anyhow(template, special, [*calling, _result(call, id_field)])
    bare = _render(template, special, [ASKED], add_generation_prompt=True)
    told = _render(template, special, [ASKED], tools=TOOLS, add_generation_prompt=True)
    with_system = _render_anyhow(template, special, [{"role": "system", "content": _SYSTEM}, ASKED])
    return TemplateTraits(
        describes_tools=told is not None and all(part["function"]["name"] in told for part in TOOLS)
        if told is not None or bare is not None
        else "tools" in template,
        writes_calls=way is not None,
        writes_calls_beside_text=way is not None and _writes_call(template, special, ANSWER, way),
        renders_calls_with_empty_content=way is not None and _writes_call(template, special, "", way),
        loses_second_call=way is not None and _loses_second_call(template, special, way),
        writes_results=results is not None and RESULT in results,
        takes_system=with_system is not None and _SYSTEM in with_system,
        takes_text_arguments=as_text,
        needs_short_ids=id_field == "short_id"
        and way is not None
        and not _writes_call_with(template, special, "long_id", way),
        needs_counted_ids=id_field == "counted_id",
        parts_of=frozenset(
            role for role in ("system", "user", "assistant", "tool", "calls")
            if _writes_parts(template, special, role, calling, id_field)
        ),
        takes_only_parts=QUESTION not in (bare or "")
        and _writes_parts(template, special, "user", calling, id_field, [{"type": "text", "text": QUESTION}]),
    )  # fmt: skip


def _writes_call_with(template: str, special: _Special, id_field: str, way: tuple[str, bool, str | None, bool]) -> bool:
    _, as_text, content, needs_result = way
    messages = _calling(CALLS[:1], id_field, as_text=as_text, content=content)
    after = [_result(CALLS[0], id_field)] if needs_result else []
    return _render(template, special, [*messages, *after], tools=TOOLS) is not None


def _writes_call(template: str, special: _Special, content: str, way: tuple[str, bool, str | None, bool]) -> bool:
    id_field, as_text, _, needs_result = way
    messages = _calling(CALLS[:1], id_field, as_text=as_text, content=content)
    after = [_result(CALLS[0], id_field)] if needs_result else []
    text = _after_question(_render(template, special, [*messages, *after], tools=TOOLS))
    return text is not None and _holds(text, CALLS[:1])


def _loses_second_call(template: str, special: _Special, way: tuple[str, bool, str | None, bool]) -> bool:
    id_field, as_text, content, needs_result = way
    messages = _calling(CALLS, id_field, as_text=as_text, content=content)
    after = [_result(call, id_field) for call in CALLS] if needs_result else []
    text = _after_question(_render(template, special, [*messages, *after], tools=TOOLS))
    return text is not None and _holds(text, CALLS[:1]) and not _holds(text, CALLS)


def _writes_parts(
    template: str, special: _Special, role: str, calling: list[dict[str, Any]], id_field: str, asked: object = QUESTION
) -> bool:
    """Return whether the template writes the texts of a list of parts, in order."""
    content = [{"type": "text", "text": text} for text in _PARTS]
    message = {"role": role, "content": content}
    question = {"role": "user", "content": asked}
    conversations: dict[str, list[dict[str, Any]]] = {
        "system": [message, question],
        "user": [message],
        "assistant": [question, message, question],
        "tool": [*calling, {**_result(CALLS[0], id_field), "content": content}],
        "calls": [*calling[:-1], {**calling[-1], "content": content}, _result(CALLS[0], id_field)],
    }
    text = _render_anyhow(template, special, conversations[role])
    first, second = ((text or "").find(part) for part in _PARTS)
    between = (text or "")[first + len(_PARTS[0]) : second]
    return 0 <= first < second and not any(mark in between for mark in "{}'\"")
