"""Whether a token is what the reference draws, as far as rounding lets one know."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.tensors import torch_ref


def is_right_draw(logits: Tensor, asked: dict[str, Tensor], r: int, token: int) -> bool:
    """Of row r. The reference answers for limits a little to either side too: float32 and float64 sums differ there;
    and of two tokens that come out nearly equal either is right."""
    one = {name: value[r : r + 1] for name, value in asked.items()}
    nearby = []
    for shift in (-1e-5, 0.0, 1e-5):
        shifted = one | {"top_p": one["top_p"] * (1 + shift), "min_p": one["min_p"] * (1 - shift)}
        nearby.append(int(torch_ref.sample(logits[r : r + 1], **shifted)))
    if token in nearby:
        return True
    weights = ((logits[r] - logits[r].max()) / asked["temperature"][r]).double().softmax(-1)
    times = torch_ref.exponentials(float(asked["uniforms"][r]), len(weights)) / weights
    return any(abs(float(times[token] / times[other]) - 1) < 1e-4 for other in nearby)


def random_numbers(count: int) -> Tensor:
    """Numbers in [0, 1), as `octavo.sampling.random` makes them."""
    return torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
