"""The backend of these tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops import torch_ref


class _Reference:
    """Until torch_ref takes numpy arrays, stored weights and names of types."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_ref, name)

    def place(self, array: Any) -> Tensor:
        return torch.from_numpy(np.array(array))

    def pack_linear(self, parts: Any, bias: Any = None, gated: bool = False) -> Any:
        return torch_ref.pack_linear(
            [self.place(part.data) for part in parts], None if bias is None else self.place(bias), gated
        )

    def linear(self, x: Any, weight: Any, out_dtype: str | None = None) -> Any:
        return torch_ref.linear(x, weight, out_dtype and getattr(torch, out_dtype))

    def embedding(self, ids: Any, weight: Any, out_dtype: str | None = None, scale: float = 1.0) -> Any:
        return torch_ref.embedding(ids, weight, out_dtype and getattr(torch, out_dtype), scale)

    def add(self, residual: Any, x: Any, scale: float = 1.0) -> None:
        residual.copy_(residual.float() + scale * x.float())

    def layer_norm(self, x: Any, weight: Any, bias: Any, eps: float, consumer: Any = None) -> Any:
        return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias, eps).to(x.dtype)

    def activation(self, x: Any, kind: str, consumer: Any = None) -> Any:
        function = {
            "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"), "relu": F.relu,
            "relu2": lambda v: F.relu(v).square(),
        }[kind]  # fmt: skip
        return function(x.float()).to(x.dtype)

    def allocate_kv_cache(self, *sizes: Any) -> Any:
        *shape, dtype = sizes
        return torch_ref.allocate_kv_cache(*shape, getattr(torch, dtype), torch.device("cpu"))


@pytest.fixture
def ops() -> Any:
    return _Reference()
