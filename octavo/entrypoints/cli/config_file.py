"""`--config FILE.yaml`: a file of flags, turned into the words of a command line so that argparse checks both alike."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.config import AsyncEngineArgs
from octavo.entrypoints.openai.server_args import ServerArgs
from octavo.errors import ConfigError
from octavo.flags import with_hyphens


def config_flags(path: str, argv: Sequence[str]) -> list[str]:
    """Words for the keys of the file that `argv` does not set. Keys are flags' names with - or _, without dashes."""
    given = {with_hyphens(word).partition("=")[0] for word in argv if word.startswith("--")}
    hints = {name: hint for cls in (AsyncEngineArgs, ServerArgs) for name, hint in typing.get_type_hints(cls).items()}
    words: list[str] = []
    for key, value in _read(path).items():
        name = str(key).replace("-", "_")
        if name not in hints:
            raise ConfigError(f"--config {path} has the unknown key {key!r}; keys are the flags' names.")
        flag = "--" + name.replace("_", "-")
        if value is None or given & {flag, flag.replace("--", "--no-", 1)}:
            continue
        words += _words(flag, value, hints[name], f"--config {path}: {key}")
    return words


def _read(path: str) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must map flags' names to values, got a {type(content).__name__}.")
    return content


def _words(flag: str, value: Any, hint: Any, where: str) -> list[str]:
    if hint is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{where} must be true or false, got {value!r}.")
        return [flag if value else flag.replace("--", "--no-", 1)]
    items = value if isinstance(value, list) and typing.get_origin(hint) is list else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise ConfigError(f"{where} must be a string or a number, got {item!r}.")
    return [f"{flag}={item}" for item in items]
