"""Dataclasses whose fields are command-line flags: one declaration gives flag, keyword, help and checks."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, TypeVar

from octavo.errors import ConfigError
from octavo.unknown_flags import SYNONYMS, advice_on, known_arguments


def flag(
    default: Any,
    help: str,
    *,
    positive: bool = False,
    built: bool = True,
    parse: Callable[[str], Any] | None = None,
    may_be_function: bool = False,
    short: str | None = None,
    is_flag: bool = True,
    needs: str | None = None,
) -> Any:
    """Return a dataclass field with the help of its flag. `positive` numbers are greater than zero. A list is given as
    `--f a b` or `--f a --f b`; an object as JSON, or key by key as `--f.key value`. `parse` reads a value whose text
    differs from its type's, and raises `ValueError`. With `may_be_function` Python callers may pass a function. `short`
    is another name, such as -tp. With `is_flag` false the field is only a keyword. `needs` names the field without
    which the flag would have no effect.

    Flags that are not `built` accept only their default, so that launch scripts that set the default work; any other
    value is refused.
    """
    if default not in (None, "", []) and "default" not in help:
        help = f"{help} Default: {default}."
    metadata = {"help": help, "positive": positive, "built": built, "parse": parse,
                "may_be_function": may_be_function, "short": short, "is_flag": is_flag, "needs": needs}  # fmt: skip
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def positive_int(text: str) -> int:
    """Parse a whole number of 1 or more, for argparse."""
    with contextlib.suppress(ValueError):
        if (number := int(text)) > 0:
            return number
    raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text!r}")


Parser = TypeVar("Parser", bound=argparse.ArgumentParser)
_MANY_FLAGS = 16  # more of them make a usage that nobody reads


class FlagParser(argparse.ArgumentParser):
    """Accepts flags with underscores and with hyphens, as vLLM does, but no abbreviations. For unknown flags it says
    what to do instead. `--help=WORD` shows the flags with the word in their names, `--help=all` all of them."""

    # Flags that --help shows: their names by the title of their group. Empty: all flags.
    common_flags: Mapping[str, Sequence[str]] = types.MappingProxyType({})
    # What to do instead of giving more words than the parser takes.
    for_more_words = ""
    # Returns words to append to the command line, from the parsed arguments and the words so far.
    more_words: Callable[[argparse.Namespace, Sequence[str]], Sequence[str]] | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, with Octavo's forms of flags. `parse_args` uses it."""
        words = [self._with_own_name(with_hyphens(word)) for word in (sys.argv[1:] if args is None else args)]
        words = _with_objects(words)
        for word in words:
            if word.startswith("--help="):
                self._show(word.removeprefix("--help=").replace("_", "-"))
        # argparse would take an unknown flag with a space in its value (such as JSON) for a positional word, the model.
        unknown = [word for word in words if re.match(r"--\S+=.* ", word) and not self._knows(word)]
        namespace, others = super().parse_known_args([word for word in words if word not in unknown], namespace)
        return namespace, unknown + others

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse. An unknown word ends the process with exit code 2."""
        words = sys.argv[1:] if args is None else list(args)
        before = copy.deepcopy(namespace)
        found, unknown = self.parse_known_args(words, namespace)
        if not unknown and self.more_words is not None and (more := self.more_words(found, words)):
            found, unknown = self.parse_known_args([*words, *more], before)
        if unknown:
            names = [match[1] for word in unknown if (match := re.match(r"--?([a-z][^=.]*)", word))]
            known = [name.removeprefix("--") for name in self._option_string_actions if name.startswith("--")]
            advice = advice_on(names, known)
            if not names and self.for_more_words:
                advice = [self.for_more_words]
            elif names and not advice:
                advice = [f"{self.prog} --help=all lists the flags."]
            self.error("\n  ".join([f"unrecognized arguments: {' '.join(unknown)}", *advice]))
        return found

    def format_usage(self) -> str:
        """Return the usage, which errors begin with. A parser of many flags lists only the required ones."""
        self._shorten_usage()
        return super().format_usage()

    def _shorten_usage(self) -> None:
        if self.usage is not None or len(self._actions) <= _MANY_FLAGS:
            return
        formatter, words = self._get_formatter(), [self.prog]
        for action in self._actions:  # argparse has no other way to ask
            if not action.option_strings:
                metavar = formatter._get_default_metavar_for_positional(action)
                words.append(formatter._format_args(action, metavar))
            elif action.required:
                metavar = formatter._get_default_metavar_for_optional(action)
                words.append(f"{max(action.option_strings, key=len)} {formatter._format_args(action, metavar)}")
        self.usage = " ".join([*words, "[--flags]"]).replace("%", "%%")

    def format_help(self) -> str:
        self._shorten_usage()
        if not self.common_flags:
            return super().format_help()
        groups = [(t, [self._option_string_actions[n] for n in names]) for t, names in self.common_flags.items()]
        num_others = sum(a.dest != "help" for a in self._actions if a.option_strings) - sum(
            len(actions) for _, actions in groups
        )
        return (
            f"{self.format_usage()}\n{self.description}\n\n{self._help_of(groups)}\n"
            f"--help=all shows {num_others} flags more, --help=WORD those with the word in their names.\n"
        )

    def _help_of(self, groups: Collection[tuple[str | None, Sequence[argparse.Action]]]) -> str:
        formatter = self._get_formatter()
        for title, actions in groups:
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()

    def _show(self, wanted: str) -> NoReturn:
        """Print the help of flags whose names contain `wanted`, or of `all`, and end the process."""
        found = [
            (g.title, [a for a in g._group_actions if wanted == "all" or any(wanted in n for n in a.option_strings)])
            for g in self._action_groups
        ]
        if not any(actions for _, actions in found):
            self.error(f"no flag has {wanted} in its name; --help=all shows all")
        print(self._help_of(found), end="")
        self.exit()

    def _with_own_name(self, word: str) -> str:
        """Return a word of a command line, with the parser's own name in place of another name of vLLM's."""
        name = re.split("[=.]", word, maxsplit=1)[0]
        own = SYNONYMS.get(name)
        if own is None or self._knows(name) or not self._knows(own.partition(".")[0]):
            return word
        return own + word.removeprefix(name)

    def _knows(self, word: str) -> bool:
        return word.partition("=")[0] in self._option_string_actions


def with_hyphens(word: str) -> str:
    """Return a word of a command line, with hyphens in a flag's name."""
    name, equals, value = word.partition("=")
    flag_name, dot, key = name.partition(".")
    return flag_name.replace("_", "-") + dot + key + equals + value if word.startswith("--") else word


