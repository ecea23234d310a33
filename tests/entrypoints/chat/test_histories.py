"""Conversations with calls over templates that differ in what they take: small ones that are built as the families' own
are."""

# ruff: noqa: E501 - templates are easier to read in one line

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from octavo.entrypoints.chat import chat_template, restatements
from octavo.entrypoints.chat.answer_reader import AnswerFormat, AnswerReader, CallDelta
from octavo.entrypoints.chat.chat_run import make_chat
from octavo.entrypoints.chat.chat_template import _tool_results_as_user_messages, _with_parts, render_chat
from octavo.entrypoints.chat.message_rendering import render_messages
from octavo.entrypoints.chat.restatements import with_single_calls
from octavo.entrypoints.chat.tools.call_ids import CallIdForm, CallIds
from octavo.entrypoints.chat.tools.format_detection import model_formats
from octavo.entrypoints.chat.tools.format_parser import FormatParser
from octavo.entrypoints.chat.tools.tool_formats import FORMATS
from octavo.errors import RequestError
from octavo.loading.tokenizer import ModelTokenizer

USER = {"role": "user", "content": "Hi"}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def tokenizer_of(template: str) -> ModelTokenizer:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    return ModelTokenizer(backend, {"eos_token": "</s>"}, chat_template=template)


def calling(arguments: Any = '{"city": "Rome"}', content: Any = None, id: str | None = "abcdefgh1") -> dict[str, Any]:
    call = {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def result(id: str | None = "abcdefgh1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": "rain"}


EACH = "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ ARGUMENTS }}</call>{% endfor %}"
CHAT = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}"
    + EACH + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)  # fmt: skip
OBJECTS = CHAT.replace("ARGUMENTS", "c.function.arguments | tojson")
TEXTS = CHAT.replace("{{ ARGUMENTS }}", "{{ '' + c.function.arguments }}")
EITHER = CHAT.replace(
    "ARGUMENTS", "(c.function.arguments if c.function.arguments is string else c.function.arguments | tojson)"
)
ITEMS = CHAT.replace("{{ ARGUMENTS }}", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}")
SHOWN = CHAT.replace("ARGUMENTS", "c.function.arguments")


@pytest.mark.parametrize(
    ("template", "arguments"),
    [(OBJECTS, '{"city": "Rome"}'), (TEXTS, '{"city": "Rome"}'), (EITHER, '{"city": "Rome"}'), (ITEMS, "city=Rome;"),
     (SHOWN, '{"city": "Rome"}')],
)  # fmt: skip
@pytest.mark.parametrize("sent", ['{"city": "Rome"}', {"city": "Rome"}])
def test_arguments_reach_a_template_as_it_takes_them(template: str, arguments: str, sent: Any) -> None:
    text = render_chat(tokenizer_of(template), [USER, calling(sent), result()])
    assert text == f"[user]Hi[assistant]<call>get_weather {arguments}</call>[tool]rain"


@pytest.mark.parametrize("template", [OBJECTS, TEXTS, EITHER, SHOWN])
@pytest.mark.parametrize("blank", ["", " ", "\n", None, "null", {}, "{}"])
def test_blank_arguments_are_an_empty_object(template: str, blank: Any) -> None:
    assert "get_weather {}</call>" in render_chat(tokenizer_of(template), [USER, calling(blank)])


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ('{"city": "Ro', "city=Ro;"),
        ('{"city": "Rome", "days": ', "city=Rome;"),
        ("[1]", ""),
        ("Rome", ""),
        ('"Rome"', ""),
    ],
)
def test_arguments_that_are_no_object_end_no_conversation(sent: str, shown: str) -> None:
    """As those of a call that max_tokens has cut off: an agent answers it with an error, and goes on."""
    text = render_chat(tokenizer_of(ITEMS), [USER, calling(sent), result(), calling('{"city": "Oslo"}'), result()])
    assert text == (
        f"[user]Hi[assistant]<call>get_weather {shown}</call>[tool]rain"
        "[assistant]<call>get_weather city=Oslo;</call>[tool]rain"
    )


def test_a_template_for_tools_alone_takes_a_chat_without_tools() -> None:
    template = "<tools>{% for t in tools %}{{ t.function.name }}{% endfor %}</tools>" + PLAIN
    assert render_chat(tokenizer_of(template), [USER]) == "<tools></tools>[user]Hi"
    assert render_chat(tokenizer_of(template), [USER], tools=[WEATHER]) == "<tools>get_weather</tools>[user]Hi"


