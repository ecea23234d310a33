"""Which layers keep what: the description of a model's cache, from which pools and block tables follow.

A model says for each layer what it keeps (`LayerCacheSpec`). Layers that keep the same form a group, which has one
block table a sequence; groups whose blocks have the same form take them from one pool and alias its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NULL_BLOCK = 0  # what a block table has where a window group has given its block back; nobody owns or writes it


@dataclass(frozen=True, slots=True)
class LayerCacheSpec:
    """What one layer keeps of each sequence. Sizes are in elements, of one token and one head."""

    # "full": all keys and values; "window": those of the last tokens; "cross": those of another network's output, of
    # which there is room for equally many in each sequence; "state": a fixed number of bytes
    kind: str
    num_kv_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    window: int = 0  # a token sees itself and the window - 1 before it
    num_bytes: int = 0  # of a state
    num_tokens: int = 0  # of another network's output

    def __post_init__(self) -> None:
        assert self.kind in ("full", "window", "cross", "state"), self.kind
        assert (self.window > 0) == (self.kind == "window"), "a window has a length, and nothing else has one"
        assert (self.num_bytes > 0) == (self.kind == "state"), "a state has a number of bytes, and nothing else has one"
        assert (self.num_tokens > 0) == (self.kind == "cross"), "only another network's output has a length of its own"

    @property
    def block_form(self) -> tuple[int, ...]:
        """Layers that agree in this can keep their blocks in the same memory."""
        if self.kind == "state":
            return (self.num_bytes,)
        return self.num_kv_heads, self.key_size, self.value_size


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share their block tables. Layer `layers[i]` uses the i-th memory of its pool."""

    spec: LayerCacheSpec
    layers: tuple[int, ...]
    pool: int  # number of the pool that its blocks are from


def group_layers(specs: Sequence[LayerCacheSpec]) -> tuple[CacheGroup, ...]:
    """The groups of a model, in the order of their first layers.

    A block of a pool has room for as many layers as the largest of its groups, and a smaller group wastes the rest:
    groups in one pool are therefore split into parts of the size of the smallest one, unless the largest is hardly
    larger (the rule and the figure are vLLM's: Gemma 3 27B has 10 full layers and 52 windowed ones).
    """
    layers_of: dict[LayerCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_of.setdefault(spec, []).append(layer)
    counts: dict[tuple[int, ...], list[int]] = {}  # of the layers of each group, by pool
    for spec, layers in layers_of.items():
        counts.setdefault(spec.block_form, []).append(len(layers))
    pools = {form: pool for pool, form in enumerate(counts)}
    groups = []
    for spec, layers in layers_of.items():
        smallest, largest = min(counts[spec.block_form]), max(counts[spec.block_form])
        size = largest if largest < 1.25 * smallest else smallest
        parts = [tuple(layers[i : i + size]) for i in range(0, len(layers), size)]
        groups += [CacheGroup(spec, part, pools[spec.block_form]) for part in parts]
    return tuple(sorted(groups, key=lambda group: group.layers))
