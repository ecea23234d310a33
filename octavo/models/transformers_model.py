"""Architectures that Octavo does not build itself. `transformers` computes them; Octavo's attention over the paged
cache, products, embedding, norms and activations replace parts of its modules.

`describe` runs the network once on the meta device, which computes shapes only, and notes how each layer calls its
attention. For the rest of the engine, the only difference of such a model
is that its steps are not captured. `octavo.models.registry` imports this module only when such a model is asked for: it
needs the extra `transformers`.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

# torch's own threads would spin while they wait and take cores from the native kernels. torch reads this variable when
# it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from octavo.errors import LoadError
from octavo.kv_cache.groups import group_layers
from octavo.layers.attention import AttentionDescription
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.norm import NormDescription
from octavo.layers.parameters import NamedMatrix, Parameters
from octavo.loading.weights import Weights
from octavo.models.description import LayerDescription, ModelDescription
from octavo.models.transformers_exchange import Bridge, exchange, first_line
from octavo.ops import Array, LayerKVCache, Ops
from octavo.step_batch import StepBatch

_ATTENTION = "octavo"
_LAYER_TYPES = {
    "full_attention",
    "sliding_attention",
}  # types with one key and value for each token, and at most a window


class _Call(NamedTuple):
    """A layer's call of its attention: query [1, Q, T, D], key and value [1, G, T, D]. The answer is [1, T, Q, D].

    `settings` are the keyword arguments: scaling, sliding_window, softcap, s_aux (sinks [Q]) and more.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: object
    settings: dict[str, Any]

    @property
    def layer(self) -> int:
        layer: int = self.module.layer_idx  # type: ignore[assignment]
        return layer

    def description(self) -> AttentionDescription:
        """Return the attention that the call asks for. Raises `LoadError` if Octavo's attention cannot compute it."""
        name, asked, key_size = type(self.module).__name__, self.settings, self.key.shape[3]
        if asked.get("is_causal") is False or getattr(self.module, "is_causal", True) is False:
            raise LoadError(f"{name} attends to positions that come later.")
        if self.mask is not None:
            raise LoadError(f"{name} brings a mask of its own.")
        unbuilt = [setting for setting in ("position_bias", "head_mask") if asked.get(setting) is not None]
        if unbuilt:
            raise LoadError(f"{name} asks for {', '.join(unbuilt)}, which attention does not do here.")
        if self.value.shape[3] > key_size:
            raise LoadError(f"{name} has values of {self.value.shape[3]} elements for keys of {key_size}.")
        if getattr(self.module, "layer_idx", None) is None:
            raise LoadError(f"{name} does not say which layer it belongs to.")
        scale = asked.get("scaling")
        return AttentionDescription(
            num_heads=self.query.shape[1],
            num_kv_heads=self.key.shape[1],
            head_size=key_size,
            scale=key_size**-0.5 if scale is None else float(scale),
            rope=None,  # the network has rotated queries and keys
            window=asked.get("sliding_window") or 0,
            softcap=asked.get("softcap") or 0.0,
        )


# The function that answers the attention calls of the running network.
_running: ContextVar[Callable[[_Call], Tensor]] = ContextVar("running")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **settings: Any
) -> tuple[Tensor, None]:
    """The attention function that is registered with transformers; networks call it for every layer."""
    return _running.get()(_Call(module, query, key, value, attention_mask, settings)), None


@contextmanager
def _run_by(attend: Callable[[_Call], Tensor]) -> Iterator[None]:
    token = _running.set(attend)
    try:
        with torch.inference_mode():
            yield
    finally:
        _running.reset(token)


# Arguments of functions of `masking_utils` that change the causal mask.
_MASK_CHANGES = ("or_mask_function", "and_mask_function", "block_sequence_ids")


