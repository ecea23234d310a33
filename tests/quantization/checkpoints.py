"""Quantized checkpoints in the layouts that tools publish, written from random codes, with the values that they stand
for. Nothing here is shared with the readers: words are made bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE, LAYERS, VOCAB = 128, 256, 4, 2, 32, 2, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_SIZE, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_SIZE, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN), "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}  # fmt: skip
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
NF4 = np.array(
    [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
     0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0], np.float32,
)  # fmt: skip
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

Matrix = tuple[dict[str, np.ndarray], np.ndarray]  # tensors after the module's name, and the values [N, K]


def words(values: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """[R, C] -> int32 [R, C * bits / 32], a stream of bits, lowest first. With an order, that of each eight."""
    if order is not None:
        values = values.reshape(len(values), -1, 8)[:, :, order].reshape(len(values), -1)
    stream = (values[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(values), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(stream, axis=1, bitorder="little").view(np.int32)


def _scales(rng: np.random.Generator, *shape: int, bits: int = 4) -> np.ndarray:
    return (rng.uniform(0.5, 1.5, shape) * 0.1 / (1 << bits >> 1)).astype(np.float16)


def gptq(
    rng: np.random.Generator, n: int, k: int, *, bits: int = 4, group: int = 32, symmetric: bool = True,
    version: int = 1, act_order: np.ndarray | None = None,
) -> Matrix:  # fmt: skip
    groups = 1 if group == -1 else k // group
    codes = rng.integers(0, 1 << bits, (k, n))
    middle = 1 << bits >> 1
    zeros = np.full((groups, n), middle) if symmetric else rng.integers(1, 1 << bits, (groups, n))
    scales = _scales(rng, groups, n, bits=bits)
    g_idx = (np.arange(k) // (k // groups)).astype(np.int32)
    if act_order is not None:
        g_idx = g_idx[act_order % k] if len(act_order) == k else g_idx[rng.permutation(k)]
    tensors = {
        "qweight": np.ascontiguousarray(words(codes.T, bits).T), "qzeros": words(zeros - (version == 1), bits),
        "scales": scales, "g_idx": g_idx,
    }  # fmt: skip
    return tensors, (scales.astype(np.float64)[g_idx] * (codes - zeros[g_idx])).T.astype(np.float32)


def awq(rng: np.random.Generator, n: int, k: int, *, gemv: bool = False, group: int = 32) -> Matrix:
    codes, zeros = rng.integers(0, 16, (n, k)), rng.integers(0, 16, (n, k // group))
    scales = _scales(rng, n, k // group)
    values = scales.astype(np.float64).repeat(group, 1) * (codes - zeros.repeat(group, 1))
    if gemv:
        wide = -(-(k // group) // 8) * 8 * 4 if group == 32 else -(-(k // group) // 8) * 8
        pad = ((0, 0), (0, wide - k // group))
        tensors = {"qweight": words(codes, 4), "qzeros": words(np.pad(zeros, pad), 4), "scales": np.pad(scales, pad)}
    else:
        tensors = {
            "qweight": words(codes.T, 4, AWQ_ORDER), "qzeros": words(zeros.T, 4, AWQ_ORDER),
            "scales": np.ascontiguousarray(scales.T),
        }  # fmt: skip
    return tensors, values.astype(np.float32)


def packed_integers(
    rng: np.random.Generator, n: int, k: int, *, bits: int = 4, group: int = 32, symmetric: bool = True,
    act_order: bool = False,
) -> Matrix:  # fmt: skip
    groups = 1 if group == -1 else k // group
    half = 1 << bits >> 1
    codes, scales = rng.integers(-half, half, (n, k)), _scales(rng, n, groups, bits=bits).astype(ml_dtypes.bfloat16)
    zeros = np.zeros((n, groups), int) if symmetric else rng.integers(-half, half, (n, groups))
    tensors = {
        "weight_packed": words(codes + half, bits), "weight_scale": scales, "weight_shape": np.array([n, k]),
    }  # fmt: skip
    if not symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(words((zeros + half).T, bits).T)
    g_idx = np.arange(k) // (k // groups)
    if act_order:
        g_idx = np.random.default_rng(k).permutation(g_idx)
        tensors["weight_g_idx"] = g_idx.astype(np.int32)
    return tensors, (scales.astype(np.float64)[:, g_idx] * (codes - zeros[:, g_idx])).astype(np.float32)


def scaled_integers(rng: np.random.Generator, n: int, k: int, *, bits: int = 8, per: str = "channel") -> Matrix:
    half = 1 << bits >> 1
    codes = rng.integers(-half, half, (n, k)).astype(np.int8)
    shape = {"channel": (n, 1), "tensor": (1,), "group": (n, k // 32)}[per]
    scales = (rng.uniform(0.5, 1.5, shape) * 0.1 / half).astype(np.float32)
    wide = scales if per != "group" else scales.repeat(32, 1)
    tensors = {"weight": codes, "weight_scale": scales, "input_scale": np.ones(1, np.float32)}
    return tensors, (codes * wide).astype(np.float32)


def fp8(rng: np.random.Generator, n: int, k: int, *, per: str = "tensor", name: str = "weight_scale") -> Matrix:
    codes = (rng.standard_normal((n, k)) * 100).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    if per == "block":
        scales = rng.uniform(0.5, 1.5, (-(-n // 128), -(-k // 128))).astype(np.float32) / 2000
        wide = scales.repeat(128, 0)[:n].repeat(128, 1)[:, :k]
    else:
        scales = rng.uniform(0.5, 1.5, {"tensor": (), "channel": (n, 1)}[per]).astype(np.float32) / np.float32(2000)
        wide = np.asarray(scales)
    return {"weight": codes, name: np.asarray(scales)}, codes.astype(np.float32) * wide


def fp4(rng: np.random.Generator, n: int, k: int, *, kind: str) -> Matrix:
    codes = rng.integers(0, 16, (n, k))
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    if kind == "mxfp4":
        scales = rng.integers(120, 124, (n, k // 32)).astype(np.uint8)
        values = E2M1[codes] * np.exp2(scales.astype(np.float64) - 127).repeat(32, 1)
        return {"weight_packed": packed, "weight_scale": scales}, values.astype(np.float32)
    scales = rng.uniform(10, 400, (n, k // 16)).astype(ml_dtypes.float8_e4m3fn)
    whole = np.array([8000.0], np.float32)
    values = (E2M1[codes] * scales.astype(np.float64).repeat(16, 1) / whole).astype(np.float32)
    if kind == "nvfp4":
        return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole}, values
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": 1 / whole[0], "input_scale": np.float32(1)}
    return {name: np.asarray(x) for name, x in tensors.items()}, values


def codebook(rng: np.random.Generator, n: int, k: int, *, nested: bool) -> Matrix:
    codes, blocks = rng.integers(0, 16, n * k), n * k // 64
    tensors = {
        "weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None], "weight.quant_map": NF4,
    }  # fmt: skip
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [n, k]}
    if nested:
        indices, table = rng.integers(0, 256, blocks).astype(np.uint8), np.linspace(-1, 1, 256, dtype=np.float32)
        units = rng.uniform(0.01, 0.05, -(-blocks // 256)).astype(np.float32)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1}
        absmax = table[indices] * units.repeat(256)[:blocks] + np.float32(0.1)
        tensors |= {"weight.absmax": indices, "weight.nested_absmax": units, "weight.nested_quant_map": table}
    else:
        absmax = rng.uniform(0.05, 0.2, blocks).astype(np.float32)
        tensors["weight.absmax"] = absmax
    tensors["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    return tensors, (NF4[codes] * absmax.repeat(64)).reshape(n, k)


def squeezellm(rng: np.random.Generator, n: int, k: int, *, bits: int = 4, sparse: bool = False) -> Matrix:
    codes = rng.integers(0, 1 << bits, (n, k))
    table = (rng.standard_normal((n, 1 << bits)) * 0.05).astype(np.float16)
    tensors = {"qweight": np.ascontiguousarray(words(codes, bits).T), "lookup_table": table}
    values = np.take_along_axis(table.astype(np.float32), codes, 1)
    if sparse:
        there = rng.random((n, k)) < 0.01
        there[3] = False
        there[5, :2] = True  # the last place of a row without, and the first of a row with many
        values += np.where(there, rng.uniform(0.1, 0.3, (n, k)), 0).astype(np.float32)
        tensors["rows"] = np.cumsum([0, *there.sum(1)]).astype(np.int32)
        tensors["cols"] = np.nonzero(there)[1].astype(np.int32)
        tensors["vals"] = (values - np.take_along_axis(table.astype(np.float32), codes, 1))[there]
        tensors["startrows"] = np.zeros(10 * n, np.int32)
    return tensors, values


def bnb_int8(rng: np.random.Generator, n: int, k: int) -> Matrix:
    codes, absmax = rng.integers(-127, 128, (n, k)).astype(np.int8), rng.uniform(0.05, 0.2, n).astype(np.float32)
    tensors = {"weight": codes, "SCB": absmax, "weight_format": np.zeros((), np.uint8)}
    return tensors, codes * (absmax / np.float32(127))[:, None]


class Format(NamedTuple):
    write: Callable[..., Matrix]
    settings: dict[str, Any]
    bits: float  # of a packed weight
    tolerance: float  # of packed values, relative to the largest of the matrix


_ACT_ORDER = np.arange(1)  # columns in random order


def _compressed(kind: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"], **more,
    }  # fmt: skip


def _gptq(**settings: Any) -> dict[str, Any]:
    defaults = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    return defaults | settings


_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_STEP, _MINIMA, _SCALES, _BYTES = 0.0, 2**-8, 2**-11, 0.0045  # nothing; minima, scales, values rounded
FORMATS: dict[str, Format] = {
    "gptq 4": Format(gptq, _gptq(), 4.5, _STEP),
    "gptq 4 zeros": Format(lambda *a: gptq(*a, symmetric=False), _gptq(sym=False), 5, _MINIMA),
    "gptq 4 v2": Format(lambda *a: gptq(*a, version=2, symmetric=False),
                        _gptq(sym=False, checkpoint_format="gptq_v2"), 5, _MINIMA),
    "gptq 4 by row": Format(lambda *a: gptq(*a, group=-1), _gptq(group_size=-1), 4.5, _STEP),
    "gptq 4 by 128": Format(lambda *a: gptq(*a, group=128), _gptq(group_size=128), 4.5, _STEP),
    "gptq 4 desc_act": Format(lambda *a: gptq(*a, act_order=_ACT_ORDER), _gptq(desc_act=True), 4.5, _STEP),
    "gptq 2": Format(lambda *a: gptq(*a, bits=2, group=64), _gptq(bits=2, group_size=64), 4.5, _STEP),
    "gptq 3": Format(lambda *a: gptq(*a, bits=3), _gptq(bits=3), 4.5, _STEP),
    "gptq 3 zeros": Format(lambda *a: gptq(*a, bits=3, symmetric=False), _gptq(bits=3, sym=False), 4.5, _STEP),
    "gptq 8": Format(lambda *a: gptq(*a, bits=8), _gptq(bits=8), 8.5, _STEP),
    "gptq 8 zeros": Format(lambda *a: gptq(*a, bits=8, symmetric=False), _gptq(bits=8, sym=False), 9, _MINIMA),
    "awq": Format(awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, 5, _MINIMA),
    "awq gemv": Format(lambda *a: awq(*a, gemv=True), {"quant_method": "awq", "w_bit": 4, "q_group_size": 32,
                       "version": "GEMV", "zero_point": True}, 5, _MINIMA),
    "w4a16": Format(packed_integers, _compressed("pack-quantized", _INT4), 4.5, _STEP),
    "w4a16 zeros": Format(lambda *a: packed_integers(*a, symmetric=False),
                          _compressed("pack-quantized", _INT4 | {"symmetric": False}), 5, _MINIMA),
    "w4a16 actorder": Format(lambda *a: packed_integers(*a, act_order=True),
                             _compressed("pack-quantized", _INT4 | {"actorder": "group"}), 4.5, _STEP),
    "w8a16": Format(lambda *a: packed_integers(*a, bits=8, group=-1), _compressed("pack-quantized", _INT8), 8.5, _STEP),
    "w8a8": Format(scaled_integers, _compressed("int-quantized", _INT8), 8.5, _SCALES),
    "w8a8 by tensor": Format(lambda *a: scaled_integers(*a, per="tensor"),
                             _compressed("int-quantized", _INT8 | {"strategy": "tensor"}), 8.5, _SCALES),
    "w4a8": Format(lambda *a: scaled_integers(*a, bits=4, per="group"), _compressed("int-quantized", _INT4), 4.5,
                   _SCALES),
    "fp8": Format(fp8, {"quant_method": "fp8", "activation_scheme": "static"}, 8.5, _BYTES),
    "fp8 blocks": Format(lambda *a: fp8(*a, per="block", name="weight_scale_inv"),
                         {"quant_method": "fp8", "weight_block_size": [128, 128]}, 8.5, _BYTES),
    "fbgemm": Format(lambda *a: fp8(*a, per="channel"), {"quant_method": "fbgemm_fp8"}, 8.5, _BYTES),
    "fp8 compressed": Format(lambda *a: fp8(*a, per="channel"),
                             _compressed("float-quantized", _FP8 | {"strategy": "channel"}), 8.5, _BYTES),
    "fp8 compressed blocks": Format(
        lambda *a: fp8(*a, per="block"),
        _compressed("float-quantized", _FP8 | {"strategy": "block", "block_structure": [128, 128]}), 8.5, _BYTES),
    "modelopt fp8": Format(fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}, 8.5, _BYTES),
    "modelopt nvfp4": Format(lambda *a: fp4(*a, kind="modelopt"), {"quant_method": "modelopt", "quant_algo": "NVFP4"},
                             5, _SCALES),
    "nvfp4": Format(lambda *a: fp4(*a, kind="nvfp4"), _compressed("nvfp4-pack-quantized", {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}), 5, _SCALES),
    "mxfp4": Format(lambda *a: fp4(*a, kind="mxfp4"), _compressed("mxfp4-pack-quantized", {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}), 4.25, _STEP),
    "nf4": Format(lambda *a: codebook(*a, nested=False), {"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5,
                  _BYTES),
    "nf4 nested": Format(lambda *a: codebook(*a, nested=True), {"quant_method": "bitsandbytes", "load_in_4bit": True},
                         4.5, _BYTES),
    "squeezellm": Format(squeezellm, {"quant_method": "squeezellm", "wbits": 4}, 8.5, _BYTES),
    "squeezellm 3 sparse": Format(lambda *a: squeezellm(*a, bits=3, sparse=True),
                                  {"quant_method": "squeezellm", "wbits": 3}, 8.5, _BYTES),
    "bnb int8": Format(bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, 8.5, _SCALES),
}  # fmt: skip


def tensors_of(format: Format, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A small Llama's tensors as the format has them, and as floats."""
    rng = np.random.default_rng(seed)
    plain = {
        "model.embed_tokens.weight": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32),
        "lm_head.weight": (rng.standard_normal((VOCAB, HIDDEN)) * 0.1).astype(np.float32),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    stored = dict(plain)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            stored[f"{prefix}{norm}.weight"] = plain[f"{prefix}{norm}.weight"] = np.ones(HIDDEN, np.float32)
        indices: dict[int, np.ndarray] = {}  # matrices of one input are quantized in one order
        for name, shape in SHAPES.items():
            tensors, values = format.write(rng, *shape)
            if "g_idx" in tensors and not name.endswith("down_proj"):
                first = indices.setdefault(name.startswith("mlp") + 2 * name.endswith("o_proj"), tensors["g_idx"])
                if first is not tensors["g_idx"]:
                    # Columns move to where the first matrix has their group.
                    to, own = np.argsort(first, kind="stable"), np.argsort(tensors["g_idx"], kind="stable")
                    moved = np.empty_like(values)
                    moved[:, to] = values[:, own]
                    values = moved
                    tensors = _moved(tensors, own, to, first)
            stored |= {f"{prefix}{name}.{part}": tensor for part, tensor in tensors.items()}
            plain[f"{prefix}{name}.weight"] = values
    return stored, plain


def _moved(tensors: dict[str, np.ndarray], own: np.ndarray, to: np.ndarray, g_idx: np.ndarray) -> dict[str, np.ndarray]:
    """GPTQ's matrix of four bits with its columns `own` in the places `to`."""
    bits = 32 * tensors["qweight"].shape[0] // len(g_idx)
    stream = np.unpackbits(np.ascontiguousarray(tensors["qweight"].T).view(np.uint8), axis=1, bitorder="little")
    fields = stream.reshape(len(stream), -1, bits)
    moved = np.empty_like(fields)
    moved[:, to] = fields[:, own]
    packed = np.packbits(moved.reshape(len(moved), -1), axis=1, bitorder="little").view(np.int32)
    return tensors | {"qweight": np.ascontiguousarray(packed.T), "g_idx": g_idx}


def write(folder: Path, tensors: dict[str, np.ndarray], settings: dict[str, Any] | None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    quantized = {} if settings is None else {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(CONFIG | quantized | config))
    save_file({name: _torch(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _torch(x: np.ndarray) -> torch.Tensor:
    x = np.array(x, order="C")
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    if x.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(x.view(np.uint8).reshape(x.shape)).view(torch.float8_e4m3fn)
    return torch.from_numpy(x)
