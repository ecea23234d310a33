"""Reads adapters as the PEFT library writes them: adapter_config.json, and tensors named after the model's modules.

The format is from https://github.com/huggingface/peft. Each module has lora_A [r, K] and lora_B [N, r], scaled by
alpha / r or, with rsLoRA (Kalajdzievski 2023), by alpha / sqrt(r). With DoRA (Liu et al. 2024) it has magnitudes [N].
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import LoadError
from octavo.loading.bounded_patterns import bounded_patterns
from octavo.loading.safetensors import SafetensorsFile, parse_safetensors
from octavo.loading.torch_archive import TorchArchive, parse_torch_archive
from octavo.lora.adapter_files import AdapterContents, parse_config

_PREFIX = "base_model.model."
_HEADS = frozenset({"lm_head", "embed_out"})
_EMBEDDINGS = frozenset({"embed_tokens", "wte", "word_embeddings", "embed_in"})
# Settings that are not built because they change results, with the values that change nothing.
_NOT_BUILT: dict[str, tuple[object, ...]] = {
    "alora_invocation_tokens": (None,),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
}
# Values of init_lora_weights that leave the model's weights unchanged. Other methods (PiSSA, OLoRA, CorDA, LoftQ,
# LoRA-GA) train on changed base weights, and their adapters are wrong on the model's own weights.
_INITIAL_WEIGHTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_ROWS_AT_ONCE = 4096
_EMBEDDING_SUFFIXES = {"lora_embedding_A": "b", "lora_embedding_B": "a"}
_SUFFIXES = {
    "lora_A.weight": "a", "lora_B.weight": "b", "lora_B.bias": "b_bias", "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude", "base_layer.bias": "bias", "bias": "bias",
    "weight": "whole",
} | _EMBEDDING_SUFFIXES  # fmt: skip


@dataclass(slots=True)
class ModuleAdapter:
    """An adapter's tensors for one module of the model, as float32. For an embedding [N, K], whose rows are looked up,
    files have the factors transposed: lora_embedding_B is `a` and lora_embedding_A is `b`."""

    a: NDArray[np.float32] | None = None  # [r, K]
    b: NDArray[np.float32] | None = None  # [N, r], scaled
    whole: NDArray[Any] | None = None  # [N, K], replaces the module's matrix; has the file's type
    added: NDArray[np.float32] | None = None  # [N], added to the output
    bias: NDArray[np.float32] | None = None  # [N], replaces the module's bias
    magnitude: NDArray[np.float32] | None = None  # [N], only with DoRA
    tensors: dict[str, str] = field(default_factory=dict)  # names of tensors in the file, by field, for messages
    is_embedding: bool = False  # the factors change rows that are looked up
    num_experts: int | None = None  # if set, `a` is [experts * r, K] and `b` is [N, r * experts]


def read_peft(
    contents: AdapterContents, max_rank: int, parameters_of: Callable[[str], list[str]]
) -> dict[str, ModuleAdapter]:
    """Return the adapter of each module, by the module's name in transformers, or by the name of a tensor of all
    experts. `parameters_of` returns the names of the tensors of all experts in a module, in the model's order. Raises
    `LoadError`, with the tensor's name."""
    assert contents.config is not None
    config, path = parse_config(contents.config), contents.weights.path
    _check_config(contents.config.path, config)
    modules: dict[str, ModuleAdapter] = {}
    for name, tensor in _tensors(contents).items():
        if _is_copy(name, config):
            continue
        module, part = _parse(name, path)
        found = modules.setdefault(module, ModuleAdapter())
        if part in found.tensors:
            raise LoadError(f"{path} has {name} and {found.tensors[part]}, of which one is enough.")
        found.tensors[part] = name
        if tensor.dtype.kind in "iub":
            raise LoadError(f"{path}: tensor {name} has {tensor.dtype} numbers; factors are floats.")
        if tensor.ndim == 0:
            raise LoadError(f"{path}: tensor {name} is a single number; factors are matrices.")
        values = tensor
        if part != "whole" and tensor.dtype != np.float32:
            with np.errstate(over="ignore"):
                values = np.asarray(tensor, np.float32)
        if not all(np.isfinite(values[i : i + _ROWS_AT_ONCE]).all() for i in range(0, len(values), _ROWS_AT_ONCE)):
            raise LoadError(f"{path}: tensor {name} has numbers that are not finite.")
        is_of_embedding = name.endswith(tuple(_EMBEDDING_SUFFIXES))
        found.is_embedding |= is_of_embedding
        if is_of_embedding:
            setattr(found, part, np.ascontiguousarray(values.T))
        elif part == "b_bias":
            found.added = values
        else:
            setattr(found, part, values.reshape(-1) if part == "magnitude" else values)
    if not modules:
        raise LoadError(f"{path} has no tensors.")
    saved = config.get("modules_to_save") or ()
    for name in saved if isinstance(saved, list | tuple) else ():
        if not any(f".{module}".endswith(f".{name}") and found.whole is not None for module, found in modules.items()):
            raise LoadError(f"{path} has no weight of {str(name)[:60]}, which modules_to_save names.")
    ranks, alphas = (
        _by_pattern(f"{contents.config.path}: {name}", config.get(name) or {})
        for name in ("rank_pattern", "alpha_pattern")
    )
    targets = config.get("target_parameters") or []
    if targets:
        modules = _by_parameter(path, modules, targets, parameters_of)
    for module, adapter in modules.items():
        is_target = any(f".{module}.weight".endswith(f".{target}") for target in targets)
        key = f"{module}.weight" if is_target else module  # PEFT matches target_parameters by the parameter's name
        rank = ranks(key, config.get("r", 8))
        alpha = alphas(key, config.get("lora_alpha", 8))
        _finish(path, config, module, adapter, rank, alpha, max_rank)
    return modules


