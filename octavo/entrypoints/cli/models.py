"""`octavo models`: lists the supported architectures."""

import argparse

from octavo.entrypoints.cli import command
from octavo.models import catalogue


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Print which architectures run, and how.")
    parser.add_argument("--markdown", action="store_true", help="as docs/models.md has it")
    return parser


@command(make_parser, "octavo models")
def main(args: argparse.Namespace) -> None:
    print(catalogue.as_markdown() if args.markdown else catalogue.as_text())
