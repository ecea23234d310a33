"""Draft heads: small networks that make draft tokens from the model's hidden states, in their published layouts.

A chain head (`EagleHead`, `Eagle3Head`) computes the hidden state of the next position from the hidden state of a
position and the token that follows it, and then logits from the new hidden state: EAGLE (Li et al. 2024, arXiv
2401.15077), EAGLE-3 (Li et al. 2025, arXiv 2503.01840), and the multi-token prediction modules of DeepSeek-V3 (arXiv
2412.19437). It has a KV cache like a model. At positions that the model has not computed yet, the head's own hidden
states replace the model's.

`MedusaHeads` (Cai et al. 2024, arXiv 2401.10774) make each of the next tokens from one hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError, LoadError
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.attention import Attention, AttentionDescription
from octavo.layers.mla import MLADescription
from octavo.layers.norm import Norm
from octavo.layers.parameters import NamedMatrix, Parameters
from octavo.loading.weights import Weights
from octavo.models.block import Block
from octavo.models.config_reader import read
from octavo.models.decoder import Decoder
from octavo.models.description import LayerDescription, ModelDescription
from octavo.models.families import FAMILIES
from octavo.ops import Array, LayerKVCache, LinearWeight, Ops
from octavo.step_batch import StepBatch

# model_type of a head's configuration -> the family of its layers. Other heads have Llama's layers.
_FAMILY_OF_TYPE = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM"}
_NUM_TAPS = 3  # EAGLE-3 reads the inputs of a low, a middle and a high layer


class AuxHiddenStates:
    """EAGLE-3's features: the product of the head's first matrix with the hidden states of three of the model's
    layers."""

    def __init__(self, parts: Mapping[int, LinearWeight], ops: Ops, dtype: str) -> None:
        self._parts, self._ops, self._dtype = parts, ops, dtype
        self.features: Array | None = None  # [T, H], of the last forward pass

    def see(self, layer: int, hidden: Array) -> None:
        """Add hidden [T, H], the input of the layer, to the features if the head reads it. Called in layer order."""
        weight = self._parts.get(layer)
        if weight is None:
            return
        hidden = self._ops.quantize(hidden, weight)  # the stream may be float32
        if layer == min(self._parts):
            self.features = self._ops.linear(hidden, weight, self._dtype)
        else:
            assert self.features is not None
            self._ops.linear_add(hidden, weight, self.features)


class HeadTarget(NamedTuple):
    """The model that a head makes draft tokens for: this worker's part, the description of the whole model, and a
    function that reads a further part.

    Workers that have no whole embedding or output matrix read a copy with `read`."""

    model: Decoder
    description: ModelDescription
    read: Callable[[ModelDescription], Decoder]

    def tables(self, embeds: bool, outputs: bool) -> tuple[Decoder, Decoder]:
        """Return the network for embedding and the network for logits. Each is the model itself, or a copy of its
        matrices if the head wants it (`embeds`, `outputs`) and this worker's part cannot do it alone."""
        model, whole = self.model, replace(self.description, per_layer_embeddings=None, altup=None)
        num_layers = len(whole.layers)
        embeds, outputs = embeds and not model.input.can_embed_locally, outputs and not model.output.can_compute_locally
        if embeds and outputs:
            both = self.read(replace(whole, layers=()))
            return both, both
        embedding = self.read(replace(whole, own_layers=range(0))) if embeds else model
        output = self.read(replace(whole, own_layers=range(num_layers, num_layers))) if outputs else model
        return embedding, output