def _by_pattern(setting: str, values: Mapping[str, Any]) -> Callable[[str, Any], Any]:
    """Return a function of a module and a default: the value of the first key in `values`, a regular expression, that
    matches the module's name, or the rest of it after one of its dots (as in PEFT's `get_pattern_key`). Raises
    `LoadError` for a key that is no regular expression, and if matching may take too long."""
    patterns = list(zip(bounded_patterns(setting, values), values.values(), strict=True))

    def find(module: str, default: Any) -> Any:
        ends = [module, *(module[dot.end() :] for dot in re.finditer(r"\.", module))]
        return next((value for pattern, value in patterns if any(map(pattern.fullmatch, ends))), default)

    return find


def _by_parameter(
    path: str, modules: Mapping[str, ModuleAdapter], targets: Sequence[str], parameters_of: Callable[[str], list[str]]
) -> dict[str, ModuleAdapter]:
    """Return `modules` with adapters of experts under the name of their tensor of all experts.

    PEFT wraps a module once for each of its tensors in `targets`, in the model's order. So the last tensor's adapter
    has the module's name, and each earlier one has one more ".base_layer" after the name.
    """
    found: dict[str, ModuleAdapter] = {}
    wrapped: dict[str, list[str]] = {}
    for module, adapter in modules.items():
        owner = module
        while owner.endswith(".base_layer"):
            owner = owner.removesuffix(".base_layer")
        if any(_is_target(f"{owner}.{parameter}", targets) for parameter in parameters_of(owner)):
            wrapped.setdefault(owner, []).append(module)
        else:
            found[module] = adapter
    for owner, layers in wrapped.items():
        parameters = [p for p in parameters_of(owner) if _is_target(f"{owner}.{p}", targets)]
        layers.sort(key=len, reverse=True)
        wanted = [owner + ".base_layer" * depth for depth in reversed(range(len(parameters)))]
        if layers != wanted:
            tensor = next(iter(modules[layers[0]].tensors.values()))
            raise LoadError(
                f"{path}: tensor {tensor} is one of {len(layers)} layers around {owner}, and target_parameters names "
                f"{len(parameters)} of its tensors: {', '.join(parameters)}."
            )
        for parameter, layer in zip(parameters, layers, strict=True):
            adapter = modules[layer]
            for part, tensor in adapter.tensors.items():
                if part not in ("a", "b"):
                    raise LoadError(f"{path}: tensor {tensor} is of experts, which have lora_A and lora_B alone.")
            adapter.num_experts = 1  # `_finish` computes the number from the rank
            found[f"{owner}.{parameter}"] = adapter
    return found


def _is_target(name: str, targets: Sequence[str]) -> bool:
    return any(f".{name}".endswith(f".{target}") for target in targets)


def _check_config(path: str, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise LoadError(f"{path}: peft_type {str(kind)[:40]!r} is not built; LORA is.")
    for name, neutral in _NOT_BUILT.items():
        if config.get(name) not in neutral:
            raise LoadError(f"{path}: {name} {str(config[name])[:60]} is not built for adapters.")
    if (initial := config.get("init_lora_weights")) not in _INITIAL_WEIGHTS:
        raise LoadError(
            f"{path}: init_lora_weights {str(initial)[:40]!r} changes the model's own weights, which the adapter does "
            "not have. Save it again with path_initial_model_for_weight_conversion, which makes it a plain one."
        )
    for name, default in (("r", 8), ("lora_alpha", 8)):
        value = config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise LoadError(f"{path}: {name} must be a positive number, got {str(value)[:40]!r}.")
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise LoadError(f"{path}: target_parameters must be a list of names.")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(name) or {}, dict):
            raise LoadError(f"{path}: {name} must be an object.")


