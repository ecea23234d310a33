"""docs/deploying.md names files that exist, and flags that the server takes."""

from __future__ import annotations

import re
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