ONE_CALL = OBJECTS.replace(
    "{% if m.tool_calls %}",
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}{% if m.tool_calls %}",
)


def test_calls_are_turns_of_their_own_where_the_template_takes_one_at_once() -> None:
    """Llama 3's templates do, and their models write several."""
    both = calling(id="a")
    both["tool_calls"] = [*both["tool_calls"], *calling('{"city": "Oslo"}', id="b")["tool_calls"]]
    results = [{**result("b"), "content": "snow"}, result("a"), {**result("c"), "content": "lost"}]
    text = render_chat(tokenizer_of(ONE_CALL), [USER, both, *results, USER])
    assert text == (
        '[user]Hi[assistant]<call>get_weather {"city": "Rome"}</call>[tool]rain'
        '[assistant]<call>get_weather {"city": "Oslo"}</call>[tool]snow[tool]lost[user]Hi'
    )


class Message(dict[str, Any]):
    """A message that counts how often its fields are read."""

    num_reads = 0

    def get(self, *args: Any) -> Any:
        Message.num_reads += 1
        return super().get(*args)


def test_the_result_of_each_of_many_calls_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Message, "num_reads", 0)
    many = {**calling(), "tool_calls": [call for i in range(300) for call in calling(id=str(i))["tool_calls"]]}
    results = [Message(result(str(i))) for i in reversed(range(300))]
    found = with_single_calls([many, *results])
    assert [message["tool_call_id"] for message in found[1::2]] == [str(i) for i in range(300)]
    assert Message.num_reads <= 3 * 300


def test_many_results_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_parts = 0

    def counted(message: dict[str, Any]) -> dict[str, Any]:
        nonlocal num_parts
        num_parts += len(found["content"]) if isinstance((found := _with_parts(message))["content"], list) else 0
        return found

    monkeypatch.setattr(chat_template, "_with_parts", counted)
    text, part = "<tool_response>\nrain\n</tool_response>", {"type": "text", "text": "sun"}
    [one] = _tool_results_as_user_messages([result()] * 300)
    assert one["content"] == "\n".join([text] * 300)
    [one, answer] = _tool_results_as_user_messages(
        [result(), result(), {**result(), "content": [part]}, result(), USER, calling()]
    )
    assert [each["text"] for each in one["content"]] == [
        f"{text}\n{text}",
        "<tool_response>\n",
        "sun",
        "\n</tool_response>",
        text,
        "Hi",
    ]
    assert answer == calling()
    num_parts = 0
    [one] = _tool_results_as_user_messages([{**result(), "content": [part]}] * 300)
    assert len(one["content"]) == num_parts == 3 * 300


def test_a_template_gets_its_tools_as_text_and_the_date() -> None:
    """Firefunction's template has no other variables for them."""
    template = "{% set told = '' + functions + ' ' + datetime %}{{ told }}" + PLAIN
    for tools, told in ((None, "[]"), ([WEATHER], json.dumps([WEATHER["function"]], indent=4))):
        text = render_chat(tokenizer_of(template), [USER], tools=tools, template_options={"datetime": "Monday"})
        assert text == f"{told} Monday[user]Hi"
    assert re.fullmatch(r"\[\] \d{4}-\d\d-\d\d\[user\]Hi", render_chat(tokenizer_of(template), [USER]))


