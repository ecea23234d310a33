"""PyTorch's own files: what `torch.save` writes is read back, and what is damaged or means harm is a `LoadError`."""

import contextlib
import io
import os
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from octavo.errors import LoadError
from octavo.loading import torch_archive
from octavo.loading.torch_archive import read_torch_archive

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip


def assert_same(path: Path, expected: dict[str, Tensor]) -> None:
    file = read_torch_archive(str(path))
    assert file.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        found = file.array(name)
        assert found.shape == file.tensors[name].shape == tensor.shape
        assert found.dtype.name == file.tensors[name].dtype.name == str(tensor.dtype).removeprefix("torch.")
        assert found.flags.c_contiguous and found.flags.aligned
        assert found.tobytes() == tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("zipped", [True, False])
def test_every_type_and_shape_is_read_as_it_was_written(zipped: bool, tmp_path: Path) -> None:
    shapes = [(3, 5), (7,), (2, 3, 4), (1, 1), (), (0,), (0, 4), (4, 0)]
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{dtype} {shape}": (torch.randn(shape, generator=generator) * 50).abs().to(dtype)
        for dtype in DTYPES
        for shape in shapes
    }
    torch.save(tensors, tmp_path / "m.bin", _use_new_zipfile_serialization=zipped)
    assert_same(tmp_path / "m.bin", tensors)


@pytest.mark.parametrize("zipped", [True, False])
def test_views_shared_storages_and_parameters_are_read(zipped: bool, tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(6, 10)
    tensors = {
        "base": base, "rows": base[2:4], "transposed": base.T, "every other": base[::2, 1::3], "column": base[:, 3],
        "permuted": torch.arange(24, dtype=torch.int16).reshape(2, 3, 4).permute(2, 0, 1),
        "parameter": nn.Parameter(torch.ones(3)),
    }  # fmt: skip
    torch.save(tensors, tmp_path / "m.bin", _use_new_zipfile_serialization=zipped)
    assert_same(tmp_path / "m.bin", tensors)


def test_a_modules_state_is_read(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    torch.save(module.state_dict(), tmp_path / "m.bin")  # an OrderedDict with attributes
    assert_same(tmp_path / "m.bin", module.state_dict())


class Harmful:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "harmful",
    [
        Harmful(os.system, "touch harm"),
        Harmful(eval, "open('harm', 'w')"),
        Harmful(getattr, torch.Tensor, "storage"),
        Harmful(pickle.loads, pickle.dumps(Harmful(os.mkdir, "harm"))),
    ],
)
def test_nothing_is_run(harmful: Harmful, zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"t": torch.ones(2), "x": harmful}, "m.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(LoadError, match=r"m\.bin is damaged, or no file of tensors \(it names .* is no tensor\)"):
        read_torch_archive("m.bin")
    assert os.listdir() == ["m.bin"]


@pytest.mark.parametrize("content", [{"t": 1}, [torch.ones(2)], {"t": [torch.ones(2)]}, "text", {"t": None}])
def test_what_is_no_dictionary_of_tensors_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "m.bin")
    with pytest.raises(LoadError, match="is damaged, or no file of tensors"):
        read_torch_archive(str(tmp_path / "m.bin"))


class Described:
    """A tensor as it is pickled, of whatever numbers."""

    def __init__(self, offset: int, shape: tuple[Any, ...], strides: tuple[Any, ...], num_elements: Any = 6) -> None:
        self.arguments, self.num_elements = (offset, shape, strides), num_elements

    def __reduce__(self) -> Any:
        storage = StorageId(("storage", torch.FloatStorage, "0", "cpu", self.num_elements))
        return torch._utils._rebuild_tensor_v2, (storage, *self.arguments, False, {})


class StorageId(tuple):  # type: ignore[type-arg]
    pass


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return tuple(value) if isinstance(value, StorageId) else None