class ChainHead:
    """The base of chain heads: embedding and output matrix, which are the model's if the head has none of its own.

    A chain head is a `Model` that also reads `features`."""

    is_recordable = True
    # [most tokens of a step, hidden size]: the hidden states of the step's positions, the model's or the head's own. It
    # must be set before a step; the step reads as many rows as it has tokens.
    features: Array
    rows: Array  # [most tokens of a step] int64: 0, 1, ...
    layer_caches: tuple[LayerCacheSpec, ...]
    matrices: tuple[NamedMatrix, ...] = ()  # adapters do not change heads

    def __init__(
        self, target: HeadTarget, weights: Weights, parameters: Parameters, names: Mapping[str, str],
        own_vocab_size: int | None = None,
    ) -> None:  # fmt: skip
        """Take the head's own embedding and output matrix from `weights`, if they are there.

        `names` maps "embedding" and "output" to the modules that such a head may have. `own_vocab_size` is the number
        of the head's tokens, if it is smaller than the model's."""
        self.target, self._parameters, self._ops = target.model, parameters, parameters.ops
        self._dtype = parameters.dtype
        self.vocab_size, self.hidden_size = target.model.vocab_size, target.description.hidden_size
        # The model's token for each head token, if the head has fewer.
        self.target_token_ids: NDArray[np.int64] | None = None
        self._embedding: LinearWeight | None = None
        size = target.description.hidden_size
        if "embedding" in names and f"{names['embedding']}.weight" in weights:
            self._embedding = parameters.linear([names["embedding"]], [self.vocab_size], size)
        self._output: LinearWeight | None = None
        if "output" in names and f"{names['output']}.weight" in weights:
            self._output = parameters.linear([names["output"]], [own_vocab_size or self.vocab_size], size)
        self._embedder, self._outputter = target.tables(self._embedding is None, self._output is None)

    def num_weight_bytes(self) -> int:
        copies = {self._embedder, self._outputter} - {self.target}
        return self._parameters.num_matrix_bytes + sum(copy.num_weight_bytes() for copy in copies)

    def features_of(self, hidden: Array) -> Array:
        """Return the head's features for hidden [T, H]: the model's hidden states before its final norm, or the
        features of `AuxHiddenStates`."""
        raise NotImplementedError

    def forward(self, batch: StepBatch, caches: Sequence[LayerKVCache]) -> Array:
        """Return hidden states [T, H], which replace the features of the next positions."""
        raise NotImplementedError

    def logits(self, hidden: Array) -> Array:
        """Return the logits [N, vocab_size] float32 of hidden [N, H]."""
        raise NotImplementedError

    def _embed(self, token_ids: Array) -> Array:
        """Return the embeddings [T, H] of token_ids [T] int32."""
        if self._embedding is None:
            return self._embedder.input.embed(token_ids)
        return self._ops.embedding(token_ids, self._embedding, self._dtype)

    def _project(self, hidden: Array) -> Array:
        """Return the logits [N, V] float32 of hidden [N, H], which the caller has normed if the head norms it."""
        if self._output is None:
            return self._outputter.output.logits_of_normed(hidden)
        return self._ops.linear(hidden, self._output, "float32")


class ModuleNames(NamedTuple):
    """The names of a multi-token prediction module in the model's own checkpoint."""

    joint: str
    norms: tuple[str, str, str]  # of the embedding, of the hidden state, and of the result
    layer: str  # prefix of the layer's tensors
    tables: dict[str, str]  # by "embedding" and "output": its own module, if it has one
    passes_normed: bool  # the next position reads the module's result after the norm


def module_names(description: ModelDescription, weights: Weights) -> ModuleNames | None:
    """Return the names of the first multi-token prediction module, if the checkpoint has one in a known layout."""
    prefix = f"{description.layer_prefix}{len(description.layers)}."  # DeepSeek-V3 and models with its layout
    if description.num_unused_layers:
        norms = f"{prefix}enorm", f"{prefix}hnorm", f"{prefix}shared_head.norm"
        tables = {"embedding": f"{prefix}embed_tokens", "output": f"{prefix}shared_head.head"}
        return ModuleNames(f"{prefix}eh_proj", norms, prefix, tables, False)
    if "mtp." in description.unused and "mtp.fc.weight" in weights:  # Qwen3-Next and Qwen3.5
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"
        return ModuleNames("mtp.fc", norms, "mtp.layers.0.", {}, True)
    return None


class EagleHead(ChainHead):
    """A chain head: a matrix from embedding and hidden state to the hidden size, then one or more decoder layers.

    EAGLE reads the model's hidden states after the final norm, and its results are such states. A multi-token
    prediction module (`module`) norms both inputs and its result; its layer is `_module_layer`.
    """

    def __init__(
        self, target: HeadTarget, config: Mapping[str, Any], weights: Weights, ops: Ops, max_positions: int, dtype: str,
        module: ModuleNames | None = None,
    ) -> None:  # fmt: skip
        parameters = Parameters(weights, ops, max_positions, dtype)
        size = target.description.hidden_size
        self._norms: tuple[Norm, Norm, Norm] | None = None
        self._passes_normed = module is not None and module.passes_normed
        if module is None:
            names = {"embedding": "model.embed_tokens", "output": "lm_head"}
            super().__init__(target, weights, parameters, names)
            layers = described(config, target.description).layers
            joint, layer_prefixes = "model.fc", [f"model.layers.{i}." for i in range(len(layers))]
            if "model.layers.0.input_layernorm.weight" not in weights:  # EAGLE's features are normed already
                layers = (replace(layers[0], attention_norm=None), *layers[1:])
        else:
            super().__init__(target, weights, parameters, module.tables)
            layers = (_module_layer(target.description),)
            joint, layer_prefixes = module.joint, [module.layer]
            norms = [Norm(layers[0].norm, parameters, name, size) for name in module.norms]
            self._norms = norms[0], norms[1], norms[2]
        bias = f"{joint}.bias" in weights and f"{joint}.bias"
        self._joint = [parameters.linear([joint], [size], size, bias if i == 0 else False, part=(i, 2)) for i in (0, 1)]
        self._blocks = [
            Block(layer, size, parameters, name) for layer, name in zip(layers, layer_prefixes, strict=True)
        ]
        self.layer_caches = tuple(layer.attention.cache for layer in layers if layer.attention is not None)

    def features_of(self, hidden: Array) -> Array:
        return self.target.output.final_norm(hidden)

    def forward(self, batch: StepBatch, caches: Sequence[LayerKVCache]) -> Array:
        ops = self._ops
        inputs = self._embed(batch.token_ids), self.features[: batch.token_ids.shape[0]]
        if self._norms is not None:
            inputs = self._norms[0].forward(inputs[0]), self._norms[1].forward(inputs[1])
        residual = ops.linear(inputs[0], self._joint[0], self._dtype)
        ops.linear_add(inputs[1], self._joint[1], residual)
        for block, cache in zip(self._blocks, caches, strict=True):
            residual, _ = block.forward(residual, batch, [(batch.groups[0], cache)])
        return self._norms[2].forward(residual) if self._norms is not None and self._passes_normed else residual

    def logits(self, hidden: Array) -> Array:
        return self._project(hidden if self._norms is None or self._passes_normed else self._norms[2].forward(hidden))


