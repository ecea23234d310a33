"""`octavo doctor`: reports whether a server could run on this machine, and what would be slow and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from octavo.entrypoints.cli import run_command
from octavo.flags import FlagParser


def make_parser(prog: str) -> FlagParser:
    parser = FlagParser(prog=prog, description="Say what this machine can do, what would be slow and why.")
    parser.add_argument("--host", default="127.0.0.1", help="Where a server is to listen (default: %(default)s).")
    parser.add_argument("--port", type=int, default=8000, help="Its port (default: %(default)s).")
    parser.add_argument("--no-measure", action="store_true", help="Do not measure memory and products (a second).")
    parser.add_argument("--offline", action="store_true", help="Do not ask whether index and hub are reachable.")
    parser.add_argument("--json", action="store_true", help="As JSON.")
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "octavo doctor") -> int:
    """Print the findings. Return the exit code, 1 if a server could not run."""
    args = make_parser(prog).parse_args(argv)
    runs = True

    def run() -> None:
        nonlocal runs
        from octavo.planning.machine_check import as_text, examine

        findings = []
        for finding in examine(args.port, args.host, measures=not args.no_measure, asks_network=not args.offline):
            findings.append(finding)
            runs &= finding.verdict != "no"
            if not args.json:
                print(as_text(finding), flush=True)
        if args.json:
            print(json.dumps({"can_serve": runs, "findings": [asdict(finding) for finding in findings]}, indent=2))
        else:
            print("A server can run here." if runs else "A server cannot run here: see what is marked [ no ].")

    return run_command(run) or int(not runs)
