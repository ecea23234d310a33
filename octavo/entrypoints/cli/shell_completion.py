"""`octavo completion SHELL`: prints a script with which a shell completes commands, flags and their choices.

The `shtab` package writes it from the commands' own parsers.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from octavo.entrypoints.cli import command
from octavo.flags import FlagParser

SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "MODEL")  # metavars of values that may be files


def make_parser(prog: str) -> FlagParser:
    parser = FlagParser(
        prog=prog,
        description="Print a script that completes this command. bash: source <(octavo completion bash). zsh: octavo "
        "completion zsh > a folder of $fpath/_octavo. fish: octavo completion fish | source.",
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


@command(make_parser, "octavo completion")
def main(args: argparse.Namespace) -> None:
    import shtab

    from octavo.entrypoints.cli import main

    parser = main.make_parser()
    for action in _actions(parser):
        if action.type is Path or action.metavar in _FILES or action.dest == "model":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of its subparsers."""
    for action in parser._actions:  # like shtab: argparse has no public way
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
