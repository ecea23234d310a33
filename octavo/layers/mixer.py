"""The interfaces of a decoder's layers: the description, which has the layer's cache and builds it, and the layer."""

from __future__ import annotations

from typing import Protocol

from octavo.batch import GroupTables, StepBatch
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.parameters import Parameters
from octavo.layers.product import Summand
from octavo.ops import Array, LayerKVCache, LinearWeight


class FeedForwardLike(Protocol):
    @property
    def consumer(self) -> LinearWeight | None:
        """The matrix that alone reads the layer's input, if there is one: a norm may quantize for it."""

    def forward(self, hidden: Array) -> Summand:
        """hidden [T, H] -> [T, H]"""


class Mixer(Protocol):
    """Attention, or a layer in its place."""

    @property
    def consumer(self) -> LinearWeight | None:
        """As of `FeedForwardLike`."""

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Summand:
        """hidden [T, H] -> [T, H]; `tables` are those of the layer's cache group."""


class MixerDescription(Protocol):
    @property
    def cache(self) -> LayerCacheSpec:
        """The layer's cache of a sequence."""

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> Mixer:
        """Build the layer. `prefix` begins the names of its modules."""
