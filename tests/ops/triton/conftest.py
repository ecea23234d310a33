"""Triton's kernels in its interpreter, on the CPU (tests/conftest.py); on the device itself where there is one."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
