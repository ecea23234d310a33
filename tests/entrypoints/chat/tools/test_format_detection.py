"""The formats of a model are recognised from its chat template: small ones that write what the families' own write."""

# ruff: noqa: E501 - templates are easier to read in one line

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.entrypoints.chat.reasoning import FUNCTIONARY, STYLES, ReasoningStyle
from octavo.entrypoints.chat.template_traits import rendered_calls
from octavo.entrypoints.chat.tools.call_spelling import spelling
from octavo.entrypoints.chat.tools.format_detection import _INSTRUCTIONS, model_formats
from octavo.entrypoints.chat.tools.format_parser import FormatParser
from octavo.entrypoints.chat.tools.tool_formats import FORMATS, JsonCalls, NamedJson, Tags, ToolFormat
from octavo.entrypoints.chat.tools.tool_parser_base import Call
from octavo.loading.jinja_template import render_template
from tests.entrypoints.chat.published import num_read, published, tokenizer_of


class Templated:
    """Of a tokenizer no more than its template and its added tokens."""

    def __init__(self, template: str, *added: str) -> None:
        self._template = template
        self.added_tokens_decoder = {i: SimpleNamespace(content=text) for i, text in enumerate(added)}

    def get_chat_template(self, name: str | None = None, tools: Any = None) -> str:
        return self._template

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **variables: Any) -> str:
        return render_template(self._template, messages, eos_token="</s>", **variables)


def chat(calls: str, *, answer: str = "{{ m.content }}", begin: str = "<|im_start|>", end: str = "<|im_end|>\n") -> str:
    """A template that writes tools at its beginning, and calls as `calls` says."""
    return (
        "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}"
        f"{begin}{{{{ m.role }}}}\n{{% if m.tool_calls %}}{calls}{{% else %}}{answer}{{% endif %}}{end}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{begin}assistant\n{{% endif %}}"
    )


def each(call: str, separator: str = "") -> str:
    more = f"{{{{ {json.dumps(separator)} if not loop.last }}}}"
    return f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}{more}{{% endfor %}}"


OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
LLAMA = '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
ITEMS = "{% for k, v in f.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
KEYED = (
    '{% for k, v in f.arguments.items() %}{{ "," if not loop.first }}{{ k }}:{% if v is string %}QUOTE{{ v }}QUOTE'
    "{% else %}{{ v }}{% endif %}{% endfor %}"
)
PYTHON = (
    '{{ f.name }}({% for k, v in f.arguments.items() %}{{ ", " if not loop.first }}{{ k }}='
    "{{ v | tojson }}{% endfor %})"
)
QWEN_TAGS = (
    f"<tool_call>\n<function={{{{ f.name }}}}>\n{ITEMS}<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>\n{{% endfor %}}"
    "</function>\n</tool_call>"
)
INVOKE = f'<invoke name="{{{{ f.name }}}}">\n{ITEMS}<parameter name="{{{{ k }}}}">{VALUE}</parameter>\n{{% endfor %}}</invoke>\n'
M3 = "]<]minimax[>["
DSML = (
    "<｜DSML｜SECTION>\n" + each(
        f'<｜DSML｜invoke name="{{{{ f.name }}}}">\n{ITEMS}<｜DSML｜parameter name="{{{{ k }}}}" string="{{{{ \'true\' if v is string else \'false\' }}}}">'
        f"{VALUE}</｜DSML｜parameter>\n{{% endfor %}}</｜DSML｜invoke>\n"
    ) + "</｜DSML｜SECTION>"
)  # fmt: skip
THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"

