"""Weight formats: how a matrix is stored, what its bytes mean, and how the packed matrix is laid out.

`StoredWeight` is a matrix as a file holds it, and `Codes` is the unpacked matrix. `Layout` describes the packed matrix:
codes of 4 or 8 bits, a scale for each 16 or 32 elements and, in some layouts, a minimum for each 32, or a table of
integers that codes are indices into. Each family of formats has a module: `gguf_blocks`, `gptq`, `awq`,
`scaled_integers`, `four_bits`, `squeezellm`, `fp8`, and `int8` and `int4` for floats that are quantized at load.
`unpack` serves the reference, mixed matrices, and packers that cannot read a format's own bytes. No torch here.

The names below are imported when they are first used: the server process reads file headers with `formats`, which needs
no numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.quantization.codes import Codes, common_order
    from octavo.quantization.layout import Layout, common_layout
    from octavo.quantization.stored import StoredWeight
    from octavo.quantization.unpacking import dequantize, layout_of, packed_bytes, take_rows, unpack

_HOMES = {
    "Codes": "codes",
    "Layout": "layout",
    "StoredWeight": "stored",
    "common_layout": "layout",
    "common_order": "codes",
    "dequantize": "unpacking",
    "layout_of": "unpacking",
    "packed_bytes": "unpacking",
    "take_rows": "unpacking",
    "unpack": "unpacking",
}

__all__ = [
    "Codes", "Layout", "StoredWeight", "common_layout", "common_order", "dequantize", "layout_of", "packed_bytes",
    "take_rows", "unpack",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
