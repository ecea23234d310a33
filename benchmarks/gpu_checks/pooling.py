"""Models that pool: vectors beside the CPU's for an encoder of each family and for decoders, equal bits alone and in
company, and how many texts a second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_checks.engines import DEVICE, Row, config_folder, whatever_fails
from octavo.config import EngineArgs
from octavo.engine.core import EngineCore
from octavo.pooling_params import PoolingParams
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams

Pooler = tuple[EngineCore, PoolingParams]  # and what its model is asked for

_BASE: dict[str, Any] = {"vocab_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}
# Each family's own: positions of all kinds, windows, biases by distance, norms before and after, heads for classes.
SHAPES: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": {"intermediate_size": 1024, "num_labels": 3},
    "XLMRobertaModel": {"intermediate_size": 1024, "type_vocab_size": 1, "max_position_embeddings": 514},
    "MPNetModel": {"intermediate_size": 1024, "max_position_embeddings": 514, "layer_norm_eps": 1e-5},
    "DistilBertForTokenClassification": {"hidden_dim": 1024, "num_labels": 3},
    "ElectraModel": {"intermediate_size": 1024, "embedding_size": 128},
    "ModernBertForSequenceClassification": {"intermediate_size": 768, "local_attention": 64, "num_labels": 3},
    "NomicBertModel": {"intermediate_size": 1024},
    "GteModel": {"intermediate_size": 1024},
    "EuroBertModel": {"intermediate_size": 1024},
    "Qwen3Model": {"intermediate_size": 1024, "num_key_value_heads": 2, "head_dim": 64},
    "Qwen3ForSequenceClassification": {
        "intermediate_size": 1024, "num_key_value_heads": 2, "head_dim": 64, "num_labels": 3,
    },
}  # fmt: skip
# As wide as all-MiniLM-L6-v2, bge-m3, ModernBERT-base and Qwen3-Embedding-8B.
TIMED: dict[str, dict[str, Any]] = {
    "MiniLM-L6 shape": {
        "architectures": ["BertModel"], "vocab_size": 30522, "hidden_size": 384, "intermediate_size": 1536,
        "num_hidden_layers": 6, "num_attention_heads": 12, "max_position_embeddings": 512,
    },
    "bge-m3 shape": {
        "architectures": ["XLMRobertaModel"], "vocab_size": 250002, "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 24, "num_attention_heads": 16, "max_position_embeddings": 8194, "type_vocab_size": 1,
        "pad_token_id": 1,
    },
    "ModernBERT-base shape": {
        "architectures": ["ModernBertModel"], "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152,
        "num_hidden_layers": 22, "num_attention_heads": 12, "max_position_embeddings": 8192,
    },
    "Qwen3-Embedding-8B shape": {
        "architectures": ["Qwen3Model"], "vocab_size": 151665, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "dtype": "bfloat16",
    },
}  # fmt: skip


def pooling(smoke: bool) -> Iterator[Row]:
    for name, shape in list(SHAPES.items())[: 2 if smoke else None]:
        agreement = _agreement(name, _BASE | {"architectures": [name]} | shape, smoke)
        yield from whatever_fails(name, agreement)
    for name, config in TIMED.items():
        if smoke:
            name, config = "small shape", TIMED["MiniLM-L6 shape"] | {"num_hidden_layers": 1, "vocab_size": 1024}
        sizes = (128, 128) if smoke else (8192, 512)
        pooler = _core(config, DEVICE.type, max_num_batched_tokens=sizes[0], max_model_len=sizes[1])
        for count, length in ((1, 16), (4, 32)) if smoke else ((1, 16), (1, 256), (512, 32), (512, 256)):
            seconds = min(_timed(pooler, count, length, config["vocab_size"]) for _ in range(3))
            unit, value = ("ms", seconds * 1e3) if count == 1 else ("texts/s", count / seconds)
            yield f"{name}: {count} of {length} tokens", unit, f"{value:.2f}"
        del pooler
        if smoke:
            return


def _agreement(name: str, config: dict[str, Any], smoke: bool) -> Iterator[Row]:
    texts = {f"{i}": _text(i, length) for i, length in enumerate((3, 20, 127, 64) if smoke else (3, 20, 127, 64, 400))}
    dtype = {} if smoke else {"dtype": "bfloat16"}
    flags = dtype | {"max_model_len": 128 if smoke else 512}
    pooler = _core(config, DEVICE.type, **flags)
    found = _vectors(pooler, texts)
    alone = {key: _vectors(pooler, {key: text})[key] for key, text in texts.items()}
    del pooler
    same = all(np.array_equal(alone[key], vector) for key, vector in found.items())
    yield f"{name}: same bits alone and in company", "", "yes" if same else "NO"
    expected = _vectors(_core(config, "cpu", **flags), texts)
    worst = min(_cosine(found[key], vector) for key, vector in expected.items())
    yield f"{name}: least cosine with the CPU's vectors", "", f"{worst:.5f}"


def _core(config: dict[str, Any], device: str, **flags: Any) -> Pooler:
    folder = config_folder(config)
    args = {"load_format": "dummy", "seed": 1, "runner": "pooling"} | flags
    engine_config = EngineArgs(model=folder, tokenizer=folder, device=device, **args).create_engine_config()
    assert engine_config.model.pooling is not None
    return EngineCore(engine_config), engine_config.model.pooling.settle(PoolingParams(use_activation=False))


def _text(number: int, length: int, vocab_size: int = 1024) -> list[int]:
    return torch.randint(5, vocab_size, (length,), generator=torch.Generator().manual_seed(number)).tolist()


def _vectors(pooler: Pooler, texts: dict[str, list[int]]) -> dict[str, NDArray[np.float32]]:
    (core, params), found = pooler, dict[str, NDArray[np.float32]]()
    for name, tokens in texts.items():
        core.add(EngineRequest(name, Prompt(tokens), SamplingParams(), [], 0, time.monotonic(), pooling=params))
    while core.has_work:
        for output in core.step().outputs:
            if output.error is not None or output.vectors is None:
                raise RuntimeError(output.error)
            found[output.request_id] = np.frombuffer(output.vectors, np.float32)
    return found


def _cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def _timed(pooler: Pooler, count: int, length: int, vocab_size: int) -> float:
    texts = {f"{i}": _text(i, length, vocab_size) for i in range(count)}
    begun = time.perf_counter()
    _vectors(pooler, texts)
    return time.perf_counter() - begun
