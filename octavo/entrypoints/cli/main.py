"""`octavo COMMAND …`. Knows the commands' names and nothing else, so that `octavo --help` is quick."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from octavo.version import __version__

# Each module has main(argv, prog=...) -> exit code.
COMMANDS = {
    "serve": ("octavo.entrypoints.cli.serve", "serve a model over the OpenAI API"),
    "chat": ("octavo.entrypoints.cli.chat", "talk to a running server"),
    "complete": ("octavo.entrypoints.cli.complete", "continue a text with a running server"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in COMMANDS:
        module = importlib.import_module(COMMANDS[argv[0]][0])
        code: int = module.main(argv[1:], prog=f"octavo {argv[0]}")
        return code
    parser = argparse.ArgumentParser(prog="octavo", description="Serve large language models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, help) in COMMANDS.items():
        commands.add_parser(name, help=help)
    parser.parse_args(argv)  # ends the process: with the help, the version or an error
    return 2


if __name__ == "__main__":
    sys.exit(main())
