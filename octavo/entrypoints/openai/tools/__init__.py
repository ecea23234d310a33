"""Tool calls in the texts that models write: one module a format, `forced` for those that a grammar imposes."""

from __future__ import annotations

from collections.abc import Callable

from octavo.entrypoints.openai.tools.calls import ToolParser, ToolSchemas
from octavo.entrypoints.openai.tools.hermes import HermesParser, QwenParser
from octavo.entrypoints.openai.tools.llama3_json import Llama3JsonParser
from octavo.entrypoints.openai.tools.mistral import MistralParser
from octavo.entrypoints.openai.tools.pythonic import PythonicParser

# By the name that --tool-call-parser gives: makes the parser of one answer.
PARSERS: dict[str, Callable[[ToolSchemas], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "qwen": QwenParser,
    "qwen3_coder": QwenParser,
}
# Marks that vocabularies may hold as special tokens, whose text would otherwise not be shown.
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>")
