"""What users set (`EngineArgs`, in `engine_args.py`) and what the engine is built from (`EngineConfig`, in
`engine_config.py`).

`creation.py` goes from one to the other: it finds the model, fills in what was left open and refuses what cannot be
honoured, with a module for each of the groups that take more than a line. Nothing here imports torch.
"""

from octavo.config.engine_args import AsyncEngineArgs, EngineArgs
from octavo.config.engine_config import (
    CacheConfig,
    EngineConfig,
    EngineHostsConfig,
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

VllmConfig = EngineConfig  # as vLLM calls it

__all__ = [
    "AsyncEngineArgs",
    "CacheConfig",
    "EngineArgs",
    "EngineConfig",
    "EngineHostsConfig",
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
