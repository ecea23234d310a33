"""What a release is made of: the sdist's contents, and the workflow that builds and publishes it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE = ROOT / ".github" / "workflows" / "release.yml"
MAX_SDIST_BYTES, MAX_FILE_BYTES = 3_000_000, 500_000


def test_the_lock_file_names_every_package_that_is_installed() -> None:
    """Those of the environment that scripts/install makes; pip and what each build of torch brings aside."""
    ways = [("octavo", extra) for extra in ("", "test", "dev", "docs")]
    for name, extra in ways:  # grows
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for text in importlib.metadata.requires(name) or ():
                requirement = Requirement(text)
                if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                    new = [(canonicalize_name(requirement.name), each) for each in ("", *requirement.extras)]
                    ways += [way for way in new if way not in ways]
    installed = {canonicalize_name(str(each.metadata["Name"])) for each in importlib.metadata.distributions()}
    required = {name for name, _ in ways} & installed - {"octavo", "triton"}
    assert len(required) > 60
    lock = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lock if "==" in line}
    assert all("==" in line for line in lock)
    assert not {name for name in required if not name.startswith("nvidia-")} - pinned


@pytest.mark.long
def test_the_sdist_has_what_a_build_needs_and_nothing_large(tmp_path: Path) -> None:
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("octavo-*.tar.gz")
    with tarfile.open(path) as sdist:
        sizes = {member.name.partition("/")[2]: member.size for member in sdist.getmembers() if member.isfile()}
    wanted = {"CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "octavo/py.typed"}
    for folder, _, files in os.walk(ROOT / "csrc"):
        wanted |= {str((Path(folder) / name).relative_to(ROOT)) for name in files}
    for file in (ROOT / "octavo").rglob("*.py"):
        wanted.add(str(file.relative_to(ROOT)))
    assert not wanted - sizes.keys()
    assert not [name for name in sizes if name.startswith(".") or name.endswith((".so", ".pyc"))]
    assert path.stat().st_size < MAX_SDIST_BYTES
    assert not {name: size for name, size in sizes.items() if size > MAX_FILE_BYTES}


def test_workflows_keep_githubs_schema() -> None:
    check = Path(sys.executable).parent / "check-jsonschema"
    command = [str(check), "--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_and_tools_of_workflows_are_pinned(path: Path) -> None:
    text = path.read_text()
    jobs = yaml.safe_load(text)["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.search(re.escape(action) + r" # v\d+\.\d+\.\d+$", text, re.MULTILINE), f"the version of {action}"
    installed = [word for step in steps for word in re.findall(r"pip install (\S+)", step.get("run", ""))]
    assert all("==" in word or word.startswith("dist/") for word in installed), installed
    writers = {name: job["if"] for name, job in jobs.items() if "write" in str(job.get("permissions"))}
    assert writers == ({"publish": "github.ref_type == 'tag'"} if path == RELEASE else {})


def test_wheels_are_built_and_tried_for_every_python_that_is_supported() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    oldest = int(settings["project"]["requires-python"].removeprefix(">=3."))
    built = settings["tool"]["cibuildwheel"]["build"]
    assert built == [f"cp3{minor}-*" for minor in range(oldest, oldest + len(built))]
    tried = yaml.safe_load(RELEASE.read_text())["jobs"]["answers"]["strategy"]["matrix"]["python"]
    assert [f"cp{version.replace('.', '')}-*" for version in tried] == [built[0], built[-1]]


def test_everything_that_is_installed_with_octavo_has_a_licence_that_may_be() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "licenses"), "transformers", "vision", "audio"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^\| ([a-z0-9.-]+) \| \S+ \| (.+) \|$", done.stdout, re.MULTILINE))
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    named = {re.split(r"[^\w-]", text)[0].lower().replace("_", "-") for text in requirements if "win32" not in text}
    assert named <= rows.keys()
    assert {"starlette", "torch", "pillow"} <= rows.keys(), "what those require, and what extras bring"


@pytest.mark.parametrize(
    ("licence", "may_be"),
    [
        ("MIT", True), ("MPL-2.0 AND MIT", True), ("LGPL-3.0-or-later", True),
        ("GNU Library or Lesser General Public License (LGPL)", True), ("GPL-3.0-or-later", False),
        ("GNU General Public License v3 (GPLv3)", False), ("AGPL-3.0-only", False), ("", False),
    ],
)  # fmt: skip
def test_licences_that_would_bind_a_program_are_refused(licence: str, may_be: bool) -> None:
    path = str(ROOT / "scripts" / "licenses")
    assert (runpy.run_path(path)["faults"]({"package": licence}) == []) == may_be
