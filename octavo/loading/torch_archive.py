"""PyTorch's own files of tensors (`.bin`, `.pt`), read without PyTorch and without running any code from the file.

Such a file has a pickle of a dictionary, and the bytes of its tensors' storages. Since torch 1.6 they are members of a
ZIP archive (`data.pkl`, `data/<key>`); older files have them one after the other (`torch.serialization`, `_save` and
`_legacy_save`). The unpickler here follows a fixed list of instructions and knows only the few names that describe
tensors. A name stays a name: no instruction can reach a function, a class or a numpy type.
"""

import io
import math
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import IO, Any

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
# Types without their own storage class: the tensor names the type.
_DTYPES: dict[str, np.dtype[Any]] = {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn), "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "uint16": np.dtype("<u2"), "uint32": np.dtype("<u4"), "uint64": np.dtype("<u8"),
}  # fmt: skip
# Limits of one pickle, in bytes and instructions: with 250 bytes and 30 instructions a tensor, 60,000 tensors fit.
_MAX_PICKLE_BYTES = 16 << 20
_MAX_INSTRUCTIONS = 1 << 21
_MAX_ONE_TENSOR_BYTES = 4096  # limit of the pickle in a file of one tensor
_MAX_DIMENSIONS = 32
# Instructions that put their own argument on the stack, and below instructions that put a constant there.
_ARGUMENTS = (
    "BINUNICODE", "SHORT_BINUNICODE", "BININT1", "BININT", "BININT2", "LONG1", "BINFLOAT", "BINSTRING",
    "SHORT_BINSTRING",
)  # fmt: skip
_CONSTANTS: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
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
    file: MappedFile
    tensors: dict[str, ArchivedTensor]
    starts: dict[str, int]  # where each storage begins, in bytes from the start of the file

    def array(self, name: str) -> NDArray[Any]:
        """Return a tensor of the file. It aliases the mapping if it is contiguous and its offset is aligned."""
        tensor = self.tensors[name]
        itemsize = tensor.dtype.itemsize
        num_elements = _extent(tensor) if math.prod(tensor.shape) else 0
        start = self.starts[tensor.storage.key] + tensor.offset * itemsize if num_elements else 0
        raw = self.file.array(start, num_elements * itemsize)
        if raw.ctypes.data % tensor.dtype.alignment:
            raw = raw.copy()
        strides = tuple(stride * itemsize for stride in tensor.strides)
        view: NDArray[Any] = np.ndarray(tensor.shape, tensor.dtype, raw, 0, strides)
        return np.ascontiguousarray(view).reshape(tensor.shape)  # ascontiguousarray adds a dimension to scalars


def read_torch_archive(path: str) -> TorchArchive:
    """Map the file and return it with the list of its tensors. Raises `LoadError`."""
    return parse_torch_archive(MappedFile(path))


def parse_torch_archive(file: MappedFile) -> TorchArchive:
    """Return an open file with the list of its tensors. Raises `LoadError`."""
    try:
        loaded, starts = _read_zip(file) if file.data[:4] == b"PK\x03\x04" else _read_legacy(file)
        if not isinstance(loaded, dict):
            raise ValueError(f"it holds a {type(loaded).__name__}, not a dictionary of tensors")
        tensors = {str(name): _check(str(name), tensor, starts, len(file.data)) for name, tensor in loaded.items()}
    except Exception as e:  # pickles and archives that are damaged fail in a dozen ways
        reason = " ".join(str(e).split()) or type(e).__name__
        raise LoadError(f"{file.path} is damaged, or no file of tensors ({reason[:200]}); fetch it again.") from None
    return TorchArchive(file, tensors, starts)


def read_torch_tensor(data: bytes) -> NDArray[Any]:
    """Return the only tensor of a file from an untrusted client. Raises `ValueError`."""
    file = MemoryFile(data)
    try:
        loaded, starts = _read_zip(file, _MAX_ONE_TENSOR_BYTES)
        return TorchArchive(file, {"tensor": _check("tensor", loaded, starts, len(data))}, starts).array("tensor")
    except Exception:  # damaged files fail in a dozen ways
        raise ValueError("it is damaged, or no file of one tensor") from None


def _read_zip(file: MappedFile, max_pickle_bytes: int = _MAX_PICKLE_BYTES) -> tuple[Any, dict[str, int]]:
    starts, pickled, byteorder = {}, None, b"little"
    with file.stream() as stream, zipfile.ZipFile(stream) as archive:
        for member in archive.infolist():
            _, _, name = member.filename.partition("/")  # the first folder has the file's name
            is_data = name.startswith("data/")
            if is_data and name[5:] in starts:
                raise ValueError(f"it has {name:.60} twice")
            if (is_data or name == "data.pkl") and member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{member.filename} is compressed, which torch.save does not do")
            if name == "data.pkl":
                if pickled is not None:
                    raise ValueError("it has two of data.pkl")
                if member.file_size > max_pickle_bytes:
                    raise ValueError(f"its pickle has {member.file_size} bytes; {max_pickle_bytes} are read")
                pickled = archive.read(member)
            elif name == "byteorder" and member.file_size < 16:
                byteorder = archive.read(member)
            elif is_data:
                header = file.data[member.header_offset : member.header_offset + _LOCAL_HEADER.size]
                _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
                starts[name[5:]] = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    if pickled is None:
        raise ValueError("it has no data.pkl")
    if byteorder != b"little":
        raise ValueError("it was written on a big-endian machine")
    return _Unpickler().load(io.BytesIO(pickled)), starts


