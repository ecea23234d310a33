"""The formats of tool calls as data: marks, and the form of name and arguments between them.

`format_parser` reads answers by them, `call_spelling` writes them for grammars, `format_detection` finds a model's.
Marks contain the blanks that models write; readers ignore blanks around marks. The sources are the models' published
chat templates. The names are those of vLLM's --tool-call-parser.
"""

import re
from dataclasses import dataclass
from typing import Any

AUTO, NONE = "auto", "none"  # instead of a name: recognise the format; read no calls


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """`{"name": "f", "arguments": {…}}`; with `is_list`, a list of all calls. Without a `name` it is `{"f": {…}}`."""

    name: str = "name"
    arguments: str = "arguments"
    is_list: bool = False
    first: str = ""  # text before the name, within the object


@dataclass(frozen=True, slots=True)
class NamedJson:
    """The name, then the arguments as a JSON object."""

    before: str = ""  # text before the name
    after: str = ""
    end: str = ""
    call_id: str = ""  # text after the name; `\\d` stands for the number of earlier calls
    id_before: str = ""  # mark between the call's id, which is then first, and the name
    # Regular expression of an optional text after the name. Its group is the call's id; without a group the id is the
    # whole head.
    may_have_id: str = ""


@dataclass(frozen=True, slots=True)
class Tags:
    """The name, then each argument between marks: texts without quotes, other values as JSON. `{key}` in `value_after`
    stands for the key."""

    name_before: str
    name_after: str
    key_before: str
    key_after: str
    value_before: str  # after the key and its attributes
    value_after: str
    end: str = ""
    text_attribute: str = ""  # attribute of a value that is a text
    json_attribute: str = ""
    has_nested: bool = False  # objects and lists consist of nested tags; items of a list are named "item"
    index: str = ""  # text between the name and `name_after`; `\\d` stands for the number of the call, from 1
    # Marks around all arguments as one JSON object, which is read instead of tags and written by grammars.
    json_before: str = ""
    json_after: str = ""
    has_cdata: bool = False  # a value may be in `<![CDATA[…]]>`, which is not part of it


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """`f(city="Paris")`, in a list or one a line."""

    is_list: bool = True


@dataclass(frozen=True, slots=True)
class KeyedValues:
    """`call:f{city:"Paris",days:3}`, with marks instead of quotes."""

    before: str
    quote: str
    sorts_keys: bool = False  # the template writes keys in alphabetical order


CallSyntax = JsonCalls | NamedJson | Tags | PythonCalls | KeyedValues


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`open start BODY end separator start BODY end close`. Without `open` and `start` calls are the whole answer."""

    body: CallSyntax
    open: str = ""
    start: str = ""
    end: str = ""
    separator: str = "\n"
    close: str = ""
    also: tuple[CallSyntax, ...] = ()  # further forms that are read
    skipped: tuple[str, ...] = ()  # texts allowed before calls that are the whole answer
    # Text before `start`, with the function as `{name}`. The style of the model's reasoning takes it out of answers.
    address: str = ""
    # Not empty: prompts end with `start`, so that answers begin with this text and content, or with a call without its
    # start mark.
    text_start: str = ""
    # Text before the code of the function `python`, which is the rest of the answer, or before `f.call(a="b")`.
    code_mark: str = ""

    @property
    def is_whole_answer(self) -> bool:
        return not (self.open or self.start)

    @property
    def counts_calls(self) -> bool:
        """Return whether a call has its number in the conversation as a part of its id."""
        return isinstance(self.body, NamedJson) and bool(self.body.call_id)

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts that must be visible to read calls. Vocabularies may have them, or parts of them, as special
        tokens."""
        body = self.body
        texts = [self.open, self.start, self.end, self.close, *self.skipped, self.code_mark]
        if isinstance(body, NamedJson):
            texts += [body.id_before, body.before, body.after, body.end, re.sub(r"\\(?=\W)|\(.*", "", body.may_have_id)]
        elif isinstance(body, Tags):
            texts += [body.name_before, body.name_after, body.key_before, body.key_after, body.value_before]
            texts += [*body.value_after.split("{key}"), body.end, body.json_before, body.json_after]
        elif isinstance(body, KeyedValues):
            texts.append(body.quote)
        return tuple(text for text in dict.fromkeys(texts) if text.strip())


_JSON = JsonCalls()
_QWEN_TAGS = Tags("<function=", ">\n", "<parameter=", ">", "\n", "\n</parameter>\n", "</function>\n")
_M3 = "]<]minimax[>["  # before each of MiniMax M3's tags
_DEEPSEEK: Any = {
    "open": "<｜tool▁calls▁begin｜>", "start": "<｜tool▁call▁begin｜>", "end": "<｜tool▁call▁end｜>",
    "close": "<｜tool▁calls▁end｜>",
}  # fmt: skip


def _invoke(prefix: str, **more: Any) -> Tags:
    """Return MiniMax's tags. Other models use them with a prefix."""
    begin = f"<{prefix}"
    return Tags(
        f'{begin}invoke name="', '">\n', f'{begin}parameter name="', '"', ">", f"</{prefix}parameter>\n",
        f"</{prefix}invoke>\n", **more,
    )  # fmt: skip


