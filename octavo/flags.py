"""Dataclasses whose fields are command-line flags: one declaration gives flag, keyword, help and checks."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import types
import typing
from dataclasses import field
from typing import Any, Literal, Self

from octavo.errors import ConfigError


def flag(default: Any, help: str, *, positive: bool = False, built: bool = True, repeat: bool = False) -> Any:
    """A field with the text of its flag. `positive` numbers are greater than zero. A list is given as `--f a b`, or,
    with `repeat`, as `--f a --f b`.

    Flags that are not `built` take only their default, which asks for nothing, so that launch scripts which spell it
    out work; any other value is refused.
    """
    if default not in (None, "", []) and "default" not in help:
        help = f"{help} Default: {default}."
    metadata = {"help": help, "positive": positive, "built": built, "repeat": repeat}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class FlagParser(argparse.ArgumentParser):
    """Takes flags with underscores as well as with hyphens, as vLLM does, but no abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What argparse's does, and `parse_args` through it."""
        return super().parse_known_args([*map(with_hyphens, sys.argv[1:] if args is None else args)], namespace)


def with_hyphens(word: str) -> str:
    """A word of a command line; a flag's name has hyphens."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


class Flags:
    """Base of such dataclasses. Field `max_model_len` is flag `--max-model-len`."""

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add one flag per field, with `--no-…` forms for booleans."""
        title = cls.__name__.removeprefix("Async").removesuffix("Args").lower()
        built = parser.add_argument_group(title)
        later = parser.add_argument_group(f"{title}, not built yet (only the default is accepted)")
        for f in dataclasses.fields(cls):  # type: ignore[arg-type]
            _add_flag(built if f.metadata["built"] else later, f, _value_type(cls, f.name))

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The fields of `cls` out of parsed arguments."""
        return cls(**{f.name: getattr(args, f.name) for f in dataclasses.fields(cls)})  # type: ignore[arg-type]

    def check_flags(self) -> None:
        """Raise `ConfigError` for a value of a wrong type, outside its choices, not positive, or not built yet."""
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value, name = getattr(self, f.name), "--" + f.name.replace("_", "-")
            default = _default(f)
            if not f.metadata["built"] and value != default:
                raise ConfigError(f"{name} {value} is not built yet; leave it out.")
            if value is None and default is None:
                continue
            kind = _value_type(type(self), f.name)
            if typing.get_origin(kind) is Literal:
                if value not in typing.get_args(kind):
                    choices = ", ".join(str(choice) for choice in typing.get_args(kind))
                    raise ConfigError(f"{name} must be one of {choices}, got {value!r}.")
            elif not _is_a(value, kind):
                raise ConfigError(f"{name} must be {_TYPE_NAMES[typing.get_origin(kind) or kind]}, got {value!r}.")
            if f.metadata["positive"] and value <= 0:
                raise ConfigError(f"{name} must be greater than 0, got {value}.")


_TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "a list of strings"}


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _value_type(cls: type, name: str) -> Any:
    """The type of a field, without the `None` of an optional one."""
    hint = _hints(cls)[name]
    if isinstance(hint, types.UnionType):
        return next(t for t in typing.get_args(hint) if t is not type(None))
    return hint


def _is_a(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind or (kind is str and isinstance(value, str))


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def _add_flag(group: argparse._ArgumentGroup, f: dataclasses.Field[Any], kind: Any) -> None:
    name = "--" + f.name.replace("_", "-")
    options: dict[str, Any] = {"default": _default(f), "dest": f.name, "help": f.metadata["help"].replace("%", "%%")}
    if kind is bool:
        group.add_argument(name, action=argparse.BooleanOptionalAction, **options)
    elif f.metadata["repeat"]:
        group.add_argument(name, action="append", **options)
    elif typing.get_origin(kind) is list:
        group.add_argument(name, action="extend", nargs="+", **options)
    elif typing.get_origin(kind) is Literal:
        group.add_argument(name, choices=typing.get_args(kind), **options)
    else:
        group.add_argument(name, type=kind, metavar=kind.__name__.upper(), **options)
