"""Pytest plugin of `scripts/suites`: it skips the tests that do not apply, with the reason, takes the place of what a
suite needs of its own project (fixtures, helpers that start servers), and counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import re
import socket
import subprocess
import sys
import time
import tomllib
import types
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

SUITE = os.environ.get("OCTAVO_SUITE", "")
_START_S = 120.0
_MODEL_FLAGS = ("--model", model) if (model := os.environ.get("OCTAVO_SUITE_MODEL")) else ()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def serving(*flags: str, env: dict[str, str] | None = None) -> Iterator[str]:
    """Serve with `flags`, and yield the address."""
    port = free_port()
    command = [sys.executable, "-m", "octavo.entrypoints.cli.main", "serve", *_MODEL_FLAGS, "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **(env or {})})
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
        while not _is_healthy(url):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health") as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


# What does not apply


def _rules() -> list[tuple[re.Pattern[str], str]]:
    with open(Path(__file__).with_name("not_applicable.toml"), "rb") as file:
        listed = tomllib.load(file).get(SUITE, [])
    return [(re.compile(rule["tests"]), rule["why"]) for rule in listed]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rules = _rules()
    for item in items:
        why = next((why for pattern, why in rules if pattern.search(item.nodeid)), None)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=f"not applicable: {why}"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    stats = terminalreporter.stats
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in stats.get("skipped", ()))
    # Modules that import what only vLLM has.
    errors = stats.get("error", [])
    inner = [one for one in errors if re.search(r"No module named 'vllm|cannot import name", str(one.longrepr))]
    stats["error"] = [one for one in errors if one not in inner]
    if inner:
        reasons["not applicable: modules that test vLLM from within"] = len(inner)
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"{number:6} {reason}")
    numbers = [f"{len(stats.get(outcome, ()))} {outcome}" for outcome in ("passed", "failed", "error")]
    terminalreporter.write_line(f"{SUITE}: {', '.join(numbers)}, {sum(reasons.values())} not applicable")


# openai-python: its fixtures need plugins of their own, and its asynchronous tests another


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if SUITE != "openai-python" or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters

    async def run() -> None:
        async with _async_client() as client:
            known = {"async_client": client}
            await pyfuncitem.obj(**{name: known.get(name, pyfuncitem.funcargs.get(name)) for name in names})

    asyncio.run(run())
    return True


@contextlib.asynccontextmanager
async def _async_client() -> AsyncIterator[Any]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=os.environ["TEST_API_BASE_URL"], api_key="none") as client:
        yield client


if SUITE == "openai-python":

    @pytest.fixture
    def client(request: pytest.FixtureRequest) -> Iterator[Any]:
        from openai import OpenAI

        with OpenAI(
            base_url=os.environ["TEST_API_BASE_URL"], api_key="none",
            _strict_response_validation=bool(getattr(request, "param", True)),
        ) as client:  # fmt: skip
            yield client

    @pytest.fixture
    def async_client(request: pytest.FixtureRequest) -> None:
        """Made within the test's event loop."""


# vLLM: `tests.utils` starts vLLM's server, and its modules import vLLM


class RemoteOpenAIServer:
    """Serves the default model, or OCTAVO_SUITE_MODEL, under the name that a test asks for."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self, model: str, vllm_serve_args: list[str], *, env_dict: dict[str, str] | None = None, **_: Any
    ) -> None:
        flags = list(map(str, vllm_serve_args))
        if "--dtype" in flags:  # half precision, which CPUs have not: the model's own is taken
            del flags[(at := flags.index("--dtype")) : at + 2]
        if "--served-model-name" not in flags:
            flags += ["--served-model-name", model]
        self._serving = serving(*flags, env=env_dict)

    def __enter__(self) -> RemoteOpenAIServer:
        self.url_root = self._serving.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._serving.__exit__(*error)

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *parts))

    def get_client(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client(self, **options: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `octavo.…` in the place of `vllm.…`, where Octavo has vLLM's path."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "vllm" or importlib.util.find_spec(f"octavo{name[4:]}") is None:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return importlib.import_module(f"octavo{spec.name[4:]}")

    def exec_module(self, module: types.ModuleType) -> None:
        pass


# llama.cpp: its helpers download models, which is not done here


if SUITE == "llama.cpp":
    sys.modules.setdefault("wget", types.ModuleType("wget"))

    def pytest_collection_finish() -> None:
        utils: Any = sys.modules["utils"]
        utils.ServerPreset.load_all = staticmethod(lambda: None)
        for name in ("make_request", "make_stream_request"):  # llama-server has OpenAI's routes without /v1 too
            setattr(utils.ServerProcess, name, _below_v1(getattr(utils.ServerProcess, name)))

    def _below_v1(ask: Any) -> Any:
        def asking(server: Any, method: str, path: str, *more: Any, **options: Any) -> Any:
            is_openai = path.partition("?")[0] in ("/chat/completions", "/completions", "/responses", "/embeddings")
            return ask(server, method, f"/v1{path}" if is_openai else path, *more, **options)

        return asking


if SUITE == "vllm":
    sys.meta_path.append(_Alias())
    utils: Any = types.ModuleType("tests.utils")
    utils.RemoteOpenAIServer = RemoteOpenAIServer
    sys.modules["tests.utils"] = utils
