"""The models on this machine: the default model, the hub's cache, and folders of GGUF files.

`octavo list`, `rm` and the gateway read folders here; nothing asks the hub.
"""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import LoadError
from octavo.loading.default_model import DEFAULT_MODEL_NAME, default_model_path
from octavo.loading.weight_files import complete_shards, gguf_parts, pick_weights

_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_\w+)?|BF16|F16|F32|FP16|FP32))(?=[-._])", re.I
)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model whose files are here. `path` is what `octavo serve` takes; `aliases` are other names. `repo` is its
    folder in the hub's cache."""

    name: str
    path: str
    files: tuple[str, ...]  # of weights
    aliases: tuple[str, ...] = ()
    repo: str | None = None

    @property
    def num_bytes(self) -> int:
        return sum(os.path.getsize(file) for file in self.files)

    @property
    def modified(self) -> float:
        return max(os.path.getmtime(file) for file in self.files)


def hub_cache() -> Path:
    """Return the hub's cache folder, by the variables that `huggingface_hub` reads and TRANSFORMERS_CACHE."""
    for name in ("TRANSFORMERS_CACHE", "HF_HUB_CACHE"):
        if given := os.environ.get(name):
            return Path(os.path.expandvars(given)).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(base, "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def quantization_in(file_name: str) -> str | None:
    """Return the quantization that a GGUF file's name ends with, such as Q4_K_M, or None."""
    found = _QUANTIZATION.findall(file_name)
    return found[-1].upper() if found else None


def local_models(folders: Iterable[str] = ()) -> list[LocalModel]:
    """Return the models of the hub's cache, of folders of GGUF files, and the default model if it is here."""
    default = default_model_path()
    found = [LocalModel(DEFAULT_MODEL_NAME, DEFAULT_MODEL_NAME, (str(default),))] if default.is_file() else []
    for repo in sorted(hub_cache().glob("models--*")):
        found += _of_repo(repo)
    for folder in folders:
        found += _of_folder(Path(folder))
    return list({model.name: model for model in reversed(found)}.values())[::-1]


def find_local(name: str, models: Sequence[LocalModel]) -> LocalModel | None:
    """Return the model with this name or alias, in any letter case, or None."""
    for model in models:
        if name.lower() in (known.lower() for known in (model.name, *model.aliases)):
            return model
    return None


def remove(model: LocalModel) -> None:
    """Delete a model's files. Its folder in the hub's cache goes with the last model in it. Raises `LoadError`."""
    try:
        if model.repo is None:
            for file in model.files:
                os.unlink(file)
            return
        others = {file for other in _of_repo(Path(model.repo)) if other.name != model.name for file in other.files}
        if not others:
            shutil.rmtree(model.repo)
            return
        kept = {os.path.realpath(file) for file in others}
        for file in model.files:
            blob = os.path.realpath(file)
            os.unlink(file)
            if blob not in kept and blob != os.path.abspath(file):
                os.unlink(blob)
    except OSError as error:
        raise LoadError(f"{model.name} cannot be deleted: {error}.") from None


def _of_repo(repo: Path) -> Iterator[LocalModel]:
    """Yield the complete models of a repository in the hub's cache, of its main revision or its newest one."""
    name = "/".join(repo.name.split("--", 2)[1:])
    try:
        snapshot = repo / "snapshots" / (repo / "refs" / "main").read_text(encoding="utf-8").strip()
        if not snapshot.is_dir():
            raise FileNotFoundError
    except OSError:
        snapshots = sorted((repo / "snapshots").glob("*"), key=os.path.getmtime)
        if not snapshots:
            return
        snapshot = snapshots[-1]
    names = [entry.name for entry in snapshot.iterdir() if entry.is_file()]
    file_format, weights = pick_weights(names, "auto")
    if file_format in ("safetensors", "pt"):
        if "config.json" not in names:
            return
        try:
            shards = complete_shards(str(snapshot), file_format, weights)
        except LoadError:  # its download was cut off
            return
        yield LocalModel(name, str(snapshot), tuple(str(snapshot / file) for file in shards), repo=str(repo))
        return
    whole = [(first, parts) for first in weights if _is_whole(first, parts := gguf_parts(first, names))]
    labels = [quantization_in(first) for first, _ in whole]
    for (first, parts), label in zip(whole, labels, strict=True):
        tag = label if label is not None and labels.count(label) == 1 else first
        aliases = (name,) if len(whole) == 1 else ()
        files = tuple(str(snapshot / part) for part in parts)
        yield LocalModel(f"{name}:{tag}", str(snapshot / first), files, aliases, str(repo))


def _of_folder(folder: Path) -> Iterator[LocalModel]:
    for place, _, names in sorted(os.walk(folder)):
        _, firsts = pick_weights(names, "gguf")
        for first in firsts:
            path = Path(place, first)
            if not first.startswith("mmproj") and _is_whole(first, parts := gguf_parts(first, names)):
                name = path.relative_to(folder).as_posix().removesuffix(".gguf")
                yield LocalModel(name, str(path), tuple(str(Path(place, part)) for part in parts))


def _is_whole(first: str, parts: Sequence[str]) -> bool:
    """Return whether all parts of a GGUF model are there, as the name of the first says."""
    count = re.search(r"-of-(\d{5})\.gguf$", first)
    return count is None or len(parts) == int(count[1])
