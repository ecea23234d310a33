"""Triton's kernels in its interpreter, on the CPU; on the device itself where there is one."""

from __future__ import annotations

import os

import torch

# Read when a kernel is defined, so it must be set before any module of kernels is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
