"""`octavo gateway MODEL … | --catalogue FILE`: many models behind one address."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from octavo.entrypoints.cli import run_command
from octavo.flags import FlagParser
from octavo.gateway.server import GatewayArgs, run_gateway


def make_parser(prog: str) -> FlagParser:
    """Return a parser of every flag of the gateway."""
    parser = FlagParser(
        prog=prog, usage="%(prog)s [MODEL …] [--flags]", description="Serve many models behind one address."
    )
    parser.add_argument("models", metavar="MODEL", nargs="*", help="Models to serve, each started when asked for.")
    return GatewayArgs.add_cli_args(parser)


def main(argv: Sequence[str] | None = None, *, prog: str = "octavo gateway") -> int:
    """Serve until a signal stops the gateway. Return the exit code."""
    args = make_parser(prog).parse_args(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: run_gateway(GatewayArgs.from_cli_args(args), args.models))