TOOL_TEMPLATES: dict[str, str] = {
    "hermes": chat(each(f"<tool_call>\n{OBJECT}\n</tool_call>", "\n")),
    "qwen3_coder": chat(each(QWEN_TAGS, "\n")),
    "llama3_json": chat(each(LLAMA), begin="<|start_header_id|>", end="<|eot_id|>"),
    "pythonic": chat(f"[{each(PYTHON, ', ')}]", begin="<|start_header_id|>", end="<|eot_id|>"),
    "olmo3": chat(f"<function_calls>{each(PYTHON, chr(10))}</function_calls>"),
    "lfm2": chat(f"<|tool_call_start|>[{each(PYTHON, ', ')}]<|tool_call_end|>"),
    "mistral": (
        "<s>{% for m in messages %}{% if m.role == 'user' %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
        f"[INST]{{{{ m.content }}}}[/INST]{{% elif m.tool_calls %}}{each('[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}')}"
        "</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    ),
    "deepseek_v3": chat(
        "<｜tool▁calls▁begin｜>" + each(
            "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>", "\n"
        ) + "<｜tool▁calls▁end｜>", begin="<｜", end="<｜end▁of▁sentence｜>",
    ),
    "deepseek_v31": chat(
        "<｜tool▁calls▁begin｜>" + each(
            "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>"
        ) + "<｜tool▁calls▁end｜>", begin="<｜", end="<｜end▁of▁sentence｜>",
    ),
    "glm45": chat(each(
        f"<tool_call>{{{{ f.name }}}}\n{ITEMS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>\n{{% endfor %}}</tool_call>"
    ), begin="<|", end=""),
    "kimi_k2": chat(
        "<|tool_calls_section_begin|>" + each(
            "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>"
        ) + "<|tool_calls_section_end|>"
    ),
    "granite": chat("<|tool_call|>[" + each(OBJECT, ", ") + "]", begin="<|start_of_role|>", end="<|end_of_text|>"),
    "phi4_mini": chat("<|tool_call|>[" + each(OBJECT, ", ") + "]<|/tool_call|>", begin="<|", end="<|end|>"),
    "cohere": chat(
        "<|START_ACTION|>[" + each('{"tool_call_id": "0", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', ", ")
        + "]<|END_ACTION|>", answer="<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>",
        begin="<|START_OF_TURN_TOKEN|>", end="<|END_OF_TURN_TOKEN|>",
    ),
    "minimax": chat("<tool_calls>\n" + each(OBJECT, "\n") + "\n</tool_calls>", begin="]~b]", end="[e~[\n"),
    "minimax_m2": chat(f"<minimax:tool_call>\n{each(INVOKE)}</minimax:tool_call>", begin="]~b]", end="[e~[\n"),
    "functiongemma": chat(
        each("<start_function_call>call:{{ f.name }}{" + KEYED.replace("QUOTE", "<escape>") + "}<end_function_call>"),
        begin="<start_of_turn>", end="<end_of_turn>\n",
    ),
    "gemma4": chat(each("<|tool_call>call:{{ f.name }}{" + KEYED.replace("QUOTE", '<|"|>') + "}<tool_call|>"), begin="<|turn>"),
    "xlam": chat("[" + each(OBJECT, ", ") + "]"),
    "seed_oss": chat(each(
        f"<seed:tool_call>\n<function={{{{ f.name }}}}>\n{ITEMS}<parameter={{{{ k }}}}>{VALUE}</parameter>\n{{% endfor %}}</function>\n</seed:tool_call>"
    )),
    # The end of a turn differs from that of plain answers, and marks have a suffix.
    "hy_v3": (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}<｜hy_User｜>{{ m.content }}{% elif m.tool_calls %}"
        "<｜hy_Assistant｜><think></think><tool_calls:opensource>\n" + each(
            f"<tool_call:opensource>{{{{ f.name }}}}<tool_sep:opensource>\n{ITEMS}<arg_key:opensource>{{{{ k }}}}</arg_key:opensource>\n"
            f"<arg_value:opensource>{VALUE}</arg_value:opensource>\n{{% endfor %}}</tool_call:opensource>", "\n"
        ) + "\n</tool_calls:opensource></s>{% else %}<｜hy_Assistant｜>{{ m.content }}{% if not loop.last %}</s>{% endif %}{% endif %}{% endfor %}"
    ),
    "nemotron_nano_v2": chat("{{ m.content + '\n\n' if m.content }}<TOOLCALL>[" + each(OBJECT, ", ") + "]</TOOLCALL>", answer="<think>\n\n</think>{{ m.content }}", begin="<SPECIAL_11>", end="\n<SPECIAL_12>\n"),
    "minimax_m3": chat(
        f"{M3}<tool_call>\n" + each(f'{M3}<invoke name="{{{{ f.name }}}}">{ITEMS}{M3}<{{{{ k }}}}>{VALUE}{M3}</{{{{ k }}}}>{{% endfor %}}{M3}</invoke>\n')
        + f"{M3}</tool_call>", begin="]~b]", end="[e~[\n",
    ),
    "deepseek_v32": chat(DSML.replace("SECTION", "function_calls"), begin="<｜", end="<｜end▁of▁sentence｜>"),
    "deepseek_v4": chat(DSML.replace("SECTION", "tool_calls"), begin="<｜", end="<｜end▁of▁sentence｜>"),
    # Mistral's before its eleventh tokenizer: a list, with ids.
    "mistral_list": (
        "<s>{% for m in messages %}{% if m.role == 'user' %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' if tools }}[INST]{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}{{ m.content if m.content }}[TOOL_CALLS][" + each(OBJECT[:-1] + ', "id": "{{ c.id }}"}', ", ") + "]</s>{% elif m.role == 'tool' %}"
        "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{{ ' ' + m.content }}</s>{% endif %}{% endfor %}"
    ),
    "phi4_mini_json": chat(each(OBJECT, ","), begin="<|", end="<|end|>") + "{# generate calls as functools[{...}] #}",
    "apertus": chat('<|tools_prefix|>[' + each('{"{{ f.name }}": {{ f.arguments | tojson }}}', ", ") + ']<|tools_suffix|>'),
    "minicpm5": chat(each(f'<function name="{{{{ f.name }}}}">\n{ITEMS}<param name="{{{{ k }}}}">{VALUE}</param>\n{{% endfor %}}</function>', "\n")),
    "solar_open": chat(
        "<|tool_calls|>" + each(
            "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ f.name }}<|tool_call:args|>{{ f.arguments | tojson }}<|tool_call:end|>"
        ) + "<|calls|>",
        answer="{% if m.reasoning %}<|think|>{{ m.reasoning }}<|end|><|begin|>assistant{% endif %}<|content|>{{ m.content }}",
        begin="<|begin|>", end="<|end|>",
    ),
    "solar_open2": chat(each(
        f"<|tool_call:start|>{{{{ f.name }}}}\n{ITEMS}<|tool_arg:start|>{{{{ k }}}}<|tool_arg:value|>{VALUE}<|tool_arg:end|>\n{{% endfor %}}<|tool_call:end|>"
    )),
    "openai": chat(
        each("<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>"),
        answer="<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>", begin="", end="",
    ) + "{# Calls to these tools must go to the commentary channel: <|channel|>commentary #}",
}  # fmt: skip


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_the_format_of_calls_is_recognised(name: str) -> None:
    tokenizer: Any = Templated(TOOL_TEMPLATES[name])
    found = model_formats(tokenizer).tools
    assert found == FORMATS[name]