@contextmanager
def _refusing_masks() -> Iterator[None]:
    """Raise `LoadError` if a network asks for another mask than the causal mask with or without a window.

    For an attention function that it does not know, transformers makes no mask, without an error. Every function that
    makes a mask first calls `_preprocess_mask_arguments`; its replacement looks at the caller's arguments."""
    original = masking_utils._preprocess_mask_arguments

    def look(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        changes = [name for name in _MASK_CHANGES if caller.f_locals.get(name) is not None]
        if changes or "chunked" in caller.f_code.co_name:
            what = ", ".join(changes) or caller.f_code.co_name
            raise LoadError(f"it brings a mask of its own ({what}).")
        return original(*args, **kwargs)

    masking_utils._preprocess_mask_arguments = look
    try:
        yield
    finally:
        masking_utils._preprocess_mask_arguments = original


@dataclass(frozen=True, slots=True)
class TransformersDescription(ModelDescription):
    """A network of transformers. Only the attention of its layers is described."""

    config: Any = None  # transformers' configuration
    allows_code: bool = False  # whether the checkpoint's own Python code may run


def describe(config: Mapping[str, Any], code_folder: str | None = None) -> TransformersDescription:
    """Return the description of the model of config.json. `code_folder` is the checkpoint whose Python code may run.

    Raises `LoadError`, with the reason, for a network that cannot be run with an exchanged attention.
    """
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attention)
    try:
        if code_folder is not None:
            known = type(AutoConfig.from_pretrained(code_folder, trust_remote_code=True)).from_dict(dict(config))
            known.name_or_path = code_folder  # transformers looks here for the network's code
        else:
            # `Weights` reads quantized matrices, so transformers must not know of the quantization.
            left_out = ("model_type", "quantization_config")
            given = {key: value for key, value in config.items() if key not in left_out}
            known = AutoConfig.for_model(str(config.get("model_type")), **given)
    except ValueError as e:
        own = " Its own Python code is run with --trust-remote-code." if "auto_map" in config else ""
        raise LoadError(
            f"transformers knows no model type {config.get('model_type')!r} ({first_line(e)}).{own}"
        ) from None
    # The part of the configuration for text, which has all settings that the engine needs.
    text = known.get_text_config()
    # Other layer types must be refused by name: in short prompts their attention looks like the usual one.
    if others := sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES):
        raise LoadError(f"its layers of the type {', '.join(others)} are more than attention over the keys of tokens.")
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
    # transformers' usual code for experts has shapes that do not depend on values, but needs bfloat16.
    network, seen = _network(description).to(torch.bfloat16), dict[int, AttentionDescription]()
    if type(network).__name__ != description.architecture and code_folder is None:
        raise LoadError(f"its model type, {config.get('model_type')!r}, is that of {type(network).__name__}.")

    def note(call: _Call) -> Tensor:
        found = call.description()
        if call.layer in seen:
            raise LoadError(f"layer {call.layer} calls its attention more than once.")
        seen[call.layer] = found
        return call.query.new_empty(1, call.query.shape[2], call.query.shape[1], call.value.shape[3])

    try:
        with torch.device("meta"), _run_by(note), _refusing_masks():
            hidden = _hidden(network, torch.zeros(1, 3, dtype=torch.long), torch.arange(3)[None])
    except LoadError:
        raise
    except Exception as e:  # the network's own code may raise anything
        raise LoadError(f"{type(network).__name__} does not run in transformers this way ({first_line(e)}).") from None
    if sorted(seen) != list(range(text.num_hidden_layers)):
        raise LoadError(
            f"{type(network).__name__} has {text.num_hidden_layers} layers, of which {len(seen)} call an "
            "attention that can be exchanged."
        )
    if not description.max_position_embeddings:
        raise LoadError("its configuration does not say how many positions it has (max_position_embeddings).")
    layers = tuple(LayerDescription(seen[i], FeedForwardDescription(0), NormDescription(0.0)) for i in sorted(seen))
    return replace(description, layers=layers, hidden_size=hidden.shape[-1])


def _network(description: TransformersDescription) -> Any:
    """Return the network without weights, on the meta device."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                description.config, attn_implementation=_ATTENTION,
                trust_remote_code=description.allows_code,
            ).eval()  # fmt: skip
    except (ValueError, KeyError, ImportError) as e:
        name = description.architecture
        raise LoadError(f"transformers cannot make {name} with an exchanged attention ({first_line(e)}).") from None


def _hidden(network: Any, token_ids: Tensor, positions: Tensor) -> Tensor:
    """Return the hidden states [1, T, H] that the network's head reads; token_ids, positions [1, T]."""
    found: Tensor = network.base_model(input_ids=token_ids, position_ids=positions, use_cache=False).last_hidden_state
    return found


