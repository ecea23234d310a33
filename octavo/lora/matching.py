"""Maps an adapter's modules to a model's matrices: which factors each product gets, in the order of its outputs."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import LoadError
from octavo.layers.parameters import Module, NamedMatrix, StackedModule
from octavo.lora.peft_format import ModuleAdapter
from octavo.ops import Factors, LowRank, Whole

# Module names that differ between files and transformers.
_SHARED = dict.fromkeys(("shared_expert", "shared_mlp"), "shared_experts")
# Outer modules: some classes of transformers have a module below these names, and others have it at the top.
_OUTER = ("base_model", "model", "transformer", "language_model", "gpt_neox", "backbone", "decoder")

# Tensors of all experts' gates and ups: two in GGUF files, one tensor of both in transformers.
_HALVES, _BOTH = ("gate_proj", "up_proj"), "gate_up_proj"

# Returns the base weights [N, K] of a module as float32, in the checkpoint's order of rows.
BaseWeights = Callable[[NamedMatrix, Module], NDArray[np.float32]]


@lru_cache(65536)
def plain_name(name: str) -> str:
    """Return a module's name without the outer modules that depend on its class in transformers."""
    parts = [_SHARED.get(part, part) for part in name.split(".")]
    while len(parts) > 1 and parts[0] in _OUTER:
        parts = parts[1:]
    return ".".join(parts)


