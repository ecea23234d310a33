"""What compiles kernels ahead builds their launchers too."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.ops.triton import outline


def test_launchers_are_built_in_the_threads_that_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, Any, Any]] = []

    def build(src: Any, metadata: Any) -> None:
        built.append((threading.current_thread().name, src, metadata))

    monkeypatch.setattr(outline, "driver", SimpleNamespace(active=SimpleNamespace(launcher_cls=build)))
    kernel = SimpleNamespace(src="source", metadata="metadata")
    with outline._Compilers(2, thread_name_prefix="compiler") as pool:
        assert pool.submit(lambda: kernel).result() is kernel
    assert [(src, metadata) for _, src, metadata in built] == [("source", "metadata")]
    assert built[0][0].startswith("compiler")


def test_a_launcher_that_cannot_be_built_is_the_kernels_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(src: Any, metadata: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(outline, "driver", SimpleNamespace(active=SimpleNamespace(launcher_cls=build)))
    with outline._Compilers(1) as pool, pytest.raises(RuntimeError, match="C compiler"):
        pool.submit(lambda: SimpleNamespace(src="", metadata="")).result()
