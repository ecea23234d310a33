"""`scripts/suites`: runs pytest in a checkout of another project, with a plugin that adapts its suite to Octavo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from octavo_suites import free_port, serving

HERE = Path(__file__).resolve().parent
# By suite: the folder where pytest runs, and what it runs.
SUITES = {
    "openai-python": (".", "tests/api_resources"),
    "llama.cpp": ("tools/server/tests", "unit"),
    "transformers": (".", "tests/cli/test_serve.py"),
    "vllm": (".", "tests/entrypoints"),
}
_MODEL = re.compile(r'\b(?:model|MODEL|model_[ab])(?:=| = |": )"([\w.:/-]{1,64})"')


def _files(tests: Path) -> list[Path]:
    return [tests] if tests.is_file() else list(tests.rglob("*.py"))


def main() -> int:
    if len(sys.argv) < 3 or sys.argv[1] not in SUITES:
        print(f"usage: scripts/suites {{{','.join(SUITES)}}} CHECKOUT [pytest arguments]", file=sys.stderr)
        return 2
    suite, checkout, arguments = sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3:]
    folder, tests = SUITES[suite]
    where = checkout / folder
    if not (where / tests).exists():
        print(f"{where / tests} does not exist: {checkout} is no checkout of {suite}.", file=sys.stderr)
        return 2
    env = {**os.environ, "OCTAVO_SUITE": suite, "PORT": str(free_port())}
    env["PYTHONPATH"] = os.pathsep.join([str(where), str(HERE), env.get("PYTHONPATH", "")])
    env["RUN_SLOW"] = "1"  # transformers' tests with a server
    env |= {"LLAMA_SERVER_BIN_PATH": str(HERE / "llama_server.py"), "OCTAVO_SUITE_PYTHON": sys.executable}
    if not any((where / one.partition("::")[0]).exists() for one in arguments if not one.startswith("-")):
        arguments.append(tests)
    # The plugin has the fixtures of openai-python, and those of vLLM's tests that import vLLM.
    fixtures = {"llama.cpp": (), "vllm": (f"--confcutdir={where / tests}",)}.get(suite, ("--noconftest",))
    command = [
        sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(where), "-p", "octavo_suites", "-p",
        "no:cacheprovider", *fixtures, "--continue-on-collection-errors", "-q", "--tb=line", *arguments,
    ]  # fmt: skip
    names = sorted({name for path in _files(where / tests) for name in _MODEL.findall(path.read_text())})
    if suite != "openai-python":  # the others' suites start servers themselves
        return subprocess.run(command, cwd=where, env=env | {"OCTAVO_SUITE_NAMES": " ".join(names)}).returncode
    with serving("--served-model-name", *names) as url:
        return subprocess.run(command, cwd=where, env=env | {"TEST_API_BASE_URL": f"{url}/v1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