WRITES_TOOLS = (
    "{% for t in tools %}{{ t.function.name }} {{ t.function.description + (t.function.parameters | tojson) }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ ARGUMENTS }}</call>{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_nothing_is_restated_that_a_template_can_take() -> None:
    """Prompts of one conversation share a beginning, so that its tokens are computed once."""
    parameters = {"type": "object", "properties": {"city": {"type": ["string", "null"]}}, "additionalProperties": False}
    function = {"name": "get_weather", "description": "D.", "parameters": parameters}
    both = calling()
    both["tool_calls"] = [*both["tool_calls"], *calling('{"city": "Oslo"}')["tool_calls"]]
    ends = "{% if not messages[-1].content %}{{ raise_exception('is empty') }}{% endif %}"
    template = WRITES_TOOLS.replace("ARGUMENTS", "c.function.arguments | tojson") + ends
    empty = {"role": "assistant", "content": ""}
    calls = '<call>get_weather {"city": "Rome"}</call><call>get_weather {"city": "Oslo"}</call>'
    chat = f"[user]Hi[assistant]{calls}[tool]rain[tool]rain[user]Hi[assistant] "
    messages = [USER, both, result(), result(), USER, empty]
    text = render_chat(tokenizer_of(template), messages, tools=[{"type": "function", "function": function}])
    assert text == f"get_weather D.{json.dumps(parameters)}{chat}"
    # Two changes are needed: the tool's missing description, and the blank.
    del function["description"]
    text = render_chat(tokenizer_of(template), messages, tools=[{"type": "function", "function": function}])
    assert text == f"get_weather {json.dumps(parameters)}{chat}"
    # An empty list of tools, which this template refuses, is not among the changes that it needs.
    cut = calling('{"city": "Ro')
    cut["tool_calls"] = [*cut["tool_calls"], *calling("{}")["tool_calls"]]
    refuses = "{% if tools is not none %}{{ tools[0].function.name }}{% endif %}" + ONE_CALL.replace(
        "c.function.arguments | tojson", "c.function.arguments.items() | list | tojson"
    )
    text = render_chat(tokenizer_of(refuses), [USER, cut, result(), result()])
    assert text.startswith("[user]Hi[assistant]<call>get_weather") and "Ro" in text
    # Another template needs an empty list of tools and the blank.
    lists = "<tools>{% for t in tools %}{{ t.function.name }}{% endfor %}</tools>" + ends + PLAIN
    assert render_chat(tokenizer_of(lists), [USER, empty]) == "<tools></tools>[user]Hi[assistant] "


def test_arguments_of_a_cut_call_are_json_text_where_the_template_takes_text() -> None:
    whole = "{% for m in messages %}{% for c in m.tool_calls %}{% if not c.function.arguments.endswith('}') %}{{ raise_exception('cut') }}{% endif %}{% endfor %}{% endfor %}"
    text = render_chat(tokenizer_of(whole + TEXTS), [USER, calling('{"city": "Ro'), result()])
    assert text == '[user]Hi[assistant]<call>get_weather {"city": "Ro"}</call>[tool]rain'


def test_a_description_that_is_missing_changes_no_type() -> None:
    template = (
        "{% for t in tools %}{{ t.function.name }} {% for n, p in t.function.parameters.properties.items() %}{{ p.description + (p | tojson) }}{% endfor %}{% endfor %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    schema = {"type": ["object", "null"], "additionalProperties": False}
    function = {"name": "f", "description": "D.", "parameters": {"type": "object", "properties": {"p": schema}}}
    text = render_chat(tokenizer_of(template), [USER], tools=[{"type": "function", "function": function}])
    assert text.startswith("f " + json.dumps({**schema, "description": ""}))


def test_the_second_call_of_a_message_is_not_lost_where_the_template_writes_the_first_alone() -> None:
    """As gpt-oss' does."""
    template = OBJECTS.replace("in m.tool_calls %}", "in m.tool_calls[:1] %}")
    both = calling(id="a")
    both["tool_calls"] = [*both["tool_calls"], *calling('{"city": "Oslo"}', id="b")["tool_calls"]]
    text = render_chat(tokenizer_of(template), [USER, both, result("a"), {**result("b"), "content": "snow"}])
    assert text == (
        '[user]Hi[assistant]<call>get_weather {"city": "Rome"}</call>[tool]rain'
        '[assistant]<call>get_weather {"city": "Oslo"}</call>[tool]snow'
    )


def test_a_text_beside_reasoning_and_a_call_joins_the_reasoning_where_the_template_takes_one_of_them() -> None:
    """As gpt-oss' does, whose model writes both."""
    one = "{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both') }}{% endif %}{{ m.content or m.thinking }}"
    template = OBJECTS.replace("{% if m.tool_calls %}", "{% if m.tool_calls %}" + one)
    called = '<call>get_weather {"city": "Rome"}</call>'
    for name in ("reasoning_content", "thinking"):
        text = render_chat(tokenizer_of(template), [USER, {**calling(content="Wait."), name: "So"}, result()])
        assert text == f"[user]Hi[assistant]So\n\nWait.{called}[tool]rain"
    text = render_chat(tokenizer_of(template), [USER, calling(content="Wait."), result()])
    assert text == f"[user]Hi[assistant]Wait.{called}[tool]rain"


@pytest.mark.parametrize("template", [OBJECTS, TEXTS])
def test_clients_may_send_arguments_as_an_object(template: str) -> None:
    for sent in ({"city": "Rome"}, '{"city": "Rome"}'):
        body = make_chat({"messages": [USER, calling(sent), result()]})
        text = render_messages(tokenizer_of(template), body, body.messages, None, trusts_template=True)
        assert text == '[user]Hi[assistant]<call>get_weather {"city": "Rome"}</call>[tool]rain'
    with pytest.raises(RequestError, match=r"arguments should be a valid string or an object, got \[1\]"):
        make_chat({"messages": [USER, calling([1]), result()]})


@pytest.mark.parametrize("read", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize("sent", ["reasoning", "reasoning_content"])
def test_reasoning_reaches_a_template_under_each_of_its_names(sent: str, read: str) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.READ }}|{{ m.content }}{% endfor %}".replace("READ", read)
    text = render_chat(tokenizer_of(template), [USER, {"role": "assistant", "content": "Yes.", sent: "Hm."}])
    assert text == "[user]|Hi[assistant]Hm.|Yes."


def test_a_user_may_speak_after_a_result_where_the_template_wants_answers() -> None:
    """Clients of Messages send a text beside the results of tools."""
    counts = "{% set ns = namespace(users=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.users = ns.users + 1 %}"
    counts += "{% elif not m.tool_calls and m.role == 'assistant' %}{% set ns.users = ns.users - 1 %}{% endif %}"
    counts += "{% if ns.users > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    text = render_chat(tokenizer_of(counts + OBJECTS), [USER, calling(), result(), USER])
    assert text == '[user]Hi[assistant]<call>get_weather {"city": "Rome"}</call>[tool]rain[assistant][user]Hi'
    with pytest.raises(RequestError, match="must alternate"):
        render_chat(tokenizer_of(counts + OBJECTS), [USER, USER])
    # Ministral's template takes no empty answer either.
    full = "{% for m in messages %}{% if not m.content and not m.tool_calls %}{{ raise_exception('is empty') }}{% endif %}{% endfor %}"
    text = render_chat(tokenizer_of(full + counts + OBJECTS), [USER, calling(), result(), USER])
    assert text.endswith("[tool]rain[assistant] [user]Hi")
    for empty in ("", None):
        answer = {"role": "assistant", "content": empty, "reasoning_content": "So"}
        assert render_chat(tokenizer_of(full + OBJECTS), [USER, answer, USER]) == "[user]Hi[assistant] [user]Hi"


@pytest.mark.parametrize("content", ["rain", [{"type": "text", "text": "rain"}]])
def test_results_that_the_template_does_not_know_are_one_turn_of_the_user(content: Any) -> None:
    """As Gemma 2's: its roles must alternate."""
    both = calling(id="a")
    both["tool_calls"] = [*both["tool_calls"], *calling(id="b")["tool_calls"]]
    results = [{**result(id), "content": content} for id in "ab"]
    shown = "<tool_response>\nrain\n</tool_response>"
    roles = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}{% endfor %}"
    for template, after in ((roles + PLAIN, [USER]), (PLAIN, [USER, USER])):
        text = render_chat(tokenizer_of(template), [USER, both, *results, *after])
        own = "[user]Hi" if len(after) > 1 else ""
        assert re.sub("\n+", "\n", text).endswith(f"[user]{shown}\n{shown}\nHi{own}")


