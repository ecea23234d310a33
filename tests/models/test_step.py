"""The operations of a step: exactly these, in this order. Each more would be a pass over the activations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from octavo.loading.recording import RecordingWeights
from octavo.models.registry import build, describe
from octavo.ops import Ops
from octavo.step_batch import GroupTables, StepBatch

CONFIG = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4,
}  # fmt: skip


class Packed(SimpleNamespace):
    num_bytes, takes_float32 = 0, False


class RecordingOps:
    """An `Ops` that computes zeros of the right shape and notes what was called, with which matrix or consumer."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def place(self, array: Any) -> Any:
        return array

    def pack_linear(self, parts: Any, bias: Any = None, gated: bool = False, *_: bool) -> Packed:
        outs = [part.shape[0] for part in parts]
        return Packed(name="+".join(map(str, outs)), num_out=sum(outs) // (2 if gated else 1))

    def embedding(self, token_ids: Any, weight: Packed, dtype: str, scale: float) -> Any:
        self.calls.append(f"embedding {dtype} x{scale:g}")
        return np.zeros((len(token_ids), 16), np.float32)

    def rms_norm(self, x: Any, weight: Any, eps: float, consumer: Packed | None = None) -> Any:
        self.calls.append("rms_norm" + (f" for {consumer.name}" if consumer else ""))
        return x

    def linear(self, x: Any, weight: Packed, dtype: str) -> Any:
        self.calls.append(f"linear {weight.name} {dtype}")
        return np.zeros((len(x), weight.num_out), np.float32)

    def linear_silu_and_mul(self, x: Any, gate_up: Packed, consumer: Packed, *_: Any) -> Any:
        self.calls.append(f"linear_silu_and_mul {gate_up.name} for {consumer.name}")
        return np.zeros((len(x), gate_up.num_out), np.float32)

    def linear_add(self, x: Any, weight: Packed, residual: Any, scale: float) -> None:
        self.calls.append(f"linear_add {weight.name} x{scale:g}")

    def rotary_and_cache(self, *args: Any) -> None:
        self.calls.append("rotary_and_cache")

    def paged_attention(self, query: Any, *args: Any) -> Any:
        self.calls.append("paged_attention")
        return query.reshape(len(query), -1)


def calls_of_a_step(config: dict[str, Any]) -> list[str]:
    ops = RecordingOps()
    description = describe(config)
    model = build(description, RecordingWeights("bfloat16"), cast(Ops, ops), 8, "bfloat16")
    tables = GroupTables(np.zeros(3, np.int64), np.zeros((1, 1), np.int32))
    ids = np.zeros(3, np.int32)
    batch = StepBatch(ids, ids.astype(np.int64), ids, ids, ids, (tables,))
    hidden = model.forward(batch, cast(Any, [None] * len(description.layers)))
    model.logits(hidden)
    return ops.calls


@pytest.mark.parametrize(
    ("architecture", "qkv", "gate_up", "norms", "scale"),
    [
        ("LlamaForCausalLM", "16+8+8", "24+24", 0, "1"),
        ("Qwen3ForCausalLM", "16+8+8", "24+24", 2, "1"),
        ("Phi3ForCausalLM", "32", "24+24", 0, "1"),
        ("GraniteForCausalLM", "16+8+8", "24+24", 0, "0.5"),
    ],
)
def test_a_step_is_these_operations_and_no_more(
    architecture: str, qkv: str, gate_up: str, norms: int, scale: str
) -> None:
    multipliers = {"residual_multiplier": 0.5, "embedding_multiplier": 0.5}
    calls = calls_of_a_step(CONFIG | multipliers | {"architectures": [architecture]})
    block = [
        f"rms_norm for {qkv}",
        f"linear {qkv} bfloat16",
        *["rms_norm"] * norms,
        "rotary_and_cache",
        "paged_attention",
        f"linear_add 16 x{scale}",
        f"rms_norm for {gate_up}",
        f"linear_silu_and_mul {gate_up} for 16",
        f"linear_add 16 x{scale}",
    ]
    assert calls == [f"embedding bfloat16 x{scale}", *block, *block, "rms_norm for 32", "linear 32 float32"]
