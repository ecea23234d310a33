"""From logits [N, V] to tokens on the native backend: masks and penalties, sampling, log-probabilities.

`argmax` may be part of a recorded step. All other functions run between steps, on a few rows and lists.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.ops.cpu_arrays import FLOAT32, FLOAT64, INT64, is_dense, require, stride
from octavo.ops.cpu_program import check_inputs, check_runs_now, empty


def argmax(logits: NDArray[Any]) -> NDArray[Any]:
    if logits.dtype != FLOAT32:
        raise TypeError(f"argmax reads float32, not {logits.dtype}.")
    rows, width = logits.shape
    require(is_dense(logits))
    require(0 < width < 1 << 24)
    check_inputs("argmax", logits=logits)
    out = empty((rows,), INT64)
    _cpu.argmax(x=logits, stride=stride(logits), rows=rows, width=width, out=out)
    return out


def sample(
    logits: NDArray[Any], temperature: NDArray[Any], top_k: NDArray[Any], top_p: NDArray[Any], min_p: NDArray[Any],
    uniforms: NDArray[Any],
) -> NDArray[Any]:  # fmt: skip
    check_runs_now("sample")
    rows, width = logits.shape
    require(logits.dtype == FLOAT32 and is_dense(logits))
    require(0 < width < 1 << 24)
    for array, dtype in (
        (temperature, FLOAT32),
        (top_k, INT64),
        (top_p, FLOAT32),
        (min_p, FLOAT32),
        (uniforms, FLOAT64),
    ):
        require(array.dtype == dtype and array.shape == (rows,) and is_dense(array))
    out = np.empty(rows, np.int64)
    _cpu.sample(
        logits=logits, stride=stride(logits), rows=rows, width=width, temperature=temperature, top_k=top_k,
        top_p=top_p, min_p=min_p, uniforms=uniforms, out=out,
    )  # fmt: skip
    return out


def mask_tokens(logits: NDArray[Any], words: NDArray[Any], samples: NDArray[Any]) -> None:
    check_runs_now("mask_tokens")
    require(logits.dtype == FLOAT32 and is_dense(logits))
    require(words.itemsize == 4 and is_dense(words))
    require(samples.dtype == INT64 and samples.shape == words.shape[:1] and is_dense(samples))
    rows, width = logits.shape
    _cpu.mask_tokens(
        logits=logits, stride=stride(logits), rows=rows, width=width, words=words, words_stride=stride(words),
        num_words=words.shape[1], samples=samples, masks=len(samples),
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
    samples, chosen = np.arange(len(logits)), np.maximum(tokens, 0)
    sums = _log_sums(logits, samples, np.ones(len(logits), np.float32))
    ranks, top, top_values = _rank(logits, samples, num_top, chosen)
    values = (logits[samples, chosen] - sums).astype(np.float32)
    return values, ranks, top, (top_values - sums[:, None]).astype(np.float32)


def logprobs_of(logits: NDArray[Any], samples: NDArray[Any], tokens: NDArray[Any]) -> NDArray[Any]:
    check_runs_now("logprobs_of")
    sums = _log_sums(logits, samples, np.ones(len(samples), np.float32))
    values: NDArray[Any] = (logits[samples[:, None], tokens] - sums[:, None]).astype(np.float32)
    return values


def normalize(logits: NDArray[Any], samples: NDArray[Any], temperatures: NDArray[Any]) -> None:
    check_runs_now("normalize")
    divisors = temperatures.astype(np.float32)
    sums = _log_sums(logits, samples, divisors)
    for sample, divisor, log_sum in zip(samples.tolist(), divisors.tolist(), sums.tolist(), strict=True):
        row = logits[sample]
        np.subtract(row / np.float32(divisor), np.float64(log_sum), out=row, dtype=np.float64, casting="same_kind")


def top_tokens(logits: NDArray[Any], samples: NDArray[Any], count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    check_runs_now("top_tokens")
    _, top, values = _rank(logits, samples, count)
    return top, values


def _log_sums(logits: NDArray[Any], samples: NDArray[Any], temperatures: NDArray[Any]) -> NDArray[np.float64]:
    """Return log(sum(exp(logits[samples] / temperatures))) for `samples` [M]: [M] float64."""
    rows, width = logits.shape
    require(logits.dtype == FLOAT32 and is_dense(logits))
    require(samples.dtype == INT64 and is_dense(samples))
    require(temperatures.dtype == FLOAT32 and temperatures.shape == samples.shape and is_dense(temperatures))
    out = np.empty(len(samples))
    _cpu.log_sums(
        logits=logits, stride=stride(logits), rows=rows, width=width, samples=samples,
        temperatures=temperatures, num_samples=len(samples), out=out,
    )  # fmt: skip
    return out


def _rank(
    logits: NDArray[Any], samples: NDArray[Any], num_top: int, tokens: NDArray[Any] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Return, for each of `samples` [M], the rank of its token (if `tokens` [M] is given), and the ids and values of
    its K = min(num_top, V) largest logits: [M], [M, K] and [M, K]."""
    rows, width = logits.shape
    require(logits.dtype == FLOAT32 and is_dense(logits))
    require(samples.dtype == INT64 and is_dense(samples))
    require(tokens is None or (tokens.dtype == INT64 and tokens.shape == samples.shape and is_dense(tokens)))
    count = min(num_top, width)
    ranks = np.empty(len(samples), np.int64)
    top, values = np.empty((len(samples), count), np.int64), np.empty((len(samples), count), np.float32)
    given = 0 if tokens is None else tokens
    _cpu.rank(
        logits=logits, stride=stride(logits), rows=rows, width=width, samples=samples, num_samples=len(samples),
        tokens=given, ranks=ranks, count=count, top=top, top_values=values,
    )  # fmt: skip
    return ranks, top, values


def rows_of(x: NDArray[Any], samples: NDArray[Any]) -> NDArray[Any]:
    check_runs_now("rows_of")
    found: NDArray[Any] = x[samples]
    return found


def process_row(logits: NDArray[Any], sample: int, function: Callable[[Any], Any]) -> bool:
    check_runs_now("process_row")
    row = logits[sample]
    if _torch_is_installed():
        from octavo.ops import torch_arrays, torch_ops

        return torch_ops.process_row(torch_arrays.to_torch(logits), sample, function)
    row[:] = function(row)
    return bool(np.isnan(row).any())


@cache
def _torch_is_installed() -> bool:
    return find_spec("torch") is not None
