"""An architecture that Octavo does not have: a plain decoder with LayerNorm, GELU and learned positions.

`ToyForCausalLM` is a configuration reader and a block, registered from outside; `PlainToy` is the same in plain torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo.layers.attention import Attention, AttentionDescription
from octavo.layers.feed_forward import FeedForward, FeedForwardDescription
from octavo.layers.norm import Norm, NormDescription
from octavo.layers.parameters import Parameters
from octavo.layers.positions import PositionsDescription
from octavo.models.block import BlockLike, TablesAndCache
from octavo.models.decoder import Decoder
from octavo.models.description import LayerDescription, ModelDescription
from octavo.models.registry import register
from octavo.ops import Array
from octavo.step_batch import StepBatch

ARCHITECTURE = "ToyForCausalLM"
CONFIG: dict[str, Any] = {
    "architectures": [ARCHITECTURE], "model_type": "toy", "vocab_size": 384, "n_embd": 96, "n_layer": 3, "n_head": 3,
    "n_positions": 256, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
}  # fmt: skip


def read_toy(config: Mapping[str, Any]) -> ModelDescription:
    hidden_size, num_heads = config["n_embd"], config["n_head"]
    head_size = hidden_size // num_heads
    norm = NormDescription(kind="layer", eps=1e-5, bias=True)
    layer = LayerDescription(
        attention=AttentionDescription(
            num_heads=num_heads, num_kv_heads=num_heads, head_size=head_size, scale=head_size**-0.5, rope=None,
            qkv_bias=True, output_bias=True, qkv_names=("attn.q", "attn.k", "attn.v"), output_name="attn.out",
        ),
        feed_forward=FeedForwardDescription(
            intermediate_size=4 * hidden_size, activation="gelu", gated=False, bias=True, up_names=("mlp.up",),
            down_name="mlp.down",
        ),
        norm=norm, attention_norm="ln_1", feed_forward_norm="ln_2",
    )  # fmt: skip
    return ModelDescription(
        architecture=ARCHITECTURE, vocab_size=config["vocab_size"], hidden_size=hidden_size,
        max_position_embeddings=config["n_positions"], tie_word_embeddings=True, layers=(layer,) * config["n_layer"],
        norm=norm, positions=PositionsDescription("wpe.weight", config["n_positions"]), embedding_name="wte",
        layer_prefix="h.", norm_name="ln_f",
    )  # fmt: skip


class ToyBlock(BlockLike):
    """What `octavo.models.block.Block` does for such a layer, without its optimisation: values, then additions."""

    accepts_float32_residual = False

    def __init__(self, layer: LayerDescription, hidden_size: int, parameters: Parameters, prefix: str) -> None:
        self.ops = parameters.ops
        self.norm_1 = Norm(layer.norm, parameters, f"{prefix}ln_1", hidden_size)
        self.attention = Attention(layer.attention, hidden_size, parameters, prefix)
        self.norm_2 = Norm(layer.norm, parameters, f"{prefix}ln_2", hidden_size)
        self.feed_forward = FeedForward(layer.feed_forward, hidden_size, parameters, prefix)

    def forward(
        self, residual: Array, batch: StepBatch, caches: Sequence[TablesAndCache], padded_embedding: Array | None = None
    ) -> tuple[Array, None]:
        hidden = self.norm_1.forward(residual)
        self.ops.add(residual, self.attention.forward(hidden, batch, *caches[0]).value())
        self.ops.add(residual, self.feed_forward.forward(self.norm_2.forward(residual)).value())
        return residual, None


def register_toy() -> None:
    register(ARCHITECTURE, read_toy, partial(Decoder, build_block=ToyBlock))


def save_toy(folder: Path, seed: int = 0) -> PlainToy:
    """A checkpoint with random weights, as Octavo reads it, and the model that it is of."""
    torch.manual_seed(seed)
    toy = PlainToy(CONFIG)
    with torch.no_grad():
        for name, parameter in toy.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(std=0.2 if name.endswith("bias") else 0.08)
            else:
                parameter.uniform_(0.5, 1.5)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(toy.state_dict(), folder / "model.safetensors")
    return toy


class PlainToy(nn.Module):
    """token ids [T] -> logits [T, V]. A layer's norms may stand elsewhere, and its halves be parallel."""

    def __init__(
        self, config: Mapping[str, Any], *, before: bool = True, after: bool = False, parallel: bool = False,
        shared: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.before, self.after, self.parallel, self.shared = before, after, parallel, shared
        size, self.num_heads = config["n_embd"], config["n_head"]
        self.wte, self.wpe = nn.Embedding(config["vocab_size"], size), nn.Embedding(config["n_positions"], size)
        norms = ["ln_1"] * before + ["ln_2"] * (before and not shared) + ["post_1", "post_2"] * after
        self.h = nn.ModuleList(
            nn.ModuleDict(
                {name: nn.LayerNorm(size) for name in norms}
                | {"attn": nn.ModuleDict({name: nn.Linear(size, size) for name in ("q", "k", "v", "out")})}
                | {"mlp": nn.ModuleDict({"up": nn.Linear(size, 4 * size), "down": nn.Linear(4 * size, size)})}
            )
            for _ in range(config["n_layer"])
        )
        self.ln_f = nn.LayerNorm(size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(len(ids)))
        for layer in self.h:
            assert isinstance(layer, nn.ModuleDict)
            first = layer["ln_1"](x) if self.before else x
            attended = self.attention(layer["attn"], first)
            attended = layer["post_1"](attended) if self.after else attended
            y = x if self.parallel else x + attended
            second = first if self.shared else layer["ln_2"](y) if self.before else y
            fed = layer["mlp"]["down"](F.gelu(layer["mlp"]["up"](second)))  # type: ignore[index]
            x = y + (attended if self.parallel else 0) + (layer["post_2"](fed) if self.after else fed)
        return self.ln_f(x) @ self.wte.weight.T

    def attention(self, layer: Any, x: Tensor) -> Tensor:
        q, k, v = (layer[name](x).view(len(x), self.num_heads, -1).transpose(0, 1) for name in ("q", "k", "v"))
        return layer["out"](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1))
