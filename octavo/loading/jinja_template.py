"""Chat templates: Jinja programs that write a conversation as the text which the model continues.

Templates are written for `transformers` (5.23), so they get the same Jinja environment, functions and message fields
here. They come with the model, so they run in Jinja's sandbox, on plain data.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from contextlib import contextmanager
from datetime import date, datetime
from functools import lru_cache, partial, wraps
from string import Formatter
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Template

# Names of the field with a message's reasoning. Templates read the first name; gpt-oss's template reads "thinking".
REASONING = ("reasoning_content", "thinking", "reasoning")
# Jinja's filters that write their value as a text first.
_TEXT_FILTERS = (
    "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower", "pprint", "replace", "string",
    "striptags", "title", "trim", "truncate", "upper", "urlencode", "urlize", "wordcount", "wordwrap",
)  # fmt: skip
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_PLAIN = frozenset((str, int, float, bool, type(None)))
_NESTED = (dict, list, tuple, Mapping, Set, ValuesView)  # types of values that contain others; the usual ones first
_MAX_CHARACTERS = 1 << 26  # longest text that a template may make
# A conversion of the operator %: width, precision and letter. A letter ( begins a key that has parentheses in it.
_PERCENT = re.compile(r"%(?:\([^()]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?(.)?", re.DOTALL)
# Lines that a template may run while a small conversation is rendered to find out about the template. Real ones run
# a few hundred.
_MAX_TRIAL_LINES = 200_000


@lru_cache(maxsize=32)
def compile_template(text: str) -> Template:
    """Return the compiled template. Raises `jinja2.TemplateSyntaxError`."""
    from jinja2 import TemplateError, nodes  # imported here, because text completions need no templates
    from jinja2.compiler import CodeGenerator
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.filters import FILTERS, make_attrgetter
    from jinja2.runtime import LoopContext
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here it renders its body."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

        def _render(self, caller: Any) -> Any:
            return caller()

    class SafeNamespace(Namespace):
        """A namespace that refuses names through which a template could reach Python's internals."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # no named `self`: `namespace(self=…)` works, as in Jinja
            values = dict(*args[1:], **kwargs)
            for name in values:
                SafeNamespace._check(name)
            Namespace.__init__(args[0], values)

        def __setitem__(self, name: str, value: Any) -> None:
            SafeNamespace._check(name)
            super().__setitem__(name, value)

        def __repr__(self) -> str:  # without the values, whose text may be of any length
            return "<Namespace>"

        @staticmethod
        def _check(name: Any) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise SecurityError(f"a chat template must not store the name {name!r}, which begins with _.")

    class SafeDict:
        """A template's `dict`, with only the call and `fromkeys`."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    # Replaces Jinja's own filter, which escapes HTML.
    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        check_text(value)
        if isinstance(indent, str | int):
            check_size((indent if isinstance(indent, int) else len(indent)) << 20)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def check_size(size: int) -> None:
        if size > _MAX_CHARACTERS:
            raise SecurityError(f"a chat template must not make a value of {size} places.")

    def check_method(text: str, name: str, *args: Any) -> None:
        """Refuse a call of a text's method whose result would be too long."""
        numbers = [abs(arg) for arg in args if isinstance(arg, int)]
        match name, args:
            case (("center" | "ljust" | "rjust" | "zfill"), _):
                check_size(max(numbers, default=0))
            case (("expandtabs" | "indent"), _):
                width = max([*numbers, *(len(arg) for arg in args if isinstance(arg, str))], default=8)
                check_size((text.count("\n") + text.count("\t") + 1) * width)
            case "replace", (str(old), str(new), *_):
                check_size(len(text) + text.count(old) * len(new))
            case "format", _:
                check_percent(text, args)

    def check_text(value: Any, times: int = 1) -> None:
        """Refuse a value whose text, written `times` times, would be too long."""
        sizes: dict[int, tuple[int, Any]] = {}  # by identity of the value: a list may have one element many times

        def size_of(one: Any) -> int:
            if isinstance(one, str):
                return len(one)
            if one is None or isinstance(one, int | float) or not isinstance(one, _NESTED):
                return 64
            if id(one) not in sizes:
                items: Iterable[Any] = [*one, *one.values()] if isinstance(one, Mapping) else [*one]
                sizes[id(one)] = (64 + sum(size_of(item) for item in items), one)  # kept, so that its id stays its own
            return sizes[id(one)][0]

        check_size(size_of(value) * times)

    def check_fields(widths: Iterable[str], values: Any, times: int) -> None:
        check_size(sum(int(width[:12] or 0) for width in widths))
        check_text(values, times)

    def check_percent(text: str, values: Any) -> None:
        """Refuse `text % values` if the result would be too long."""
        found = _PERCENT.findall(text)
        if any("*" in one or one[2] == "(" for one in found):
            raise SecurityError("a chat template must not compute the width of a field.")
        widths = [number for width, precision, _ in found for number in (width, precision)]
        check_fields(widths, values, 1 if isinstance(values, tuple) else len(found))

    def check_braces(text: str, values: Any) -> None:
        """Refuse `text.format(values)` if the result would be too long. Raises `ValueError` as `format` does."""
        specs = [spec or "" for _, name, spec, _ in Formatter().parse(text) if name is not None]
        if any("{" in spec for spec in specs):
            raise SecurityError("a chat template must not compute the width of a field.")
        check_fields(re.findall(r"\d+", " ".join(specs)), values, len(specs))

    def finalize(value: Any) -> Any:
        if not isinstance(value, str):
            check_text(value)
        return value

    def bounded_join(parts: Iterable[Any], separator: str = "") -> str:
        size, texts = 0, []
        for part in parts:
            texts.append(part if type(part) is str else str(finalize(part)))
            size += len(texts[-1]) + len(separator)
            check_size(size)
        return separator.join(texts)

    class Generator(CodeGenerator):
        """Writes `a ~ b` as a call that bounds its result."""

        def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
            self.write("concat((")
            for part in node.nodes:
                self.visit(part, frame)
                self.write(", ")
            self.write("))")

    class Sandbox(ImmutableSandboxedEnvironment):
        """Jinja's sandbox, in which no step makes a text that fills the memory."""

        intercepted_binops = frozenset(("+", "*", "**", "%"))
        code_generator_class = Generator
        concat = staticmethod(bounded_join)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "+" and type(left) is type(right) is str:  # most of what templates compute
                if (size := len(left) + len(right)) > _MAX_CHARACTERS:
                    check_size(size)
                return left + right
            lengths = [len(side) if isinstance(side, str | list | tuple) else None for side in (left, right)]
            match operator, lengths, left, right:
                case "+", (int(one), int(other)), _, _:
                    check_size(one + other)
                case ("*", (int(one), None), _, int(count)) | ("*", (None, int(one)), int(count), _):
                    check_size(one * count * (1 if str in (type(left), type(right)) else 64))
                case "*", _, int(), int():
                    check_size(1024 * (left.bit_length() + right.bit_length()))
                case "**", _, int(), int():
                    check_size(1024 * left.bit_length() * abs(right))
                case "%", _, str(), _:
                    check_percent(left, right)
            return super().call_binop(context, operator, left, right)

        def getattr(self, obj: Any, attribute: str) -> Any:
            if type(obj) is dict and attribute not in dict_names:  # a message: no exception, as Jinja would raise
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
            if type(obj) is LoopContext and attribute in loop_names:
                return getattr(obj, attribute)
            return super().getattr(obj, attribute)

        def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
            owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
            if isinstance(owner, str):
                if name == "join" and len(args) == 1:
                    args = (list(args[0]),)
                    check_size(sum(len(part) + len(owner) for part in args[0] if isinstance(part, str)))
                check_method(owner, name, *args, *kwargs.values())
            return super().call(context, called, *args, **kwargs)

        def wrap_str_format(self, value: Any) -> Any:
            wrapped = super().wrap_str_format(value)
            if wrapped is None:
                return None

            @wraps(wrapped)
            def call(*args: Any, **kwargs: Any) -> Any:
                check_braces(value.__self__, [args, kwargs])
                return wrapped(*args, **kwargs)

            return call

    def bounded_filter(name: str) -> Any:
        found = FILTERS[name]

        @wraps(found)  # keeps the mark of the argument that Jinja passes first
        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[1:] if hasattr(found, "jinja_pass_arg") else args
            check_text(given[0])
            check_method(str(given[0]), name, *given[1:], *kwargs.values())
            return found(*args, **kwargs)

        return call

    def join(value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
        return bounded_join(value if attribute is None else map(make_attrgetter(environment, attribute), value), str(d))

    dict_names = frozenset(dir(dict))
    loop_names = frozenset(("first", "last", "index", "index0", "length"))  # attributes of a loop that are numbers
    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=finalize)
    environment.filters |= {name: bounded_filter(name) for name in _TEXT_FILTERS}
    environment.filters |= {"tojson": tojson, "join": join}
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=SafeDict(),
        namespace=SafeNamespace,
    )
    template = environment.from_string(text)
    template.globals = dict(template.globals)  # every rendering copies the globals, and a `ChainMap` is slow to copy
    return template


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    continue_final_message: bool | str = False,
    keeps_null_content: bool = False,
    **variables: Any,
) -> str:
    """Return the conversation as text. Null fields are omitted, except a null content with `keeps_null_content`. With
    `continue_final_message`, the text ends where the last message's content ends, or the field with the given name.

    Raises `ValueError` if the text does not contain that end; the template may raise anything.
    """
    compiled = compile_template(template)
    # OpenAI's clients send `"content": null`, and many templates would write it as "None".
    chat = [
        _with_reasoning(
            _plain(
                {
                    key: value
                    for key, value in message.items()
                    if value is not None or (key == "content" and keeps_null_content)
                }
            ),
            template,
        )
        for message in messages
    ]
    variables = _plain(variables)
    if "+ functions" in template and "+ datetime" in template:  # Firefunction's: the tools as text, and the date
        functions = [tool.get("function") for tool in variables.get("tools") or ()]
        # Not the time: it would make the beginning of each prompt another one.
        variables = {"functions": json.dumps(functions, indent=4), "datetime": str(date.today()), **variables}
    if not continue_final_message:
        return compiled.render(messages=chat, **variables)
    field = continue_final_message if isinstance(continue_final_message, str) else "content"
    ending = _mark_end(template, chat[-1], field)
    text = compiled.render(messages=chat, **variables)
    mark = _END_MARK.strip()
    if ending.strip() not in text or mark not in text:
        raise ValueError(
            "the chat template leaves out the end of the final message, so this message cannot be continued."
        )
    end = text.rindex(mark)
    # If the template has stripped the message, the mark's trailing blank is gone too.
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()