ASKS_FOR_NONE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls is defined and m.content is none %}"
    + EACH.replace("ARGUMENTS", "c.function.arguments | tojson") + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)  # fmt: skip
ADDS = OBJECTS.replace("{% if m.tool_calls %}", "{% if m.tool_calls %}{{ m.content + '|' }}")
WRITES = OBJECTS.replace("{% if m.tool_calls %}", "{% if m.tool_calls %}{{ m.content }}|")
HAS_KEY = OBJECTS.replace(
    "{% if m.tool_calls %}",
    "{% if 'content' not in m %}{{ raise_exception('no content') }}{% endif %}{% if m.tool_calls %}",
)


@pytest.mark.parametrize(
    ("template", "call"),
    [(ASKS_FOR_NONE, '<call>get_weather {"city": "Rome"}</call>'), (ADDS, '|<call>get_weather {"city": "Rome"}</call>'),
     (WRITES, '|<call>get_weather {"city": "Rome"}</call>'), (HAS_KEY, '<call>get_weather {"city": "Rome"}</call>')],
)  # fmt: skip
@pytest.mark.parametrize("leaves_out", [False, True])
def test_a_content_that_is_null_stays_null_where_the_template_can_take_it(
    template: str, call: str, leaves_out: bool
) -> None:
    message = calling()
    if leaves_out:
        del message["content"]
    assert render_chat(tokenizer_of(template), [USER, message]) == f"[user]Hi[assistant]{call}"


