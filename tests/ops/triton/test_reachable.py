"""Nothing is compiled after the start, whatever numbers of tokens, sequences and samples steps have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
_ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("model", "matrix_format", "capability", "size", "kernels"),
    [
        ("llama", "BF16", 90, 1, {"_linear"}),
        ("llama", "BF16", 90, 4, {"_linear", "_sum_in_tree"}),
        ("llama stages", "BF16", 90, 1, {"_linear", "_embed"}),
        ("gpt-oss stages", "BF16", 90, 1, {"_linear", "_embed", "_route"}),
        ("llama", "Q4_K", 80, 1, {"_linear_int"}),
        ("llama_2", "BF16", 80, 1, {"_linear"}),
        ("gpt-oss", "BF16", 90, 1, {"_linear", "_route", "_gather", "_clamped_gate", "_combine"}),
        ("qwen3-moe", "Q4_K", 90, 1, {"_linear_int", "_route", "_gather", "_combine"}),
        ("bloom", "BF16", 80, 1, {"_linear"}),
        ("deepseek-v3.2", "BF16", 90, 1, {"_latent_kernel", "_score_kernel", "_count_kernel", "_pick_kernel"}),
        ("qwen3-vl", "BF16", 90, 1, {"_linear", "_rotary_and_cache_kernel"}),
        ("gemma-3", "BF16", 80, 1, {"_linear"}),
        ("whisper", "BF16", 90, 1, {"_linear", "_rotary_and_cache_kernel"}),
        ("bert", "BF16", 90, 1, {"_linear", "_pool"}),
        ("mpnet", "BF16", 80, 1, {"_linear", "_pool"}),
        ("modernbert", "BF16", 90, 1, {"_linear", "_pool"}),
        ("llama adapters", "BF16", 90, 1, {"_linear", "_shrink", "_added", "_look_up"}),
        ("qwen3-moe adapters", "Q4_K", 80, 1, {"_linear_int", "_shrink", "_added"}),
    ],
)
def test_the_start_meets_every_kernel_that_a_step_can_launch(
    model: str, matrix_format: str, capability: int, size: int, kernels: set[str]
) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.triton.reachable"]
    name, *more = model.split()
    command += [name, matrix_format, str(capability), str(size), *more]
    done = subprocess.run(command, cwd=_ROOT, env=env, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["late"] == []
    always = {"_copy_kernel"} | (set() if "_latent_kernel" in kernels else {"_attention_kernel", "_plan_kernel"})
    always |= set() if "_pool" in kernels else {"_draw", "_penalize", "_add_last_tokens"}
    assert kernels | always <= {*found["kernels"]}
    assert found["variants"] > len(found["kernels"]) + 10  # several tiles of products
