"""`octavo COMMAND …`. Knows the commands' names and nothing else, so that `octavo --help` is quick."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from octavo.entrypoints.cli.commands import run_named
from octavo.processes import import_path
from octavo.version import __version__

COMMANDS = {
    "serve": ("octavo.entrypoints.cli.serve", "serve a model over the OpenAI API"),
    "chat": ("octavo.entrypoints.cli.chat", "talk to a running server"),
    "complete": ("octavo.entrypoints.cli.complete", "continue a text with a running server"),
    "bench": ("octavo.entrypoints.cli.bench", "measure the engine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = argparse.ArgumentParser(prog="octavo", description="Serve large language models.")
    parser.add_argument("--version", action="version", version=__version__)
    return run_named(COMMANDS, sys.argv[1:] if argv is None else argv, parser)


if __name__ == "__main__":
    sys.path[:] = import_path()
    sys.exit(main())
