"""Norms, the gated activation, argmax and the rotary embedding's effect on queries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo import _cpu
from octavo.ops import ACTIVATIONS, POOLINGS
from tests.ops.kernel_cases import (
    DTYPES,
    PARAMETERS,
    Heads,
    assert_near,
    assert_same_bits,
    cos_sin,
    generated,
    generated_few,
    make_sequence,
    random,
    split_qkv,
)
from tests.ops.tensors import cpu, torch_ref

KERNELS = "others"  # of an instruction set that are tested here: conftest.py

widths = st.one_of(st.integers(1, 80), st.sampled_from([128, 576, 1000]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", POOLINGS)
@generated_few
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8), width=widths, out=st.sampled_from(DTYPES))
def test_rows_are_pooled_as_in_the_reference_each_for_itself(
    isa: str, dtype: torch.dtype, kind: str, lengths: list[int], width: int, out: torch.dtype
) -> None:
    ends = torch.tensor(lengths).cumsum(0) - 1
    starts = ends - torch.tensor(lengths) + 1
    starts[0] = ends[0]  # a single row, which is itself
    x = random(sum(lengths), sum(lengths), width, dtype=dtype)
    pooled = cpu.pool(x, starts, ends, kind, str(out)[6:])
    assert_near(pooled, torch_ref.pool(x, starts, ends, kind, str(out)[6:]))
    assert_same_bits(pooled[:1], x[ends[:1]].to(out))
    alone = cpu.pool(x[starts[-1] :], starts[-1:] * 0, ends[-1:] - starts[-1], kind, str(out)[6:])
    assert_same_bits(alone, pooled[-1:])


@pytest.mark.parametrize("dtype", DTYPES)
@generated
@given(rows=st.integers(1, 100), width=widths, weight_dtype=st.sampled_from(DTYPES))
def test_rms_norm_matches_the_reference(
    isa: str, dtype: torch.dtype, rows: int, width: int, weight_dtype: torch.dtype
) -> None:
    x, weight = random(rows, rows, width, dtype=dtype), random(7, width, dtype=weight_dtype)
    assert_near(cpu.rms_norm(x, weight, 1e-5), torch_ref.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_inside_a_wider_matrix(isa: str, dtype: torch.dtype) -> None:
    heads = random(0, 21, 7 * 40, dtype=dtype).unflatten(1, (7, 40))[:, 2:5]
    weight = random(1, 40)
    assert_near(cpu.rms_norm(heads, weight, 1e-6), torch_ref.rms_norm(heads, weight, 1e-6))
    assert_near(cpu.rms_norm(heads[3, 1], weight, 1e-6), torch_ref.rms_norm(heads[3, 1], weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_heads_may_have_weights_of_their_own(isa: str, dtype: torch.dtype, bias: bool) -> None:
    heads = random(0, 21, 7 * 40, dtype=dtype).unflatten(1, (7, 40))[:, 2:5]
    weight, b = random(1, 3, 40), random(2, 3, 40) if bias else None
    assert_near(cpu.rms_norm(heads, weight, 1e-6), torch_ref.rms_norm(heads, weight, 1e-6))
    assert_near(cpu.layer_norm(heads, weight, b, 1e-6), torch_ref.layer_norm(heads, weight, b, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_norms_have_the_same_bits_in_every_batch(isa: str, threads: None, dtype: torch.dtype) -> None:
    x, weight = random(0, 300, 2 * 333, dtype=dtype), random(2, 2 * 333)
    _cpu.set_threads(1)
    norms = torch.cat([cpu.rms_norm(row[None], weight, 1e-5) for row in x])
    for num_threads in (1, 2, 3):
        _cpu.set_threads(num_threads)
        assert_same_bits(cpu.rms_norm(x, weight, 1e-5), norms)


@pytest.mark.parametrize("dtype", DTYPES)
@generated
@given(rows=st.integers(1, 100), width=widths, weight_dtype=st.sampled_from(DTYPES), bias=st.booleans())
def test_layer_norm_matches_the_reference(
    isa: str, dtype: torch.dtype, rows: int, width: int, weight_dtype: torch.dtype, bias: bool
) -> None:
    x, weight = random(rows, rows, width, dtype=dtype) + 3, random(7, width, dtype=weight_dtype)
    b = random(8, width, dtype=weight_dtype) if bias else None
    assert_near(cpu.layer_norm(x, weight, b, 1e-5), torch_ref.layer_norm(x, weight, b, 1e-5))


def test_layer_norm_of_views_and_of_single_rows(isa: str) -> None:
    heads = random(0, 21, 7 * 40).unflatten(1, (7, 40))[:, 2:5]
    weight, bias = random(1, 40), random(2, 40)
    for x in (heads, heads[3], heads[3, 1]):
        assert_near(cpu.layer_norm(x, weight, bias, 1e-6), torch_ref.layer_norm(x, weight, bias, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@generated
@given(
    rows=st.integers(1, 40), width=widths, kind=st.sampled_from([*ACTIVATIONS, *PARAMETERS]),
    spread=st.sampled_from([0.01, 1.0, 8.0, 60.0]),
)  # fmt: skip
def test_activations_match_the_reference(
    isa: str, dtype: torch.dtype, rows: int, width: int, kind: str, spread: float
) -> None:
    x = (random(rows, rows, width + 3) * spread).to(dtype)[:, :width]
    settings = {"parameters": PARAMETERS.get(kind, ())}
    assert_near(cpu.activation(x, kind, **settings), torch_ref.activation(x, kind, **settings))


def test_activations_are_accurate_over_their_whole_range(isa: str) -> None:
    x = torch.cat([torch.linspace(-13, 13, 20001), torch.tensor([-1e4, -0.0, 1e4, 3e38])])[None]
    for dtype, rtol in ((torch.float32, 2e-5), (torch.bfloat16, 2**-8 + 2e-5)):
        given = x.to(dtype)
        wide = given.double()
        cubic = 2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
        exact = {
            "silu": wide * wide.sigmoid(),
            "gelu": wide * torch.special.erfc(-wide / 2**0.5) / 2,
            "gelu_tanh": wide * cubic.sigmoid(),  # (1 + tanh(u)) / 2, without its cancellation
        }
        for kind, expected in exact.items():
            torch.testing.assert_close(cpu.activation(given, kind).double(), expected, rtol=rtol, atol=1e-36)
    wide = x.double()
    x, wide = x[x.abs() < 20][None], wide[wide.abs() < 20][None]
    a, c, b, e = PARAMETERS["xielu"]
    below = c * (torch.expm1(wide.clamp(max=e)) - wide) + b * wide
    expected = torch.where(wide > 0, a * wide**2 + b * wide, below)
    found = cpu.activation(x, "xielu", parameters=PARAMETERS["xielu"]).double()
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-7)
    capped = cpu.activation(x, "softcap", parameters=(3.0,)).double()
    torch.testing.assert_close(capped, 3 * (wide / 3).tanh(), rtol=1e-6, atol=1e-36)
    for kind in ACTIVATIONS:
        assert cpu.activation(torch.tensor([[float("nan")]]), kind).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@generated
@given(rows=st.integers(1, 40), width=widths, x_dtype=st.sampled_from(DTYPES), scale=st.sampled_from([1.0, 0.22, -3.0]))
def test_add_adds_in_place_and_touches_nothing_else(
    isa: str, dtype: torch.dtype, rows: int, width: int, x_dtype: torch.dtype, scale: float
) -> None:
    x, wide = random(rows, rows, width, dtype=x_dtype), random(5, rows, width + 3, dtype=dtype)
    residual, beyond = wide[:, :width], wide[:, width:].clone()
    expected = residual.clone()
    cpu.add(residual, x, scale)
    torch_ref.add(expected, x, scale)
    assert_near(residual, expected)
    assert_same_bits(wide[:, width:], beyond)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_chosen_experts_pass_on_is_added(isa: str, dtype: torch.dtype) -> None:
    x, residual = random(0, 9, 37, dtype=dtype), random(1, 9, 37)
    ids, weights = (random(3, 9, 5).abs() * 8).int(), random(2, 9, 5)
    expected, alone = residual.clone(), residual[3:4].clone()
    torch_ref.add_chosen(expected, x, ids, weights, 7)
    cpu.add_chosen(alone, x[3:4], ids[3:4], weights[3:4], 7)
    cpu.add_chosen(residual, x, ids, weights, 7)
    assert_near(residual, expected)
    assert_same_bits(residual[3:4], alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_gives_the_bits_of_linear_add(isa: str, dtype: torch.dtype) -> None:
    for k, n in [(64, 96), (130, 100), (7, 33)]:
        x, weight = random(0, 21, k, dtype=dtype), cpu.pack_linear([random(1, n, k, dtype=dtype)], random(2, n))
        for residual_dtype in DTYPES:
            residual = random(3, 21, n, dtype=residual_dtype)
            expected = residual.clone()
            cpu.linear_add(x, weight, expected, 0.22)
            cpu.add(residual, cpu.linear(x, weight, torch.float32), 0.22)
            assert_same_bits(residual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_new_operations_have_the_same_bits_in_every_batch(isa: str, threads: None, dtype: torch.dtype) -> None:
    x, weight, bias = random(0, 300, 333, dtype=dtype), random(2, 333), random(3, 333)

    def outputs(rows: torch.Tensor) -> torch.Tensor:
        added = rows.clone()
        cpu.add(added, rows, 0.3)
        return torch.cat([cpu.layer_norm(rows, weight, bias, 1e-5), cpu.activation(rows, "gelu"), added], 1)

    _cpu.set_threads(1)
    alone = torch.cat([outputs(row[None]) for row in x])
    for num_threads in (1, 2, 3):
        _cpu.set_threads(num_threads)
        assert_same_bits(outputs(x), alone)


def test_a_table_of_learned_positions_is_added(isa: str) -> None:
    table, residual = random(0, 64, 80), random(1, 5, 80, dtype=torch.bfloat16)
    positions = torch.tensor([63, 0, 1, 2, 62])
    expected = (residual.float() + table[positions]).bfloat16()
    cpu.add(residual, cpu.take_rows(table, positions))
    assert_same_bits(residual, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
def test_take_rows_copies_rows(isa: str, dtype: torch.dtype) -> None:
    wide = random(0, 50, 80).mul(50).to(dtype)
    rows = torch.tensor([49, 0, 7, 7])
    for x in (wide, wide[:, 3:40]):
        assert torch.equal(cpu.take_rows(x, rows), torch_ref.take_rows(x, rows))
    assert cpu.take_rows(wide, rows[:0]).shape == (0, 80)
    for index in (50, -1):
        with pytest.raises(IndexError, match=f"row {index} at index 1"):
            cpu.take_rows(wide, torch.tensor([0, index]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_replace_rows_replaces_those_that_have_an_index(isa: str, dtype: torch.dtype) -> None:
    wide, replacements = random(0, 6, 90, dtype=dtype), random(1, 3, 37)
    indices = torch.tensor([2, -1, 0, -1, 2, 1], dtype=torch.int32)
    expected = wide.clone()
    torch_ref.replace_rows(expected[:, 3:40], replacements, indices)
    assert torch.equal(expected[0, 3:40], replacements[2].to(dtype)) and torch.equal(expected[1], wide[1])
    cpu.replace_rows(wide[:, 3:40], replacements, indices)
    assert_same_bits(wide, expected)
    cpu.replace_rows(wide[:, 3:40], replacements[:0], torch.full_like(indices, -1))
    assert_same_bits(wide, expected)
    torch_ref.add_rows(expected[:, 3:40], replacements, indices)
    cpu.add_rows(wide[:, 3:40], replacements, indices)
    assert_same_bits(wide, expected)
    for index in (3, -2):
        indices[1] = index
        for put in (cpu.replace_rows, cpu.add_rows):
            with pytest.raises(IndexError, match=f"replacement {index} at index 1"):
                put(wide[:, 3:40], replacements, indices)


@generated
@given(rows=st.integers(1, 9), width=st.one_of(st.integers(1, 200), st.just(5000)), levels=st.sampled_from([2, 50, 0]))
def test_argmax_takes_the_lowest_index_of_the_highest(isa: str, rows: int, width: int, levels: int) -> None:
    logits = random(width, rows, width)
    if levels:  # Many ties.
        logits = (logits * levels / 4).round()
    highest = logits.max(-1, keepdim=True).values
    expected = (logits == highest).int().argmax(-1)
    assert torch.equal(cpu.argmax(logits), expected)


def test_argmax_of_odd_rows(isa: str) -> None:
    logits = torch.full((5, 100), float("-inf"))
    logits[1, 60] = -3.0
    logits[2, [40, 90]] = float("inf")
    logits[3] = float("nan")
    logits[4] = torch.arange(100.0)
    logits[4, ::2] = float("nan")
    # Nothing can be chosen where the largest is not finite, or where one is NaN.
    assert cpu.argmax(logits).tolist() == [-1, 60, -1, -1, -1] == torch_ref.argmax(logits).tolist()
    with pytest.raises(TypeError, match="float32"):
        cpu.argmax(logits.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@generated
@given(
    tokens=st.integers(1, 40),
    head_size=st.sampled_from([40, 64, 80, 96, 128]),
    part=st.sampled_from([1, 2, 4, 256]),  # of so many nothing is left: the table has no column
    ratio=st.sampled_from([1, 3, 8]),
)
def test_rotary_rotates_queries_in_place_and_leaves_the_rest(
    isa: str, dtype: torch.dtype, tokens: int, head_size: int, part: int, ratio: int
) -> None:
    heads = Heads(2, ratio, head_size)
    rotary_size = head_size // part
    positions = torch.randint(0, 2048, (tokens,), generator=torch.Generator().manual_seed(tokens))
    results = []
    for ops in (cpu, torch_ref):
        qkv = make_sequence(tokens, tokens, heads, dtype).qkv
        before = qkv.clone()
        query, key, value = split_qkv(qkv, heads)
        cache = ops.allocate_kv_cache(8, 8, 2, head_size, dtype)
        ops.rotary_and_cache(query, key, value, positions, cos_sin(rotary_size), cache, torch.arange(tokens))
        assert_same_bits(query[..., rotary_size:], split_qkv(before, heads)[0][..., rotary_size:])
        assert_same_bits(value, split_qkv(before, heads)[2])
        results.append(query)
    assert_near(*results)
    qkv = make_sequence(tokens, tokens, heads, dtype).qkv
    query = split_qkv(qkv, heads)[0]
    cpu.rotate(query, positions, cos_sin(rotary_size))
    assert_same_bits(query, results[0])
    assert_same_bits(qkv[:, query[0].numel() :], make_sequence(tokens, tokens, heads, dtype).qkv[:, query[0].numel() :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotated_queries_are_scaled_by_position(isa: str, dtype: torch.dtype) -> None:
    heads, positions, scales = Heads(2, 3, 40), torch.tensor([5, 2047, 0]), random(3, 2048)
    found = []
    for ops in (cpu, torch_ref):
        query, key, value = split_qkv(make_sequence(0, 3, heads, dtype).qkv, heads)
        cache = ops.allocate_kv_cache(8, 8, 2, 40, dtype)
        ops.rotary_and_cache(query, key, value, positions, cos_sin(16), cache, torch.arange(3), query_scales=scales)
        found.append(query)
    assert_near(*found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_pair_is_rotated_by_the_position_of_its_axis(isa: str, dtype: torch.dtype) -> None:
    heads = Heads(2, 3, 40)
    axes = torch.tensor([0, 1, 2, 2, 1, 0, 0, 2], dtype=torch.int32)
    wide = torch.tensor([[5, 2047, 0, 3, 9], [5, 2, 900, 3, 9], [5, 1, 30, 3, 9]])  # one token has three of the same
    positions, queries, keys = wide[:, :4], [], []  # as in a step of a program for more tokens
    for ops in (cpu, torch_ref):
        query, key, value = split_qkv(make_sequence(0, 4, heads, dtype).qkv, heads)
        cache = ops.allocate_kv_cache(8, 8, 2, 40, dtype)
        ops.rotary_and_cache(query, key, value, positions, cos_sin(16), cache, torch.arange(4), axes=axes)
        queries.append(query)
        batch = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 4]).int(), torch.tensor([4]).int()
        keys.append(ops.paged_attention(split_qkv(make_sequence(1, 4, heads, dtype).qkv, heads)[0], cache, *batch, 0.2))
    assert_near(*queries)
    assert_near(*keys, 2**-9)
    for pair, axis in enumerate(axes.tolist()):
        query, key, value = split_qkv(make_sequence(0, 4, heads, dtype).qkv, heads)
        cpu.rotate(query, positions[axis].contiguous(), cos_sin(16))
        assert_same_bits(query[..., [pair, pair + 8]], queries[0][..., [pair, pair + 8]])
    wide[2, 1] = 2048
    cache = cpu.allocate_kv_cache(8, 8, 2, 40, dtype)
    with pytest.raises(IndexError, match="position 2048 at index 1"):
        cpu.rotary_and_cache(query, key, value, positions, cos_sin(16), cache, torch.arange(4), axes=axes)


def test_a_negative_slot_is_not_written(isa: str) -> None:
    heads = Heads(2, 1, 64)
    cache = cpu.allocate_kv_cache(2, 8, 2, 64, torch.float32)
    cache.key.fill_(7)
    cache.value.fill_(7)
    query, key, value = split_qkv(make_sequence(0, 3, heads, torch.float32).qkv, heads)
    slots = torch.tensor([-1, 9, -1])
    cpu.rotary_and_cache(query, key, value, torch.arange(3), cos_sin(64), cache, slots)
    assert (cache.key[0] == 7).all()
    assert (cache.value[0] == 7).all()
    assert (cache.value[1, :, 1, :, 0] == value[1]).all()
    assert (cache.value[1, :, 2:] == 7).all()


def test_rows_that_are_not_there_are_not_pooled() -> None:
    x = random(0, 4, 8)
    for start, end, message in [(-1, 2, "first row -1"), (0, 4, "last row 4")]:
        with pytest.raises(IndexError, match=message):
            cpu.pool(x, torch.tensor([start]), torch.tensor([end]), "mean")
    with pytest.raises(ValueError, match="rows 3 to 2 are none"):
        cpu.pool(x, torch.tensor([3]), torch.tensor([2]), "mean")


def test_indices_out_of_range_are_refused_before_anything_is_touched() -> None:
    cache = cpu.allocate_kv_cache(2, 8, 1, 64, torch.float32)
    query, key, value = split_qkv(make_sequence(0, 1, Heads(1, 1, 64), torch.float32).qkv, Heads(1, 1, 64))
    for position, slot, message in [(2048, 0, "position 2048"), (-1, 0, "position -1"), (0, 16, "slot 16")]:
        with pytest.raises(IndexError, match=f"{message} at index 0"):
            cpu.rotary_and_cache(query, key, value, torch.tensor([position]), cos_sin(64), cache, torch.tensor([slot]))
    with pytest.raises(IndexError, match="token id 40 at index 1"):
        cpu.embedding(torch.tensor([39, 40], dtype=torch.int32), cpu.pack_linear([random(0, 40, 8)]))
