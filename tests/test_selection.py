"""The selection of tests by what has changed misses nothing, and shards share out every test once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import NATIVE, ROOT, ImportGraph, base_of_changes, changed_files
from tests.tiers import LEAST_LONG_S, affected, parse_shard, scopes, seconds, shard, update_durations

# Imports all that there is and prints which module has asked for which, as Python itself sees it.
_RECORD = """
import builtins, importlib, json, pkgutil, sys
edges, real = set(), builtins.__import__
def recording(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    if level == 0 and importer.startswith(("octavo", "tests")) and name.startswith(("octavo", "tests")):
        edges.add((importer, name))
        edges.update((importer, f"{name}.{each}") for each in fromlist or ())
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = recording
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except ImportError as e:
        assert not (e.name or "").startswith(("octavo.", "tests.")) or e.name == "octavo._cpu", e
print(json.dumps([edge for edge in sorted(edges)]))
"""


@pytest.fixture(scope="module")
def graph() -> ImportGraph:
    return ImportGraph()


@pytest.mark.long
def test_the_graph_has_every_import_that_python_makes(graph: ImportGraph) -> None:
    names = [name for name in graph.paths if name.startswith("octavo") and not name.endswith("__main__")]
    done = subprocess.run(
        [sys.executable, "-c", _RECORD], input=json.dumps(names), capture_output=True, text=True, check=True, cwd=ROOT
    )
    edges = [(importer, name) for importer, name in json.loads(done.stdout.splitlines()[-1])]
    edges = [(importer, name) for importer, name in edges if name in graph.paths and importer in graph.paths]
    assert len(edges) > len(names)
    missing = [edge for edge in edges if edge[0] != edge[1] and edge[1] not in graph.imports[edge[0]]]
    assert not missing


@pytest.mark.long
def test_an_edit_in_any_module_selects_every_test_that_imports_it(graph: ImportGraph) -> None:
    """By a second way: forwards from each test instead of backwards from the module."""
    tests = [name for name in graph.paths if name.rpartition(".")[2].startswith("test_")]
    reached: dict[str, set[str]] = {}
    for test in tests:
        ways, seen = [test], set[str]()
        while ways:
            if (name := ways.pop()) not in seen:
                seen.add(name)
                ways.extend(graph.imports.get(name, ()))
        for name in seen:
            reached.setdefault(name, set()).add(test)
    for name, path in graph.paths.items():
        if name.startswith("octavo"):
            selected = graph.distances([str(path.relative_to(ROOT))])
            assert reached.get(name, set()) == {test for test in tests if test in selected}, name
    assert reached[NATIVE] == {test for test in tests if test in graph.distances(["csrc/cpu/simd.h"])}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "octavo/__init__.py": "def __getattr__(name):\n    import octavo.engine\n",
        "octavo/engine.py": "def run():\n    from octavo import _cpu\n",
        "octavo/table.py": "HOMES = {'x': 'octavo.lazy'}\n",
        "octavo/lazy.py": '"""Beside octavo.engine."""\n',
        "octavo/types.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import octavo.lazy\n",
        "octavo/entrypoints/cli/main.py": "from octavo import types\n",
        "tests/__init__.py": "",
        "tests/conftest.py": "",
        "tests/helper.py": "from octavo import table\n",
        "tests/x/__init__.py": "",
        "tests/x/conftest.py": "from tests import helper\n",
        "tests/x/test_a.py": "",
        "tests/test_b.py": "import octavo.types\n",
        "tests/test_c.py": "from octavo import LLM\n",
        "tests/test_d.py": "COMMAND = ['octavo', 'serve']\n",
        "tests/test_e.py": "PAGE = 'docs/page.md'\n",
        "tests/test_f.py": "from . import test_b\n",
        "tests/test_g.py": "PROGRAMS = sorted(('..' / 'examples').iterdir())\n".replace("'", '"'),
        "examples/chat.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("octavo/lazy.py", {"tests.x.test_a"}),  # a string names it, a conftest imports that; types import nothing
        ("octavo/types.py", {"tests.test_b", "tests.test_d", "tests.test_f"}),
        ("octavo/engine.py", {"tests.test_c", "tests.test_d"}),  # whoever asks `octavo` for names, or starts a program
        ("csrc/cpu/simd.h", {"tests.test_c", "tests.test_d"}),
        ("octavo/__init__.py", {f"tests.{name}" for name in ("x.test_a", "test_b", "test_c", "test_d", "test_f")}),
        ("docs/page.md", {"tests.test_e"}),
        ("examples/chat.py", {"tests.test_g"}),
        ("examples/chat.mjs", {"tests.test_g"}),
        ("tests/conftest.py", {f"tests.{name}" for name in ("x.test_a", *map("test_{}".format, "bcdefg"))}),
        ("tests/x/data.json", {"tests.x.test_a"}),
        ("octavo/gone.py", set()),
        ("constraints.txt", {f"tests.{name}" for name in ("x.test_a", *map("test_{}".format, "bcdefg"))}),
    ],
)
def test_every_kind_of_import_counts(project: Path, changed: str, expected: set[str]) -> None:
    reached = ImportGraph(project).distances([changed])
    assert {name for name in reached if name.rpartition(".")[2].startswith("test_")} == expected


def test_changes_are_those_since_the_last_release_or_full_run(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    commits = []
    for name in ("first", "second", "third"):
        (tmp_path / name).write_text(name)
        git("add", ".")
        git("commit", "-q", "-m", name)
        commits.append(git("rev-parse", "HEAD"))
    (tmp_path / ".ci").mkdir()
    named = tmp_path / ".ci" / "last-full-run"
    named.write_text("0" * 40 + "\n")  # of another history
    assert base_of_changes(tmp_path) is None
    named.write_text(commits[0] + "\n")
    assert base_of_changes(tmp_path) == commits[0]
    git("tag", "v0.1.0", commits[1])
    assert base_of_changes(tmp_path) == "v0.1.0"
    git("mv", "first", "moved")
    assert sorted(changed_files("v0.1.0", tmp_path)) == [".ci/last-full-run", "first", "moved", "third"]
    with pytest.raises(ValueError, match="git knows no commit 'nothing'"):
        changed_files("nothing", tmp_path)


def test_the_nearest_tests_come_first_as_far_as_time_allows() -> None:
    nodeids = [f"tests/test_{name}.py::test_{i}" for name in "abc" for i in range(3)]
    distances = {"b": 1, "a": 2}
    chosen, too_many, others = affected(
        nodeids, lambda nodeid: nodeid[len("tests/test_")], distances, budget_s=4.5 * LEAST_LONG_S
    )
    assert chosen == [*nodeids[3:6], nodeids[0]]
    assert too_many == nodeids[1:3]
    assert others == nodeids[6:]


def test_shards_have_every_test_once_and_take_about_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"tests/a.py::test_long": 10.0, "tests/b.py::test_y": 3.0}
    monkeypatch.setattr("tests.tiers.durations", lambda: table)
    nodeids = [f"tests/a.py::test_long[{i}]" for i in range(30)] + [f"tests/b.py::test_{c}" for c in "xyz"]
    shards = [shard(nodeids, number, 4) for number in range(1, 5)]
    assert sorted(nodeid for each in shards for nodeid in each) == sorted(nodeids)
    sums = [sum(map(seconds, each)) for each in shards]
    assert max(sums) < 1.7 * sum(sums) / 4
    for tests in scopes(nodeids).values():
        assert tests == [nodeid for nodeid in nodeids if nodeid in tests], "in the order of the file"
    assert parse_shard("2/6") == (2, 6)
    for wrong in ("0/6", "7/6", "2", "a/b", "2/", "-1/3"):
        with pytest.raises(ValueError, match="give a number and how many there are"):
            parse_shard(wrong)


def test_durations_are_read_off_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "durations.json"
    table.write_text('{"tests/x/test_a.py::test_old": 3.0, "tests/x/test_a.py::test_one": 9.0}')
    monkeypatch.setattr("tests.tiers.DURATIONS", table)
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite><testcase classname="tests.x.test_a" name="test_one[1]" time="1.0"/>
        <testcase classname="tests.x.test_a" name="test_one[2]" time="2.0"/>
        <testcase classname="tests.x.test_a.TestClass" name="test_two" time="4"/>
        <testcase classname="tests.x.test_a" name="test_quick" time="0.01"/>
        <testcase classname="" name="tests.x.test_fails" time="0.0"/>
        <testcase classname="tests.x.test_a" name="test_old" time="0"><skipped/></testcase></testsuite></testsuites>"""
    )
    monkeypatch.setattr("tests.tiers.durations", lambda: json.loads(table.read_text()))
    update_durations([report])
    assert json.loads(table.read_text()) == {
        "tests/x/test_a.py::TestClass::test_two": 4.0,
        "tests/x/test_a.py::test_old": 3.0,
        "tests/x/test_a.py::test_one": 1.5,
    }