def write_archive(path: Path, described: Any, data: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    pickled = io.BytesIO()
    Pickler(pickled, 2).dump({"t": described})
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("m/data.pkl", pickled.getvalue())
        archive.writestr("m/data/0", data)


SIX = np.arange(6, dtype=np.float32).tobytes()


def test_the_archives_of_these_tests_are_read_if_nothing_is_wrong_with_them(tmp_path: Path) -> None:
    write_archive(tmp_path / "m.bin", Described(1, (2, 2), (2, 1)), SIX)
    assert read_torch_archive(str(tmp_path / "m.bin")).array("t").tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "described",
    [
        Described(0, (7,), (1,)), Described(3, (4,), (1,)), Described(-1, (2,), (1,)), Described(0, (2,), (-1,)),
        Described(0, (1 << 40,), (0,)), Described(0, (2, 3), (3,)), Described(0, (6,), (1,), 1 << 20),
        Described(0, (2.0,), (1,)), Described(0, (2,), ("1",)), Described(0, (6,), (1,), -6),
        Described(1 << 62, (1,), (1,)), Described(0, (0, 1 << 58, 1 << 58), (0, 1, 1)),
    ],
)  # fmt: skip
def test_tensors_outside_of_their_storage_are_refused(described: Described, tmp_path: Path) -> None:
    write_archive(tmp_path / "m.bin", described, SIX)
    with pytest.raises(LoadError, match="is damaged, or no file of tensors"):
        read_torch_archive(str(tmp_path / "m.bin"))


def test_a_storage_that_begins_before_the_file_is_refused(tmp_path: Path) -> None:
    """Offsets in archives count from a place that archives say too, so they may be negative."""
    path = tmp_path / "m.bin"
    write_archive(path, Described(0, (2,), (1,)), SIX)
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = bytes(100)
    raw = bytearray(path.read_bytes())
    pickle_entry, data_entry = (raw.rindex(name) - 4 for name in (b"m/data.pkl", b"m/data/0"))
    struct.pack_into("<I", raw, pickle_entry, 1000)
    struct.pack_into("<I", raw, data_entry, 1000 - 40)
    end = raw.rindex(b"PK\x05\x06") + 16
    struct.pack_into("<I", raw, end, struct.unpack_from("<I", raw, end)[0] + 1000)
    path.write_bytes(raw)
    assert "ends beyond its storage or the file" in refused(path)


def test_compressed_incomplete_and_ambiguous_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    write_archive(path, Described(0, (6,), (1,)), SIX * 100, zipfile.ZIP_DEFLATED)
    with pytest.raises(LoadError, match="compressed"):
        read_torch_archive(str(path))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data/0", SIX)
    with pytest.raises(LoadError, match=r"no data\.pkl"):
        read_torch_archive(str(path))
    write_archive(path, Described(0, (6,), (1,)), SIX)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("m/data/0", SIX)
    with pytest.raises(LoadError, match="it has data/0 twice"):
        read_torch_archive(str(path))


