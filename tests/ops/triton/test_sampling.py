"""Choosing tokens: Triton's kernels against the reference, with chunks small enough that a row has several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo.ops.triton import sampling
from octavo.ops.triton.sampling import argmax, sample
from tests.ops.draws import is_right_draw, random_numbers
from tests.ops.kernel_cases import generated_few, random, sampling_settings
from tests.ops.tensors import torch_ref
from tests.ops.triton.conftest import DEVICE

pytestmark = pytest.mark.long

INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_CHUNK", 64)
        patch.setattr(sampling, "_PIECE", 8)
        patch.setattr(sampling, "_TILE", 256)
        yield


def draw(logits: Tensor, **asked: Tensor) -> Tensor:
    moved = {name: value.to(DEVICE) for name, value in asked.items()}
    return sample(logits.clone().to(DEVICE), **moved).cpu()


def one_setting(
    rows: int, uniforms: Tensor, t: float = 1.0, k: int = 0, p: float = 1.0, m: float = 0.0
) -> dict[str, Tensor]:
    return {
        "temperature": torch.full((rows,), t),
        "top_k": torch.full((rows,), k),
        "top_p": torch.full((rows,), p),
        "min_p": torch.full((rows,), m),
        "uniforms": uniforms,
    }


@generated_few
@given(rows=st.integers(1, 4), width=st.sampled_from([2, 17, 64, 100, 257, 1000]), seed=st.integers(0, 10**6))
def test_sample_draws_what_the_reference_draws(rows: int, width: int, seed: int) -> None:
    logits = random(seed, rows, width) * 4
    asked = sampling_settings(rows, width, seed)
    for r, token in enumerate(draw(logits, **asked).tolist()):
        assert is_right_draw(logits, asked, r, token), (r, token, {name: value[r] for name, value in asked.items()})


@pytest.mark.parametrize(
    ("k", "p", "m", "t"),
    [(0, 1.0, 0.0, 1.0), (5, 1.0, 0.0, 1.0), (0, 0.8, 0.0, 1.0), (30, 0.9, 0.0, 0.7), (9, 0.7, 0.1, 2.0)],
)
def test_many_numbers_draw_what_the_reference_draws(k: int, p: float, m: float, t: float) -> None:
    rows, width = 10, 120
    logits = (random(7, 1, width) * 2).repeat(rows, 1)
    asked = one_setting(rows, random_numbers(rows), t, k, p, m)
    drawn = draw(logits, **asked).tolist()
    assert all(is_right_draw(logits, asked, r, token) for r, token in enumerate(drawn))
    assert len(set(drawn)) > 2


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (2, 1.0, 4), (0, 0.5, 4), (0, 1.0, 6),
        (5, 1.0, 5), (0, 0.93, 5),
    ],
)  # fmt: skip
def test_equally_likely_tokens_stay_or_go_together(top_k: int, top_p: float, kept: int) -> None:
    weights = torch.tensor([0.2, 0.1, 0.2, 0.2, 0.05, 0.2])
    rows = 80
    drawn = draw(weights.log().repeat(rows, 1), **one_setting(rows, random_numbers(rows), k=top_k, p=top_p))
    assert drawn.unique().tolist() == sorted(weights.topk(kept).indices.tolist())


def test_rows_that_are_all_equal() -> None:
    rows, width = 4, 120
    uniforms = random_numbers(rows)
    first = [int(torch_ref.exponentials(float(number), width).argmin()) for number in uniforms]
    for limits in ({}, {"k": 3}, {"p": 0.25}, {"m": 1.0}):
        drawn = draw(torch.full((rows, width), -3.5), **one_setting(rows, uniforms, **limits))
        assert drawn.tolist() == first, limits


def test_the_smallest_and_the_largest_number_draw_allowed_tokens() -> None:
    logits = random(5, 1, 300) * 3
    uniforms = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    logits[0, :100] = -INF
    logits[0, -70:] = -INF
    for limits in ({}, {"k": 3}):
        asked = one_setting(2, uniforms, **limits)
        drawn = draw(logits.repeat(2, 1), **asked).tolist()
        assert all(is_right_draw(logits.repeat(2, 1), asked, r, token) for r, token in enumerate(drawn))


def test_one_token_is_left_of_top_k_1_a_tiny_top_p_and_a_tiny_temperature() -> None:
    logits = random(6, 1, 500)
    best, half = int(logits.argmax()), torch.tensor([0.5], dtype=torch.float64)
    for limits in ({"k": 1}, {"p": 1e-6}, {"m": 1.0}, {"t": 1e-6}, {"t": 1e-45}, {"t": 0.0}, {"t": 1e30, "k": 1}):
        assert draw(logits, **one_setting(1, half, **limits)).tolist() == [best], limits


def test_a_top_k_beyond_the_vocabulary_and_beyond_the_pieces_of_a_row() -> None:
    logits, half = random(8, 1, 890), torch.tensor([0.5], dtype=torch.float64)
    for k in (112, 113, 889, 890, 10**9):
        asked = one_setting(1, half, k=k)
        assert draw(logits, **asked).tolist() == torch_ref.sample(logits, **asked).tolist()


@pytest.mark.parametrize("limits", [{}, {"k": 2}, {"p": 0.5}])
def test_odd_rows(limits: dict[str, float]) -> None:
    logits = torch.full((6, 133), -INF)
    logits[1, 132] = -3.0
    logits[2] = NAN
    logits[3, 5] = INF
    logits[4] = 1.0
    logits[4, 0] = NAN
    logits[5, 77] = -1e30
    asked = one_setting(6, torch.full((6,), 1 - 2**-53, dtype=torch.float64), **limits)
    assert draw(logits, **asked).tolist() == [-1, 132, -1, -1, -1, 77]
    assert draw(logits, **asked | {"temperature": torch.zeros(6)}).tolist() == [-1, 132, -1, -1, -1, 77]
    assert argmax(logits.to(DEVICE)).tolist() == [-1, 132, -1, -1, -1, 77]
    assert torch_ref.argmax(logits).tolist() == [-1, 132, -1, -1, -1, 77]


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    rows, width = 9, 300
    logits = random(3, rows, width) * 5
    asked = sampling_settings(rows, width, 3)
    asked["temperature"][::5] = 0
    together = draw(logits, **asked)
    assert torch.equal(together[::5], logits[::5].argmax(-1))
    for r in range(1, rows, 4):
        assert int(draw(logits[r : r + 1], **{name: value[r : r + 1] for name, value in asked.items()})) == together[r]


@generated_few
@given(rows=st.integers(1, 4), width=st.sampled_from([1, 7, 64, 65, 1000]), seed=st.integers(0, 10**6))
def test_argmax(rows: int, width: int, seed: int) -> None:
    logits = (random(seed, rows, 2 * width)[:, width:] * 2).round()  # with ties
    assert torch.equal(argmax(logits.to(DEVICE)).cpu(), logits.argmax(-1))


def test_chunks_of_the_real_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("_CHUNK", 4096), ("_PIECE", 256), ("_TILE", 4096)):
        monkeypatch.setattr(sampling, name, size)
    logits = random(9, 3, 49152) * 4
    asked = sampling_settings(3, 49152, 9)
    for r, token in enumerate(draw(logits, **asked).tolist()):
        assert is_right_draw(logits, asked, r, token)
    assert torch.equal(argmax(logits.to(DEVICE)).cpu(), logits.argmax(-1))
