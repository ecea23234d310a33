"""Runs the commands behind the table of figures in README, and prints the table.

    python benchmarks/claims.py [CLAIM ...] [--embedding-model FOLDER]

Each claim is a command that stands in the table, and how its figure is read from what the command prints or writes.
A row of README whose command differs was measured earlier, by the command beside it.
The commands are those of a checkout, with the packages of its tests. A figure belongs to a machine: the lines above the
table name it, and say if it was busy.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from octavo.entrypoints.cli import command
from octavo.errors import OctavoError
from octavo.flags import FlagParser
from octavo.processes import python_command

CHECKOUT = Path(__file__).resolve().parents[1]
# In processors. A measurement beside other work is worth nothing; a mean over a minute decays slowly.
BUSY_LOAD = 0.25


class Claim(NamedTuple):
    """A row of the table. `read` returns the figure from the command's output and its JSON, which the command writes
    because of `--json FILE`; the table leaves this flag out."""

    what: str
    command: str  # FOLDER stands for the folder of --embedding-model
    read: Callable[[str, Any], str]
    writes_json: bool = False


def _found(pattern: str, text: str, form: str) -> str:
    """Return the number that `pattern` finds. Raises `OctavoError`."""
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise OctavoError(f"its output has no {pattern!r}")
    return form.format(float(found[1]))


CLAIMS: Mapping[str, Claim] = {
    "start": Claim(
        "start to ready, median of 5",
        "octavo bench startup --runs 5",
        lambda _, data: f"{data['median']['ready_s']:.2f} s",
        writes_json=True,
    ),
    "streams": Claim(
        "2 requests/s of 512 tokens: gap between tokens, p99",
        "python benchmarks/smooth_streams.py --servers auto --rates 2 --rounds 1 --long 0",
        lambda _, data: f"{data[0]['p99_itl_ms']:.0f} ms",
        writes_json=True,
    ),
    "survival": Claim(
        "64 mixed streams while the engine is killed five times: answers lost, answers that differ in a bit",
        "python benchmarks/survival.py --requests 64",
        lambda _, data: f"{data['lost']} and {data['not_equal']}",
        writes_json=True,
    ),
    "edit": Claim(
        "editing a file, the old file as `prediction`",
        "python benchmarks/speculation.py edit",
        lambda text, _: _found(r"^ *edit +prediction .* ratio ([\d.]+)", text, "{:.1f} times the tokens/s"),
    ),
    "embeddings": Claim(
        "embeddings of MiniLM in bfloat16",
        "python benchmarks/embeddings.py FOLDER",
        lambda text, _: _found(r"^octavo bfloat16 +([\d.]+) texts/s", text, "{:.0f} texts/s"),
    ),
}


def make_parser(prog: str) -> FlagParser:
    parser = FlagParser(
        prog=prog, description="Run the commands behind README's table of figures, and print the table in Markdown."
    )
    parser.add_argument(
        "claims", metavar="CLAIM", nargs="*", help=f"Rows to measure: {', '.join(CLAIMS)}. Default: all."
    )
    parser.add_argument(
        "--embedding-model", metavar="FOLDER", help="all-MiniLM-L6-v2; without it there is no row of embeddings."
    )
    return parser


@command(make_parser, "python benchmarks/claims.py")
def main(args: argparse.Namespace) -> None:
    """Measure and print."""
    _measure_all(args.claims or list(CLAIMS), args.embedding_model)


def _measure_all(names: Sequence[str], embedding_model: str | None) -> None:
    for name in names:
        if name not in CLAIMS:
            raise OctavoError(f"there is no claim {name}: take some of {', '.join(CLAIMS)}.")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    rows = []
    for name in names:
        claim = CLAIMS[name]
        if "FOLDER" in claim.command and embedding_model is None:
            print(f"octavo: {name} is left out: it needs --embedding-model FOLDER.", file=sys.stderr)
            continue
        print(f"octavo: {claim.command} ...", file=sys.stderr)
        rows.append(f"| {claim.what} | {measure(claim, embedding_model)} | `{claim.command}`, {_today()} |")
    print("\n".join([_machine(load), "", "| what | figure | command, date |", "|---|---|---|", *rows]))


def measure(claim: Claim, embedding_model: str | None = None) -> str:
    """Run a claim's command, and return its figure. Raises `OctavoError` with the last line of a command that fails."""
    program, *words = [embedding_model or word if word == "FOLDER" else word for word in claim.command.split()]
    start = python_command("octavo.entrypoints.cli.main") if program == "octavo" else [sys.executable]
    command = [*start, *words]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        if claim.writes_json:
            command += ["--json", str(file)]
        done = subprocess.run(command, cwd=CHECKOUT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "it says nothing").splitlines()[-1]
            raise OctavoError(f"{claim.command} ended with status {done.returncode}: {last}")
        try:
            return claim.read(done.stdout, json.loads(file.read_text()) if claim.writes_json else None)
        except OctavoError as error:
            raise OctavoError(f"the figure of {claim.command} cannot be read: {error}.") from None


def _machine(load: float) -> str:
    """Return lines that name the machine, the version and how busy the machine was before."""
    from octavo.planning.environment import environment

    facts = environment()
    processor, octavo = facts["processor"], facts["octavo"]
    number = processor["usable_processors"]
    commit = f", commit {octavo['commit']}" if octavo["commit"] else ""
    line = (
        f"On {number} processors of {processor['model']} ({processor['kernels']}), {facts['platform']['system']}, with "
        f"Octavo {octavo['version']}{commit} and the default model (135M parameters, 4 bits):"
    )
    if load / number > BUSY_LOAD:
        line = (
            f"**The machine was busy**: a load of {load:.1f} on {number} processors before the first command. These "
            f"are no figures to publish.\n\n{line}"
        )
    return line


def _today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


if __name__ == "__main__":
    sys.exit(main())
