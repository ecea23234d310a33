"""The GGUF file format: reads metadata and tensor positions from memory-mapped files, versions 2 and 3, little-endian.

`gguf_config` knows what the metadata mean, and `octavo.quantization` what the bytes of a tensor mean.
The layout is specified at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.errors import LoadError
from octavo.loading.mapped_file import MappedFile
from octavo.quantization.formats import TENSOR_TYPES, TensorType

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Types that exist but are not built. An error shows their names instead of their numbers.
_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
}  # fmt: skip

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_FEW_TEXTS = 100  # lists of labels are shorter, vocabularies longer
_MAX_DIMS = 4  # GGML_MAX_DIMS
# Limits of a header. Python objects take many times the bytes of the file. The largest models have 2,000 tensors,
# and the largest vocabularies 300,000 tokens and 500,000 merges.
_MAX_KEYS, _MAX_TENSORS, _MAX_ELEMENTS = 1 << 16, 1 << 18, 1 << 23


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `shape` is in row-major order, as numpy writes it; the file lists it reversed."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int
    part: int = 0  # which of a split model's files


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open file, or the files of a split model."""

    parts: tuple[MappedFile, ...]
    metadata: dict[str, Any]  # the first file's
    tensors: dict[str, TensorInfo]

    @property
    def path(self) -> str:
        return self.parts[0].path

    def array(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The bytes of a tensor, aliasing the file."""
        return self.parts[info.part].array(info.offset, info.num_bytes)


def read_gguf(path: str, texts: bool = True) -> GGUFFile:
    """Map a GGUF file and read its header; of a split model, `path` is the first part and all parts are read.

    Reading takes milliseconds for files of any size. Without `texts` it takes a third of the time, and the metadata
    lack long arrays of strings: a vocabulary and its merges. Raises `LoadError`.
    """
    first = parse_gguf(MappedFile(path), texts)
    count, number = (first.metadata.get(f"split.{name}", 0) for name in ("count", "no"))
    if count in (0, 1):
        return first
    if type(count) is not int or type(number) is not int:
        raise LoadError(f"{path} is damaged: split.count and split.no are {str((count, number))[:60]}.")
    match = re.fullmatch(r"(.*-)00001-of-(\d{5})\.gguf", path)
    if number != 0 or match is None or int(match[2]) != count:
        raise LoadError(
            f"{path} is part {number} of {count} of a split model; pass the first part, by the name that ends in "
            f"-00001-of-{count:05}.gguf."
        )
    parts, tensors = [*first.parts], dict(first.tensors)
    for i in range(1, count):
        other = parse_gguf(MappedFile(f"{match[1]}{i + 1:05}-of-{match[2]}.gguf"), texts)
        if other.metadata.get("split.no") != i:
            raise LoadError(f"{other.path} is damaged, or a part of another model than {path}; fetch it again.")
        if (twice := next((name for name in other.tensors if name in tensors), None)) is not None:
            of = parts[tensors[twice].part].path
            raise LoadError(f"{of} and {other.path} both have the tensor {twice}: they are not parts of one model.")
        parts += other.parts
        tensors |= {name: replace(info, part=i) for name, info in other.tensors.items()}
    return GGUFFile(tuple(parts), first.metadata, tensors)


def parse_gguf(file: MappedFile, texts: bool = True) -> GGUFFile:
    """Read the header of an open file, which may be a part of a split model. Raises `LoadError`."""
    path, size = file.path, len(file.data)
    if size < 24:
        raise LoadError(f"{path} is not a GGUF file: it has {size} bytes, fewer than the header's 24.")
    try:
        return _parse(file, texts)
    except (struct.error, IndexError, OverflowError):  # the last one for a position that no file has
        raise LoadError(
            f"{path} is truncated: its header goes on beyond the file's {size} bytes; fetch it again."
        ) from None
    except UnicodeDecodeError as e:
        raise LoadError(f"{path} is damaged: a name or text in its header is not UTF-8 ({e.reason}).") from None


def _parse(file: MappedFile, texts: bool) -> GGUFFile:
    path, data = file.path, file.data
    if data[:4] != b"GGUF":
        raise LoadError(f"{path} is not a GGUF file: it starts with {data[:4]!r}, not b'GGUF'.")
    version, num_tensors, num_keys = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        if version and version & 0xFFFF == 0:
            raise LoadError(f"{path} is a big-endian GGUF file; only little-endian ones are read.")
        raise LoadError(f"{path} is GGUF version {version}; versions 2 and 3 are read.")
    # A key takes at least 13 bytes and a tensor 24. A count that cannot fit means a damaged file, and the loops below
    # must not run that often.
    is_too_many = num_keys > _MAX_KEYS or num_tensors > _MAX_TENSORS
    if is_too_many or num_keys * 13 + num_tensors * 24 > len(data):
        raise LoadError(
            f"{path} is damaged: {num_keys} metadata keys and {num_tensors} tensors do not fit in {len(data)} bytes."
        )
    metadata: dict[str, Any] = {}
    position = 24
    for _ in range(num_keys):
        key, position = _read_string(data, position)
        (kind,) = _U32.unpack_from(data, position)
        value, position = _read_value(path, data, position + 4, kind, texts)
        if value is not None:
            metadata[key] = value
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise LoadError(f"{path} is damaged: general.alignment is {alignment!r}, not a multiple of 8.")
    unplaced = []
    for _ in range(num_tensors):
        name, position = _read_string(data, position)
        (num_dims,) = _U32.unpack_from(data, position)
        if not 0 < num_dims <= _MAX_DIMS:
            raise LoadError(
                f"{path} is damaged: tensor {name} has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible."
            )
        dims = struct.unpack_from(f"<{num_dims}Q", data, position + 4)
        kind, offset = struct.unpack_from("<IQ", data, position + 4 + 8 * num_dims)
        position += 16 + 8 * num_dims
        unplaced.append((name, dims, kind, offset))
    data_start = -(-position // alignment) * alignment

    tensors = {
        name: _place(path, len(data), name, dims, kind, data_start + offset) for name, dims, kind, offset in unplaced
    }
    if len(tensors) != num_tensors:
        twice, _ = Counter(name for name, *_ in unplaced).most_common(1)[0]
        raise LoadError(f"{path} is damaged: it has two tensors with the name {twice:.60}.")
    return GGUFFile((file,), metadata, tensors)


def _place(path: str, file_bytes: int, name: str, dims: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
    tensor_type = TENSOR_TYPES.get(kind)
    if tensor_type is None:
        built = ", ".join(t.name for t in TENSOR_TYPES.values())
        raise LoadError(
            f"{path}: tensor {name} has type {_OTHER_TYPES.get(kind, kind)}, which is not built; these are: {built}."
        )
    if 0 in dims or dims[0] % tensor_type.block_size:
        raise LoadError(
            f"{path} is damaged: tensor {name} has dimensions {list(dims)}, of which the first must be a multiple of "
            f"{tensor_type.block_size} for {tensor_type.name}."
        )
    num_bytes = math.prod(dims) // tensor_type.block_size * tensor_type.block_bytes
    if offset + num_bytes > file_bytes:
        raise LoadError(
            f"{path} is truncated: tensor {name} lies at bytes {offset} to {offset + num_bytes}, and the file has "
            f"{file_bytes}; fetch it again."
        )
    if offset % 8:
        raise LoadError(f"{path} is damaged: tensor {name} starts at byte {offset}, which is not a multiple of 8.")
    return TensorInfo(name, tensor_type, tuple(reversed(dims)), offset, num_bytes)


def _read_string(data: mmap.mmap, position: int) -> tuple[str, int]:
    (length,) = _U64.unpack_from(data, position)
    end = position + 8 + length
    if end > len(data):
        raise IndexError
    return data[position + 8 : end].decode(), end


def _read_value(path: str, data: mmap.mmap, position: int, kind: int, texts: bool) -> tuple[Any, int]:
    """Return a value and the position after it. Without `texts`, a long array of strings is None."""
    if kind == _STRING:
        return _read_string(data, position)
    if kind == _ARRAY:
        return _read_array(path, data, position, texts)
    code = _SCALARS.get(kind)
    if code is None:
        raise LoadError(f"{path} is damaged: a metadata value at byte {position} has the unknown type {kind}.")
    scalar = struct.Struct("<" + code)
    return scalar.unpack_from(data, position)[0], position + scalar.size


def _read_array(path: str, data: mmap.mmap, position: int, texts: bool) -> tuple[list[Any] | None, int]:
    kind, count = struct.unpack_from("<IQ", data, position)
    position += 12
    code = "Q" if kind == _STRING else _SCALARS.get(kind)  # a string begins with its length
    if code is None:
        raise LoadError(f"{path} is damaged: an array at byte {position} has elements of the unknown type {kind}.")
    num_bytes = count * struct.calcsize("<" + code)
    if num_bytes > len(data) - position:
        raise IndexError
    if count > _MAX_ELEMENTS:
        raise LoadError(f"{path} is damaged: an array at byte {position} has {count} elements.")
    if kind == _STRING:
        # The hot loop of the header: a vocabulary and its merges are 100,000 to 500,000 strings.
        length_at, end = _U64.unpack_from, len(data)
        if not texts and count > _FEW_TEXTS:
            for _ in range(count):
                position += 8 + length_at(data, position)[0]
            if position > end:
                raise IndexError
            return None, position
        strings = []
        for _ in range(count):
            start = position + 8
            position = start + length_at(data, position)[0]
            if position > end:
                raise IndexError
            strings.append(data[start:position].decode())
        return strings, position
    return list(struct.unpack_from(f"<{count}{code}", data, position)), position + num_bytes
