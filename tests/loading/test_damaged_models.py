"""Damaged model folders in every format end in an error of one line, or load."""

import pytest

from tests.damaged_models import faults


def test_a_few_damaged_models_are_read_or_refused() -> None:
    assert [*faults(100, 20)] == []


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 2500, 250))
def test_many_damaged_models_are_read_or_refused(first: int) -> None:
    assert [*faults(first, 250)] == []
