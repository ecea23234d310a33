"""`octavo serve [MODEL] --flags`: flags and a YAML file (`--config`) become `AsyncEngineArgs` and `ServerArgs`.

The file becomes words of a command line, so that argparse checks both alike.
"""

import argparse
import json
import logging
import sys
import typing
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from octavo.config import AsyncEngineArgs
from octavo.entrypoints.cli import check_lists_took_no_model, run_command
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.errors import ConfigError, OctavoError
from octavo.flags import FlagParser, read_yaml, with_hyphens
from octavo.logs import JSON, configure_logging
from octavo.unknown_flags import advice_on

_COMMON_FLAGS = {
    "model": ("--served-model-name", "--max-model-len", "--dtype", "--quantization", "--chat-template", "--device"),
    "server": ("--host", "--port", "--api-key", "--log-format", "--config"),
    "load": ("--max-num-seqs", "--max-queue-len", "--max-request-time"),
    "memory and speed": (
        "--cpu-memory-utilization", "--gpu-memory-utilization", "--tensor-parallel-size", "--speculative-config",
    ),
    "adapters": ("--enable-lora", "--lora-modules"),
}  # fmt: skip
# Fields with lists, none of whose values is a path of a model.
_LISTS_OF_NAMES = (
    "served_model_name", "api_key", "lora_modules", "lora_target_modules", "allowed_media_domains", "kv_cache_peers",
    "middleware", "allowed_origins", "allowed_methods", "allowed_headers",
)  # fmt: skip


def make_parser(prog: str) -> FlagParser:
    """Return a parser of every flag of the engine and of the server."""
    about = "Serve MODEL (a Hugging Face id, a folder or a .gguf file; by default a small one) over the OpenAI API."
    parser = add_flags(FlagParser(prog=prog, usage="%(prog)s [MODEL] [--flags]", description=about))
    parser.common_flags = _COMMON_FLAGS
    parser.for_more_words = "A server has one model; `octavo gateway MODEL MODEL` serves several."
    return parser


def add_flags(parser: FlagParser) -> FlagParser:
    """Add every flag of the engine and of the server to a parser, and return it."""
    parser.add_argument("model_tag", metavar="MODEL", nargs="?", help="The same as --model.")
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags; those of the command line win.")
    parser.more_words = _words_of_config
    AsyncEngineArgs.add_cli_args(parser)
    return ServerArgs.add_cli_args(parser)


def parse_args(argv: Sequence[str], prog: str) -> tuple[AsyncEngineArgs, ServerArgs]:
    """Parse a command line. Raises `ConfigError` for a bad file; an unknown flag or a wrong type ends the process with
    exit code 2."""
    return both_args(make_parser(prog).parse_args(argv))


def both_args(args: argparse.Namespace) -> tuple[AsyncEngineArgs, ServerArgs]:
    """Return the arguments of engine and server from a parser's result. Raises `ConfigError`."""
    engine_args, server_args = AsyncEngineArgs.from_cli_args(args), ServerArgs.from_cli_args(args)
    named = getattr(args, "model_tag", None)
    if named is None:
        if not engine_args.model:
            check_lists_took_no_model(args, _LISTS_OF_NAMES)
        return engine_args, server_args
    if engine_args.model and engine_args.model != named:
        raise ConfigError(f"two models are given: {named} and --model {engine_args.model}.")
    return replace(engine_args, model=named), server_args


def main(argv: Sequence[str] | None = None, *, prog: str = "octavo serve") -> int:
    """Serve until a signal stops the server. Return the exit code."""

    def serve() -> None:
        engine_args, server_args = parse_args(sys.argv[1:] if argv is None else argv, prog)
        from octavo.entrypoints.http.server import run_server

        try:
            run_server(engine_args, server_args)
        except OctavoError as error:
            if server_args.log_format != JSON:
                raise
            configure_logging("server", log_format=JSON)  # if it has not been done
            logging.getLogger("octavo.server").critical("%s", error)
            sys.exit(1)

    return run_command(serve)


def _words_of_config(args: argparse.Namespace, argv: Sequence[str]) -> list[str]:
    if args.config is None:
        return []
    return _config_flags(args.config, [*argv, *(["--model"] if args.model_tag is not None else [])])


def _config_flags(path: str, argv: Sequence[str]) -> list[str]:
    """Return words for the file's keys that `argv` does not set. Keys are names of flags, with - or _, without leading
    dashes."""
    given = {with_hyphens(word).partition("=")[0] for word in argv if word.startswith("--")}
    hints = {name: hint for cls in (AsyncEngineArgs, ServerArgs) for name, hint in typing.get_type_hints(cls).items()}
    words: list[str] = []
    for key, value in _read_config(path).items():
        name = str(key).replace("-", "_")
        if name not in hints:
            advice = " ".join(["keys are the flags' names.", *advice_on([name], hints)])
            raise ConfigError(f"--config {path} has the unknown key {key!r}; {advice}")
        flag = "--" + name.replace("_", "-")
        if value is None or given & {flag, flag.replace("--", "--no-", 1)}:
            continue
        words += _config_words(flag, value, hints[name], f"--config {path}: {key}")
    return words


def _read_config(path: str) -> dict[Any, Any]:
    content = read_yaml(path, f"--config {path}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must map flags' names to values, got a {type(content).__name__}.")
    return content


def _config_words(flag: str, value: Any, hint: Any, where: str) -> list[str]:
    if hint is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{where} must be true or false, got {value!r}.")
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, dict) and any(typing.get_origin(kind) is dict for kind in typing.get_args(hint)):
        return [f"{flag}={json.dumps(value)}"]
    items = value if isinstance(value, list) and typing.get_origin(hint) is list else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise ConfigError(f"{where} must be a string or a number, got {item!r}.")
    return [f"{flag}={item}" for item in items]