def test_a_fault_of_ours_is_no_refusal_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer that renders again after a refusal has a helper that fails here."""
    refuses = "{{ raise_exception('No.') }}"
    developer = {"role": "developer", "content": "Be kind."}
    for module, helper, template, message in (
        (restatements, "_with_answers", refuses, USER),
        (chat_template, "_writes", PLAIN, developer),
        (chat_template, "_without_nones", ASKS_FOR_NONE, {"role": "assistant", "content": None}),
    ):
        with monkeypatch.context() as fault:
            fault.setattr(module, helper, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                render_chat(tokenizer_of(template), [{"role": "user", "content": "None"}, message])


@pytest.mark.parametrize(("content", "text"), [("", ""), ("Let me look.", "Let me look.\n")])
def test_calls_beside_a_text_are_not_lost(content: str, text: str) -> None:
    """DeepSeek V3's first template writes calls only where the content is null, and clients send an empty text."""
    rendered = render_chat(tokenizer_of(ASKS_FOR_NONE), [USER, calling(content=content), result()])
    assert rendered == f'[user]Hi[assistant]{text}<call>get_weather {{"city": "Rome"}}</call>[tool]rain'


def test_a_none_in_the_texts_of_clients_is_no_null() -> None:
    text = render_chat(tokenizer_of(ASKS_FOR_NONE), [{"role": "user", "content": "None"}, calling()])
    assert text == '[user]None[assistant]<call>get_weather {"city": "Rome"}</call>'


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN
SILENT_SYSTEM = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
REFUSES_SYSTEM_LATER = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
KNOWS_DEVELOPERS = "{% for m in messages if m.role != 'developer' or tools %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "role"),
    [
        (PLAIN, "system"),
        (SILENT_SYSTEM, "developer"),
        (REFUSES_SYSTEM_LATER, "developer"),
        (KNOWS_DEVELOPERS, "system"),
    ],
)
def test_a_developer_is_the_system_unless_the_template_then_loses_the_message(template: str, role: str) -> None:
    text = render_chat(tokenizer_of(template), [USER, {"role": "developer", "content": "Be kind."}])
    assert text == f"[user]Hi[{role}]Be kind."


@pytest.mark.parametrize("nothing", [[], None])
def test_an_empty_list_of_calls_is_as_if_absent(nothing: Any) -> None:
    asks = "{% for m in messages %}[{{ m.role }}]{{ 'calls' if m.tool_calls is defined else m.content }}{% endfor %}"
    message = {"role": "assistant", "content": "It is sunny.", "tool_calls": nothing}
    assert render_chat(tokenizer_of(asks), [USER, message]) == "[user]Hi[assistant]It is sunny."


@pytest.mark.parametrize("template", [NO_SYSTEM, SILENT_SYSTEM])
def test_tools_are_described_to_the_user_where_a_template_takes_no_system_message(template: str) -> None:
    text = render_chat(tokenizer_of(template), [USER], tools=[WEATHER])
    assert text.startswith("[user]You may call one or more functions") and text.endswith("</tool_call>\n\nHi")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert '"get_weather"' in render_chat(tokenizer_of(template), parts, tools=[WEATHER])


def test_a_system_message_that_the_template_refuses_is_refused() -> None:
    with pytest.raises(RequestError, match="System role not supported"):
        render_chat(tokenizer_of(NO_SYSTEM), [{"role": "system", "content": "Be kind."}, USER], tools=[WEATHER])


