"""The decoder of the Llama family: embedding, blocks of attention and gated feed-forward, final norm, output matrix.

One module for all architectures that `DecoderConfig` describes. Weights are packed as they are read, layer by layer, so
that a checkpoint is never in memory twice.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from octavo.batch import StepBatch
from octavo.layers.rotary import identity_table, rotary_table
from octavo.loading.weights import Weights
from octavo.models.decoder_config import DecoderConfig
from octavo.ops import LayerKVCache, LinearWeight, Ops, rows_of


class Attention:
    """Grouped-query attention with rotary positions over the paged cache."""

    def __init__(self, config: DecoderConfig, weights: Weights, prefix: str, ops: Ops, rotary: Tensor) -> None:
        self.config, self.ops, self.rotary = config, ops, rotary
        self.query_size = config.num_heads * config.head_size
        self.kv_size = config.num_kv_heads * config.head_size
        sizes = {"q_proj": self.query_size, "k_proj": self.kv_size, "v_proj": self.kv_size}
        fused = "qkv_proj" if config.fused_projections else None
        self.qkv = _stacked_linear(config, weights, prefix, sizes, fused, config.qkv_bias, ops)
        self.output = _linear(weights, f"{prefix}o_proj", config.hidden_size, self.query_size, config.output_bias, ops)
        self.query_norm = self.key_norm = None
        if config.qk_norm:
            self.query_norm = weights.take(f"{prefix}q_norm.weight", (config.head_size,))
            self.key_norm = weights.take(f"{prefix}k_norm.weight", (config.head_size,))

    def forward(self, hidden: Tensor, residual: Tensor, batch: StepBatch, cache: LayerKVCache) -> None:
        """Add to `residual` [T, H] what attention makes of `hidden`, its norm."""
        config, ops = self.config, self.ops
        qkv = ops.linear(hidden, self.qkv, residual.dtype).view(
            -1, config.num_heads + 2 * config.num_kv_heads, config.head_size
        )
        query = qkv[:, : config.num_heads]
        key = qkv[:, config.num_heads : config.num_heads + config.num_kv_heads]
        value = qkv[:, config.num_heads + config.num_kv_heads :]
        if self.query_norm is not None and self.key_norm is not None:
            query = ops.rms_norm(query, self.query_norm, config.rms_norm_eps)
            key = ops.rms_norm(key, self.key_norm, config.rms_norm_eps)
        ops.rotary_and_cache(query, key, value, batch.positions, self.rotary, cache, batch.slot_mapping)
        attended = ops.paged_attention(
            query,
            cache,
            batch.block_tables,
            batch.query_start_loc,
            batch.seq_lens,
            config.attention_scale,
            config.sliding_window,
        )
        ops.linear_add(attended, self.output, residual, config.residual_multiplier)


class FeedForward:
    """SiLU-gated feed-forward (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, weights: Weights, prefix: str, ops: Ops) -> None:
        self.ops, self.residual_multiplier = ops, config.residual_multiplier
        sizes = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        fused = "gate_up_proj" if config.fused_projections else None
        self.gate_up = _stacked_linear(config, weights, prefix, sizes, fused, config.mlp_bias, ops, gated=True)
        self.down = _linear(
            weights, f"{prefix}down_proj", config.hidden_size, config.intermediate_size, config.mlp_bias, ops
        )

    def forward(self, hidden: Tensor, residual: Tensor) -> None:
        """Add to `residual` [T, H] what the feed-forward makes of `hidden`, its norm."""
        gated = self.ops.linear_silu_and_mul(hidden, self.gate_up, self.down)
        self.ops.linear_add(gated, self.down, residual, self.residual_multiplier)


