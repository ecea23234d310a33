"""The engine of a server, be it one or several behind one name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from octavo.config import EngineConfig

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncLLMEngine
    from octavo.engine.core_client import CoreProcess
    from octavo.engine.data_parallel import DataParallelEngine

    EngineClient: TypeAlias = AsyncLLMEngine | DataParallelEngine


def make_engine(config: EngineConfig, *, core: CoreProcess | None = None, **options: Any) -> EngineClient:
    """Return an engine, or several behind one name, as configured. The `options` are those of `AsyncLLMEngine`."""
    ranks = config.served_ranks
    if len(ranks) == 1:
        from octavo.engine.async_engine import AsyncLLMEngine

        return AsyncLLMEngine(config.replica(ranks.start), core=core, **options)
    from octavo.engine.data_parallel import DataParallelEngine

    return DataParallelEngine(config, core=core, **options)
