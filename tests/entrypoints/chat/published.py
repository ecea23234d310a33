"""Published chat templates in the folder that OCTAVO_CHAT_TEMPLATES names, such as llama.cpp's models/templates. Run as
a program, it prints the table of benchmarks/results/2026-11-30-templates.md: which format was recognised for which
template, and tried."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from octavo.entrypoints.chat.reasoning import STYLES, Reasoning, new_splitter
from octavo.entrypoints.chat.template_traits import rendered_calls
from octavo.entrypoints.chat.tools.format_detection import _cut_calls, model_formats
from octavo.entrypoints.chat.tools.format_parser import FormatParser
from octavo.entrypoints.chat.tools.tool_formats import FORMATS
from octavo.entrypoints.chat.tools.tool_parser_base import Call
from octavo.loading.tokenizer import ModelTokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
FOLDER = os.environ.get("OCTAVO_CHAT_TEMPLATES")


def published(folder: str | None = FOLDER) -> dict[str, str]:
    """Return the templates of the folder by name."""
    paths = sorted(Path(folder).glob("**/*.jinja")) if folder else []
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def tokenizer_of(template: str) -> ModelTokenizer:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    return ModelTokenizer(backend, SPECIAL, chat_template=template)


def num_read(template: str) -> tuple[int, int]:
    """Return how many of the template's renderings of calls are read character by character as they were given, and
    how many renderings there are. Where calls are the whole answer, those after text do not count."""
    tokenizer = tokenizer_of(template)
    formats = model_formats(tokenizer)
    style = formats.reasoning
    has_own_splitter = style is not None and (style.has_channels or style.blocks is not None or not style.start)
    rendered = rendered_calls(tokenizer, template) if has_own_splitter else _cut_calls(tokenizer, template)
    if formats.tools is not None and formats.tools.is_whole_answer:
        rendered = [one for one in rendered if not one.says]
    right = 0
    for one in rendered if formats.tools is not None else ():
        parser = FormatParser(formats.tools, {call.name: call.tool["function"]["parameters"] for call in one.calls})
        text = one.text
        if has_own_splitter and style is not None:
            splitter = new_splitter(Reasoning(style, is_open=False, is_optional=True))
            text = splitter.add(text)[1] + splitter.finish()[1]
        pieces: list[Any] = [piece for character in text for piece in parser.add(character)] + parser.finish()
        found = [(call.name, json.loads(call.arguments)) for call in pieces if isinstance(call, Call)]
        right += found == [(call.name, call.arguments) for call in one.calls]
    return right, len(rendered)


def main() -> None:
    rows: dict[str, list[str]] = {}
    for name, template in published(sys.argv[1]).items():
        formats = model_formats(tokenizer_of(template))
        known = [one for one in ("hermes", "qwen3_coder", *FORMATS) if FORMATS[one] == formats.tools]
        style = next((one for one in ("qwen3", *STYLES) if STYLES[one] == formats.reasoning), None)
        right, number = num_read(template)
        shown = f"`{known[0]}`" if known else "read off" if formats.tools else "refused"
        thinks = (
            f" ({style})" if style else " (marks read off)" if formats.reasoning and formats.reasoning.start else ""
        )
        rows.setdefault(f"{shown} | {f'{right} of {number}' if number else 'none are written'}", []).append(
            name + thinks
        )
    print("| calls | renderings read | templates, and the style of their reasoning |\n|---|---|---|")
    for row, names in sorted(rows.items()):
        print(f"| {row} | {', '.join(names)} |")


if __name__ == "__main__":
    main()
