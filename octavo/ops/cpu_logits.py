"""Logits [N, V] to tokens on the native backend: what changes them, choosing, and measuring.

`argmax` may be part of a recorded step. All others run between steps, on a few rows and lists. Log-probabilities are
torch's, whose sums and order of equals are the ones that answers have had so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.ops.cpu_arrays import FLOAT32, FLOAT64, INT64, is_dense, stride
from octavo.ops.cpu_program import check_inputs, check_runs_now, empty


def argmax(logits: NDArray[Any]) -> NDArray[Any]:
    if logits.dtype != FLOAT32:
        raise TypeError(f"argmax reads float32, not {logits.dtype}.")
    rows, width = logits.shape
    assert is_dense(logits)
    assert 0 < width < 1 << 24
    check_inputs("argmax", logits=logits)
    out = empty((rows,), INT64)
    _cpu.argmax(logits, stride(logits), rows, width, out)
    return out


def sample(
    logits: NDArray[Any], temperature: NDArray[Any], top_k: NDArray[Any], top_p: NDArray[Any], min_p: NDArray[Any],
    uniforms: NDArray[Any],
) -> NDArray[Any]:  # fmt: skip
    check_runs_now("sample")
    rows, width = logits.shape
    assert logits.dtype == FLOAT32 and is_dense(logits)
    assert 0 < width < 1 << 24
    for array, dtype in (
        (temperature, FLOAT32),
        (top_k, INT64),
        (top_p, FLOAT32),
        (min_p, FLOAT32),
        (uniforms, FLOAT64),
    ):
        assert array.dtype == dtype and array.shape == (rows,) and is_dense(array)
    out = np.empty(rows, np.int64)
    _cpu.sample(logits, stride(logits), rows, width, temperature, top_k, top_p, min_p, uniforms, out)
    return out


def mask_tokens(logits: NDArray[Any], words: NDArray[Any], samples: NDArray[Any]) -> None:
    check_runs_now("mask_tokens")
    assert logits.dtype == FLOAT32 and is_dense(logits)
    assert words.itemsize == 4 and is_dense(words)
    assert samples.dtype == INT64 and samples.shape == words.shape[:1] and is_dense(samples)
    rows, width = logits.shape
    _cpu.mask_tokens(
        logits, stride(logits), rows, width, words, stride(words), words.shape[1], samples, len(samples)
    )  # fmt: skip


def add_bias(logits: NDArray[Any], samples: NDArray[Any], tokens: NDArray[Any], values: NDArray[Any]) -> None:
    check_runs_now("add_bias")
    logits[samples, tokens] += values


def penalize(
    logits: NDArray[Any], samples: NDArray[Any], tokens: NDArray[Any], counts: NDArray[Any],
    repetition: NDArray[Any], frequency: NDArray[Any], presence: NDArray[Any],
) -> None:  # fmt: skip
    check_runs_now("penalize")
    places = (samples, tokens)
    values, penalty = logits[places], repetition[samples]
    values = np.where(values > 0, values / penalty, values * penalty)
    logits[places] = values - (frequency[samples] * counts + presence[samples] * (counts > 0))


def logprobs(
    logits: NDArray[Any], tokens: NDArray[Any], num_top: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    check_runs_now("logprobs")
    import torch

    from octavo.ops import torch_ops

    values, ranks, top, top_values = torch_ops.logprobs(torch.from_numpy(logits), torch.from_numpy(tokens), num_top)
    return values.numpy(), ranks.numpy(), top.numpy(), top_values.numpy()


def normalize(logits: NDArray[Any], samples: NDArray[Any], temperatures: NDArray[Any]) -> None:
    check_runs_now("normalize")
    import torch

    from octavo.ops import torch_ops

    torch_ops.normalize(torch.from_numpy(logits), samples, temperatures)


def top_tokens(logits: NDArray[Any], samples: NDArray[Any], count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    check_runs_now("top_tokens")
    import torch

    from octavo.ops import torch_ops

    top, values = torch_ops.top_tokens(torch.from_numpy(logits), samples, count)
    return top.numpy(), values.numpy()


def rows_of(x: NDArray[Any], samples: NDArray[Any]) -> NDArray[Any]:
    check_runs_now("rows_of")
    found: NDArray[Any] = x[samples]
    return found


def process_row(logits: NDArray[Any], sample: int, function: Callable[[Any], Any]) -> bool:
    check_runs_now("process_row")
    import torch

    from octavo.ops import torch_ops

    return torch_ops.process_row(torch.from_numpy(logits), sample, function)
