"""The fingerprint of a KV cache: a hash of everything, beside a prompt, that decides the bits of a cached block.

It names the folder of blocks on disk. A superfluous part only hides blocks of other servers; a missing part would give
wrong blocks.
"""

from __future__ import annotations

import hashlib
import json
import platform
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from octavo.config import DiskCacheConfig, EngineConfig, ModelConfig
from octavo.errors import ConfigError
from octavo.kv_cache.block_files import check_folder, notes_folder
from octavo.kv_cache.groups import CacheGroup
from octavo.loading.weight_identity import weight_identity
from octavo.version import __version__

# Packages of Octavo whose code decides what a step computes.
_COMPUTING = ("execution", "kv_cache", "layers", "loading", "lora", "models", "multimodal", "ops", "quantization")
_MEDIA_LIMITS = {
    "folder", "max_count", "max_bytes", "cache_tokens", "kept_bytes", "adapter", "allowed_folder", "allowed_domains",
    "allows_private", "fetch_timeout_s", "max_redirects",
}  # fmt: skip


def model_identity(model: ModelConfig, notes: Path) -> str:
    """Return the hash of a model's files. Those that `notes` has are not read again. Raises `ConfigError`."""
    checkpoint = model.checkpoint
    files = [*checkpoint.weight_files, *checkpoint.module_files.values()]
    try:
        return weight_identity(files, notes)
    except OSError as e:
        raise ConfigError(f"--kv-cache-disk reads the model's files, and {e.filename}: {e.strerror}.") from None


def identify_weights(config: EngineConfig, disk: DiskCacheConfig) -> Future[list[str]]:
    """Start to hash the files of the model and of its draft model. Raises `ConfigError` if the folder cannot be
    used."""
    check_folder(disk.folder)
    found = Future[list[str]]()
    models = [config.model] if config.draft is None else [config.model, config.draft]

    def identify() -> None:
        try:
            found.set_result([model_identity(model, notes_folder(disk.folder)) for model in models])
        except Exception as e:
            found.set_exception(e)

    # A daemon: where the model cannot be loaded, the process ends at once.
    threading.Thread(target=identify, name="weight-identity", daemon=True).start()
    return found


def node_identity(weights: str) -> str:
    """Return a hash of what decides the bits of a node's part of a block and may differ from other nodes: the model's
    files, whose `model_identity` is `weights`, and the installed software."""
    packages = ("numpy", "ml_dtypes", "torch", "triton", "transformers")
    facts = [weights, _code_hash(), *(_version(package) for package in packages)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def cache_fingerprint(
    config: EngineConfig, weights: Sequence[str], groups: Sequence[CacheGroup], block_bytes: Sequence[int],
    max_model_len: int, hardware: Sequence[str], other_nodes: Sequence[str] = (),
) -> bytes:  # fmt: skip
    """Return the fingerprint, 16 bytes. `weights` are the `model_identity` of the model and of its draft model,
    `block_bytes` are by pool, `hardware` is by worker, and `other_nodes` are their `node_identity`."""
    model, cache, draft = config.model, config.cache, config.draft
    facts: dict[str, Any] = {
        "code": _code_hash(),
        "machine": [platform.machine(), config.device, *hardware],
        "versions": [__version__, _version("numpy"), _version("ml_dtypes")],
        "model": _facts_of(model, weights[0]),
        "cache_dtype": cache.dtype,
        "lengths": [max_model_len, cache.block_size],
        "groups": [repr(group) for group in groups],
        "block_bytes": list(block_bytes),
        "pooling": repr(model.pooling),
    }
    if config.tensor_parallel_size > 1:
        facts["workers"] = config.tensor_parallel_size  # sums over several workers round differently
    if set(other_nodes) - {node_identity(weights[0])}:
        facts["nodes"] = list(other_nodes)
    if config.pipeline_parallel_size > 1:  # a block has the stages' parts side by side
        facts["stages"] = [config.pipeline_parallel_size, config.pipeline_layer_partition]
    uses_torch = model.impl == "transformers"
    if draft is not None and config.speculative is not None and config.speculative.method != "medusa":
        facts["draft"] = [config.speculative.method, _facts_of(draft, weights[1])]  # a block has its part too
        uses_torch |= draft.impl == "transformers"
    if config.lora is not None:
        facts["adapters"] = [config.lora.dtype, config.lora.target_modules]
    for name, media in (("media", config.media), ("sound", config.sound), ("prompt_embeds", config.prompt_embeds)):
        if media is not None:
            uses_torch = True
            facts[name] = {key: value for key, value in asdict(media).items() if key not in _MEDIA_LIMITS}
            if folder := getattr(media, "folder", None):
                facts[f"{name} processor"] = _hash_of_files(Path(folder), "*.json")
    if config.device == "cuda":
        facts["kernels"] = [_version("torch"), _version("triton")]
    if uses_torch:  # its sums depend on the number of threads
        facts["torch"] = [_version("torch"), _version("transformers"), config.cpu_threads]
    data = json.dumps(facts, sort_keys=True, default=repr).encode()
    return hashlib.sha256(data).digest()[:16]


def _facts_of(model: ModelConfig, weights: str) -> dict[str, Any]:
    has_code = model.impl == "transformers" and model.code_folder is not None
    return {
        "weights": weights,
        "format": model.checkpoint.format,
        "config": model.checkpoint.config,
        "seed": model.seed if model.checkpoint.format == "dummy" else None,
        "types": [model.dtype, model.quantization, model.num_precise_layers],
        "impl": model.impl,
        "code": _hash_of_files(Path(str(model.code_folder)), "*.py") if has_code else None,
    }


def _code_hash() -> str:
    """Return a hash of the code that computes: kernels, and the Python code that calls them."""
    root = Path(__file__).parents[1]
    digests = [_hash_of_files(root / package, "*.py") for package in _COMPUTING]
    return "".join([*digests, _hash_of_files(root, "_cpu*.so")])


def _hash_of_files(folder: Path, pattern: str) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.rglob(pattern)):
        if file.is_file():
            content = file.read_bytes()
            digest.update(f"{file.relative_to(folder)} {len(content)} ".encode())
            digest.update(content)
    return digest.hexdigest()[:32]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