HERMES = ToolFormat(_JSON, start="<tool_call>\n", end="\n</tool_call>")
_QWEN = ToolFormat(_QWEN_TAGS, start="<tool_call>\n", end="</tool_call>", also=(_JSON,))
_GLM = ToolFormat(
    Tags("", "\n", "<arg_key>", "</arg_key>", "\n<arg_value>", "</arg_value>\n"),
    start="<tool_call>",
    end="</tool_call>",
)
_MISTRAL_ALSO: Any = (NamedJson(after="[ARGS]", may_have_id=r"\[CALL_ID\]([\w-]*)"),)
_MISTRAL = ToolFormat(_MISTRAL_ALSO[0], start="[TOOL_CALLS]", separator="", also=(_JSON,))
_MISTRAL_LIST = ToolFormat(JsonCalls(is_list=True), start="[TOOL_CALLS]", also=_MISTRAL_ALSO)
_LIST_IN_TAGS = ToolFormat(JsonCalls(is_list=True), start="<tool_calls>", end="</tool_calls>")
CODE_MARK = "<|python_tag|>"  # of Llama 3 and Functionary 3.1
_LLAMA_JSON = ToolFormat(
    JsonCalls(arguments="parameters"), skipped=(CODE_MARK,), separator="; ", code_mark=CODE_MARK
)  # fmt: skip
_PYTHONIC = ToolFormat(PythonCalls(), skipped=("<|python_start|>",), close="<|python_end|>")
HARMONY = ToolFormat(
    NamedJson("functions.", " <|constrain|>json<|message|>"), start="<|channel|>commentary to=", end="<|call|>"
)

FUNCTIONARY = ToolFormat(NamedJson(after="\n"), start=">>>", separator="", text_start="all\n")
_COHERE = ToolFormat(
    JsonCalls("tool_name", "parameters", is_list=True, first='"tool_call_id": "0", '), start="<|START_ACTION|>",
    end="<|END_ACTION|>",
)  # fmt: skip


def _hunyuan_v3(suffix: str) -> ToolFormat:
    """Return the format of Hunyuan V3. Checkpoints have its marks with or without a suffix."""
    return ToolFormat(
        Tags(
            "", f"<tool_sep{suffix}>\n", f"<arg_key{suffix}>", f"</arg_key{suffix}>", f"\n<arg_value{suffix}>",
            f"</arg_value{suffix}>\n",
        ),
        open=f"<tool_calls{suffix}>\n", start=f"<tool_call{suffix}>", end=f"</tool_call{suffix}>",
        close=f"\n</tool_calls{suffix}>",
    )  # fmt: skip


def _dsml(section: str) -> ToolFormat:
    return ToolFormat(
        _invoke("｜DSML｜", text_attribute=' string="true"', json_attribute=' string="false"'),
        open=f"<｜DSML｜{section}>\n", close=f"</｜DSML｜{section}>", separator="",
    )  # fmt: skip