def pickled_archive(path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data.pkl", pickled, compression)


def refused(path: Path) -> str:
    """Why a file is refused."""
    with pytest.raises(LoadError, match="is damaged, or no file of tensors") as error:
        read_torch_archive(str(path))
    return str(error.value)


NAMES = sorted(map(str, torch_archive._NAMES))
STATES = {  # of a numpy type, of a function or class, and of a dataclass with slots
    "tuple": (3, "<", None, None, None, 64, 1, 0), "attributes": (None, {"__defaults__": (1,)}), "list": ["", None, 64],
}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", NAMES)
def test_no_pickle_changes_what_it_names(name: str, state: str, tmp_path: Path) -> None:
    """BUILD sets attributes, of whatever is on the stack: it may be a type that the whole process shares."""
    module, _, attribute = name.rpartition(".")
    before = [(dtype.itemsize, dtype.alignment) for dtype in torch_archive._TYPES.values()]
    made = pickle.dumps(STATES[state], 2)[2:-1]  # without its head and its end
    pickled_archive(tmp_path / "m.bin", b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + made + b"b.")
    assert "sets attributes" in refused(tmp_path / "m.bin")
    assert [(dtype.itemsize, dtype.alignment) for dtype in torch_archive._TYPES.values()] == before


# What `torch.save` has written since its first version, in protocols 2 to 5.
NEEDED = {
    "PROTO", "FRAME", "STOP", "MARK", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "BINPERSID", "MEMOIZE",
    "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
    "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINSTRING", "SHORT_BINSTRING", "EMPTY_TUPLE", "TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS",
}  # fmt: skip
OTHERS = [code for code in pickletools.opcodes if code.name not in NEEDED]


@pytest.mark.parametrize("code", OTHERS, ids=lambda code: code.name)
def test_an_instruction_that_tensors_do_not_need_is_refused(code: pickletools.OpcodeInfo, tmp_path: Path) -> None:
    number = b"1\n" if code.name not in ("INST", "STRING") else b"'a'\n" if code.name == "STRING" else b"os\nsystem\n"
    argument = b"" if code.arg is None else number if code.arg.n == pickletools.UP_TO_NEWLINE else bytes(8)
    pickled = pickle.dumps([1], 2)[:-1] + code.code.encode("latin1") + argument + b"."
    pickled_archive(tmp_path / "m.bin", pickled)
    assert f"instruction {code.name}" in refused(tmp_path / "m.bin")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("zipped", [True, False])
def test_every_protocol_is_read(zipped: bool, protocol: int, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    torch.save(module.state_dict(), tmp_path / "m.bin", pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    assert_same(tmp_path / "m.bin", module.state_dict())


def test_a_file_takes_no_more_memory_than_its_pickle_may_have_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_archive, "_MAX_INSTRUCTIONS", 1 << 15)
    path, most = tmp_path / "m.bin", torch_archive._MAX_PICKLE_BYTES
    pickled_archive(path, b"\x80\x02}." + bytes(1000), zipfile.ZIP_DEFLATED)
    assert "data.pkl is compressed" in refused(path)
    pickled_archive(path, b"\x80\x02}." + bytes(most))
    assert f"{most} are read" in refused(path)
    path.write_bytes(b"\x80\x02X" + (most + 9).to_bytes(4, "little") + bytes(most + 9) + b".")
    assert f"more than {most} bytes" in refused(path)
    pickled_archive(path, b"\x80\x02" + b"}" * (torch_archive._MAX_INSTRUCTIONS + 1) + b".")
    assert "instructions" in refused(path)


@pytest.mark.parametrize("use", ["key", "storage", "shape", "type", "name", "attributes"])
def test_tuples_of_tuples_are_never_walked(use: str, tmp_path: Path) -> None:
    """A hundred of them, each with the one before it twice, have 2^100 elements to compare, hash or print."""
    tower = b")" + b"q\x00h\x00\x86" * 100
    none, text = b"N", b"X\x07\x00\x00\x00storage"
    kind = b"ctorch\nFloatStorage\n"
    storage = b"(" + text + kind + (tower if use == "storage" else b"K\x00") + none + b"K\x01tQ"
    if use == "type":
        storage = b"(" + text + tower + b"K\x00" + none + b"K\x01tQ"
    shape = tower if use == "shape" else b")"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + shape + b")\x89NtR"
    if use == "name":
        tensor = tower + b"h\x00\x93"
    if use == "attributes":
        tensor = tower + b"Nb"
    key = tower if use == "key" else b"K\x00"
    pickled_archive(tmp_path / "m.bin", b"\x80\x02}" + key + tensor + b"s.")
    assert refused(tmp_path / "m.bin")


@cache
def written(zipped: bool) -> bytes:
    """A file of PyTorch's, the same for all examples: its size varies."""
    file = io.BytesIO()
    torch.save({"a": torch.ones(3, 4), "b": torch.zeros(2)}, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_with_damaged_bytes_is_read_or_refused(zipped: bool, data: st.DataObject, tmp_path: Path) -> None:
    path, content = tmp_path / "m.bin", bytearray(written(zipped))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(LoadError):
        file = read_torch_archive(str(path))
        for name in file.tensors:
            file.array(name)
