"""Architectures that Octavo does not build itself: `transformers` computes them, with our attention over the paged
cache and our products, embedding and norms put into its modules.

`describe` runs the network once on the meta device, which computes shapes only, and notes how each layer calls its
attention. The rest of the engine knows of such a model only that its steps are not captured. `octavo.models.registry`
imports this module when one is named: it needs the extra `octavo[transformers]`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

# Threads of torch's own that wait by spinning would take the cores from the native kernels'. It reads this as it loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from octavo.batch import StepBatch
from octavo.errors import LoadError
from octavo.kv_cache.groups import group_layers
from octavo.layers.attention import AttentionDescription
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.norm import NormDescription
from octavo.layers.parameters import Parameters
from octavo.loading.weights import Weights
from octavo.models.description import LayerDescription, ModelDescription
from octavo.ops import Array, LayerKVCache, LinearWeight, Ops
from octavo.ops.torch_arrays import to_torch

logger = logging.getLogger(__name__)

_ATTENTION = "octavo"
_EPSILONS = ("variance_epsilon", "eps", "epsilon")  # as classes of norms call it
# Classes of activations that are exchanged, because torch's own round differently where a vector is not full.
_ACTIVATIONS = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELU": "gelu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh",
}  # fmt: skip


class _Attends(Protocol):
    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        description: AttentionDescription,
        sinks: Tensor | None,
    ) -> Tensor:
        """query [1, Q, T, D], key and value [1, G, T, D], sinks [Q] -> [1, T, Q, D]"""


# Who answers the attention calls of the network that runs.
_running: ContextVar[_Attends] = ContextVar("running")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, is_causal: bool | None = None, s_aux: Tensor | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What the networks call in the place of their attention. Raises `LoadError` for what it cannot do."""
    name = type(module).__name__
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise LoadError(f"{name} attends to positions that come later.")
    if attention_mask is not None:
        raise LoadError(f"{name} brings a mask of its own.")
    asked = [key for key, given in more.items() if given is not None and key in ("position_bias", "head_mask")]
    if asked:
        raise LoadError(f"{name} asks for {', '.join(asked)}, which attention does not do here.")
    description = AttentionDescription(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_size=query.shape[3],
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        rope=None,  # the network has rotated them
        window=sliding_window or 0,
        softcap=softcap or 0.0,
    )
    if value.shape[3] > query.shape[3]:
        raise LoadError(f"{name} has values of {value.shape[3]} elements for keys of {query.shape[3]}.")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise LoadError(f"{name} does not say which layer it belongs to.")
    return _running.get().attend(int(layer), query, key, value, description, s_aux), None


@contextmanager
def _run_by(attends: _Attends) -> Iterator[None]:
    token = _running.set(attends)
    try:
        with torch.inference_mode():
            yield
    finally:
        _running.reset(token)


@dataclass(frozen=True, slots=True)
class TransformersDescription(ModelDescription):
    """A network of transformers'. Of its layers only the attention is known."""

    config: Any = None  # transformers' own
    allows_code: bool = False  # of the checkpoint


