"""Triton's kernels in its interpreter, on the CPU (tests/conftest.py); on the device itself where there is one."""

from __future__ import annotations

import torch

from octavo.ops.triton import products as triton_products
from tests.ops.tensors import OverTensors
from tests.ops.triton import tensor_cores

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
products = OverTensors(triton_products, takes_numpy=False)

if DEVICE.type == "cpu":
    tensor_cores.install()
