"""`octavo doctor`: reports whether a server could run on this machine, and what would be slow and why."""

import argparse
import json
from dataclasses import asdict

from octavo.entrypoints.cli import command
from octavo.flags import FlagParser


def make_parser(prog: str) -> FlagParser:
    parser = FlagParser(prog=prog, description="Say what this machine can do, what would be slow and why.")
    parser.add_argument("--host", default="127.0.0.1", help="Address for a server (default: %(default)s).")
    parser.add_argument("--port", type=int, default=8000, help="Port for a server (default: %(default)s).")
    parser.add_argument("--no-measure", action="store_true", help="Do not measure memory and products (a second).")
    parser.add_argument("--offline", action="store_true", help="Do not check whether index and hub can be reached.")
    parser.add_argument("--json", action="store_true", help="Print the findings as JSON.")
    return parser


@command(make_parser, "octavo doctor")
def main(args: argparse.Namespace) -> int:
    """Print the findings. Return 1, the exit code, if a server could not run."""
    runs = True
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
        print("A server can run here." if runs else "A server cannot run here: see the lines marked [ no ].")
    return int(not runs)
