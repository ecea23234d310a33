"""Products with matrices of codes, against the values that the matrices stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.loading.checkpoint import resolve
from octavo.loading.file_weights import open_weights
from octavo.ops.triton import linear_int, pack
from octavo.ops.triton.packed_weights import IntWeight, ScaledWeight
from octavo.quantization import StoredWeight, dequantize, packed_bytes
from octavo.quantization.codes import Codes
from octavo.quantization.gguf_blocks import IQ4_NUMBERS
from octavo.quantization.layout import DOUBLED_E2M1
from tests.ops.tensors import stored, torch_ref
from tests.ops.triton.conftest import DEVICE, products
from tests.ops.triton.test_linear import TOLERANCE, assert_near, draw
from tests.quantization.blocks import BLOCKS, random_matrix
from tests.quantization.checkpoints import FORMATS, tensors_of, write

pytestmark = pytest.mark.long


def random_codes(bits: int, group: int, minima: bool, n: int, k: int, seed: int = 0) -> Codes:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (n, k), generator=generator).to(torch.uint8)
    scales = (torch.randn(n, -(-k // group), generator=generator) / (1 << bits)).half().float()
    added = torch.randn(n, -(-k // group), generator=generator).half().float() if minima else None
    return Codes(bits, group, codes.to(DEVICE), scales.to(DEVICE), None if added is None else added.to(DEVICE))


@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (4, 16), (8, 16), (8, 32), (8, 128)])
def test_every_layout_is_multiplied(bits: int, group: int, minima: bool) -> None:
    codes, x, bias = random_codes(bits, group, minima, 72, 600), draw(3, 600), draw(72)
    weight = pack.pack_codes([codes], bias)
    assert (weight.bits, weight.group, weight.minima) == (bits, group, minima)
    expected = x.double() @ codes.dequantize().to(DEVICE).double().T + bias
    assert_near(products.linear(x, weight), expected, 1e-5)


@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("table", [DOUBLED_E2M1, IQ4_NUMBERS, (-128, *range(1, 15), 127)])
def test_indices_into_a_table_stay_four_bits(group: int, dtype: torch.dtype, table: tuple[int, ...]) -> None:
    """Every code, each with the bits that its number has as a code of eight bits."""
    four = replace(random_codes(4, group, False, 72, 300), table=table)
    four.codes[:, :16] = torch.arange(16)
    eight = replace(four, bits=8, codes=(torch.tensor(table)[four.codes.long()] + 128).byte(), table=None)
    weight, x, ids = pack.pack_codes([four]), draw(3, 300, dtype=dtype), torch.arange(72, dtype=torch.int32)
    assert weight.bits == 4
    assert weight.table is not None
    assert torch.equal(products.embedding(ids, weight), torch.as_tensor(four.dequantize()))
    assert torch.equal(products.linear(x, weight), products.linear(x, pack.pack_codes([eight])))


def test_assembly_computes_what_the_interpreter_does() -> None:
    """By the definitions of PTX's instructions: every four codes, and every byte."""
    table = torch.randperm(256, generator=torch.Generator().manual_seed(0))[:16].numpy()
    words = np.arange(1 << 16) | 0xABCD << 16
    fours = [sum(int(entry) << 8 * i for i, entry in enumerate(table[j : j + 4])) for j in range(0, 16, 4)]
    entries = sum(table[words >> 4 * i & 15] << 8 * i for i in range(4))
    assert (run_assembly(linear_int._LOOK_UP.value, words, *fours) == entries).all()
    for plane in range(4):
        selector = linear_int._SELECTOR.value + (plane << 4)
        found = run_assembly(linear_int._PLACE.value, words, linear_int._2_TO_15.value, selector)
        assert (found.astype(np.uint32).view(np.float32) == 2**15 + (words >> 8 * plane & 255)).all()


