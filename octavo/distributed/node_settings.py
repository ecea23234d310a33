"""Settings that must be equal on all nodes of a group, so that their stages form one model. They include digests of the
checkpoint's configuration and of its tensors' names, types and shapes. The paths of files may differ."""

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.loading.file_weights import tensor_index

# Settings that may differ: paths, settings of a single node or of the front end, and values that a ready engine has
# found.
_OWN = (
    "nodes", "engine_hosts", "cpu_threads", "cpus", "log_stats", "cache.cpu_memory_utilization",
    "cache.gpu_memory_utilization", "cache.memory_bytes", "cache.num_gpu_blocks", "cache.num_cpu_blocks",
    "cache.disk.folder", "model.checkpoint", "model.served_model_names", "model.chat_template", "model.code_folder",
    "model.default_sampling_params", "model.default_max_tokens", "lora.modules", "lora.roots", "lora.download_dir",
    "media",
)  # fmt: skip


def settings_of(config: EngineConfig) -> dict[str, str]:
    """Return the settings by name, such as `scheduler.max_num_seqs`. Raises `LoadError` for files that cannot be
    read."""
    found = {name: _text(value) for name, value in _flat(msgspec.to_builtins(config)) if not _is_own(name)}
    checkpoint = config.model.checkpoint
    found["model.config"] = _digest(checkpoint.config)
    found["model.format"] = checkpoint.format
    found["model.tensors"] = _digest(tensor_index(checkpoint))
    return found


def difference(own: dict[str, str], others: dict[str, str]) -> str | None:
    """Return in words how another node's settings differ from node 0's (`own`); None if they do not."""
    names = [name for name in sorted(own.keys() | others.keys()) if own.get(name) != others.get(name)]
    return "; ".join(f"its {name} is {others.get(name)}, and node 0's {own.get(name)}" for name in names[:4]) or None


def _is_own(name: str) -> bool:
    return any(name == own or name.startswith(f"{own}.") for own in _OWN)


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:16]
