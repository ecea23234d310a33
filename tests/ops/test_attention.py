"""Paged attention: against the reference, and bit for bit against itself under every way to batch, chunk and page."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo import _cpu
from octavo.errors import ConfigError
from tests.ops.kernel_cases import (
    BYTES,
    DTYPES,
    SCORE_SETTINGS,
    Heads,
    PagedBatch,
    assert_near,
    assert_same_bits,
    generated,
    generated_few,
    make_sequence,
    random,
    reference_batch,
    score_settings,
)
from tests.ops.tensors import cpu

KERNELS = "attention"  # of an instruction set that are tested here: conftest.py

# (of the step, of its cache)
CACHES = (
    [(dtype, None) for dtype in DTYPES] + [(torch.bfloat16, cached) for cached in BYTES] + [(torch.float32, BYTES[0])]
)

# What rotates a key a little otherwise may round an element to the next of the cache's numbers; and both sides round
# what they return to bfloat16, by 2^-9 each.
BYTES_TOLERANCE = 2**-7 + 2 * 2**-9

ranges = st.lists(
    st.tuples(st.one_of(st.integers(1, 70), st.sampled_from([64, 127, 512, 513, 600])), st.integers(1, 100)),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize(("dtype", "cached"), CACHES)
@generated
@given(
    lengths=ranges,
    kv_heads=st.integers(1, 3),
    ratio=st.sampled_from([1, 2, 3, 8]),
    head_size=st.sampled_from([40, 64, 80, 96, 128]),
    block_size=st.sampled_from([8, 16, 32]),
    window=st.sampled_from([0, 0, 1, 17, 64, 100, 530]),
    partial_rotary=st.booleans(),
    scores=st.sets(st.sampled_from(SCORE_SETTINGS)),
    value_size=st.sampled_from([None, None, 12, 32]),
)
def test_mixed_batches_match_the_reference_whatever_unused_slots_hold(
    isa: str, dtype: torch.dtype, cached: torch.dtype | None, lengths: list[tuple[int, int]], kv_heads: int, ratio: int,
    head_size: int, block_size: int, window: int, partial_rotary: bool, scores: set[str], value_size: int | None,
) -> None:  # fmt: skip
    heads = Heads(kv_heads, ratio, head_size, value_size if cached is None else None)
    rotary_size = head_size // 2 if partial_rotary else head_size
    sequences = [make_sequence(i, length, heads, dtype) for i, (length, _) in enumerate(lengths)]
    batch = [(i, max(length - queries, 0), length) for i, (length, queries) in enumerate(lengths)]
    form = {"rotary_size": rotary_size, "cache_dtype": cached}
    native = PagedBatch(cpu, heads, dtype, block_size, sequences, **form)
    reference = reference_batch(heads, dtype, block_size, sequences, **form)
    settings = score_settings(scores, heads.query_heads)
    found, expected = native.attend(batch, window, **settings), reference.attend(batch, window, **settings)
    if cached is None:  # Weights are rounded to bfloat16, each by up to 2^-9.
        assert_near(found, expected, 2**-9)
    else:
        assert (found.float() - expected.float()).abs().max() < BYTES_TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(("dtype", "cached"), CACHES)
@generated_few
@given(
    lengths=st.lists(st.one_of(st.integers(1, 70), st.sampled_from([128, 513, 600])), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    ratio=st.sampled_from([1, 3]),
    head_size=st.sampled_from([32, 64, 80]),
    window=st.sampled_from([0, 1, 17, 65, 530]),
    scores=st.sets(st.sampled_from(["softcap", "sinks", "distance_biases"])),
)
def test_attention_both_ways_matches_the_reference_and_does_not_see_its_company(
    isa: str, dtype: torch.dtype, cached: torch.dtype | None, lengths: list[int], kv_heads: int, ratio: int,
    head_size: int, window: int, scores: set[str],
) -> None:  # fmt: skip
    heads = Heads(kv_heads, ratio, head_size)
    sequences = [make_sequence(i, length, heads, dtype) for i, length in enumerate(lengths)]
    batch = [(i, 0, length) for i, length in enumerate(lengths)]
    settings = score_settings(scores, heads.query_heads) | {"bidirectional": True}
    attended = PagedBatch(cpu, heads, dtype, 16, sequences, cache_dtype=cached).attend(batch, window, **settings)
    expected = reference_batch(heads, dtype, 16, sequences, cache_dtype=cached).attend(batch, window, **settings)
    if cached is None:
        assert_near(attended, expected, 2**-9)
    else:
        assert (attended.float() - expected.float()).abs().max() < BYTES_TOLERANCE * expected.abs().max()
    alone = PagedBatch(cpu, heads, dtype, 8, sequences[-1:], cache_dtype=cached).attend(
        [(0, 0, lengths[-1])], window, **settings
    )
    assert_same_bits(alone, attended[-lengths[-1] :])


@pytest.mark.parametrize("num_keys", [1, 20, 69])
def test_sequences_may_have_more_rows_than_keys_that_all_of_them_see(isa: str, num_keys: int) -> None:
    """As in cross attention: each row has the bits that it has alone."""
    heads = Heads(2, 2, 64)
    batch = PagedBatch(cpu, heads, torch.float32, 16, [make_sequence(0, 70, heads, torch.float32)])

    def attend(counts: list[int], **settings: bool) -> torch.Tensor:
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lens = torch.full((len(counts),), num_keys, dtype=torch.int32)
        tables = batch.tables.repeat(len(counts), 1)
        return cpu.paged_attention(batch.queries[0], batch.cache, tables, starts, lens, 0.125, **settings)

    assert_same_bits(attend([70], bidirectional=True), attend([1] * 70, bidirectional=True))
    with pytest.raises(ValueError, match="has 70 query rows"):
        attend([70])


@pytest.mark.parametrize(("dtype", "cached"), CACHES)
@generated_few
@given(
    lengths=st.lists(st.one_of(st.integers(2, 70), st.sampled_from([128, 513, 600])), min_size=1, max_size=4),
    spans=st.lists(st.tuples(st.integers(0, 550), st.integers(2, 90)), max_size=4),
    ratio=st.sampled_from([1, 3]),
    window=st.sampled_from([0, 17, 530]),
    scores=st.sets(st.sampled_from(["softcap", "sinks"])),
)
def test_spans_that_see_ahead_match_the_reference_and_their_rows_do_not_see_their_company(
    isa: str, dtype: torch.dtype, cached: torch.dtype | None, lengths: list[int], spans: list[tuple[int, int]],
    ratio: int, window: int, scores: set[str],
) -> None:  # fmt: skip
    heads = Heads(2, ratio, 64)
    sequences = [make_sequence(i, length, heads, dtype) for i, length in enumerate(lengths)]
    ends = torch.zeros(max(lengths), dtype=torch.int32)
    for begin, size in spans:
        if begin + size <= len(ends) and not ends[begin : begin + size].any():
            ends[begin : begin + size] = begin + size
    key_ends = [ends[:length].clamp(max=length) for length in lengths]
    batch = [(i, 0, length) for i, length in enumerate(lengths)]
    settings = score_settings(scores, heads.query_heads)
    native = PagedBatch(cpu, heads, dtype, 16, sequences, cache_dtype=cached)
    attended = native.attend(batch, window, key_ends=torch.cat(key_ends), **settings)
    expected = reference_batch(heads, dtype, 16, sequences, cache_dtype=cached).attend(
        batch, window, key_ends=torch.cat(key_ends), **settings
    )
    if cached is None:
        assert_near(attended, expected, 2**-9)
    else:
        assert (attended.float() - expected.float()).abs().max() < BYTES_TOLERANCE * expected.abs().max()
    last, length = len(lengths) - 1, lengths[-1]
    alone = native.attend([(last, length // 2, length)], window, key_ends=key_ends[-1][length // 2 :], **settings)
    assert_same_bits(alone, attended[len(attended) - len(alone) :])


def test_keys_that_are_not_there_are_not_seen() -> None:
    heads = Heads(1, 1, 64)
    paged = PagedBatch(cpu, heads, torch.float32, 16, [make_sequence(0, 20, heads, torch.float32)])
    with pytest.raises(IndexError, match="last key 21 at index 3"):
        paged.attend([(0, 5, 20)], key_ends=torch.tensor([0, 0, 0, 21, *[0] * 11], dtype=torch.int32))


@pytest.mark.parametrize(("dtype", "cached"), CACHES)
@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), 3e38, 0.0])
def test_no_garbage_in_unused_slots_changes_a_bit(
    isa: str, dtype: torch.dtype, cached: torch.dtype | None, poison: float
) -> None:
    heads = Heads(2, 3, 80)
    sequences = [make_sequence(i, n, heads, dtype) for i, n in enumerate([5, 70, 530])]
    batch = [(0, 0, 5), (1, 10, 70), (2, 529, 530)]
    expected = PagedBatch(cpu, heads, dtype, 16, sequences, cache_dtype=cached).attend(batch)
    assert expected.isfinite().all()
    poisoned = PagedBatch(cpu, heads, dtype, 16, sequences, poison=poison, cache_dtype=cached)
    assert_same_bits(poisoned.attend(batch), expected)


@pytest.mark.parametrize(("dtype", "cached"), CACHES)
def test_later_tokens_of_a_chunk_do_not_touch_earlier_rows(
    isa: str, dtype: torch.dtype, cached: torch.dtype | None
) -> None:
    heads = Heads(1, 3, 64)
    clean = make_sequence(0, 100, heads, dtype)
    broken = make_sequence(0, 100, heads, dtype)
    broken.qkv[50:] = float("nan")
    expected = PagedBatch(cpu, heads, dtype, 16, [clean], cache_dtype=cached).attend([(0, 0, 100)])
    actual = PagedBatch(cpu, heads, dtype, 16, [broken], cache_dtype=cached).attend([(0, 0, 100)])
    assert_same_bits(actual[:50], expected[:50])
    assert actual[50:].isnan().all()


@pytest.mark.parametrize(("dtype", "cached"), CACHES)
@pytest.mark.parametrize(
    ("ratio", "head_size", "window", "scores"),
    [
        (1, 80, 0, ()), (3, 64, 90, ()), (8, 40, 600, ()), (40, 128, 0, ()), (3, 64, 0, SCORE_SETTINGS),
        (3, 64, 600, ("sinks",)), pytest.param(3, 64, 0, (), marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_row_has_the_same_bits_however_it_is_batched_chunked_and_paged(
    isa: str, threads: None, dtype: torch.dtype, cached: torch.dtype | None, ratio: int, head_size: int, window: int,
    scores: tuple[str, ...],
) -> None:  # fmt: skip
    heads = Heads(1 if ratio == 40 else 2, ratio, head_size)
    length = 1100  # Crosses two partition boundaries.
    sequence = make_sequence(0, length, heads, dtype)
    others = [make_sequence(i, n, heads, dtype) for i, n in [(1, 3), (2, 200)]]
    _cpu.set_threads(1)
    settings = score_settings(scores, heads.query_heads)
    alone = PagedBatch(cpu, heads, dtype, 16, [sequence], seed=1, cache_dtype=cached)
    whole = alone.attend([(0, 0, length)], window, **settings)
    for num_threads, block_size, seed in [(2, 16, 2), (1, 8, 3), (3, 32, 4)]:
        _cpu.set_threads(num_threads)
        sequences = [others[0], sequence, others[1]]
        paged = PagedBatch(cpu, heads, dtype, block_size, sequences, seed=seed, cache_dtype=cached)
        for begin, end in [(0, 1), (63, 64), (511, 512), (512, 513), (600, 637), (1024, 1025), (1000, 1100)]:
            assert_same_bits(paged.attend([(1, begin, end)], window, **settings), whole[begin:end])
        mixed = paged.attend([(2, 100, 200), (1, 900, 1003), (0, 2, 3), (1, 1099, 1100)], window, **settings)
        assert_same_bits(mixed[100:203], whole[900:1003])
        assert_same_bits(mixed[204:], whole[1099:])


@generated_few
@given(cuts=st.lists(st.integers(1, 699), max_size=6, unique=True), seed=st.integers(0, 9))
def test_any_chunking_of_a_prompt_gives_the_same_bits(isa: str, cuts: list[int], seed: int) -> None:
    heads = Heads(1, 3, 64)
    sequence = make_sequence(seed, 700, heads, torch.bfloat16)
    paged = PagedBatch(cpu, heads, torch.bfloat16, 16, [sequence], seed=seed)
    edges = [0, *sorted(cuts), 700]
    chunks = [paged.attend([(0, begin, end)]) for begin, end in pairwise(edges)]
    assert_same_bits(torch.cat(chunks), paged.attend([(0, 0, 700)]))


def test_a_sink_that_outweighs_every_key_leaves_nothing(isa: str) -> None:
    heads = Heads(1, 2, 64)
    paged = PagedBatch(cpu, heads, torch.float32, 16, [make_sequence(0, 40, heads, torch.float32)])
    out = paged.attend([(0, 0, 40)], sinks=torch.tensor([300.0, -300.0]))
    assert (out[:, :64] == 0).all()
    assert_same_bits(out[:, 64:], paged.attend([(0, 0, 40)])[:, 64:])


def test_contradictory_lengths_are_refused() -> None:
    cache = cpu.allocate_kv_cache(4, 16, 1, 64, torch.float32)
    tables = torch.zeros(1, 2, dtype=torch.int32)
    for starts, length in [([0, 2], 40), ([0, 2], 1), ([2, 0], 2)]:
        with pytest.raises(ValueError, match="sequence 0 has"):
            cpu.paged_attention(
                random(0, 2, 1, 64),
                cache,
                tables,
                torch.tensor(starts, dtype=torch.int32),
                torch.tensor([length], dtype=torch.int32),
                1.0,
            )


def test_mixed_dtypes_and_impossible_caches_are_refused() -> None:
    cache = cpu.allocate_kv_cache(4, 16, 1, 64, torch.float32)
    ints, starts = torch.ones(1, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    with pytest.raises(TypeError, match="one dtype"):
        cpu.paged_attention(random(0, 1, 1, 64, dtype=torch.bfloat16), cache, ints[None], starts, ints, 1.0)
    with pytest.raises(ConfigError, match="block size 12"):
        cpu.allocate_kv_cache(4, 12, 1, 64, torch.float32)
    with pytest.raises(ConfigError, match="head size 65"):
        cpu.allocate_kv_cache(4, 16, 1, 65, torch.float32)
    with pytest.raises(ConfigError, match="head size 66 is not supported with --kv-cache-dtype int8"):
        cpu.allocate_kv_cache(4, 16, 1, 66, torch.int8)
    with pytest.raises(TypeError, match="float16"):
        cpu.allocate_kv_cache(4, 16, 1, 64, torch.float16)


@pytest.mark.parametrize(("dtype", "cached"), CACHES)
def test_blocks_can_be_copied_by_index(dtype: torch.dtype, cached: torch.dtype | None) -> None:
    heads = Heads(2, 2, 64)
    paged = PagedBatch(cpu, heads, dtype, 16, [make_sequence(0, 40, heads, dtype)], cache_dtype=cached)
    expected = paged.attend([(0, 30, 40)])
    used = paged.tables[0, :3].tolist()
    spare = next(b for b in range(paged.cache.num_blocks) if b not in used)
    for tensor in paged.cache.arrays:
        tensor = tensor.view(torch.uint8)
        tensor[spare] = tensor[used[1]]
        tensor[used[1]] = 255
    paged.tables[0, 1] = spare
    assert_same_bits(paged.attend([(0, 30, 40)]), expected)