def _with_objects(words: Sequence[str]) -> list[str]:
    """Return words with `--f={"key": value}` for each `--f.key value`. A value that is not JSON is a text."""
    found: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or "." not in name:
            found.append(word)
            continue
        name, _, key = name.partition(".")
        text = value if equals else next(left, "")
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = text
        found.append(f"{name}={json.dumps({key: parsed})}")
    return found


class _Known(type):
    """Metaclass of classes whose constructor says what to do about an unknown keyword."""

    __dataclass_fields__: dict[str, dataclasses.Field[Any]]

    if not typing.TYPE_CHECKING:  # type checkers use the constructor's signature

        def __call__(cls, *args: Any, **given: Any) -> Any:
            return super().__call__(*args, **known_arguments(cls.__name__, given, cls.__dataclass_fields__))


class Flags(metaclass=_Known):
    """Base of dataclasses whose fields are flags. Field `max_model_len` is flag `--max-model-len`."""

    @classmethod
    def add_cli_args(cls, parser: Parser, *, only: Collection[str] | None = None) -> Parser:
        """Add one flag per field, or for the fields named in `only`, with `--no-…` forms for booleans, and return the
        parser."""
        title = cls.__name__.removeprefix("Async").removesuffix("Args").lower()
        built = parser.add_argument_group(title)
        later = parser.add_argument_group(f"{title}, not built yet (only the default is accepted)")
        for f in dataclasses.fields(cls):  # type: ignore[arg-type]
            if only is not None and f.name not in only:
                continue
            if f.metadata["is_flag"]:
                _add_flag(built if f.metadata["built"] else later, f, _value_type(cls, f.name))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace, **fixed: Any) -> Self:
        """Return an object of `cls` from parsed arguments and the `fixed` fields."""
        fields = [f for f in dataclasses.fields(cls) if f.metadata["is_flag"]]  # type: ignore[arg-type]
        names = [f.name for f in fields if hasattr(args, f.name)]
        return cls(**{name: getattr(args, name) for name in names}, **fixed)

    def check_flags(self) -> None:
        """Raise `ConfigError` for a value of a wrong type, outside its choices, not positive, not built yet, or without
        the flag that it needs."""
        defaults = {f.name: _default(f) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value, name = getattr(self, f.name), "--" + f.name.replace("_", "-")
            default, needs = defaults[f.name], f.metadata["needs"]
            if not f.metadata["built"] and value != default:
                raise ConfigError(f"{name} {value} is not built yet; leave it out.")
            if value is None and default is None:
                continue
            kind = _value_type(type(self), f.name)
            if callable(value) and f.metadata["may_be_function"]:
                continue
            if typing.get_origin(kind) is Literal:
                if value not in typing.get_args(kind):
                    choices = ", ".join(str(choice) for choice in typing.get_args(kind))
                    raise ConfigError(f"{name} must be one of {choices}, got {value!r}.")
            elif not _is_a(value, kind):
                raise ConfigError(f"{name} must be {_TYPE_NAMES[typing.get_origin(kind) or kind]}, got {value!r}.")
            if f.metadata["positive"] and value <= 0:
                raise ConfigError(f"{name} must be greater than 0, got {value}.")
            if needs is not None and value != default and getattr(self, needs) == defaults[needs]:
                raise ConfigError(f"{name} needs --{needs.replace('_', '-')}.")


_TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "a list of strings",
               dict: "an object"}  # fmt: skip


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _value_type(cls: type, name: str) -> Any:
    """Return the type of a field, without `None` for an optional field."""
    hint = _hints(cls)[name]
    if isinstance(hint, types.UnionType):
        return next(t for t in typing.get_args(hint) if t is not type(None))
    return hint


