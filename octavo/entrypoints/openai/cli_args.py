"""The server's flags under the names of vLLM's module, for programs that start a server."""

import argparse

from octavo.entrypoints.cli.serve import add_flags, both_args
from octavo.flags import FlagParser


def make_arg_parser(parser: FlagParser) -> FlagParser:
    """Add every flag of engine and server, and `--config`, to a `FlexibleArgumentParser`."""
    return add_flags(parser)


def validate_parsed_serve_args(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags that the server cannot honour. The engine checks its own flags when it is made."""
    _, server_args = both_args(args)
    server_args.check()
