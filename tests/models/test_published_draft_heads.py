"""Heads give the logits that plain torch gives for their published layouts, on small random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from octavo.layers.rotary import rotary_table
from octavo.models.decoder import Decoder
from octavo.models.description import ModelDescription
from octavo.models.draft_heads import ChainHead, Eagle3Head, EagleHead, HeadTarget, MedusaHeads, module_names
from octavo.models.registry import describe
from octavo.step_batch import GroupTables, StepBatch
from tests.models.driving import ArrayWeights
from tests.ops import torch_ref

LAYERS = 8
HIDDEN, INNER, HEADS, KV_HEADS, SIZE, VOCAB, LENGTH, EPS = 32, 48, 4, 2, 8, 64, 11, 1e-5
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": SIZE, "max_position_embeddings": 64, "rms_norm_eps": EPS,
    "rope_theta": 10000.0,
}  # fmt: skip
rng = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray[Any, Any]:
    return rng.normal(0, 0.2, shape).astype(np.float32)


def layer(prefix: str, num_inputs: int = 1) -> dict[str, Any]:
    """Tensors of a Llama layer, without the norm before attention."""
    sizes = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE}
    found = {f"{prefix}self_attn.{name}_proj.weight": random(size, num_inputs * HIDDEN) for name, size in sizes.items()}
    return found | {
        f"{prefix}self_attn.o_proj.weight": random(HIDDEN, HEADS * SIZE),
        f"{prefix}mlp.gate_proj.weight": random(INNER, HIDDEN), f"{prefix}mlp.up_proj.weight": random(INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": random(HIDDEN, INNER),
        f"{prefix}post_attention_layernorm.weight": 1 + random(HIDDEN),
    }  # fmt: skip


def target() -> Decoder:
    arrays = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN), "lm_head.weight": random(VOCAB, HIDDEN),
        "model.norm.weight": 1 + random(HIDDEN),
    }  # fmt: skip
    for i in range(LAYERS):
        arrays |= layer(f"model.layers.{i}.") | {f"model.layers.{i}.input_layernorm.weight": 1 + random(HIDDEN)}
    weights: Any = ArrayWeights(arrays)
    ops: Any = torch_ref
    return Decoder(describe(CONFIG), weights, ops, 64, "float32")


def alone(model: Decoder) -> HeadTarget:
    """To a worker who has all of it."""

    def read(description: ModelDescription) -> Decoder:
        raise AssertionError("the model's own matrices are there")

    return HeadTarget(model, model.description, read)


def attend(tensors: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """x [L, inputs] -> [L, H]: causal attention with rotated heads, and the output matrix."""
    rope = describe(CONFIG).layers[0].attention.rope  # type: ignore[union-attr]
    assert rope is not None
    cos, sin = torch.from_numpy(rotary_table(rope, LENGTH)).split(SIZE // 2, 1)

    def heads(name: str, count: int, rotates: bool) -> Tensor:
        found = linear(x, tensors[f"{prefix}self_attn.{name}_proj.weight"]).view(LENGTH, count, SIZE)
        a, b = found.split(SIZE // 2, -1)
        c, s = cos[:, None], sin[:, None]
        turned = torch.cat([a * c - b * s, b * c + a * s], -1) if rotates else found
        return turned.repeat_interleave(HEADS // count, 1).transpose(0, 1)

    query, key, value = heads("q", HEADS, True), heads("k", KV_HEADS, True), heads("v", KV_HEADS, False)
    scores = query @ key.transpose(1, 2) / SIZE**0.5 + torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
    attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(LENGTH, -1)
    return linear(attended, tensors[f"{prefix}self_attn.o_proj.weight"])


def feed(tensors: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """The feed-forward with its norm."""
    x = rms_norm(x, (HIDDEN,), tensors[f"{prefix}post_attention_layernorm.weight"], EPS)
    gate, up = (linear(x, tensors[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return linear(silu(gate) * up, tensors[f"{prefix}mlp.down_proj.weight"])


def logits_of(head: ChainHead, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of a head over one sequence."""
    head.features, head.rows = features, torch.arange(LENGTH)  # type: ignore[assignment]
    ops: Any = torch_ref
    caches = [ops.allocate_kv_cache(2, 8, spec.num_kv_heads, spec.key_size, "float32") for spec in head.layer_caches]
    found: list[Any] = []
    for begin, end in ((0, 4), (4, 5), (5, LENGTH)):  # some positions at a time
        positions = torch.arange(begin, end)
        tables = GroupTables(positions, torch.tensor([[0, 1]], dtype=torch.int32))
        head.features = features[begin:end]  # type: ignore[assignment]
        found.append(
            head.forward(
                StepBatch(
                    token_ids=tokens[begin:end].int(), positions=positions,
                    query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
                    seq_lens=torch.tensor([end], dtype=torch.int32), sample_rows=positions, groups=(tables,),
                ),
                caches,
            )
        )  # fmt: skip
    hidden = torch.cat(found)
    logits: Any = head.logits(hidden)  # type: ignore[arg-type]
    return hidden, logits


