"""`octavo COMMAND …`. It knows the names of all commands and imports only the named one, so that `octavo --help` is
quick."""

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from octavo.errors import similar
from octavo.processes import import_path
from octavo.version import __version__


class Command(NamedTuple):
    module: str
    run: str  # name of its function (argv, prog=...) -> exit code
    help: str  # one line
    parser: str = "make_parser"  # name of its function (prog) -> argparse's parser


Commands = Mapping[str, Command]
COMMANDS: Commands = {
    "serve": Command("octavo.entrypoints.cli.serve", "main", "serve a model over the OpenAI API"),
    "gateway": Command("octavo.entrypoints.cli.gateway", "main", "serve many models behind one address"),
    "run": Command(
        "octavo.entrypoints.cli.run", "run", "talk to a model, fetched and served if need be", "make_run_parser"
    ),
    "pull": Command("octavo.entrypoints.cli.local", "pull", "fetch a model", "make_pull_parser"),
    "list": Command("octavo.entrypoints.cli.local", "list_models", "list the models that are here", "make_list_parser"),
    "show": Command("octavo.entrypoints.cli.local", "show", "say what a model is and can do", "make_show_parser"),
    "rm": Command("octavo.entrypoints.cli.local", "rm", "delete a model", "make_rm_parser"),
    "ps": Command("octavo.entrypoints.cli.run", "ps", "list the models that a server has loaded", "make_ps_parser"),
    "stop": Command("octavo.entrypoints.cli.run", "stop", "have a gateway unload a model", "make_stop_parser"),
    "chat": Command("octavo.entrypoints.cli.terminal", "chat", "talk to a running server", "make_chat_parser"),
    "complete": Command(
        "octavo.entrypoints.cli.terminal", "complete", "continue a text with a running server", "make_complete_parser"
    ),
    "run-batch": Command("octavo.entrypoints.cli.run_batch", "main", "answer the requests of a file into a file"),
    "models": Command("octavo.entrypoints.cli.models", "main", "print which architectures run"),
    "plan": Command("octavo.entrypoints.cli.plan", "main", "say what fits where and how fast"),
    "kernels": Command("octavo.entrypoints.cli.kernels", "main", "compile a model's GPU kernels into an archive"),
    "doctor": Command("octavo.entrypoints.cli.doctor", "main", "say what this machine can do, and what would be slow"),
    "collect-env": Command("octavo.entrypoints.cli.collect_env", "main", "print the facts for a report of a problem"),
    "completion": Command(
        "octavo.entrypoints.cli.shell_completion", "main", "print a shell's completion of this command"
    ),
    "bench": Command("octavo.entrypoints.cli.main", "bench", "measure the engine", "make_bench_parser"),
}
TASKS: Mapping[str, tuple[Sequence[str], str]] = {  # by task: its commands, and an example
    "serve": (("serve", "gateway", "kernels"), "octavo serve Qwen/Qwen3-0.6B --max-model-len 8192"),
    "talk to a model": (("run", "chat", "complete", "run-batch"), "octavo run Qwen/Qwen3-0.6B"),
    "keep models": (("pull", "list", "show", "rm", "ps", "stop"), "octavo pull Qwen/Qwen3-0.6B"),
    "find out what runs": (("models", "plan", "doctor", "collect-env"), "octavo plan Qwen/Qwen3-0.6B --format int4"),
    "measure": (("bench",), "octavo bench serve --num-prompts 100 --request-rate 2"),
    "set up a shell": (("completion",), "octavo completion bash"),
}
BENCHMARKS: Commands = {
    "throughput": Command(
        "octavo.bench.offline", "throughput", "tokens per second of many requests, offline", "make_throughput_parser"
    ),
    "latency": Command(
        "octavo.bench.offline", "latency", "how long one batch of requests takes, offline", "make_latency_parser"
    ),
    "serve": Command("octavo.bench.serve", "main", "latency and throughput of a running server"),
    "startup": Command("octavo.bench.startup", "main", "time of a server's start, and its memory"),
}


def make_parser(prog: str = "octavo") -> argparse.ArgumentParser:
    """Return a parser of all commands with all their flags, for readers of the whole tree. Imports all commands."""
    return _with_commands(_plain_parser(prog), COMMANDS)


def make_bench_parser(prog: str) -> argparse.ArgumentParser:
    """Return a parser of all benchmarks of `octavo bench`, likewise."""
    return _with_commands(_bench_parser(prog), BENCHMARKS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        return _run_named(COMMANDS, sys.argv[1:] if argv is None else argv, _plain_parser("octavo"))
    except KeyboardInterrupt:  # while a command is imported; a running command handles it itself
        return 130


def bench(argv: Sequence[str], *, prog: str) -> int:
    return _run_named(BENCHMARKS, argv, _bench_parser(prog))


def _plain_parser(prog: str) -> argparse.ArgumentParser:
    tasks = []
    for task, (names, example) in TASKS.items():
        lines = (f"  {name:11}  {COMMANDS[name].help}" for name in names)
        tasks.append("\n".join([f"{task}:", *lines, f"  > {example}"]))
    about = "\n\n".join(["Serve large language models.", *tasks, f"`{prog} COMMAND --help` tells more."])
    parser = argparse.ArgumentParser(
        prog=prog, usage="%(prog)s COMMAND ...", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    return parser


def _bench_parser(prog: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=prog, description="Measure the engine.")


def _run_named(commands: Commands, argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command that `argv` begins with. Otherwise `parser` ends the process: for --help, its own flags, and
    unknown names."""
    if argv and argv[0] in commands:
        command = commands[argv[0]]
        run = getattr(importlib.import_module(command.module), command.run)
        code: int = run(list(argv[1:]), prog=f"{parser.prog} {argv[0]}")
        return code
    if argv and not argv[0].startswith("-"):
        meant = similar(argv[0], commands)
        hint = f"did you mean {parser.prog} {meant}?" if meant else f"{parser.prog} --help lists them"
        parser.error(f"there is no command {argv[0]!r}; {hint}")
    listed = commands is COMMANDS  # the description lists them by task
    names = parser.add_subparsers(metavar="COMMAND", required=True, help=argparse.SUPPRESS if listed else None)
    for name, command in commands.items():
        names.add_parser(name, help=command.help)
    if not argv:
        parser.print_help(sys.stderr)
    else:
        parser.parse_args(argv)
    return 2


def _with_commands(parser: argparse.ArgumentParser, commands: Commands) -> argparse.ArgumentParser:
    """Return `parser` with the parsers of all commands as subparsers."""
    names = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=argparse.ArgumentParser)
    for name, command in commands.items():
        make = getattr(importlib.import_module(command.module), command.parser)
        names.add_parser(name, help=command.help, parents=[make(f"{parser.prog} {name}")], add_help=False)
    return parser


if __name__ == "__main__":
    sys.path[:] = import_path()
    sys.exit(main())
