"""Weights on their way to a device: what a checkpoint holds, tensor by tensor, in the device's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.loading.weights import Weights
from octavo.ops import QuantizedMatrix


class PlacedWeights:
    """`Weights` whose tensors are on `device`. The host keeps none of them."""

    def __init__(self, weights: Weights, device: torch.device) -> None:
        self._weights = weights
        self._device = device

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._weights.take(name, shape).to(self._device)

    def take_matrix(self, name: str, shape: tuple[int, int]) -> Tensor | QuantizedMatrix:
        matrix = self._weights.take_matrix(name, shape)
        if isinstance(matrix, QuantizedMatrix):
            return QuantizedMatrix(matrix.format, matrix.data.to(self._device), matrix.shape)
        return matrix.to(self._device)

    def check_all_taken(self) -> None:
        self._weights.check_all_taken()

    def close(self) -> None:
        self._weights.close()
