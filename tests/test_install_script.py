"""scripts/install on a machine that lacks something: one sentence says what to install, and nothing broken stays."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = ("bash", "env", "dirname", "basename", "cat", "rm", "ls", "mkdir", "pwd")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a script for bash")


class Machine:
    """A checkout, and a PATH with no more than a few commands and interpreters that behave as told."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.path = folder / "checkout", folder / "bin"
        self.path.mkdir()
        for command in COMMANDS:
            self.path.joinpath(command).symlink_to(str(shutil.which(command)))
        for name in ("scripts/install", "scripts/compile-once", "pyproject.toml", "constraints.txt", "CMakeLists.txt",
                     "octavo/version.py", "csrc/cpu/simd.h"):  # fmt: skip
            (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.checkout / name)

    def program(self, path: Path, script: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def python(self, path: Path, lacks: str = "nothing that it is asked for") -> None:
        """An interpreter that fails wherever its command has these words."""
        self.program(path, f'case "$*" in *"{lacks}"*) exit 1 ;; esac\nexec {sys.executable} "$@"')

    def environment(self, lacks: str = "nothing that it is asked for") -> None:
        """A virtual environment that is there already."""
        self.python(self.checkout / ".venv" / "bin" / "python", lacks)
        (self.checkout / ".venv" / "pyvenv.cfg").touch()

    def install(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {
            name: value for name, value in os.environ.items() if name not in ("VENV", "PYTHON", "CXX", "PYTHONPATH")
        }
        environment["PATH"] = str(self.path)
        command = [str(self.checkout / "scripts" / "install"), *arguments]
        return subprocess.run(command, env=environment, cwd=self.checkout.parent, capture_output=True, text=True)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says what is wrong."""
    assert done.returncode != 0
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_without_a_python_that_is_new_enough(machine: Machine) -> None:
    machine.program(machine.path / "python3", '[ "$1" = --version ] && echo Python 3.10.13 && exit\nexit 1')
    line = refused(machine.install())
    assert line.startswith("octavo: Python 3.11 or later is needed, and Python 3.10.13 is here.")
    assert "apt-get install python3" in line
    assert not (machine.checkout / ".venv").exists()


def test_a_newer_python_beside_an_old_one_is_taken(machine: Machine) -> None:
    machine.program(machine.path / "python3", "exit 1")
    machine.python(machine.path / "python3.12", lacks="ensurepip")
    assert "venv module is missing" in refused(machine.install())


def test_without_venv(machine: Machine) -> None:
    machine.python(machine.path / "python3", lacks="ensurepip")
    assert "apt-get install python3-venv" in refused(machine.install())
    assert not (machine.checkout / ".venv").exists(), "a half-made environment would fail every later run"


def test_an_environment_that_breaks_while_it_is_made_does_not_stay(machine: Machine) -> None:
    script = f'[ "$2" = venv ] && {{ mkdir -p "$3"; exit 1; }}\nexec {sys.executable} "$@"'
    machine.program(machine.path / "python3", script)
    assert "could not be made" in refused(machine.install())
    assert not (machine.checkout / ".venv").exists()


def test_without_a_compiler(machine: Machine) -> None:
    machine.environment()
    assert "apt-get install g++" in refused(machine.install())


def test_without_pythons_headers(machine: Machine) -> None:
    machine.environment(lacks="Python.h")
    machine.program(machine.path / "c++", "exit 1")
    assert "apt-get install python3-dev" in refused(machine.install())


def test_a_folder_that_is_no_environment_is_left_alone(machine: Machine) -> None:
    (machine.checkout / ".venv").mkdir()
    (machine.checkout / ".venv" / "letters").write_text("kept")
    assert "no virtual environment" in refused(machine.install())
    assert (machine.checkout / ".venv" / "letters").read_text() == "kept"


def test_unknown_extras_and_options_are_named(machine: Machine) -> None:
    machine.environment()
    machine.program(machine.path / "c++", "exit 1")
    assert refused(machine.install("--everything")).startswith("scripts/install: unknown option --everything")
    assert "--kernels some is unknown" in refused(machine.install("--kernels", "some"))
    lines = machine.install("tests").stderr.splitlines()
    assert lines[-1].startswith("octavo: there is no extra tests: use some of audio, ")
