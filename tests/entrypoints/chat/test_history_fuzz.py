"""Random histories over chat templates: what transformers renders, Octavo renders equally, and what transformers
refuses is refused with the template's reason.

transformers passes messages to a template as they are, so each history is given to it in every form that a client could
choose: arguments as text or object, a content that is null, empty or absent, parts or text.
OCTAVO_CHAT_TEMPLATES names a folder of more templates (*.jinja), OCTAVO_HISTORIES the histories for each template.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from octavo.entrypoints.chat.chat_run import make_chat
from octavo.entrypoints.chat.message_rendering import render_messages
from octavo.entrypoints.chat.template_traits import template_traits
from octavo.errors import RequestError
from octavo.loading.tokenizer import ModelTokenizer
from tests.entrypoints.chat import test_histories
from tests.entrypoints.chat.published import SPECIAL, published, tokenizer_of
from tests.entrypoints.chat.tools.test_format_detection import TOOL_TEMPLATES

NUM_HISTORIES = int(os.environ.get("OCTAVO_HISTORIES", "12"))
TEMPLATES = {
    name: value for name, value in vars(test_histories).items()
    if name.isupper() and isinstance(value, str) and "messages" in value
} | TOOL_TEMPLATES | published()  # fmt: skip

Message = dict[str, Any]


class Histories:
    """Random histories. Each text has a word of its own, by which it is found in a rendering."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._num_words = 0

    def next(self) -> dict[str, Any]:
        choose = self._random
        roles = choose.choices(
            ["user", "assistant", "tool", "system", "developer", "ipython"], [6, 6, 3, 1, 1, 0.3], k=5
        )
        usual = ["system"] * choose.randrange(2) + ["user", "assistant", "tool", "assistant", "user"]
        roles = usual if choose.random() < 0.6 else roles[: choose.randint(1, 5)]
        self._calls: list[str] = []  # ids
        messages = [self._message(role, calls=role == "assistant" and roles[i + 1 : i + 2] == ["tool"])
                    for i, role in enumerate(roles)]  # fmt: skip
        history: dict[str, Any] = {"messages": messages, "add_generation_prompt": choose.random() < 0.7}
        if choose.random() < 0.6:
            kinds = {"city": {"type": "string"}}
            function = {
                "name": "get_weather",
                "description": "D.",
                "parameters": {"type": "object", "properties": kinds},
            }
            history["tools"] = [{"type": "function", "function": function}]
        return history

    def _message(self, role: str, calls: bool) -> Message:
        choose, message = self._random, Message(role=role)
        if role == "assistant":
            if calls or choose.random() < 0.2:
                message["tool_calls"] = [self._call() for _ in range(choose.choice([1, 1, 1, 2]))]
            elif choose.random() < 0.2:
                message["tool_calls"] = choose.choice([[], None])
            if choose.random() < 0.1:
                message["reasoning_content"] = self._text()
        message["content"] = self._content(can_be_null="tool_calls" in message and bool(message["tool_calls"]))
        if role == "tool":
            message["tool_call_id"] = self._calls.pop(0) if self._calls else "abcdefgh9"
            if choose.random() < 0.5:
                message["name"] = "get_weather"
        elif role == "user" and choose.random() < 0.1:
            message["name"] = "ann"
        return message

    def _content(self, can_be_null: bool) -> Any:
        choose = self._random
        if can_be_null and choose.random() < 0.7:
            return choose.choice([None, ""])
        if choose.random() < 0.2:
            return [{"type": "text", "text": self._text()} for _ in range(choose.randint(1, 2))]
        return self._text()

    def _text(self) -> str:
        self._num_words += 1
        around = self._random.choice(
            ["{}", "{}", "It's {}.", '"{}"', "{} né 世界", "<b>{}</b>", "a\nb {}", "None {}", "\\{}{{}}"]
        )
        return around.replace("{}", f"w{self._num_words}w", 1)

    def _call(self) -> Message:
        choose = self._random
        arguments: Any = choose.choice(
            [{}, {"city": self._text()}, {"city": self._text(), "days": 3, "more": [1, None, {"a": True}]}]
        )
        sent = json.dumps(arguments, ensure_ascii=choose.random() < 0.5)
        if not arguments:
            sent = choose.choice(["", " ", "{}", "null", None])
        elif choose.random() < 0.05:
            sent = choose.choice([sent[:-1], f"[{sent}]", json.dumps(self._text())])  # no object
        call_id = choose.choice(
            [f"abcdefgh{len(self._calls)}", f"functions.get_weather:{len(self._calls)}", f"call_{len(self._calls)}"]
        )
        self._calls.append(call_id)
        self._num_words += 1
        return {"id": call_id, "type": "function", "function": {"name": f"get_w{self._num_words}w", "arguments": sent}}


