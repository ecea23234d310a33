"""`octavo complete`: texts that a running server continues, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.entrypoints.cli.client import ApiClient, make_parser
from octavo.entrypoints.cli.errors import run_command


def main(argv: Sequence[str] | None = None, *, prog: str = "octavo complete") -> int:
    """Continue each line typed until end of file, or the one text of --quick; returns the exit code."""
    parser = make_parser(prog, "Continue texts with a running server. Ctrl-D ends.")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="Continue one text and end.")
    args = parser.parse_args(argv)

    def complete() -> None:
        client = ApiClient(args)
        if args.quick is not None:
            _continue(client, args.quick)
            return
        while True:
            try:
                text = input("> ")
            except EOFError:
                print()
                return
            if text:
                _continue(client, text)

    return run_command(complete)


def _continue(client: ApiClient, text: str) -> None:
    for choice in client.stream("/completions", prompt=text):
        print(choice["text"], end="", flush=True)
    print()
