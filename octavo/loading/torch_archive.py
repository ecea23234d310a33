"""PyTorch's own files of tensors (`.bin`, `.pt`): read without PyTorch, and without running anything from them.

Such a file is a pickle of a dictionary and the bytes of its tensors' storages: since torch 1.6 members of a ZIP archive
(`data.pkl`, `data/<key>`), before that one after the other (`torch.serialization`, `_save` and `_legacy_save`). The
unpickler here knows the few names that describe tensors and refuses every other.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.errors import LoadError
from octavo.loading.mapped_file import MappedFile, MemoryFile

_STORAGES: dict[str, np.dtype[Any]] = {
    "DoubleStorage": np.dtype("<f8"), "FloatStorage": np.dtype("<f4"), "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16), "LongStorage": np.dtype("<i8"), "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"), "CharStorage": np.dtype("i1"), "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype(np.bool_), "UntypedStorage": np.dtype("u1"),
}  # fmt: skip
# Types without a storage class of their own: tensors name them.
_DTYPES: dict[str, np.dtype[Any]] = {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn), "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "uint16": np.dtype("<u2"), "uint32": np.dtype("<u4"), "uint64": np.dtype("<u8"),
}  # fmt: skip
# Of the pickle of one tensor: its bytes at most, and the instructions that `torch.save` makes it of.
_MAX_PICKLE_BYTES = 4096
_CODES = frozenset(
    (
        "PROTO", "GLOBAL", "BINPUT", "BINGET", "MARK", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "TUPLE",
        "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE", "EMPTY_DICT", "NONE", "NEWTRUE", "NEWFALSE", "REDUCE", "BINPERSID",
        "STOP",
    )
)  # fmt: skip
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a ZIP member: signature, length of its name, length of its extra field


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: np.dtype[Any]
    num_elements: int


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """One tensor: `offset` and `strides` in elements of its `dtype`, from where its storage begins."""

    storage: _Storage
    dtype: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """An open file."""

    file: MappedFile
    tensors: dict[str, ArchivedTensor]
    starts: dict[str, int]  # of each storage, in bytes from the start of the file

    def array(self, name: str) -> NDArray[Any]:
        """A tensor of the file. It aliases the mapping if its elements lie in order at an even place."""
        tensor = self.tensors[name]
        itemsize = tensor.dtype.itemsize
        num_elements = _extent(tensor) if math.prod(tensor.shape) else 0
        start = self.starts[tensor.storage.key] + tensor.offset * itemsize if num_elements else 0
        raw = self.file.array(start, num_elements * itemsize)
        if raw.ctypes.data % tensor.dtype.alignment:
            raw = raw.copy()
        strides = tuple(stride * itemsize for stride in tensor.strides)
        view: NDArray[Any] = np.ndarray(tensor.shape, tensor.dtype, raw, 0, strides)
        return np.ascontiguousarray(view).reshape(tensor.shape)  # of no dimensions it would make one


def read_torch_archive(path: str) -> TorchArchive:
    """Map the file and read what tensors it has. Raises `LoadError`."""
    return parse_torch_archive(MappedFile(path))


def parse_torch_archive(file: MappedFile) -> TorchArchive:
    """What tensors an open file has. Raises `LoadError`."""
    try:
        loaded, starts = _read_zip(file) if file.data[:4] == b"PK\x03\x04" else _read_legacy(file)
        if not isinstance(loaded, dict):
            raise ValueError(f"it holds a {type(loaded).__name__}, not a dictionary of tensors")
        tensors = {str(name): _checked(str(name), tensor, starts, len(file.data)) for name, tensor in loaded.items()}
    except Exception as e:  # pickles and archives that are damaged fail in a dozen ways
        reason = " ".join(str(e).split()) or type(e).__name__
        raise LoadError(f"{file.path} is damaged, or no file of tensors ({reason[:200]}); fetch it again.") from None
    return TorchArchive(file, tensors, starts)


def read_torch_tensor(data: bytes) -> NDArray[Any]:
    """The one tensor of a file that a stranger has sent. Raises `ValueError`."""
    file = MemoryFile(data)
    try:
        loaded, starts = _read_zip(file, _MAX_PICKLE_BYTES)
        return TorchArchive(file, {"tensor": _checked("tensor", loaded, starts, len(data))}, starts).array("tensor")
    except Exception:  # as above
        raise ValueError("it is damaged, or no file of one tensor") from None


def _read_zip(file: MappedFile, max_pickle_bytes: int | None = None) -> tuple[Any, dict[str, int]]:
    starts, pickled, byteorder = {}, None, b"little"
    with file.stream() as stream, zipfile.ZipFile(stream) as archive:
        for member in archive.infolist():
            _, _, name = member.filename.partition("/")  # below a folder of the file's name
            if name == "data.pkl":
                if max_pickle_bytes is not None and member.file_size > max_pickle_bytes:
                    raise ValueError("its pickle is too long")
                pickled = archive.read(member)
            elif name == "byteorder" and member.file_size < 16:
                byteorder = archive.read(member)
            elif name.startswith("data/"):
                if member.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{member.filename} is compressed")
                header = file.data[member.header_offset : member.header_offset + _LOCAL_HEADER.size]
                _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
                starts[name[5:]] = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    if pickled is None:
        raise ValueError("it has no data.pkl")
    if byteorder != b"little":
        raise ValueError("it was written on a big-endian machine")
    if max_pickle_bytes is not None:
        for code, value, _ in pickletools.genops(pickled):
            if code.name not in _CODES:  # a place in the memo may be a number that no memory has room for
                raise ValueError(f"its pickle has {code.name} {value!r:.40}")
    return _Unpickler(io.BytesIO(pickled)).load(), starts


def _read_legacy(file: MappedFile) -> tuple[Any, dict[str, int]]:
    """Magic number, version, system, the dictionary, the storages' keys; then each storage's length and its bytes."""
    with file.stream() as stream:
        if _Unpickler(stream).load() != _LEGACY_MAGIC:
            raise ValueError("it does not begin as PyTorch's files do")
        _Unpickler(stream).load()
        if not _Unpickler(stream).load().get("little_endian", False):
            raise ValueError("it was written on a big-endian machine")
        unpickler = _Unpickler(stream)
        loaded, starts = unpickler.load(), {}
        for key in _Unpickler(stream).load():
            (num_elements,) = struct.unpack("<q", stream.read(8))
            starts[str(key)] = stream.tell()
            stream.seek(num_elements * unpickler.storages[str(key)].dtype.itemsize, io.SEEK_CUR)
    return loaded, starts


class _Unpickler(pickle.Unpickler):
    """Understands dictionaries, numbers, texts and tensors."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream, encoding="utf-8")
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        known = {
            ("torch.storage", "UntypedStorage"): _STORAGES["UntypedStorage"],
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_tensor_v3"): _tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
            ("collections", "OrderedDict"): OrderedDict,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no tensor")
        return known[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        """("storage", type, key, device, number of elements, in files before torch 1.6: what it is a view of)"""
        kind, dtype, key, _, num_elements, *view = pid
        if kind != "storage" or not isinstance(dtype, np.dtype) or any(view):
            raise pickle.UnpicklingError("it refers to something that is no storage of a tensor")
        return self.storages.setdefault(str(key), _Storage(str(key), dtype, int(num_elements)))


def _tensor(
    storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], _requires_grad: bool,
    _hooks: object, dtype: Any = None, *_metadata: object,
) -> ArchivedTensor:  # fmt: skip
    own = dtype if isinstance(dtype, np.dtype) else storage.dtype  # `_rebuild_tensor_v2` may have metadata there
    return ArchivedTensor(storage, own, offset, tuple(shape), tuple(strides))


def _parameter(data: ArchivedTensor, _requires_grad: bool, _hooks: object) -> ArchivedTensor:
    return data


def _extent(tensor: ArchivedTensor) -> int:
    """How many elements lie between the first and the last one, both counted."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))


def _checked(name: str, tensor: Any, starts: dict[str, int], file_size: int) -> ArchivedTensor:
    if not isinstance(tensor, ArchivedTensor):
        raise ValueError(f"{name[:60]} is a {type(tensor).__name__}, not a tensor")
    numbers = tensor.offset, tensor.storage.num_elements, *tensor.shape, *tensor.strides
    if len(tensor.shape) != len(tensor.strides) or any(type(n) is not int or not 0 <= n < 1 << 59 for n in numbers):
        raise ValueError(f"tensor {name[:60]} has the shape {str(tensor.shape)[:60]}")
    if math.prod(tensor.shape):
        end = (tensor.offset + _extent(tensor)) * tensor.dtype.itemsize
        room = tensor.storage.num_elements * tensor.storage.dtype.itemsize
        if end > room or starts[tensor.storage.key] + room > file_size:
            raise ValueError(f"tensor {name[:60]} ends beyond its storage or the file")
        # Strides of 0 would make a matrix of any size of one element.
        if math.prod(tensor.shape) > tensor.storage.num_elements:
            raise ValueError(f"tensor {name[:60]} is larger than its storage")
    return tensor
