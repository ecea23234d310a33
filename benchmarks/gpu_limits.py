"""What bytes and operations allow on a GPU, for a decoder served in bfloat16: the predictions of docs/gpu.md.

    python benchmarks/gpu_limits.py [--device h100|h200|a100] [--copy-gbs 3000] [--tflops 700]

A decode step reads the matrices once and the keys and values of every row; a prefill multiplies. To that comes, for
each of a step's kernels, the time between two of them in a replayed graph. The share of the device's rates that kernels
reach is an assumption, stated below and checked by `scripts/gpu-check`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import prod
from typing import Any

from octavo.models.description import ModelDescription
from octavo.models.inventory import required_tensors
from octavo.models.registry import describe

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip

# Kernels of a layer: norm, qkv, rotary, attention, output, norm, gate and up, down. Of a step: embedding, rows, norm,
# output matrix, two for the argmax, and some for the step's inputs.
KERNELS_PER_LAYER, KERNELS_PER_STEP = 8, 16
BETWEEN_KERNELS_S = 1.5e-6  # in a replayed graph
# Shares of the measured copy bandwidth and matrix rate that the kernels are expected to reach.
WEIGHTS_SHARE, ATTENTION_SHARE, PREFILL_SHARE = 0.88, 0.80, 0.62


@dataclass(frozen=True)
class Rates:
    """What a device measures: bytes a second read and written by a copy, operations a second of a large product."""

    copy_gbs: float
    tflops: float


DEVICES = {"h100": Rates(3000, 790), "h200": Rates(4300, 790), "a100": Rates(1700, 270)}


class Limits:
    """Times in seconds. Elements have two bytes."""

    def __init__(self, model: ModelDescription, rates: Rates) -> None:
        self.num_layers, self.rates = len(model.layers), rates
        embedding = self.output_elements = model.vocab_size * model.hidden_size
        # A step reads a row or so of the embedding, and all of the output matrix.
        self.matrix_elements = sum(prod(tensor.shape) for tensor in required_tensors(model) if tensor.is_matrix)
        self.matrix_elements -= 0 if model.tie_word_embeddings else embedding
        self.token_bytes = sum(2 * spec.num_kv_heads * (spec.key_size + spec.value_size) for spec in model.layer_caches)
        self.query_elements = sum(layer.attention.num_heads * layer.attention.head_size for layer in model.layers)

    def weights_s(self, share: float = 1.0) -> float:
        return 2 * self.matrix_elements / (self.rates.copy_gbs * 1e9 * share)

    def decode_step_s(self, batch: int, context: int) -> float:
        """One token each for `batch` sequences of `context` tokens."""
        products = 2 * batch * self.matrix_elements / (self.rates.tflops * 1e12 * PREFILL_SHARE)
        attention = batch * context * self.token_bytes / (self.rates.copy_gbs * 1e9 * ATTENTION_SHARE)
        kernels = self.num_layers * KERNELS_PER_LAYER + KERNELS_PER_STEP
        return max(self.weights_s(WEIGHTS_SHARE), products) + attention + kernels * BETWEEN_KERNELS_S

    def prefill_s(self, num_tokens: int, context: int) -> float:
        """`num_tokens` of prompts of `context` tokens, the output matrix left out."""
        products = 2 * num_tokens * (self.matrix_elements - self.output_elements)
        attention = 2 * num_tokens * context * self.query_elements
        return (products + attention) / (self.rates.tflops * 1e12 * PREFILL_SHARE)

    def output_rate(self, batch: int, num_in: int, num_out: int) -> float:
        """Output tokens a second, prefill included, of `batch` requests that come at once."""
        steps = num_out * self.decode_step_s(batch, num_in + num_out // 2)
        return batch * num_out / (self.prefill_s(batch * num_in, num_in) + steps)


def rows(limits: Limits) -> list[tuple[str, str, float]]:
    """(what, unit, prediction) of everything that `scripts/gpu-check` measures of the 8B model."""
    floor = limits.weights_s()
    step = limits.decode_step_s(1, 576)
    between = (limits.num_layers * KERNELS_PER_LAYER + KERNELS_PER_STEP) * BETWEEN_KERNELS_S
    found = [
        ("decode, 1 row: share of the copy bandwidth", "%", 100 * floor / step),
        ("decode step, 1 rows", "ms", 1e3 * step),
        *((f"decode step, {batch} rows", "ms", 1e3 * limits.decode_step_s(batch, 576)) for batch in (32, 64, 128, 256)),
        ("decode step, 64 rows: outside kernels", "%", 100 * between / limits.decode_step_s(64, 576)),
    ]
    for batch in (1, 32, 128, 256):
        found.append((f"output, {batch} at once, 512 in, 128 out", "tok/s", limits.output_rate(batch, 512, 128)))
    prefill = 8192 / limits.prefill_s(8192, 2048)
    found.append(("prefill, prompts of 2048", "tok/s", prefill))
    found.append(("prefill: share of the matrix rate", "%", 100 * PREFILL_SHARE))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="h100")
    parser.add_argument("--copy-gbs", type=float)
    parser.add_argument("--tflops", type=float)
    args = parser.parse_args()
    known = DEVICES[args.device]
    rates = Rates(args.copy_gbs or known.copy_gbs, args.tflops or known.tflops)
    print(f"Llama-3.1-8B in bfloat16 at {rates.copy_gbs:.0f} GB/s and {rates.tflops:.0f} TFLOP/s")
    for what, unit, value in rows(Limits(describe(LLAMA_3_1_8B), rates)):
        print(f"{what:50}{value:10.1f} {unit}")


if __name__ == "__main__":
    main()