@dataclass(slots=True)
class _Probe:
    """Notes the calls of attention, by layer."""

    seen: dict[int, AttentionDescription]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        description: AttentionDescription,
        sinks: Tensor | None,
    ) -> Tensor:
        if layer in self.seen:
            raise LoadError(f"layer {layer} calls its attention more than once.")
        self.seen[layer] = description
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def describe(config: Mapping[str, Any], code_folder: str | None = None) -> TransformersDescription:
    """Read config.json. `code_folder` is the checkpoint whose own Python code may be run.

    Raises `LoadError`, with the reason, for a network that cannot be run with an exchanged attention.
    """
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attention)
    try:
        if code_folder is not None:
            known = type(AutoConfig.from_pretrained(code_folder, trust_remote_code=True)).from_dict(dict(config))
            known.name_or_path = code_folder  # where the network's code is looked for
        else:
            # Matrices come through `Weights`, whatever they are quantized with.
            left_out = ("model_type", "quantization_config")
            given = {key: value for key, value in config.items() if key not in left_out}
            known = AutoConfig.for_model(str(config.get("model_type")), **given)
    except ValueError as e:
        own = " Its own Python code is run with --trust-remote-code." if "auto_map" in config else ""
        raise LoadError(
            f"transformers knows no model type {config.get('model_type')!r} ({_first_line(e)}).{own}"
        ) from None
    # Of configurations with parts the text's; what the engine asks is there.
    text = known.get_text_config()
    description = TransformersDescription(
        architecture=(config.get("architectures") or ["(none)"])[0],
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        max_position_embeddings=getattr(text, "max_position_embeddings", 0),
        tie_word_embeddings=bool(text.tie_word_embeddings),
        layers=(),
        norm=None,
        impl="transformers",
        config=known,
        allows_code=code_folder is not None,
    )
    # The usual way to compute experts, whose shapes do not depend on values, wants bfloat16.
    network, probe = _network(description).to(torch.bfloat16), _Probe({})
    if type(network).__name__ != description.architecture and code_folder is None:
        raise LoadError(f"its model type, {config.get('model_type')!r}, is that of {type(network).__name__}.")
    try:
        with torch.device("meta"), _run_by(probe):
            hidden = _hidden(network, torch.zeros(1, 3, dtype=torch.long), torch.arange(3)[None])
    except LoadError:
        raise
    except Exception as e:  # the network's own code, of which anything may come
        raise LoadError(f"{type(network).__name__} does not run in transformers this way ({_first_line(e)}).") from None
    if sorted(probe.seen) != list(range(text.num_hidden_layers)):
        raise LoadError(
            f"{type(network).__name__} has {text.num_hidden_layers} layers, of which {len(probe.seen)} call an "
            "attention that can be exchanged."
        )
    if not description.max_position_embeddings:
        raise LoadError("its configuration does not say how many positions it has (max_position_embeddings).")
    layers = tuple(
        LayerDescription(probe.seen[i], FeedForwardDescription(0), NormDescription(0.0)) for i in sorted(probe.seen)
    )
    return replace(description, layers=layers, hidden_size=hidden.shape[-1])


def _network(description: TransformersDescription) -> Any:
    """The network without weights."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                description.config, attn_implementation=_ATTENTION,
                trust_remote_code=description.allows_code,
            ).eval()  # fmt: skip
    except (ValueError, KeyError, ImportError) as e:
        name = description.architecture
        raise LoadError(f"transformers cannot make {name} with an exchanged attention ({_first_line(e)}).") from None


def _hidden(network: Any, token_ids: Tensor, positions: Tensor) -> Tensor:
    """token_ids, positions [1, T] -> [1, T, H], as the network's head gets it"""
    found: Tensor = network.base_model(input_ids=token_ids, position_ids=positions, use_cache=False).last_hidden_state
    return found