FORMATS: dict[str, ToolFormat] = {
    "apertus": ToolFormat(JsonCalls("", is_list=True), start="<|tools_prefix|>", end="<|tools_suffix|>"),
    "cohere": _COHERE,
    "command_r": ToolFormat(
        JsonCalls("tool_name", "parameters", is_list=True), start="Action: ```json\n", end="\n```"
    ),
    "deepseek_v3": ToolFormat(NamedJson("function<｜tool▁sep｜>", "\n```json\n", "\n```"), **_DEEPSEEK),
    "deepseek_v31": ToolFormat(NamedJson(after="<｜tool▁sep｜>"), **_DEEPSEEK, separator=""),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "ernie45": HERMES,
    "functionary": FUNCTIONARY,
    "functiongemma": ToolFormat(
        KeyedValues("call:", "<escape>"), start="<start_function_call>", end="<end_function_call>", separator=""
    ),
    "gemma3": ToolFormat(PythonCalls(is_list=False), start="```tool_code\n", end="\n```"),
    "gemma4": ToolFormat(
        KeyedValues("call:", '<|"|>', sorts_keys=True), start="<|tool_call>", end="<tool_call|>", separator=""
    ),
    "glm45": _GLM,
    "glm47": _GLM,
    "granite": ToolFormat(JsonCalls(is_list=True), start="<|tool_call|>"),
    "granite-20b-fc": ToolFormat(_JSON, start="<function_call> "),
    "granite4": HERMES,
    "gigachat3": ToolFormat(_JSON, start="<|function_call|>"),
    "hermes": HERMES,
    "hunyuan_a13b": _LIST_IN_TAGS,
    "hy_v3": _hunyuan_v3(":opensource"),
    "hy_v3_plain": _hunyuan_v3(""),
    "inkling": ToolFormat(
        JsonCalls(arguments="args"), start="<|content_invoke_tool_json|>", end="<|end_message|>",
        separator="<|message_model|>",
    ),
    "internlm": ToolFormat(
        JsonCalls(arguments="parameters"), start="<|action_start|><|plugin|>\n", end="<|action_end|>"
    ),
    "jamba": _LIST_IN_TAGS,
    "kimi_k2": ToolFormat(
        NamedJson("functions.", "<|tool_call_argument_begin|>", call_id=r":\d", may_have_id=r":\d+"),
        open="<|tool_calls_section_begin|>", start="<|tool_call_begin|>", end="<|tool_call_end|>", separator="",
        close="<|tool_calls_section_end|>",
    ),
    "kimi_k3": ToolFormat(
        Tags(
            '<|open|>call tool="', "<|sep|>", '<|open|>argument key="', '"', "<|sep|>", "<|close|>argument<|sep|>",
            "<|close|>call<|sep|>", ' type="string"', ' type="object"', index='" index="\\d"',
            json_before='<|open|>json type="object"<|sep|>', json_after="<|close|>json<|sep|>",
        ),
        open="<|open|>tools<|sep|>", close="<|close|>tools<|sep|>", separator="",
    ),
    "lfm2": ToolFormat(PythonCalls(), start="<|tool_call_start|>", end="<|tool_call_end|>"),
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "llama4_pythonic": _PYTHONIC,
    "longcat": ToolFormat(_JSON, start="<longcat_tool_call>\n", end="\n</longcat_tool_call>"),
    "mimo": _QWEN,
    "minicpm5": ToolFormat(
        Tags("", '">\n', '<param name="', '"', ">", "</param>\n", has_cdata=True), start='<function name="',
        end="</function>",
    ),
    "minimax": ToolFormat(_JSON, open="<tool_calls>\n", close="\n</tool_calls>"),
    "minimax_m2": ToolFormat(
        _invoke(""), open="<minimax:tool_call>\n", close="</minimax:tool_call>", separator=""
    ),
    "minimax_m3": ToolFormat(
        Tags(
            f'{_M3}<invoke name="', '">', f"{_M3}<", ">", "", f"{_M3}</{{key}}>", f"{_M3}</invoke>\n", has_nested=True
        ),
        open=f"{_M3}<tool_call>\n", close=f"{_M3}</tool_call>", separator="",
    ),
    "mistral": _MISTRAL,
    "mistral_list": _MISTRAL_LIST,
    "muse_glimmer": ToolFormat(
        _invoke("atem:"), start="<atem:function_calls>\n", end="</atem:function_calls>",
        separator="<|eom|><|start|>assistant", address=" to={name}<|message|>",
    ),
    "nemotron_nano_v2": ToolFormat(JsonCalls(is_list=True), start="<TOOLCALL>", end="</TOOLCALL>"),
    "olmo3": ToolFormat(PythonCalls(is_list=False), start="<function_calls>", end="</function_calls>"),
    "openai": HARMONY,
    "phi4_mini_json": ToolFormat(JsonCalls(is_list=True), start="functools"),
    "phi4_mini": ToolFormat(JsonCalls(is_list=True), start="<|tool_call|>", end="<|/tool_call|>"),
    "pythonic": _PYTHONIC,
    "qwen": _QWEN,
    "qwen3_coder": _QWEN,
    "qwen3_xml": _QWEN,
    "seed_oss": ToolFormat(
        Tags("<function=", ">\n", "<parameter=", ">", "", "</parameter>\n", "</function>\n"),
        start="<seed:tool_call>\n", end="</seed:tool_call>",
    ),
    "solar_open": ToolFormat(
        NamedJson(after="<|tool_call:args|>", id_before="<|tool_call:name|>"),
        open="<|tool_calls|>", start="<|tool_call:begin|>", end="<|tool_call:end|>", separator="", close="<|calls|>",
    ),
    "solar_open2": ToolFormat(
        Tags("", "\n", "<|tool_arg:start|>", "<|tool_arg:value|>", "", "<|tool_arg:end|>\n"),
        start="<|tool_call:start|>", end="<|tool_call:end|>",
    ),
    "step3": ToolFormat(
        Tags('function<｜tool_sep｜><steptml:invoke name="', '">', '<steptml:parameter name="', '"', ">",
             "</steptml:parameter>", "</steptml:invoke>"),
        open="<｜tool_calls_begin｜>\n", start="<｜tool_call_begin｜>", end="<｜tool_call_end｜>",
        close="\n<｜tool_calls_end｜>",
    ),
    "step3p5": _QWEN,
    "xlam": ToolFormat(JsonCalls(is_list=True), skipped=("```json", "```", "[TOOL_CALLS]"), close="```"),
}  # fmt: skip

# Other names of the same formats.
_ALIASES = {"cohere_command3": "cohere", "cohere_command4": "cohere", "poolside_v1": "glm45"}
FORMATS |= {alias: FORMATS[name] for alias, name in _ALIASES.items()}


def register_tool_format(name: str, form: ToolFormat) -> None:
    """Register a format for --tool-call-parser and for recognition, under `name`. It replaces an earlier format of this
    name."""
    FORMATS[name] = form
