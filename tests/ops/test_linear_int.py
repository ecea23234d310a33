"""Quantized rows and their products with integer matrices, against matrices packed by plain indexing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo import _cpu
from octavo.ops import ACTIVATIONS, cpu_pack
from octavo.ops import cpu as native
from octavo.ops.cpu_pack import PackedStack, pack_quantized
from octavo.quantization import layout_of, unpack
from octavo.quantization.unpacking import as_stored
from tests.ops.int_matrices import FORMATS, Format, IntMatrix, pack, random_matrix, reference
from tests.ops.kernel_cases import DTYPES, assert_near, assert_same_bits, generated, generated_few, random
from tests.ops.tensors import cpu, torch_ref
from tests.quantization.blocks import KEPT_BITS, values_of
from tests.quantization.blocks import random_matrix as random_blocks

# Formats whose superblocks are kept, and where in them the float16 units lie.
SUPERBLOCKS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}
# Other formats whose codes are indices into a table, and their bits of a weight.
TABLES = {"IQ4_NL": 4.5, "MXFP4": 4.25, "NVFP4": 5, "IQ3_XXS": 4.5, "IQ2_S": 5}

sizes = st.one_of(st.integers(1, 140), st.sampled_from([192, 200, 577]))
# Every row-tile height and its neighbours, and enough rows for several chunks of rows.
row_counts = st.one_of(st.integers(1, 14), st.sampled_from([64, 100, 300]))
formats = st.sampled_from(FORMATS)
GROUP = 32  # elements with one scale


def quantized_blocks(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Native quantized rows [T, blocks * 128] -> int8 [T, blocks, 2, 32], scales, sums as bf16, start values, and what
    is kept apart, at its place among zeros."""
    blocks = x.unflatten(1, (-1, _cpu.QBLOCK_BYTES))
    fields = blocks.split([64, 8, 16, 4, 32, 4], dim=-1)
    types = (torch.int8, torch.float32, torch.float32, torch.bfloat16, torch.int32, torch.uint8)
    q, scale, outlier, sums, starts, at = (f.contiguous().view(t) for f, t in zip(fields, types, strict=True))
    apart = torch.zeros(*q.shape, dtype=torch.float64).scatter_add(-1, at.long(), outlier.double())
    return q.unflatten(-1, (2, GROUP)), scale, sums, starts, apart.unflatten(-1, (2, GROUP))


def dequantized(x: Tensor, k: int) -> Tensor:
    q, scale, _, _, apart = quantized_blocks(x)
    return (q.double() * scale.double()[..., None] + apart).flatten(1)[:, :k]


def consumer(k: int) -> cpu.PackedWeight:
    return pack(random_matrix(0, 1, k, (8, 32, False)))


