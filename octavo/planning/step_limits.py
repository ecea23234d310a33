"""Computes the least that a step reads and computes, and the time that a GPU needs for it.

`ModelWork` counts bytes and operations from a model's description. `GpuSteps` turns them into seconds with the machines
of `octavo.ops.triton.schedule`. It takes all products together; `benchmarks/gpu_limits.py` goes tile by tile, for dense
models in bfloat16.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.attention import AttentionDescription
from octavo.layers.experts import ExpertsDescription
from octavo.layers.mla import MLADescription
from octavo.loading.recording import RecordedTensor
from octavo.models.description import ModelDescription
from octavo.models.inventory import repeated_tensors, required_tensors
from octavo.ops.triton.schedule import EXCHANGE_S, MACHINES, Machine, sum_exchanges
from octavo.step_cost import StepWork

# Counts of `benchmarks/gpu_limits.py`. Large kernels are products and attention.
_KERNELS_PER_LAYER, _LARGE_PER_LAYER, _KERNELS_PER_STEP = 8, 5, 14
_SMALL_KERNEL_S = 2.0e-6  # from the same script: one or two dependent loads from memory, and a store
# Shares of a large product's rate that the products of prompts reach, and attention. From the same script.
PREFILL_SHARE, ATTENTION_SHARE = 0.70, 0.45
_SUMMED_BYTES = 4  # of an element of the rows that devices sum: float32


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device that can be planned for."""

    name: str
    memory_bytes: int
    machine: Machine


GPUS = {
    # The smaller A100 has slower memory: 1,555 GB/s in NVIDIA's data sheet, 2,039 for the larger one.
    "a100-40gb": Gpu("A100 40 GB", 40 << 30, replace(MACHINES["a100"], copy_gbs=1300)),
    "a100": Gpu("A100 80 GB", 80 << 30, MACHINES["a100"]),
    "h100": Gpu("H100 80 GB SXM", 80 << 30, MACHINES["h100"]),
    "h200": Gpu("H200 141 GB", 140 << 30, MACHINES["h200"]),
}


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A model's parameters in matrices, by when a step reads them, and the operations of its attention."""

    num_parameters: int  # in all matrices
    layer_parameters: int  # read for every token, without experts; shared matrices count for each layer
    head_parameters: int  # of the output matrix, which is read if a token is sampled
    expert_parameters: int  # in all experts of all layers
    expert_share: float  # share of the experts that a token takes
    attention: tuple[tuple[int, int], ...]  # by layer: multiplications for a query and a key, and the window or 0
    hidden_size: int
    num_layers: int
    num_chosen: int = 0  # most keys that a token reads if an index chooses them; 0: no index
    chosen_share: float = 0.0  # share of a token's cache bytes that are read only if it is chosen

    def read_share(self, num_tokens: int, num_samples: int) -> float:
        """Return the share of the weights' bytes that a step reads. Rows of the embedding are neglected, and experts
        are assumed to be chosen evenly."""
        experts = self.expert_parameters * (1 - (1 - self.expert_share) ** num_tokens)
        return (self.layer_parameters + self.head_parameters * bool(num_samples) + experts) / self.num_parameters

    def product_operations(self, num_tokens: int, num_samples: int) -> float:
        """Return the multiplications and additions of a step's matrix products."""
        of_token = self.layer_parameters + self.expert_parameters * self.expert_share
        return 2 * (num_tokens * of_token + num_samples * self.head_parameters)

    def attention_operations(self, num_pairs: float, mean_context: float) -> float:
        """Return the multiplications and additions of attention. `num_pairs` counts pairs of a query and a key in a
        layer without a window; rows see `mean_context` keys on average."""
        return sum(
            2 * size * num_pairs * (min(1.0, window / max(1.0, mean_context)) if window else 1.0)
            for size, window in self.attention
        )


def model_work(description: ModelDescription) -> ModelWork:
    total = _num_parameters(required_tensors(description))
    repeated = _num_parameters(repeated_tensors(description))
    embedding = description.vocab_size * (description.embedding_size or description.hidden_size)
    experts, share, attention, of_chosen = 0, 0.0, [], 0
    for layer in description.layers:
        feed_forward = layer.feed_forward
        if isinstance(feed_forward, ExpertsDescription):
            matrices = 3 if feed_forward.gated else 2
            experts += feed_forward.num_experts * matrices * feed_forward.intermediate_size * description.hidden_size
            share = feed_forward.routing.top_k / feed_forward.num_experts
        for mixer in (layer.attention, layer.second_mixer, layer.reused and layer.reused.attention):
            if isinstance(mixer, AttentionDescription):
                attention.append((2 * mixer.num_heads * mixer.head_size, mixer.window))
            elif isinstance(mixer, MLADescription):  # in absorbed form, heads multiply compressed vectors
                num_chosen = description.num_chosen_keys if mixer.index is not None or mixer.shares_index else 0
                attention.append((mixer.num_heads * (2 * mixer.kv_lora_rank + mixer.qk_rope_head_dim), num_chosen))
                of_chosen += (mixer.kv_lora_rank + mixer.qk_rope_head_dim) * bool(num_chosen)
                if mixer.index is not None:
                    attention.append((mixer.index.num_heads * mixer.index.head_size, 0))
    head = 0 if description.pooling is not None else embedding
    tables = embedding if head == 0 or description.tie_word_embeddings else 2 * embedding
    if (inputs := description.per_layer_embeddings) is not None:
        tables += inputs.vocab_size * inputs.size * len(description.layers)
    cached = sum(spec.num_kv_heads * (spec.key_size + spec.value_size) for spec in description.layer_caches)
    return ModelWork(
        total, total + repeated - tables - experts, head, experts, share, tuple(attention), description.hidden_size,
        len(description.layers), description.num_chosen_keys, of_chosen / max(1, cached),
    )  # fmt: skip


