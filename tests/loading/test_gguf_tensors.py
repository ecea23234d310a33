"""Tensors of GGUF files against the `gguf` package's dequantization, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.errors import LoadError
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.gguf_architectures import ARCHITECTURES
from octavo.loading.gguf_file import GGUFFile, read_gguf
from octavo.loading.gguf_tensors import NamedTensor, stored_tensor
from octavo.quantization import StoredWeight, dequantize, unpacking
from octavo.quantization.array_functions import FLOATS
from octavo.quantization.formats import PLAIN, TENSOR_TYPES
from tests.quantization.blocks import random_matrix, values_of

Write = Callable[..., Path]
_NUMBERS = {t.name: n for n, t in TENSOR_TYPES.items()}
_QUANTIZED = [name for name, n in _NUMBERS.items() if TENSOR_TYPES[n].block_size > 1]


def _dequantized(file: GGUFFile, tensor: NamedTensor, dtype: str = "float32") -> np.ndarray:
    return dequantize(stored_tensor(file, tensor), dtype).reshape(tensor.shape)


def _written(tmp_path: Path, write_gguf: Write, name: str, packed: np.ndarray) -> tuple[str, np.ndarray]:
    """A file whose tensor `t` has these bytes, and its values according to the gguf package."""
    kind = gguf.GGMLQuantizationType(_NUMBERS[name])
    path = write_gguf(tmp_path / "t.gguf", {"t": packed}, types={"t": kind})
    if kind.name in PLAIN:
        return str(path), gguf.dequantize(packed, kind)
    num_in = packed.shape[1] // TENSOR_TYPES[kind].block_bytes * TENSOR_TYPES[kind].block_size
    return str(path), values_of(StoredWeight(kind.name, {"data": packed}, (len(packed), num_in)))


def _random_blocks(name: str, rows: int, blocks_in_row: int) -> np.ndarray:
    """Rows of blocks of random bytes, but for the float16 scales, which stay finite."""
    if name == "MXFP4":  # whose scales are powers of two
        return np.random.default_rng(5).integers(0, 256, (rows, blocks_in_row * 17), dtype=np.uint8)
    return random_matrix(name, rows, blocks_in_row * TENSOR_TYPES[_NUMBERS[name]].block_size).data


@pytest.mark.parametrize("name", _QUANTIZED)
@pytest.mark.parametrize("chunk", [1 << 15, 1024])
def test_random_blocks_are_bit_equal_in_float32_and_rounded_once_in_other_types(
    name: str, chunk: int, tmp_path: Path, write_gguf: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "_CHUNK_ELEMENTS", chunk)
    path, expected = _written(tmp_path, write_gguf, name, _random_blocks(name, 5, 7))
    file = read_gguf(path)
    tensor = NamedTensor("t", file.tensors["t"])
    values = _dequantized(file, tensor)
    assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))
    for dtype in ("bfloat16", "float16"):
        assert np.array_equal(_dequantized(file, tensor, dtype), expected.astype(FLOATS[dtype]))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_what_the_gguf_package_quantizes_comes_back(name: str, tmp_path: Path, write_gguf: Write) -> None:
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    packed = gguf.quantize(values, gguf.GGMLQuantizationType(_NUMBERS[name]))
    path, expected = _written(tmp_path, write_gguf, name, packed)
    file = read_gguf(path)
    read = _dequantized(file, NamedTensor("t", file.tensors["t"]))
    assert np.array_equal(read, expected)
    assert np.abs(read - values).max() < 0.4  # four bits over a range of about six


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_unquantized_tensors_are_read(name: str, tmp_path: Path, write_gguf: Write) -> None:
    values = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    packed = gguf.quantize(values, gguf.GGMLQuantizationType(_NUMBERS[name]))
    path, expected = _written(tmp_path, write_gguf, name, packed)
    file = read_gguf(path)
    for dtype in ("float32", "bfloat16"):
        read = _dequantized(file, NamedTensor("t", file.tensors["t"]), dtype)
        assert np.array_equal(read, expected.astype(np.float32).astype(FLOATS[dtype]))


def test_rows_are_moved_and_taken_whatever_the_format(tmp_path: Path, write_gguf: Write) -> None:
    path, expected = _written(tmp_path, write_gguf, "Q8_0", _random_blocks("Q8_0", 16, 2))
    file = read_gguf(path)
    # Of each head of eight rows: first the even ones, then the odd ones.
    order = ARCHITECTURES["llama"].rows["attn_q"]({"num_attention_heads": 2}, 16)
    assert order == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    for rows in (order, slice(4, 8), 3):
        assert np.array_equal(_dequantized(file, NamedTensor("t", file.tensors["t"], rows)), expected[rows])


def test_weights_of_norms_are_taken_back(tmp_path: Path, write_gguf: Write) -> None:
    values = np.array([1.5, 0.25, 1.0, 2.0], np.float32)
    path = write_gguf(tmp_path / "t.gguf", {"t": values})
    file = read_gguf(str(path))
    assert np.array_equal(_dequantized(file, NamedTensor("t", file.tensors["t"], offset=1.0)), values - 1)


def test_the_default_model_is_bit_equal_to_the_gguf_package(default_checkpoint: Checkpoint) -> None:
    file = read_gguf(default_checkpoint.path)
    for name in ("blk.7.ffn_down.weight", "blk.7.attn_v.weight", "blk.0.attn_norm.weight"):
        info = file.tensors[name]
        packed = file.array(info).reshape(info.shape[0], -1)
        expected = gguf.dequantize(packed, gguf.GGMLQuantizationType[info.type.name]).reshape(info.shape)
        assert np.array_equal(_dequantized(file, NamedTensor("", info)), expected)


def test_rates_of_decay_become_logarithms_and_others_are_refused(tmp_path: Path, write_gguf: Write) -> None:
    values = -np.arange(1, 5, dtype=np.float32)
    file = read_gguf(str(write_gguf(tmp_path / "t.gguf", {"rates": values, "others": -values})))
    rates, others = (NamedTensor(name, file.tensors[name], is_rate=True) for name in ("rates", "others"))
    assert np.allclose(-np.exp(_dequantized(file, rates)), values, rtol=1e-6)
    with pytest.raises(LoadError, match="rates of decay of others are not all negative"):
        stored_tensor(file, others)
