"""A quantized checkpoint while its matrices are put together: the tensors that are left, the tensors of one module, and
the checks that all methods share. The methods are in `checkpoint_formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import LoadError
from octavo.loading.file_tensor import FileTensor
from octavo.quantization import Layout, StoredWeight
from octavo.quantization.formats import PLAIN

Tensors = dict[str, FileTensor]
Settings = Mapping[str, Any]

FLOATS = ("float16", "bfloat16", "float32")
INT8 = Layout(8, 32, False)


@dataclass(slots=True)
class QuantizedModule:
    """One module's tensors while its matrix is put together. Errors about these tensors are raised here."""

    name: str
    files: QuantizedFiles

    def fail(self, why: str) -> LoadError:
        return LoadError(f"{self.files.source}: {self.name}: {why}.")

    def __contains__(self, part: str) -> bool:
        return f"{self.name}.{part}" in self.files.left

    def tensor(self, part: str, dtypes: Sequence[str]) -> FileTensor:
        """Remove a tensor of the module from the tensors that are left, and return it. Raises `LoadError` if it is
        absent or not of one of `dtypes`."""
        found = self.files.left.pop(f"{self.name}.{part}", None)
        if found is None or found.array is None:
            raise self.fail(f"it has no {part}, which its quantization calls for")
        name = PLAIN.get(found.format, found.format)
        if name not in dtypes:
            raise self.fail(f"{part} is {name}, not {' or '.join(dtypes)}")
        return found

    def matrix(self, part: str, dtype: str) -> FileTensor:
        """Like `tensor`, for a tensor that must have two dimensions. Raises `LoadError`."""
        found = self.tensor(part, (dtype,))
        if len(found.shape) != 2:
            raise self.fail(f"{part} has the shape {list(found.shape)}, which is no matrix")
        return found

    def expect(self, part: str, found: tuple[int, ...], *expected: tuple[int, ...]) -> None:
        if found not in expected:
            shapes = " or ".join(str(list(shape)) for shape in expected)
            raise self.fail(f"{part} has the shape {list(found)}; the matrix makes it {shapes}")

    def group(self, group: int | None, num_in: int) -> int:
        """Return the number of elements that share a scale: `num_in`, the whole row, if `group` is -1 or None. Raises
        `LoadError` for a size that does not divide the row or is not a multiple of 32, and for empty rows."""
        if num_in == 0:
            raise self.fail("its matrix has no inputs")
        if group in (-1, None):
            return num_in
        if type(group) is not int or group <= 0 or num_in % group:
            raise self.fail(f"groups of {group} do not divide its {num_in} inputs")
        if group % 32:
            raise self.fail(f"groups of {group} are not built; multiples of 32 are")
        return group

    def scales(self, tensor: FileTensor) -> NDArray[Any]:
        """Read scales and return them; bfloat16 becomes float32. Raises `LoadError` if some are not finite."""
        scales = tensor.elements()
        wide = scales.astype(np.float32)
        if not np.isfinite(wide).all():
            raise self.fail("some of its scales are not finite")
        return scales if scales.dtype == np.float16 else wide

    def make(
        self, format: str, shape: tuple[int, ...], layout: Layout, read: Callable[[], dict[str, Any]],
        part: str = "weight",
    ) -> None:  # fmt: skip
        rows = (int(np.prod(shape[:-1])), shape[-1])
        self.files.made[f"{self.name}.{part}"] = FileTensor(
            format, shape, lambda: StoredWeight(format, read(), rows), is_untransposed=True, layout=layout
        )


@dataclass(slots=True, init=False)
class QuantizedFiles:
    settings: Settings
    source: str
    left: Tensors
    made: Tensors

    def __init__(self, tensors: Tensors, settings: Settings, source: str) -> None:
        self.settings, self.source, self.left, self.made = settings, source, dict(tensors), {}

    def modules(self, part: str, *dtypes: str) -> Iterator[QuantizedModule]:
        """Yield the modules that have a tensor `part`, of one of `dtypes` if any are given."""
        suffix = f".{part}"
        for name, tensor in list(self.left.items()):
            if name.endswith(suffix) and (not dtypes or tensor.format in dtypes):
                yield QuantizedModule(name.removesuffix(suffix), self)

    def fail(self, why: str) -> LoadError:
        return LoadError(f"{self.source}: {why}.")
