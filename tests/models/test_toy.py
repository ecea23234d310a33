"""An architecture from outside is a configuration reader and a block; and where a block's norms stand, and whether its
halves are parallel, is a matter of its description.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import LoadError
from octavo.models import registry
from octavo.models.decoder import Decoder
from octavo.models.inventory import required_tensors
from octavo.models.registry import build, describe
from octavo.ops import Ops
from tests.models import toy
from tests.models.driving import ArrayWeights, all_logits

SEQUENCES = [list(range(3, 3 + length)) for length in (1, 12, 40)]


@pytest.fixture
def registered() -> Iterator[None]:
    toy.register_toy()
    yield
    del registry._ARCHITECTURES[toy.ARCHITECTURE]


def assert_equal_logits(found: list[torch.Tensor], plain: toy.PlainToy) -> None:
    for tokens, logits in zip(SEQUENCES, found, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(logits, plain(torch.tensor(tokens)), atol=1e-4, rtol=0)


@pytest.mark.usefixtures("registered")
def test_a_registered_architecture_runs(tmp_path: Path, ops: Ops) -> None:
    plain = toy.save_toy(tmp_path)
    description = describe(json.loads((tmp_path / "config.json").read_text()))
    assert {t.name for t in required_tensors(description)} == set(plain.state_dict())
    weights = ArrayWeights.of(plain)
    model = build(description, weights, ops, 64, "float32")
    weights.check_all_taken()
    found = all_logits(model, ops, SEQUENCES)
    assert_equal_logits(found, plain)

    described = Decoder(description, ArrayWeights.of(plain), ops, 64, "float32")
    for a, b in zip(found, all_logits(described, ops, SEQUENCES), strict=True):
        assert torch.equal(a, b), "the optimisation of products has changed bits"


@pytest.mark.usefixtures("registered")
def test_the_engine_serves_a_registered_architecture(tmp_path: Path, tiny_tokenizer: Path) -> None:
    """Greedy tokens and log-probabilities of the whole engine on the CPU: recorded, chunked, several at once."""
    plain = toy.save_toy(tmp_path)
    llm = LLM(model=str(tmp_path), tokenizer=str(tiny_tokenizer), max_num_batched_tokens=16, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    for prompt, output in zip(
        SEQUENCES, llm.generate([{"prompt_token_ids": tokens} for tokens in SEQUENCES], params), strict=True
    ):
        tokens = list(prompt)
        [completion] = output.outputs
        for token, logprobs in zip(completion.token_ids, completion.logprobs or [], strict=True):
            with torch.no_grad():
                expected = plain(torch.tensor(tokens))[-1].log_softmax(-1)
            assert token == int(expected.argmax())
            assert logprobs[token].logprob == pytest.approx(float(expected[token]), abs=1e-4)
            tokens.append(token)


def test_an_architecture_that_nobody_registered_is_refused() -> None:
    with pytest.raises(LoadError, match="architecture ToyForCausalLM is not built in Octavo itself"):
        describe(toy.CONFIG)


NO_NORM_BEFORE = {"attention_norm": None, "feed_forward_norm": None}
POST_NORMS = {"attention_post_norm": "post_1", "feed_forward_post_norm": "post_2"}


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"before": False, "after": True}, NO_NORM_BEFORE | POST_NORMS),
        ({"after": True}, POST_NORMS),
        ({"parallel": True}, {"parallel_residual": True}),
        ({"parallel": True, "after": True}, {"parallel_residual": True} | POST_NORMS),
        ({"parallel": True, "shared": True}, {"parallel_residual": True, "feed_forward_norm": None}),
    ],
    ids=["norms after", "norms around", "parallel", "parallel, norms around", "parallel, one norm"],
)
def test_norms_stand_and_residuals_are_added_as_described(
    options: dict[str, bool], changes: dict[str, Any], ops: Ops
) -> None:
    torch.manual_seed(1)
    plain = toy.PlainToy(toy.CONFIG, **options)
    description = toy.read_toy(toy.CONFIG)
    layers = tuple(replace(layer, **changes) for layer in description.layers)
    weights = ArrayWeights.of(plain)
    model = Decoder(replace(description, layers=layers), weights, ops, 64, "float32")
    weights.check_all_taken()
    assert_equal_logits(all_logits(model, ops, SEQUENCES), plain)
