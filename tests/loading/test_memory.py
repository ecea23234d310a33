"""How much memory there is, and whether a model fits."""

from pathlib import Path

import psutil
import pytest

from octavo.errors import LoadError
from octavo.loading import memory
from octavo.loading.memory import GIB, available_memory_bytes, check_fits


def test_a_model_larger_than_memory_is_refused_with_both_sizes() -> None:
    with pytest.raises(LoadError, match=r"needs 129\.46 GiB .* in bfloat16, and 64\.00 GiB are free"):
        check_fits(int(129.46 * GIB), "bfloat16", 64 * GIB)
    check_fits(int(129.46 * GIB), "bfloat16", 130 * GIB)
    check_fits(1 << 20, "float32")


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/pods/a", {"memory.max": "3000", "memory.current": "2000", "memory.stat": "anon 1\ninactive_file 500"}),
        (
            "5:cpu,memory:/pods/a",
            {
                "memory/memory.limit_in_bytes": "3000",
                "memory/memory.usage_in_bytes": "2000",
                "memory/memory.stat": "total_inactive_file 500",
            },
        ),
    ],
)
def test_a_containers_limit_counts_if_it_is_lower_than_the_machines(
    line: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    proc = tmp_path / "proc"
    proc.write_text(f"3:pids:/x\n{line}\n")
    monkeypatch.setattr(memory, "_PROC_CGROUP", proc)
    assert available_memory_bytes(tmp_path) == 3000 - 2000 + 500


def test_without_limits_the_machines_free_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("max")
    monkeypatch.setattr(memory, "_PROC_CGROUP", tmp_path / "none")
    assert 0 < available_memory_bytes(tmp_path) <= psutil.virtual_memory().total
