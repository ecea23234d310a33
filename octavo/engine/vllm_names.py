"""What programs written for vLLM read of an engine, under vLLM's names. All of it follows from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.config import CacheConfig, EngineConfig, LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig
from octavo.speculative_config import SpeculativeConfig


class ConfigNames:
    """Of an engine that has a `config`."""

    if TYPE_CHECKING:

        @property
        def config(self) -> EngineConfig: ...

    @property
    def vllm_config(self) -> EngineConfig:
        """All of it; the groups below are its attributes too."""
        return self.config

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model_config

    @property
    def cache_config(self) -> CacheConfig:
        """With `num_gpu_blocks`, once the engine is ready."""
        return self.config.cache_config

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return self.config.scheduler_config

    @property
    def parallel_config(self) -> ParallelConfig:
        return self.config.parallel_config

    @property
    def lora_config(self) -> LoRAConfig | None:
        return self.config.lora_config

    @property
    def speculative_config(self) -> SpeculativeConfig | None:
        return self.config.speculative_config


class AsyncConfigNames(ConfigNames):
    """With what asynchronous engines are asked by coroutines."""

    async def get_vllm_config(self) -> EngineConfig:
        return self.config

    async def get_model_config(self) -> ModelConfig:
        return self.config.model_config

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self.config.supported_tasks
