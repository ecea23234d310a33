"""What each layer caches, and the groups of layers with equal caches. Pools and block tables follow from it.

A model has a `LayerCacheSpec` for each layer. Layers with equal specs form a group, with one block table a sequence.
Groups whose blocks have the same form share a pool and its memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NULL_BLOCK = 0  # stands for a released block in tables of window groups; never allocated or written


@dataclass(frozen=True, slots=True)
class LayerCacheSpec:
    """What one layer caches of a sequence. Sizes are in elements, of one token and one head."""

    # "full": keys and values of all tokens; "window": of the last tokens; "cross": of an encoder's output; "state": a
    # fixed number of bytes
    kind: str
    num_kv_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    window: int = 0  # a token sees itself and the window - 1 before it
    num_bytes: int = 0  # of a state
    num_tokens: int = 0  # the most rows of an encoder's output

    def __post_init__(self) -> None:
        assert self.kind in ("full", "window", "cross", "state"), self.kind
        assert (self.window > 0) == (self.kind == "window"), "a window has a length, and nothing else has one"
        assert (self.num_bytes > 0) == (self.kind == "state"), "a state has a number of bytes, and nothing else has one"
        assert (self.num_tokens > 0) == (self.kind == "cross"), "only an encoder's output has a length of its own"

    @property
    def block_form(self) -> tuple[int, ...]:
        """The form of a block. Layers with equal forms can have their blocks in one pool."""
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
    """Return the groups of a model, in the order of their first layers.

    A block has room for the layers of the pool's largest group, and a smaller group wastes the rest. So the groups of a
    pool are split into parts of the size of the smallest, unless the largest is hardly larger. The rule and its figure
    are vLLM's: Gemma 3 27B has 10 full layers and 52 windowed ones.
    """
    layers_of: dict[LayerCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_of.setdefault(spec, []).append(layer)
    counts: dict[tuple[int, ...], list[int]] = {}  # by block form: how many layers each spec has
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
