"""`octavo collect-env`: prints the facts for a bug report."""

from __future__ import annotations

import json
from collections.abc import Sequence

from octavo.entrypoints.cli import run_command
from octavo.flags import FlagParser


def make_parser(prog: str) -> FlagParser:
    parser = FlagParser(prog=prog, description="Print what a report of a problem needs. Secrets are left out.")
    parser.add_argument("--json", action="store_true", help="As JSON.")
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "octavo collect-env") -> int:
    """Print the facts and return the exit code."""
    args = make_parser(prog).parse_args(argv)

    def run() -> None:
        from octavo.planning.environment import as_text, environment

        found = environment()
        print(json.dumps(found, indent=2) if args.json else as_text(found))

    return run_command(run)
