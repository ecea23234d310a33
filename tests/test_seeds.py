"""Random numbers of tests and fixtures follow from their names."""

import random

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests.seeds import seed_of


@pytest.fixture(params=["a", "b"])
def drawn(request: pytest.FixtureRequest) -> tuple[str, float]:
    return request.param, random.random()


def test_a_test_draws_what_its_name_says_whatever_ran_before(request: pytest.FixtureRequest) -> None:
    seed = seed_of(request.node.name)
    assert random.random() == random.Random(seed).random()
    assert np.random.random() == np.random.RandomState(seed).random()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(seed)))


def test_a_fixture_draws_what_its_name_and_parameter_say(drawn: tuple[str, float]) -> None:
    assert drawn[1] == random.Random(seed_of("drawn", drawn[0])).random()


def test_names_are_told_apart_and_their_seeds_stay() -> None:
    assert len({seed_of("a", "b"), seed_of("ab"), seed_of("a"), seed_of("b", "a")}) == 4
    assert seed_of("llama") == 4233760839 and seed_of("no text: \ud800") != seed_of("no text: ")


def test_hypothesis_draws_the_same_examples_in_every_run() -> None:
    assert settings.default.derandomize and settings.default.deadline is None