def _module_layer(description: ModelDescription) -> LayerDescription:
    """Return the layer of a multi-token prediction module: the model's last layer with attention.

    If this layer reads keys that an earlier layer has chosen (GLM 5.2), the module has an index of its own, because no
    layer comes before it."""
    layers = [layer for layer in description.layers if layer.attention and layer.attention.cache.kind != "state"]
    attention = layers[-1].attention
    if not isinstance(attention, MLADescription) or not attention.shares_index:
        return layers[-1]
    index = [latent.index for latent in description.mixers(MLADescription) if latent.index is not None][-1]
    return replace(layers[-1], attention=replace(attention, index=index, shares_index=False))


class Eagle3Head(ChainHead):
    """A chain head of one layer whose attention reads embedding and features side by side.

    `aux_hidden_states` computes features from the model's hidden states. Features of positions that the model has not
    computed yet are the layer's own results."""

    def __init__(
        self, target: HeadTarget, config: Mapping[str, Any], weights: Weights, ops: Ops, max_positions: int, dtype: str
    ) -> None:
        parameters = Parameters(weights, ops, max_positions, dtype)
        num_own = int(config.get("draft_vocab_size") or target.model.vocab_size)
        super().__init__(target, weights, parameters, {"embedding": "model.embed_tokens", "output": "lm_head"}, num_own)
        size = target.description.hidden_size
        if self._output is not None and num_own != target.model.vocab_size:
            offsets = weights.take_integers("d2t", (num_own,))
            self.target_token_ids = np.arange(num_own) + offsets
            self.vocab_size = num_own
        for unused in ("t2d", "d2t"):
            weights.ignore(unused)
        description = described(config, target.description)
        [layer] = description.layers
        if not isinstance(layer.attention, AttentionDescription) or layer.feed_forward is None:
            raise LoadError("an EAGLE-3 head without attention and feed-forward is not built.")
        has_own_name = "midlayer.self_attn.q_proj.weight" in weights
        prefix = "midlayer." if has_own_name else "model.layers.0."

        def norm(name: str) -> Norm:
            return Norm(layer.norm, parameters, name, size)

        self._input_norm, self._hidden_norm = norm(f"{prefix}input_layernorm"), norm(f"{prefix}hidden_norm")
        self._feed_forward_norm, self._norm = norm(f"{prefix}post_attention_layernorm"), norm("model.norm")
        attention = replace(layer.attention, num_inputs=2)
        self._attention = Attention(attention, size, parameters, prefix)
        self._feed_forward = layer.feed_forward.build(size, parameters, prefix)
        self._adds_normed = bool(config.get("norm_before_residual"))
        self.layer_caches = (attention.cache,)
        parts = [parameters.linear(["model.fc"], [size], size, part=(i, _NUM_TAPS)) for i in range(_NUM_TAPS)]
        layers = aux_layers(config, target.description)
        if (first := target.model.description.stage.start) > layers[0]:
            raise ConfigError(
                f"the head reads the inputs of layers {', '.join(map(str, layers))}, and the last stage of "
                f"--pipeline-parallel-size has those from {first} on: it must have all of them."
            )
        self.aux_hidden_states = AuxHiddenStates(dict(zip(layers, parts, strict=True)), ops, dtype)

    def features_of(self, hidden: Array) -> Array:
        return hidden

    def forward(self, batch: StepBatch, caches: Sequence[LayerKVCache]) -> Array:
        ops, num_tokens = self._ops, batch.token_ids.shape[0]
        normed = self._hidden_norm.forward(self.features[:num_tokens])
        # The residual stream must be a copy: layers add to it, and `features` must stay unchanged.
        residual = normed if self._adds_normed else ops.take_rows(self.features, self.rows[:num_tokens])
        embedded = self._input_norm.forward(self._embed(batch.token_ids))
        self._attention.forward(embedded, batch, batch.groups[0], caches[0], normed).add_to(residual)
        hidden = self._feed_forward_norm.forward(residual, self._feed_forward.consumer)
        self._feed_forward.forward(hidden).add_to(residual)
        return residual

    def logits(self, hidden: Array) -> Array:
        return self._project(self._norm.forward(hidden))


