"""Turns a model's pooled vectors into a request's: cut, normalized to length 1, or as probabilities. In float32."""

import numpy as np
from numpy.typing import NDArray

from octavo.pooling_params import PoolingParams

_LEAST_LENGTH = 1e-12  # that is divided by, as torch has it


def finished(data: bytes, num_tokens: int, params: PoolingParams) -> NDArray[np.float32]:
    """The vector [size] of a text, or those [num_tokens, size] of its tokens, from their numbers in a row."""
    found = np.frombuffer(data, np.float32).reshape(num_tokens if params.is_by_token else 1, -1)
    if params.dimensions is not None:
        found = found[:, : params.dimensions]
    found = activated(found, params.activation)
    return found if params.is_by_token else found[0]


def activated(x: NDArray[np.float32], activation: str) -> NDArray[np.float32]:
    """x [N, size], each row for itself; see `PoolingParams`."""
    if activation == "normalize":
        lengths = np.sqrt(np.square(x).sum(1, keepdims=True))
        return np.asarray(x / np.maximum(lengths, np.float32(_LEAST_LENGTH)), np.float32)
    if activation == "sigmoid":
        return np.asarray(np.exp(-np.logaddexp(np.float32(0), -x)), np.float32)
    if activation == "softmax":
        powers = np.exp(x - x.max(1, keepdims=True))
        return np.asarray(powers / powers.sum(1, keepdims=True), np.float32)
    return x
