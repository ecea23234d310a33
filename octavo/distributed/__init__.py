"""Several hosts that serve one model: how they find each other, agree, and notice that one is gone."""

from octavo.compat.parallel_state import (
    cleanup_dist_env_and_memory,
    destroy_distributed_environment,
    destroy_model_parallel,
)

__all__ = ["cleanup_dist_env_and_memory", "destroy_distributed_environment", "destroy_model_parallel"]
