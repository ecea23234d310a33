"""Paged attention in Triton: against the reference, and bit for bit against itself however rows are batched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ops import LayerKVCache
from octavo.ops.triton import attention_plan, launch
from octavo.ops.triton import paged_attention as kernels
from octavo.ops.triton.paged_attention import Tiles, paged_attention
from tests.ops.kernel_cases import score_settings
from tests.ops.ref_attention import to_cache
from tests.ops.tensors import torch_ref
from tests.ops.triton.conftest import DEVICE

pytestmark = pytest.mark.long

BYTES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(autouse=True)
def fresh_workspace() -> Iterator[None]:
    """Tests may change its size; every launch must leave the counters as they were."""
    kernels._workspace.cache_clear()
    yield
    assert not kernels._workspace(DEVICE, launch.stream(DEVICE))[1].any()
    kernels._workspace.cache_clear()


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 16 keys, of 32 from key 256 on, and tiles to go with them: short sequences meet every boundary."""
    use_tiles(monkeypatch, Tiles(16, 16, 4, 1, 2))


def use_tiles(monkeypatch: pytest.MonkeyPatch, tiles: Tiles, split_keys: int = 16) -> None:
    monkeypatch.setattr(attention_plan, "SPLIT_KEYS", split_keys)
    monkeypatch.setattr(attention_plan, "SPLIT_OVERHEAD", 0)
    monkeypatch.setattr(kernels, "_tiles", lambda *args, **kwargs: tiles)