@pytest.mark.parametrize("template", [*TOOL_TEMPLATES.values(), *published().values()])
def test_a_template_whose_calls_are_not_read_is_refused_with_a_reason(template: str) -> None:
    formats, (right, number) = model_formats(tokenizer_of(template)), num_read(template)
    # A history need not be as models write: the format is then what the template asks for in words, or its marks say.
    is_told = any(words in template for words, _ in _INSTRUCTIONS)
    if not is_told and formats.tools not in (FORMATS["functiongemma"], FORMATS["openai"]):
        assert right == number or formats.why_no_choice


def test_a_template_that_describes_no_tools_is_known_by_the_marks_of_its_calls() -> None:
    """Its arguments, which are all texts, are not read back as they were given."""
    call = (
        f"<start_function_call>call:{{{{ f.name + '{{' }}}}{ITEMS}{{{{ k }}}}:<escape>{{{{ v }}}}<escape>"
        "{{ ',' if not loop.last }}{% endfor %}}<end_function_call>"
    )
    silent = chat(each(call)).partition("{% endfor %}")[2]
    assert model_formats(Templated(silent)).tools == FORMATS["functiongemma"]  # type: ignore[arg-type]


@pytest.mark.parametrize("own", ["", '"id": null, '])
def test_calls_have_no_null_as_a_word_for_their_content(own: str) -> None:
    """A null that the template writes in every call is its own."""
    call = LLAMA.replace('"parameters"', f'{own}"parameters"')
    template = chat("{{ m.content if m.content is string else m.content | tojson }}" + each(call, "; "))
    rendered = rendered_calls(Templated(template), template)  # type: ignore[arg-type]
    assert rendered
    assert [one.text.count("null") for one in rendered] == [bool(own) * len(one.calls) for one in rendered]


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_calls_are_read_as_the_template_writes_them_and_forced_in_the_same_format(name: str) -> None:
    tokenizer: Any = Templated(TOOL_TEMPLATES[name])
    form = model_formats(tokenizer).tools
    assert form is not None
    for one in rendered_calls(tokenizer, TOOL_TEMPLATES[name]):
        tools = {call.name: call.tool["function"]["parameters"] for call in one.calls}
        spelled = spelling(form, tools)
        if spelled is not None and name not in (
            "phi4_mini_json",
            "openai",
            "solar_open",
        ):  # whose history is not as grammars write
            begin = "".join((spelled.open + spelled.calls[one.calls[0].name].before).split())
            assert begin in "".join(one.text.split())
        if form.is_whole_answer or name == "openai":
            continue
        parser = FormatParser(form, tools)
        read = [piece for piece in parser.add(one.text) + parser.finish() if isinstance(piece, Call)]
        assert name == "phi4_mini_json" or [(call.name, json.loads(call.arguments)) for call in read] == [
            (call.name, call.arguments) for call in one.calls
        ]