TOKENS, FEATURES = torch.from_numpy(rng.integers(0, VOCAB, LENGTH)), torch.from_numpy(random(LENGTH, HIDDEN))
OPS: Any = torch_ref


def test_eagle() -> None:
    model = target()
    arrays = layer("layers.0.") | {
        "embed_tokens.weight": random(VOCAB, HIDDEN), "fc.weight": random(HIDDEN, 2 * HIDDEN), "fc.bias": random(HIDDEN)
    }  # fmt: skip
    weights: Any = ShortNames(arrays)
    head = EagleHead(alone(model), CONFIG | {"num_hidden_layers": 1}, weights, OPS, 64, "float32")
    hidden, logits = logits_of(head, TOKENS, FEATURES)
    weights.check_all_taken()
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    embedded = tensors["embed_tokens.weight"][TOKENS]
    x = linear(torch.cat([embedded, FEATURES], 1), tensors["fc.weight"], tensors["fc.bias"])
    x = x + attend(tensors, "layers.0.", x)
    x = x + feed(tensors, "layers.0.", x)
    torch.testing.assert_close(hidden, x, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(logits, model.output.logits_of_normed(x), atol=2e-4, rtol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["a layer more", "mtp"])
def test_multi_token_prediction(layout: str) -> None:
    model = target()
    is_layer, at = layout == "a layer more", f"model.layers.{LAYERS}."
    names = (
        [f"{at}eh_proj", f"{at}enorm", f"{at}hnorm", f"{at}shared_head.norm"]
        if is_layer
        else ["mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"]
    )
    prefix = at if is_layer else "mtp.layers.0."
    arrays = layer(prefix) | {f"{name}.weight": 1 + random(HIDDEN) for name in (*names[1:], f"{prefix}input_layernorm")}
    arrays[f"{names[0]}.weight"] = random(HIDDEN, 2 * HIDDEN)
    if is_layer:
        arrays |= {f"{at}{name}.weight": random(VOCAB, HIDDEN) for name in ("embed_tokens", "shared_head.head")}
    weights: Any = ArrayWeights(arrays)
    assert module_names(model.description, weights) is None
    module = module_names(replace(model.description, num_unused_layers=is_layer, unused=("mtp.",)), weights)
    head = EagleHead(alone(model), CONFIG, weights, OPS, 64, "float32", module)
    hidden, logits = logits_of(head, TOKENS, FEATURES)
    weights.check_all_taken()
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def norm(name: str, x: Tensor) -> Tensor:
        return rms_norm(x, (HIDDEN,), tensors[f"{name}.weight"], EPS)

    embedded = tensors[f"{at}embed_tokens.weight"][TOKENS] if is_layer else model.input.embed(TOKENS.int())
    x = linear(torch.cat([norm(names[1], embedded), norm(names[2], FEATURES)], 1), tensors[f"{names[0]}.weight"])  # type: ignore[arg-type]
    x = x + attend(tensors, prefix, norm(f"{prefix}input_layernorm", x))
    x = x + feed(tensors, prefix, x)
    normed = norm(names[3], x)
    expected = (
        linear(normed, tensors[f"{at}shared_head.head.weight"]) if is_layer else model.output.logits_of_normed(normed)
    )  # type: ignore[arg-type]
    torch.testing.assert_close(hidden, x if is_layer else normed, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("adds_normed", [False, True])
def test_eagle3(adds_normed: bool) -> None:
    model, num_own = target(), 40
    arrays = layer("midlayer.", 2) | {
        "fc.weight": random(HIDDEN, 3 * HIDDEN), "norm.weight": 1 + random(HIDDEN),
        "midlayer.input_layernorm.weight": 1 + random(HIDDEN), "midlayer.hidden_norm.weight": 1 + random(HIDDEN),
        "lm_head.weight": random(num_own, HIDDEN), "d2t": np.arange(num_own) // 2, "t2d": np.zeros(VOCAB, bool),
    }  # fmt: skip
    config = CONFIG | {"num_hidden_layers": 1, "draft_vocab_size": num_own, "norm_before_residual": adds_normed}
    weights: Any = ShortNames(arrays)
    head = Eagle3Head(alone(model), config, weights, OPS, 64, "float32")
    states = [torch.from_numpy(random(LENGTH, HIDDEN)) for _ in range(LAYERS)]
    for number, state in enumerate(states):
        head.aux_hidden_states.see(number, state)  # type: ignore[arg-type]
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    features: Any = head.aux_hidden_states.features
    expected = linear(torch.cat([states[2], states[4], states[5]], 1), tensors["fc.weight"])
    torch.testing.assert_close(features, expected, atol=2e-5, rtol=1e-5)
    hidden, logits = logits_of(head, TOKENS, FEATURES)
    embedded = rms_norm(
        model.input.embed(TOKENS.int()),
        (HIDDEN,),
        tensors["midlayer.input_layernorm.weight"],
        EPS,  # type: ignore[arg-type]
    )
    normed = rms_norm(FEATURES, (HIDDEN,), tensors["midlayer.hidden_norm.weight"], EPS)
    x = (normed if adds_normed else FEATURES) + attend(tensors, "midlayer.", torch.cat([embedded, normed], 1))
    x = x + feed(tensors, "midlayer.", x)
    torch.testing.assert_close(hidden, x, atol=2e-5, rtol=1e-5)
    own = linear(rms_norm(x, (HIDDEN,), tensors["norm.weight"], EPS), tensors["lm_head.weight"])
    torch.testing.assert_close(logits, own, atol=2e-4, rtol=1e-5)
    assert head.target_token_ids is not None and head.target_token_ids.tolist() == [i + i // 2 for i in range(num_own)]


@pytest.mark.parametrize("names", ["the authors'", "vLLM's"])
def test_medusa(names: str) -> None:
    model, arrays = target(), {}
    for i in range(2):
        inner, output = ("{}.{}.linear", "{}.1") if names == "the authors'" else ("blocks.{}.layers.{}", "lm_heads.{}")
        arrays[f"{inner.format(i, 0)}.weight"] = random(HIDDEN, HIDDEN)
        arrays[f"{inner.format(i, 0)}.bias"] = random(HIDDEN)
        arrays[f"{output.format(i)}.weight"] = random(VOCAB, HIDDEN)
    weights: Any = ArrayWeights(arrays)
    heads = MedusaHeads(alone(model), {"medusa_num_heads": 2}, weights, OPS, 64, "float32")
    weights.check_all_taken()
    for i in range(2):
        weight, bias, output_weight = (torch.from_numpy(array) for array in list(arrays.values())[3 * i : 3 * i + 3])
        expected = linear(FEATURES + silu(linear(FEATURES, weight, bias)), output_weight)
        found: Any = heads.logits(i, FEATURES)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-5)


class ShortNames(ArrayWeights):
    """Tensors whose names may lack a first module, as those of files may."""

    def _name(self, name: str) -> str:
        short = name.partition(".")[2]
        return short if name not in self.arrays and short in self.arrays else name

    def __contains__(self, name: str) -> bool:
        return super().__contains__(self._name(name))

    def take(self, name: str, shape: tuple[int, ...], dtype: str | None = None, own: range | None = None) -> Any:
        return super().take(self._name(name), shape, dtype, own)

    def ignore(self, prefix: str) -> None:
        self.left = {name for name in self.left if not name.startswith(prefix)}