def _read_legacy(file: MappedFile) -> tuple[Any, dict[str, int]]:
    """Read a file from before torch 1.6: magic number, version, system, the dictionary, the storages' keys; then each
    storage's length and its bytes."""
    with file.stream() as stream:
        if _Unpickler().load(stream) != _LEGACY_MAGIC:
            raise ValueError("it does not begin as PyTorch's files do")
        _Unpickler().load(stream)
        if not _Unpickler().load(stream).get("little_endian", False):
            raise ValueError("it was written on a big-endian machine")
        unpickler = _Unpickler()
        loaded, starts = unpickler.load(stream), {}
        for key in _Unpickler().load(stream):
            (num_elements,) = struct.unpack("<q", stream.read(8))
            starts[_key(key)] = stream.tell()
            stream.seek(num_elements * unpickler.storages[_key(key)].dtype.itemsize, io.SEEK_CUR)
    return loaded, starts


@dataclass(frozen=True, slots=True)
class _Name:
    """A function or class that a pickle names, by module and name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


_DICTIONARY = _Name("collections", "OrderedDict")
_PARAMETER = _Name("torch._utils", "_rebuild_parameter")
_TENSORS = (_Name("torch._utils", "_rebuild_tensor_v2"), _Name("torch._utils", "_rebuild_tensor_v3"))
_TYPES: dict[_Name, np.dtype[Any]] = {_Name("torch", name): dtype for name, dtype in (_STORAGES | _DTYPES).items()}
_TYPES[_Name("torch.storage", "UntypedStorage")] = _STORAGES["UntypedStorage"]
_NAMES = frozenset([*_TYPES, *_TENSORS, _PARAMETER, _DICTIONARY])


class _Bounded:
    """A stream that raises `ValueError` once more than `_MAX_PICKLE_BYTES` bytes are read from it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._num_left = stream, _MAX_PICKLE_BYTES

    def read(self, num_bytes: int) -> bytes:
        return self._count(self._stream.read(min(num_bytes, self._num_left + 1)))

    def readline(self) -> bytes:
        return self._count(self._stream.readline(self._num_left + 1))

    def _count(self, data: bytes) -> bytes:
        self._num_left -= len(data)
        if self._num_left < 0:
            raise ValueError(f"one of its pickles has more than {_MAX_PICKLE_BYTES} bytes")
        return data


