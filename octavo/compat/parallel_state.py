"""What scripts for vLLM call when they have deleted an engine. Nothing global outlives one here; but its parts refer to
each other, so that their memory comes back with a collection, which each of these is."""

from __future__ import annotations

import gc
import sys


def destroy_model_parallel() -> None:
    """Free the memory of engines that have been deleted."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def destroy_distributed_environment() -> None:
    """The same."""
    destroy_model_parallel()


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """The same, and end this process's connection to Ray, if that is asked for."""
    destroy_model_parallel()
    ray = sys.modules.get("ray")
    if shutdown_ray and ray is not None:
        ray.shutdown()
