"""Exchange of modules in networks of `transformers`: products (several of the same input become one), embeddings,
norms, activations, gated feed-forwards, and the rotation of queries and keys are replaced by Octavo's operations.

Running a module shows what it computes; its class does not. A module stays if its numbers differ from Octavo's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from types import FunctionType, MethodType
from typing import Any, cast

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn

from octavo.errors import LoadError
from octavo.layers.parameters import Parameters
from octavo.ops import Array, LinearWeight, Ops
from octavo.ops.torch_arrays import to_torch

_ROTATION = "apply_rotary_pos_emb"
_EPSILONS = ("variance_epsilon", "eps", "epsilon")  # attribute names in classes of norms
# Classes of activations that are exchanged: torch's own round differently at the end of a row that fills no vector.
_ACTIVATIONS = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELU": "gelu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh",
}  # fmt: skip
_TORCH_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu, "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
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


class _Part(nn.Module):
    """The replacement of one of several matrices that multiply the same tensor: it returns its columns of their common
    product, which the first of them computes."""

    def __init__(self, product: _Common, begin: int, end: int) -> None:
        super().__init__()
        self._product, self._begin, self._end = product, begin, end

    def forward(self, x: Tensor) -> Tensor:
        return self._product.of(x, self._end)[..., self._begin : self._end]


class _Common:
    def __init__(self, product: _ByRows, size: int) -> None:
        self._product, self._size = product, size
        self._input: Tensor | None = None
        self._output: Tensor

    def of(self, x: Tensor, end: int) -> Tensor:
        """Return all outputs of x. `end` is the end of the columns that the caller uses."""
        if x is not self._input:
            self._input, self._output = x, self._product(x)
        output = self._output
        if end == self._size:  # the last matrix has its columns: forget the product
            self._input = None
            del self._output
        return output


class _Embedding(nn.Module):
    def __init__(self, weight: LinearWeight, bridge: Bridge, dtype: str) -> None:
        super().__init__()
        self._weight, self._bridge, self._dtype = weight, bridge, dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self._bridge.ops.embedding(self._bridge.array(token_ids.reshape(-1).int()), self._weight, self._dtype)
        return self._bridge.tensor(rows).reshape(*token_ids.shape, -1)


class _Rotation:
    """The replacement of `apply_rotary_pos_emb` for one attention module."""

    def __init__(self, original: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._original = original
        self._given: tuple[Tensor, Tensor] | None = None  # the last result

    def put_into(self, module: nn.Module) -> None:
        """Give the module a copy of its `forward` whose globals have this object under the function's name. Other
        modules keep the original function."""
        forward = type(module).forward
        names = forward.__globals__ | {_ROTATION: self}
        own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        own.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(own, module)

    def is_last_before(self, query: Tensor, key: Tensor) -> bool:
        """Return whether attention is called with the last result, unchanged."""
        return self._given is not None and self._given[0] is query and self._given[1] is key


class NotedRotation(_Rotation):
    """Finds out whether the original function rotates two halves of a head, as Octavo's operation does."""

    def __call__(self, query: Tensor, key: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        rotated = self._original(query, key, *given, **named)
        is_usual = len(given) == 2 and not named and given[0].dim() == 3 and self._turns_halves(given[0].shape[-1])
        self._given = rotated if is_usual else None
        return rotated

    def _turns_halves(self, size: int) -> bool:
        with torch.device("cpu"):
            query, angles = torch.rand(1, 2, 3, size), torch.rand(1, 3, size // 2)
            cos, sin = (torch.cat([x, x], -1) for x in (angles.cos(), angles.sin()))
            a, b = query.chunk(2, -1)
            turned = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
            return torch.allclose(self._original(query, query[:, :1], cos, sin)[0], turned, atol=1e-6)


class StepRotations:
    """Tables [T, R] of cosines and sines of a step's tokens, in the form that `Ops.rotary_and_cache` takes."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, Tensor, Tensor | None]] = []  # (cos, sin, table), one for each type of layer

    def begin(self) -> None:
        self._made.clear()

    def table(self, cos: Tensor, sin: Tensor) -> Tensor | None:
        """Return the table of cos, sin [1, T, R]; None if their two halves differ."""
        for made_of_cos, made_of_sin, table in self._made:
            if made_of_cos is cos and made_of_sin is sin:
                return table
        (a, b), (c, d) = cos[0].chunk(2, -1), sin[0].chunk(2, -1)
        found = torch.cat([a, c], -1).float() if torch.equal(a, b) and torch.equal(c, d) else None
        self._made.append((cos, sin, found))
        return found


class LateRotation(_Rotation):
    """Returns queries and keys unrotated; the operation that writes keys to the cache rotates both by `table`."""

    table: Tensor | None

    def __init__(self, original: Callable[..., tuple[Tensor, Tensor]], tables: StepRotations) -> None:
        super().__init__(original)
        self._tables = tables

    def __call__(self, query: Tensor, key: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        self.table = self._tables.table(*given)
        self._given = (query, key) if self.table is not None else self._original(query, key, *given)
        return self._given


def rotation_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the function by which an attention module rotates, if its `forward` calls one by the usual name."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return None
    return forward.__globals__.get(_ROTATION) if _ROTATION in forward.__code__.co_names else None


class Inputs:
    """A record of the tensor that each matrix was multiplied with, and of that tensor's version."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, Tensor, int]] = []  # tensors are kept alive, so that identities stay unique

    def note(self, name: str, x: Tensor) -> None:
        self._seen.append((name, x, x._version))

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Return the groups of successive matrices that multiply the same tensor, unchanged in between."""
        groups: list[list[str]] = []
        before: tuple[Tensor, int] | None = None
        for name, x, version in self._seen:
            if before is not None and before[0] is x and before[1] == version:
                groups[-1].append(name)
            else:
                groups.append([name])
            before = x, version
        once = [name for name, _, _ in self._seen]
        return tuple(tuple(g) for g in groups if len(g) > 1 and all(once.count(name) == 1 for name in g))


@contextmanager
def noting_inputs(network: nn.Module) -> Iterator[Inputs]:
    inputs = Inputs()

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, args: inputs.note(name, args[0])

    hooks = [
        module.register_forward_pre_hook(hook_of(name))
        for name, module in network.named_modules()
        if type(module) is nn.Linear
    ]
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # versions of tensors are counted only outside of inference mode
            yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def exchange(
    network: Any, parameters: Parameters, bridge: Bridge, is_tied: bool, same_inputs: Sequence[Sequence[str]]
) -> int:
    """Replace modules by Octavo's and load the checkpoint's weights into the others. Return the bytes of the latter."""
    own_bytes, embedding, head = 0, network.get_input_embeddings(), network.get_output_embeddings()
    for names in same_inputs:
        if not _exchange_feed_forward(network, names, parameters, bridge):
            _exchange_together(network, names, parameters, bridge)
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
            _put(network, name, exchanged)
    return own_bytes


def _put(network: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, key = name.rpartition(".")
    setattr(network.get_submodule(parent), key, module)


def _exchange_together(network: nn.Module, names: Sequence[str], parameters: Parameters, bridge: Bridge) -> None:
    """Replace several products of the same input by one, unless only some of them have a bias."""
    linears = [cast(nn.Linear, network.get_submodule(name)) for name in names]
    has_bias = linears[0].bias is not None
    if any((linear.bias is not None) != has_bias for linear in linears):
        return
    sizes = [linear.out_features for linear in linears]
    weight = parameters.linear(names, sizes, linears[0].in_features, has_bias)
    common, ends = _Common(_product(weight, bridge), sum(sizes)), list(accumulate(sizes))
    for name, size, end in zip(names, sizes, ends, strict=True):
        _put(network, name, _Part(common, end - size, end))


def _exchange_feed_forward(network: nn.Module, names: Sequence[str], parameters: Parameters, bridge: Bridge) -> bool:
    """Replace a gated feed-forward whose gate and up are the matrices `names` by two products. Return False if the
    matrices belong to no gated feed-forward."""
    parent = names[0].rpartition(".")[0]
    inner = [name.rpartition(".")[2] for name in names]
    module = network.get_submodule(parent)
    if len(names) != 2 or names[1] != f"{parent}.{inner[1]}" or any(True for _ in module.parameters(recurse=False)):
        return False
    found = _gated(module, inner)
    if found is None:
        return False
    gate, up, down, kind = found
    first, last = (cast(nn.Linear, module.get_submodule(name)) for name in (gate, down))
    size, ops, dtype = first.out_features, bridge.ops, parameters.dtype
    gate_up = parameters.linear(
        [f"{parent}.{gate}", f"{parent}.{up}"], (size, size), first.in_features, first.bias is not None, gated=True
    )
    back = parameters.linear([f"{parent}.{down}"], [last.out_features], size, last.bias is not None)
    _put(
        network,
        parent,
        _ByRows(lambda x: ops.linear(ops.linear_silu_and_mul(x, gate_up, back, dtype, kind), back, dtype), bridge),
    )
    return True


class _StandIn(nn.Module):
    """A module in place of a matrix that records its inputs and returns a fixed answer."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer, self.given = answer, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.given.append(x)
        return self.answer


def _gated(module: nn.Module, pair: Sequence[str]) -> tuple[str, str, str, str] | None:
    """Return the names of gate, up and down, and of f, if the module computes down(f(gate(x)) * up(x)); else None.

    This is found by running the module with other matrices."""
    children = dict(module.named_children())
    linears = {name: child for name, child in children.items() if type(child) is nn.Linear}
    kinds = [kind for child in children.values() if (kind := _activation_kind(child)) is not None]
    rest = [name for name in linears if name not in pair]
    first, second = (linears[name] for name in pair)
    alike = first.out_features == second.out_features and (first.bias is None) == (second.bias is None)
    if len(rest) != 1 or len(kinds) != 1 or not alike or linears[rest[0]].in_features != first.out_features:
        return None
    x, answers = torch.zeros(2, 3, 4), [torch.linspace(-3, 2, 30).reshape(2, 3, 5), torch.rand(2, 3, 5) - 0.5]
    stand_ins = {name: _StandIn(answer) for name, answer in zip(pair, answers, strict=True)}
    stand_ins[rest[0]] = last = _StandIn(torch.zeros(2, 3, 4))
    try:
        for name, stand_in in stand_ins.items():
            setattr(module, name, stand_in)
        with torch.inference_mode():
            result = module(x)
    except Exception:  # the module's code may fail on these tensors
        return None
    finally:
        for name in stand_ins:
            setattr(module, name, linears[name])
    if result is not last.answer or any(len(stand_in.given) != 1 for stand_in in stand_ins.values()):
        return None
    activation = _TORCH_ACTIVATIONS[kinds[0]]
    for (gate, up), (a, b) in ((pair, answers), (pair[::-1], answers[::-1])):
        if torch.allclose(last.given[0], activation(a) * b, atol=1e-6):
            return gate, up, rest[0], kinds[0]
    return None


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


def _activation_kind(module: nn.Module) -> str | None:
    kind = _ACTIVATIONS.get(type(module).__name__)
    return "gelu_tanh" if kind == "gelu" and getattr(module, "approximate", "none") == "tanh" else kind


def _as_activation(module: nn.Module, bridge: Bridge) -> _ByRows | None:
    kind = _activation_kind(module)
    return None if kind is None else _ByRows(lambda x: bridge.ops.activation(x, kind), bridge)


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
