"""Perplexity of a model with each format of its weights, beside that of the same weights in float32.

    python benchmarks/perplexity.py [--model MODEL] [--formats Q4_1 Q8_0 int8 ...] [--tokens 20000] [--window 1024]
    python benchmarks/perplexity.py --caches [--tokens 20000] [--window 4096]

The weights of a model (default: the default model) are written to GGUF files of each format, quantized anew by `gguf`
or by the quantizers below. A file is then served twice: in float32, which expands its blocks and multiplies floats, and
packed. Only what packing, quantized activations and bfloat16 lose is thus measured, not what the format itself lost.
With `--caches` the model is served as it is, with each type of the KV cache.

The text (benchmarks/data/perplexity.txt) is SmolLM2-135M-Instruct's own: answers to 48 questions, sampled in float32 at
temperature 0.85, top-p 0.95 and repetition penalty 1.1. It is cut into windows, each computed from nothing; the first
token of a window is not predicted.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np

from octavo import LLM, SamplingParams
from octavo.loading.checkpoint import resolve
from octavo.loading.gguf_file import read_gguf
from octavo.loading.gguf_tensors import NamedTensor, stored_tensor
from octavo.quantization import dequantize

TEXT = Path(__file__).parent / "data" / "perplexity.txt"
# K types need rows of a multiple of 256; matrices of other widths take the type that llama.cpp falls back to.
FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
FORMATS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "int8", "BF16"]


def read_tokens(llm: LLM, count: int) -> list[int]:
    token_ids: list[int] = llm.get_tokenizer().encode(TEXT.read_text(encoding="utf-8"))
    return token_ids[:count]


def perplexity(llm: LLM, token_ids: Sequence[int], window: int) -> float:
    """exp of the mean negative log-probability of each token that has another one before it in its window."""
    windows = [list(token_ids[i : i + window]) for i in range(0, len(token_ids), window)]
    prompts = [{"prompt_token_ids": ids} for ids in windows if len(ids) > 1]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    total, count = 0.0, 0
    for output in llm.generate(prompts, params, use_tqdm=False):
        ids = output.prompt_token_ids
        for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
            total -= entry[token].logprob
            count += 1
    return math.exp(total / count)


def measure(
    model: str, dtype: str, tokens: int, window: int, quantization: str | None = None, cache: str = "auto"
) -> tuple[float, float]:
    """Perplexity, and the seconds that computing it took."""
    llm = LLM(
        model, dtype=dtype, quantization=quantization, max_model_len=window + 1, enable_prefix_caching=False,
        disable_log_stats=True, kv_cache_dtype=cache,
    )  # fmt: skip
    token_ids = read_tokens(llm, tokens)
    start = time.perf_counter()
    return perplexity(llm, token_ids, window), time.perf_counter() - start


# Files of other formats


def requantize(source: str, path: Path, name: str) -> Path:
    """A copy of a GGUF file whose matrices are of type `name`, or of its fallback."""
    file, reader = read_gguf(source), gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.quantization_version"):
            continue
        item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=item)
    for info in file.tensors.values():
        values = dequantize(stored_tensor(file, NamedTensor("", info))).reshape(info.shape)
        chosen = name if values.ndim == 2 else "F32"
        if chosen in FALLBACKS and values.shape[1] % 256:
            chosen = FALLBACKS[chosen]
        data = quantize(values, chosen)
        writer.add_tensor(info.name, data, raw_dtype=gguf.GGMLQuantizationType[chosen])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantize(values: np.ndarray, name: str) -> np.ndarray:
    """Rows of float32 as bytes of a GGUF type."""
    if name in _K_QUANTIZERS:
        blocks = values.reshape(-1, 256)
        return _K_QUANTIZERS[name](blocks).reshape(values.shape[0], -1)
    return gguf.quantize(values, gguf.GGMLQuantizationType[name])


def _half_bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values.astype(np.float16).reshape(-1, 1)).view(np.uint8)


def _ratio(values: np.ndarray, units: np.ndarray) -> np.ndarray:
    return np.divide(values, units, out=np.zeros_like(values), where=units != 0)


def _minmax(blocks: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """-> (20 bytes of scales and minima, codes [n, 8, 32]) of Q4_K and Q5_K, from the range of each group."""
    groups = blocks.reshape(-1, 8, 32)
    below = np.maximum(-groups.min(-1), 0)  # minima count downwards from 0
    scales = (np.maximum(groups.max(-1), 0) + below) / (2**bits - 1)
    halves = []
    coded = []
    for kind in (scales, below):
        unit = (kind.max(-1, keepdims=True) / 63).astype(np.float16)
        halves.append(unit)
        coded.append(np.clip(np.rint(_ratio(kind, unit.astype(np.float32))), 0, 63).astype(np.uint8))
    scale, minimum = coded
    step = halves[0].astype(np.float32) * scale
    shift = halves[1].astype(np.float32) * minimum
    codes = np.clip(np.rint(_ratio(groups + shift[:, :, None], np.repeat(step[:, :, None], 32, 2))), 0, 2**bits - 1)
    packed = [
        scale[:, :4] | scale[:, 4:] >> 4 << 6,
        minimum[:, :4] | minimum[:, 4:] >> 4 << 6,
        scale[:, 4:] & 15 | minimum[:, 4:] << 4,
    ]
    return np.concatenate([*(_half_bytes(h) for h in halves), *packed], axis=1), codes.astype(np.uint8)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """[n, 8, 32] -> [n, 128]: groups 2i in the low halves, 2i + 1 in the high ones."""
    return (codes[:, 0::2] & 15 | (codes[:, 1::2] & 15) << 4).reshape(-1, 128)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    head, codes = _minmax(blocks, 4)
    return np.concatenate([head, _nibbles(codes)], axis=1)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    head, codes = _minmax(blocks, 5)
    fifth = np.bitwise_or.reduce(codes >> 4 << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return np.concatenate([head, fifth, _nibbles(codes)], axis=1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    scales = np.abs(groups).max(-1) / 31
    unit = (scales.max(-1, keepdims=True) / 127).astype(np.float16)
    coded = np.rint(_ratio(scales, unit.astype(np.float32))).clip(0, 127).astype(np.int8)
    step = np.repeat((unit.astype(np.float32) * coded)[:, :, None], 16, 2)
    codes = (np.rint(_ratio(groups, step)).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4
    top = np.bitwise_or.reduce(codes >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=2)
    parts = [low.reshape(-1, 128), top.reshape(-1, 64), coded.view(np.uint8), _half_bytes(unit)]
    return np.concatenate(parts, axis=1)


_K_QUANTIZERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}


def compare_caches(model: str, tokens: int, window: int) -> None:
    print(f"{'KV cache':10}{'perplexity':>12}{'change':>10}{'tokens/s':>10}")
    expected = math.nan
    for cache in ("auto", "int8", "fp8_e4m3", "fp8_e5m2"):
        found, seconds = measure(model, "bfloat16", tokens, window, cache=cache)
        if cache == "auto":
            expected = found
        print(f"{cache:10}{found:12.4f}{found / expected - 1:10.2%}{tokens / seconds:10.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a GGUF file, or a model that has one; default: the default model")
    parser.add_argument("--formats", nargs="+", default=["as it is", *FORMATS], metavar="FORMAT")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--caches", action="store_true", help="types of the KV cache in the place of formats")
    args = parser.parse_args()
    source = resolve(args.model)
    if source.format != "gguf":
        parser.error("the weights are taken from a GGUF file; convert the model first.")
    print(f"{source.name}: {args.tokens} tokens in windows of {args.window}")
    if args.caches:
        return compare_caches(source.path, args.tokens, args.window)
    print(f"{'format':10}{'float32':>10}{'packed':>10}{'change':>10}{'tokens/s':>10}")
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.formats:
            model, quantization = source.path, None
            if name != "as it is":
                stored = "BF16" if name == "int8" else name
                quantization = "int8" if name == "int8" else None
                path = Path(scratch) / f"{stored}.gguf"
                model = str(path if path.exists() else requantize(source.path, path, stored))
            expected, _ = measure(model, "float32", args.tokens, args.window)
            found, seconds = measure(model, "bfloat16", args.tokens, args.window, quantization)
            change, rate = found / expected - 1, args.tokens / seconds
            print(f"{name:10}{expected:10.4f}{found:10.4f}{change:10.2%}{rate:10.0f}", flush=True)


if __name__ == "__main__":
    main()
