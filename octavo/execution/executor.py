"""Executors stand between the engine core and the devices that run a model.

They load it, size the KV cache by the memory there is, and execute plans: `local_executor` on the processors that
Python runs on as well, `device_executor` on a GPU. Executors over several devices will take the same calls and send the
plan on.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from octavo.config import EngineConfig
from octavo.kv_cache.groups import CacheGroup
from octavo.plan import StepPlan, StepResult


class PendingStep(Protocol):
    """A step that was handed to a device."""

    def result(self) -> StepResult:
        """Wait until it has been computed."""
        ...


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step that was computed while it was handed over."""

    done: StepResult

    def result(self) -> StepResult:
        return self.done


class Executor(Protocol):
    """What the engine core needs of whatever runs the model."""

    runs_ahead: bool  # a step may be submitted before the tokens of the last one are known
    cache_groups: Sequence[CacheGroup]
    num_blocks: list[int]  # by pool
    num_host_blocks: list[int]
    weight_bytes: int  # of the packed matrices
    cache_bytes: int  # of the KV cache, used or not
    startup: dict[str, float]  # seconds by phase

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step; those submitted before it are computed first. Raises `DeviceMemoryError` if there is too little
        memory for it, with nothing lost but this step."""
        ...

    def prepare_grammar(self, grammar: str, eos_token_ids: list[int]) -> Future[None]:
        """Make ready to follow a grammar. Plans may admit sequences that have it when the future is done; it raises
        `RequestError` if the grammar cannot be followed."""
        ...


def create_executor(config: EngineConfig) -> Executor:
    """The executor of `config.device`. Raises `LoadError` or `ConfigError` when model or cache do not fit."""
    if config.device == "cuda":
        from octavo.execution.device import CudaDevice
        from octavo.execution.device_executor import DeviceExecutor, load_ops

        return DeviceExecutor(config, CudaDevice(), load_ops())
    from octavo.execution.local_executor import LocalExecutor

    return LocalExecutor(config)