def test_formats_that_only_history_shows_count() -> None:
    """DeepSeek R1's template and those of its distilled models never say that there are tools."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% endif %}{% if m.role == 'assistant' and m.tool_calls %}<｜Assistant｜><｜tool▁calls▁begin｜>"
        "{% for c in m.tool_calls %}{{ '\n' if not loop.first }}{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}"
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% endif %}{% if m.role == 'assistant' and m.content is not none %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    )
    assert "tools" not in template
    assert model_formats(Templated(template)).tools == FORMATS["deepseek_v3"]  # type: ignore[arg-type]


K3 = (
    "{{ tools | tojson if tools }}{% macro put(a, b) %}<|{{ a }}|>{{ b }}<|sep|>{% endmacro %}{% for m in messages %}{{ put('open', 'message role=\"' ~ m.role ~ '\"') }}"
    "{% if m.role == 'assistant' %}{{ put('open', 'think') }}{{ m.reasoning_content }}{{ put('close', 'think') }}{{ put('open', 'response') }}{{ m.content }}{{ put('close', 'response') }}"
    "{% if m.tool_calls %}{{ put('open', 'tools') }}{% for c in m.tool_calls %}{{ put('open', 'call tool=\"' ~ c.function.name ~ '\" index=\"' ~ loop.index ~ '\"') }}"
    "{% for k, v in c.function.arguments.items() %}{{ put('open', 'argument key=\"' ~ k ~ '\" type=\"' ~ ('string' if v is string else 'number') ~ '\"') }}{{ v }}{{ put('close', 'argument') }}{% endfor %}"
    "{{ put('close', 'call') }}{% endfor %}{{ put('close', 'tools') }}{% endif %}{% else %}{{ m.content }}{% endif %}{{ put('close', 'message') }}{% endfor %}"
)
MUSE = (
    "{{ tools | tojson if tools }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}{{ '<|start|>assistant to=self<|message|>' + m.reasoning_content + '<|eom|>' }}{% endif %}"
    "{% for c in m.tool_calls %}{{ '<|start|>assistant to=' + c.function.name + '<|message|><atem:function_calls>\n<atem:invoke name=\"' + c.function.name + '\">\n' }}"
    "{% for k, v in c.function.arguments.items() %}{{ '<atem:parameter name=\"' + k + '\">' ~ v ~ '</atem:parameter>\n' }}{% endfor %}"
    "{{ '</atem:invoke>\n</atem:function_calls>' + ('<|eot|>' if loop.last else '<|eom|>') }}{% else %}"
    "{{ '<|start|>assistant to=user<|message|>' + m.content + '<|eot|>' }}{% endfor %}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|eot|>' }}{% endif %}{% endfor %}"
)
RECIPIENTS = (
    "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role + '\n\n' }}{{ '>>>all\n' if m.role == 'assistant' and m.content }}"
    "{{ m.content or '' }}{% for c in m.tool_calls or () %}{{ '>>>' + c.function.name + '\n' + c.function.arguments }}{% endfor %}<|eot_id|>{% endfor %}"
)
HERMES_CALL = f"<tool_call>\n{OBJECT}\n</tool_call>"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        # A null that is written as a word is no mark, and neither is the turn that follows calls.
        (chat("{{ m.content }}\n" + each(HERMES_CALL, "\n")), "hermes", None),
        (
            chat(
                each(HERMES_CALL, "\n"),
                end="<|im_end|>\n{% if m.tool_calls %}<|im_start|>system\nMind it.<|im_end|>\n{% endif %}",
            ),
            "hermes",
            None,
        ),
        # Marks around results of calls are not those around answers.
        (
            chat(
                each(HERMES_CALL, "\n"),
                answer="{% if m.role == 'tool' %}<response>{{ m.content }}</response>{% else %}"
                + THINK
                + "{% endif %}",
            ),
            "hermes",
            "qwen3",
        ),
        (K3, "kimi_k3", "kimi_k3"),
        (MUSE, "muse_glimmer", "muse_glimmer"),
        (RECIPIENTS, "functionary", "functionary"),
    ],
)
def test_what_stands_around_calls_and_answers_is_no_part_of_their_format(
    template: str, tools: str, reasoning: str | None
) -> None:
    found = model_formats(Templated(template))  # type: ignore[arg-type]
    assert found.tools == FORMATS[tools]
    assert found.reasoning == (None if reasoning is None else {**STYLES, "functionary": FUNCTIONARY}[reasoning])


def test_blocks_of_reasoning_are_recognised_where_the_template_reads_the_field_reasoning() -> None:
    found = model_formats(Templated(TOOL_TEMPLATES["solar_open"]))  # type: ignore[arg-type]
    assert found.reasoning == STYLES["solar_open"]


def test_text_before_calls_may_be_a_turn_of_its_own() -> None:
    """As Nemotron Nano v2's template has it at the end of a conversation, with reasoning before plain answers only."""
    template = (
        "{{ tools | tojson if tools }}{% for m in messages %}{% if m.role == 'user' %}<SPECIAL_11>User\n{{ m.content }}\n{% else %}"
        "{% if m.content %}<SPECIAL_11>Assistant\n<think>\n\n{{ m.content }}\n<SPECIAL_12>\n\n{% endif %}{% if m.tool_calls %}<SPECIAL_11>Assistant\n<TOOLCALL>["
        + each(OBJECT, ", ")
        + "]</TOOLCALL>\n<SPECIAL_12>\n\n{% endif %}{% endif %}{% endfor %}"
    )
    assert model_formats(Templated(template)).tools == FORMATS["nemotron_nano_v2"]  # type: ignore[arg-type]


