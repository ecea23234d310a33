"""Several hosts that serve one model: they find each other, check that their settings agree, and notice when one is
lost."""

from octavo.compat.parallel_state import (
    cleanup_dist_env_and_memory,
    destroy_distributed_environment,
    destroy_model_parallel,
)

__all__ = ["cleanup_dist_env_and_memory", "destroy_distributed_environment", "destroy_model_parallel"]
