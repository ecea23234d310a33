"""Adapters for other projects' suites: a small checkout is run, and what does not apply is counted with its reason."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ADAPTERS = Path(__file__).parents[1] / "scripts" / "suite_adapters"
TESTS = {
    "test_api.py": "from vllm import SamplingParams\n\ndef test_it(): assert SamplingParams(n=1).n == 1\n",
    "test_wrong.py": "def test_it(): assert not 'right'\n",
    "test_within.py": "from vllm.inner.parts import Part\n\ndef test_it(): Part().run()\n",
}


@pytest.mark.long
@pytest.mark.slow
def test_a_checkouts_tests_are_run_and_counted(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "entrypoints"
    folder.mkdir(parents=True)
    for name, text in TESTS.items():
        (folder / name).write_text(text)
    command = [sys.executable, str(ADAPTERS / "run.py"), "vllm", str(tmp_path), "-p", "no:randomly"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "vllm: 1 passed, 1 failed, 0 error, 1 not applicable" in done.stdout, done.stdout + done.stderr
    assert "1 not applicable: tests vLLM from within" in done.stdout


@pytest.mark.long
def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(ADAPTERS / "run.py"), "llama.cpp", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "is no checkout of llama.cpp" in done.stderr


def test_flags_of_a_suite_may_be_spelled_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ADAPTERS)
    suites = importlib.import_module("octavo_suites")
    served = list[str]()
    monkeypatch.setattr(suites, "serving", lambda *flags, env: served.extend(flags))
    suites.RemoteOpenAIServer("a/b", ["--max_model_len=2K", "--max-model-len", 999_999, "--seed", 3, "--dtype=half",
                                      "--served-model-name", "a", "b"])  # fmt: skip
    assert served == [
        "--max-model-len",
        "2K",
        "--seed",
        "3",
        "--unknown-fields",
        "warn",
        "--served-model-name",
        "a",
        "b",
    ]


def test_every_rule_says_why() -> None:
    rules = tomllib.loads((ADAPTERS / "not_applicable.toml").read_text())
    for rule in (rule for suite in rules.values() for rule in suite):
        assert re.compile(rule["tests"]) and rule["why"] and rule.keys() == {"tests", "why"}
