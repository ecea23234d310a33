"""Settings of a sentence-transformers folder beside config.json: modules.json lists the modules after the network, and
each module has its own folder. The names are from sentence-transformers (5) and PyLate.
"""

import os
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import LoadError
from octavo.loading.weight_files import read_json, read_json_list
from octavo.pooling_params import DenseConfig

# Names of the pooling modes: as newer versions of sentence-transformers write them, and as older versions do.
_MODES = {
    "cls": "CLS", "lasttoken": "LAST", "mean": "MEAN", "max": "MAX", "mean_sqrt_len_tokens": "MEAN_SQRT",
    "weightedmean": "WEIGHTED_MEAN",
}  # fmt: skip
_OLD_MODES = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
_ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
MODULE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True, slots=True)
class SentenceTransformer:
    """The settings of a sentence-transformers model. `kind` is the pooling; None: each token has a vector."""

    kind: str | None
    pools_prompts: bool = True
    dense: list[DenseConfig] = field(default_factory=list)
    normalizes: bool = False
    max_length: int | None = None
    lowers_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_sentence_transformer(folder: str) -> SentenceTransformer | None:
    """Return the settings of a folder, or None if it is no sentence-transformers folder. Raises `LoadError` for a
    module that is not built."""
    if not os.path.exists(os.path.join(folder, "modules.json")):
        return None
    kind, pools_prompts, dense, normalizes = None, True, [], False
    for module in read_json_list(os.path.join(folder, "modules.json")):
        name, path = str(module.get("type", "")).split(".")[-1], str(module.get("path", ""))
        if os.path.isabs(path) or ".." in path.split("/"):
            raise LoadError(f"{folder}: modules.json has a module at {path[:60]}, which is outside of the folder.")
        if name == "Pooling":
            kind, pools_prompts = _pooling(folder, path)
        elif name == "Dense":
            dense.append(_dense(folder, path))
        elif name == "Normalize":
            normalizes = True
        elif name != "Transformer":
            raise LoadError(
                f"{folder}: modules.json has a module {name}, which is not built yet; Transformer, Pooling, Dense and "
                "Normalize are."
            )
    limits = _read(folder, "sentence_bert_config.json")
    settings = _read(folder, "config_sentence_transformers.json")
    given, longest = settings.get("prompts") or {}, limits.get("max_seq_length")
    if not isinstance(given, dict):
        raise LoadError(f"{folder}/config_sentence_transformers.json: prompts is {str(given)[:60]}, not an object.")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise LoadError(f"{folder}/sentence_bert_config.json: max_seq_length is {str(longest)[:60]}, no length.")
    prompts = {str(name): str(text) for name, text in given.items()}
    for name in ("query", "document"):  # PyLate's settings
        if settings.get(f"{name}_prefix"):
            prompts.setdefault(name, str(settings[f"{name}_prefix"]))
    default = settings.get("default_prompt_name")
    return SentenceTransformer(
        kind, pools_prompts, dense, normalizes or kind is None, longest, bool(limits.get("do_lower_case")), prompts,
        None if default is None else str(default),
    )  # fmt: skip


def module_weights(folder: str) -> dict[str, str]:
    """Return the weight file of each dense module, by the prefix that its tensors get. Raises `LoadError` if a module
    has no weights."""
    found = read_sentence_transformer(folder)
    weights = {}
    for dense in [] if found is None else found.dense:
        path = dense.name.removesuffix(".linear")
        files = [os.path.join(folder, path, name) for name in MODULE_WEIGHTS]
        present = [file for file in files if os.path.exists(file)]
        if not present:
            raise LoadError(f"{folder}: modules.json has a module {path}, which has no {' or '.join(MODULE_WEIGHTS)}.")
        weights[path] = present[0]
    return weights


def _pooling(folder: str, path: str) -> tuple[str, bool]:
    settings = _read(folder, os.path.join(path, "config.json"))
    modes = [mode for name, mode in _OLD_MODES.items() if settings.get(name)]
    given = settings.get("pooling_mode")
    if given is not None:
        modes = [given] if isinstance(given, str) else [str(mode) for mode in given] if isinstance(given, list) else []
    if len(modes) != 1 or modes[0] not in _MODES:
        raise LoadError(
            f"{folder}/{path} pools by {' and '.join(map(str, modes)) or 'nothing'}, which is not built yet; one of "
            f"{', '.join(_MODES)} is."
        )
    return _MODES[modes[0]], bool(settings.get("include_prompt", True))


def _dense(folder: str, path: str) -> DenseConfig:
    settings = read_json(os.path.join(folder, path, "config.json"))
    function = str(settings.get("activation_function") or "torch.nn.modules.linear.Identity").split(".")[-1]
    if function not in _ACTIVATIONS or settings.get("use_residual"):
        what = function if function not in _ACTIVATIONS else "use_residual"
        raise LoadError(f"{folder}/{path}: {what} in a dense module is not built yet.")
    size = settings.get("out_features")
    if type(size) is not int or size < 1:
        raise LoadError(f"{folder}/{path}/config.json: out_features is {str(size)[:60]}, no size.")
    return DenseConfig(f"{path}.linear", size, bool(settings.get("bias", True)), _ACTIVATIONS[function])


def _read(folder: str, name: str) -> dict[str, Any]:
    path = os.path.join(folder, name)
    return read_json(path) if os.path.exists(path) else {}
