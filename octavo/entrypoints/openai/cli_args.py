"""The server's flags under the names of vLLM's module, for programs that serve."""

from __future__ import annotations

import argparse

from octavo.entrypoints.cli.serve import add_flags, both_args
from octavo.flags import FlagParser


def make_arg_parser(parser: FlagParser) -> FlagParser:
    """Give a `FlexibleArgumentParser` every flag of engine and server, and `--config`."""
    return add_flags(parser)


def validate_parsed_serve_args(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for what the server cannot honour. What the engine cannot is found when it is made."""
    _, server_args = both_args(args)
    server_args.check()
