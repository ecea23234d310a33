"""Media take no prompt beyond the positions that a model has."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.execution.media_table import grid_positions
from octavo.request import MediaItem, Prompt, num_positions
from octavo.sampling_params import SamplingParams
from tests.entrypoints.fake_engine import MAX_MODEL_LEN, FakeEngine


def media_of(rng: random.Random) -> tuple[int, tuple[MediaItem, ...]]:
    """Tokens of a prompt and its media."""
    place, items = 0, list[MediaItem]()
    for _ in range(rng.randint(1, 4)):
        place += rng.randint(0, 5)
        grid = (rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 4))
        step = rng.choice([1.0, 0.3, 2.5, 25.0, 333.33, 25_000.0])
        num_tokens = grid[0] * grid[1] * grid[2]
        items.append(MediaItem(place, num_tokens, b"x", grid=grid, time_step=step))
        place += num_tokens
    return place + rng.randint(0, 5), tuple(items)


def test_positions_are_counted_as_they_are_given() -> None:
    rng = random.Random(4)
    for _ in range(300):
        num_tokens, items = media_of(rng)
        positions, shift = grid_positions(items)
        last = max(int(positions.max()) + 1, num_tokens + shift)
        assert num_positions(num_tokens, items) == max(last, num_tokens), items


@pytest.mark.parametrize("step", [170.0, 1e9, float("inf")])
def test_a_prompt_whose_times_lie_too_far_apart_is_refused(
    tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    inputs = FakeEngine(tiny_tokenizer).inputs

    def make(time_step: float, **fields: Any) -> int:
        item = MediaItem(1, 4, b"x", grid=(4, 1, 1), time_step=time_step)
        prompt = Prompt([1] * 10, None, media=(item,))
        monkeypatch.setattr(inputs, "_make_prompt", lambda *_: (prompt, []))
        return inputs.process("x", SamplingParams(**fields)).max_tokens

    assert make(100.0, max_tokens=None) == MAX_MODEL_LEN - (10 + 301 - 4)
    with pytest.raises(RequestError, match="media take it to position"):
        make(step)