def words(history: dict[str, Any]) -> set[str]:
    """The words of contents and arguments; reasoning may be left out by a template."""
    told = [
        {name: value for name, value in message.items() if name != "reasoning_content"}
        for message in history["messages"]
    ]
    return set(re.findall(r"w\d+w", json.dumps(told)))


def squeezed(text: str) -> str:
    return "".join(text.split())


def forms(history: dict[str, Any]) -> Iterator[list[Message]]:
    """Every form of the messages that transformers could be given."""
    for as_text, null, joint, system in itertools.product(
        (False, True), (None, "", "absent"), (None, "\n", ""), (False, True)
    ):
        yield [_in_form(message, as_text, null, joint, system) for message in history["messages"]]


def _in_form(message: Message, as_text: bool, null: str | None, joint: str | None, system: bool) -> Message:
    made = {
        name: value for name, value in message.items() if value is not None and not (name == "tool_calls" and not value)
    }
    if system and made["role"] == "developer":
        made["role"] = "system"
    if thought := made.get("reasoning_content"):  # templates read it under any of these names
        made |= {"reasoning": thought, "thinking": thought}
    content = message["content"]
    if content is None:
        made |= {} if null == "absent" else {"content": null}
    elif isinstance(content, list) and joint is not None:
        made["content"] = joint.join(part["text"] for part in content)
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [_call_in_form(call, as_text) for call in calls]
    return made


def _call_in_form(call: Message, as_text: bool) -> Message:
    sent = call["function"]["arguments"]
    value = None
    with suppress(ValueError):
        value = json.loads(sent or "null")
    if not isinstance(value, dict):
        value = {} if not (sent or "").strip() or (value is None and sent == "null") else sent
    if isinstance(value, str):
        return call
    arguments = json.dumps(value, ensure_ascii=False) if as_text else value
    return {**call, "function": {"name": call["function"]["name"], "arguments": arguments}}


def rendered_by_octavo(tokenizer: ModelTokenizer, history: dict[str, Any]) -> tuple[str, str]:
    """The prompt and the reason of a refusal; one of them is empty."""
    body = make_chat(history)
    try:
        return render_messages(tokenizer, body, body.messages, body.tools, trusts_template=True), ""
    except RequestError as error:
        return "", str(error)


@pytest.mark.parametrize("name", TEMPLATES)
def test_histories_are_rendered_as_transformers_renders_them(name: str) -> None:
    template = TEMPLATES[name]
    tokenizer = tokenizer_of(template)
    traits, histories = template_traits(tokenizer, template), Histories(name)
    for _ in range(NUM_HISTORIES):
        history = histories.next()
        wanted, rendered, reasons = words(history), [], []
        for messages in forms(history):
            try:
                [text], _ = render_jinja_template(
                    [messages], tools=history.get("tools"), chat_template=template,
                    add_generation_prompt=history["add_generation_prompt"], **SPECIAL,
                )  # fmt: skip
                rendered.append(text)
            except Exception as error:  # the template may raise anything
                reasons.append(str(error).splitlines()[0] if str(error) else type(error).__name__)
        whole = [text for text in rendered if wanted <= set(re.findall(r"w\d+w", text))]
        text, refusal = rendered_by_octavo(tokenizer, history)
        if refusal:
            assert not whole, (refusal, history, whole[0])
            assert any(reason in refusal for reason in reasons), (refusal, reasons, history)
            continue
        roles = {message["role"] for message in history["messages"]}
        has_calls = any(message.get("tool_calls") for message in history["messages"])
        is_the_templates = (
            (not has_calls or traits.writes_calls)
            and (not history.get("tools") or traits.describes_tools)
            and ("tool" not in roles or (traits.writes_results and (traits.describes_tools or traits.writes_calls)))
        )
        if is_the_templates and whole:
            has_parts = any(isinstance(message["content"], list) for message in history["messages"])
            same = squeezed if has_parts else str  # each role may have its texts joined in another way
            assert same(text) in set(map(same, rendered)), (history, text, rendered[0])
        assert not whole or wanted <= set(re.findall(r"w\d+w", text)), (history, text, whole[0])
