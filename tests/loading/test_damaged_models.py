"""Damaged model folders in every format end in an error of one line, or load."""

from pathlib import Path

import pytest

from tests.damaged_models import fault_of, faults, make_damaged


def test_a_few_damaged_models_are_read_or_refused(tmp_path: Path) -> None:
    for seed in range(100, 160):
        path, what = make_damaged(seed, tmp_path / str(seed))
        assert fault_of(path) is None, f"seed {seed}, {what}"


@pytest.mark.long
def test_many_damaged_models_are_read_or_refused() -> None:
    assert [*faults(1000, 1500)] == []