def awkward_rows(seed: int, rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """Random rows of many magnitudes with some blocks of zeros and of next to nothing."""
    x = random(seed, rows, k) * 10.0 ** torch.randint(-20, 20, (rows, 1), generator=torch.Generator().manual_seed(seed))
    x[::3, : k // 2] = 0
    x[1::3, k // 2 :] *= 1e-38
    return x.to(dtype)


def with_outliers(seed: int, rows: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random rows of which many groups have one or two elements that stand out, and some have more."""
    spikes = torch.rand(rows, k, generator=torch.Generator().manual_seed(seed)) < 1.5 / GROUP
    x = random(seed, rows, k)
    return torch.where(spikes, 30 * x, x).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@generated
@given(rows=st.integers(1, 40), k=sizes)
def test_quantize_is_the_reference_to_the_bit(isa: str, dtype: torch.dtype, rows: int, k: int) -> None:
    x = awkward_rows(k, rows, k, dtype)
    quantized = cpu.quantize(x, consumer(k))
    assert torch.equal(dequantized(quantized, k), torch_ref.fake_quantize(x))
    q, scale, sums, starts, _ = quantized_blocks(quantized)
    assert not q.flatten(1)[:, k:].any()
    by16 = q.int().flatten(-2).unflatten(-1, (4, 16)).sum(-1)
    by32 = by16.unflatten(-1, (2, 2)).sum(-1)
    assert torch.equal(starts, torch.cat([-8 * by32, -128 * by32, -128 * by16], dim=-1).int())
    assert torch.equal(sums, (scale * by32.float()).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_own_block_and_row_alone(isa: str, dtype: torch.dtype, poison: float) -> None:
    x = random(0, 5, 200, dtype=dtype)
    clean = dequantized(cpu.quantize(x, consumer(200)), 200)
    x[2, 70] = poison
    spoilt = dequantized(cpu.quantize(x, consumer(200)), 200)
    assert spoilt[2, 64:96].isnan().all()
    assert spoilt[2, 96:].isfinite().all()
    assert torch.equal(spoilt[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    for form in FORMATS:
        out = cpu.linear(x, pack(random_matrix(1, 40, 200, form)))
        assert out[2].isnan().all()
        assert out[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@generated_few
@given(rows=st.integers(1, 30), k=sizes)
def test_rms_norm_quantizes_what_it_has_not_rounded(isa: str, dtype: torch.dtype, rows: int, k: int) -> None:
    x, weight = random(rows, rows, k, dtype=dtype), random(7, k)
    actual = dequantized(cpu.rms_norm(x, weight, 1e-5, consumer(k)), k)
    # Where the reference's sums differ in the last bit an element may fall to the other side of a half.
    exact = torch_ref.rms_norm(x.float(), weight, 1e-5)
    _, scale, _, _, apart = quantized_blocks(cpu.rms_norm(x, weight, 1e-5, consumer(k)))
    rounding = scale.flatten(1).repeat_interleave(GROUP, 1)[:, :k] * 0.5001
    assert ((actual - exact).abs() <= rounding + 1e-5 * exact.abs()).all()
    groups = torch.nn.functional.pad(exact, (0, -k % 64)).unflatten(1, (-1, GROUP))
    largest = groups.masked_fill(apart.flatten(1, 2) != 0, 0.0).abs().amax(-1)
    assert_near(scale.flatten(1) * 127, largest)


@pytest.mark.parametrize("dtype", DTYPES)
@generated_few
@given(rows=st.integers(1, 30), k=sizes)
def test_other_row_wise_operations_quantize_what_they_have_not_rounded(
    isa: str, dtype: torch.dtype, rows: int, k: int
) -> None:
    x, weight, bias = random(rows, rows, k, dtype=dtype), random(7, k), random(8, k)
    exact = cpu.layer_norm(x.float(), weight, bias, 1e-5)
    assert torch.equal(cpu.layer_norm(x, weight, bias, 1e-5, consumer(k)), cpu.quantize(exact, consumer(k)))
    for kind in ACTIVATIONS:
        exact = cpu.activation(x.float(), kind)
        assert torch.equal(cpu.activation(x, kind, consumer(k)), cpu.quantize(exact, consumer(k)))


def test_scales_that_are_not_finite_spoil_what_they_multiply(isa: str) -> None:
    """The packer writes the half 0x7e00 for weights that are not finite: products and rows have no number there."""
    for form in FORMATS:
        matrix = random_matrix(0, 40, 128, form)
        matrix.scales[3, 0] = float("nan")
        matrix.codes[3, 0] = 5
        weight = pack(matrix)
        row = cpu.embedding(torch.tensor([2, 3], dtype=torch.int32), weight)
        assert row[1, : form[1]].isnan().all() and row[1, form[1] :].isfinite().all() and row[0].isfinite().all()
        out = cpu.linear(random(1, 2, 128), weight)
        assert out[:, 3].isnan().all() and out[:, :3].isfinite().all() and out[:, 4:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@generated
@given(form=formats, rows=row_counts, k=sizes, n=sizes, bias=st.booleans(), out=st.sampled_from(DTYPES))
def test_integer_linear_is_the_reference_product(
    isa: str, dtype: torch.dtype, form: Format, rows: int, k: int, n: int, bias: bool, out: torch.dtype
) -> None:
    x, matrix, b = with_outliers(rows, rows, k, dtype), random_matrix(k, n, k, form, 0.25), random(n, n)
    b = b if bias else None
    assert_near(cpu.linear(x, pack(matrix, b), out), torch_ref.linear(x, reference(matrix, b), out))
    quantized = cpu.quantize(x, pack(matrix))
    assert_same_bits(cpu.linear(quantized, pack(matrix, b), out), cpu.linear(x, pack(matrix, b), out))


def test_outliers_are_multiplied_as_they_are(isa: str) -> None:
    """One or two elements among zeros have no rounding at all, and three that are equal are no outliers."""
    for form in FORMATS:
        matrix = random_matrix(0, 40, 128, form)
        x = torch.zeros(3, 128)
        x[0, 3], x[0, 40], x[0, 41] = 1 / 3, -1e6, 3.0
        x[1, 70], x[1, 90] = 0.7, -0.7
        x[2, 64:67] = 0.7
        _, _, _, _, apart = quantized_blocks(cpu.quantize(x, pack(matrix)))
        assert torch.equal(apart.flatten(1)[:2], x[:2].double()) and not apart[2].any()
        assert_near(cpu.linear(x, pack(matrix)), torch_ref.linear(x, reference(matrix)))


@pytest.mark.parametrize("rows", [1, 16, 40])
def test_every_group_may_have_outliers(isa: str, rows: int) -> None:
    k = 128 * GROUP + 5
    x, matrix = torch.zeros(rows, k), random_matrix(0, 40, k, (4, 32, True))
    x[:, ::GROUP] = random(0, rows, len(range(0, k, GROUP)))
    out = cpu.linear(x, pack(matrix))
    assert_near(out, torch_ref.linear(x, reference(matrix)))
    assert_same_bits(out[:1], cpu.linear(x[:1], pack(matrix)))


def test_integer_sums_are_exact_at_their_extremes(isa: str) -> None:
    """All codes and elements at their largest: nothing saturates."""
    for form in FORMATS:
        for code in (-1, 1):
            matrix = random_matrix(0, 33, 256, form)
            matrix.codes.fill_({4: 7, 8: 127}[form[0]] if code > 0 else {4: -8, 8: -128}[form[0]])
            matrix.scales.fill_(1)
            if matrix.minima is not None:
                matrix.minima.zero_()
            for sign in (-1.0, 1.0):
                x = torch.full((35, 256), 127 * sign)  # of which two tiles are sixteen, where there are tiles
                assert torch.equal(cpu.linear(x, pack(matrix)), torch_ref.linear(x, reference(matrix)))
                assert torch.equal(cpu.linear(x[:3], pack(matrix)), torch_ref.linear(x[:3], reference(matrix)))


@generated
@given(form=formats, rows=row_counts, k=sizes, n=sizes, scale=st.sampled_from([1.0, 0.22]))
def test_integer_linear_add_is_the_reference(isa: str, form: Format, rows: int, k: int, n: int, scale: float) -> None:
    x, matrix = random(rows, rows, k), random_matrix(k, n, k, form)
    for dtype in DTYPES:
        residual = random(5, rows, n, dtype=dtype)
        expected = residual.clone()
        cpu.linear_add(x, pack(matrix), residual, scale)
        torch_ref.linear_add(x, reference(matrix), expected, scale)
        assert_near(residual, expected)


@generated
@given(
    form=formats, rows=row_counts, k=sizes, width=sizes, bias=st.booleans(),
    activation=st.sampled_from(["silu", *ACTIVATIONS]),
)  # fmt: skip
def test_activations_of_integer_products_are_the_reference(
    isa: str, form: Format, rows: int, k: int, width: int, bias: bool, activation: str
) -> None:
    x, gate, up = random(rows, rows, k), *(random_matrix(k + i, width, k, form) for i in range(2))
    b = random(width, 2 * width) if bias else None
    gate_up = pack(gate, b, up)
    expected = torch_ref.linear_silu_and_mul(x, reference(gate, b, up), activation=activation)
    actual = cpu.linear_silu_and_mul(x, gate_up, activation=activation)
    assert_near(actual, expected)
    rounded = cpu.linear_silu_and_mul(x, gate_up, out_dtype=torch.bfloat16, activation=activation)
    assert_near(rounded, expected.bfloat16())
    # Quantized rows are those of the float32 outputs, bit for bit.
    down = consumer(width)
    quantized = cpu.linear_silu_and_mul(x, gate_up, down, activation=activation)
    assert torch.equal(quantized, cpu.quantize(actual, down))
    plain, b = pack(gate, None if b is None else b[:width]), None if b is None else b[:width]
    actual = cpu.linear_activated(x, plain, activation)
    assert_near(actual, torch_ref.linear_activated(x, reference(gate, b), activation))
    assert torch.equal(cpu.linear_activated(x, plain, activation, down), cpu.quantize(actual, down))


@pytest.mark.parametrize("dtype", DTYPES)
def test_float_products_write_quantized_rows_for_an_integer_consumer(isa: str, dtype: torch.dtype) -> None:
    for rows, width in [(1, 100), (5, 64), (30, 200)]:
        x = random(0, rows, 70, dtype=dtype)
        gate_up = cpu.pack_linear([random(i, width, 70, dtype=dtype) for i in (1, 2)], gated=True)
        outputs = cpu.linear_silu_and_mul(x, gate_up, out_dtype=torch.float32)
        quantized = cpu.linear_silu_and_mul(x, gate_up, consumer(width))
        assert torch.equal(quantized, cpu.quantize(outputs, consumer(width)))
        up = cpu.pack_linear([random(1, width, 70, dtype=dtype)])
        outputs = cpu.linear_activated(x, up, "gelu", out_dtype=torch.float32)
        quantized = cpu.linear_activated(x, up, "gelu", consumer(width))
        assert torch.equal(quantized, cpu.quantize(outputs, consumer(width)))


@pytest.mark.parametrize("form", FORMATS)
def test_a_row_of_integer_products_has_the_same_bits_in_every_batch(isa: str, threads: None, form: Format) -> None:
    k, n, total = 330, 200, 100
    x, residual = random(0, total, k), random(1, total, n)
    plain = pack(random_matrix(2, n, k, form), random(3, n))
    gate_up = pack(random_matrix(4, n, k, form), None, random_matrix(5, n, k, form))

    def all_outputs(begin: int, end: int) -> list[Tensor]:
        added = residual[begin:end].clone()
        quantized = cpu.rms_norm(x[begin:end], torch.ones(k), 1e-5, plain)
        cpu.linear_add(x[begin:end], plain, added, 0.5)
        outputs = [quantized, cpu.linear_silu_and_mul(quantized, gate_up, consumer(n))]
        outputs.append(cpu.linear_activated(quantized, plain, "gelu", consumer(n)))
        return [*outputs, *(f.view(torch.uint8) for f in (added, cpu.linear(quantized, plain)))]

    _cpu.set_threads(1)
    alone = [torch.cat(rows) for rows in zip(*(all_outputs(i, i + 1) for i in range(total)), strict=True)]
    for num_threads in (1, 2, 3):
        _cpu.set_threads(num_threads)
        for begin, end in [(0, 2), (1, 4), (0, 4), (3, 8), (0, 6), (5, 12), (0, 9), (7, 20), (0, total)]:
            for actual, expected in zip(all_outputs(begin, end), alone, strict=True):
                assert torch.equal(actual, expected[begin:end])


# Sets whose vectors are alike: the second has its own instructions for integer sums alone, which are exact.
ALIKE = [("avx2", "avx2_vnni"), ("avx2", "avx2_vnni_emulated"), ("avx512", "avx512_vnni"), ("avx512_bf16", "amx"),
         ("avx512_bf16", "amx_emulated"), ("neon", "neon_dotprod")]  # fmt: skip


@pytest.mark.parametrize(("plain", "other"), [p for p in ALIKE if {*p} <= {*_cpu.available_isas()}])
def test_integer_products_have_the_same_bits_by_any_instruction(any_isa: None, plain: str, other: str) -> None:
    for form in FORMATS:
        shapes = [(1, 64, 32), (4, 577, 40), (8, 200, 70), (15, 100, 64), (16, 1100, 97), (31, 577, 70), (90, 330, 50)]
        for rows, k, n in shapes:
            x, weight = with_outliers(rows, rows, k), pack(random_matrix(k, n, k, form), random(n, n))
            results = []
            for isa in (plain, other):
                _cpu.set_isa(isa)
                results.append(cpu.linear(x, weight))
            assert_same_bits(*results)


@pytest.mark.parametrize("name", [*(name for name in SUPERBLOCKS if name != "Q2_K"), *TABLES])
def test_superblocks_and_tables_give_the_bits_of_what_they_stand_for_written_out(
    isa: str, threads: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout that keeps a file's superblocks, or indices into a table, against one of float16 scales, bfloat16 minima
    and no table: every height of tile, widths that are unpacked in several parts, outliers, gates, epilogues and single
    rows. (No other layout holds Q2_K.)"""
    for n, k in [(40, 256), (70, 4608)]:
        kept, flat = _kept_and_flat(name, [n], k, monkeypatch)
        gates, flat_gates = _kept_and_flat(name, [n, n], k, monkeypatch)
        for rows in (1, 2, 3, 6, 7, 8, 9, 16, 17, 23, 64, 100):
            x = with_outliers(rows, rows, k)
            assert_same_bits(cpu.linear(x, kept), cpu.linear(x, flat))
            if rows in (1, 7, 16, 64):
                for down in (None, consumer(n)):
                    both = [cpu.linear_silu_and_mul(x, weight, down) for weight in (gates, flat_gates)]
                    assert torch.equal(*both)
        ids = torch.arange(n, dtype=torch.int32)
        assert_same_bits(cpu.embedding(ids, kept), cpu.embedding(ids, flat))
        x = with_outliers(0, 100, k)
        alone = torch.cat([cpu.linear(x[i : i + 1], kept) for i in range(100)])
        for num_threads in (1, 3):
            _cpu.set_threads(num_threads)
            assert_same_bits(cpu.linear(x, kept), alone)


def test_minima_by_16_are_multiplied_as_they_are(isa: str, threads: None) -> None:
    """Q2_K against the gguf package's values: every height of tile, widths unpacked in several parts, outliers,
    gates, epilogues and single rows, each of which has the same bits in every batch."""
    for n, k in [(40, 256), (70, 4608)]:
        blocks = [random_blocks("Q2_K", n, k, seed=i) for i in range(2)]
        values = [torch.from_numpy(values_of(part).copy()) for part in blocks]
        kept, gates = native.pack_linear(blocks[:1]), native.pack_linear(blocks, None, True)
        assert kept.num_bytes * 8 / (-(-n // 32) * 32 * k) == 2.625
        x = with_outliers(n, 100, k)
        exact = [dequantized(cpu.quantize(x, kept), k) @ value.double().T for value in values]
        out = cpu.linear(x, kept)
        assert_near(out, exact[0].float())
        gated = cpu.linear_silu_and_mul(x, gates)
        assert_near(gated, (torch.nn.functional.silu(exact[0]) * exact[1]).float())
        quantized = cpu.linear_silu_and_mul(x, gates, consumer(n))
        assert torch.equal(quantized, cpu.quantize(gated, consumer(n)))
        ids = torch.arange(n, dtype=torch.int32)
        assert_near(cpu.embedding(ids, kept), values[0])
        for num_threads in (1, 3):
            _cpu.set_threads(num_threads)
            for begin, end in [(0, 1), (5, 6), (0, 2), (1, 4), (3, 10), (7, 23), (20, 84), (0, 100)]:
                assert_same_bits(cpu.linear(x[begin:end], kept), out[begin:end])
                assert_same_bits(cpu.linear_silu_and_mul(x[begin:end], gates), gated[begin:end])


def test_a_stack_of_formats_gives_the_bits_of_each_alone(isa: str, threads: None) -> None:
    """Parts keep their own layouts and bits in any batch; neighbours of one format are a matrix."""
    widths = [96, 32, 40]
    parts = [random_blocks(name, n, 512, seed=n) for name, n in zip(["Q4_K", "Q4_K", "Q6_K"], widths, strict=True)]
    bias = random(3, sum(widths))
    stack = native.pack_linear(parts, bias.numpy())
    assert isinstance(stack, PackedStack) and [part.out_features for part in stack.parts] == [128, 40]
    alone = [native.pack_linear([part], b.numpy()) for part, b in zip(parts, bias.split(widths), strict=True)]
    assert stack.num_bytes == sum(weight.num_bytes for weight in alone)
    assert stack.num_bytes == 128 * 512 * 4.5 / 8 + 64 * 512 * 6.5625 / 8 + (128 + 64) * 4
    residual = random(1, 100, sum(widths))
    for num_threads in (1, 3):
        _cpu.set_threads(num_threads)
        for rows in (1, 2, 7, 16, 100):
            x = with_outliers(5, 100, 512)[:rows]
            expected = torch.cat([cpu.linear(x, weight) for weight in alone], 1)
            assert_same_bits(cpu.linear(x, stack), expected)
            normed = cpu.rms_norm(x, torch.ones(512), 1e-5, stack)
            assert normed.dtype == torch.uint8
            assert_same_bits(cpu.linear(normed, stack), torch.cat([cpu.linear(normed, w) for w in alone], 1))
            added, pieces = residual[:rows].clone(), [p.contiguous() for p in residual[:rows].split(widths, 1)]
            cpu.linear_add(x, stack, added, 0.5)
            for piece, weight in zip(pieces, alone, strict=True):
                cpu.linear_add(x, weight, piece, 0.5)
            assert_same_bits(added, torch.cat(pieces, 1))


def test_what_has_no_whole_panels_or_is_gated_shares_a_layout(isa: str) -> None:
    narrow = [random_blocks("Q4_K", 17, 256), random_blocks("Q6_K", 32, 256)]
    gated = [random_blocks(name, 32, 256) for name in ("Q4_K", "Q6_K")]
    for weight in (native.pack_linear(narrow), native.pack_linear(gated, None, True)):
        assert weight.num_bytes == 64 * 256 * 9.5 / 8


@pytest.mark.parametrize("superblock_scale", [0x7FFF, 0xFFFF, 0x7C00, 0xFC01])
def test_superblocks_that_are_not_finite_spoil_their_own_output(isa: str, superblock_scale: int) -> None:
    for name, places in SUPERBLOCKS.items():
        for place in places:
            blocks = random_blocks(name, 40, 512)
            blocks.data[3, place : place + 2] = np.array([superblock_scale], np.uint16).view(np.uint8)
            weight = native.pack_linear([blocks])
            out = cpu.linear(random(0, 9, 512), weight)
            assert not out[:, 3].isfinite().any() and out[:, :3].isfinite().all() and out[:, 4:].isfinite().all()
            row = cpu.embedding(torch.tensor([3], dtype=torch.int32), weight)[0]
            assert not row[:256].isfinite().all() and row[256:].isfinite().all()


def _kept_and_flat(
    name: str, rows: list[int], k: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[cpu.PackedWeight, cpu.PackedWeight]:
    """Random blocks, packed as they are, and into the layout that products see: of Q4_K and Q6_K as `IntMatrix` with
    the rounding of float16 and bfloat16, of others as the packer does it for stacks of several formats. Tables become
    codes of eight bits."""
    parts = [random_blocks(name, n, k, seed=i) for i, n in enumerate(rows)]
    gated = len(parts) == 2
    kept = native.pack_linear(parts, None, gated)
    assert kept.num_bytes * 8 / (sum(-(-n // 32) * 32 for n in rows) * k) == (
        TABLES.get(name) or KEPT_BITS[kept.format]
    )
    if layout_of(name).table:
        codes = [unpack(part) for part in parts]
        flat = native.pack_linear([as_stored(one.widened(one.layout.without_table)) for one in codes], None, gated)
        assert flat.format == _cpu.WEIGHT_INT8
        return kept, flat
    if name not in ("Q4_K", "Q6_K"):
        with monkeypatch.context() as patch:
            patch.setattr(cpu_pack, "_KEPT", {})
            flat = native.pack_linear(parts, None, gated)
        assert flat.format == _cpu.WEIGHT_INT8
        return kept, flat
    factor = pack_quantized(parts, gated).factor
    matrices = []
    for part in parts:
        codes = unpack(part)
        scales = torch.from_numpy(codes.scales)
        minima, values = None, torch.from_numpy(codes.codes).long()
        if codes.minima is not None:
            minima = ((torch.from_numpy(codes.minima) + 8 * scales) / factor).bfloat16()
        zero = 1 << codes.bits >> 1
        matrices.append(IntMatrix(codes.bits, codes.group, values - zero, (scales / factor).half(), minima, factor))
    return kept, pack(matrices[0], None, matrices[1] if gated else None)


@generated
@given(form=formats, k=sizes, n=sizes, tokens=st.integers(1, 30))
def test_embedding_reads_rows_of_integer_matrices(isa: str, form: Format, k: int, n: int, tokens: int) -> None:
    matrix = random_matrix(k, n, k, form, 0.5)
    ids = torch.randint(0, n, (tokens,), generator=torch.Generator().manual_seed(n), dtype=torch.int32)
    for dtype in DTYPES:
        expected = torch_ref.embedding(ids, reference(matrix), torch.float32).to(dtype)
        assert_same_bits(cpu.embedding(ids, pack(matrix), dtype), expected)


def test_no_rows_are_no_work(isa: str) -> None:
    weight = pack(random_matrix(0, 40, 100, FORMATS[0]))
    assert cpu.linear(torch.empty(0, 100), weight).shape == (0, 40)
    assert cpu.quantize(torch.empty(0, 100), weight).shape == (0, 2 * _cpu.QBLOCK_BYTES)


def test_rows_quantized_for_another_width_are_refused() -> None:
    weight = pack(random_matrix(0, 40, 200, FORMATS[0]))
    with pytest.raises(ValueError, match="another matrix"):
        cpu.linear(cpu.quantize(random(0, 2, 100), consumer(100)), weight)