DESCRIBES = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{# Call with <|tool_call|>[...] #}" + PLAIN
WRITES_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>"
    "{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    "{% else %}{{ m.content }}{% endif %}</s>{% endfor %}"
)


def test_calls_that_a_template_ignores_are_written_in_the_models_format() -> None:
    tokenizer = tokenizer_of(DESCRIBES)
    assert model_formats(tokenizer).tools == FORMATS["granite"]
    text = render_chat(tokenizer, [USER, calling(content="Let me see."), result()], tools=[WEATHER])
    call = '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome"}}]'
    assert text.endswith(f"[user]Hi[assistant]Let me see.\n{call}[tool]rain")
    assert "tool_response" not in text and "<tool_call>" not in text


def test_tools_that_a_template_ignores_are_described_in_the_format_that_it_writes() -> None:
    tokenizer = tokenizer_of(WRITES_ONLY)
    assert model_formats(tokenizer).tools == FORMATS["deepseek_v31"]
    text = render_chat(tokenizer, [USER, calling(), result()], tools=[WEATHER])
    assert text.startswith("[system]You may call") and "<tool_call>" not in text
    assert '<｜tool▁call▁begin｜>function_name<｜tool▁sep｜>{"argument_name": "value"}<｜tool▁call▁end｜>' in text
    assert '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>' in text


def test_a_format_by_name_is_the_prompts_too() -> None:
    text = render_chat(tokenizer_of(PLAIN), [USER, calling()], tools=[WEATHER], tool_format=FORMATS["qwen3_coder"])
    assert "<function=function_name>" in text and "<function=get_weather>\n<parameter=city>\nRome\n" in text
    assert '"arguments"' not in text


PARTS = "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
ONLY_PARTS = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
HIDDEN = "{% macro show(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p['text'] }}{% endfor %}{% endif %}{% endmacro %}{% for m in messages %}[{{ m.role }}]{{ show(m.content) }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "format", "text"),
    [(PARTS, "auto", "Onetwo"), (PARTS, "openai", "Onetwo"), (PARTS, "string", "One\ntwo"), (HIDDEN, "auto", "Onetwo"),
     (ONLY_PARTS, "auto", "Onetwo"), (PLAIN, "auto", "One\ntwo"), (PLAIN + "{# {{ m.content | trim }} #}", "auto", "One\ntwo")],
)  # fmt: skip
def test_parts_of_text_are_the_templates_to_join_where_it_takes_them(template: str, format: str, text: str) -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    message = {"role": "user", "content": parts}
    assert render_chat(tokenizer_of(template), [message], content_format=format) == f"[user]{text}"


@pytest.mark.parametrize("shown", ["show(m.content)", "m.content"])
def test_parts_beside_calls_are_joined_where_the_template_takes_only_a_text_there(shown: str) -> None:
    """As Kimi K2's template does: the prompt had the list in Python's notation."""
    macro, _, rest = HIDDEN.partition("{% endmacro %}")
    calls = "{% if m.tool_calls %}[calls]{{ " + shown + " }}{{ m.tool_calls | tojson }}{% else %}"
    template = f"{macro}{{% endmacro %}}{rest.replace('[{{ m.role }}]', calls + '[{{ m.role }}]').replace('{% endfor %}', '{% endif %}{% endfor %}')}"
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    text = render_chat(tokenizer_of(template), [USER, {**calling(), "content": parts}, result()], tools=[WEATHER])
    assert f"[calls]{'Onetwo' if 'show' in shown else 'One' + chr(10) + 'two'}[{{" in text


READS_ALL = (
    "{% for t in tools %}{{ t.function.name + '. ' + t.function.description }}|{{ t.function.parameters.type }}"
    "{% for name, one in t.function.parameters.properties.items() %} {{ name }}{% endfor %};{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
READS_NAMES = "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("fields", [{}, {"parameters": {}}, {"parameters": {"type": "object"}, "description": None}])
def test_tools_may_leave_out_what_a_template_reads(fields: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "now", **fields}}, WEATHER]
    assert (
        render_chat(tokenizer_of(READS_ALL), [USER], tools=tools) == "now. |object;get_weather. |object city;[user]Hi"
    )
    # Where the template can do without, it gets what was sent.
    assert render_chat(tokenizer_of(READS_NAMES), [USER], tools=tools) == f"{json.dumps(tools)}[user]Hi"