class Paged:
    """Sequences of random tokens in a cache whose other slots are NaN, behind tables with nonsense past their ends."""

    def __init__(
        self, lengths: list[int], heads: tuple[int, int, int], block_size: int = 16,
        dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None, seed: int = 0,
        value_size: int | None = None,
    ) -> None:  # fmt: skip
        self.lengths, self.dtype = lengths, dtype
        num_heads, num_kv_heads, head_size = heads
        sizes = head_size, value_size or head_size
        counts = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).int()
        self.tables = torch.full((len(lengths), max(counts, default=0) + 2), -1, dtype=torch.int32)
        self.tables[:, -1] = 2**31 - 1
        shape = (len(order), block_size, num_kv_heads)
        cache_dtype = cache_dtype or dtype
        parts = [torch.full((*shape, size), float("nan")).to(cache_dtype) for size in sizes]
        scales = torch.full((*shape, 2), float("nan")).bfloat16() if cache_dtype in BYTES else None
        self.queries = []
        for s, (length, blocks) in enumerate(zip(lengths, order.split([*counts, 3]), strict=False)):
            # A sequence has the same tokens wherever it lies.
            generator = torch.Generator().manual_seed(length)
            q, k, v = (torch.randn(length, n, head_size, generator=generator) for n in (num_heads, *[num_kv_heads] * 2))
            self.tables[s, : counts[s]] = blocks
            slots = (blocks.long()[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
            for i, (part, rows) in enumerate(zip(parts, (k, v), strict=True)):
                elements, of_rows = to_cache(rows[..., : sizes[i]], cache_dtype)
                part.view(-1, num_kv_heads, sizes[i])[slots] = elements
                if scales is not None:
                    scales.view(-1, num_kv_heads, 2)[slots, :, i] = of_rows.bfloat16()
            self.queries.append(q.to(dtype))
        self.cache = LayerKVCache(*(part.to(DEVICE) for part in (*parts, scales) if part is not None))

    def arguments(self, rows: list[tuple[int, int, int]]) -> tuple[Tensor, LayerKVCache, Tensor, Tensor, Tensor, float]:
        """A batch of positions (sequence, begin, end), as views into rows that hold more than the query."""
        query = torch.cat([self.queries[s][begin:end] for s, begin, end in rows])
        query = torch.cat([query, torch.full_like(query[:, :1], float("nan"))], 1).to(DEVICE)[:, :-1]
        starts = torch.tensor([0] + [end - begin for _, begin, end in rows]).cumsum(0).int().to(DEVICE)
        lengths = torch.tensor([end for _, _, end in rows]).int().to(DEVICE)
        tables = self.tables[[s for s, _, _ in rows]].to(DEVICE)
        return query, self.cache, tables, starts, lengths, query.shape[2] ** -0.5

    def attend(
        self, rows: list[tuple[int, int, int]], window: int = 0, softcap: float = 0.0, **settings: Any
    ) -> Tensor:
        return paged_attention(*self.arguments(rows), window, softcap, **settings)

    def check(self, rows: list[tuple[int, int, int]], window: int = 0, softcap: float = 0.0, **settings: Any) -> None:
        arguments = self.arguments(rows)
        actual = paged_attention(*arguments, window, softcap, **settings).float()
        expected = torch_ref.paged_attention(*arguments, window, softcap, **settings).float()
        # The interpreter cuts bfloat16 off instead of rounding it; a GPU's exponentials and quotients are approximate.
        single = 2e-6 if DEVICE.type == "cpu" else 1e-5
        tolerance = {torch.float32: single, torch.float16: 2**-9, torch.bfloat16: 2**-6}[self.dtype]
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("seed", range(6))
def test_mixed_batches_match_the_reference(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def choose(*options: int) -> int:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    lengths = [choose(1, 5, 16, 31, 33, 64, 70, 129, 300) for _ in range(choose(1, 2, 4))]
    num_kv_heads = choose(1, 2)
    heads = (num_kv_heads * choose(1, 2, 3, 7), num_kv_heads, choose(64, 80, 128))
    dtype = (torch.float32, torch.float16, torch.bfloat16)[choose(0, 1, 2)]
    rows = [(s, max(0, length - choose(1, 1, 2, 9, 40)), length) for s, length in enumerate(lengths)]
    paged = Paged(lengths, heads, choose(8, 16, 32), dtype, seed=seed)
    settings = score_settings([("slopes",), ("sinks",), ("slopes", "sinks"), ()][choose(0, 1, 2, 3)], heads[0])
    settings = {name: value.to(DEVICE) for name, value in settings.items()}
    paged.check(rows, choose(0, 0, 1, 17, 64, 100), float(choose(0, 0, 5)), **settings)


@pytest.mark.parametrize(
    ("heads", "block_size", "dtype"),
    [((4, 1, 128), 256, torch.float16), ((2, 2, 64), 64, torch.bfloat16), ((2, 1, 256), 16, torch.float16)],
)
def test_the_tiles_of_a_gpu_match_the_reference(
    heads: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> None:
    Paged([300, 140], heads, block_size, dtype).check([(0, 299, 300), (1, 90, 140)])


@pytest.mark.usefixtures("small_tiles")
def test_values_of_another_size_than_keys() -> None:
    paged = Paged([70, 130], (4, 2, 80), 16, torch.float16, value_size=48)
    paged.check([(0, 69, 70), (1, 0, 130)], value_size=48)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("cache_dtype", BYTES)
def test_eight_bit_caches_are_scaled(cache_dtype: torch.dtype) -> None:
    Paged([70, 30], (4, 2, 64), 16, torch.float16, cache_dtype).check([(0, 69, 70), (1, 10, 30)])


@pytest.mark.usefixtures("small_tiles")
def test_bytes_are_taken_for_float8_where_there_is_no_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = Paged([70], (2, 1, 64), 16, torch.float16, torch.float8_e4m3fn)
    expected = paged.attend([(0, 69, 70)])
    monkeypatch.setattr(launch, "capability", lambda device: (8, 0))
    assert torch.equal(paged.attend([(0, 69, 70)]), expected)


@pytest.mark.parametrize(
    ("window", "softcap", "masks_all", "scores"),
    [
        (90, 0.0, True, ()), (0, 0.0, False, ("slopes", "sinks")),
        (0, 0.0, False, ()), (0, 5.0, True, ()),
    ],
)  # fmt: skip
def test_a_row_has_the_same_bits_however_it_is_batched_and_chunked(
    monkeypatch: pytest.MonkeyPatch, window: int, softcap: float, masks_all: bool, scores: tuple[str, ...]
) -> None:
    settings = {name: value.to(DEVICE) for name, value in score_settings(scores, 3).items()}
    use_tiles(monkeypatch, Tiles(32, 16, 4, 1, 2, masks_all))
    first, last = 239, 259  # over a boundary of splits, and the one from which on they are twice as long
    paged = Paged([7, 260, 40], (3, 1, 64), dtype=torch.float16, seed=1)
    whole = paged.attend([(1, first, last)], window, softcap, **settings)
    edges = [first, 240, 256, 257, last]
    chunks = [paged.attend([(1, begin, end)], window, softcap, **settings) for begin, end in pairwise(edges)]
    assert torch.equal(torch.cat(chunks), whole)
    positions = [239, 256, 258]
    decodes = paged.attend([(0, 2, 7), *[(1, p, p + 1) for p in positions], (2, 39, 40)], window, softcap, **settings)
    assert torch.equal(decodes[5:-1], whole[[p - first for p in positions]])
    assert torch.equal(decodes[-1:], paged.attend([(2, 39, 40)], window, softcap, **settings))


@pytest.mark.parametrize(("window", "masks_all", "nested"), [(0, False, True), (90, True, False)])
def test_spans_that_see_ahead_match_the_reference_whatever_their_company(
    monkeypatch: pytest.MonkeyPatch, window: int, masks_all: bool, nested: bool
) -> None:
    """Over tiles of queries and keys, and over splits of keys; a chunk begins within a span, none ends there."""
    use_tiles(monkeypatch, Tiles(32, 16, 4, 1, 2, masks_all, nested))
    paged = Paged([7, 260, 40], (3, 1, 64), dtype=torch.float16, seed=1)
    ends = torch.zeros(260, dtype=torch.int32)
    for begin, end in ((3, 60), (61, 63), (100, 250)):
        ends[begin:end] = end

    def attended(*rows: tuple[int, int, int], check: bool = False) -> Tensor:
        key_ends = torch.cat([ends[begin:end] if s == 1 else ends[:1].repeat(end - begin) for s, begin, end in rows])
        if check:
            paged.check([*rows], window, key_ends=key_ends.to(DEVICE))
        return paged.attend([*rows], window, key_ends=key_ends.to(DEVICE))

    whole = attended((0, 2, 7), (1, 0, 260), (2, 39, 40), check=True)[5:-1]
    chunks = [attended((1, begin, end)) for begin, end in pairwise([0, 61, 80, 250, 259, 260])]
    assert torch.equal(torch.cat(chunks), whole)
    assert torch.equal(attended((2, 39, 40), (1, 249, 260))[1:], whole[249:])
    causal = paged.attend([(1, 0, 260)], window)
    seen = torch.zeros(260, dtype=torch.bool, device=DEVICE)
    seen[[*range(3, 59), 61, *range(100, 249)]] = True
    assert torch.equal((whole != causal).any(1), seen)


@pytest.mark.parametrize(
    ("window", "scores", "masks_all", "nested"),
    [
        (0, (), False, True), (33, (), False, True), (20, (), True, False), (0, ("distance_biases",), False, True),
        (40, ("distance_biases", "softcap"), True, False),
    ],
)  # fmt: skip
def test_attention_both_ways_matches_the_reference_whatever_its_company(
    monkeypatch: pytest.MonkeyPatch, window: int, scores: tuple[str, ...], masks_all: bool, nested: bool
) -> None:
    """Texts of some tiles of queries and keys, and of some splits."""
    use_tiles(monkeypatch, Tiles(32, 16, 4, 1, 2, masks_all, nested))
    settings = score_settings(scores, 2) | {"bidirectional": True}
    settings = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in settings.items()}
    paged = Paged([7, 110, 20], (2, 1, 64), dtype=torch.float16, seed=1)
    together = [(0, 0, 7), (1, 0, 110), (2, 0, 20)]
    paged.check(together, window, **settings)
    whole = paged.attend(together, window, **settings)
    for row, (begin, end) in zip(together, [(0, 7), (7, 117), (117, 137)], strict=True):
        assert torch.equal(paged.attend([row], window, **settings), whole[begin:end])
    # With few rows beside many keys each split is summed by itself.
    rows = [(1, 108, 110), (2, 19, 20)]
    assert torch.equal(paged.attend(rows, window, **settings), whole[[115, 116, 136]])


@pytest.mark.parametrize("head_size", [64, 128])
def test_the_tiles_of_prefill_and_decode_give_the_same_bits(head_size: int) -> None:
    paged = Paged([600, 290], (4, 1, head_size), dtype=torch.float16)
    prefill = paged.attend([(0, 590, 600), (1, 285, 290)])
    assert torch.equal(paged.attend([(0, 599, 600), (1, 287, 288)]), prefill[[9, 12]])


@pytest.mark.usefixtures("small_tiles")
def test_sequences_that_find_no_room_for_partial_sums_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = Paged([300, 100], (3, 1, 64), dtype=torch.float16)
    rows = [(0, 298, 300), (1, 99, 100)]
    split = paged.attend(rows)
    for num_partials in (0, 40):  # of 36 (for two tokens) and 7
        monkeypatch.setattr(kernels, "_WORKSPACE_FLOATS", num_partials * 3 * (64 + 2))
        kernels._workspace.cache_clear()
        assert torch.equal(paged.attend(rows), split)


@pytest.mark.usefixtures("small_tiles")
def test_padded_sequences_and_tokens_are_zeros() -> None:
    paged = Paged([70, 5], (4, 2, 64), dtype=torch.float16)
    query, cache, tables, starts, lengths, scale = paged.arguments([(0, 69, 70), (1, 2, 5)])
    expected = paged_attention(query, cache, tables, starts, lengths, scale)
    query = torch.cat([query, torch.full_like(query, float("nan"))])
    tables = torch.cat([tables, torch.full_like(tables, -1)])
    for ends in ([4, 4], [5, 5]):  # without a row; with one
        padded_starts = torch.cat([starts, starts.new_tensor(ends)])
        padded_lengths = torch.cat([lengths, lengths.new_zeros(2)])
        actual = paged_attention(query, cache, tables, padded_starts, padded_lengths, scale)
        assert torch.equal(actual[:4], expected)
        assert not actual[4:].any()


@pytest.mark.usefixtures("small_tiles")
def test_a_step_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all layers alike, and again where the next step's lengths lie in the same arrays."""
    plans = []

    class Counting:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            plans.append(grid)
            launched: Callable[..., None] = kernel[grid]
            return launched

    kernel = attention_plan._plan_kernel
    monkeypatch.setattr(attention_plan, "_plan_kernel", Counting())
    paged = Paged([70, 5], (4, 2, 64), dtype=torch.float16)
    first, second = (paged.arguments(rows) for rows in ([(0, 69, 70), (1, 4, 5)], [(0, 40, 41), (1, 2, 3)]))
    expected = [paged_attention(*arguments) for arguments in (first, second)]
    starts, lengths = first[3].clone(), first[4].clone()
    plans.clear()
    for number, arguments in enumerate((first, second)):
        lengths.copy_(arguments[4])
        attention_plan.begin_step(starts, lengths)
        for _ in range(3):
            found = paged_attention(*arguments[:3], starts, lengths, arguments[5])
            assert torch.equal(found, expected[number])
        paged_attention(*arguments[:3], starts, lengths, arguments[5], 17)
        assert len(plans) == 2 * (number + 1)


def test_more_sequences_than_are_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, Tiles(16, 16, 4, 1, 2))
    paged = Paged([40, 3, 17, 64, 1], (2, 1, 64), dtype=torch.float16)
    rows = [(s, max(0, length - 5), length) for s, length in enumerate(paged.lengths)]
    expected = paged.attend(rows)
    monkeypatch.setattr(attention_plan, "SEQS_AT_ONCE", 2)
    assert torch.equal(paged.attend(rows), expected)


def test_nothing_is_nothing() -> None:
    empty = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    cache = Paged([5], (2, 1, 64)).cache
    query = torch.zeros(0, 2, 64, device=DEVICE)
    starts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert paged_attention(query, cache, empty.view(0, 1), starts, empty, 1.0).shape == (0, 128)
