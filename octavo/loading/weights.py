"""Named tensors of a checkpoint, one at a time: arrays in the type that the model computes in, or stored matrices.

Everything is numpy's and in the host's memory; `octavo.ops` packs it and brings it to its device. Files stay
memory-mapped until a tensor is taken, so that loading needs room for the model once. Names and shapes are Hugging
Face's whatever the format. No torch here, but for PyTorch's own files.
"""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

from octavo.loading.checkpoint import Checkpoint
from octavo.loading.dummy_weights import DummyWeights
from octavo.loading.file_weights import GGUFWeights, PtWeights, SafetensorsWeights
from octavo.loading.matrices import Bounds
from octavo.quantization import StoredWeight


class Weights(Protocol):
    """An open checkpoint. Tensors that were taken stay valid after `close`, and may alias the files: never write."""

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """The tensor in the type asked of `open_weights`. Raises `LoadError` if it is absent or of another shape."""

    def take_matrix(
        self, name: str, shape: tuple[int, int], rows: Bounds = None, columns: Bounds = None
    ) -> StoredWeight:
        """A matrix of `shape` [N, K] that is going to be packed, or a share (begin, end) of its rows and columns.

        It holds floats in the type asked of `open_weights`, or fewer bits. Raises `LoadError` as `take` does, and
        `ConfigError` for a share that cannot be cut.
        """

    def matrix_format(self, name: str) -> str:
        """The `StoredWeight.format` that `take_matrix` gives, without taking. Raises `LoadError` if it is absent."""

    def check_all_taken(self) -> None:
        """Raise `LoadError` if the checkpoint has weights that the model did not ask for: it would compute nonsense."""

    def close(self) -> None: ...


def open_weights(checkpoint: Checkpoint, dtype: str, seed: int | None, quantization: str | None, tied: bool) -> Weights:
    """Open a checkpoint's weights for a model that computes in `dtype` ("float32", "bfloat16", "float16").

    `seed` is that of dummy weights; without one they differ from run to run. `tied` says that the model's output matrix
    is its embedding, so that one of its own in the file is left over rightly. Matrices of GGUF files keep their few
    bits, unless `dtype` is float32. With `quantization` "int8" or "fp8" matrices of floats are to be quantized as they
    are packed.
    """
    if checkpoint.format == "dummy":
        return DummyWeights(dtype, seed, quantization)
    if checkpoint.format == "gguf":
        return GGUFWeights(checkpoint.weight_files, dtype, tied, quantization)
    if checkpoint.format == "pt":
        return PtWeights(checkpoint.weight_files, dtype, tied, quantization)
    return SafetensorsWeights(checkpoint.weight_files, dtype, tied, quantization)