class DecoderBlock:
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, weights: Weights, prefix: str, ops: Ops, rotary: Tensor) -> None:
        self.ops, self.eps = ops, config.rms_norm_eps
        self.attention_norm = weights.take(f"{prefix}input_layernorm.weight", (config.hidden_size,))
        self.attention = Attention(config, weights, f"{prefix}self_attn.", ops, rotary)
        self.feed_forward_norm = weights.take(f"{prefix}post_attention_layernorm.weight", (config.hidden_size,))
        self.feed_forward = FeedForward(config, weights, f"{prefix}mlp.", ops)

    def forward(self, residual: Tensor, batch: StepBatch, cache: LayerKVCache) -> None:
        """residual [T, H], in place."""
        hidden = self.ops.rms_norm(residual, self.attention_norm, self.eps, self.attention.qkv)
        self.attention.forward(hidden, residual, batch, cache)
        hidden = self.ops.rms_norm(residual, self.feed_forward_norm, self.eps, self.feed_forward.gate_up)
        self.feed_forward.forward(hidden, residual)


class Decoder:
    """token ids -> hidden states -> logits."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        ops: Ops,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.config, self.ops, self.dtype = config, ops, dtype
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = ops.pack_linear([weights.take_matrix("model.embed_tokens.weight", shape)])
        rotary = rotary_table(config.rope, max_positions).to(device)
        unrotated = rotary
        if any(config.no_rope_layers):
            unrotated = identity_table(config.rope.rotary_dim, max_positions).to(device)
        self.blocks = [
            DecoderBlock(
                config,
                weights,
                f"model.layers.{i}.",
                ops,
                unrotated if config.no_rope_layers and config.no_rope_layers[i] else rotary,
            )
            for i in range(config.num_layers)
        ]
        # Granite divides its logits: the norm before the output matrix may as well.
        self.norm = weights.take("model.norm.weight", (config.hidden_size,)).float() / config.logits_divisor
        self.output = self.embedding
        if not config.tie_word_embeddings:
            self.output = ops.pack_linear([weights.take_matrix("lm_head.weight", shape)])

    def num_weight_bytes(self) -> int:
        """Bytes of the packed matrices."""
        matrices = [self.embedding] + ([] if self.output is self.embedding else [self.output])
        for block in self.blocks:
            matrices += [block.attention.qkv, block.attention.output]
            matrices += [block.feed_forward.gate_up, block.feed_forward.down]
        return sum(matrix.num_bytes for matrix in matrices)

    def forward(self, batch: StepBatch, caches: list[LayerKVCache]) -> Tensor:
        """-> hidden [T, H] before the final norm."""
        residual = self.ops.embedding(batch.token_ids, self.embedding, self.dtype, self.config.embedding_multiplier)
        for block, cache in zip(self.blocks, caches, strict=True):
            block.forward(residual, batch, cache)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N, vocab_size] float32."""
        normed = self.ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps, self.output)
        return self.ops.linear(normed, self.output, torch.float32)


def _linear(weights: Weights, name: str, num_out: int, num_in: int, bias: bool, ops: Ops) -> LinearWeight:
    return ops.pack_linear(
        [weights.take_matrix(f"{name}.weight", (num_out, num_in))],
        weights.take(f"{name}.bias", (num_out,)) if bias else None,
    )


def _stacked_linear(
    config: DecoderConfig,
    weights: Weights,
    prefix: str,
    sizes: dict[str, int],
    fused: str | None,
    bias: bool,
    ops: Ops,
    gated: bool = False,
) -> LinearWeight:
    """Several projections of the same input as one matrix: their outputs side by side, or `gated`. `fused` names the
    matrix in checkpoints that store it that way."""
    num_in, num_out = config.hidden_size, sum(sizes.values())
    if fused is not None:
        matrix = weights.take_matrix(f"{prefix}{fused}.weight", (num_out, num_in))
        bounds = [0, num_out // 2, num_out] if gated else [0, num_out]
        parts = [rows_of(matrix, begin, end) for begin, end in pairwise(bounds)]
        return ops.pack_linear(parts, weights.take(f"{prefix}{fused}.bias", (num_out,)) if bias else None, gated)
    parts = [weights.take_matrix(f"{prefix}{name}.weight", (size, num_in)) for name, size in sizes.items()]
    biases = [weights.take(f"{prefix}{name}.bias", (size,)) for name, size in sizes.items()] if bias else None
    return ops.pack_linear(parts, None if biases is None else torch.cat(biases), gated)
