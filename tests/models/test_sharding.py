"""A model shared out among workers gives the logits of the whole one, for every architecture's settings; one whose
layers are, in stages, gives its bits.

The workers are threads here, and what they exchange goes from one to the other;
`tests.execution.test_worker_group` has real ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from octavo.errors import ConfigError
from octavo.layers.attention import AttentionDescription
from octavo.layers.experts import ExpertsDescription
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.tensor_parallel import Shard
from octavo.loading.recording import RecordingWeights
from octavo.models.description import ModelDescription
from octavo.models.inventory import record
from octavo.models.registry import build, describe
from octavo.models.sharding import stage_layers, with_shard, with_stage
from octavo.ops import LayerKVCache, Ops
from octavo.step_batch import StepBatch
from tests.models.driving import VARIED, ArrayWeights, all_logits
from tests.models.small_experts import ALL_MODELS, EXPERT_MODELS, GEMMA_4_MODELS, SIX_LAYERS
from tests.models.small_latent import LATENT_MODELS
from tests.models.small_models import MODELS, SIZES, VOCAB
from tests.models.small_recurrent import RECURRENT_MODELS
from tests.waiting import within

# What is refused, and the reason.
REFUSED = {"llama ratio 3, head 64, tied": "cannot share out 3 attention heads; these sizes could: 1, 3"}

EVERY = ALL_MODELS | SIX_LAYERS | RECURRENT_MODELS | LATENT_MODELS
GLM_SHARED = "glm moe dsa, of whose keys indexes of some layers choose 8"
# Where stages behind the first can begin, of models that cannot be cut anywhere; and why not with layer 1.
STARTS = {
    GLM_SHARED: "none but the first", "gemma 3n": "none but the first", "gemma 4, shared keys": "none but the first",
    "gemma 3n, six layers": "1, 2", "gemma 4, six layers": "1, 2", "longcat flash": "3",
}  # fmt: skip
NO_SECOND = {
    GLM_SHARED: "it reads keys that an index before it chooses. .*: none",
    "gemma 3n": "layer 2 reads the keys of layer 0, which must be of its stage. .*: none",
    "longcat flash": "layer 0 adds something at its end, or later. .* --pipeline-layer-partition: 3",
}
# A tied and an untied one, learned positions, a projection of embeddings, windows, experts, states, latent attention.
QUICK = {
    "llama ratio 3, head 64, tied", "llama, all biases", "gpt 2", "opt, projections, norms after", "gemma 3", "gpt-oss",
    "jamba", "deepseek v3", "gemma 4", *SIX_LAYERS, "zamba 2", "deepseek v3.2, of whose keys its index chooses 8",
    GLM_SHARED,
}  # fmt: skip


class Exchange:
    """The operations of one of several threads."""

    def __init__(self, ops: Ops, rank: int, barrier: Barrier, given: list[Any]) -> None:
        self._ops, self._rank, self._barrier, self._given = ops, rank, barrier, given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[self._rank] = x.clone()
        self._barrier.wait(within(60))
        given = list(self._given)
        self._barrier.wait(within(60))
        return given

    def all_reduce(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        x.copy_(sum(self._exchange(x)))
        if bias is not None:
            x += bias

    def all_gather(self, x: torch.Tensor, begin: int, width: int) -> torch.Tensor:
        given = self._exchange(x)
        assert sum(part.shape[1] for part in given[: self._rank]) == begin
        gathered = torch.cat(given, 1)
        assert gathered.shape == (len(x), width)
        return gathered


def shared_logits(
    description: ModelDescription, arrays: dict[str, Any], ops: Ops, size: int, sequences: list[list[int]],
    shares_experts: bool = False,
) -> list[list[torch.Tensor]]:  # fmt: skip
    """By worker: logits of each sequence."""
    barrier, given = Barrier(size), [None] * size

    def work(rank: int) -> list[torch.Tensor]:
        try:
            own: Any = Exchange(ops, rank, barrier, given)
            weights = PassingWeights(arrays)
            shared = with_shard(description, Shard(rank, size), shares_experts)
            model = build(shared, weights, own, 128, "float32")
            weights.check_all_taken()
            return all_logits(model, own, sequences)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


class Staged:
    """A model in stages, the hidden states of each of which enter the next."""

    def __init__(self, description: ModelDescription, arrays: dict[str, Any], ops: Ops, counts: list[int]) -> None:
        stages = stage_layers(description, len(counts), counts)
        self._stages: list[Any] = []
        self.layer_caches = description.layer_caches
        self._own = [description.cache_indices(layers) for layers in stages]
        for layers in stages:
            weights = PassingWeights(arrays)
            self._stages.append(build(with_stage(description, layers), weights, ops, 128, "float32"))
            weights.check_all_taken()

    def forward(self, batch: StepBatch, caches: Sequence[LayerKVCache]) -> torch.Tensor:
        for stage, own in zip(self._stages, self._own, strict=True):
            batch = replace(batch, hidden_in=stage.forward(batch, caches[own.start : own.stop]))
        return batch.hidden_in

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._stages[-1].logits(hidden)


class PassingWeights(ArrayWeights):
    def ignore(self, prefix: str) -> None:
        self.left = {name for name in self.left if not name.startswith(prefix)}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in EVERY])
def test_a_model_in_stages_gives_the_bits_of_the_whole(name: str, ops: Ops, tmp_path: Path) -> None:
    model = EVERY[name]
    model.save(model.reference(seed=1), tmp_path)
    description = describe(json.loads((tmp_path / "config.json").read_text()))
    num_layers = len(description.layers)
    arrays = {n: tensor.numpy() for n, tensor in load_file(tmp_path / "model.safetensors").items()}
    sequences = [torch.randint(3, VOCAB, (length,)).tolist() for length in (1, 9, 33)]
    whole: Any = build(description, PassingWeights(arrays), ops, 128, "float32")
    if name in NO_SECOND:
        with pytest.raises(ConfigError, match=f"a stage cannot begin with layer 1: {NO_SECOND[name]}"):
            with_stage(description, range(1))
    if name in STARTS:
        with pytest.raises(ConfigError, match=f"those behind the first can begin with layers {STARTS[name]}."):
            stage_layers(description, num_layers)
        if not STARTS[name][0].isdigit():
            return
    staged: Any = Staged(description, arrays, ops, [len(layers) for layers in stage_layers(description, 2)])
    for found, expected in zip(all_logits(staged, ops, sequences), all_logits(whole, ops, sequences), strict=True):
        assert torch.equal(found, expected)


class PackingOps:
    """Operations that keep the matrices that they pack."""

    def __init__(self, ops: Ops) -> None:
        self._ops, self.packed = ops, list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def pack_linear(self, parts: Sequence[Any], *args: Any, **more: Any) -> Any:
        self.packed += parts
        return self._ops.pack_linear(parts, *args, **more)


@pytest.mark.parametrize("name", ["zamba 2", "gemma 3n"])
def test_no_product_only_copies(name: str, ops: Ops, tmp_path: Path) -> None:
    """A matrix with one number in each column, as identity matrices have, costs as much as any other."""
    model = EVERY[name]
    model.save(model.reference(seed=1), tmp_path)
    description = describe(json.loads((tmp_path / "config.json").read_text()))
    arrays = {n: tensor.numpy() for n, tensor in load_file(tmp_path / "model.safetensors").items()}
    packing: Any = PackingOps(ops)
    build(with_stage(description, range(len(description.layers))), PassingWeights(arrays), packing, 128, "float32")
    assert len(packing.packed) > 10
    several = [part for part in packing.packed if part.shape[0] > 1]
    assert not [part.shape for part in several if (np.count_nonzero(part.data, 0) == 1).all()]


def test_layers_are_shared_out_among_stages() -> None:
    def of_layers(num_layers: int) -> ModelDescription:
        return describe(SIZES | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": num_layers})

    def counts(num_layers: int, num_stages: int) -> list[int]:
        return [len(layers) for layers in stage_layers(of_layers(num_layers), num_stages)]

    assert counts(30, 4) == [7, 8, 8, 7]
    assert counts(31, 4) == [8, 8, 8, 7]  # the last one makes logits
    assert counts(5, 2) == [3, 2]
    assert stage_layers(of_layers(5), 3, [1, 1, 3]) == [range(1), range(1, 2), range(2, 5)]
    for partition in ([1, 1], [1, 1, 4], [0, 1, 4]):
        with pytest.raises(ConfigError, match="must be 3 numbers above 0 that add up to the model's 5 layers"):
            stage_layers(of_layers(5), 3, partition)
    with pytest.raises(ConfigError, match="is more than the model's 2 layers"):
        stage_layers(of_layers(2), 3)


# Without experts; norms over all heads, gates, states of every kind, latent attention, what layers share, several
# residual streams.
SHARED_QUICK = VARIED & {*MODELS} | {
    "minicpm 3", "mamba", "mamba 2", "falcon h1, norm after the gate", "qwen 3.5", "lfm 2", "recurrent gemma",
    "olmo hybrid", "zamba", "zamba 2", "gemma 3n", "gemma 4, shared keys",
}  # fmt: skip
OTHERS = RECURRENT_MODELS | LATENT_MODELS | GEMMA_4_MODELS


def has_experts(description: ModelDescription) -> bool:
    return any(isinstance(layer.feed_forward, ExpertsDescription) for layer in description.layers)


@pytest.mark.parametrize(
    "name", [n if n in SHARED_QUICK else pytest.param(n, marks=pytest.mark.long) for n in MODELS | OTHERS]
)
def test_a_shared_model_gives_the_logits_of_the_whole(name: str, ops: Ops, tmp_path: Path) -> None:
    model = (MODELS | OTHERS)[name]
    model.save(model.reference(seed=1), tmp_path)
    description = describe(json.loads((tmp_path / "config.json").read_text()))
    shares_experts = has_experts(description)
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            with_shard(description, Shard(1, 2))
        return
    arrays = {n: tensor.numpy() for n, tensor in load_file(tmp_path / "model.safetensors").items()}
    sequences = [torch.randint(3, VOCAB, (length,)).tolist() for length in (1, 9, 33)]
    whole = all_logits(build(description, PassingWeights(arrays), ops, 128, "float32"), ops, sequences)
    for of_worker in shared_logits(description, arrays, ops, 2, sequences, shares_experts):
        for found, expected in zip(of_worker, whole, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_what_ends_a_layer_is_cut_alike_for_any_number_of_workers(tmp_path: Path) -> None:
    """Into as many parts as heads and inner elements make, at most eight."""
    model = MODELS["llama, all biases"]
    model.save(model.reference(seed=1), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def shares(heads: int, inner: int, size: int, **how: Any) -> tuple[int, int]:
        sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": inner}
        shared = with_shard(describe(config | sizes), Shard(0, size), **how)
        attention, feed_forward = shared.layers[-1].attention, shared.layers[-1].feed_forward
        assert isinstance(attention, AttentionDescription) and isinstance(feed_forward, FeedForwardDescription)
        assert attention.shard == feed_forward.shard
        return attention.shard.summands, attention.shard.own_summands

    assert [shares(32, 96, size) for size in (1, 2, 4, 8)] == [(8, 8), (8, 4), (8, 2), (8, 1)]
    assert [shares(9, 1536, size) for size in (1, 3)] == [(3, 3), (3, 1)]
    assert [shares(12, 96, size) for size in (1, 2, 3, 4)] == [(4, 4), (4, 2), (1, 1), (4, 1)]
    assert [shares(7, 14, size, reproducible=False) for size in (1, 7)] == [(1, 1), (1, 1)]
    assert shares(11, 11, 1) == (1, 1)


# Shared experts, alone and behind a sigmoid, biases, a layer without experts.
EXPERTS_QUICK = {"mixtral", "gpt-oss", "qwen2 moe", "glm 4 moe", "olmoe"}


@pytest.mark.parametrize(
    "name", [n if n in EXPERTS_QUICK else pytest.param(n, marks=pytest.mark.long) for n in EXPERT_MODELS]
)
def test_workers_that_have_whole_experts_give_the_logits_of_the_whole(name: str, ops: Ops, tmp_path: Path) -> None:
    model = EXPERT_MODELS[name]
    model.save(model.reference(seed=1), tmp_path)
    description = describe(json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(ConfigError, match="add --enable-expert-parallel, which shares whole ones out"):
        with_shard(description, Shard(1, 2))
    arrays = {n: tensor.numpy() for n, tensor in load_file(tmp_path / "model.safetensors").items()}
    sequences = [torch.randint(3, VOCAB, (length,)).tolist() for length in (1, 9, 33)]
    whole = all_logits(build(description, ArrayWeights(arrays), ops, 128, "float32"), ops, sequences)
    for of_worker in shared_logits(description, arrays, ops, 2, sequences, shares_experts=True):
        for found, expected in zip(of_worker, whole, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama, all biases", {}),
        ("olmo 2", {}),  # norms over all heads
        ("mamba 2", {}),  # B and C of a group are two workers', and the norm over one
        ("qwen 3.5", {}),  # gates; heads of keys that serve two of values
        ("qwen 3.5", {"linear_value_heads_alternate": True}),  # as in GGUF files
        ("deepseek v3", {}),
        ("zamba", {}),  # inner matrices of a group of channels that two workers share
        ("gemma 4, shared keys", {}),
    ],
)
def test_few_heads_of_keys_are_several_workers(name: str, settings: dict[str, Any], ops: Ops, tmp_path: Path) -> None:
    model = EVERY[name]
    model.save(model.reference(seed=2), tmp_path)
    description = describe(json.loads((tmp_path / "config.json").read_text()) | settings)
    arrays = {n: tensor.numpy() for n, tensor in load_file(tmp_path / "model.safetensors").items()}
    sequences = [torch.randint(3, VOCAB, (length,)).tolist() for length in (2, 20)]
    whole = all_logits(build(description, PassingWeights(arrays), ops, 128, "float32"), ops, sequences)
    for of_worker in shared_logits(description, arrays, ops, 4, sequences, has_experts(description)):
        for found, expected in zip(of_worker, whole, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_which_heads_are_whose(tmp_path: Path) -> None:
    def of_worker(name: str, rank: int, size: int, **settings: Any) -> Any:
        model = EVERY[name]
        model.save(model.reference(seed=1), tmp_path)
        config = json.loads((tmp_path / "config.json").read_text()) | settings
        return with_shard(describe(config), Shard(rank, size)).layers[0].attention

    llama = of_worker("llama, all biases", 3, 4)
    assert (llama.own_heads, llama.own_kv_heads) == (range(3, 4), range(1, 2))
    mamba = of_worker("mamba 2", 3, 4)
    assert (mamba.own_heads, mamba.own_groups) == (range(3, 4), range(1, 2))
    delta = of_worker("qwen 3.5", 1, 2)
    assert (delta.own_values, delta.own_keys) == (range(2, 4), range(1, 2))
    alternating = {"linear_value_heads_alternate": True}
    delta = of_worker("qwen 3.5", 1, 2, **alternating)
    assert (delta.own_values, delta.own_keys) == (range(2, 4), range(2))
    delta = of_worker("qwen 3.5", 3, 4, **alternating)
    assert (delta.own_values, delta.own_keys) == (range(3, 4), range(1, 2))
    with pytest.raises(ConfigError, match="cannot share out 4 heads of values; these sizes could: 1, 2, 4"):
        of_worker("qwen 3.5", 0, 3)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("minicpm 3", (1, 1)),  # what is compressed is everybody's
        ("mamba 2", (2, 4)),
        ("mamba", (2, 4)),
        ("lfm 2", (2, 4)),
        ("recurrent gemma", (2, 4)),
        ("minimax", (2, 4)),
    ],
)
def test_states_are_as_large_as_a_share_of_them(name: str, parts: tuple[int, int], tmp_path: Path) -> None:
    """Of channels that need no padding."""
    model = EVERY[name]
    model.save(model.reference(seed=1), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    wide: dict[str, Any] = {
        "mamba 2": {"num_heads": 8, "head_dim": 16, "n_groups": 4, "hidden_size": 64, "state_size": 16},
        "mamba": {"hidden_size": 64, "intermediate_size": 128, "state_size": 16}, "lfm 2": {"hidden_size": 64},
        "recurrent gemma": {"lru_width": 128},
    }  # fmt: skip
    description = describe(config | wide.get(name, {}))

    def num_bytes(size: int) -> int:
        spec = with_shard(description, Shard(0, size), has_experts(description)).layer_caches[0]
        return spec.num_bytes or spec.num_kv_heads * (spec.key_size + spec.value_size)

    assert [num_bytes(1) / num_bytes(size) for size in (2, 4)] == list(parts)


DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_routed_experts": 256,
}  # fmt: skip
QWEN_3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip


# Whose embedding is large beside the layers.
NEMOTRON_H: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "vocab_size": 131072, "hidden_size": 8192, "num_hidden_layers": 20,
    "hybrid_override_pattern": "M-M-M-M-M-M-M-M-M*-M", "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 30720, "mamba_num_heads": 256, "mamba_head_dim": 64, "ssm_state_size": 256,
    "n_groups": 8, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(DEEPSEEK_V3, id="DeepSeek V3", marks=pytest.mark.long),
        pytest.param(QWEN_3_NEXT, id="Qwen3-Next 80B-A3B", marks=pytest.mark.long),
        pytest.param(NEMOTRON_H, id="Nemotron-H"),
    ],
)
def test_a_worker_needs_little_more_than_its_part_of_the_weights(config: dict[str, Any]) -> None:
    description = describe(config)

    def num_bytes(size: int) -> int:
        weights = RecordingWeights("bfloat16")
        shares_experts = size > 1 and has_experts(description)
        record(with_shard(description, Shard(size - 1, size), shares_experts), weights)
        return weights.packed_bytes()[0]

    whole = num_bytes(1)
    for size in (2, 8):
        assert whole / size <= num_bytes(size) < 1.05 * whole / size
