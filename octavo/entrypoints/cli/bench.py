"""`octavo bench SUBCOMMAND`: measurements of the engine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from octavo.entrypoints.cli.commands import run_named

COMMANDS = {
    "throughput": ("octavo.bench.throughput", "tokens per second of many requests, offline"),
    "latency": ("octavo.bench.latency", "how long one batch of requests takes, offline"),
    "serve": ("octavo.bench.serve", "what clients of a running server see"),
    "startup": ("octavo.bench.startup", "how long a server takes to be ready, and what it holds then"),
}


def main(argv: Sequence[str] | None = None, *, prog: str = "octavo bench") -> int:
    """Run a measurement and return its exit code."""
    parser = argparse.ArgumentParser(prog=prog, description="Measure the engine.")
    return run_named(COMMANDS, sys.argv[1:] if argv is None else argv, parser)
