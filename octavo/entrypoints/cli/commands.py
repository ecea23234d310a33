"""Choosing a command by its name. Only the module of the chosen one is imported, so that `--help` is quick."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence

# By name: a module that has main(argv, prog=...) -> exit code, and one line of help.
Commands = Mapping[str, tuple[str, str]]


def run_named(commands: Commands, argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command that `argv` begins with and return its exit code. For anything else `parser` ends the process:
    --help, its own flags, and unknown names."""
    if argv and argv[0] in commands:
        module = importlib.import_module(commands[argv[0]][0])
        code: int = module.main(list(argv[1:]), prog=f"{parser.prog} {argv[0]}")
        return code
    names = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, help) in commands.items():
        names.add_parser(name, help=help)
    parser.parse_args(argv)
    return 2
