"""Which tests run, in which order and beside which: tiers, shards, and work for several processes.

Three tiers. A plain run leaves out tests marked `long`. `--changed-since` adds the long tests that a change can have
broken, nearest to it first, as far as `--minutes` allow. `--all` adds all of them, and `--shard 2/6` runs a sixth.
tests/durations.json says how long tests take; `python -m tests.tiers REPORT...` adds what reports of pytest
(--junitxml) say.
"""

from __future__ import annotations

import functools
import json
import sys
import xml.etree.ElementTree
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

DURATIONS = Path(__file__).with_name("durations.json")
DEFAULT_S = 0.1  # of a test that the table does not name
LEAST_LONG_S = 1.0  # what a long test counts as at least, where few are chosen among many
WORTH_NAMING_S = 0.2
SPLIT_S = 45.0  # files that take longer are shared by several processes, or shards


@functools.cache
def durations() -> dict[str, float]:
    """`tests/x/test_y.py::test_z` -> seconds of one of its cases, on average."""
    table: dict[str, float] = json.loads(DURATIONS.read_text())
    return table


def seconds(nodeid: str) -> float:
    return durations().get(nodeid.partition("[")[0], DEFAULT_S)


def scopes(nodeids: Iterable[str]) -> dict[str, list[str]]:
    """Tests that one process runs one after the other, longest first: those of a file, or of a part of a long file."""
    files: dict[str, list[str]] = {}
    for nodeid in nodeids:
        files.setdefault(nodeid.partition("::")[0], []).append(nodeid)
    found: dict[str, list[str]] = {}
    for file, tests in files.items():
        num_parts = 1 + int(sum(map(seconds, tests)) / SPLIT_S)
        share, sum_s = sum(map(seconds, tests)) / num_parts, 0.0
        for nodeid in tests:
            found.setdefault(f"{file} {int(sum_s / share)}", []).append(nodeid)
            sum_s += seconds(nodeid)
    return dict(sorted(found.items(), key=lambda item: (-sum(map(seconds, item[1])), item[0])))


def shard(nodeids: Iterable[str], number: int, num_shards: int) -> set[str]:
    """The tests of one of several shards, numbered from 1, which take about the same time."""
    sums, chosen = [0.0] * num_shards, set[str]()
    for tests in scopes(nodeids).values():
        least = min(range(num_shards), key=sums.__getitem__)
        sums[least] += sum(map(seconds, tests))
        if least == number - 1:
            chosen.update(tests)
    return chosen


def parse_shard(text: str) -> tuple[int, int]:
    """`2/6` -> (2, 6)."""
    number, slash, num_shards = text.partition("/")
    if not (slash and number.isdecimal() and num_shards.isdecimal() and 1 <= int(number) <= int(num_shards)):
        raise ValueError(f"--shard {text}: give a number and how many there are, as 2/6")
    return int(number), int(num_shards)


def affected(
    nodeids: Sequence[str], module_of: Callable[[str], str], distances: Mapping[str, int], budget_s: float
) -> tuple[list[str], list[str], list[str]]:
    """Long tests that a change can have broken and that fit the time, those that it can have broken and that do not,
    and the others. `distances` are those of `ImportGraph`."""
    reached = [nodeid for nodeid in nodeids if module_of(nodeid) in distances]
    reached.sort(key=lambda nodeid: distances[module_of(nodeid)])
    chosen, too_many = [], []
    for nodeid in reached:
        budget_s -= max(seconds(nodeid), LEAST_LONG_S)
        (chosen if budget_s >= 0 else too_many).append(nodeid)
    taken = set(reached)
    return chosen, too_many, [nodeid for nodeid in nodeids if nodeid not in taken]


def update_durations(reports: Iterable[Path]) -> None:
    """Write the averages of the tests that these reports of pytest name; the others keep theirs."""
    cases: dict[str, list[float]] = {}
    for report in reports:
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            if case.find("skipped") is None and case.get("classname"):  # a file that is skipped or fails has none
                parts = case.attrib["classname"].split(".")
                depth = max(i for i, part in enumerate(parts, 1) if part.startswith("test_"))  # classes follow
                name = "::".join(["/".join(parts[:depth]) + ".py", *parts[depth:], case.attrib["name"]])
                cases.setdefault(name.partition("[")[0], []).append(float(case.attrib["time"]))
    table = dict(durations()) if DURATIONS.exists() else {}
    for name, each in cases.items():
        table.pop(name, None)
        if (average := sum(each) / len(each)) >= WORTH_NAMING_S:
            table[name] = round(average, 1)
    DURATIONS.write_text(json.dumps(dict(sorted(table.items())), indent=0) + "\n")


if __name__ == "__main__":
    update_durations(map(Path, sys.argv[1:]))
