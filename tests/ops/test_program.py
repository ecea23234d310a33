"""Recorded steps: they replay what operations computed, and nothing else can be computed while they are made."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo import _cpu
from octavo.ops import cpu
from octavo.ops.cpu_program import Program
from octavo.quantization import StoredWeight

ROWS, WIDTH = 12, 64


def array(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def weight(seed: int, n: int = WIDTH, k: int = WIDTH) -> cpu.PackedWeight:
    return cpu.pack_linear([StoredWeight("F32", {"data": array(seed, n, k)}, (n, k))])


class Step:
    """A small model of learned positions, layer norm and GELU, written once."""

    def __init__(self) -> None:
        self.embedding, self.up, self.down, self.output = weight(0, 50), weight(1), weight(2), weight(3, 50)
        self.table, self.scale, self.bias = array(4, 30, WIDTH), array(5, WIDTH), array(6, WIDTH)

    def forward(self, token_ids: Any, positions: Any) -> Any:
        residual = cpu.embedding(token_ids, self.embedding)
        cpu.add(residual, cpu.take_rows(self.table, positions))
        for _ in range(3):
            hidden = cpu.layer_norm(residual, self.scale, self.bias, 1e-5)
            cpu.add(residual, cpu.linear(cpu.activation(cpu.linear(hidden, self.up), "gelu"), self.down), 0.5)
        return residual

    def logits(self, hidden: Any) -> Any:
        return cpu.linear(hidden, self.output)


def test_a_replayed_step_computes_what_calls_do_for_any_number_of_rows(threads: None) -> None:
    model, program = Step(), Program()
    token_ids, positions = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int64)
    sample_rows = np.zeros(4, np.int64)
    with program.record(per_sample=False):
        hidden = model.forward(program.input(token_ids), program.input(positions))
    with program.record(per_sample=True):
        logits = model.logits(cpu.take_rows(hidden, program.input(sample_rows)))
        best = cpu.argmax(logits)
    hidden, logits, best = (program.output(x) for x in (hidden, logits, best))
    for num_threads, count, num_samples in [(1, ROWS, 4), (2, 5, 1), (1, 1, 0), (2, 7, 3)]:
        _cpu.set_threads(num_threads)
        token_ids[:count] = np.arange(count) * 7 % 50
        positions[:count] = np.arange(count) + 3
        sample_rows[:num_samples] = np.arange(num_samples)
        program.run(count, 0, num_samples)
        expected = model.forward(token_ids[:count], positions[:count])
        assert np.array_equal(hidden[:count], expected)
        expected = model.logits(expected[:num_samples])
        assert np.array_equal(logits[:num_samples], expected)
        assert best[:num_samples].tolist() == expected.argmax(-1).tolist()
    names = [name for name, _ in program.profile(3, 0, 1)]
    assert names[:4] == ["embedding", "take_rows", "add", "layer_norm"] and "activation" in names


def test_indices_and_numbers_of_rows_are_checked_when_a_step_runs() -> None:
    model, program = Step(), Program()
    token_ids, positions = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int64)
    with program.record(per_sample=False):
        model.forward(program.input(token_ids), program.input(positions))
    positions[2] = 30
    program.run(2, 0, 0)
    with pytest.raises(IndexError, match="row 30 at index 2"):
        program.run(3, 0, 0)
    token_ids[1] = 50
    with pytest.raises(IndexError, match="token id 50 at index 1"):
        program.run(2, 0, 0)
    with pytest.raises(ValueError, match=f"{ROWS + 1} rows was asked of a program that was recorded with {ROWS}"):
        program.run(ROWS + 1, 0, 0)


def test_buffers_live_as_long_as_an_array_over_them_and_are_used_again_then() -> None:
    program, x = Program(), np.zeros((ROWS, WIDTH), np.float32)
    with program.record(per_sample=False):
        step = program.input(x)
        first = cpu.activation(step, "relu")
        part = first.reshape(ROWS, 4, 16)[:, 1:3]
        address = first.ctypes.data
        del first
        assert cpu.activation(step, "relu").ctypes.data != address, "a view keeps the buffer"
        del part
        assert address in {x.ctypes.data for x in [cpu.activation(step, "relu"), cpu.activation(step, "relu")]}


REFUSED: dict[str, Callable[[Any], object]] = {
    "numpy.add": lambda x: x + 1,
    "numpy.multiply": lambda x: 2.0 * x,
    "numpy.matmul": lambda x: x @ np.ones((WIDTH, 2), np.float32),
    "numpy.greater": lambda x: x > 0,
    "numpy.exp": np.exp,
    "numpy.negative": lambda x: -x,
    "numpy.concatenate": lambda x: np.concatenate([x, x]),
    "numpy.where": lambda x: np.where(x, x, x),
    "numpy.mean": np.mean,
    "numpy.stack": lambda x: np.stack([x]),
    "ndarray.sum": lambda x: x.sum(),
    "ndarray.astype": lambda x: x.astype(np.float64),
    "ndarray.copy": lambda x: x.copy(),
    "ndarray.tolist": lambda x: x.tolist(),
    "ndarray.item": lambda x: x[0, :1].item(),
    "ndarray.fill": lambda x: x.fill(0),
    "ndarray.ravel": lambda x: x.ravel(),
    "ndarray.flatten": lambda x: x.flatten(),
    "ndarray.take": lambda x: x.take([0], 0),
    "ndarray.argmax": lambda x: x.argmax(),
    "ndarray.__setitem__": lambda x: x.__setitem__(0, 1.0),
    "ndarray.__float__": lambda x: float(x[0, :1]),
    "ndarray.__bool__": lambda x: bool(x[0, :1]),
    "ndarray.__iter__": lambda x: list(x),
    "ndarray.__contains__": lambda x: 1.0 in x,
    "ndarray.__deepcopy__": copy.deepcopy,
    "indexing by arrays": lambda x: x[np.array([0, 1])],
    "indexing by arrays or lists": lambda x: x[[0, 1]],
    "reading an element": lambda x: x[0, 0],
    "reshape, where it has to copy": lambda x: x[:, :3].reshape(-1),
}


@pytest.mark.parametrize("operation", REFUSED)
def test_what_is_not_an_operation_is_refused_by_name(operation: str) -> None:
    program, x = Program(), np.ones((ROWS, WIDTH), np.float32)
    with program.record(per_sample=False):
        step = program.input(x)
        for part in (step, cpu.activation(step, "silu")):
            with pytest.raises(RuntimeError, match=rf"^{operation}.* was called on an array of a recorded step.*ops"):
                REFUSED[operation](part)


def test_in_place_additions_are_refused_too() -> None:
    program = Program()
    step = program.input(np.ones((ROWS, WIDTH), np.float32))
    with pytest.raises(RuntimeError, match=r"^numpy\.add was called"):
        step += 1


def test_views_and_facts_are_fine() -> None:
    program, x = Program(), np.ones((ROWS, 6, 16), np.float32)
    with program.record(per_sample=False):
        step = program.input(x)
        view = step.reshape(-1, 96)[:, 32:].reshape(ROWS, 4, 16)[2:5, :2]
        assert isinstance(view, type(step)) and np.shares_memory(program.output(view), x)
        assert (view.shape, view.dtype, len(view), view.nbytes) == ((3, 2, 16), np.float32, 3, 384)
        assert step[..., None].ndim == 4 and "StepArray" in repr(view)
        assert cpu.rms_norm(view, np.ones(16, np.float32), 1e-5).shape == (3, 2, 16)


def test_arrays_that_were_computed_by_other_means_are_not_taken() -> None:
    program, x = Program(), np.ones((ROWS, WIDTH), np.float32)
    with program.record(per_sample=False):
        step = program.input(x)
        computed = np.asarray(step) * 2
        with pytest.raises(RuntimeError, match="rms_norm is being recorded, but its x is not an array of the step"):
            cpu.rms_norm(computed, np.ones(WIDTH, np.float32), 1e-5)
        with pytest.raises(RuntimeError, match="its out is not an array of the step"):
            cpu.linear_add(step, weight(0), computed)
        with pytest.raises(RuntimeError, match="its rows is not"):
            cpu.take_rows(step, np.zeros(2, np.int64))


def test_operations_that_programs_do_not_hold_are_refused() -> None:
    program, logits, rows = Program(), np.zeros((ROWS, WIDTH), np.float32), np.zeros(ROWS, np.float32)
    with program.record(per_sample=True):
        step = program.input(logits)
        settings = (rows, np.zeros(ROWS, np.int64), rows, rows, np.zeros(ROWS))
        for name, call in {
            "sample": lambda: cpu.sample(step, *settings),
            "mask_tokens": lambda: cpu.mask_tokens(step, np.zeros((1, 2), np.int32), np.zeros(1, np.int64)),
            "rows_of": lambda: cpu.rows_of(step, np.zeros(1, np.int64)),
            "copy_blocks": lambda: cpu.copy_blocks([], []),
        }.items():
            with pytest.raises(RuntimeError, match=f"{name} cannot be part of a recorded step"):
                call()


def test_other_threads_compute_while_one_records() -> None:
    program, x = Program(), array(0, ROWS, WIDTH)
    expected, found = cpu.activation(x, "gelu"), []
    with program.record(per_sample=False):
        cpu.activation(program.input(x), "relu")
        other = threading.Thread(target=lambda: found.append(cpu.activation(x, "gelu")))
        other.start()
        other.join()
        with pytest.raises(RuntimeError, match="is being recorded already"), Program().record(per_sample=False):
            pass
    assert np.array_equal(found[0], expected) and len(program) == 1


def test_recording_ends_with_an_error_too() -> None:
    program = Program()
    with pytest.raises(ZeroDivisionError), program.record(per_sample=False):
        _ = 1 // 0
    assert _cpu.recording() is None
    assert type(cpu.activation(np.ones((1, 2), np.float32), "relu")) is np.ndarray
