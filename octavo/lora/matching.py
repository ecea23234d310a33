"""An adapter's modules onto the matrices of a model: which factors each product gets, in the order of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import LoadError
from octavo.layers.parameters import Module, NamedMatrix
from octavo.lora.peft import ModuleAdapter
from octavo.ops import Factors, LowRank, Whole

# Under which classes of transformers have what others have at the top.
_OUTER = ("base_model", "model", "transformer", "language_model", "gpt_neox", "backbone", "decoder")

# The base weights [N, K] of a module as float32, in the checkpoint's order of rows.
BaseWeights = Callable[[NamedMatrix, Module], NDArray[np.float32]]


def plain_name(name: str) -> str:
    """A module's name without what merely says which class it is in."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _OUTER:
        parts = parts[1:]
    return ".".join(parts)


class ModuleMap:
    """The modules of a model that adapters may change, by name."""

    def __init__(
        self, matrices: Sequence[NamedMatrix], suffixes: Sequence[str] | None, others: Collection[str] = ()
    ) -> None:
        """`suffixes` are ends of the names of the modules that may be changed; None: all. `others` are modules that may
        be changed too, by other workers."""
        self.matrices = matrices
        self._suffixes = suffixes
        self._others = {plain_name(name) for name in others}
        # Matrix, module of it: several where each reads a part of the inputs.
        self._places: dict[str, list[tuple[int, int]]] = {}
        for i, matrix in enumerate(matrices):
            for j, module in enumerate(matrix.modules):
                self._places.setdefault(plain_name(module.name), []).append((i, j))

    def is_open(self, name: str) -> bool:
        """Whether --lora-target-modules lets adapters change a module."""
        return self._suffixes is None or any(name == s or name.endswith(f".{s}") for s in self._suffixes)

    def factors(self, path: str, modules: Mapping[str, ModuleAdapter], base_weights: BaseWeights) -> dict[int, Factors]:
        """By number of the matrix. Raises `LoadError`, with the tensor's name, for what does not fit the model."""
        found: dict[int, list[ModuleAdapter | None]] = {}
        for name, adapter in modules.items():
            tensor = next(iter(adapter.tensors.values()))
            places = self._places.get(plain_name(name), [])
            if not places and plain_name(name) in self._others:
                continue
            if adapter.whole is not None and not any(self.matrices[i].replaceable for i, _ in places):
                raise LoadError(
                    f"{path}: tensor {adapter.tensors['whole']} replaces one of the model's (modules_to_save); that is "
                    "built for the embedding and the output matrix alone."
                )
            if not places:
                raise LoadError(
                    f"{path}: tensor {tensor} is of module {name}, which is no product of this model that adapters "
                    f"may change; those are {self._examples()}."
                )
            if not self.is_open(name):
                raise LoadError(
                    f"{path}: tensor {tensor} is of module {name}, and --lora-target-modules lets adapters change "
                    f"{', '.join(self._suffixes or ())}."
                )
            for i, j in places:
                matrix = self.matrices[i]
                _check_kind(path, adapter, matrix)
                _check_shapes(path, adapter, matrix.modules[j], matrix.num_in * matrix.part[1])
                found.setdefault(i, [None] * len(matrix.modules))[j] = adapter
        return {number: _factors(self.matrices[number], adapters, base_weights) for number, adapters in found.items()}

    def _examples(self) -> str:
        """The kinds of modules that there are."""
        return ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in self._places))


def _check_kind(path: str, adapter: ModuleAdapter, matrix: NamedMatrix) -> None:
    """That rows that are looked up have factors of such rows, and products those of products."""
    wrong = {"a", "b"} if adapter.is_embedding != matrix.looked_up else set()
    if matrix.looked_up:
        wrong |= {"b_bias", "bias", "magnitude"}
    for part, tensor in adapter.tensors.items():
        if part in wrong:
            kind = "an embedding" if matrix.looked_up else "no embedding"
            raise LoadError(f"{path}: tensor {tensor} is of {matrix.modules[0].name}, which is {kind}.")


def _check_shapes(path: str, adapter: ModuleAdapter, module: Module, num_in: int) -> None:
    """`num_in` are the inputs of the checkpoint's matrix."""
    wanted = {
        "a": (None, num_in), "b": (module.num_stored, None), "b_bias": (module.num_stored,),
        "bias": (module.num_stored,), "magnitude": (module.num_stored,), "whole": (module.num_stored, num_in),
    }  # fmt: skip
    for part, tensor in adapter.tensors.items():
        values: NDArray[np.float32] = getattr(adapter, "added" if part == "b_bias" else part)
        fits = len(values.shape) == len(wanted[part]) and all(
            size in (None, found) for size, found in zip(wanted[part], values.shape, strict=True)
        )
        if not fits:
            sizes = ["r" if size is None else str(size) for size in wanted[part]]
            turn = -1 if adapter.is_embedding else 1  # as they are in the file
            shape, takes = list(values.shape)[::turn], ", ".join(sizes[::turn])
            raise LoadError(f"{path}: tensor {tensor} is {shape}, and the model's module takes [{takes}].")


def _factors(matrix: NamedMatrix, adapters: Iterable[ModuleAdapter | None], base_weights: BaseWeights) -> Factors:
    projections: list[LowRank | Whole | None] = []
    scales: list[NDArray[np.float32]] = []
    biases: list[NDArray[np.float32]] = []
    for module, adapter in zip(matrix.modules, adapters, strict=True):
        found = adapter or ModuleAdapter()
        low_rank: LowRank | Whole | None = None
        if found.whole is not None:
            low_rank = Whole(_ordered(found.whole, module))
        if found.a is not None and found.b is not None:
            low_rank = LowRank(found.a[:, matrix.columns], _ordered(found.b, module))
        projections.append(low_rank)
        scale = np.ones(module.num_stored, np.float32)
        if found.magnitude is not None:
            assert found.a is not None and found.b is not None
            whole = base_weights(matrix, module) + found.b @ found.a
            scale = found.magnitude / np.linalg.norm(whole, axis=1)
        scale = scale if module.order is None else scale[module.order]
        scales.append(scale)
        bias: NDArray[Any] = np.zeros(module.num_out, np.float32)
        is_first = matrix.part[0] == 0  # of summands one adds what is added once
        if found.bias is not None and is_first:
            own = 0 if module.bias is None else module.bias
            # The base's own is added by its product, in the model's order.
            bias = (found.bias if module.order is None else found.bias[module.order]) - own
        if found.added is not None and is_first:
            bias = bias + _ordered(found.added, module) * scale
        biases.append(bias)
    scale_all, bias_all = np.concatenate(scales), np.concatenate(biases)
    return Factors(
        tuple(projections), scale_all if (scale_all != 1).any() else None, bias_all if bias_all.any() else None
    )


def _ordered(rows: NDArray[Any], module: Module) -> NDArray[Any]:
    """Rows of an adapter as those of the module are packed."""
    if module.scales is not None:
        rows = rows * module.scales.reshape(-1, *[1] * (rows.ndim - 1))
    return rows if module.order is None else rows[module.order]