class _Unpickler:
    """An unpickler of dictionaries, lists, numbers, texts and tensors."""

    def __init__(self) -> None:
        self.storages: dict[str, _Storage] = {}
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def load(self, stream: IO[bytes]) -> Any:
        """Return the next pickle of a stream, and leave the stream after it. Raises `ValueError`."""
        import pickletools  # takes 12 ms, and most checkpoints have no pickles

        stack, memo = self._stack, self._memo
        bounded: Any = _Bounded(stream)
        value: Any
        for count, (instruction, value, _) in enumerate(pickletools.genops(bounded)):
            code = instruction.name
            if count == _MAX_INSTRUCTIONS:
                raise ValueError(f"one of its pickles has more than {_MAX_INSTRUCTIONS} instructions")
            if code in _ARGUMENTS:
                stack.append(value)
            elif code in ("BINPUT", "LONG_BINPUT"):
                memo[value] = stack[-1]
            elif code in ("BINGET", "LONG_BINGET"):
                stack.append(memo[value])
            elif code in _CONSTANTS:
                stack.append(_CONSTANTS[code])
            elif code in _TUPLES:
                stack.append(tuple(self._pop(_TUPLES[code])))
            elif code == "MARK":
                self._marks.append(len(stack))
            elif code == "STOP":
                return stack.pop()
            elif code not in ("PROTO", "FRAME"):
                self._follow(code, value)
        raise ValueError("its pickle has no end")

    def _follow(self, code: str, value: Any) -> None:
        """Follow one of the rarer instructions. Raises `ValueError` for an unknown instruction."""
        stack = self._stack
        if code == "TUPLE":
            stack.append(tuple(self._pop()))
        elif code == "EMPTY_DICT":
            stack.append({})
        elif code == "EMPTY_LIST":
            stack.append([])
        elif code in ("SETITEM", "SETITEMS"):
            items = self._pop(2 if code == "SETITEM" else None)
            stack[-1].update(zip(map(_key, items[::2]), items[1::2], strict=True))
        elif code in ("APPEND", "APPENDS"):
            items = self._pop(1 if code == "APPEND" else None)
            stack[-1].extend(items)
        elif code == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif code == "GLOBAL":
            stack.append(_known(*value.split(" ", 1)))
        elif code == "STACK_GLOBAL":
            stack.append(_known(*map(_key, self._pop(2))))
        elif code == "REDUCE":
            name, arguments = self._pop(2)
            stack.append(_make(name, arguments))
        elif code == "BINPERSID":
            stack.append(self._storage(*self._pop(1)))
        elif code == "BUILD":  # attributes of a module's state dict: the version of the class that wrote it
            self._pop(1)
            if not isinstance(stack[-1], OrderedDict):
                of = str(stack[-1]) if isinstance(stack[-1], _Name) else f"a {type(stack[-1]).__name__}"
                raise ValueError(f"it sets attributes of {of:.60}")
        else:
            raise ValueError(f"its pickle has the instruction {code}, which tensors do not need")

    def _pop(self, count: int | None = None) -> list[Any]:
        """Remove and return the last `count` values of the stack; None: all values after its last mark."""
        first = self._marks.pop() if count is None else len(self._stack) - count
        if first < 0:
            raise ValueError("its pickle takes more than it has made")
        values = self._stack[first:]
        del self._stack[first:]
        return values

    def _storage(self, pid: Any) -> _Storage:
        """Return the storage that a persistent id describes: ("storage", type, key, device, number of elements). Files
        from before torch 1.6 add which storage it is a view of, which is refused."""
        kind, dtype, key, _, num_elements, *view = pid
        is_storage = kind == "storage" and isinstance(dtype, _Name) and dtype in _TYPES and not any(view)
        if not is_storage or not isinstance(num_elements, int):
            raise ValueError("it refers to something that is no storage of a tensor")
        return self.storages.setdefault(_key(key), _Storage(_key(key), _TYPES[dtype], num_elements))


def _key(value: Any) -> str:
    """Return a name, or the key of a dictionary or a storage, as a text. Raises `ValueError` for other types: a tuple
    of tuples would take for ever to compare or print."""
    if not isinstance(value, str | int):
        raise ValueError(f"it has a {type(value).__name__} for a key or name")
    return str(value)


def _known(module: str, name: str) -> _Name:
    found = _Name(module, name)
    if found not in _NAMES:
        raise ValueError(f"it names {found!s:.60}, which is no tensor")
    return found


def _make(name: Any, arguments: Any) -> Any:
    """Return the result of a pickle's call of `name`."""
    if name == _DICTIONARY and arguments == ():
        return OrderedDict()
    if name == _PARAMETER:
        return arguments[0]
    if name not in _TENSORS:
        raise ValueError("it calls a function that makes no tensor")
    storage, offset, shape, strides, _requires_grad, _hooks, *more = arguments
    if not isinstance(storage, _Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise ValueError("it has a tensor without a storage or a shape")
    own = more[0] if more and isinstance(more[0], _Name) else None  # `_rebuild_tensor_v2` may have metadata there
    return ArchivedTensor(storage, storage.dtype if own is None else _TYPES[own], offset, shape, strides)


def _extent(tensor: ArchivedTensor) -> int:
    """Return how many elements of its storage a tensor spans, from its first to its last element."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))


def _check(name: str, tensor: Any, starts: dict[str, int], file_size: int) -> ArchivedTensor:
    if not isinstance(tensor, ArchivedTensor):
        raise ValueError(f"{name[:60]} is a {type(tensor).__name__}, not a tensor")
    numbers = tensor.offset, tensor.storage.num_elements, *tensor.shape, *tensor.strides
    if len(tensor.shape) != len(tensor.strides) or any(type(n) is not int or not 0 <= n < 1 << 59 for n in numbers):
        raise ValueError(f"tensor {name[:60]} has a shape of {len(tensor.shape)} sizes that no tensor has")
    if len(tensor.shape) > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name[:60]} has {len(tensor.shape)} dimensions")
    # A dimension of size 0 makes the product 0, however large the other dimensions are.
    if math.prod(max(n, 1) for n in tensor.shape) * tensor.dtype.itemsize >= 1 << 62:
        raise ValueError(f"tensor {name[:60]} has a shape that no tensor has")
    if math.prod(tensor.shape):
        end = (tensor.offset + _extent(tensor)) * tensor.dtype.itemsize
        room = tensor.storage.num_elements * tensor.storage.dtype.itemsize
        if end > room or not 0 <= starts[tensor.storage.key] <= file_size - room:
            raise ValueError(f"tensor {name[:60]} ends beyond its storage or the file")
        # With strides of 0, one element could fill a matrix of any size.
        if math.prod(tensor.shape) > tensor.storage.num_elements:
            raise ValueError(f"tensor {name[:60]} is larger than its storage")
    return tensor