@pytest.mark.parametrize(("mark", "name"), [("", "mistral_list"), ("[ARGS] [CALL_ID]", "mistral")])
def test_of_formats_with_one_mark_the_one_is_taken_whose_other_marks_a_template_has(mark: str, name: str) -> None:
    template = "{{ tools | tojson if tools }}{% for m in messages %}{{ '[TOOL_CALLS]' if m.tool_calls }}{{ m.content }}{% endfor %}"
    assert model_formats(Templated(f"{template}{{# {mark} #}}")).tools == FORMATS[name]  # type: ignore[arg-type]


def test_objects_without_marks_after_a_header_are_the_whole_answer() -> None:
    """As Llama 4's: calls follow each other without anything between them."""
    template = (
        "{% for m in messages %}{% if loop.first and tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% if 'tool_calls' in m and m.tool_calls | length > 0 %}"
        "<|header_start|>assistant<|header_end|>\n\n{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
        + each(LLAMA)
        + "<|eot|>{% else %}<|header_start|>{{ m.role }}<|header_end|>\n\n{{ m.content }}<|eot|>{% endif %}{% endfor %}"
    )
    assert model_formats(Templated(template)).tools == FORMATS["llama3_json"]  # type: ignore[arg-type]


NEW_MARKS: dict[str, tuple[str, ToolFormat]] = {
    "an object": (chat(each("<<call>>{{ c.function | tojson }}<</call>>")),
                  ToolFormat(JsonCalls(), start="<<call>>", end="<</call>>", separator="")),
    "a list, other keys": (
        chat('<acts>[{"fn": "{{ m.tool_calls[0].function.name }}", "kw": {{ m.tool_calls[0].function.arguments | tojson }}}]</acts>'),
        ToolFormat(JsonCalls("fn", "kw", is_list=True), start="<acts>", end="</acts>"),
    ),
    "a name, then an object": (chat(each("<run> {{ f.name }} <with>{{ f.arguments | tojson }}</run>")),
                               ToolFormat(NamedJson(after=" <with>"), start="<run> ", end="</run>", separator="")),
    "a name in a mark, then an object": (chat(each("<function={{ f.name }}>{{ f.arguments | tojson }}</function>")),
                                         ToolFormat(NamedJson(after=">"), start="<function=", end="</function>", separator="")),
    "attributes of types": (
        chat(DSML.replace("DSML", "GCML").replace("SECTION", "calls")),
        ToolFormat(
            Tags(
                "", '">\n', '<｜GCML｜parameter name="', '"', '">', "</｜GCML｜parameter>\n", "", ' string="true',
                ' string="false',
            ),
            open="<｜GCML｜calls>", start='\n<｜GCML｜invoke name="', end="</｜GCML｜invoke>", separator="",
            close="\n</｜GCML｜calls>",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEW_MARKS)
def test_marks_that_nobody_knows_are_read_off(name: str) -> None:
    template, expected = NEW_MARKS[name]
    assert model_formats(Templated(template)).tools == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("opened", ["", "<acts>\n"])
@pytest.mark.parametrize("separator", ["", "\n", "<and/>"])
@pytest.mark.parametrize(
    "call",
    [
        f"<do {{{{ f.name }}}}>\n{ITEMS}<with {{{{ k }}}}>{VALUE}</with>\n{{% endfor %}}</do>",
        f"<do>{{{{ f.name }}}}<sep>\n{ITEMS}<{{{{ k }}}}>{VALUE}</{{{{ k }}}}>\n{{% endfor %}}</do>",
        "<run> {{ f.name }} <with>{{ f.arguments | tojson }}</run>",
        '<do>{"fn": "{{ f.name }}", "kw": {{ f.arguments | tojson }}}</do>',
    ],
)
def test_formats_that_nobody_knows_are_read_off_with_what_stands_around_and_between(
    call: str, separator: str, opened: str
) -> None:
    closed = opened.replace("<", "</")
    tokenizer: Any = Templated(chat(f"{opened}{each(call, separator)}{closed}", begin="<|b|>", end="<|e|>\n"))
    form = model_formats(tokenizer).tools
    assert form is not None and "<|e|>" not in form.end + form.close and "<|b|>" not in form.open + form.start
    for one in rendered_calls(tokenizer, tokenizer.get_chat_template()):
        text = "Well.\n" + one.text.partition("assistant\n")[2].removesuffix("<|e|>\n")
        parser = FormatParser(form, {call.name: call.tool["function"]["parameters"] for call in one.calls})
        pieces = [piece for letter in text for piece in parser.add(letter)] + parser.finish()
        assert "".join(piece for piece in pieces if isinstance(piece, str)) == "Well."
        calls = [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, Call)]
        assert calls == [(call.name, call.arguments) for call in one.calls]


def test_marks_that_differ_between_calls_are_no_format() -> None:
    """A counter within the marks is read neither as a part of them nor as anything else."""
    call = "<call-{{ c.id }}>{{ f.name }}<with>{{ f.arguments | tojson }}</call-{{ c.id }}>"
    found = model_formats(Templated(chat(each(call))))  # type: ignore[arg-type]
    assert found.tools is None
    assert "as the chat template writes them, such as '<call-abcdefgh1>probe_name<with>{" in found.why_no_choice


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (chat("", answer=THINK), "qwen3"),
        (chat("", answer="{{ m.content.split('</think>')[-1] }}"), "qwen3"),  # DeepSeek-R1: answers keep no reasoning
        (chat("", answer=THINK.replace("<think>\n", "[THINK]").replace("\n</think>\n\n", "[/THINK]")), "mistral"),
        (chat("", answer=THINK.replace("think>", "seed:think>")), "seed_oss"),
        (chat("", answer=THINK.replace("{{ m.content }}", "<answer>\n{{ m.content }}\n</answer>")), "hunyuan_a13b"),
        (chat("") + "{# Here is my thought process: ... Here is my response: #}", "granite"),
        (chat("", answer="<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant<|channel|>final"
              "<|message|>{{ m.content }}<|end|>"), "openai_gptoss"),
        (chat("", answer=THINK.replace("<think>\n", "<|START_THINKING|>").replace("\n</think>\n\n", "<|END_THINKING|>")
              .replace("{{ m.content }}", "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>")), "cohere"),
        (chat(""), None),
    ],
)  # fmt: skip
def test_the_format_of_reasoning_is_recognised(template: str, style: str | None) -> None:
    found = model_formats(Templated(template)).reasoning  # type: ignore[arg-type]
    assert found == (None if style is None else STYLES[style])


