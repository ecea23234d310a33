"""The tokenizer of a checkpoint, with its chat template, as the `transformers` object that the server encodes with.

A tokenizer.json or a GGUF file is read without torch and in a fraction of a second; other forms go the slow way through
`AutoTokenizer`. Decoding is incremental elsewhere, on the `backend_tokenizer` of what is returned here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from octavo.errors import LoadError
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.gguf import read_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(checkpoint: Checkpoint, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer. `chat_template`, a file's path or a template's text, takes the place of the checkpoint's own.

    Raises `LoadError` if there is no tokenizer or it cannot be read.
    """
    template = None if chat_template is None else _read_template(chat_template)
    if template is not None:
        _check_template(template, str(chat_template))
    tokenizer = read_tokenizer(checkpoint.tokenizer_path)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def read_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The tokenizer in a folder or a .gguf file. Raises `LoadError`."""
    return _from_gguf(path) if path.endswith(".gguf") else _from_folder(path)


def read_tokenizer_json(checkpoint: Checkpoint) -> str:
    """The tokenizer as the `tokenizers` library writes it to a file; where it can be, without `transformers`."""
    path = checkpoint.tokenizer_path
    if path.endswith(".gguf"):
        from octavo.loading.gguf_tokenizer import build_gguf_tokenizer

        return build_gguf_tokenizer(read_gguf(path)).backend.to_str()
    backend = _from_folder(path).backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


def _from_gguf(path: str) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    from octavo.loading.gguf_tokenizer import build_gguf_tokenizer

    built = build_gguf_tokenizer(read_gguf(path))
    tokenizer = PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast)
    # As transformers' own model-specific classes do; given as `tokenizer_object` it would be copied whole.
    tokenizer._tokenizer = built.backend
    tokenizer.__init__(**built.options, clean_up_tokenization_spaces=False)
    return tokenizer


def _from_folder(folder: str) -> PreTrainedTokenizerFast:
    what_to_do = "pass --tokenizer with a folder that has one, a .gguf file or a Hugging Face id"
    if os.path.exists(os.path.join(folder, "tokenizer.json")):
        from transformers import PreTrainedTokenizerFast as tokenizer_class
    elif any(name.endswith((".model", ".tiktoken")) or name.startswith("vocab.") for name in os.listdir(folder)):
        from transformers import AutoTokenizer as tokenizer_class  # imports torch and takes seconds
    else:
        raise LoadError(f"{folder} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json); {what_to_do}.")
    try:
        return tokenizer_class.from_pretrained(folder, local_files_only=True)
    except Exception as e:  # a damaged file fails in any of a dozen ways, some of them bare Exceptions from Rust
        reason = str(e).strip().splitlines()[0].rstrip(".") if str(e).strip() else type(e).__name__
        raise LoadError(f"the tokenizer in {folder} cannot be read ({reason}); {what_to_do}.") from None


def _read_template(chat_template: str) -> str:
    if any(mark in chat_template for mark in ("{{", "{%", "\n")):
        return chat_template
    try:
        with open(os.path.expanduser(chat_template), encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as e:
        raise LoadError(
            f"--chat-template {chat_template} is neither a template (it has no {{{{ or {{%) nor a file that can be "
            f"read: {e}."
        ) from None


def _check_template(template: str, source: str) -> None:
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError as e:
        if "unknown tag 'generation'" not in str(e):  # a tag of transformers' own
            shown = source if len(source) < 100 else source[:100] + "..."
            raise LoadError(
                f"--chat-template {shown!r} is not a valid template: {e.message}, line {e.lineno}."
            ) from None
