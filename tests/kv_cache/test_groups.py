"""From what layers keep to groups and pools."""

from __future__ import annotations

import pytest

from octavo.kv_cache.groups import LayerCacheSpec, group_layers

FULL = LayerCacheSpec("full", num_kv_heads=4, key_size=64, value_size=64)
WINDOW = LayerCacheSpec("window", num_kv_heads=4, key_size=64, value_size=64, window=512)
STATE = LayerCacheSpec("state", num_bytes=4096)


def grouped(*specs: LayerCacheSpec) -> list[tuple[str, tuple[int, ...], int]]:
    return [(group.spec.kind, group.layers, group.pool) for group in group_layers(specs)]


def test_equal_layers_are_one_group() -> None:
    assert grouped(*[FULL] * 30) == [("full", tuple(range(30)), 0)]


def test_groups_with_equally_large_blocks_share_a_pool_in_parts_of_the_size_of_the_smallest() -> None:
    assert grouped(*[WINDOW, WINDOW, FULL] * 2) == [
        ("window", (0, 1), 0), ("full", (2, 5), 0), ("window", (3, 4), 0)
    ]  # fmt: skip
    assert grouped(*[WINDOW] * 5, *[FULL] * 2) == [
        ("window", (0, 1), 0), ("window", (2, 3), 0), ("window", (4,), 0), ("full", (5, 6), 0)
    ]  # fmt: skip


def test_a_group_that_is_hardly_larger_is_not_split() -> None:
    assert grouped(*[WINDOW] * 11, *[FULL] * 10) == [("window", tuple(range(11)), 0), ("full", tuple(range(11, 21)), 0)]


def test_blocks_of_another_form_have_a_pool_of_their_own() -> None:
    other_heads = LayerCacheSpec("full", num_kv_heads=2, key_size=128, value_size=128)  # of as many bytes
    wide_values = LayerCacheSpec("full", num_kv_heads=4, key_size=64, value_size=128)
    assert [pool for _, _, pool in grouped(FULL, other_heads, wide_values, STATE, WINDOW)] == [0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    "sizes", [{"kind": "full", "window": 3}, {"kind": "window"}, {"kind": "state"}, {"kind": "cross"}]
)
def test_a_spec_says_what_its_kind_needs(sizes: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        LayerCacheSpec(**sizes)  # type: ignore[arg-type]
