"""Measures the memory that this process can still get, and refuses models that need more."""

from collections.abc import Iterator
from pathlib import Path

from octavo.errors import LoadError

GIB = 1 << 30
_PROC_CGROUP = Path("/proc/self/cgroup")


def check_fits(num_bytes: int, kind: str, available_bytes: int | None = None) -> None:
    """Raise `LoadError` if a model's weights need more than `available_bytes`; None: the memory that this process can
    still get. The weights have `num_bytes` in the formats `kind`, both from `RecordingWeights.packed_bytes`."""
    available = available_memory_bytes() if available_bytes is None else available_bytes
    if num_bytes > available:
        raise LoadError(
            f"the model needs {num_bytes / GIB:.2f} GiB of memory for its weights in {kind}, "
            f"and {available / GIB:.2f} GiB are free; free some, choose a smaller --dtype or a smaller model."
        )


def available_memory_bytes(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of RAM that this process can still get: the machine's free memory, or the rest of its
    container's allowance if this is less."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_cgroup_rooms(cgroup_root)])


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Yield the bytes left under each memory limit above this process, in cgroup version 2 or 1. Yields nothing outside
    of Linux."""
    for controllers, base in (("", root), ("memory", root / "memory")):
        limit, usage, cached = _MEMORY_FILES[controllers]
        for group in own_groups(base, controllers):
            try:
                allowed = int((group / limit).read_text())  # "max", for no limit, raises `ValueError`
                stat = dict(entry.split() for entry in (group / "memory.stat").read_text().splitlines())
                # Cached pages of files count as used, but the system frees them when memory is needed.
                yield max(0, allowed - int((group / usage).read_text()) + int(stat.get(cached, 0)))
            except (OSError, ValueError):
                continue


_MEMORY_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def own_groups(base: Path, controller: str = "") -> Iterator[Path]:
    """Yield the folders below `base` of this process's control groups: version 2's, or with `controller` version 1's.
    Inside a container the path is often the host's, and only the root of the mount exists."""
    try:
        lines = _PROC_CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = base / path.lstrip("/")
            yield from (group for group in (own, *own.parents) if group.is_relative_to(base))
