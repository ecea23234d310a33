"""Prompts of benchmarks from files of texts: vLLM's data sets "custom" and "sonnet"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.loading.tokenizer import ModelTokenizer

_SONNET_ASKS = "Pick as many lines as you can from these poem lines:\n"


def custom_texts(path: str, output_len: int) -> list[tuple[str, int]]:
    """Return the `prompt` of each line of a JSON Lines file, and its number of output tokens: `output_len`, or the
    line's own `output_tokens` if `output_len` is -1. Raises `ConfigError`."""
    if output_len != -1 and output_len < 1:
        raise ConfigError(f"--custom-output-len must be at least 1, or -1 for each line's own, got {output_len}.")
    found = []
    for number, line in enumerate(_lines(path), 1):
        try:
            entry = json.loads(line)
            text, wanted = entry["prompt"], entry["output_tokens"] if output_len == -1 else output_len
        except (ValueError, TypeError, KeyError):
            text, wanted = None, None
        if not isinstance(text, str) or not isinstance(wanted, int) or wanted < 1:
            own = ', "output_tokens": 100' if output_len == -1 else ""
            raise ConfigError(f'--dataset-path {path}, line {number} is not {{"prompt": "…"{own}}}.')
        found.append((text, wanted))
    return found


def sonnet_texts(
    tokenizer: ModelTokenizer, path: str, num_prompts: int, input_len: int, prefix_len: int, *, templates: bool,
    seed: int = 0,
) -> list[str]:  # fmt: skip
    """Return questions about lines drawn from a file. Each has about `input_len` tokens and never more, template
    included. The first `prefix_len` tokens, about, are the same lines in all questions. Raises `ConfigError`."""
    lines = [line + "\n" for line in _lines(path)]

    def length(text: str) -> int:
        text = as_chat(tokenizer, text) if templates else text
        return len(tokenizer.encode(text, add_special_tokens=False))

    asks = length(_SONNET_ASKS)
    if not asks <= prefix_len <= input_len:
        raise ConfigError(
            f"--sonnet-prefix-len must be between {asks}, the tokens of the question, and --sonnet-input-len "
            f"{input_len}, got {prefix_len}."
        )
    of_line = sum(len(tokenizer.encode(line, add_special_tokens=False)) for line in lines) / len(lines)
    rng = np.random.default_rng(seed)
    num_lines, num_shared = round((input_len - asks) / of_line), round((prefix_len - asks) / of_line)
    shared = [lines[i] for i in rng.integers(len(lines), size=num_shared)]
    found = []
    for _ in range(num_prompts):
        chosen = shared + [lines[i] for i in rng.integers(len(lines), size=max(0, num_lines - num_shared))]
        while length(_SONNET_ASKS + "".join(chosen)) > input_len:  # the drawn lines were longer than average
            chosen.pop()
        found.append(_SONNET_ASKS + "".join(chosen))
    return found


def as_chat(tokenizer: ModelTokenizer, text: str) -> str:
    """Return a text as the chat template writes a user's message; unchanged if there is no template."""
    if tokenizer.chat_template is None:
        return text
    messages = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _lines(path: str) -> list[str]:
    try:
        # Not splitlines: it also cuts at U+2028 and other characters that a line of JSON may contain.
        lines = [line for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--dataset-path {path} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from None
    if not lines:
        raise ConfigError(f"--dataset-path {path} has no lines.")
    return lines
