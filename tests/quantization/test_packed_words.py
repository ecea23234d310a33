"""Matrices whose codes are in words of 32 bits, packed from these words, against the same unpacked by Python first: bit
for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from octavo import _cpu
from octavo.errors import ConfigError
from octavo.ops import cpu_pack
from octavo.ops.cpu_pack import pack_quantized
from octavo.quantization import StoredWeight, unpack
from octavo.quantization.unpacking import as_stored
from tests.quantization.blocks import random_matrix
from tests.quantization.checkpoints import awq, gptq, packed_integers


def _stored(format: str, tensors: dict[str, np.ndarray], shape: tuple[int, int], group: int) -> StoredWeight:
    if format == "AWQ_GEMV":
        tensors = tensors | {"group": np.array([group])}
    if format == "INT_PACKED":
        names = {"weight_packed": "qweight", "weight_scale": "scales", "weight_zero_point": "qzeros"}
        names["weight_g_idx"] = "g_idx"
        tensors = {names[name]: tensor for name, tensor in tensors.items() if name in names}
        tensors["scales"] = tensors["scales"].astype(np.float32)
    return StoredWeight(format, tensors, shape)


def _random(format: str, n: int, k: int, *, group: int = 32, seed: int = 0, **options: Any) -> StoredWeight:
    rng = np.random.default_rng(seed)
    if format.startswith("GPTQ"):
        if options.pop("ordered", False):
            options["act_order"] = np.random.default_rng(7).permutation(k)  # the same of all parts
        version = 2 if format == "GPTQ_V2" else 1
        tensors, _ = gptq(rng, n, k, group=group, version=version, **options)
    elif format == "INT_PACKED":
        tensors, _ = packed_integers(rng, n, k, group=group, act_order=options.pop("ordered", False), **options)
    else:
        tensors, _ = awq(rng, n, k, gemv=format == "AWQ_GEMV", group=group)
    return _stored(format, tensors, (n, k), group)


def _check(parts: Sequence[StoredWeight], monkeypatch: pytest.MonkeyPatch, gated: bool = False) -> None:
    """`parts` are packed from words, and to what their codes are packed to."""
    expected = pack_quantized([as_stored(unpack(part)) for part in parts], gated)
    with monkeypatch.context() as patch:
        patch.setattr(cpu_pack, "_staged", lambda codes: pytest.fail("codes were unpacked"))
        actual = pack_quantized(parts, gated)
    assert (actual.layout, actual.factor, actual.format) == (expected.layout, expected.factor, expected.format)
    assert (actual.order is None) == (expected.order is None)
    assert actual.order is None or np.array_equal(actual.order, expected.order)
    assert np.array_equal(actual.data, expected.data)


GROUPS = [32, 64, 128, -1]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("format", ["GPTQ", pytest.param("GPTQ_V2", marks=pytest.mark.long)])  # other zeros, below
def test_gptq(format: str, bits: int, symmetric: bool, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for group in GROUPS:
        for n, k in [(32, 128), (96, 384), (160, 256), (64, 1152), (8, 128), (328, 640)]:
            options = {"bits": bits, "group": group, "symmetric": symmetric, "ordered": ordered}
            _check([_random(format, n if bits != 3 else -(-n // 32) * 32, k, **options)], monkeypatch)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_inputs_that_fill_no_block(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one group for all of k words may end anywhere; with groups of 32 a block may be half there."""
    for k, group in [(96, 32), (32, 32), (224, 32), *((i * (32 if bits == 3 else 16), -1) for i in (1, 3, 5, 11))]:
        for symmetric in (False, True):
            _check([_random("GPTQ", 64, k, bits=bits, group=group, symmetric=symmetric)], monkeypatch)
    for k in (72, 88, 100, 148) if bits == 8 else (8, 72, 88) if bits == 4 else ():
        _check([_random("GPTQ", 64, k, bits=bits, group=-1, symmetric=False)], monkeypatch)


