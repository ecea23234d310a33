"""Clients of other people's, unchanged, each in an environment of its own that `uv` makes: see clients/programs.py.

The package index must be at hand. `openai` and `anthropic` are in the environment of the tests: test_agents.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import MODEL, Server, running_server
from tests.installing import why_not

pytestmark = [pytest.mark.long, pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")]

# The versions that docs/apis.md names.
CLIENTS = {
    "litellm": "litellm==1.83.0",
    "langchain": "langchain-openai==1.7.3 langchain-anthropic==1.7.7",
    "llama_index": "llama-index-llms-openai-like==0.1.3 llama-index-embeddings-openai==0.1.11",
    "instructor": "instructor==1.17.0 anthropic",
    "pydantic_ai": "pydantic-ai-slim[openai,anthropic]==2.32.2 anthropic==0.125.0 httpx",
    "cohere": "cohere==7.3.1 pydantic",
    "openai_agents": "openai-agents==0.24.0",
}
PROGRAMS = Path(__file__).parent / "clients" / "programs.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("clients"), "--max-model-len", "4096", "--check-invariants") as server:
        yield server


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A small embedder, whose scores are cosines; it says that it is the model that the programs ask for."""
    pytest.importorskip("torch", reason="the model is made with it")
    from tests.models.small_text_encoder import write_model

    folder = tmp_path_factory.mktemp("pooling")
    write_model(folder, "BertModel")
    with running_server(folder, "--model", str(folder), "--served-model-name", MODEL, "--cpu-threads", "1") as server:
        yield server


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_works_as_it_is(server: Server, pooling: Server, client: str, tmp_path: Path) -> None:
    given = [word for requirement in CLIENTS[client].split() for word in ("--with", requirement)]
    python = ["uv", "run", "--no-project", *given, "python"]
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    running: Any = {"cwd": tmp_path, "env": outside}
    if reason := why_not([*python, "-c", ""], **running):
        pytest.skip(f"{client} cannot be installed here: {reason}")
    command = [*python, str(PROGRAMS), client, server.url, pooling.url]
    done = subprocess.run(command, capture_output=True, text=True, **running)
    assert done.returncode == 0, done.stderr[-5000:]
    server.wait_until_idle()


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_ollamas_javascript_client_works_as_it_is(server: Server, pooling: Server, tmp_path: Path) -> None:
    program = tmp_path / "program.mjs"
    program.write_text((PROGRAMS.parent / "ollama.mjs").read_text())
    if reason := why_not(["npm", "install", "--no-audit", "--no-fund", "ollama@0.6.4"], cwd=tmp_path):
        pytest.skip(f"ollama cannot be installed here: {reason}")
    done = subprocess.run(["node", str(program), server.url, pooling.url], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-5000:]
    server.wait_until_idle()