def test_marks_of_reasoning_that_nobody_knows_are_read_off() -> None:
    template = chat("", answer=THINK.replace("think>", "muse>"))
    assert model_formats(Templated(template)).reasoning == ReasoningStyle("<muse>", "</muse>")  # type: ignore[arg-type]


def test_what_the_checkpoint_states_comes_first() -> None:
    stated = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "[THINK]", "close": "[/THINK]"},
            "tool_calls": {"open": "<tool>", "close": "</tool>", "content": "json", "repeats": True},
        },
    }
    found = model_formats(Templated(TOOL_TEMPLATES["hermes"]), response_template=stated)  # type: ignore[arg-type]
    assert found.tools == ToolFormat(JsonCalls(), start="<tool>", end="</tool>")
    assert found.reasoning == STYLES["mistral"]


def test_flags_override_and_can_turn_off() -> None:
    tokenizer: Any = Templated(TOOL_TEMPLATES["hermes"])
    assert model_formats(tokenizer, "mistral", "seed_oss").tools == FORMATS["mistral"]
    found = model_formats(tokenizer, "none", "none")
    assert (found.tools, found.reasoning) == (None, None) and "--tool-call-parser none" in found.why_no_choice


def test_templates_that_write_no_calls_are_known_by_words_tokens_or_the_kind_of_model() -> None:
    silent = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert "not recognised" in model_formats(Templated(silent)).why_no_choice  # type: ignore[arg-type]
    tokenizer: Any = Templated(silent, "<|tool_call_start|>", "<|tool_call_end|>")
    assert model_formats(tokenizer).tools == FORMATS["lfm2"]
    assert model_formats(Templated(silent), model_type="llama4").tools == FORMATS["pythonic"]  # type: ignore[arg-type]
    words = silent + "{# Use exact format: [func_name1(param1=value1), func_name2(...)] #}"
    assert model_formats(Templated(words)).tools == FORMATS["pythonic"]  # type: ignore[arg-type]
    words = silent + '{# Respond in the format {"name": function name, "parameters": ... } #}'
    assert model_formats(Templated(words)).tools == FORMATS["llama3_json"]  # type: ignore[arg-type]
    for marks in (("<|tool_list_start|>[", "]<|tool_list_end|>"), ("[", "]")):
        listed = f"List of tools: {marks[0]}{{% for t in tools or [] %}}{{{{ t | tojson }}}}{{% endfor %}}{marks[1]}"
        found = model_formats(Templated(f"{listed}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"))  # type: ignore[arg-type]
        assert found.tools == FORMATS["lfm2"] and not found.why_no_choice
    # Tools are then described in words, in Hermes' format.
    assert model_formats(Templated("{{ messages }}")).tools == FORMATS["hermes"]  # type: ignore[arg-type]
    broken: Any = Templated("{{ tools }}{{ raise_exception('no') }}")
    assert model_formats(broken).tools is None
