"""Makes engines that share a folder on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo.kv_cache import disk_fetches
from octavo.kv_cache.groups import LayerCacheSpec
from tests.kv_cache.disk_engine import FULL, Engine


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(disk_fetches, "_LOOKUP_GRACE_S", 60.0)
    made: list[Engine] = []

    def make(layers: Sequence[LayerCacheSpec] = (FULL,)) -> Engine:
        made.append(Engine(tmp_path, layers))
        return made[-1]

    yield make
    for one in made:
        one.tier.close()
