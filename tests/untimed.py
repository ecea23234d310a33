"""Engine cores in which no clock has a say: what they schedule, and what is counted of it, is the same in every run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from octavo.engine.core import EngineCore
from octavo.execution.executor import MultiprocExecutor


def without_time(core: EngineCore) -> EngineCore:
    """The core, whose steps take what they were expected to, and whose grammars, media and adapters are there when they
    are asked for; but for adapters of several workers, who may hear of them only when the step under way has ended."""

    def at_once(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_now(*asked: Any) -> Any:
            prepared = prepare(*asked)
            wait([prepared] if isinstance(prepared, Future) else prepared or [])
            return prepared

        return prepare_now

    executor = core.executor
    executor.prepare_grammar = at_once(executor.prepare_grammar)  # type: ignore[method-assign]
    executor.prepare_media = at_once(executor.prepare_media)  # type: ignore[method-assign]
    if not isinstance(executor, MultiprocExecutor):
        executor.prepare_adapter = at_once(executor.prepare_adapter)  # type: ignore[method-assign]
    core.cost.observe = lambda *measured: None  # type: ignore[method-assign]
    return core