def test_a_tool_without_a_function_is_not_made_one_without_a_name() -> None:
    with pytest.raises(RequestError):
        render_chat(tokenizer_of(READS_ALL), [USER], tools=[{"name": "now", "parameters": {}}])


WRITES_TYPES = (
    "{% macro type(s) %}{% if s.type in ['string', 'integer'] %}{{ s.type }}{% elif s.type == 'array' %}{{ 'list of ' + type(s['items']) }}"
    "{% elif s.type == 'object' %}{{ 'map of ' + type(s.additionalProperties) }}{% else %}{% for t in s.type %}{{ type({'type': t}) }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for t in tools %}{{ t.function.name }}({% for n, p in t.function.parameters.properties.items() %}{{ n }}: {{ type(p) + p.description }};{% endfor %}){% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"type": ["string", "null"]}, "string"), ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, "integer"),
        ({"type": "null"}, "string"), (True, "string"), ({"$ref": "#/$defs/D"}, "integer"), ({"enum": ["a"]}, "string"),
        ({"type": "array"}, "list of string"), ({"type": "object", "additionalProperties": False}, "map of "),
        ({"type": "string", "description": None}, "string"), ({"type": "integer", "description": "!"}, "integer!"),
    ],
)  # fmt: skip
def test_parameters_of_any_schema_are_taken_by_templates_that_write_types(schema: Any, written: str) -> None:
    """As Hermes 2 Pro's and Command R+'s do."""
    parameters = {"type": "object", "properties": {"p": schema}, "$defs": {"D": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "description": "D.", "parameters": parameters}}
    assert f"f(p: {written};)" in render_chat(tokenizer_of(WRITES_TYPES), [USER], tools=[tool])


