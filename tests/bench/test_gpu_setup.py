"""A machine with a GPU is made ready out of a pack: what is missing there, and what comes out of it."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_setup", ROOT / "benchmarks" / "gpu_setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_everything_that_octavo_requires_is_there_before_or_packed(setup: ModuleType) -> None:
    requirements: list[str] = setup._project()["dependencies"]
    assert {*requirements} <= {*setup.needed(), *setup.expected()}
    brought = [setup._name(one) for one in setup.expected()]
    assert brought[:3] == ["torch", "triton", "transformers"] and "numpy" in brought
    assert {*brought} & {setup._name(one) for one in setup.needed()} == {"transformers"}, "in another version"


def test_missing_is_what_is_not_there_or_too_old(setup: ModuleType) -> None:
    pytest.importorskip("pip")
    wanted = ["msgspec>=0.1", "msgspec>=99", "no-such-package-at-all", f'msgspec>=99; python_version < "{3}.1"']
    assert setup.missing(wanted) == ["msgspec>=99", "no-such-package-at-all"]
    assert setup.missing([f"torch>={version('torch').split('+')[0]}"]) == [], "builds of a version are that version"


def test_of_octavos_wheel_its_native_module_is_taken(setup: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "octavo-1.0-cp312-cp312-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("octavo/_cpu.cpython-312-x86_64-linux-gnu.so", "octavo/request.py", "octavo-1.0.dist-info/RECORD"):
            archive.writestr(name, name)
    setup.take_kernels(wheel, tmp_path / "there")
    found = [file.relative_to(tmp_path / "there").as_posix() for file in (tmp_path / "there").rglob("*.*")]
    assert found == ["octavo/_cpu.cpython-312-x86_64-linux-gnu.so"]


def test_preparing_needs_a_python_that_has_torch(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "expected", lambda: ["torch>=99"])
    assert setup.prepare() == 1
    assert "PYTHON does not have torch>=99" in capsys.readouterr().err


def test_what_is_missing_is_installed_from_the_pack_alone_where_there_is_one(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(setup, "expected", lambda: [])
    monkeypatch.setattr(setup, "needed", lambda: ["no-such-package-at-all>=1", "msgspec>=0.1"])
    monkeypatch.setattr(setup, "PACK", tmp_path / "none")

    def run(command: list[str], check: bool) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(setup.subprocess, "run", run)
    assert setup.prepare() == 0
    monkeypatch.setattr(setup, "PACK", tmp_path)
    assert setup.prepare() == 0
    assert [command[0] for command in commands] == [sys.executable] * 2
    assert commands[0][-1] == commands[1][-1] == "no-such-package-at-all>=1", "msgspec is there"
    assert "--no-index" not in commands[0]
    assert commands[1][-4:-1] == ["--no-index", "--find-links", str(tmp_path)]


@pytest.mark.parametrize(
    ("package", "status", "told"),
    [
        ("no-such-package-at-all", 1, "run `scripts/gpu-check --pack` on another machine"),
        ("hypothesis", 0, "only quick can run: hypothesis>=99 could not be installed"),
    ],
)
def test_where_nothing_can_be_installed_quick_still_runs(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str, status: int,
    told: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(setup, "expected", lambda: [])
    monkeypatch.setattr(setup, "needed", lambda: [f"{package}>=99"])
    monkeypatch.setattr(setup.subprocess, "run", lambda command, check: SimpleNamespace(returncode=1))
    assert setup.prepare() == status
    assert told in capsys.readouterr().err
