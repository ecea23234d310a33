"""`octavo complete`: texts that a running server continues, in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence

from octavo.entrypoints.cli.client import ApiClient, make_parser, print_answer, typed_lines
from octavo.entrypoints.cli.errors import run_command


def main(argv: Sequence[str] | None = None, *, prog: str = "octavo complete") -> int:
    """Continue each line typed until end of file, or the one text of --quick; returns the exit code."""
    parser = make_parser(prog, "Continue texts with a running server. Ctrl-C stops a text, Ctrl-D ends.")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="Continue one text and end.")
    args = parser.parse_args(argv)

    def complete() -> None:
        client = ApiClient(args)
        if args.quick is not None:
            print_answer(_continue(client, args.quick), goes_on=False)
            return
        for text in typed_lines():
            print_answer(_continue(client, text), goes_on=sys.stdin.isatty())

    return run_command(complete)


def _continue(client: ApiClient, text: str) -> Generator[str, None, None]:
    for choice in client.stream("/completions", prompt=text):
        yield choice["text"]