def _tensors(contents: AdapterContents) -> dict[str, NDArray[Any]]:
    parse = parse_safetensors if contents.weights.path.endswith(".safetensors") else parse_torch_archive
    file: SafetensorsFile | TorchArchive = parse(contents.weights)
    return {name: file.array(name) for name in file.tensors}


def _is_copy(name: str, config: Mapping[str, Any]) -> bool:
    """Return True if a tensor is an untrained copy of a base matrix. PEFT saves such copies if the embedding or the
    output matrix is among the target modules (save_embedding_layers)."""
    if ".lora_" in name or not name.endswith(".weight"):
        return False
    if name.endswith(".base_layer.weight"):
        return True
    module = name.removesuffix(".weight")
    targets, saved = config.get("target_modules") or (), config.get("modules_to_save") or ()
    ends = _HEADS | _EMBEDDINGS
    adapts_them = isinstance(targets, list | tuple) and bool(
        ends.intersection(str(t).rsplit(".", 1)[-1] for t in targets)
    )
    is_saved = isinstance(saved, list | tuple) and any(f".{module}".endswith(f".{s}") for s in saved)
    return adapts_them and module.rsplit(".", 1)[-1] in ends and not is_saved


def _parse(name: str, path: str) -> tuple[str, str]:
    """Return the module of a tensor and its field of `ModuleAdapter`. Raises `LoadError` for an unknown name."""
    inner = name.removeprefix(_PREFIX)
    for suffix, part in _SUFFIXES.items():
        if inner.endswith(f".{suffix}") and not (part == "whole" and ".lora_" in inner):
            return inner[: -len(suffix) - 1], part
    raise LoadError(f"{path}: LoRA adapters have no tensor {name[:120]}.")


def _finish(
    path: str, config: Mapping[str, Any], module: str, adapter: ModuleAdapter, rank: Any, alpha: Any, max_rank: int
) -> None:
    """Scale a module's factors in place. Raises `LoadError` if its tensors do not fit each other or the configuration.
    `rank` and `alpha` are the module's."""
    names = adapter.tensors
    if adapter.whole is not None and (others := set(names) - {"whole", "bias"}):
        other = names[min(others)]
        raise LoadError(f"{path} has {other} beside {names['whole']}, which replaces that module.")
    if ("a" in names) != ("b" in names):
        there = names["a"] if "a" in names else names["b"]
        raise LoadError(f"{path} has {there} without its other half.")
    for part in ("added", "magnitude"):
        if getattr(adapter, part) is not None and adapter.a is None:
            name = names["magnitude" if part == "magnitude" else "b_bias"]
            raise LoadError(f"{path} has {name} without lora_A and lora_B of that module.")
    if adapter.a is None or adapter.b is None:
        return
    a, b = adapter.a, adapter.b
    if a.ndim != 2 or b.ndim != 2 or b.shape[1] != a.shape[0]:
        raise LoadError(f"{path}: {names['a']} {a.shape} and {names['b']} {b.shape} do not fit each other.")
    if adapter.num_experts is not None:
        experts, rest = divmod(a.shape[0], rank) if isinstance(rank, int) and rank > 0 else (0, 1)
        if rest or not experts:
            raise LoadError(f"{path}: {names['a']} has {a.shape[0]} rows, and the configuration says rank {rank}.")
        adapter.num_experts = experts
    elif a.shape[0] != rank or rank < 1:
        raise LoadError(f"{path}: {names['a']} has rank {a.shape[0]}, and the configuration says {str(rank)[:40]}.")
    if adapter.num_experts is None and a.shape[0] > max_rank:
        raise LoadError(f"{path}: {names['a']} has rank {a.shape[0]}, and --max-lora-rank is {max_rank}.")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e9:
        raise LoadError(f"{path}: the alpha of {module} must be a positive number, got {str(alpha)[:40]!r}.")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    if scale != 1:
        adapter.b = b * np.float32(scale)
    if adapter.added is not None:
        adapter.added = adapter.added * np.float32(scale)
    if adapter.num_experts is not None:
        return
    if (adapter.magnitude is not None) != bool(config.get("use_dora")):
        has = "has" if adapter.magnitude is not None else "lacks"
        raise LoadError(f"{path} {has} a lora_magnitude_vector for {module}, against use_dora in the configuration.")
