"""Packed products and the embedding that reads the same packed matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DTYPES, assert_near, assert_same_bits, generated, random

from octavo import _cpu
from octavo.ops import cpu, torch_ref

sizes = st.one_of(st.integers(1, 70), st.sampled_from([96, 127, 128, 200, 577]))
# Every row-tile height and its neighbours, and enough rows for several chunks of rows.
row_counts = st.one_of(st.integers(1, 30), st.sampled_from([64, 100, 300]))


@pytest.mark.parametrize("dtype", DTYPES)
@generated
@given(rows=row_counts, k=sizes, n=sizes, bias=st.booleans(), out_dtype=st.sampled_from([None, *DTYPES]))
def test_linear_is_the_reference_product(
    isa: str, dtype: torch.dtype, rows: int, k: int, n: int, bias: bool, out_dtype: torch.dtype | None
) -> None:
    x, weight = random(rows, rows, k, dtype=dtype), random(k, n, k, dtype=dtype)
    b = random(n, n, dtype=dtype) if bias else None
    actual = cpu.linear(x, cpu.pack_linear(weight, b), out_dtype)
    assert_near(actual, torch_ref.linear(x, torch_ref.pack_linear(weight, b), out_dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_reads_strided_rows_and_no_element_beyond_them(isa: str, dtype: torch.dtype) -> None:
    wide = torch.full((9, 80), float("nan"), dtype=dtype)
    wide[:, 3:40] = random(0, 9, 37, dtype=dtype)
    weight = random(1, 50, 37, dtype=dtype)
    expected = torch_ref.linear(wide[:, 3:40], torch_ref.pack_linear(weight, None))
    assert_near(cpu.linear(wide[:, 3:40], cpu.pack_linear(weight, None)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_linear_takes_any_strides(isa: str, dtype: torch.dtype) -> None:
    weight = random(0, 70, 90, dtype=dtype)
    x = random(1, 4, 33, dtype=dtype)
    part = cpu.linear(x, cpu.pack_linear(weight[5:60, 7:40], None))
    assert_same_bits(part, cpu.linear(x, cpu.pack_linear(weight[5:60, 7:40].contiguous(), None)))
    transposed = weight.T.contiguous().T[5:60, 7:40]
    assert_same_bits(part, cpu.linear(x, cpu.pack_linear(transposed, None)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(576, 200), (65, 97), (7, 3)])
def test_a_row_of_linear_has_the_same_bits_in_every_batch(
    isa: str, threads: None, dtype: torch.dtype, k: int, n: int
) -> None:
    x = random(0, 200, k, dtype=dtype)
    weight = cpu.pack_linear(random(1, n, k, dtype=dtype), random(2, n, dtype=dtype))
    _cpu.set_threads(1)
    alone = torch.cat([cpu.linear(row[None], weight) for row in x])
    for num_threads in (1, 2, 3):
        _cpu.set_threads(num_threads)
        for rows in (2, 3, 5, 7, 12, 13, 64, 200):
            for begin in (0, 1, 64):
                assert_same_bits(cpu.linear(x[begin : begin + rows], weight), alone[begin : begin + rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_no_rows_is_empty(isa: str, dtype: torch.dtype) -> None:
    weight = cpu.pack_linear(random(0, 40, 16, dtype=dtype), None)
    assert cpu.linear(torch.empty(0, 16, dtype=dtype), weight).shape == (0, 40)
    assert cpu.embedding(torch.empty(0, dtype=torch.int32), weight).shape == (0, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@generated
@given(k=sizes, n=sizes, tokens=st.integers(1, 60))
def test_embedding_gives_back_the_exact_rows(isa: str, dtype: torch.dtype, k: int, n: int, tokens: int) -> None:
    table = random(k, n, k, dtype=dtype)
    ids = torch.randint(0, n, (tokens,), generator=torch.Generator().manual_seed(n), dtype=torch.int32)
    assert_same_bits(cpu.embedding(ids, cpu.pack_linear(table, None)), table[ids.long()])


def test_packed_weights_report_their_shape_and_size() -> None:
    weight = cpu.pack_linear(random(0, 33, 65, dtype=torch.bfloat16), random(0, 33))
    assert (weight.out_features, weight.in_features) == (33, 65)
    assert weight.num_bytes == 64 * 66 * 2 + 64 * 4


def test_bfloat16_outputs_round_to_nearest_even_as_torch_does(isa: str) -> None:
    # Halfway cases, denormals, infinities and values that round up to infinity, one a row through a 1 x 1 product.
    bits = torch.tensor(
        [0x3F808000, 0x3F818000, 0x3F807FFF, 0x00018000, 0x00008000, 0x7F7FFFFF, 0x7F800000, -0x7F808000],
        dtype=torch.int32,
    )
    values = bits.view(torch.float32)[:, None]
    out = cpu.linear(values, cpu.pack_linear(torch.ones(1, 1), None), torch.bfloat16)
    assert_same_bits(out, values.to(torch.bfloat16))


def test_linear_refuses_mixed_and_unknown_dtypes() -> None:
    weight = cpu.pack_linear(random(0, 4, 4), None)
    with pytest.raises(TypeError, match=r"packed as torch\.float32"):
        cpu.linear(random(0, 2, 4, dtype=torch.bfloat16), weight)
    with pytest.raises(TypeError, match="writes float32 or bfloat16"):
        cpu.linear(random(0, 2, 4), weight, torch.float16)
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        cpu.pack_linear(random(0, 4, 4).half(), None)
