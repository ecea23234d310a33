"""Every program of examples/ runs as it stands and prints what it is there to show."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.server import MODEL, Server, running_server
from tests.installing import why_not
from tests.ports import held_port
from tests.waiting import wait_until, within

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXAMPLES = {  # what its output matches
    "adapters": r"base: (.+)\nadapter: (?!\1\n)['\"]",
    "batch": r"completed: 3 of 3\n(?s:.*)France: .*Paris",
    "chat_template": r"--> .*Paris(?s:.*)\. Be kind(?s:.*)--> \S(?s:.*) in one word(?s:.*)--> \S",
    "chat": r"> What is the capital of France\?\n.*Paris(?s:.*)> Which river(?s:.*)tokens\)",
    "embeddings": r"0\.\d+ Bread is made",
    "offline": r"France is' -> ['\"].*Paris",
    "offline_async": r"whole: ['\"].*Paris(?s:.*)given up: ['\"].*['\"]",
    "several_completions": r"(sampled: .+\n){3}again the same: True\n(beam: .+\n){2}",
    "streaming": r"\n\d+ tokens, the first after \d+\.\d\d s\n$",
    "structured_output": r"book: kind='\w+' year=\d+ in_print=\w+\nchoice: (posi|nega)tive\ndate: \d{4}-\d\d-\d\d\n",
    "tools": r"^temperature_of\(city='Paris'\) = .*21\}\nanswer: .*21.*\n$",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("examples"), "--max-model-len", "1024") as server:
        yield server


def test_every_example_is_run_and_described() -> None:
    names = {path.name for path in (ROOT / "examples").iterdir()} - {"README.md", "__pycache__"}
    elsewhere = {
        "javascript.mjs",
        "several_models.conf",
        "pictures.py",
    }  # below, and in tests/multimodal/test_server.py
    assert names == {*(f"{name}.py" for name in EXAMPLES), *elsewhere}
    described = re.findall(r"^\| \[(\S+)\]\(\1\)", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
    assert sorted(described) == sorted(names)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_javascript(server: Server, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "javascript.mjs", tmp_path)
    npm = ["npm", "install", "--no-audit", "--no-fund", "openai@7.57.0"]
    if reason := why_not(npm, cwd=tmp_path):
        pytest.skip(f"npm cannot install the client here: {reason}")
    env = os.environ | {"OPENAI_BASE_URL": f"{server.url}/v1"}
    done = subprocess.run(
        ["node", "javascript.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"Paris(?s:.*)\ntemperature_of\(Paris\)\n", done.stdout), done.stdout


@pytest.mark.long
def test_several_models_behind_nginx(server: Server, tmp_path: Path) -> None:
    nginx = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed (Debian: nginx-light)")
    port = held_port()
    with running_server(
        tmp_path, "--max-model-len", "512", "--root-path", "/small", "--served-model-name", "s"
    ) as small:
        settings = (ROOT / "examples" / "several_models.conf").read_text()
        for old, new in (
            ("127.0.0.1:8000;", f"127.0.0.1:{port};"),
            ("127.0.0.1:8001;", f"{server.url.removeprefix('http://')};"),
            ("127.0.0.1:8002;", f"{small.url.removeprefix('http://')};"),
            ("location /chat/ { proxy_pass http://chat; }", "location /chat/ { proxy_pass http://chat/; }"),  # is at /
        ):
            assert old in settings
            settings = settings.replace(old, new)
        (tmp_path / "nginx.conf").write_text(settings)
        gateway = subprocess.Popen([nginx, "-p", str(tmp_path), "-c", "nginx.conf", "-e", "stderr"])
        try:
            assert wait_for(f"http://127.0.0.1:{port}/small/health") == 200
            for path, model in (("chat", MODEL), ("small", "s")):
                client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/{path}/v1", api_key="none", max_retries=0)
                assert [found.id for found in client.models.list()] == [model]
                stream = client.completions.create(
                    model=model, prompt="The capital of France is", max_tokens=8, temperature=0, stream=True
                )
                assert "Paris" in "".join(chunk.choices[0].text for chunk in stream)
            assert wait_for(f"http://127.0.0.1:{port}/v1/models") == 404
        finally:
            gateway.terminate()
            gateway.wait(within(30))


def wait_for(url: str) -> int:
    """The status of an answer, once there is one."""

    def status() -> int | None:
        try:
            with urllib.request.urlopen(url, timeout=within(60)) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except (urllib.error.URLError, ConnectionError):
            return None

    found = wait_until(status)
    assert found is not None
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str, server: Server) -> None:
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    env = os.environ | {"OPENAI_BASE_URL": f"{server.url}/v1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    assert re.search(EXAMPLES[name], done.stdout), done.stdout