def _num_parameters(tensors: Sequence[RecordedTensor]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors if tensor.is_matrix)


def cached_bytes(specs: Sequence[LayerCacheSpec], num_keys: int, num_rows: int, later: int, early: int) -> float:
    """Return the cache bytes that rows read for `num_keys` keys in all: `early` bytes a token within the windows,
    `later` bytes beyond them."""
    windows = [spec.window for spec in specs if spec.kind == "window"]
    if not windows or not num_rows:
        return float(num_keys * early)
    within = min(num_keys, max(windows) * num_rows)
    return float(num_keys * later + within * (early - later))


@dataclass(frozen=True, slots=True)
class Limit:
    """Lower bounds of a step's time, by cause."""

    weights_s: float  # to read the weights
    cache_s: float  # to read keys and values
    products_s: float
    attention_s: float  # to multiply queries, keys and values
    fixed_s: float = 0.0  # launches, and sums over devices

    @property
    def seconds(self) -> float:
        """Return the least time of the step. Products overlap reading and multiplying, and so does attention; attention
        does not overlap products."""
        return max(self.weights_s, self.products_s) + max(self.cache_s, self.attention_s) + self.fixed_s

    @property
    def name(self) -> str:
        """Return the cause with the largest bound."""
        found = {
            "memory bandwidth (weights)": self.weights_s, "memory bandwidth (cache)": self.cache_s,
            "arithmetic (products)": self.products_s, "arithmetic (attention)": self.attention_s,
            "launches and communication": self.fixed_s,
        }  # fmt: skip
        return max(found, key=lambda name: found[name])


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a device, or of several that share the work: bytes read, and multiplications and additions, a second."""

    bytes_per_s: float
    products_per_s: float
    attention_per_s: float


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of steps of a model in one format."""

    work: ModelWork
    specs: tuple[LayerCacheSpec, ...]
    weight_bytes: int
    token_bytes: tuple[int, int]  # cache bytes of a token: within the windows, and beyond them

    def of(self, step: StepWork, rates: Rates) -> Limit:
        model, num_rows = self.work, max(1, step.num_samples, step.num_chunks)
        keys = cached_bytes(self.specs, step.num_keys, num_rows, *reversed(self.token_bytes))
        if model.chosen_share and step.num_keys:  # the index still reads its own keys of all tokens
            chosen = min(1.0, model.num_chosen * num_rows / step.num_keys)
            keys *= 1 - model.chosen_share * (1 - chosen)
        context = (step.num_keys + step.num_tokens / 2) / num_rows
        # A decode row multiplies with the keys in the cache and its own.
        pairs = step.num_chunk_pairs if step.num_chunks else step.num_keys + step.num_tokens
        return Limit(
            self.weight_bytes * model.read_share(step.num_tokens, step.num_samples) / rates.bytes_per_s,
            keys / rates.bytes_per_s,
            model.product_operations(step.num_tokens, step.num_samples) / rates.products_per_s,
            model.attention_operations(pairs, context) / rates.attention_per_s,
        )


@dataclass(frozen=True, slots=True)
class GpuSteps:
    """The `octavo.step_cost.StepCost` of a model on `num_devices` GPUs that share each layer."""

    machine: Machine
    limits: StepLimits
    num_devices: int = 1

    def limit(self, step: StepWork) -> Limit:
        machine, model, n = self.machine, self.limits.work, self.num_devices
        peak = machine.tflops * 1e12 * n
        rates = Rates(machine.copy_gbs * 1e9 * n, peak * PREFILL_SHARE, peak * ATTENTION_SHARE)
        launches = model.num_layers * _KERNELS_PER_LAYER + _KERNELS_PER_STEP
        small = launches - _LARGE_PER_LAYER * model.num_layers
        fixed = launches * machine.between_s + small * _SMALL_KERNEL_S
        if n > 1:
            exchanges, received = sum_exchanges(step.num_tokens * model.hidden_size * _SUMMED_BYTES, n)
            fixed += 2 * model.num_layers * (exchanges * EXCHANGE_S + received / (machine.link_gbs * 1e9))
        return replace(self.limits.of(step, rates), fixed_s=fixed)

    def seconds(self, step: StepWork) -> float:
        """Return the time of a step. Reading weights and multiplying overlap only by half of the shorter one; the tile
        model of `benchmarks/gpu_limits.py` agrees within 10%."""
        limit = self.limit(step)
        return limit.seconds + min(limit.weights_s, limit.products_s) / 2