class _Bridge:
    """Between torch's tensors and the arrays of a backend, which may be numpy's. Nothing is copied whose elements lie
    in order."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        place: Any = ops.place(np.zeros(1, np.float32))
        self._takes_numpy = isinstance(place, np.ndarray)
        self.device = torch.device("cpu") if self._takes_numpy else place.device

    def array(self, tensor: Tensor) -> Array:
        tensor = tensor.contiguous()
        if not self._takes_numpy:
            return cast(Array, tensor)
        if tensor.dtype is torch.bfloat16:  # numpy itself knows none
            return cast(Array, tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
        return cast(Array, tensor.numpy())

    def tensor(self, array: Any) -> Tensor:
        return array if isinstance(array, Tensor) else to_torch(array)


class _ByRows(nn.Module):
    """An operation on rows [T, N] in the place of a module."""

    def __init__(self, operation: Callable[[Array], Array], bridge: _Bridge) -> None:
        super().__init__()
        self._operation, self._bridge = operation, bridge

    def forward(self, x: Tensor) -> Tensor:
        found = self._operation(self._bridge.array(x.reshape(-1, x.shape[-1])))
        return self._bridge.tensor(found).reshape(*x.shape[:-1], -1)


class _Embedding(nn.Module):
    def __init__(self, weight: LinearWeight, bridge: _Bridge, dtype: str) -> None:
        super().__init__()
        self._weight, self._bridge, self._dtype = weight, bridge, dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self._bridge.ops.embedding(self._bridge.array(token_ids.reshape(-1).int()), self._weight, self._dtype)
        return self._bridge.tensor(rows).reshape(*token_ids.shape, -1)


class _Outputs(BaseModelOutputWithPast):  # type: ignore[misc]
    def __getattr__(self, name: str) -> None:
        """Whatever else a head looks for is not there."""


class _Given(nn.Module):
    """In the place of the network below its head: hidden states that have been computed."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor

    @property
    def decoder(self) -> _Given:
        """What heads call that know only a part of the network below them."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> _Outputs:
        return _Outputs(last_hidden_state=self.hidden)


class TransformersModel:
    """See `octavo.models.registry.Model`."""

    is_recordable = False  # a step is Python and torch's own operations

    def __init__(
        self, description: TransformersDescription, weights: Weights, ops: Ops, max_positions: int, dtype: str
    ) -> None:
        self.vocab_size, self.layer_caches = description.vocab_size, description.layer_caches
        attentions = [a for layer in description.layers if isinstance(a := layer.attention, AttentionDescription)]
        self._bridge = _Bridge(ops)
        self._group_of_layer = {
            layer: number for number, group in enumerate(group_layers(self.layer_caches)) for layer in group.layers
        }
        parameters = Parameters(weights, ops, max_positions, dtype)
        self._rotary = [parameters.rotary(None, attention.head_size) for attention in attentions]
        self._network = _network(description).to(getattr(torch, dtype))
        self._network.config._experts_implementation = "eager"  # which computes each row by itself
        own = _exchange(self._network, parameters, self._bridge, description)
        self._num_weight_bytes = parameters.num_matrix_bytes + own
        self._head = _network(description)
        for name, module in self._network.named_children():
            setattr(self._head, name, module)
        self._given = _Given()
        setattr(self._head, self._head.base_model_prefix, self._given)
        self._batch: StepBatch
        self._caches: Sequence[LayerKVCache]

    def num_weight_bytes(self) -> int:
        """Bytes of the packed matrices, and of what transformers computes with."""
        return self._num_weight_bytes

    def forward(self, batch: StepBatch, caches: Sequence[LayerKVCache]) -> Array:
        """-> hidden [T, H], as the head gets it. One cache a layer."""
        self._batch, self._caches = batch, caches
        bridge = self._bridge
        with _run_by(self):
            token_ids, positions = bridge.tensor(batch.token_ids).long(), bridge.tensor(batch.positions)
            return bridge.array(_hidden(self._network, token_ids[None], positions[None])[0])

    def logits(self, hidden: Array) -> Array:
        """hidden [N, H] -> [N, vocab_size] float32. The network's own head, with whatever it does after its matrix."""
        self._given.hidden = self._bridge.tensor(hidden)[None]
        with _run_by(self):
            tokens = torch.zeros(1, len(hidden), dtype=torch.long, device=self._given.hidden.device)
            found: Tensor = self._head(input_ids=tokens, use_cache=False).logits
            return self._bridge.array(found[0].float())

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        description: AttentionDescription,
        sinks: Tensor | None,
    ) -> Tensor:
        """`_Attends.attend`."""
        ops, batch, cache, value_size = self._bridge.ops, self._batch, self._caches[layer], value.shape[3]
        tables = batch.groups[self._group_of_layer[layer]]
        # The cache has one size for both: smaller values, as in latent attention, are filled up with zeros.
        value = nn.functional.pad(value, (0, key.shape[3] - value_size)) if value_size < key.shape[3] else value
        rows, keys, values = (self._bridge.array(x[0].transpose(0, 1)) for x in (query, key, value))
        ops.rotary_and_cache(rows, keys, values, batch.positions, self._rotary[layer], cache, tables.slot_mapping)
        attended = ops.paged_attention(
            rows, cache, tables.block_tables, batch.query_start_loc, batch.seq_lens, description.scale,
            description.window, description.softcap,
            sinks=None if sinks is None else self._bridge.array(sinks.float()),
        )  # fmt: skip
        return self._bridge.tensor(attended).reshape(1, len(rows), description.num_heads, -1)[..., :value_size]


