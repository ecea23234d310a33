"""Drawing tokens: the native kernel against the reference, over generated distributions and settings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo import _cpu
from tests.ops.draws import is_right_draw, random_numbers
from tests.ops.kernel_cases import generated, random, sampling_settings
from tests.ops.tensors import cpu, torch_ref

KERNELS = "others"  # of an instruction set that are tested here: conftest.py


@generated
@given(rows=st.integers(1, 12), width=st.sampled_from([2, 17, 100, 1000, 5003]), seed=st.integers(0, 10**6))
def test_sample_draws_what_the_reference_draws(isa: str, rows: int, width: int, seed: int) -> None:
    logits = random(seed, rows, width) * 4
    asked = sampling_settings(rows, width, seed)
    drawn = cpu.sample(logits.clone(), **asked)
    for r, token in enumerate(drawn.tolist()):
        assert is_right_draw(logits, asked, r, token), (r, token, {name: value[r] for name, value in asked.items()})


@pytest.mark.parametrize(("top_k", "top_p", "kept"), [(2, 1.0, 4), (0, 0.5, 4), (5, 1.0, 5), (0, 0.93, 5), (0, 1.0, 6)])
def test_equally_likely_tokens_stay_or_go_together(isa: str, top_k: int, top_p: float, kept: int) -> None:
    weights = torch.tensor([0.2, 0.1, 0.2, 0.2, 0.05, 0.2])
    rows = 4000
    uniforms = random_numbers(rows)
    drawn = cpu.sample(
        weights.log().repeat(rows, 1), torch.ones(rows), torch.full((rows,), top_k), torch.full((rows,), top_p),
        torch.zeros(rows), uniforms,
    )  # fmt: skip
    assert drawn.unique().tolist() == sorted(weights.topk(kept).indices.tolist())
    likeliest = weights.topk(kept).indices
    expected = weights[likeliest] / weights[likeliest].sum()
    found = torch.bincount(drawn, minlength=6)[likeliest] / rows
    assert ((found - expected).abs() < 4 * (expected / rows).sqrt()).all()


def test_close_distributions_draw_the_same_token_mostly(isa: str) -> None:
    """And as often as shared exponential numbers make them: Daliri, Musco and Suresh 2024, theorem 3."""
    rows, width = 2000, 700
    logits = random(1, 1, width).repeat(rows, 1) * 2
    other = logits + random(2, 1, width) * 0.2
    settings = [torch.ones(rows), torch.zeros(rows, dtype=torch.int64), torch.ones(rows), torch.zeros(rows)]
    uniforms = random_numbers(rows)
    drawn, drawn_of_other = (cpu.sample(x.clone(), *settings, uniforms) for x in (logits, other))
    p, q = logits[0].double().softmax(-1), other[0].double().softmax(-1)
    distance = float((p - q).abs().sum()) / 2
    expected = float((1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(1)).sum())
    assert expected >= (1 - distance) / (1 + distance)
    assert float((drawn == drawn_of_other).double().mean()) == pytest.approx(expected, abs=0.03)


def test_a_row_draws_the_same_alone_and_among_others(isa: str, threads: None) -> None:
    rows, width = 64, 49152
    logits = random(3, rows, width) * 5
    asked = sampling_settings(rows, width, 3)
    together = cpu.sample(logits.clone(), **asked)
    _cpu.set_threads(1)
    for r in range(0, rows, 7):
        alone = cpu.sample(logits[r : r + 1].clone(), **{name: value[r : r + 1] for name, value in asked.items()})
        assert int(alone) == int(together[r])


def test_a_nucleus_that_nearly_everything_belongs_to(isa: str) -> None:
    width = 49152
    logits = random(1, 1, width) * 0.01
    one = {"temperature": torch.ones(1), "top_k": torch.tensor([0]), "min_p": torch.zeros(1)}
    drawn = cpu.sample(
        logits.repeat(1, 1), **one, top_p=torch.tensor([0.99]), uniforms=torch.tensor([0.999999], dtype=torch.float64)
    )
    probs = logits[0].double().softmax(-1)
    ranked = probs.sort(descending=True)
    outside = set(ranked.indices[int((ranked.values.cumsum(-1) < 0.99).sum()) + 1 :].tolist())
    assert len(outside) > 100
    assert int(drawn) not in outside


def test_rows_without_a_distribution_give_no_token(isa: str) -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.full((6, 33), -inf)
    logits[1, 32] = -3.0
    logits[2] = nan
    logits[3, 5] = inf
    logits[4:] = 1.0
    logits[4, 0] = nan
    logits[5, :3] = -inf
    rows = len(logits)
    settings = (torch.full((rows,), 3), torch.full((rows,), 0.5), torch.zeros(rows))
    uniforms = torch.full((rows,), 1 - 2**-53, dtype=torch.float64)
    drawn = cpu.sample(logits.clone(), torch.ones(rows), *settings, uniforms)
    assert drawn[:5].tolist() == [-1, 32, -1, -1, -1]
    assert 3 <= int(drawn[5]) < 33
    greedy = cpu.sample(logits.clone(), torch.zeros(rows), *settings, uniforms)
    assert greedy.tolist() == [-1, 32, -1, -1, -1, 3] == torch_ref.argmax(logits).tolist()


def test_rows_of_temperature_zero_take_their_argmax_among_others(isa: str) -> None:
    rows, width = 9, 700
    logits = random(3, rows, width) * 5
    asked = sampling_settings(rows, width, 3)
    asked["temperature"][::2] = 0
    drawn = cpu.sample(logits.clone(), **asked)
    assert torch.equal(drawn[::2], logits[::2].argmax(-1))
    asked["temperature"][::2] = 1
    assert torch.equal(drawn[1::2], cpu.sample(logits.clone(), **asked)[1::2])


def test_sums_that_overflow_are_not_taken_for_nan(isa: str) -> None:
    logits = torch.full((2, 70), 3e38)
    logits[:, 33] = -float("inf")
    logits[1, 60] = 3.2e38
    assert cpu.argmax(logits).tolist() == [0, 60]
    one = {name: value[:2] for name, value in sampling_settings(2, 70, 0).items()}
    assert (cpu.sample(logits, **one) >= 0).all()
