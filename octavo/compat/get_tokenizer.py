"""`get_tokenizer` under the name of vLLM's module."""

from pathlib import Path

from octavo.errors import ConfigError
from octavo.loading.checkpoint import find_tokenizer
from octavo.loading.tokenizer import ModelTokenizer, read_tokenizer

__all__ = ["get_tokenizer"]


def get_tokenizer(
    tokenizer_name: str | Path,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
) -> ModelTokenizer:
    """The tokenizer of a folder, a .gguf file or a Hugging Face id. Python code of the folder runs only with
    `trust_remote_code`. Raises `LoadError`, and `ConfigError` for what is not built."""
    if tokenizer_mode not in ("auto", "hf"):
        raise ConfigError(f"tokenizer_mode {tokenizer_mode} is not built; use auto.")
    return read_tokenizer(find_tokenizer(str(tokenizer_name), revision, download_dir), trust_remote_code)
