"""What the parts of the GPU check compute with: small models of several shapes, cores, requests, a timed run."""

from __future__ import annotations

import gc
import json
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from octavo.config import EngineArgs
from octavo.engine.core import EngineCore
from octavo.request import AdapterSource, EngineRequest, Prompt, SequenceOutput
from octavo.sampling_params import SamplingParams

Row = tuple[str, str, str]  # what, unit, measured

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
EOS = 2

_SMALL: dict[str, Any] = {
    "vocab_size": 1024, "num_hidden_layers": 4, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": EOS,
    "dtype": "bfloat16", "tie_word_embeddings": True,
}  # fmt: skip
# The shapes of families: grouped heads; biases on query, key and value, or norms; few heads of 256.
SHAPES: dict[str, dict[str, Any]] = {
    "Llama": _SMALL | {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64,
        "num_attention_heads": 8, "num_key_value_heads": 2,
    },
    "Qwen2": _SMALL | {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 2432, "head_dim": 64,
        "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    "Qwen3": _SMALL | {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 512, "intermediate_size": 1536, "head_dim": 128,
        "num_attention_heads": 8, "num_key_value_heads": 4,
    },
    "Gemma (heads of 256)": _SMALL | {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 4096, "head_dim": 256,
        "num_attention_heads": 4, "num_key_value_heads": 1,
    },
}  # fmt: skip


def config_folder(config: dict[str, Any]) -> str:
    """A folder with this config.json. Dummy weights need nothing else."""
    folder = tempfile.mkdtemp(prefix="octavo-gpu-check-")
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def watched_compiling() -> Iterator[list[str]]:
    """Names of the kernels that are compiled meanwhile, or brought from the cache on disk: none, once a core is
    ready."""
    found: list[str] = []
    if not HAS_GPU:
        yield found
        return
    from triton import knobs

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = lambda *, fn, **_: found.append(fn.name)
    try:
        yield found
    finally:
        knobs.runtime.jit_cache_hook = before


def whatever_fails(what: str, rows: Iterator[Row]) -> Iterator[Row]:
    """`rows`, and one more that says so where something raises: what comes next can still be tried."""
    try:
        yield from rows
    except Exception as error:
        traceback.print_exc()
        yield what, "", f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if HAS_GPU:
            torch.cuda.synchronize()  # raises again where the device does nothing more for this process
        free_memory()


def listed(names: list[str]) -> str:
    return ", ".join([str(len(names)), *sorted(set(names))])


def make_core(config: dict[str, Any], device: str, **flags: Any) -> EngineCore:
    args = {"load_format": "dummy", "seed": 1, "device": device, "enable_prefix_caching": False} | flags
    folder = config_folder(config)
    return EngineCore(EngineArgs(model=folder, tokenizer=folder, **args).create_engine_config())


def request(
    name: str, prompt: list[int], num_out: int, adapter: AdapterSource | None = None, **params: Any
) -> EngineRequest:
    settings = {"temperature": 0.0, "ignore_eos": True, "max_tokens": num_out} | params
    asked = Prompt(prompt, adapter=None if adapter is None else adapter.identity)
    return EngineRequest(name, asked, SamplingParams(**settings), [EOS], num_out, time.monotonic(), adapter=adapter)


def prompt_of(number: int, length: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


def drain(core: EngineCore) -> dict[str, list[SequenceOutput]]:
    found: dict[str, list[SequenceOutput]] = {}
    while core.has_work:
        for output in core.step().outputs:
            if output.error:
                raise RuntimeError(output.error)
            found.setdefault(output.request_id, []).append(output)
    return found


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def free_memory() -> None:
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()


def timed_run(
    core: EngineCore, batch: int, num_in: int, num_out: int, vocab: int, adapters: Sequence[AdapterSource] = ()
) -> tuple[float, float]:
    """(seconds in all, seconds of a step of decodes alone) of `batch` requests that come at once, over `adapters` in
    turn."""
    for i in range(batch):
        adapter = adapters[i % len(adapters)] if adapters else None
        core.add(request(f"{i}", prompt_of(i, num_in, vocab), num_out, adapter))
    begun = time.perf_counter()
    decode_s: list[float] = []
    while core.has_work:
        step_begun = time.perf_counter()
        stats = core.step().stats
        if stats.num_running == batch and stats.num_computed_tokens == batch:
            decode_s.append(time.perf_counter() - step_begun)
    total = time.perf_counter() - begun
    return total, sorted(decode_s)[len(decode_s) // 2] if decode_s else total / num_out
