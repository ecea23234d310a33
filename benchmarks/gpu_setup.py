"""Makes ready what `scripts/gpu-check` needs on a machine with a GPU, or packs it for one without a network.

    python benchmarks/gpu_setup.py pack [PYTHON_VERSION]    on a machine with a network, which needs no GPU
    python benchmarks/gpu_setup.py kernels [CAPABILITY ...] by a Python and a Triton of that machine's versions
    python benchmarks/gpu_setup.py prepare                  by `scripts/gpu-check`, in its virtual environment

torch, Triton and transformers, and what these bring, must be there: they are large, and their builds are the machine's
matter; but models are made by the transformers that Octavo is tested with, which knows the newest. Everything else
comes out of `.gpu-wheels` in the checkout, if that is there, or from the package index. A pack has wheels for one
version of Python on Linux and x86-64, and Octavo's own, for the native module in it: the engine core imports that, and
answers are compared with its kernels'.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACK = ROOT / ".gpu-wheels"
ARCHIVE = PACK / "kernels.tar.gz"
MOST_BYTES = 48 << 20  # of a pack: machines are lent that take 64 MiB beside a command, the checkout included
_BROUGHT = ("tokenizers", "huggingface-hub", "numpy", "jinja2")  # by torch and transformers
_OF_TRANSFORMERS = ("transformers", "tokenizers", "huggingface-hub", "safetensors")  # that go together
_TESTS = ("pytest>=9.0", "pytest-timeout>=2.4", "pytest-xdist>=3.8", "hypothesis>=6.150")
_BUILD = ("scikit-build-core>=0.11", "nanobind>=2.9", "ninja")


def _project() -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def needed() -> list[str]:
    """Requirements of Octavo and of its tests of kernels, beyond what torch and transformers bring."""
    own: list[str] = _project()["dependencies"]  # type: ignore[assignment]
    return [*(one for one in own if _name(one) not in _BROUGHT), *_TESTS, f"transformers>={_tested('transformers')}"]


def _tested(package: str) -> str:
    """The version of a package that Octavo is tested with."""
    found = re.search(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def expected() -> list[str]:
    """What must be there before."""
    extras: dict[str, list[str]] = _project()["optional-dependencies"]  # type: ignore[assignment]
    own: list[str] = _project()["dependencies"]  # type: ignore[assignment]
    return [*extras["cuda"], extras["transformers"][1], *(one for one in own if _name(one) in _BROUGHT)]


def missing(requirements: Iterable[str]) -> list[str]:
    """Those that this interpreter's packages do not meet."""
    from pip._vendor.packaging.requirements import Requirement

    found = []
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(text)
            continue
        if not wanted.specifier.contains(version.split("+")[0], prereleases=True):
            found.append(text)
    return found


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return found[0].lower()


def pack(version: str) -> int:
    """Fill `PACK` for that version of Python."""
    shutil.rmtree(PACK, ignore_errors=True)
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(35, 16, -1)] + ["manylinux2014_x86_64"]
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(PACK)]
    fetch += ["--only-binary", ":all:", "--python-version", version, "--implementation", "cp"]
    fetch += ["--constraint", str(ROOT / "constraints.txt"), *(f"--platform={each}" for each in platforms)]
    # What each of these depends on comes with it, in the version that it wants; but not numpy, and what it brings.
    alone = ("ml-dtypes", *_OF_TRANSFORMERS)
    requirements = [one.split(";")[0].strip() for one in (*needed(), *_BUILD)]
    subprocess.run([*fetch, *(one for one in requirements if _name(one) not in alone)], check=True)
    subprocess.run([*fetch, "--no-deps", *alone], check=True)
    _pack_kernels(version)
    num_bytes = sum(file.stat().st_size for file in PACK.iterdir())
    print(f"{PACK}: {len(list(PACK.iterdir()))} wheels, {num_bytes / (1 << 20):.1f} MiB")
    if num_bytes > MOST_BYTES:
        print(f"gpu-check: that is more than {MOST_BYTES >> 20} MiB", file=sys.stderr)
    return int(num_bytes > MOST_BYTES)


def _pack_kernels(version: str) -> None:
    """Octavo's wheel, with the kernels of every processor: the GPU's machine has another one."""
    is_own = version == f"{sys.version_info.major}.{sys.version_info.minor}"
    if (python := sys.executable if is_own else shutil.which(f"python{version}")) is None:
        print(f"gpu-check: there is no python{version}; the native module will be compiled there", file=sys.stderr)
        return
    build = [python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*build, "--wheel-dir", str(PACK), str(ROOT)], check=False)
    if done.returncode:
        print("gpu-check: Octavo's wheel could not be built; the native module will be compiled there", file=sys.stderr)


def pack_archive(capabilities: list[str]) -> int:
    """Compile the kernels of the check's 8B, in each kind of weights, into the pack."""
    from gpu_limits import LLAMA_3_1_8B

    PACK.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
        command = [sys.executable, "-m", "octavo.entrypoints.cli.main", "kernels", folder, "--tokenizer", folder]
        sizes = {"--max-model-len": 8192, "--max-num-batched-tokens": 8192, "--max-num-seqs": 256}
        command += [str(each) for size in sizes.items() for each in size]
        command += ["--load-format", "dummy", "--also", "fp8", "--also", "int4", "--output", str(ARCHIVE)]
        return subprocess.run([*command, "--capability", *(capabilities or ["9.0"])], check=False).returncode


def prepare() -> int:
    """In the virtual environment of a GPU's machine: install what is missing."""
    if lacking := missing(expected()):
        print(f"gpu-check: PYTHON does not have {', '.join(lacking)}; set PYTHON to one that has", file=sys.stderr)
        return 1
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    source = ["--no-index", "--find-links", str(PACK)] if PACK.exists() else []
    if lacking := missing(needed()):
        done = subprocess.run([*install, *source, *lacking], check=False)
        of_tests = {_name(one) for one in (*_TESTS, "transformers")}
        if done.returncode and any(_name(one) not in of_tests for one in missing(needed())):
            print(
                f"gpu-check: {', '.join(lacking)} could not be installed; without a network, run "
                "`scripts/gpu-check --pack` on another machine and bring .gpu-wheels",
                file=sys.stderr,
            )
            return 1
        if done.returncode:
            print(f"gpu-check: only quick can run: {', '.join(lacking)} could not be installed", file=sys.stderr)
    for wheel in PACK.glob("octavo-*.whl"):
        take_kernels(wheel)
    if importlib.util.find_spec("octavo._cpu") is None:
        if lacking := missing(_BUILD):
            subprocess.run([*install, *source, *lacking], check=True)
        # This machine's kernels alone, which is a third of the work.
        build = ["--no-deps", "--no-build-isolation", "--config-settings=cmake.define.OCTAVO_HOST_ONLY=ON"]
        subprocess.run([*install, *build, "--no-index", "--editable", str(ROOT)], check=True)
    return 0


def take_kernels(wheel: Path, folder: Path = ROOT) -> None:
    """Put the native module of Octavo's wheel beside its sources, where that of a wheel's Python is imported."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"octavo/_cpu[\w.-]*\.so", name):
                archive.extract(name, folder)


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "kernels":
        sys.exit(pack_archive(rest))
    sys.exit(pack(*rest or ["3.12"]) if command == "pack" else prepare())
