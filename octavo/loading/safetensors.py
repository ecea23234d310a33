"""The safetensors file format: reads names, types and positions of tensors from a memory-mapped file.

Eight bytes hold the length of the header, the header is JSON, and the rest is the tensors' bytes without gaps. Source:
https://github.com/huggingface/safetensors#format. An error about a file is one line.
"""

import json
import math
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.errors import LoadError
from octavo.loading.mapped_file import MappedFile

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype(np.bool_),
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # from the specification
_MAX_DIMS = 64  # numpy's limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Type, shape and place of one tensor; `offset` in bytes from the start of the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    file: MappedFile
    tensors: dict[str, StoredTensor]

    def array(self, name: str) -> NDArray[Any]:
        """Return a tensor of the file. It aliases the mapping, unless its offset is not aligned for its type."""
        tensor = self.tensors[name]
        raw = self.file.array(tensor.offset, tensor.num_bytes)
        if tensor.offset % tensor.dtype.alignment:
            raw = raw.copy()
        return raw.view(tensor.dtype).reshape(tensor.shape)


def read_safetensors(path: str) -> SafetensorsFile:
    """Map the file and read its header. Raises `LoadError`."""
    return parse_safetensors(MappedFile(path))


def parse_safetensors(file: MappedFile) -> SafetensorsFile:
    """Read the header of an open file. Raises `LoadError`."""
    try:
        return SafetensorsFile(file, _parse(file))
    except (ValueError, RecursionError) as e:
        reason = " ".join(str(e).split())  # names of tensors may hold anything
        raise LoadError(f"{file.path} is damaged or truncated ({reason}); fetch it again.") from None


def _parse(file: MappedFile) -> dict[str, StoredTensor]:
    """Return the tensors in the header by name. Raises `ValueError` for a damaged file and `LoadError` for a type that
    cannot be read."""
    size = len(file.data)
    if size < 8:
        raise ValueError(f"it has {size} bytes, fewer than the 8 before its header")
    (header_bytes,) = struct.unpack_from("<Q", file.data)
    if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"its header should take {header_bytes} of {size} bytes")
    start = 8 + header_bytes
    header = json.loads(file.data[8:start].decode(), object_pairs_hook=_unique)
    if not isinstance(header, dict):
        raise ValueError(f"its header is a JSON {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(file.path, name, entry, start) for name, entry in header.items()}
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if tensor.offset != end:
            raise ValueError(f"tensor {name} lies at byte {tensor.offset}, where the one before ends at byte {end}")
        end += tensor.num_bytes
    if end != size:
        raise ValueError(f"its tensors end at byte {end} of {size}")
    return tensors


def _tensor(path: str, name: str, entry: Any, start: int) -> StoredTensor:
    match entry:
        case {"dtype": str(type_name), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise ValueError(f"tensor {name} is not described by dtype, shape and data_offsets")
    if any(type(n) is not int or n < 0 for n in (*shape, begin, end)) or len(shape) > _MAX_DIMS:
        raise ValueError(f"tensor {name} has the shape {str(shape)[:60]} at bytes {str([begin, end])[:60]}")
    dtype = _DTYPES.get(type_name)
    if dtype is None:
        raise LoadError(
            f"{path}: tensor {name[:60]} has the type {type_name[:20]!r}, which is not read; these are: "
            f"{', '.join(_DTYPES)}."
        )
    num_bytes = math.prod(shape) * dtype.itemsize
    # A dimension of size 0 makes the product 0, however large the other dimensions are.
    if num_bytes != end - begin or math.prod(max(n, 1) for n in shape) > 1 << 59:
        raise ValueError(
            f"tensor {name} of the shape {str(shape)[:60]} and the type {type_name} lies at bytes {begin} to {end}"
        )
    return StoredTensor(dtype, tuple(shape), start + begin, num_bytes)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary. Raises `ValueError` if a key occurs twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"its header has {twice:.60} twice")
    return found
