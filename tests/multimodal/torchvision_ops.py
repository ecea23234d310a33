"""A plugin of pytest: lets torchvision be imported where its compiled operators are for another build of torch.

The processors of models use none of them. Of their names two are asked for as torchvision is imported.
"""

from __future__ import annotations

import sys

import torch

try:
    import torchvision
except RuntimeError:  # operator torchvision::nms does not exist
    for module in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[module]
    OPERATORS = torch.library.Library("torchvision", "DEF")
    OPERATORS.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    OPERATORS.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401
