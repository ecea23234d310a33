"""`octavo serve [MODEL] --flags`: flags and a YAML file become `AsyncEngineArgs` and `ServerArgs`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from octavo.config import AsyncEngineArgs
from octavo.entrypoints.cli.config_file import config_flags
from octavo.entrypoints.cli.errors import run_command
from octavo.entrypoints.openai.server_args import ServerArgs
from octavo.errors import ConfigError, OctavoError
from octavo.flags import FlagParser
from octavo.logs import JSON, configure_logging


def make_parser(prog: str) -> FlagParser:
    """Every flag of the engine and of the server."""
    parser = FlagParser(prog=prog, usage="%(prog)s [MODEL] [--flags]", description="Serve a model over the OpenAI API.")
    parser.add_argument("model_positional", metavar="MODEL", nargs="?", help="The same as --model.")
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags; those of the command line win.")
    AsyncEngineArgs.add_cli_args(parser)
    ServerArgs.add_cli_args(parser)
    return parser


def parse_args(argv: Sequence[str], prog: str) -> tuple[AsyncEngineArgs, ServerArgs]:
    """Raises `ConfigError` for a bad file; an unknown flag or a wrong type ends the process with exit code 2."""
    parser = make_parser(prog)
    args = parser.parse_args(argv)
    if args.config is not None:
        given = [*argv, *(["--model"] if args.model_positional is not None else [])]
        args = parser.parse_args([*argv, *config_flags(args.config, given)])
    if args.model_positional is not None:
        if args.model and args.model != args.model_positional:
            raise ConfigError(f"two models are given: {args.model_positional} and --model {args.model}.")
        args.model = args.model_positional
    return AsyncEngineArgs.from_cli_args(args), ServerArgs.from_cli_args(args)


def main(argv: Sequence[str] | None = None, *, prog: str = "octavo serve") -> int:
    """Serve until a signal says to stop; returns the exit code."""

    def serve() -> None:
        engine_args, server_args = parse_args(sys.argv[1:] if argv is None else argv, prog)
        from octavo.entrypoints.openai.server import run_server

        try:
            run_server(engine_args, server_args)
        except OctavoError as error:
            if server_args.log_format != JSON:
                raise
            configure_logging("server", log_format=JSON)  # unless that has been done
            logging.getLogger("octavo.server").critical("%s", error)
            sys.exit(1)

    return run_command(serve)
