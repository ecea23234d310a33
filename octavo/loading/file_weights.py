"""`Weights` over files: safetensors, PyTorch's .bin, GGUF. `octavo.loading.weights` opens them.

Each format says which tensors there are and hands out one; names, shapes, types and shares are checked and made here.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.errors import LoadError
from octavo.loading.gguf import GGUFFile, read_gguf
from octavo.loading.gguf_config import NamedTensor, named_tensors
from octavo.loading.matrices import Bounds, floats, handed, handed_format
from octavo.loading.safetensors import SafetensorsFile, read_safetensors
from octavo.quantization import StoredWeight, dequantize
from octavo.quantization.arrays import FLOATS, converted
from octavo.quantization.formats import PLAIN, PLAIN_OF_DTYPE, QUANTIZED_AT_LOAD

# In checkpoints but not part of a model here: rotary frequencies and masks are computed from the configuration.
_IGNORED = re.compile(r".*(rotary_emb\.(inv_freq|cos_cached|sin_cached)|attn\.(masked_)?bias|position_ids)")


class _FileWeights:
    """What the file formats share: which names there are, and which of them were taken."""

    def __init__(self, names: list[str], dtype: str, tied: bool, quantization: str | None, source: str) -> None:
        self._left = dict.fromkeys(names)
        self._names = frozenset(names)
        self._dtype, self._quantization = dtype, quantization
        self._tied = tied
        self._source = source

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def _check_present(self, name: str) -> None:
        if name not in self._names:
            raise LoadError(f"{self._source} has no tensor {name}, which the model's configuration calls for.")

    def _taking(self, name: str, shape: tuple[int, ...], stored_shape: tuple[int, ...]) -> None:
        """Check the shape, and note that the tensor is taken."""
        if stored_shape != shape:
            raise LoadError(
                f"{self._source}: tensor {name} has the shape {list(stored_shape)}; the model's configuration makes it "
                f"{list(shape)}."
            )
        self._left.pop(name, None)

    def check_all_taken(self) -> None:
        left = [n for n in self._left if not _IGNORED.fullmatch(n) and not (self._tied and n == "lm_head.weight")]
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise LoadError(
                f"{self._source} has {len(left)} tensors that the model's configuration has no place for: "
                f"{', '.join(left[:5])}{more}; its config.json may be another model's, or its architecture is not "
                "wholly built."
            )


class _FloatWeights(_FileWeights):
    """What the formats share that hold floats only."""

    def _described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Element type and shape of a tensor that is there."""
        raise NotImplementedError

    def _array(self, name: str) -> NDArray[Any]:
        """A tensor as the file has it."""
        raise NotImplementedError

    def _floats(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        self._check_present(name)
        stored, stored_shape = self._described(name)
        self._taking(name, shape, stored_shape)
        self._check_floats(name, stored)
        return self._array(name)

    def _check_floats(self, name: str, stored: str) -> None:
        """Refuse what means nothing by itself."""
        if stored not in PLAIN_OF_DTYPE and stored != "float64":
            raise LoadError(
                f"{self._source}: tensor {name} is stored as {stored}; quantized checkpoints of this kind are not "
                "built yet."
            )

    def take(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        return converted(self._floats(name, shape), self._dtype)

    def take_matrix(
        self, name: str, shape: tuple[int, int], rows: Bounds = None, columns: Bounds = None
    ) -> StoredWeight:
        array = self._floats(name, shape)
        if array.dtype.itemsize == 8:  # no packer reads those
            array = array.astype(np.float32)
        return handed(floats(array), self._dtype, self._quantization, rows, columns)

    def matrix_format(self, name: str) -> str:
        self._check_present(name)
        stored, _ = self._described(name)
        self._check_floats(name, stored)
        return handed_format(PLAIN_OF_DTYPE.get(stored, "F32"), self._dtype, self._quantization)


class SafetensorsWeights(_FloatWeights):
    """Safetensors files, memory-mapped."""

    def __init__(self, files: list[str], dtype: str, tied: bool, quantization: str | None) -> None:
        self._files: dict[str, SafetensorsFile] = {}  # name of a tensor -> the open file that has it
        for path in files:
            file = read_safetensors(path)
            self._files.update(dict.fromkeys(file.tensors, file))
        super().__init__(list(self._files), dtype, tied, quantization, os.path.dirname(files[0]))

    def _described(self, name: str) -> tuple[str, tuple[int, ...]]:
        tensor = self._files[name].tensors[name]
        return tensor.dtype.name, tensor.shape

    def _array(self, name: str) -> NDArray[Any]:
        return self._files[name].array(name)

    def close(self) -> None:
        for file in self._files.values():
            file.file.forget_pages()
        # The mapping goes with the last array that aliases it; closing it by hand would pull it from under them.
        self._files = {}


class PtWeights(_FloatWeights):
    """PyTorch's own .bin files: archives of tensors, read by PyTorch without running any code from them."""

    def __init__(self, files: list[str], dtype: str, tied: bool, quantization: str | None) -> None:
        self._tensors: dict[str, Any] = {}  # torch's
        for path in files:
            self._tensors.update(_load_pt(path))
        super().__init__(list(self._tensors), dtype, tied, quantization, os.path.dirname(files[0]))

    def _described(self, name: str) -> tuple[str, tuple[int, ...]]:
        tensor = self._tensors[name]
        return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)

    def _array(self, name: str) -> NDArray[Any]:
        import torch

        tensor = self._tensors[name].detach().contiguous()
        if tensor.dtype is not torch.bfloat16:
            array: NDArray[Any] = tensor.numpy()
            return array
        bits: NDArray[Any] = tensor.view(torch.int16).numpy()  # numpy itself knows no bfloat16
        return bits.view(ml_dtypes.bfloat16)

    def close(self) -> None:
        self._tensors = {}


class GGUFWeights(_FileWeights):
    """A GGUF file, whose matrices of few bits stay as they are unless the model computes in float32."""

    def __init__(self, files: list[str], dtype: str, tied: bool, quantization: str | None) -> None:
        self._file = read_gguf(files[0])
        self._tensors = {t.hf_name: t for t in named_tensors(self._file)}
        super().__init__(list(self._tensors), dtype, tied, quantization, files[0])
        quantized = {t.info.type.name for t in self._tensors.values()} - set(PLAIN)
        if quantization in QUANTIZED_AT_LOAD and quantized:
            raise LoadError(
                f"--quantization {quantization} quantizes weights of floats, but {files[0]} is quantized already "
                f"({', '.join(sorted(quantized))}); leave the flag out to serve it as it is."
            )

    def take(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        return dequantize(stored_tensor(self._file, self._tensor(name, shape)), self._dtype).reshape(shape)

    def take_matrix(
        self, name: str, shape: tuple[int, int], rows: Bounds = None, columns: Bounds = None
    ) -> StoredWeight:
        stored = stored_tensor(self._file, self._tensor(name, shape))
        return handed(stored, self._dtype, self._quantization, rows, columns)

    def matrix_format(self, name: str) -> str:
        self._check_present(name)
        return handed_format(self._tensors[name].info.type.name, self._dtype, self._quantization)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> NamedTensor:
        self._check_present(name)
        tensor = self._tensors[name]
        self._taking(name, shape, tensor.info.shape)
        return tensor

    def close(self) -> None:
        self._file.file.forget_pages()
        # As for safetensors, the mapping goes with the last array that aliases it.
        self._tensors = {}
        del self._file


def stored_tensor(file: GGUFFile, tensor: NamedTensor) -> StoredWeight:
    """The tensor [rows, elements of a row] as the file stores it, rows in the order of the model; one of one dimension
    is a row. It aliases the mapped file unless rows had to be moved."""
    info = tensor.info
    num_rows = info.shape[0] if len(info.shape) > 1 or tensor.rotary_heads else 1
    packed = file.file.array(info.offset, info.num_bytes).reshape(num_rows, -1)
    if tensor.rotary_heads:
        # From rows that alternate between the two halves of a head to one half after the other.
        alternating = packed.reshape(tensor.rotary_heads, -1, 2, packed.shape[1])
        packed = alternating.swapaxes(1, 2).reshape(packed.shape)
    plain = PLAIN.get(info.type.name)
    data = packed.view(FLOATS[plain]) if plain else packed
    return StoredWeight(info.type.name, {"data": data}, (num_rows, math.prod(info.shape) // num_rows))


def _load_pt(path: str) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        raise LoadError(
            f"{path} is PyTorch's own format, which PyTorch reads: pip install torch, or convert the model to "
            "safetensors."
        ) from None
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as e:
            if "mmap" not in str(e):
                raise
            loaded = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except Exception as e:  # torch.load raises whatever its parsers meet; a damaged file is all that it can mean here
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise LoadError(f"{path} is damaged, or no file of tensors ({reason}); fetch it again.") from None
    if not isinstance(loaded, dict) or not all(isinstance(v, torch.Tensor) for v in loaded.values()):
        raise LoadError(f"{path} holds a {type(loaded).__name__}, expected a dictionary of tensors.")
    return loaded
