"""The backends as the kernel tests call them: with torch's tensors and dtypes, over the same memory.

So one test compares numpy's backend with torch's. Parts of matrices may be tensors too, which are stored as floats.
Lists of the host's (`HostArray`) are not converted: tests give them as the interface wants them.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from octavo.ops import Expand, ExpandExperts, LayerKVCache, Lookup
from octavo.ops.torch_arrays import to_torch
from octavo.quantization import StoredWeight
from tests.ops import torch_ref as reference_backend

_FORMATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The same memory of a tensor on the CPU as an array."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).numpy().view(getattr(ml_dtypes, dtype_name(tensor.dtype)))
    return tensor.numpy()


def stored(matrix: Tensor | StoredWeight, form: str | None = None) -> StoredWeight:
    """Floats [N, K] as a file holds them, or in another `form`, to be quantized as they are packed."""
    if isinstance(matrix, StoredWeight):
        return matrix
    data = to_numpy(matrix.cpu())
    return StoredWeight(form or _FORMATS[matrix.dtype], {"data": data}, (data.shape[0], data.shape[1]))


class OverTensors:
    """A backend's module, called with tensors."""

    def __init__(self, module: ModuleType, takes_numpy: bool) -> None:
        self.module, self._takes_numpy = module, takes_numpy

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.module, name)
        if isinstance(function, type) or not callable(function):
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "pack_linear":
                return self._pack_linear(*args, **kwargs)
            arguments = [self._given(x) for x in args]
            return self._back(function(*arguments, **{key: self._given(x) for key, x in kwargs.items()}))

        return call

    def arena(self, memory: np.ndarray) -> Any:
        """Memory of the host as the backend's own."""
        return memory if self._takes_numpy else to_torch(memory)

    def _pack_linear(self, parts: list[Any], bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        host_bias = None if bias is None else to_numpy(bias.cpu())
        return self.module.pack_linear([stored(part) for part in parts], host_bias, *args, **kwargs)

    def _given(self, x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return dtype_name(x)
        if isinstance(x, LayerKVCache) and self._takes_numpy:
            return replace(x, key=to_numpy(x.key), value=to_numpy(x.value))
        if isinstance(x, (list, tuple)):
            entries = [self._given(entry) for entry in x]
            return x._make(entries) if isinstance(x, (Expand, ExpandExperts, Lookup)) else type(x)(entries)
        return to_numpy(x) if isinstance(x, Tensor) and self._takes_numpy else x

    def _back(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return to_torch(x)
        if isinstance(x, LayerKVCache):
            return replace(x, key=self._back(x.key), value=self._back(x.value))
        return tuple(self._back(entry) for entry in x) if isinstance(x, tuple) else x


torch_ref = OverTensors(reference_backend, takes_numpy=False)


def __getattr__(name: str) -> Any:
    """`cpu`, on machines where the native module is built."""
    if name != "cpu":
        raise AttributeError(name)
    from octavo.ops import cpu as native_backend

    globals()["cpu"] = OverTensors(native_backend, takes_numpy=True)
    return globals()["cpu"]
