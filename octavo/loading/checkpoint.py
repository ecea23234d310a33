"""Where a model's files are and what its configuration says. No torch here: the server process uses this module too.

`resolve` turns a user's name of a model into a `Checkpoint`. `file_weights` and `tokenizer` read its files.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from octavo.errors import LoadError
from octavo.loading.default_model import DEFAULT_MODEL_GENERATION, DEFAULT_MODEL_NAME, fetch_default_model
from octavo.loading.gguf_config import gguf_config
from octavo.loading.gguf_file import read_gguf
from octavo.loading.mistral_format import consolidated_files, mistral_config
from octavo.loading.sentence_transformers import module_weights
from octavo.loading.weight_files import complete_shards, gguf_parts, pick_weights, read_json

if TYPE_CHECKING:
    from octavo.loading.hub import Fetch

# "name", "org/name", or either with ":file" to choose among GGUF files.
_HUB_ID = re.compile(r"([\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?::([\w.-]+))?")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that was found. It crosses processes, so it holds plain data only.

    `config` is the model's configuration in the form of Hugging Face's config.json for every file format, so that
    `octavo.models` reads one vocabulary. `generation_config` has the form of generation_config.json (at least
    eos_token_id, where known).
    """

    name: str  # what the user asked for: hub id, path, or the default model's name
    format: str  # "safetensors", "mistral", "pt", "gguf" or "dummy"
    path: str  # the folder, or the .gguf file
    weight_files: list[str]  # absolute, in load order; empty for dummy
    tokenizer_path: str  # a folder with tokenizer files, or a .gguf file
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    module_files: dict[str, str] = field(default_factory=dict)  # weight files of modules after the network, by prefix
    trusts_code: bool = False  # whether Python code in the tokenizer's folder may run

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids of the tokens that end an answer. Negative ids are ignored. Raises `LoadError` for anything
        but an id or a list of ids."""
        ids = self.generation_config.get("eos_token_id")
        found = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(token) is int for token in found):
            raise LoadError(f"{self.name}: eos_token_id is {str(ids)[:60]}, not a token id or a list of such.")
        return tuple(token for token in found if token >= 0)

    def end_token_ids(self, of_tokenizer: int | None, vocab_size: int) -> list[int]:
        """Return the ids of the tokens that end an answer, in order, with the tokenizer's end-of-sequence token."""
        ids = {*self.eos_token_ids} | ({of_tokenizer} if of_tokenizer is not None else set())
        return sorted(token for token in ids if token < vocab_size)  # a token without a logit is never sampled


def resolve(
    model: str,
    *,
    load_format: str = "auto",
    revision: str | None = None,
    download_dir: str | None = None,
    tokenizer: str | None = None,
    fetch: Fetch | None = None,
) -> Checkpoint:
    """Return the checkpoint of a model, and fetch files that are not here yet.

    `model` is "" or the default model's name, a .gguf file, a folder, or a hub id (`org/name`, `org/name:file.gguf`).
    `load_format` "auto" takes safetensors, else pt, else gguf; "dummy" needs no weights. `fetch` puts files of a hub
    model into the cache before they are looked for. Raises `LoadError` with one line that says what was asked, what
    was found and what to do.
    """
    path = os.path.abspath(os.path.expanduser(model))
    is_default = is_default_model(model)
    if revision is not None and (is_default or os.path.exists(path)):
        name = f"the default model, {DEFAULT_MODEL_NAME}," if is_default else model
        raise LoadError(f"revision {revision} is for models of the hub, and {name} is none of these; leave it out.")
    if is_default:
        path = str(fetch_default_model())
        found = _from_gguf(DEFAULT_MODEL_NAME, path, load_format, _tokenizer_path(tokenizer, download_dir, path))
        return replace(found, generation_config=found.generation_config | DEFAULT_MODEL_GENERATION)
    if not os.path.exists(path):
        path = _from_hub(model, load_format, revision, download_dir, fetch)
    if os.path.isdir(path):
        path = _choose_in_folder(model, path, load_format)
    tokenizer_path = _tokenizer_path(tokenizer, download_dir, path)
    if os.path.isdir(path):
        return _from_folder(model, path, load_format, tokenizer_path)
    if not path.endswith(".gguf"):
        raise LoadError(f"{model} is a file but not a .gguf file; pass its folder, a .gguf file or a Hugging Face id.")
    return _from_gguf(model, path, load_format, tokenizer_path)


