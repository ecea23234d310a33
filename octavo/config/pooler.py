"""`PoolerConfig` under the name of vLLM's module."""

from __future__ import annotations

from typing import Any


class PoolerConfig(dict[str, Any]):
    """`pooler_config` as vLLM's scripts write it: `PoolerConfig(pooling_type="MEAN")`. The engine checks the fields."""

    def __init__(self, **fields: Any) -> None:
        super().__init__({name: value for name, value in fields.items() if value is not None})
