"""The tokenizer of a model's folder: tokenizer.json or a vocabulary file, and the small files beside it with the
special tokens and chat templates. The rules are from `transformers` (5.23).
"""

import glob
import os
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from octavo.errors import LoadError
from octavo.loading.tokenizer_parts import ROLES, TokenizerParts
from octavo.loading.vocabulary_files import find_vocabulary, read_vocabulary
from octavo.loading.weight_files import check_text_file, read_json, read_text

WHAT_TO_DO = "pass --tokenizer with a folder that has one, a .gguf file or a Hugging Face id"
# Settings of tokenizer_config.json that only `transformers` follows.
_UNUSUAL = ("fix_mistral_regex", "fast_tokenizer_files")


def read_tokenizer_folder(folder: str) -> TokenizerParts | None:
    """Return the tokenizer of a folder, or None if only `transformers` can read it.

    Raises `LoadError` if the folder has no tokenizer; a damaged file may raise anything.
    """
    names = os.listdir(folder)
    config = _read_json(folder, "tokenizer_config.json")
    if "tokenizer.json" in names:
        if any(config.get(name) for name in _UNUSUAL):
            return None
        path = os.path.join(folder, "tokenizer.json")
        check_text_file(path)
        return _with_special_tokens(folder, Backend.from_file(path), config)
    name = find_vocabulary(names)
    if name is None and not any(n.endswith(".model") or n.startswith("vocab.") for n in names):
        raise LoadError(
            f"{folder} has no tokenizer (tokenizer.json, tokenizer.model, tekken.json, *.tiktoken, vocab.json or "
            f"vocab.txt); {WHAT_TO_DO}."
        )
    found = read_vocabulary(folder, name, config) if name else None
    return None if found is None else _with_special_tokens(folder, found.backend, {**found.roles, **config})


def _with_special_tokens(folder: str, backend: Backend, config: dict[str, Any]) -> TokenizerParts:
    """Return the tokenizer with its special tokens, by the rules of `PreTrainedTokenizerFast.from_pretrained`.
    tokenizer.json says which tokens are added to a text (add_bos_token and similar settings are not read). The other
    files say which tokens are special, and their roles."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    by_role: dict[str, Any] = {}
    if isinstance(extra, dict):  # tokens by their own roles, such as "image_token"; the list is in another key
        by_role, extra = extra, config.get("additional_special_tokens")
    added: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in config:
        added = {int(index): AddedToken(**token) for index, token in config["added_tokens_decoder"].items()}
    else:  # a folder from a version before 4.34
        for key, value in _read_json(folder, "special_tokens_map.json").items():
            if key == "extra_special_tokens" and isinstance(value, list):
                extra = [*(extra or []), *value]
            elif key == "additional_special_tokens":
                extra = value if extra is None else extra
            else:
                config[key] = value | {"special": True} if isinstance(value, dict) else value
        special_texts = {str(_token(key, value)) for key, value in config.items() if key in ROLES and value}
        special_texts |= {str(_token("extra_special_tokens", token)) for token in extra or []}
        for text, index in _read_json(folder, "added_tokens.json").items():
            is_special = text in special_texts
            added[index] = AddedToken(text, normalized=not is_special, special=is_special)
        added |= backend.get_added_tokens_decoder()
    if backend.padding is not None:
        config.setdefault("pad_token", backend.padding["pad_token"])
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    special = {
        key: _token(key, value)
        for key, value in config.items()
        if (key in ROLES and value is not None) or (key.endswith("_token") and isinstance(value, str | dict))
    }
    special |= {key: _token(key, value) for key, value in by_role.items()}
    return TokenizerParts(
        backend,
        special,
        [_token("extra_special_tokens", token) for token in extra or []],
        [token for _, token in sorted(added.items())],
        _chat_template(folder, config),
        bool(config.get("clean_up_tokenization_spaces", False)),
        stated if isinstance(stated := config.get("response_template"), dict) else None,
    )


def _token(name: str, value: Any) -> str | AddedToken:
    if isinstance(value, dict):
        return AddedToken(**{key: item for key, item in value.items() if key != "__type"})
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}, not a token")
    return value


def _chat_template(folder: str, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, several templates by name, or None. Template files take precedence over
    chat_template.json, which takes precedence over tokenizer_config.json."""
    paths = {"default": os.path.join(folder, "chat_template.jinja")}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "additional_chat_templates", "*.jinja"))):
        paths[os.path.basename(path).removesuffix(".jinja")] = path
    templates = {}
    for name, path in paths.items():
        if os.path.exists(path):
            templates[name] = read_text(path)
    if templates:
        return templates["default"] if list(templates) == ["default"] else templates
    template = _read_json(folder, "chat_template.json").get("chat_template") or config.get("chat_template")
    found = {one["name"]: one["template"] for one in template} if isinstance(template, list) else template
    texts = [*found, *found.values()] if isinstance(found, dict) else [] if found is None else [found]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"chat_template is {str(template)[:60]}, no text and no list of named texts")
    return found


def _read_json(folder: str, name: str) -> dict[str, Any]:
    path = os.path.join(folder, name)
    return read_json(path) if os.path.exists(path) else {}