class EndlessTemplateError(RequestError):
    """The chat template ran more lines than a small conversation can need."""


@contextmanager
def limited_lines() -> Iterator[None]:
    """Inside this context, raise `EndlessTemplateError` in a template that runs too many lines."""
    num_lines, before = 0, sys.gettrace()  # `before`: the tracer of a debugger or a coverage tool

    def count(frame: FrameType, event: str, argument: Any, earlier: Any = before) -> Any:
        nonlocal num_lines
        if earlier is not None:
            earlier = earlier(frame, event, argument)
        if frame.f_code.co_filename != "<template>":
            return earlier
        num_lines += 1
        if num_lines > _MAX_TRIAL_LINES:
            raise EndlessTemplateError(
                f"the chat template runs more than {_MAX_TRIAL_LINES} lines for a small conversation."
            )
        return count if before is None else partial(count, earlier=earlier)

    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


def text_after_answer(template: str) -> str:
    """Return the text that the template writes after an answer, without blanks around it; "" if the template fails."""
    question, answer = {"role": "user", "content": "Qz7question"}, {"role": "assistant", "content": "Az7answer"}
    try:
        with limited_lines():
            text = render_template(template, [question, answer], add_generation_prompt=False, tools=None)
    except Exception:  # the template is the model's program
        return ""
    return text.rpartition(answer["content"])[2].strip()


