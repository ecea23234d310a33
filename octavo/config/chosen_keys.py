"""Models of which an index chooses the keys that a token reads: where the index is left out, as it would choose all of
them, and where contexts end that need it and cannot have it. Called as models and drafts are found."""

from __future__ import annotations

from dataclasses import replace

from octavo.errors import ConfigError
from octavo.loading.checkpoint import Checkpoint
from octavo.models.description import ModelDescription


def longest_without_index(longest: int, description: ModelDescription, device: str) -> int:
    """Tokens of a sequence, of at most `longest`, that the device computes."""
    if device == "cpu" or not description.num_chosen_keys:
        return longest
    return min(longest, description.num_chosen_keys)


def check_has_index(max_model_len: int, description: ModelDescription, device: str) -> None:
    """Raises `ConfigError` for contexts beyond what the index of a model chooses, where the device has none."""
    if max_model_len > longest_without_index(max_model_len, description, device):
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than the {description.num_chosen_keys} keys (index_topk) that "
            f"the index of {description.architecture} chooses of longer contexts. It is built for CPUs and not yet for "
            f"--device {device}: --max-model-len {description.num_chosen_keys} is the most there."
        )


def without_needless_index(checkpoint: Checkpoint, description: ModelDescription, max_model_len: int) -> Checkpoint:
    """The checkpoint as of a model that has no index, if contexts are so short that it would choose every key."""
    if not 0 < max_model_len <= description.num_chosen_keys:
        return checkpoint
    return replace(checkpoint, config=dict(checkpoint.config) | {"index_topk": 0})
