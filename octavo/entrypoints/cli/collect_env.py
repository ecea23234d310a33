"""`octavo collect-env`: prints the facts for a bug report."""

import argparse
import json

from octavo.entrypoints.cli import command
from octavo.flags import FlagParser


def make_parser(prog: str) -> FlagParser:
    parser = FlagParser(prog=prog, description="Print the facts for a report of a problem, without secrets.")
    parser.add_argument("--json", action="store_true", help="As JSON.")
    return parser


@command(make_parser, "octavo collect-env")
def main(args: argparse.Namespace) -> None:
    from octavo.planning.environment import as_text, environment

    found = environment()
    print(json.dumps(found, indent=2) if args.json else as_text(found))
