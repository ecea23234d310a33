"""Weight formats: how a matrix is stored, what its bytes mean, and how it is laid out once it is packed.

`StoredWeight` is a matrix as a file holds it, `Codes` the same unpacked, `Layout` what packers make of it: codes of 4
or 8 bits with a scale by 16 or 32 elements and, in some, a minimum by 32. One module a family of sources: `gguf`,
`gptq`, `awq`, `int8` for floats that are quantized at load, and `fp8`, which has no such codes. The reference, mixed
matrices, and packers without a reader of a format's own bytes all follow from `unpack`. No torch here.

The names below are loaded when they are first used: the server process reads headers of files by `formats`, which
needs no numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.quantization.codes import Codes
    from octavo.quantization.layout import Layout, common_layout
    from octavo.quantization.stored import StoredWeight
    from octavo.quantization.unpacking import dequantize, layout_of, packed_bytes, unpack

_HOMES = {
    "Codes": "codes",
    "Layout": "layout",
    "StoredWeight": "stored",
    "common_layout": "layout",
    "dequantize": "unpacking",
    "layout_of": "unpacking",
    "packed_bytes": "unpacking",
    "unpack": "unpacking",
}

__all__ = ["Codes", "Layout", "StoredWeight", "common_layout", "dequantize", "layout_of", "packed_bytes", "unpack"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
