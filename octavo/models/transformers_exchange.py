"""Exchange of modules in networks of `transformers`: products, embeddings, RMS norms and activations are replaced by
Octavo's operations, so that a row's bits do not depend on other rows and weights may be of any format.

Running a norm shows what it computes; its class does not. It stays if its numbers differ from Octavo's.
"""

from collections.abc import Callable
from typing import Any, cast

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn

from octavo.errors import LoadError
from octavo.layers.parameters import Parameters
from octavo.ops import Array, LinearWeight, Ops
from octavo.ops.torch_arrays import to_torch

_EPSILONS = ("variance_epsilon", "eps", "epsilon")  # attribute names in classes of norms
# Classes of activations that are exchanged: torch's own round differently at the end of a row that fills no vector.
_ACTIVATIONS = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELU": "gelu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh",
}  # fmt: skip


class Bridge:
    """Converts between torch's tensors and a backend's arrays, which may be numpy's. Tensors whose rows are contiguous
    are not copied."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        place: Any = ops.place(np.zeros(1, np.float32))
        self._takes_numpy = isinstance(place, np.ndarray)
        self.device = torch.device("cpu") if self._takes_numpy else place.device

    def array(self, tensor: Tensor) -> Array:
        # Operations accept any stride between rows.
        if tensor.stride(-1) != 1 or (tensor.dim() > 2 and tensor.stride(-2) != tensor.shape[-1]):
            tensor = tensor.contiguous()
        if not self._takes_numpy:
            return cast(Array, tensor)
        if tensor.dtype is torch.bfloat16:  # torch cannot convert it: numpy has no bfloat16 of its own
            return cast(Array, tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
        return cast(Array, tensor.numpy())

    def tensor(self, array: Any) -> Tensor:
        return array if isinstance(array, Tensor) else to_torch(array)


class _ByRows(nn.Module):
    """A module that calls an operation on rows [T, N]."""

    def __init__(self, operation: Callable[[Array], Array], bridge: Bridge) -> None:
        super().__init__()
        self._operation, self._bridge = operation, bridge

    def forward(self, x: Tensor) -> Tensor:
        found = self._operation(self._bridge.array(x.reshape(-1, x.shape[-1])))
        return self._bridge.tensor(found).reshape(*x.shape[:-1], -1)


class _Embedding(nn.Module):
    def __init__(self, weight: LinearWeight, bridge: Bridge, dtype: str) -> None:
        super().__init__()
        self._weight, self._bridge, self._dtype = weight, bridge, dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self._bridge.ops.embedding(self._bridge.array(token_ids.reshape(-1).int()), self._weight, self._dtype)
        return self._bridge.tensor(rows).reshape(*token_ids.shape, -1)


def exchange(network: Any, parameters: Parameters, bridge: Bridge, is_tied: bool) -> int:
    """Replace modules by Octavo's and load the checkpoint's weights into the others. Return the bytes of the latter."""
    own_bytes, embedding, head = 0, network.get_input_embeddings(), network.get_output_embeddings()
    modules = dict(network.named_modules())
    (embedding_name,) = [name for name, module in modules.items() if module is embedding]
    tied: LinearWeight | None = None  # the embedding's matrix, also the head's if they are tied
    if type(embedding) is nn.Embedding or is_tied:
        tied = parameters.linear([embedding_name], [embedding.num_embeddings], embedding.embedding_dim)
    for name, module in modules.items():
        exchanged: nn.Module | None = None
        if module is embedding and type(module) is nn.Embedding:
            assert tied is not None
            exchanged = _Embedding(tied, bridge, parameters.dtype)
        elif module is head and is_tied and module.bias is None:
            assert tied is not None
            exchanged = _product(tied, bridge, "float32")
        elif type(module) is nn.Linear:
            weight = parameters.linear([name], [module.out_features], module.in_features, module.bias is not None)
            exchanged = _product(weight, bridge, "float32" if module is head else None)
        else:
            own_bytes += _fill(name, module, network, parameters, bridge)
            exchanged = _as_norm(module, bridge) or _as_activation(module, bridge)
        if exchanged is not None:
            parent, _, key = name.rpartition(".")
            setattr(network.get_submodule(parent), key, exchanged)
    return own_bytes


def _product(weight: LinearWeight, bridge: Bridge, out_dtype: str | None = None) -> _ByRows:
    return _ByRows(lambda x: bridge.ops.linear(x, weight, out_dtype), bridge)


def _fill(name: str, module: nn.Module, network: Any, parameters: Parameters, bridge: Bridge) -> int:
    """Give a module its parameters and buffers: from the checkpoint, or buffers as the network initialises them.

    Returns the bytes of the parameters. Raises `LoadError` for a buffer that neither provides."""
    prefix, num_bytes = f"{name}." if name else "", 0
    buffers = dict(module.named_buffers(recurse=False))
    for key, buffer in buffers.items():
        unset = float("nan") if buffer.is_floating_point() else -1
        setattr(module, key, torch.full(buffer.shape, unset, dtype=buffer.dtype, device=bridge.device))
    if buffers:
        network._init_weights(module)  # it does not touch parameters, which are still on the meta device
    for key, buffer in module.named_buffers(recurse=False):
        if prefix + key in parameters.weights:
            setattr(module, key, bridge.tensor(parameters.array(f"{prefix}{key}", tuple(buffer.shape))))
        elif buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise LoadError(f"transformers does not say what {prefix}{key} of {type(module).__name__} is.")
    for key, parameter in module.named_parameters(recurse=False):
        tensor = bridge.tensor(parameters.array(f"{prefix}{key}", tuple(parameter.shape)))
        num_bytes += tensor.nbytes
        setattr(module, key, nn.Parameter(tensor.clone(), False))  # a tensor of the checkpoint may alias the file
    return num_bytes


def _as_norm(module: nn.Module, bridge: Bridge) -> _ByRows | None:
    """Return Octavo's norm in place of an RMS norm that gives the same numbers; else None."""
    weight = getattr(module, "weight", None)
    eps = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), 0)
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    with torch.inference_mode():
        x = torch.linspace(-2, 3, 2 * len(weight), device=weight.device, dtype=weight.dtype).reshape(2, -1)
        wide = x.float()
        expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
        tolerance = 1e-5 if weight.dtype == torch.float32 else 0.02
        if not torch.allclose(module(x).float(), expected, atol=tolerance, rtol=tolerance):
            return None
    placed = bridge.array(weight.detach())
    return _ByRows(lambda x: bridge.ops.rms_norm(x, placed, float(eps)), bridge)


def _as_activation(module: nn.Module, bridge: Bridge) -> _ByRows | None:
    kind = _ACTIVATIONS.get(type(module).__name__)
    if kind == "gelu" and getattr(module, "approximate", "none") == "tanh":
        kind = "gelu_tanh"
    return None if kind is None else _ByRows(lambda x: bridge.ops.activation(x, kind), bridge)


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