def described(config: Mapping[str, Any], target: ModelDescription) -> ModelDescription:
    """Return the description of a head's layers. Raises `LoadError` if they do not fit the model."""
    name = _FAMILY_OF_TYPE.get(str(config.get("model_type")), "LlamaForCausalLM")
    try:
        description = read(name, FAMILIES[name], {"max_position_embeddings": 2048} | dict(config))
    except KeyError as e:
        raise LoadError(f"the head's configuration has no {e.args[0]!r}.") from None
    size = target.hidden_size
    if description.hidden_size != size:
        raise LoadError(
            f"the head is for a model with a hidden size of {description.hidden_size}, and the model's is {size}."
        )
    return description


def aux_layers(config: Mapping[str, Any], target: ModelDescription) -> list[int]:
    """Return the layers whose inputs EAGLE-3 reads: from its configuration, or by the authors' default.

    Raises `LoadError` if the model does not have these layers."""
    num_layers = len(target.layers)
    named = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    found = [int(layer) for layer in named or (2, num_layers // 2, num_layers - 3)]
    if len(found) != _NUM_TAPS or sorted(set(found)) != found or not found[0] >= 0 or found[-1] >= num_layers:
        raise LoadError(f"the head reads the inputs of layers {found} of a model with {num_layers} layers.")
    return found


class MedusaHeads:
    """One head for each draft token: residual layers and an output matrix, over the hidden state after the model's
    final norm. Head i is for the token i + 2 places after the position. Modules have the authors' names or vLLM's."""

    def __init__(
        self, target: HeadTarget, config: Mapping[str, Any], weights: Weights, ops: Ops, max_positions: int, dtype: str
    ) -> None:
        parameters = Parameters(weights, ops, max_positions, dtype)
        self._target, self._ops, self._dtype, self._parameters = target.model, ops, dtype, parameters
        self.hidden_size = size = target.description.hidden_size
        vocab_size = target.model.vocab_size
        self.num_heads = int(config.get("medusa_num_heads") or config.get("num_heads") or 0)
        num_layers = int(config.get("medusa_num_layers") or config.get("num_hidden_layers") or 1)
        own = config.get("truncated_vocab_size") or vocab_size
        if own != vocab_size or int(config.get("vocab_size") or vocab_size) != vocab_size:
            raise LoadError(f"Medusa heads over another vocabulary than the model's {vocab_size} tokens are not built.")
        if not self.num_heads:
            raise LoadError("the heads' configuration has no 'medusa_num_heads'.")
        has_vllm_names = "blocks.0.layers.0.weight" in weights
        layer_name = "blocks.{}.layers.{}" if has_vllm_names else "{}.{}.linear"
        output_name = "lm_heads.{}" if has_vllm_names else "{}.{}"

        def layer(head: int, number: int) -> LinearWeight:
            name = layer_name.format(head, number)
            return parameters.linear([name], [size], size, f"{name}.bias" in weights)

        self._layers = [[layer(head, i) for i in range(num_layers)] for head in range(self.num_heads)]
        self._outputs = [
            parameters.linear([output_name.format(head, num_layers)], [vocab_size], size)
            for head in range(self.num_heads)
        ]

    def num_weight_bytes(self) -> int:
        return self._parameters.num_matrix_bytes

    def features_of(self, hidden: Array) -> Array:
        """Return the heads' input: the final norm of the model's hidden states [N, H]."""
        return self._target.output.final_norm(hidden)

    def logits(self, head: int, features: Array) -> Array:
        """Return the logits [N, V] float32 of the token head + 2 places after the position; features [N, H]."""
        ops = self._ops
        for layer in self._layers[head]:
            inner = ops.activation(ops.linear(features, layer, self._dtype), "silu")
            ops.add(inner, features)
            features = inner
        return ops.linear(features, self._outputs[head], "float32")
