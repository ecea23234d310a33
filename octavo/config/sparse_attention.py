"""Models with sparse attention, in which an index chooses the keys that a token reads. The index is left out if it
would choose every key; otherwise an eight-bit cache is refused. Called when models and drafts are found."""

from dataclasses import replace

from octavo.config.number_types import CACHE_BYTES
from octavo.errors import ConfigError
from octavo.loading.checkpoint import Checkpoint
from octavo.models.description import ModelDescription


def needs_index(description: ModelDescription, max_model_len: int) -> bool:
    """Return whether a context may have more keys than the index chooses."""
    return 0 < description.num_chosen_keys < max_model_len


def check_cache_of_index(kv_cache_dtype: str, description: ModelDescription, max_model_len: int) -> None:
    """Raise `ConfigError` for an eight-bit cache, as an index's keys have no scales."""
    if kv_cache_dtype in CACHE_BYTES and needs_index(description, max_model_len):
        raise ConfigError(
            f"--kv-cache-dtype {kv_cache_dtype} is not built yet for {description.architecture} beyond the "
            f"{description.num_chosen_keys} keys (index_topk) that its index chooses. Use auto, or --max-model-len "
            f"{description.num_chosen_keys} at most."
        )


def without_needless_index(checkpoint: Checkpoint, description: ModelDescription, max_model_len: int) -> Checkpoint:
    """Return the checkpoint, without an index if contexts are so short that it would choose every key."""
    if not description.num_chosen_keys or needs_index(description, max_model_len):
        return checkpoint
    return replace(checkpoint, config=dict(checkpoint.config) | {"index_topk": 0})