def run_assembly(text: str, *given: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return $0 after the instructions of `text`, with `given` in $1, $2, ..."""
    values = {f"${1 + i}": np.int64(0) + value for i, value in enumerate(given)}
    for line in text.replace("{", "").replace("}", "").split(";"):
        operation, *operands = line.replace(",", " ").split() or [".reg"]
        if operation == ".reg":
            continue
        a, b, *selectors = [values[name] if name in values else np.int64(int(name, 0)) for name in operands[1:]]
        match operation:
            case "and.b32":
                found = a & b
            case "or.b32":
                found = a | b
            case "shr.u32":
                found = a >> b
            case "prmt.b32":
                # Byte i of the result is one of the eight of a and b: the number is nibble i of the selector.
                both = (a & 0xFFFFFFFF, b & 0xFFFFFFFF)
                numbers = [selectors[0] >> 4 * i & 15 for i in range(4)]
                assert all((number < 8).all() for number in numbers), "from 8 on signs are repeated"
                bytes_ = [np.where(number < 4, *both) >> 8 * (number % 4) & 255 for number in numbers]
                found = sum(byte << 8 * i for i, byte in enumerate(bytes_))
            case _:
                pytest.fail(f"{operation} has no definition here")
        values[operands[0]] = found
    return values["$0"]


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ2_S", "Q4_0"])
def test_a_matrix_takes_the_planned_bytes(name: str) -> None:
    weight = pack.pack_linear([random_matrix(name, 64, 1024)])
    assert isinstance(weight, IntWeight)
    assert weight.num_bytes == packed_bytes(name, (64, 1024)) + (0 if weight.table is None else 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 20, 40])
def test_epilogues(dtype: torch.dtype, rows: int) -> None:
    x, bias = draw(rows, 320, dtype=dtype), draw(80)
    parts = [random_codes(4, 32, True, 40, 320, seed) for seed in (1, 2)]
    matrix = torch.cat([part.dequantize() for part in parts]).to(DEVICE)
    reference = torch_ref.DenseWeight(matrix, bias, gated=True)
    for activation in ("silu", "gelu_tanh"):
        gated = products.linear_silu_and_mul(x, pack.pack_codes(parts, bias, gated=True), activation=activation)
        expected = torch_ref.linear_silu_and_mul(x.float(), reference, activation=activation)
        assert_near(gated, expected, 4 * TOLERANCE[dtype])
    weight, residual = pack.pack_codes(parts, bias), draw(rows, 80, dtype=dtype)
    activated = products.linear_activated(x, weight, "gelu")
    assert_near(activated, torch_ref.linear_activated(x.float(), reference, "gelu"), 4 * TOLERANCE[dtype])
    expected = residual.float() + 0.5 * torch_ref.linear(x.float(), reference)
    products.linear_add(x, weight, residual, 0.5)
    assert_near(residual, expected, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("name", BLOCKS)
def test_gguf_matrices(name: str) -> None:
    matrix, x = random_matrix(name, 40, 512), draw(2, 512)
    weight = products.pack_linear([matrix])
    expected = x.double() @ torch.from_numpy(dequantize(matrix)).to(DEVICE).double().T
    # Scales that are products of two numbers are rounded to float16.
    are_products = name.endswith("_K") or (name.startswith("IQ") and name != "IQ4_NL")
    tolerance = 1e-2 if name == "Q2_K" else 1e-3 if are_products else 1e-5
    assert_near(products.linear(x, weight), expected, tolerance)


@pytest.mark.parametrize("names", [("Q4_0", "Q4_1"), ("Q4_K", "Q6_K"), ("Q8_0", "Q5_1"), ("Q4_0", "BF16")])
def test_parts_of_different_formats_become_one(names: tuple[str, str]) -> None:
    parts = [draw(24, 256) if name == "BF16" else random_matrix(name, 24, 256) for name in names]
    values = [
        part if isinstance(part, torch.Tensor) else torch.from_numpy(dequantize(part)).to(DEVICE) for part in parts
    ]
    x = draw(2, 256)
    expected = x.double() @ torch.cat(values).double().T
    assert_near(products.linear(x, products.pack_linear(parts)), expected, 1e-3)


def test_scales_far_from_float16_keep_their_precision() -> None:
    for power in (-40, 30):
        codes = random_codes(4, 32, True, 8, 64)
        assert codes.minima is not None
        far = Codes(4, 32, codes.codes, codes.scales * 2.0**power, codes.minima * 2.0**power)
        x = draw(1, 64)
        found = products.linear(x, pack.pack_codes([far])).double() / 2.0**power
        assert_near(found, x.double() @ codes.dequantize().to(DEVICE).double().T, 1e-5)


def test_a_row_is_the_same_in_one_program_or_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks by different programs, and by one that computes all of them."""
    weight = pack.pack_codes([random_codes(4, 32, True, 40, 2100)])
    assert linear_int.num_chunks(40, 9) == (3, 4)
    x = draw(5, 2100, dtype=torch.bfloat16)
    split = products.linear(x, weight, torch.float32)
    assert torch.equal(products.linear(x, weight, torch.float32), split), "the tickets were not given back"
    assert torch.equal(products.linear(x[2:3], weight, torch.float32)[0], split[2])
    monkeypatch.setattr(linear_int, "_MAX_SPLIT_ROWS", 0)
    assert torch.equal(products.linear(x, weight, torch.float32), split)
    expected = x[2].double() @ random_codes(4, 32, True, 40, 2100).dequantize().to(DEVICE).double().T
    assert_near(split[2], expected, 2**-7)


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (4096, 14336), (64, 64), (128256, 4096)])
def test_chunks_cover_k(n: int, k: int) -> None:
    blocks = -(-k // 256)
    chunks, size = linear_int.num_chunks(n, blocks)
    assert (chunks - 1) * size < blocks <= chunks * size


@pytest.mark.parametrize("names", [("Q4_K", "Q6_K"), ("Q4_0", "AWQ"), ("GPTQ", "Q8_0"), ("INT8", "INT8")])
def test_parts_are_unpacked_on_the_device_that_multiplies_them(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    """A device without memory, on which nothing can be mixed with what is on the host."""
    meta = torch.device("meta")
    monkeypatch.setattr(pack.launch, "device", lambda: meta)
    monkeypatch.setattr(pack, "_factor", lambda pieces: float(bool(list(pieces))))
    monkeypatch.setattr(pack, "unpack", lambda part: on_one_device(part, meta))
    parts = [stored_groups(name, 32, 256) if name in ("AWQ", "GPTQ") else stored_part(name) for name in names]
    weight = pack.pack_linear(parts)
    assert {tensor.device for tensor in (weight.codes, weight.scales)} == {meta}


def stored_part(name: str) -> StoredWeight:
    return stored(draw(32, 256).cpu(), name) if name == "INT8" else random_matrix(name, 32, 256)


def stored_groups(name: str, n: int, k: int, group: int = 128) -> StoredWeight:
    """Random words of four-bit codes."""
    rng = np.random.default_rng(n * k)
    words = {"GPTQ": (k // 8, n), "AWQ": (k, n // 8)}[name]
    tensors = {
        "qweight": rng.integers(-(2**31), 2**31, words).astype(np.int32),
        "qzeros": rng.integers(-(2**31), 2**31, (k // group, n // 8)).astype(np.int32),
        "scales": rng.standard_normal((k // group, n)).astype(np.float16) / np.float16(16),
    }
    return StoredWeight(name, tensors, (n, k))


def on_one_device(part: StoredWeight, device: torch.device) -> Codes:
    assert {tensor.device for tensor in part.tensors.values()} == {device}
    n, k = part.shape
    group = {"Q6_K": 16, "AWQ": 128, "GPTQ": 128}.get(part.format, 32)
    bits = 8 if part.format in ("Q6_K", "Q8_0") else 4
    has_minima = part.format not in ("Q6_K", "Q8_0", "Q4_0")
    scales = torch.empty(n, k // group, device=device)
    codes = torch.empty(n, k, dtype=torch.uint8, device=device)
    return Codes(bits, group, codes, scales, scales if has_minima else None)


@pytest.mark.parametrize("name", ["GPTQ", "AWQ"])
def test_matrices_of_words_are_multiplied(name: str) -> None:
    matrix, x = stored_groups(name, 40, 256), draw(2, 256)
    mixed = products.pack_linear([matrix, random_matrix("Q4_0", 24, 256)])
    values = np.concatenate([dequantize(matrix), dequantize(random_matrix("Q4_0", 24, 256))])
    expected = x.double() @ torch.from_numpy(values).to(DEVICE).double().T
    assert_near(products.linear(x, mixed), expected, 2e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_checkpoints_of_other_tools(name: str, tmp_path: Path) -> None:
    """Unpacked on the device by the functions that unpack on a CPU. Rows are read in the order of the groups."""
    form = FORMATS[name]
    tensors, plain = tensors_of(form)
    weights = open_weights(resolve(str(write(tmp_path, tensors, form.settings))), "bfloat16", 0, None, False)
    full = "model.layers.0.mlp.down_proj.weight"
    x, expected = draw(3, plain[full].shape[1]), torch.from_numpy(plain[full]).to(DEVICE)
    weight = products.pack_linear([weights.take_matrix(full, plain[full].shape)])
    assert (getattr(weight, "order", None) is not None) == name.endswith(("desc_act", "actorder"))
    # Matrices with one scale for a row multiply activations of eight bits, floats of four significant ones.
    is_scaled = isinstance(weight, ScaledWeight)
    assert_near(products.linear(x, weight), x.double() @ expected.double().T, 0.1 if is_scaled else 0.01)
