"""The interfaces of a decoder's layers: the layer, and its description, which states its cache and builds it."""

from typing import Protocol

from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.parameters import Parameters
from octavo.layers.product import Summand
from octavo.ops import Array, LayerKVCache, LinearWeight
from octavo.step_batch import GroupTables, StepBatch


class FeedForwardLike(Protocol):
    @property
    def consumer(self) -> LinearWeight | None:
        """Return the only matrix that reads the layer's input, for which a norm may quantize; None if several do."""

    def forward(self, hidden: Array) -> Summand:
        """Return the output [T, H] of hidden [T, H]."""


class Mixer(Protocol):
    """Attention, or a layer in place of attention."""

    @property
    def consumer(self) -> LinearWeight | None:
        """See `FeedForwardLike.consumer`."""

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Summand:
        """Return the output [T, H] of hidden [T, H]; `tables` belong to the layer's cache group."""


class MixerDescription(Protocol):
    @property
    def cache(self) -> LayerCacheSpec:
        """Return the layer's cache of a sequence."""

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> Mixer:
        """Return the layer. The names of its modules begin with `prefix`."""
