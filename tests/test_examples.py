"""Every program of examples/ runs as it stands and prints what it is there to show."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, running_server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXAMPLES = {  # what its output matches
    "adapters": r"base: '(.+)'\nadapter: '(?!\1')",
    "batch": r"completed: 3 of 3\n(?s:.*)France: .*Paris",
    "chat": r"> What is the capital of France\?\n.*Paris(?s:.*)> Which river(?s:.*)tokens\)",
    "embeddings": r"0\.\d+ Bread is made",
    "offline": r"France is' -> '.*Paris",
    "offline_async": r"whole: '.*Paris(?s:.*)given up: '.+'",
    "several_completions": r"(sampled: .+\n){3}again the same: True\n(beam: .+\n){2}",
    "streaming": r"\n\d+ tokens, the first after \d+\.\d\d s\n$",
    "structured_output": r"book: kind='\w+' year=\d+ in_print=\w+\nchoice: (posi|nega)tive\ndate: \d{4}-\d\d-\d\d\n",
    "tools": r"temperature_of\(city='(Paris|Rome)'\) = .*21\}\nanswer: .+",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("examples"), "--max-model-len", "1024") as server:
        yield server


def test_every_example_is_run_and_described() -> None:
    names = {path.name for path in (ROOT / "examples").iterdir()} - {"README.md", "__pycache__"}
    assert names == {*(f"{name}.py" for name in EXAMPLES), "javascript.mjs"}
    described = re.findall(r"^\| \[(\S+)\]\(\1\)", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
    assert sorted(described) == sorted(names)


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_javascript(server: Server, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "javascript.mjs", tmp_path)
    npm = ["npm", "install", "--no-audit", "--no-fund", "openai@7.57.0"]
    try:
        subprocess.run(npm, cwd=tmp_path, capture_output=True, check=True, timeout=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"npm cannot install the client here: {error.stderr!r:.300}")
    env = os.environ | {"OPENAI_BASE_URL": f"{server.url}/v1"}
    done = subprocess.run(
        ["node", "javascript.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"Paris(?s:.*)\ntemperature_of\((Paris|Rome)\)\n", done.stdout), done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str, server: Server) -> None:
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    env = os.environ | {"OPENAI_BASE_URL": f"{server.url}/v1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    assert re.search(EXAMPLES[name], done.stdout), done.stdout
