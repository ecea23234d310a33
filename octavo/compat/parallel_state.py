"""Functions that scripts for vLLM call after they have deleted an engine. Octavo keeps nothing global. An engine's
parts refer to each other, so a garbage collection frees their memory: each of these functions runs one."""

import gc
import sys


def destroy_model_parallel() -> None:
    """Free the memory of engines that have been deleted."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def destroy_distributed_environment() -> None:
    """Do what `destroy_model_parallel` does."""
    destroy_model_parallel()


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Do what `destroy_model_parallel` does. With `shutdown_ray` also end this process's connection to Ray."""
    destroy_model_parallel()
    ray = sys.modules.get("ray")
    if shutdown_ray and ray is not None:
        ray.shutdown()
