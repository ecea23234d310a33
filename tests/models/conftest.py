"""The backend of these tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ops import torch_ref


@pytest.fixture
def ops() -> Any:
    return torch_ref
