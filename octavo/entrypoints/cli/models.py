"""`octavo models`: lists the supported architectures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from octavo.entrypoints.cli import run_command
from octavo.models import catalogue


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Print which architectures run, and how.")
    parser.add_argument("--markdown", action="store_true", help="as docs/models.md has it")
    return parser


def main(argv: Sequence[str], *, prog: str) -> int:
    """Print the table and return the exit code."""
    args = make_parser(prog).parse_args(argv)
    return run_command(lambda: print(catalogue.as_markdown() if args.markdown else catalogue.as_text()))
