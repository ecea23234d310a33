"""Damaged model folders in every format end in an error of one line, or load."""

import pytest

from tests.damaged_models import faults


def test_a_few_damaged_models_are_read_or_refused() -> None:
    assert [*faults(100, 20)] == []


@pytest.mark.long
def test_many_damaged_models_are_read_or_refused() -> None:
    assert [*faults(1000, 1500)] == []