def _mark_end(template: str, message: dict[str, Any], field: str) -> str:
    """Append the end mark, in place, to the text of `message` that is continued, and return the text without the mark.
    Raises `ValueError` if there is no such text or the template does not read it."""
    content = message.get(field)
    if content is None:
        raise ValueError(f'the final message has no "{field}" to continue.')
    # Reasoning is passed under several names: all get the mark, because the template may read any of them.
    fields = [name for name in REASONING if message.get(name) == content] if field in REASONING else [field]
    if not any(name in template for name in fields):
        raise ValueError(f'the chat template does not read "{field}", so this field cannot be continued.')
    if not isinstance(content, list | tuple):
        message.update((name, content + _END_MARK) for name in fields)
        return str(content)
    for part in reversed(content):
        if "text" in part:
            text = str(part["text"])
            part["text"] += _END_MARK
            return text
    raise ValueError("the final message has no text to continue.")


@lru_cache(64)
def _reads_reasoning(template: str) -> bool:
    return re.search(r"\breasoning\b", template) is not None


def _with_reasoning(message: dict[str, Any], template: str) -> dict[str, Any]:
    """Return a message with its reasoning under each name that a template may read: those of transformers, and
    `reasoning` if the template has the word."""
    for name in REASONING:
        if (reasoning := message.get(name)) is not None:
            filled = {"thinking": reasoning, **message, "reasoning_content": reasoning}
            if _reads_reasoning(template):
                filled.setdefault("reasoning", reasoning)
            return filled
    return message


def _plain(value: Any) -> Any:
    """Return a copy of JSON types only: other objects have methods that a template must not reach."""
    if type(value) in _PLAIN:
        return value
    if type(value) is dict:
        return {
            key if type(key) in _PLAIN else _plain(key): item if type(item) in _PLAIN else _plain(item)
            for key, item in value.items()
        }
    for kind in (str, int, float):
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)  # not a subclass's method, such as an enum's
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    numpy = sys.modules.get("numpy")  # without importing numpy
    if numpy is not None and isinstance(value, numpy.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # pydantic's models
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"
