"""Packed products and the embedding that reads the same packed matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo import _cpu
from octavo.ops import ACTIVATIONS
from tests.ops.kernel_cases import DTYPES, assert_near, assert_same_bits, generated, random
from tests.ops.tensors import cpu, torch_ref

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
    actual = cpu.linear(x, cpu.pack_linear([weight], b), out_dtype)
    assert_near(actual, torch_ref.linear(x, torch_ref.pack_linear([weight], b), out_dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_reads_strided_rows_and_no_element_beyond_them(isa: str, dtype: torch.dtype) -> None:
    wide = torch.full((9, 80), float("nan"), dtype=dtype)
    wide[:, 3:40] = random(0, 9, 37, dtype=dtype)
    weight = random(1, 50, 37, dtype=dtype)
    expected = torch_ref.linear(wide[:, 3:40], torch_ref.pack_linear([weight]))
    assert_near(cpu.linear(wide[:, 3:40], cpu.pack_linear([weight])), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_linear_takes_any_strides(isa: str, dtype: torch.dtype) -> None:
    weight = random(0, 70, 90, dtype=dtype)
    x = random(1, 4, 33, dtype=dtype)
    part = cpu.linear(x, cpu.pack_linear([weight[5:60, 7:40]]))
    assert_same_bits(part, cpu.linear(x, cpu.pack_linear([weight[5:60, 7:40].contiguous()])))
    transposed = weight.T.contiguous().T[5:60, 7:40]
    assert_same_bits(part, cpu.linear(x, cpu.pack_linear([transposed])))


@pytest.mark.parametrize("dtype", DTYPES)
@generated
@given(
    rows=row_counts, k=sizes, n=sizes, bias=st.booleans(), residual_dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 0.22]),
)  # fmt: skip
def test_linear_add_adds_to_the_residual_in_place(
    isa: str, dtype: torch.dtype, rows: int, k: int, n: int, bias: bool, residual_dtype: torch.dtype, scale: float
) -> None:
    x, weight = random(rows, rows, k, dtype=dtype), random(k, n, k, dtype=dtype)
    b = random(n, n) if bias else None
    wide = random(5, rows, n + 3, dtype=residual_dtype)
    residual, beyond = wide[:, :n], wide[:, n:].clone()
    expected = residual.clone()
    cpu.linear_add(x, cpu.pack_linear([weight], b), residual, scale)
    torch_ref.linear_add(x, torch_ref.pack_linear([weight], b), expected, scale)
    assert_near(residual, expected)
    assert_same_bits(wide[:, n:], beyond)


@pytest.mark.parametrize("dtype", DTYPES)
@generated
@given(
    rows=row_counts, k=sizes, width=sizes, bias=st.booleans(), out_dtype=st.sampled_from([None, *DTYPES]),
    activation=st.sampled_from(["silu", *ACTIVATIONS]),
)  # fmt: skip
def test_activations_of_products_are_the_reference(
    isa: str, dtype: torch.dtype, rows: int, k: int, width: int, bias: bool, out_dtype: torch.dtype | None,
    activation: str,
) -> None:  # fmt: skip
    x, parts = random(rows, rows, k, dtype=dtype), [random(k + i, width, k, dtype=dtype) for i in range(2)]
    b = random(width, 2 * width, dtype=dtype) if bias else None
    settings = {"out_dtype": out_dtype, "activation": activation}
    actual = cpu.linear_silu_and_mul(x, cpu.pack_linear(parts, b, gated=True), **settings)
    expected = torch_ref.linear_silu_and_mul(x, torch_ref.pack_linear(parts, b, gated=True), **settings)
    assert_near(actual, expected)
    actual = cpu.linear_activated(x, cpu.pack_linear(parts, b), **settings)
    assert_near(actual, torch_ref.linear_activated(x, torch_ref.pack_linear(parts, b), **settings))


def test_silu_is_accurate_over_its_whole_range(isa: str) -> None:
    gate = torch.cat([torch.linspace(-87, 100, 20000), torch.tensor([-1e4, -100.0, 0.0, 1e4])])[:, None]
    # One input: times 1 for the gate, and a bias of 1 for up.
    identity = cpu.pack_linear([torch.ones(1, 1), torch.zeros(1, 1)], torch.tensor([0.0, 1.0]), gated=True)
    exact = torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(cpu.linear_silu_and_mul(gate, identity).double(), exact, rtol=1e-6, atol=1e-36)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(64, 32, 32), (48, 16, 16), (5, 1, 40)])
def test_parts_lie_side_by_side(isa: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    x = random(0, 7, 50, dtype=dtype)
    parts = [random(i + 1, size, 50, dtype=dtype) for i, size in enumerate(sizes)]
    bias = random(9, sum(sizes))
    stacked = cpu.pack_linear(parts, bias)
    assert (stacked.out_features, stacked.in_features) == (sum(sizes), 50)
    each = [cpu.linear(x, cpu.pack_linear([p], b)) for p, b in zip(parts, bias.split(sizes), strict=True)]
    assert_same_bits(cpu.linear(x, stacked), torch.cat(each, dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(576, 200), (65, 97), (7, 3)])
def test_a_row_of_linear_has_the_same_bits_in_every_batch(
    isa: str, threads: None, dtype: torch.dtype, k: int, n: int
) -> None:
    x = random(0, 200, k, dtype=dtype)
    weight = cpu.pack_linear([random(1, n, k, dtype=dtype)], random(2, n, dtype=dtype))
    _cpu.set_threads(1)
    alone = torch.cat([cpu.linear(row[None], weight) for row in x])
    for num_threads in (1, 2, 3):
        _cpu.set_threads(num_threads)
        for rows in (2, 3, 5, 7, 12, 13, 16, 17, 31, 33, 64, 200):
            for begin in (0, 1, 64):
                assert_same_bits(cpu.linear(x[begin : begin + rows], weight), alone[begin : begin + rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_the_fused_products_has_the_same_bits_in_every_batch(
    isa: str, threads: None, dtype: torch.dtype
) -> None:
    x, residual = random(0, 100, 130, dtype=dtype), random(1, 100, 100, dtype=dtype)
    plain = cpu.pack_linear([random(2, 100, 130, dtype=dtype)])
    gate_up = cpu.pack_linear([random(i, 100, 130, dtype=dtype) for i in (3, 4)], gated=True)

    def both(begin: int, end: int) -> torch.Tensor:
        out = residual[begin:end].clone()
        cpu.linear_add(x[begin:end], plain, out, 0.5)
        return torch.cat([out, cpu.linear_silu_and_mul(x[begin:end], gate_up)], dim=1)

    _cpu.set_threads(1)
    alone = torch.cat([both(i, i + 1) for i in range(100)])
    for num_threads in (1, 2, 3):
        _cpu.set_threads(num_threads)
        for rows in (2, 3, 5, 7, 12, 13, 16, 17, 31, 33, 100):
            assert_same_bits(both(0, rows), alone[:rows])


def without_denormals(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x)


@pytest.mark.parametrize("isa", [i for i in _cpu.available_isas() if i.startswith("amx")], indirect=True)
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 64, 32), (20, 70, 40), (37, 161, 65)])
def test_tiles_sum_bfloat16_in_the_order_that_is_documented(isa: str, rows: int, k: int, n: int) -> None:
    """Of every 32 elements of k the even and the odd ones, then both to the sum so far; denormals are zeros."""
    x, weight = random(0, rows, k, dtype=torch.bfloat16), random(1, n, k, dtype=torch.bfloat16)
    x[::3, 1::2] *= 1e-38
    weight[::2, ::2] *= 1e-20
    a, b = (without_denormals(t.float()).double() for t in (x, weight))
    total = torch.zeros(rows, n)
    for begin in range(0, k, 32):
        sums = [torch.zeros(rows, n), torch.zeros(rows, n)]
        for i in range(begin, min(begin + 32, k)):
            # Exact in float64 but for the last addition's rounding, which is far finer than that to float32.
            sums[i % 2] = without_denormals((sums[i % 2].double() + a[:, i, None] * b[None, :, i]).float())
        total = without_denormals(total + without_denormals(sums[0] + sums[1]))
    assert_same_bits(cpu.linear(x, cpu.pack_linear([weight]), torch.float32), total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_no_rows_is_empty(isa: str, dtype: torch.dtype) -> None:
    weight = cpu.pack_linear([random(0, 40, 16, dtype=dtype)])
    assert cpu.linear(torch.empty(0, 16, dtype=dtype), weight).shape == (0, 40)
    assert cpu.embedding(torch.empty(0, dtype=torch.int32), weight).shape == (0, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@generated
@given(k=sizes, n=sizes, tokens=st.integers(1, 60))
def test_embedding_gives_back_the_exact_rows(isa: str, dtype: torch.dtype, k: int, n: int, tokens: int) -> None:
    table = random(k, n, k, dtype=dtype)
    ids = torch.randint(0, n, (tokens,), generator=torch.Generator().manual_seed(n), dtype=torch.int32)
    for is_embedding in (False, True):
        weight = cpu.pack_linear([table], is_embedding=is_embedding)
        assert_same_bits(cpu.embedding(ids, weight), table[ids.long()])
        for out_dtype in DTYPES:
            assert_same_bits(cpu.embedding(ids, weight, out_dtype), table[ids.long()].to(out_dtype))


def test_a_table_whose_rows_are_looked_up_has_no_products(isa: str) -> None:
    table = cpu.pack_linear([random(0, 40, 16)], is_embedding=True)
    with pytest.raises(ValueError, match="in no product"):
        cpu.linear(random(1, 3, 16), table)


def test_packed_weights_report_their_shape_and_size() -> None:
    weight = cpu.pack_linear([random(0, 33, 65, dtype=torch.bfloat16)], random(0, 33))
    assert (weight.out_features, weight.in_features) == (33, 65)
    assert weight.num_bytes == 64 * 66 * 2 + 64 * 4


def test_bfloat16_outputs_round_to_nearest_even_as_torch_does(isa: str) -> None:
    # Halfway cases, denormals, infinities and values that round up to infinity, one a row through a 1 x 1 product.
    bits = torch.tensor(
        [0x3F808000, 0x3F818000, 0x3F807FFF, 0x00018000, 0x00008000, 0x7F7FFFFF, 0x7F800000, -0x7F808000],
        dtype=torch.int32,
    )
    values = bits.view(torch.float32)[:, None]
    out = cpu.linear(values, cpu.pack_linear([torch.ones(1, 1)]), torch.bfloat16)
    assert_same_bits(out, values.to(torch.bfloat16))


def test_linear_refuses_mixed_and_unknown_dtypes() -> None:
    weight = cpu.pack_linear([random(0, 4, 4)])
    with pytest.raises(TypeError, match=r"packed as float32"):
        cpu.linear(random(0, 2, 4, dtype=torch.bfloat16), weight)
    with pytest.raises(TypeError, match="writes float32 or bfloat16"):
        cpu.linear(random(0, 2, 4), weight, torch.float16)
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        cpu.pack_linear([random(0, 4, 4).half()])
