"""The prompt of a completion with a `suffix`: the model writes the text between prompt and suffix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.loading.tokenizer import ModelTokenizer

# Tokens before the prompt, before the suffix and before the middle, as model families were trained with them.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
)
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral


def fills_in(tokenizer: ModelTokenizer) -> bool:
    """Return whether a model has tokens for a prompt with a suffix."""
    return _marks_of(tokenizer) is not None


def fill_in_prompt(tokenizer: ModelTokenizer, prompt: str, suffix: str) -> str:
    """Return the prompt that asks for the text between `prompt` and `suffix`. Raises `RequestError` if the model has no
    tokens for it."""
    marks = _marks_of(tokenizer)
    if marks is None:
        raise RequestError(
            "The model has no tokens for a prompt with a suffix: it was not trained to fill in. Leave suffix out.",
            param="suffix",
        )
    if marks == _SUFFIX_FIRST:
        return f"{marks[0]}{suffix}{marks[1]}{prompt}"
    return f"{marks[0]}{prompt}{marks[1]}{suffix}{marks[2]}"


def _marks_of(tokenizer: ModelTokenizer) -> tuple[str, ...] | None:
    known = tokenizer.backend_tokenizer.token_to_id
    return next((marks for marks in (*_MARKS, _SUFFIX_FIRST) if all(known(one) is not None for one in marks)), None)
