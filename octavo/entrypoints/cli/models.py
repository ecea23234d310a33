"""`octavo models`: which architectures run, and how."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from octavo.models import catalogue


def main(argv: Sequence[str], *, prog: str) -> int:
    """Print the table and return the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description="Print which architectures run, and how.")
    parser.add_argument("--markdown", action="store_true", help="as docs/models.md has it")
    args = parser.parse_args(argv)
    print(catalogue.as_markdown() if args.markdown else catalogue.as_text())
    return 0