def _is_a(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if typing.get_origin(kind) is dict:
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind or (kind is str and isinstance(value, str))


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def _add_flag(group: argparse._ArgumentGroup, f: dataclasses.Field[Any], kind: Any) -> None:
    names = ["--" + f.name.replace("_", "-"), *([f.metadata["short"]] if f.metadata["short"] else [])]
    options: dict[str, Any] = {"default": _default(f), "dest": f.name, "help": f.metadata["help"].replace("%", "%%")}
    if kind is bool:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **options)
    elif typing.get_origin(kind) is list:
        group.add_argument(*names, action="extend", nargs="+", **options)
    elif typing.get_origin(kind) is Literal:
        group.add_argument(*names, choices=typing.get_args(kind), **options)
    elif typing.get_origin(kind) is dict:
        group.add_argument(*names, action=_AddKeys, type=_object, metavar="JSON", **options)
    elif f.metadata["parse"] is not None:
        group.add_argument(*names, type=_for_argparse(f.metadata["parse"]), metavar=kind.__name__.upper(), **options)
    else:
        group.add_argument(*names, type=kind, metavar=kind.__name__.upper(), **options)


def _for_argparse(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return `parse` with errors that argparse shows; of a `ValueError` it would show the name of `parse` alone."""

    def parse_or_refuse(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_or_refuse


class _AddKeys(argparse.Action):
    """Merges the keys of an object that is given several times."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), **values})


def _object(text: str) -> dict[str, Any]:
    """Parse a JSON object, for argparse."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is not JSON ({error}); put names and texts in double quotes and the whole in single ones: "
            """'{"key": "value"}'"""
        ) from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON {type(value).__name__} is no object: {text[:60]}")
    return value


_UNITS = {unit: 1000**i for i, unit in enumerate("kmgt", 1)} | {unit: 1024**i for i, unit in enumerate("KMGT", 1)}


def number_with_unit(text: str, others: str = "") -> int:
    """Parse a whole number, with or without a unit: 32k is 32,000, 32K is 32,768, 25.6k is 25,600. Raises `ValueError`,
    which names `others` that the caller takes too."""
    number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    with contextlib.suppress(ValueError):
        value = float(number) * unit if "." in number and text[-1:].islower() else int(number) * unit
        if value == int(value):
            return int(value)
    raise ValueError(f"must be {others}a whole number such as 32000, 32k (32,000) or 32K (32,768), got {text!r}")


def read_yaml(path: str, where: str) -> Any:
    """Return the contents of a YAML file. Raises `ConfigError`, whose message begins with `where`."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is written twice: otherwise the last value counts."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            seen = set[tuple[str, str]]()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":  # which merges several maps
                    if (key.tag, key.value) in seen:
                        raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=key.start_mark)
                    seen.add((key.tag, key.value))
            return node

    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{where} cannot be read: {why}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}.") from None
