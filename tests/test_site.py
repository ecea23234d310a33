"""The program that makes the documentation site. `.ci/run` makes the site itself, whose tools the tests do not need."""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo.entrypoints.cli.main import make_parser
from octavo.variables import VARIABLES

ROOT = Path(__file__).parents[1]
# Read for other programs' sake: written by Octavo, or variables of vLLM's that get a warning.
NOT_OURS = re.compile(r"OMP_WAIT_POLICY|VLLM_(?!API_KEY).*")
NAME = re.compile(
    r"(OCTAVO|VLLM|HF|TRANSFORMERS|OTEL|OPENAI|XDG|PIP|UV|OMP|RAY|KUBERNETES)_[A-Z_]+|RUNTIME_DIRECTORY|PYTHONPATH|NO_COLOR|UV"
)

IN_QUOTES = re.compile(f"[\"']({NAME.pattern})[\"']")


@pytest.fixture(scope="module")
def make() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "make.py"))


def test_the_table_of_variables_is_what_the_code_reads() -> None:
    found = set()
    for path in Path(octavo.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if path.name == "variables.py" or not IN_QUOTES.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
                found.add(node.value)
    assert {name for name in found if not NOT_OURS.fullmatch(name)} == VARIABLES.keys()


def test_the_reference_has_every_command_flag_and_metric(make: dict[str, Any]) -> None:
    flags, metrics = make["flags"](), make["metrics"]()
    parsers = list(make["commands"](make_parser()))
    assert [f"## {parser.prog}" for parser in parsers] == re.findall(r"^## .*$", flags, re.MULTILINE)
    for parser in parsers:
        of_command = re.split(r"^## ", flags.split(f"## {parser.prog}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
        for name in parser._option_string_actions.keys() - {"-h", "--help"}:
            assert f"{name}" in of_command, f"{parser.prog} {name}"
    for metric in make["exposed"]():
        assert f"| `{metric.name}" in metrics
    assert all(line.count("|") in (0, 3) for line in flags.splitlines()), "a bar in a cell is another column"


def test_links_to_what_is_not_there_are_found(make: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "index.html").write_text('<h1 id="top"></h1><a href="../a.html#x">')
    (tmp_path / "a.html").write_text(
        '<p id="x"></p><a href="#x"><a href="b/#top"><a href="https://example.com/"><a href="b"><img src="c.png">'
        '<a href="#y"><a href="b/#bottom"><link href="d.css">'
    )
    wrong = list(make["broken_links"](make["read_pages"](tmp_path)))
    assert [line.rpartition(" ")[2] for line in wrong] == ["c.png", "#y", "b/#bottom", "d.css"]


def test_versions_stand_side_by_side_and_the_newest_is_first(make: dict[str, Any], tmp_path: Path) -> None:
    site, made = tmp_path / "site", tmp_path / "made"
    made.mkdir()
    for version in ("0.9.0", "0.10.0", "0.2.0", "0.9.0"):
        (made / "index.html").write_text(version)
        make["publish"](made, site, version)
    listed = [(entry["version"], entry["aliases"]) for entry in json.loads((site / "versions.json").read_text())]
    assert listed == [("0.10.0", ["latest"]), ("0.9.0", []), ("0.2.0", [])]
    assert (site / "0.9.0" / "index.html").read_text() == "0.9.0" and "url=0.10.0/" in (site / "index.html").read_text()
