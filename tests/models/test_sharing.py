"""A model shared out among workers gives the logits of the whole one, for every architecture's settings.

The workers are threads here, and what they exchange goes from one to the other; `tests.execution.test_team` has real
ones.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo.errors import ConfigError
from octavo.layers.attention import AttentionDescription
from octavo.layers.share import Share
from octavo.models.description import ModelDescription
from octavo.models.registry import build, describe
from octavo.models.sharing import with_share
from octavo.ops import Ops
from tests.models.driving import ArrayWeights, all_logits
from tests.models.small_models import MODELS, VOCAB

# What is refused, and the reason.
REFUSED = {
    "stablelm": "norms of all query or key heads", "olmo 2": "norms of all query or key heads",
    "olmo 3": "norms of all query or key heads", "cohere": "norms of all query or key heads",
    "bitnet": "a norm before the output of attention",
    "opt, projections, norms after": "a network before the output matrix",
    "modernbert decoder": "a network before the output matrix",
    "llama ratio 3, head 64, tied": "cannot share out 3 attention heads; these sizes could: 1, 3",
}  # fmt: skip


class Exchange:
    """The operations of one of several threads."""

    def __init__(self, ops: Ops, rank: int, barrier: Barrier, given: list[Any]) -> None:
        self._ops, self._rank, self._barrier, self._given = ops, rank, barrier, given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[self._rank] = x.clone()
        self._barrier.wait(60)
        given = list(self._given)
        self._barrier.wait(60)
        return given

    def all_reduce(self, x: torch.Tensor) -> None:
        x.copy_(sum(self._exchange(x)))

    def all_gather(self, x: torch.Tensor, begin: int, width: int) -> torch.Tensor:
        given = self._exchange(x)
        assert sum(part.shape[1] for part in given[: self._rank]) == begin
        gathered = torch.cat(given, 1)
        assert gathered.shape == (len(x), width)
        return gathered


def shared_logits(
    description: ModelDescription, arrays: dict[str, Any], ops: Ops, size: int, sequences: list[list[int]]
) -> list[list[torch.Tensor]]:
    """By worker: logits of each sequence."""
    barrier, given = Barrier(size), [None] * size

    def work(rank: int) -> list[torch.Tensor]:
        try:
            own: Any = Exchange(ops, rank, barrier, given)
            weights = ArrayWeights(arrays)
            model = build(with_share(description, Share(rank, size)), weights, own, 128, "float32")
            return all_logits(model, own, sequences)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


@pytest.mark.parametrize("name", MODELS)
def test_a_shared_model_gives_the_logits_of_the_whole(name: str, ops: Ops, tmp_path: Path) -> None:
    model = MODELS[name]
    model.save(model.reference(seed=1), tmp_path)
    description = describe(json.loads((tmp_path / "config.json").read_text()))
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            with_share(description, Share(1, 2))
        return
    arrays = {n: tensor.numpy() for n, tensor in load_file(tmp_path / "model.safetensors").items()}
    sequences = [torch.randint(3, VOCAB, (length,)).tolist() for length in (1, 9, 33)]
    whole = all_logits(build(description, ArrayWeights(arrays), ops, 128, "float32"), ops, sequences)
    for of_worker in shared_logits(description, arrays, ops, 2, sequences):
        for found, expected in zip(of_worker, whole, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_few_heads_of_keys_are_several_workers(ops: Ops, tmp_path: Path) -> None:
    model = MODELS["llama, all biases"]
    model.save(model.reference(seed=2), tmp_path)
    description = describe(json.loads((tmp_path / "config.json").read_text()))
    arrays = {n: tensor.numpy() for n, tensor in load_file(tmp_path / "model.safetensors").items()}
    sequences = [torch.randint(3, VOCAB, (length,)).tolist() for length in (2, 20)]
    attention = with_share(description, Share(3, 4)).layers[0].attention
    assert isinstance(attention, AttentionDescription)
    assert (attention.own_heads, attention.own_kv_heads) == (range(3, 4), range(1, 2))
    whole = all_logits(build(description, ArrayWeights(arrays), ops, 128, "float32"), ops, sequences)
    for of_worker in shared_logits(description, arrays, ops, 4, sequences):
        for found, expected in zip(of_worker, whole, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
