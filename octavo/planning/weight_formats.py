"""A model's weights in the formats that it could be served in, without a checkpoint: their sizes, and random numbers in
their place for measured steps.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.loading.dummy_weights import DummyWeights
from octavo.loading.recording import RecordedTensor, RecordingWeights
from octavo.loading.weights import Weights
from octavo.models.description import ModelDescription
from octavo.models.inventory import record, required_tensors
from octavo.quantization import StoredWeight
from octavo.quantization.formats import AXES, BLOCK_TYPES, PLAIN, QUANTIZED_AT_LOAD

AS_IS = "as-is"
# Values of --format: floats, floats quantized while loading, and GGUF formats.
FORMATS = ("bf16", "int8", "int4", "fp8", "q8_0", "q5_k_m", "q4_k_m", "q4_0")
_LAYER = re.compile(r"\.(\d+)\.")
_SMALLER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # for rows whose length is no multiple of 256


def weights_in(name: str, description: ModelDescription) -> Weights:
    """Return random weights of `description` in one of `FORMATS`. Raises `ConfigError` for another name."""
    if name == "bf16":
        return DummyWeights("bfloat16", 0)
    if name in QUANTIZED_AT_LOAD:
        return DummyWeights("bfloat16", 0, name)
    if name not in FORMATS:
        raise ConfigError(f"--format must be {AS_IS}, {', '.join(FORMATS)}; got {name!r}.")
    tensors = required_tensors(description)
    return BlockWeights("bfloat16", {t.name: _block_format(name, t, description) for t in tensors if t.is_matrix}, None)


def weights_like(weights: Weights, description: ModelDescription, dtype: str) -> Weights:
    """Return random weights in the formats of `weights`, whose values are not read. A format with several tensors is
    replaced by a format that is packed into the same layout."""
    recorded = RecordingWeights(dtype, weights)
    record(description, recorded)
    return BlockWeights(dtype, {t.name: _stand_in(t) for t in recorded.tensors if t.is_matrix}, weights)


def packed_weight_bytes(
    description: ModelDescription, weights: Weights, dtype: str, *, on_gpu: bool = False, with_repeated: bool = False
) -> tuple[int, str]:
    """Return the bytes of the model's packed matrices, and the formats that hold them. With `with_repeated`, matrices
    that layers share count once for each layer, as a step reads them."""
    recorded = RecordingWeights(dtype, weights)
    record(description, recorded)
    return recorded.packed_bytes(keeps_superblocks=not on_gpu, with_repeated=with_repeated)


class BlockWeights(DummyWeights):
    """Random weights. `formats` gives the format of each matrix by name. `weights` says which tensors exist; without it
    every tensor does."""

    def __init__(self, dtype: str, formats: Mapping[str, str], weights: Weights | None) -> None:
        super().__init__(dtype, 0)
        self._formats, self._weights = formats, weights

    def __contains__(self, name: str) -> bool:
        return self._weights is None or name in self._weights

    def is_untransposed(self, name: str, untransposed_shape: tuple[int, ...] | None = None) -> bool:
        if self._weights is None:
            return self._formats.get(name) in BLOCK_TYPES
        return self._weights.is_untransposed(name, untransposed_shape)

    def stored_format(self, name: str) -> str:
        return self._formats.get(name) or super().stored_format(name)

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        stored_format = self.stored_format(name)
        block = BLOCK_TYPES.get(stored_format)
        if block is None:
            plain = super().stored(name, shape)
            return plain if stored_format in PLAIN else StoredWeight(stored_format, plain.tensors, plain.shape)
        rows = int(np.prod(shape[:-1]))
        data = np.resize(_random_bytes(), (rows, shape[-1] // block.block_size * block.block_bytes))
        return StoredWeight(stored_format, {"data": data}, (rows, shape[-1]))


@cache
def _random_bytes() -> NDArray[Any]:
    """Return random bytes without the two high bits: read as float16 they are positive and below 2. The kernels' speed
    does not depend on the numbers, but an even choice of experts does."""
    return np.random.default_rng(0).integers(0, 64, 1_048_583, np.uint8)


def _stand_in(tensor: RecordedTensor) -> str:
    assert tensor.shard is not None
    stored_format = tensor.shard.format
    if stored_format not in AXES:
        return stored_format
    layout = tensor.layout
    if layout is None or layout.bits == 8:
        return "Q8_0"
    if layout.table is not None:
        return "MXFP4" if layout.scale_bytes == 1 else "NVFP4" if layout.group == 16 else "IQ4_NL"
    return "Q4_1" if layout.minima else "Q4_0"


def _block_format(name: str, tensor: RecordedTensor, description: ModelDescription) -> str:
    """Return the GGUF format of a matrix in llama.cpp's mixture `name` (its llama_tensor_get_type)."""
    tied, num_layers = description.tie_word_embeddings, len(description.layers)
    is_output = tensor.name.startswith(description.embedding_name if tied else description.output_name)
    found = {"q4_k_m": "Q4_K", "q5_k_m": "Q5_K"}.get(name, name.upper())
    if found != "Q8_0" and is_output:
        found = "Q6_K"
    elif found in ("Q4_K", "Q5_K") and ("v_proj" in tensor.name or "down_proj" in tensor.name):
        match = _LAYER.search(tensor.name)
        layer, eighth = int(match[1]) if match else 0, num_layers // 8
        if layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2:
            found = "Q6_K"
    columns = tensor.shape[-1]
    if columns % BLOCK_TYPES[found].block_size:
        found = _SMALLER.get(found, "BF16")
    return "BF16" if found == "BF16" or columns % BLOCK_TYPES[found].block_size else found
