"""Pages name files that exist, flags that the server takes, and sizes that hold."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

from octavo.entrypoints.cli.serve import parse_args

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "deploying.md", ROOT / "deploy" / "helm" / "octavo" / "README.md"]
COPIED = re.compile(r"cp (\S+) (\S+)")  # what a command makes need not be there


def test_files_that_the_pages_name_exist() -> None:
    for page in PAGES:
        text = page.read_text()
        made = {target for _, target in COPIED.findall(text)}
        named = set(re.findall(r"\bdeploy/[\w./-]*[\w]", text)) - made
        assert named, page
        missing = {name for name in named if not (ROOT / name).exists()}
        assert not missing, f"{page.name}: {missing}"


def test_the_server_takes_the_flags_of_the_pages() -> None:
    lines = re.findall(r"octavo:cpu (--.+)", PAGES[0].read_text())
    assert lines
    for line in lines:
        parse_args(line.split(), "octavo serve")


def test_the_script_of_changes_takes_the_commands_of_the_page() -> None:
    spec = importlib.util.spec_from_file_location("change", ROOT / "deploy" / "blue-green" / "change.py")
    assert spec is not None and spec.loader is not None
    change = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = change  # dataclasses look their module up
    spec.loader.exec_module(change)
    commands = re.findall(r"change\.py (.+)", PAGES[0].read_text())
    read = [change.parse_args(shlex.split(command, comments=True)) for command in commands]
    assert {args.what for args in read} == {"to", "recover", "status", "stop"}
    for args in read:
        if args.command:
            assert args.command[0].endswith("octavo") and args.command[1] == "serve"
            parse_args(args.command[2:], "octavo serve")
    defaults = read[0]
    text = PAGES[0].read_text()
    for name in ("ready", "drain", "stop"):
        assert f"`--{name}-timeout` ({getattr(defaults, f'{name}_timeout')} s)" in text


def test_the_lines_that_readme_gives_for_its_reading_list_are_right_within_a_tenth() -> None:
    text = (ROOT / "README.md").read_text()
    listed = text[text.index("**The code**") : text.index("The other ")]
    paths = re.findall(r"`([\w/]+\.py)`", listed)
    lines = sum(len((ROOT / "octavo" / path).read_text().splitlines()) for path in paths)
    said_lines, said_files = re.search(r"some ([\d,]+) lines of Python in (\d+) files", listed).groups()  # type: ignore[union-attr]
    assert len(paths) == int(said_files)
    assert abs(lines - int(said_lines.replace(",", ""))) < lines / 10


def test_no_page_and_no_error_sends_a_reader_to_a_package_index_for_octavo() -> None:
    """None has it; docs/installing.md says what works."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "octavo").rglob("*.py")]
    assert not [str(path) for path in pages if re.search(r"pip install ['\"]?octavo\b(?!-)", path.read_text())]