SHORT_IDS = (
    "{{ tools | tojson if tools }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS]["
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids should have length 9') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{{ ", " if not loop.last }}'
    "{% endfor %}]</s>{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids should have length 9') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
COUNTED_IDS = (
    "{{ tools | tojson if tools }}{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "form"), [(SHORT_IDS, CallIdForm.SHORT), (COUNTED_IDS, CallIdForm.COUNTED), (OBJECTS, CallIdForm.LONG)]
)
def test_ids_have_the_form_that_the_template_demands_and_can_be_sent_back(template: str, form: CallIdForm) -> None:
    tokenizer = tokenizer_of(template)
    assert model_formats(tokenizer).call_ids is form
    assert model_formats(tokenizer, "hermes").call_ids in (form, CallIdForm.LONG)
    ids, messages = CallIds(form), [USER]
    for turn in range(6):
        new = ids.next("get_weather")
        messages += [calling(id=new), result(new), {"role": "assistant", "content": str(turn)}, USER]
    assert len({m["tool_call_id"] for m in messages if m["role"] == "tool"}) == 6
    render_chat(tokenizer, messages, tools=[WEATHER])


def test_free_ids_are_not_sought_again_for_each_call() -> None:
    class Taken(set[str]):
        num_asked = 0

        def __contains__(self, id: object) -> bool:
            self.num_asked += 1
            return super().__contains__(id)

    ids = CallIds(CallIdForm.COUNTED, [f"functions.now:{i}" for i in range(300, 600)])
    ids._taken = taken = Taken(ids._taken)
    assert [ids.next("now") for _ in range(300)] == [f"functions.now:{i}" for i in range(600, 900)]
    assert taken.num_asked <= 3 * 300
    assert ids.next("get_weather") == "functions.get_weather:600"


def test_ids_of_other_servers_get_the_form_that_the_template_demands() -> None:
    tokenizer = tokenizer_of(SHORT_IDS)
    texts = {}
    for sent in ("call_0123456789abcdef01234567", "call_0123456789abcdef01234568", "toolu_01A", "", None, "aB3dE6gH9"):
        text = render_chat(tokenizer, [USER, calling(id=sent), result(sent)], tools=[WEATHER])
        texts[sent] = text.partition('"id": "')[2].partition('"')[0]
    assert texts["aB3dE6gH9"] == "aB3dE6gH9"
    assert all(len(id) == 9 and id.isalnum() for id in texts.values()) and len(set(texts.values())) >= 5
    # A call and its result have one id.
    with_ids = SHORT_IDS.replace("[TOOL_RESULTS]", "[TOOL_RESULTS]{{ m.tool_call_id }} ")
    id = texts["toolu_01A"]
    assert render_chat(tokenizer_of(with_ids), [USER, calling(id="toolu_01A"), result("toolu_01A")]).count(id) == 2


def test_ids_of_other_servers_are_counted_where_the_template_reads_names_from_them() -> None:
    tokenizer = tokenizer_of(COUNTED_IDS.replace("{{ m.content }}", "{{ m.tool_call_id }}{{ m.content }}"))
    two = calling(id="toolu_01A")
    two["tool_calls"] += calling(id="toolu_01B")["tool_calls"]
    own = "functions.get_weather:2"
    messages = [USER, two, result("toolu_01B"), result("toolu_01A"), calling(id=own), result(own), result("lost")]
    text = render_chat(tokenizer, messages, tools=[WEATHER])
    begins = re.findall(r"<\|tool_call_begin\|>(.*?)<", text)
    assert begins == [f"functions.get_weather:{i}" for i in range(3)]
    assert re.findall(r"\[tool\](.*?)rain", text) == [begins[1], begins[0], begins[2], "lost"]
    assert two["tool_calls"][0]["id"] == "toolu_01A"  # the client's message is unchanged
    # Kimi K2's template writes the ids of calls itself, and those of results as they were sent.
    own_ids = COUNTED_IDS.replace("{{ c.id }}", "functions.{{ c.function.name }}:{{ loop.index0 }}")
    shown = tokenizer_of(own_ids.replace("{{ m.content }}", "{{ m.tool_call_id }}{{ m.content }}"))
    text = render_chat(shown, [USER, calling(), result()], tools=[WEATHER], tool_format=FORMATS["kimi_k2"])
    assert "[tool]functions.get_weather:0rain" in text
    # Kimi K2 Thinking's template writes the name of a result, too.
    named = COUNTED_IDS.replace("[{{ m.role }}]", "[{{ m.name or m.role }}]")
    assert "begin|>functions.get_weather:0<" in render_chat(tokenizer_of(named), [USER, calling()], tools=[WEATHER])


def ids_of(format: str, form: CallIdForm, text: str, used: tuple[str, ...] = ()) -> list[str]:
    tools = {"get_weather": {}, "now": {}}
    reader = AnswerReader(
        AnswerFormat(None, True, lambda: FormatParser(FORMATS[format], tools), call_ids=form, used_ids=used)
    )
    return [delta.id for delta in reader.add(text, is_end=True) if isinstance(delta, CallDelta) and delta.name]


def kimi(*heads: str) -> str:
    calls = "".join(f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for head in heads)
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


def test_the_models_own_ids_are_kept_and_others_go_on_counting() -> None:
    counted = CallIdForm.COUNTED
    assert ids_of("kimi_k2", counted, kimi("functions.get_weather:3")) == ["functions.get_weather:3"]
    assert ids_of("kimi_k2", counted, kimi("functions.get_weather:0", "functions.now:1")) == [
        "functions.get_weather:0",
        "functions.now:1",
    ]
    # One that the conversation has already, and one that is missing.
    used = ("functions.get_weather:0",)
    assert ids_of("kimi_k2", counted, kimi("functions.get_weather:0", "now"), used) == [
        "functions.get_weather:1",
        "functions.now:2",
    ]
    short = CallIdForm.SHORT
    assert ids_of("mistral", short, "[TOOL_CALLS]now[CALL_ID]aB3dE6gH9[ARGS]{}") == ["aB3dE6gH9"]
    assert ids_of("mistral", short, '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "aB3dE6gH9"}]') == [
        "aB3dE6gH9"
    ]
    for text in (
        "[TOOL_CALLS]now[CALL_ID]short[ARGS]{}",
        "[TOOL_CALLS]now[ARGS]{}",
        "[TOOL_CALLS]now[CALL_ID]aB3dE6gH9[ARGS]{}",
    ):
        (new,) = ids_of("mistral", short, text, used=("aB3dE6gH9",))
        assert len(new) == 9 and new.isalnum() and new != "aB3dE6gH9"
    assert ids_of(
        "hermes", CallIdForm.LONG, f"<tool_call>{json.dumps({'name': 'now', 'arguments': {}, 'id': 'x1'})}</tool_call>"
    ) == ["x1"]
