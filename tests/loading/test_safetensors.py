"""The file format: what the `safetensors` package writes is read back, and damage of any kind is a `LoadError`."""

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from octavo.errors import LoadError
from octavo.loading.safetensors import SafetensorsFile, read_safetensors

_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _same(file: SafetensorsFile, name: str, expected: torch.Tensor) -> None:
    found = file.array(name)
    assert found.shape == expected.shape
    assert found.dtype.name == str(expected.dtype).removeprefix("torch.")
    assert found.tobytes() == _bytes(expected)
    assert found.flags.aligned


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (7,), (2, 3, 4), (1, 1), (), (0,), (0, 4), (4, 0)])
def test_every_type_and_shape_is_read_as_it_was_written(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = (torch.randn(shape, generator=generator) * 50).abs().to(dtype)
    save_file({"t": expected, "after": torch.arange(5)}, tmp_path / "t.safetensors", {"format": "pt"})
    file = read_safetensors(str(tmp_path / "t.safetensors"))
    assert file.tensors.keys() == {"t", "after"}
    _same(file, "t", expected)
    _same(file, "after", torch.arange(5))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_set_of_tensors_comes_back(data: st.DataObject, tmp_path: Path) -> None:
    names = data.draw(st.lists(st.text(max_size=8).filter(lambda n: n != "__metadata__"), unique=True, max_size=6))
    tensors = {}
    for name in names:
        shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
        tensors[name] = torch.randn(shape).to(data.draw(st.sampled_from(_DTYPES)))
    save_file(tensors, tmp_path / "t.safetensors")
    file = read_safetensors(str(tmp_path / "t.safetensors"))
    assert file.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        _same(file, name, tensor)


def test_arrays_outlive_the_file_and_alias_it(tmp_path: Path) -> None:
    save_file({"t": torch.arange(1000.0)}, tmp_path / "t.safetensors")
    file = read_safetensors(str(tmp_path / "t.safetensors"))
    array = file.array("t")
    assert np.shares_memory(array, file.array("t"))
    file.file.forget_pages()
    del file
    (tmp_path / "t.safetensors").unlink()
    assert np.array_equal(array, np.arange(1000))


def test_tensors_at_odd_places_are_read(tmp_path: Path) -> None:
    """Writers align headers, but the format does not ask for it."""
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    raw = b"\x07" + np.array([1.5, -2.5], np.float32).tobytes()
    file = read_safetensors(_written(tmp_path, header, raw))
    assert file.array("b").tolist() == [1.5, -2.5]
    assert file.array("b").flags.aligned


def _written(tmp_path: Path, header: Any, raw: bytes = b"") -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "made.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw)
    return str(path)


def _entry(begin: Any = 0, end: Any = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "raw", "message"),
    [
        ({"t": _entry()}, bytes(7), "its tensors end at byte .* of"),
        ({"t": _entry()}, bytes(9), "its tensors end at byte .* of"),
        ({"t": _entry(4, 12)}, bytes(12), "tensor t lies at byte .*, where the one before ends at byte"),
        ({"t": _entry(), "u": _entry(4, 12)}, bytes(12), "tensor u lies at byte"),
        ({"t": _entry(), "u": _entry()}, bytes(8), "tensor u lies at byte|tensor t lies at byte"),
        ({"t": _entry(0, 1 << 70, [1 << 68])}, b"", "of the shape|its tensors end at byte"),
        ({"t": _entry(0, 0, [0, 1 << 62])}, b"", "of the shape"),
        ({"t": _entry(0, 9)}, bytes(9), r"tensor t of the shape \[2\] and the type F32 lies at bytes 0 to 9"),
        ({"t": _entry(8, 0)}, bytes(8), "lies at bytes 8 to 0"),
        ({"t": _entry(-8, 0)}, bytes(8), r"has the shape \[2\] at bytes \[-8, 0\]"),
        ({"t": _entry(shape=[-2])}, bytes(8), r"has the shape \[-2\]"),
        ({"t": _entry(shape=[2.0])}, bytes(8), r"has the shape \[2.0\]"),
        ({"t": _entry(shape=[True, 2])}, bytes(8), r"has the shape \[True, 2\]"),
        ({"t": _entry(0, 4, [1] * 65)}, bytes(4), r"has the shape"),
        ({"t": _entry(shape="2")}, bytes(8), "not described by dtype, shape and data_offsets"),
        ({"t": {"dtype": "F32"}}, b"", "not described by dtype"),
        ({"t": [1]}, b"", "not described by dtype"),
        ([1], b"", "its header is a JSON list"),
        (b"{", b"", "Expecting"),
        (b"\xff\xfe", b"", "utf-8"),
        (b"[" * 100_000, b"", "recursion"),
        (b'{"t": {}, "t": {}}', b"", "its header has t twice"),
    ],
)
def test_headers_that_are_wrong_are_named(header: Any, raw: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=message) as e:
        read_safetensors(_written(tmp_path, header, raw))
    assert "made.safetensors is damaged or truncated" in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("dtype", ["F6_E2M3", "C64", "F4", "nonsense"])
def test_types_that_are_not_read_are_named(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=rf"tensor t has the type '{dtype}', which is not read; these are: F64, F32"):
        read_safetensors(_written(tmp_path, {"t": _entry(dtype=dtype)}, bytes(8)))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is damaged: it has 0 bytes"),
        (b"1234567", "it has 7 bytes"),
        (struct.pack("<Q", 1) + b"", "its header should take 1 of 8 bytes"),
        (struct.pack("<Q", 1 << 63) + b"{}", "its header should take"),
    ],
)
def test_files_without_a_header_are_refused(raw: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "f.safetensors").write_bytes(raw)
    with pytest.raises(LoadError, match=message):
        read_safetensors(str(tmp_path / "f.safetensors"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"cannot read .*none\.safetensors: No such file"):
        read_safetensors(str(tmp_path / "none.safetensors"))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_changed_bytes_are_refused_or_read_as_the_safetensors_package_reads_them(
    data: st.DataObject, tmp_path: Path
) -> None:
    path = tmp_path / "changed.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(0, 2), "c": torch.ones(3).half()}, path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.sampled_from([len(raw), data.draw(st.integers(0, len(raw)))]))])
    file = None
    with contextlib.suppress(LoadError):
        file = read_safetensors(str(path))
    if file is None:
        with pytest.raises(LoadError) as e:
            read_safetensors(str(path))
        assert "\n" not in str(e.value)
        return
    arrays = {name: file.array(name) for name in file.tensors}
    with safe_open(path, framework="np") as reference:
        assert set(reference.keys()) == arrays.keys()
        for name, array in arrays.items():
            if array.dtype.kind != "V":  # numpy's own; the package knows no others there
                assert np.array_equal(array, reference.get_tensor(name), equal_nan=array.dtype.kind == "f")