def _exchange(network: Any, parameters: Parameters, bridge: _Bridge, description: TransformersDescription) -> int:
    """Put our modules into the network and the checkpoint's weights into the rest. -> bytes of the rest"""
    own_bytes, embedding, head = 0, network.get_input_embeddings(), network.get_output_embeddings()
    modules = dict(network.named_modules())
    (embedding_name,) = [name for name, module in modules.items() if module is embedding]
    tied: LinearWeight | None = None  # the embedding's matrix, which may be the head's too
    if type(embedding) is nn.Embedding or description.tie_word_embeddings:
        tied = parameters.linear([embedding_name], [embedding.num_embeddings], embedding.embedding_dim)
    for name, module in modules.items():
        exchanged: nn.Module | None = None
        if module is embedding and type(module) is nn.Embedding:
            assert tied is not None
            exchanged = _Embedding(tied, bridge, parameters.dtype)
        elif module is head and description.tie_word_embeddings and module.bias is None:
            assert tied is not None
            exchanged = _product(tied, bridge)
        elif type(module) is nn.Linear:
            weight = parameters.linear([name], [module.out_features], module.in_features, module.bias is not None)
            exchanged = _product(weight, bridge)
        else:
            own_bytes += _fill(name, module, network, parameters, bridge)
            exchanged = _as_norm(module, bridge) or _as_activation(module, bridge)
        if exchanged is not None:
            parent, _, key = name.rpartition(".")
            setattr(network.get_submodule(parent), key, exchanged)
    return own_bytes


def _product(weight: LinearWeight, bridge: _Bridge) -> _ByRows:
    return _ByRows(lambda x: bridge.ops.linear(x, weight), bridge)


def _fill(name: str, module: nn.Module, network: Any, parameters: Parameters, bridge: _Bridge) -> int:
    """Give a module its parameters, and its buffers: the checkpoint's, or what the network makes of its settings."""
    prefix, num_bytes = f"{name}." if name else "", 0
    buffers = dict(module.named_buffers(recurse=False))
    for key, buffer in buffers.items():
        unset = float("nan") if buffer.is_floating_point() else -1
        setattr(module, key, torch.full(buffer.shape, unset, dtype=buffer.dtype, device=bridge.device))
    if buffers:
        network._init_weights(module)  # parameters are on the meta device still
    for key, buffer in module.named_buffers(recurse=False):
        if prefix + key in parameters.weights:
            setattr(module, key, bridge.tensor(parameters.array(f"{prefix}{key}", tuple(buffer.shape))))
        elif buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise LoadError(f"transformers does not say what {prefix}{key} of {type(module).__name__} is.")
    for key, parameter in module.named_parameters(recurse=False):
        tensor = bridge.tensor(parameters.array(f"{prefix}{key}", tuple(parameter.shape)))
        num_bytes += tensor.nbytes
        setattr(module, key, nn.Parameter(tensor.clone(), False))  # the checkpoint's may alias its file
    return num_bytes


def _as_norm(module: nn.Module, bridge: _Bridge) -> _ByRows | None:
    """Our norm in the place of one that gives the same numbers."""
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


def _as_activation(module: nn.Module, bridge: _Bridge) -> _ByRows | None:
    kind = _ACTIVATIONS.get(type(module).__name__)
    if kind is None:
        return None
    if kind == "gelu" and getattr(module, "approximate", "none") == "tanh":
        kind = "gelu_tanh"
    return _ByRows(lambda x: bridge.ops.activation(x, kind), bridge)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