class ModuleMap:
    """The modules of a model that adapters may change, by name."""

    def __init__(
        self,
        matrices: Sequence[NamedMatrix],
        suffixes: Sequence[str] | None,
        max_rank: int,
        others: Collection[str] = (),
    ) -> None:
        """`suffixes` are name endings of the modules that adapters may change; None: all. `others` are modules that
        other workers change. Matrices without weights are also changed by other workers."""
        self.matrices = matrices
        self._suffixes = suffixes
        self._max_rank = max_rank
        self._others = {plain_name(name) for name in others}
        # Number of a matrix and of a module in it. A name has several places if each matrix reads a part of the inputs.
        self._places: dict[str, list[tuple[int, int]]] = {}
        self._stacked: dict[str, list[tuple[int, int, StackedModule]]] = {}  # by the name of a tensor of all experts
        for i, matrix in enumerate(matrices):
            for j, module in enumerate(matrix.modules):
                for name in dict.fromkeys(map(plain_name, module.names)):
                    self._places.setdefault(name, []).append((i, j))
                for part in module.stacked:
                    self._stacked.setdefault(plain_name(part.name), []).append((i, j, part))
        # The names of the parameters in each module, in the model's order.
        self._parameters: dict[str, list[str]] = {}
        for name in dict.fromkeys((*self._stacked, *map(plain_name, others))):
            owner, _, parameter = name.rpartition(".")
            self._parameters.setdefault(owner, []).append(parameter)

    def is_open(self, name: str) -> bool:
        """Return True if --lora-target-modules lets adapters change a module."""
        return self._suffixes is None or any(name == s or name.endswith(f".{s}") for s in self._suffixes)

    def parameters_of(self, owner: str) -> list[str]:
        """Return the names of the tensors of all experts in the module `owner`, as transformers names them."""
        names = self._parameters.get(plain_name(owner), [])
        return [name for name in names if name not in _HALVES or _BOTH not in names]

    def factors(self, path: str, modules: Mapping[str, ModuleAdapter], base_weights: BaseWeights) -> dict[int, Factors]:
        """Return the factors of each matrix that the adapter changes and this worker has, by the matrix's number.
        Raises `LoadError`, with the tensor's name, for a tensor that does not fit the model."""
        found: dict[int, list[ModuleAdapter | None]] = {}
        for adapter, (i, j) in self._of_experts(path, modules):
            if self._is_here(i):
                found.setdefault(i, [None] * len(self.matrices[i].modules))[j] = adapter
        for name, adapter in modules.items():
            if plain_name(name) in self._stacked and adapter.num_experts is not None:
                continue
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
                    f"{path}: tensor {tensor} is of module {name}. Adapters of this model may change only products: "
                    f"{self._examples()}."
                )
            if not self.is_open(name):
                raise LoadError(self._closed(path, tensor, name))
            for i, j in places:
                matrix = self.matrices[i]
                _check_kind(path, adapter, matrix)
                _check_shapes(path, adapter, matrix.modules[j], matrix.all_in)
                of_matrix = found.setdefault(i, [None] * len(matrix.modules))
                if of_matrix[j] is not None:
                    raise LoadError(f"{path}: tensor {tensor} is of {name}, which the adapter changes twice.")
                of_matrix[j] = adapter
        return {
            number: _factors(self.matrices[number], adapters, base_weights)
            for number, adapters in found.items()
            if self._is_here(number)
        }

    def _is_here(self, number: int) -> bool:
        return self.matrices[number].weight is not None

    def _of_experts(
        self, path: str, modules: Mapping[str, ModuleAdapter]
    ) -> Iterator[tuple[ModuleAdapter, tuple[int, int]]]:
        """Cut the adapters of tensors of all experts, and yield the adapter of each module with its place.

        PEFT has A [experts * r, K], expert by expert, and B [N, r * experts], in which the experts' columns alternate.
        Raises `LoadError` for an adapter that does not fit the model's experts.
        """
        for name, adapter in modules.items():
            places = self._stacked.get(plain_name(name), [])
            if adapter.num_experts is None or not places:
                continue
            assert adapter.a is not None and adapter.b is not None
            tensors = adapter.tensors
            if not self.is_open(name):
                raise LoadError(self._closed(path, tensors["a"], name))
            matrix, experts = self.matrices[places[0][0]], 1 + max(part.expert for _, _, part in places)
            if adapter.num_experts != experts:
                raise LoadError(
                    f"{path}: tensor {tensors['a']} is of {adapter.num_experts} experts, and the model has {experts}."
                )
            num_out = sum(matrix.modules[j].num_stored for j in {j for _, j, _ in places})
            rank = adapter.a.shape[0] // experts
            if rank > self._max_rank * len({j for _, j, _ in places}):
                raise LoadError(
                    f"{path}: {tensors['a']} has rank {rank} for each expert, and --max-lora-rank is {self._max_rank}."
                )
            a = adapter.a.reshape(experts, rank, -1)
            b = np.ascontiguousarray(adapter.b.reshape(-1, rank, experts).transpose(2, 0, 1))
            is_untransposed = places[0][2].is_untransposed
            wanted = (matrix.num_in, num_out)[:: -1 if is_untransposed else 1]
            for part, size, there in (("a", wanted[0], a.shape[2]), ("b", wanted[1], b.shape[1])):
                if size != there:
                    shape = [*adapter.a.shape] if part == "a" else [*adapter.b.shape]
                    takes = f"[{experts} r, {size}]" if part == "a" else f"[{size}, {experts} r]"
                    raise LoadError(f"{path}: tensor {tensors[part]} is {shape}, and the model's experts take {takes}.")
            for i, j, stacked in places:
                of_a, of_b = a[stacked.expert], b[stacked.expert]
                if is_untransposed:
                    of_a, of_b = of_b.T, of_a.T
                yield ModuleAdapter(of_a, of_b[stacked.rows], tensors=tensors), (i, j)

    def _closed(self, path: str, tensor: str, name: str) -> str:
        return (
            f"{path}: tensor {tensor} is of module {name}, and --lora-target-modules lets adapters change "
            f"{', '.join(self._suffixes or ())}."
        )

    def _examples(self) -> str:
        """Return the last parts of the names of modules that adapters may change, for messages."""
        return ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in self._places))


