"""Which kernels a start compiles, and which ones steps of any size could ask for: JSON, from a process of its own.

`python -m tests.ops.triton.reachable FORMAT CAPABILITY` outlines a model of two layers as wide as Llama-3.1-8B, whose
matrices are in the format, for a GPU that is not there (`compiling`). Nothing is compiled: Triton is asked which
variant of a kernel each launch would be."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
MAX_TOKENS, MAX_SEQS = 8192, 400


class _Formats:
    """A checkpoint's tensors, as far as outlines ask."""

    def __init__(self, matrix_format: str) -> None:
        self._format = matrix_format

    def __contains__(self, name: str) -> bool:
        return True

    def matrix_format(self, name: str) -> str:
        return self._format


def main() -> None:
    matrix_format, capability = sys.argv[1], int(sys.argv[2])
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from octavo.ops.triton import launch
    from tests.ops.triton.compiling import MULTIPROCESSORS, Driver

    driver.set_active(Driver(capability))
    launch._capability = lambda device: divmod(capability, 10)
    launch._num_multiprocessors = lambda device: MULTIPROCESSORS[capability]

    from types import SimpleNamespace

    from octavo.execution.rehearsal import outline_runner
    from octavo.models.registry import describe
    from octavo.ops import load_cuda
    from octavo.ops.triton import outline

    found: set[tuple[str, str]] = set()

    def note(self: Any, key: Any, *args: Any) -> None:
        found.add((self.__name__, str(key)))

    JITFunction._do_compile = note
    config: Any = SimpleNamespace(
        model=SimpleNamespace(dtype="bfloat16", max_model_len=8192),
        cache=SimpleNamespace(block_size=16, dtype="bfloat16"),
        scheduler=SimpleNamespace(max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS),
    )
    weights: Any = _Formats(matrix_format)
    with outline.outlining(outline._compile):
        runner = outline_runner(config, describe(LLAMA_3_1_8B), weights, load_cuda())
        runner.warm_up()
        at_start = set(found)
        edges = [edge + d for edge in (*range(128, 2048, 64), MAX_TOKENS) for d in (-1, 0, 1)]
        for num_tokens in sorted({*range(1, 130), *edges, *np.arange(300, MAX_TOKENS, 371).tolist()}):
            if num_tokens <= MAX_TOKENS:
                for num_seqs in {1, num_tokens // 2, min(num_tokens, MAX_SEQS)} - {0}:
                    num_seqs = min(num_seqs, MAX_SEQS)
                    runner._rehearse(num_tokens, num_seqs, min(num_tokens, MAX_SEQS))
    names = sorted({name for name, _ in found})
    late = sorted({name for name, _ in found - at_start})
    print(json.dumps({"kernels": names, "variants": len(at_start), "late": late}))


if __name__ == "__main__":
    main()
