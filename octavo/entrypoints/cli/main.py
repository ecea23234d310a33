"""`octavo COMMAND …`. Knows the commands' names and imports only the one that is asked for, so that `octavo --help` is
quick."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence

from octavo.processes import import_path
from octavo.version import __version__

# By name: a module, its function (argv, prog=...) -> exit code, and one line of help.
Commands = Mapping[str, tuple[str, str, str]]
COMMANDS: Commands = {
    "serve": ("octavo.entrypoints.cli.serve", "main", "serve a model over the OpenAI API"),
    "chat": ("octavo.entrypoints.cli.terminal", "chat", "talk to a running server"),
    "complete": ("octavo.entrypoints.cli.terminal", "complete", "continue a text with a running server"),
    "run-batch": ("octavo.entrypoints.cli.run_batch", "main", "answer the requests of a file into a file"),
    "models": ("octavo.entrypoints.cli.models", "main", "print which architectures run"),
    "bench": ("octavo.entrypoints.cli.main", "bench", "measure the engine"),
}
BENCHMARKS: Commands = {
    "throughput": ("octavo.bench.offline", "throughput", "tokens per second of many requests, offline"),
    "latency": ("octavo.bench.offline", "latency", "how long one batch of requests takes, offline"),
    "serve": ("octavo.bench.serve", "main", "what clients of a running server see"),
    "startup": ("octavo.bench.startup", "main", "how long a server takes to be ready, and what it holds then"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = argparse.ArgumentParser(prog="octavo", description="Serve large language models.")
    parser.add_argument("--version", action="version", version=__version__)
    return _run_named(COMMANDS, sys.argv[1:] if argv is None else argv, parser)


def bench(argv: Sequence[str], *, prog: str) -> int:
    """Run a measurement and return its exit code."""
    return _run_named(BENCHMARKS, argv, argparse.ArgumentParser(prog=prog, description="Measure the engine."))


def _run_named(commands: Commands, argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command that `argv` begins with. For anything else `parser` ends the process: --help, its own flags, and
    unknown names."""
    if argv and argv[0] in commands:
        module, function, _ = commands[argv[0]]
        code: int = getattr(importlib.import_module(module), function)(list(argv[1:]), prog=f"{parser.prog} {argv[0]}")
        return code
    names = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, _, help) in commands.items():
        names.add_parser(name, help=help)
    parser.parse_args(argv)
    return 2


if __name__ == "__main__":
    sys.path[:] = import_path()
    sys.exit(main())