class _Outputs(BaseModelOutputWithPast):  # type: ignore[misc]
    def __getattr__(self, name: str) -> None:
        """Return None for everything else that a head looks for."""


class _Given(nn.Module):
    """A module in place of the network below its head: it returns hidden states that are already computed."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor

    @property
    def decoder(self) -> Self:
        """Return itself: some heads call only this part of the network below them."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> _Outputs:
        return _Outputs(last_hidden_state=self.hidden)


class TransformersModel:
    """A model that transformers computes. Its interface is `octavo.models.registry.Model`."""

    is_recordable = False  # a step is Python and torch's own operations

    def __init__(
        self, description: TransformersDescription, weights: Weights, ops: Ops, max_positions: int, dtype: str
    ) -> None:
        self.vocab_size, self.layer_caches = description.vocab_size, description.layer_caches
        self._attentions = description.mixers(AttentionDescription)
        self._bridge = Bridge(ops)
        self._group_of_layer = {
            layer: number for number, group in enumerate(group_layers(self.layer_caches)) for layer in group.layers
        }
        parameters = Parameters(weights, ops, max_positions, dtype)
        self._rotary = [parameters.rotary(None, attention.head_size) for attention in self._attentions]
        self._network = _network(description).to(getattr(torch, dtype))
        self._network.config._experts_implementation = "eager"  # "eager" computes each row by itself
        own = exchange(self._network, parameters, self._bridge, description.tie_word_embeddings)
        self._num_weight_bytes = parameters.num_matrix_bytes + own
        self._head = _network(description)
        for name, module in self._network.named_children():
            setattr(self._head, name, module)
        self._given = _Given()
        setattr(self._head, self._head.base_model_prefix, self._given)
        self._batch: StepBatch
        self._caches: Sequence[LayerKVCache]

    @property
    def matrices(self) -> tuple[NamedMatrix, ...]:
        """Return no matrices: adapters for models of transformers are not built."""
        return ()

    def num_weight_bytes(self) -> int:
        """Return the bytes of the packed matrices and of the parameters that transformers computes with."""
        return self._num_weight_bytes

    def forward(self, batch: StepBatch, caches: Sequence[LayerKVCache]) -> Array:
        """Return the hidden states [T, H] that the head reads. There is one cache for each layer."""
        self._batch, self._caches = batch, caches
        bridge = self._bridge
        with _run_by(self._attend):
            token_ids, positions = bridge.tensor(batch.token_ids).long(), bridge.tensor(batch.positions)
            return bridge.array(_hidden(self._network, token_ids[None], positions[None])[0])

    def logits(self, hidden: Array) -> Array:
        """Return the logits [N, vocab_size] float32 of hidden [N, H], by the network's own head."""
        self._given.hidden = self._bridge.tensor(hidden)[None]
        with _run_by(self._attend):
            tokens = torch.zeros(1, len(hidden), dtype=torch.long, device=self._given.hidden.device)
            found: Tensor = self._head(input_ids=tokens, use_cache=False).logits
            return self._bridge.array(found[0].float())

    def _attend(self, call: _Call) -> Tensor:
        ops, batch, layer, value_size = self._bridge.ops, self._batch, call.layer, call.value.shape[3]
        description, tables, cache = (
            self._attentions[layer], batch.groups[self._group_of_layer[layer]], self._caches[layer]
        )  # fmt: skip
        # Keys and values have the same size in the cache: smaller values (latent attention) are padded with zeros.
        value, missing = call.value, description.head_size - value_size
        value = nn.functional.pad(value, (0, missing)) if missing else value
        rows, keys, values = (self._bridge.array(x[0].transpose(0, 1)) for x in (call.query, call.key, value))
        # The network has rotated queries and keys; this table leaves them as they are.
        ops.rotary_and_cache(rows, keys, values, batch.positions, self._rotary[layer], cache, tables.slot_mapping)
        sinks = call.settings.get("s_aux")
        attended = ops.paged_attention(
            rows, cache, tables.block_tables, batch.query_start_loc, batch.seq_lens, description.scale,
            description.window, description.softcap,
            sinks=None if sinks is None else self._bridge.array(sinks.float()),
        )  # fmt: skip
        return self._bridge.tensor(attended).reshape(1, len(rows), description.num_heads, -1)[..., :value_size]
