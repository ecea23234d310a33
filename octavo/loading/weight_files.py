"""Which of a model's files hold its weights: one rule for a folder on disk and for a listing of the hub.

Other files that often lie beside the weights (Meta's consolidated.*, optimizer states, adapters) are ignored.
"""

import json
import math
import os
import re
import stat
from typing import Any

from octavo.errors import LoadError

_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")  # any part of a split model but the first
# Medusa heads and SqueezeLLM's models, under the names that their authors use.
_OTHER_PT = re.compile(r"medusa_lm_head\.pt|sq-.*\.pt")
_MAX_TEXT_BYTES = 256 << 20  # the largest tokenizer.json have 35 MB
_MAX_JSON_DEPTH = 64
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SINGLE = {"safetensors": "model.safetensors", "pt": "pytorch_model.bin"}


def pick_weights(names: list[str], load_format: str) -> tuple[str, list[str]]:
    """Return the format and the weight files among `names` (of one folder); ("", []) if no file fits.

    `load_format` "auto" prefers safetensors, then pt, then gguf. If there are several GGUF files, all are returned:
    each is a whole model or the first part of a split model, so the caller must choose.
    """
    found = {
        "safetensors": [
            n for n in names if n.endswith(".safetensors") and not n.startswith(("consolidated", "adapter_"))
        ],
        "pt": [n for n in names if (n.startswith("pytorch_model") and n.endswith(".bin")) or _OTHER_PT.fullmatch(n)],
        "gguf": [n for n in names if n.endswith(".gguf") and not _LATER_PART.search(n)],
    }
    for file_format in found if load_format == "auto" else [load_format]:
        if files := sorted(found[file_format]):
            single = _SINGLE.get(file_format)
            return file_format, [single] if single in files else files
    return "", []


def gguf_parts(name: str, names: list[str]) -> list[str]:
    """Return the files among `names` that make up the GGUF model whose first or only file is `name`."""
    match = re.fullmatch(r"(.*-)00001(-of-\d{5}\.gguf)", name)
    return [name] if match is None else [n for n in names if n.startswith(match[1]) and n.endswith(match[2])]


def complete_shards(folder: str, file_format: str, files: list[str]) -> list[str]:
    """Return the shards that the folder's index lists, or `files` if there is no index. Raises `LoadError` if a shard
    is missing or the index is damaged."""
    single = _SINGLE[file_format]
    index_path = os.path.join(folder, f"{single}.index.json")
    if files == [single] or not os.path.exists(index_path):
        return files
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise LoadError(f"{index_path} is damaged: it has no weight_map from tensors to files; fetch it again.")
    shards = sorted(set(weight_map.values()))
    if not shards:
        raise LoadError(f"{index_path} is damaged: its weight_map names no file; fetch it again.")
    missing = [s for s in shards if s != os.path.basename(s) or not os.path.isfile(os.path.join(folder, s))]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise LoadError(
            f"{folder} lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing[:3])}{more}; fetch the "
            "model again."
        )
    return shards


def read_json(path: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `LoadError` if the file holds anything else."""
    value = _read_json(path)
    if not isinstance(value, dict):
        raise LoadError(
            f"{path} is damaged: it holds a JSON {type(value).__name__}, expected an object; fetch it again."
        )
    return value


def read_json_list(path: str) -> list[dict[str, Any]]:
    """Return the list of objects in a JSON file. Raises `LoadError` if the file holds anything else."""
    value = _read_json(path)
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise LoadError(f"{path} is damaged: it holds no list of objects; fetch it again.")
    return value


def _read_json(path: str) -> Any:
    text = read_text(path)
    try:
        value = json.loads(text, parse_constant=_constant, parse_float=_float, parse_int=_int)
        _check_depth(value)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # raises for half of a pair
        return value
    except (json.JSONDecodeError, RecursionError) as e:
        raise LoadError(f"{path} is damaged: it is not JSON ({e}); fetch it again.") from None
    except ValueError as e:
        raise LoadError(f"{path} is damaged: {e}; fetch it again.") from None


def read_text(path: str) -> str:
    """Return the contents of a text file in UTF-8. Raises `LoadError`, also for what `check_text_file` refuses."""
    try:
        check_text_file(path)
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as e:
        raise LoadError(f"cannot read {path}: {e.strerror or e}.") from None
    except UnicodeDecodeError as e:
        raise LoadError(f"{path} is damaged: it is not UTF-8 ({e}); fetch it again.") from None


def check_text_file(path: str) -> None:
    """Raise `LoadError` unless `path` is a regular file of at most `_MAX_TEXT_BYTES`. Reading a pipe or a device may
    never end."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise LoadError(f"{path} is not a file.")
    if found.st_size > _MAX_TEXT_BYTES:
        raise LoadError(f"{path} is too large: it has {found.st_size} bytes, and {_MAX_TEXT_BYTES} are read at most.")


# The functions below refuse JSON values that cannot be copied or sent to another process, or change them.
def _check_depth(value: Any, depth: int = 0) -> None:
    if depth > _MAX_JSON_DEPTH:
        raise ValueError(f"it is nested more than {_MAX_JSON_DEPTH} deep")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(item, dict | list):
            _check_depth(item, depth + 1)


def _int(text: str) -> Any:
    """Return an integer, or a float if the number takes more than 64 bits: transformers writes 10**30 for no limit."""
    return int(text) if len(text) <= 20 and -1 << 63 <= int(text) < 1 << 63 else _float(text)


def _constant(name: str) -> Any:
    """Return Infinity or NaN in the form in which transformers writes it, which every process can read."""
    return {"__float__": name}


def _float(text: str) -> Any:
    value = float(text)
    return value if math.isfinite(value) else _constant("Infinity" if value > 0 else "-Infinity")
