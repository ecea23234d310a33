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
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.config.engine_args import num_tokens

SUITE = os.environ.get("OCTAVO_SUITE", "")
_START_S = 120.0
_MODEL_FLAGS = ("--model", model) if (model := os.environ.get("OCTAVO_SUITE_MODEL")) else ()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def serving(*flags: str, env: dict[str, str] | None = None, port: int | None = None) -> Iterator[str]:
    """Serve with `flags`, and yield the address."""
    port = port or free_port()
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
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


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
    """Serves the default model, or OCTAVO_SUITE_MODEL, under the names that a test asks for."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self, model: str, vllm_serve_args: list[str], *, env_dict: dict[str, str] | None = None, **_: Any
    ) -> None:
        flags, names = list[str](), [model]
        for flag, values in _flags_of(vllm_serve_args):
            if flag == "--lora-modules":  # adapters of models that are not here: the model answers to their names
                names += [re.split(r"[=\"]", value)[3 if value.startswith("{") else 0] for value in values]
            elif flag == "--served-model-name":
                names = values
            elif flag == "--max-model-len" and num_tokens(values[0]) > _MAX_POSITIONS:
                continue
            elif flag not in _LEFT_OUT:
                flags += [flag, *values]
        self._serving = serving(*flags, *LIKE_VLLM, "--served-model-name", *names, env=env_dict)

    def __enter__(self) -> RemoteOpenAIServer:
        self.url_root = self._serving.__enter__()
        self.host, self.port = "127.0.0.1", int(self.url_root.rpartition(":")[2])
        return self

    def __exit__(self, *error: Any) -> None:
        self._serving.__exit__(*error)

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *(part.lstrip("/") for part in parts)))

    def get_client(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client(self, **options: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **options)


def _flags_of(words: Iterable[object]) -> list[tuple[str, list[str]]]:
    """Flags as vLLM spells them, each with its values: `--flag value`, `--flag=value`, `--flag` and `--other_flag`."""
    flags = list[tuple[str, list[str]]]()
    for word in map(str, words):
        if word.startswith("--"):
            flag, is_given, value = word.partition("=")
            flags.append((flag.replace("_", "-"), [value] if is_given else []))
        else:
            flags[-1][1].append(word)
    return flags


LIKE_VLLM = ("--unknown-fields", "warn")  # vLLM ignores fields that it does not know
# Flags that fit the model that a test asks for, and not the one that is served; half precision, which CPUs have not;
# and flags whose counterpart is what Octavo does without them.
_LEFT_OUT = frozenset((
    "--dtype", "--enable-lora", "--max-lora-rank", "--max-cpu-loras", "--max-loras", "--chat-template",
    "--gpu-memory-utilization", "--tokenizer", "--tokenizer-mode", "--tensor-parallel-size", "--quantization",
    "--reasoning-parser", "--tool-call-parser", "--attention-backend", "--trust-remote-code", "--revision",
    "--enable-per-request-metrics", "--limit-mm-per-prompt", "--port", "--reasoning-config",
    "--structured-outputs-config.backend", "--watermark-config", "--chat-template-content-format",
))  # fmt: skip


_MAX_POSITIONS = 8192  # of the default model


class _Within(type):
    """The class of what only vLLM has. Names may be imported, and taken from each other; a test that uses one is
    skipped."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _within(name)

    def __call__(cls, *_: object, **__: object) -> Any:
        pytest.skip(WITHIN, allow_module_level=True)

    __add__ = __radd__ = __getitem__ = __iter__ = __len__ = __call__


WITHIN = "not applicable: tests vLLM from within"


def _within(name: str) -> Any:
    return _Within(name, (Exception,), {})  # some are raised


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `octavo.…` in the place of `vllm.…`, where Octavo has vLLM's path; elsewhere names of what only vLLM
    has. Helpers of the suite that need vLLM are such names too."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in _ITS_PACKAGES and name not in _HELPER_MODULES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        made, name = types.ModuleType(spec.name), f"octavo{spec.name[4:]}"
        try:
            known: Any = importlib.import_module(name) if spec.name.startswith("vllm") else None
        except ImportError as error:  # Octavo names paths of vLLM that it does not have
            if error.name is None or not (name + ".").startswith(error.name + "."):
                raise  # a module of Octavo's lacks one
            known = None

        def find(attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            if attribute in _HELPERS.get(spec.name, ()):
                return _HELPERS[spec.name][attribute]
            return getattr(known, attribute) if hasattr(known, attribute) else _within(attribute)

        made.__dict__["__getattr__"] = find
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _served_tokenizer(*_: object, **__: object) -> Any:
    from octavo.compat.get_tokenizer import get_tokenizer
    from octavo.loading.default_model import fetch_default_model

    return get_tokenizer(os.environ.get("OCTAVO_SUITE_MODEL") or str(fetch_default_model()))


def _skipped(*_: object, **__: object) -> Any:
    return pytest.mark.skip(reason="not applicable: needs GPUs")


_ITS_PACKAGES = ("vllm", "openai_harmony", "lm_eval", "pybase64")
_HELPER_MODULES = ("tests.conftest", "tests.models.utils", "tests.utils")
_HELPERS: dict[str, dict[str, Any]] = {
    "tests.utils": {
        "RemoteOpenAIServer": RemoteOpenAIServer,
        "ROCM_EXTRA_ARGS": [],
        "ROCM_ENV_OVERRIDES": {},
        "VLLM_PATH": Path.cwd(),
        "large_gpu_mark": _skipped,
        "multi_gpu_only": _skipped,
        "requires_fp8": _skipped(),
    },
    "vllm.config": {"ModelConfig": _within("ModelConfig")},
    "vllm.platforms": {"current_platform": types.SimpleNamespace(**{
        name: lambda *_: False for name in ("is_rocm", "is_cuda", "is_tpu", "is_xpu", "is_cuda_alike")
    }, is_cpu=lambda: True)},
    "vllm.tokenizers": {"get_tokenizer": _served_tokenizer},
    "vllm.transformers_utils.repo_utils": {
        "hf_api": lambda: types.SimpleNamespace(snapshot_download=lambda *_, **__: "adapters-are-not-fetched")
    },
}  # fmt: skip


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


# transformers: its tests start its server in their own process


class Serve:
    def __init__(self, *, port: int, **_: Any) -> None:
        self._serving = serving("--served-model-name", *os.environ["OCTAVO_SUITE_NAMES"].split(), port=port)
        self._serving.__enter__()

    def kill_server(self) -> None:
        self._serving.__exit__(None, None, None)

    def reset_loaded_models(self) -> None:
        """Its model stays."""


if SUITE == "transformers":
    import transformers.cli.serve

    transformers.cli.serve.Serve = Serve  # type: ignore[assignment, misc]

if SUITE == "vllm":
    sys.meta_path.insert(0, _Alias())