@pytest.mark.parametrize("format", ["AWQ", "AWQ_GEMV"])
def test_awq(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for group in (32, 64, 128):
        for n, k in [(32, 128), (8, 256), (96, 384), (200, 256), (328, 640)]:
            _check([_random(format, n, k, group=group)], monkeypatch)
    for k in (1, 9, 37, 96, 100) if format == "AWQ" else (72, 96):
        group = 32 if k == 96 else k
        _check([_random(format, 40, k, group=group)], monkeypatch)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers(bits: int, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for group in GROUPS:
        for symmetric in (False, True):
            for n, k in [(32, 128), (7, 128), (77, 384), (140, 640)]:
                part = _random("INT_PACKED", n, k, bits=bits, group=group, symmetric=symmetric, ordered=ordered)
                _check([part], monkeypatch)


@pytest.mark.parametrize("format", ["GPTQ", "GPTQ_V2", "AWQ", "AWQ_GEMV", "INT_PACKED"])
def test_parts_that_are_stacked_or_alternate(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in [(64, 32, 32), (40, 8, 72), (8, 8, 8), (200, 136, 64), (168, 168)]:
        parts = [_random(format, n, 256, seed=n + i) for i, n in enumerate(rows)]
        _check(parts, monkeypatch)
        if len(rows) == 2:
            _check(parts, monkeypatch, gated=True)
    _check([_random("INT_PACKED", 21, 256, symmetric=False), _random(format, 40, 256)], monkeypatch)


def test_parts_of_several_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    ordered = [_random("GPTQ", n, 256, ordered=True, symmetric=n == 40, seed=n) for n in (40, 136, 40)]
    _check(ordered, monkeypatch)
    _check([ordered[0], ordered[2]], monkeypatch, gated=True)
    with_zeros, without = (_random("GPTQ", 64, 256, symmetric=symmetric) for symmetric in (False, True))
    _check([with_zeros, without], monkeypatch)
    _check([without, with_zeros], monkeypatch, gated=True)
    _check([with_zeros, _random("AWQ", 40, 256, group=128), _random("GPTQ", 32, 256, bits=3)], monkeypatch)


def test_words_beside_codes_of_more_bits_are_unpacked() -> None:
    for other in (_random("GPTQ", 64, 256, bits=8), random_matrix("Q5_1", 64, 256), random_matrix("Q4_1", 64, 256)):
        for gated in (False, True):
            parts = [_random("GPTQ", 64, 256), other]
            expected = pack_quantized([as_stored(unpack(parts[0])), other], gated)
            assert np.array_equal(pack_quantized(parts, gated).data, expected.data)


@pytest.mark.parametrize("format", ["GPTQ", "AWQ", "AWQ_GEMV", "INT_PACKED"])
def test_shares_of_rows_and_columns(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {} if format.startswith("AWQ") else {"symmetric": False}
    # AWQ's second layout is divided where its zeros fill their words.
    whole = _random(format, 192, 1024, group=32 if format != "AWQ_GEMV" else 128, **options)
    for begin, end in [(0, 96), (96, 192), (64, 72), (184, 192)]:
        _check([whole.rows(begin, end)], monkeypatch)
    if format != "AWQ_GEMV":
        for begin, end in [(0, 512), (512, 1024), (256, 768)]:
            _check([whole.columns(begin, end)], monkeypatch)
            _check([whole.shard((96, 192), (begin, end))] * 2, monkeypatch, gated=True)
    if format in ("AWQ_GEMV", "INT_PACKED") and whole.has_single_rows:
        _check([whole.every_second_row(1)], monkeypatch)


def test_scales_that_are_no_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    for format in ("GPTQ", "AWQ", "AWQ_GEMV"):
        whole = _random(format, 64, 256, **({} if format != "GPTQ" else {"symmetric": False}))
        scales = whole.tensors["scales"].astype(np.float32)
        for factor in (1e-9, 0.3, 1e9):
            other = StoredWeight(format, whole.tensors | {"scales": scales * np.float32(factor)}, whole.shape)
            _check([other], monkeypatch)


def test_groups_that_are_no_multiple_of_32_are_unpacked() -> None:
    part = _random("GPTQ", 64, 256, group=16)
    assert np.array_equal(pack_quantized([part]).data, pack_quantized([as_stored(unpack(part))]).data)
    with pytest.raises(ConfigError, match="GPTQ matrices with groups of 16 are not built for CPUs"):
        pack_quantized([_random("GPTQ", 64, 256, group=16, symmetric=False)])


def test_threads_do_not_change_a_bit() -> None:
    parts = [_random("GPTQ", 520, 512, ordered=True), _random("AWQ", 520, 512)]
    threads = _cpu.num_threads()
    for part in parts:
        found = []
        for n in (1, 3):
            _cpu.set_threads(n)
            found.append(pack_quantized([part]).data)
        _cpu.set_threads(threads)
        assert np.array_equal(*found)


def test_words_that_do_not_fit_are_refused() -> None:
    memory = np.zeros(1 << 16, np.uint8)

    def pack(bits: int, *, to: int = 4, minima: bool = False, group: int = 32, by_outputs: bool = False) -> None:
        form = _cpu.WEIGHT_INT4 if to == 4 else _cpu.WEIGHT_INT8
        matrix = _cpu.Matrix(memory, 0, 4, 256, 1.0, form, 32, False, False)
        _cpu.pack_words(
            to=matrix, first_row=0, words=memory, output_stride=4, word_stride=4, rows=2, bits=bits,
            by_outputs=by_outputs, scales=memory, minima=memory if minima else None, shifts=None,
            group=group, order=None,
        )  # fmt: skip

    for bits, options in [
        (8, {}), (4, {"to": 8}), (5, {}), (2, {}), (4, {"minima": True}), (4, {"group": 48}),
        (8, {"to": 8, "by_outputs": True}),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"words of {bits} bits in groups of"):
            pack(bits, **options)