def _check_kind(path: str, adapter: ModuleAdapter, matrix: NamedMatrix) -> None:
    """Raise `LoadError` if an adapter for looked-up rows is used for a product, or the reverse, or if an expert has a
    tensor that is not built for experts."""
    wrong = {"a", "b"} if adapter.is_embedding != matrix.is_embedding else set()
    if matrix.is_embedding:
        wrong |= {"b_bias", "bias", "magnitude"}
    if matrix.expert is not None:
        for part in ("magnitude", "bias"):
            if part in adapter.tensors:
                raise LoadError(f"{path}: tensor {adapter.tensors[part]} changes an expert; experts take only A and B.")
    for part, tensor in adapter.tensors.items():
        if part in wrong:
            kind = "an embedding" if matrix.is_embedding else "no embedding"
            raise LoadError(f"{path}: tensor {tensor} is of {matrix.modules[0].name}, which is {kind}.")


def _check_shapes(path: str, adapter: ModuleAdapter, module: Module, num_in: int) -> None:
    """Raise `LoadError` if a tensor of the adapter does not have the module's shape. `num_in` is the number of inputs
    of the checkpoint's matrix."""
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
            turn = -1 if adapter.is_embedding else 1  # the file has them transposed
            shape, takes = list(values.shape)[::turn], ", ".join(sizes[::turn])
            raise LoadError(f"{path}: tensor {tensor} is {shape}, and the model's module takes [{takes}].")


def _factors(matrix: NamedMatrix, adapters: Iterable[ModuleAdapter | None], base_weights: BaseWeights) -> Factors:
    projections: list[LowRank | Whole | None] = []
    scales: dict[int, NDArray[np.float32]] = {}  # by the module's number; only modules with scales
    biases: dict[int, NDArray[np.float32]] = {}
    is_first = matrix.first_in == 0  # if matrices are summed, only the first adds the bias
    for number, (module, adapter) in enumerate(zip(matrix.modules, adapters, strict=True)):
        found = adapter or ModuleAdapter()
        low_rank: LowRank | Whole | None = None
        if found.whole is not None:
            low_rank = Whole(_ordered(found.whole[:, matrix.columns], module))
        if found.a is not None and found.b is not None:
            low_rank = LowRank(found.a[:, matrix.columns], _ordered(found.b, module))
        projections.append(low_rank)
        if found.magnitude is not None:
            assert found.a is not None and found.b is not None
            whole = base_weights(matrix, module) + found.b @ found.a
            scale = found.magnitude / np.linalg.norm(whole, axis=1)
            scales[number] = scale if module.order is None else scale[module.order]
        if found.bias is not None and is_first:
            own = 0 if module.bias is None else module.bias
            # The base product adds the module's own bias, which is in the model's order.
            biases[number] = np.asarray(_ordered(found.bias, module) - own, np.float32)
        if found.added is not None and is_first:
            added = _ordered(found.added, module) * scales.get(number, np.float32(1))
            biases[number] = biases.get(number, np.float32(0)) + added
    return Factors(tuple(projections), _of_all(matrix.modules, scales, 1), _of_all(matrix.modules, biases, 0))


def _of_all(
    modules: Sequence[Module], found: Mapping[int, NDArray[np.float32]], neutral: int
) -> NDArray[np.float32] | None:
    """Return the values of all modules' outputs [outputs]: `found` values by the module's number, else `neutral`. None
    if all values are neutral."""
    if all((values == neutral).all() for values in found.values()):
        return None
    return np.concatenate(
        [found.get(number, np.full(module.num_out, neutral, np.float32)) for number, module in enumerate(modules)]
    )


def _ordered(rows: NDArray[Any], module: Module) -> NDArray[Any]:
    """Return an adapter's rows with the scales and in the order of the module's packed rows."""
    if module.scales is not None:
        rows = rows * module.scales.reshape(-1, *[1] * (rows.ndim - 1))
    return rows if module.order is None else rows[module.order]