def _refuse_adapter(name: str, folder: str, names: list[str]) -> None:
    """Raise `LoadError` for a folder that has the weights of an adapter, and none of a model."""
    if "adapter_config.json" not in names:
        return
    base = read_json(os.path.join(folder, "adapter_config.json")).get("base_model_name_or_path") or "BASE_MODEL"
    raise LoadError(
        f"{name} is a LoRA adapter, not a model: serve its base model with it, octavo serve {base} --enable-lora "
        f"--lora-modules NAME={folder}."
    )


def _from_gguf(name: str, path: str, load_format: str, tokenizer_path: str) -> Checkpoint:
    if load_format not in ("auto", "gguf", "dummy"):
        raise LoadError(f"{name} is a GGUF file, which --load-format {load_format} does not read; use auto or gguf.")
    config, generation_config = gguf_config(read_gguf(path, texts=False))
    weight_format, files = ("dummy", []) if load_format == "dummy" else ("gguf", [path])
    return Checkpoint(name, weight_format, path, files, tokenizer_path, config, generation_config)


def _from_folder(name: str, folder: str, load_format: str, tokenizer_path: str) -> Checkpoint:
    names = os.listdir(folder)
    is_mistral = _is_mistral(names)
    if is_mistral:
        path = os.path.join(folder, "params.json")
        config = mistral_config(path, read_json(path))
    else:
        config = read_json(os.path.join(folder, "config.json"))
        config = _with_quantization(config, folder, names)
    generation_path = os.path.join(folder, "generation_config.json")
    generation_config = read_json(generation_path) if os.path.exists(generation_path) else {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if generation_config.get(key) is None and config.get(key) is not None:
            generation_config[key] = config[key]
    weight_format = "dummy"
    files: list[str] = []
    if is_mistral and load_format in ("auto", "safetensors"):
        weight_format, files = "mistral", consolidated_files(names)
    elif load_format != "dummy":
        weight_format, files = pick_weights(names, load_format)
        if not files:
            _refuse_adapter(name, folder, names)
            raise LoadError(
                f"{name} has no weights for --load-format {load_format}: none of {len(names)} files in {folder} is "
                f"{'.safetensors, pytorch_model*.bin or .gguf' if load_format == 'auto' else 'of that format'}."
            )
        files = complete_shards(folder, weight_format, files)
    paths = [os.path.join(folder, file) for file in files]
    modules = module_weights(folder) if weight_format in ("safetensors", "pt") else {}
    return Checkpoint(name, weight_format, folder, paths, tokenizer_path, config, generation_config, modules)


# Some tools leave config.json alone and write their quantization settings to a file of their own: its name, and the
# method that the file stands for.
_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


def _with_quantization(config: dict[str, Any], folder: str, names: list[str]) -> dict[str, Any]:
    """Return the configuration; if the checkpoint is quantized, with a `quantization_config` that names its method."""
    settings = config.get("quantization_config") or config.get("compression_config")
    text = config.get("text_config")
    settings = settings or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not settings:
        for name, method in _QUANTIZATION_FILES.items():
            if name in names:
                found = read_json(os.path.join(folder, name))
                # SqueezeLLM's file has AWQ's name, and says its bits by another one.
                settings = {"quant_method": "squeezellm" if "wbits" in found else method, **found}
                break
    if not settings:
        return config
    if not isinstance(settings, dict):
        raise LoadError(f"{folder}: quantization_config is {settings!r}, not an object.")
    if settings.get("quant_method") is None:
        settings = {**settings, "quant_method": "compressed-tensors"}
    return {**config, "quantization_config": settings}


def _is_mistral(names: list[str]) -> bool:
    """Return True if a model's files are in Mistral's own format only."""
    return "params.json" in names and bool(consolidated_files(names)) and not pick_weights(names, "auto")[0]


def _choose_in_folder(name: str, folder: str, load_format: str) -> str:
    """Return the folder itself if config.json describes its weights, else the path of the one GGUF file in it."""
    names = os.listdir(folder)
    if _is_mistral(names):
        return folder
    weight_format, files = pick_weights(names, "auto" if load_format == "dummy" else load_format)
    has_config = "config.json" in names
    if has_config and (weight_format != "gguf" or load_format == "dummy"):
        return folder
    if weight_format == "gguf":
        return os.path.join(folder, _one_gguf(name, files, f"pass one of them by its path in {folder}"))
    _refuse_adapter(name, folder, names)
    raise LoadError(
        f"{name} has no config.json and no .gguf file among its {len(names)} files in {folder}; name a model's folder "
        "or a .gguf file."
    )


def _one_gguf(name: str, files: list[str], what_to_do: str) -> str:
    if len(files) != 1:
        raise LoadError(f"{name} has {len(files)} GGUF files ({', '.join(files[:8])}); {what_to_do}.")
    return files[0]


def _from_hub(model: str, load_format: str, revision: str | None, download_dir: str | None, fetch: Fetch | None) -> str:
    """Return the folder of a fetched hub model, or the path of one GGUF file in it."""
    match = _HUB_ID.fullmatch(model)
    if match is None or (model.endswith(".gguf") and not match[2]):
        found = f"there is no file or folder {model}"
        if not os.path.isabs(os.path.expanduser(model)):
            found += f" in {os.getcwd()}"
        raise LoadError(
            f"{found}, and it is not a Hugging Face id (org/name) either; `octavo list` shows the models that are here."
        )
    repo, wanted = match[1], match[2]

    def chosen_gguf(files: list[str]) -> str:
        choose = f"choose one as {repo}:FILE.gguf"
        if not wanted:
            return _one_gguf(model, files, choose)
        # `wanted` is a file's name, or a part that only one file's name has, such as its quantization.
        fitting = [f for f in files if f == wanted] or [f for f in files if wanted.lower() in f.lower()]
        if len(fitting) != 1:
            raise LoadError(
                f"{wanted} fits {len(fitting)} of the GGUF files of {repo} ({', '.join(files[:8])}); {choose}."
            )
        return fitting[0]

    def pick(names: list[str]) -> list[str]:
        if load_format == "dummy" and "config.json" in names and not wanted:
            return []
        if _is_mistral(names) and not wanted:
            return consolidated_files(names)
        weight_format, files = pick_weights(
            names, "gguf" if wanted else "auto" if load_format == "dummy" else load_format
        )
        if weight_format == "gguf" or wanted:
            return gguf_parts(chosen_gguf(files), names)
        if not files:
            shown = ", ".join(names[:8])
            raise LoadError(f"{model} has no weights for --load-format {load_format}: its files are {shown}.")
        return files  # `download` adds the index of shards, which is a small file

    # Imported here: most starts use a local model, and the hub's client takes 0.2 s to import.
    from octavo.loading.hub import download

    folder = download(repo, revision, download_dir, pick, fetch)
    if wanted:
        _, files = pick_weights(os.listdir(folder), "gguf")
        return os.path.join(folder, chosen_gguf(files))
    return folder


def is_hub_id(model: str) -> bool:
    """Return True for a name that is no file here and may be a model on the hub."""
    found = None if os.path.exists(os.path.expanduser(model)) else _HUB_ID.fullmatch(model)
    return found is not None and not is_default_model(model) and not (model.endswith(".gguf") and not found[2])


def is_default_model(model: str) -> bool:
    """Return True for "", and for the default model's name if no local file or folder has this name."""
    return not model or (model == DEFAULT_MODEL_NAME and not os.path.exists(model))


def find_tokenizer(model: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """Return the folder or .gguf file of a model's tokenizer. From the hub, it fetches the tokenizer without the
    weights. `model` is "" or the default model's name, a folder, a .gguf file, or a hub id. Raises `LoadError`."""
    if is_default_model(model):
        return str(fetch_default_model())
    return _tokenizer_path(model, download_dir, model, revision)


def _tokenizer_path(tokenizer: str | None, download_dir: str | None, default: str, revision: str | None = None) -> str:
    if not tokenizer:
        return default
    path = os.path.abspath(os.path.expanduser(tokenizer))
    if os.path.isdir(path) or (os.path.isfile(path) and path.endswith(".gguf")):
        return path
    match = _HUB_ID.fullmatch(tokenizer)
    if os.path.exists(path) or match is None or match[2] or tokenizer.endswith(".gguf"):
        raise LoadError(f"--tokenizer {tokenizer} is not a folder, a .gguf file or a Hugging Face id (org/name).")
    from octavo.loading.hub import download

    # --revision names a commit of the model's repository, and the tokenizer's repository has other commits.
    return download(tokenizer, revision, download_dir)
