"""What users set (`EngineArgs`, in `engine_args.py`) and what the engine is built from (`EngineConfig`, in
`engine_config.py`).

`creation.py` turns `EngineArgs` into `EngineConfig`: it finds the model, fills in the flags that were left open and
refuses flags that cannot be honoured. Larger groups of flags have modules of their own. Nothing here imports torch.
"""

from octavo.config.engine_args import AsyncEngineArgs, EngineArgs
from octavo.config.engine_config import (
    CacheConfig,
    DiskCacheConfig,
    EngineConfig,
    EngineHostsConfig,
    KVEventsConfig,
    LoRAConfig,
    LoRAModule,
    MediaConfig,
    ModelConfig,
    NodesConfig,
    ParallelConfig,
    PoolerConfig,
    PromptEmbedsConfig,
    SchedulerConfig,
    SoundConfig,
    VideoConfig,
)

VllmConfig = EngineConfig  # vLLM's name

__all__ = [
    "AsyncEngineArgs",
    "CacheConfig",
    "DiskCacheConfig",
    "EngineArgs",
    "EngineConfig",
    "EngineHostsConfig",
    "KVEventsConfig",
    "LoRAConfig",
    "LoRAModule",
    "MediaConfig",
    "ModelConfig",
    "NodesConfig",
    "ParallelConfig",
    "PoolerConfig",
    "PromptEmbedsConfig",
    "SchedulerConfig",
    "SoundConfig",
    "VideoConfig",
    "VllmConfig",
]
