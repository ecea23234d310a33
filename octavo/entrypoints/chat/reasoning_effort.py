"""Turns OpenAI's `reasoning_effort` and `verbosity` into variables of the model's chat template.

Templates read different variables: gpt-oss a level, Qwen 3 and GLM `enable_thinking`, Granite and DeepSeek V3.1
`thinking`. A value without a variable in the template is an error, unless the server was started with `--unknown-fields
ignore`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest
from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.loading.tokenizer import ModelTokenizer

logger = logging.getLogger("octavo.server")

_SWITCHES = ("enable_thinking", "thinking")
_LEVELS = {"minimal": "low", "xhigh": "high", "max": "high"}  # templates know low, medium and high
_BRACES = re.compile(r"\{[{%]|[%}]\}")  # each brace by itself: a search for pairs of braces would be quadratic


def effort_options(tokenizer: ModelTokenizer, body: ChatCompletionRequest, *, is_strict: bool) -> dict[str, Any]:
    """Return the template's variables for `reasoning_effort` and `verbosity` of `body`. Raises `RequestError` if
    `is_strict` and the template has no such variable."""
    effort, verbosity = body.reasoning_effort, body.verbosity
    if (effort is None and verbosity is None) or not (body.chat_template or tokenizer.chat_template):
        return {}
    known = _variables(tokenizer.get_chat_template(body.chat_template, body.tools or None))
    options: dict[str, Any] = {}
    if effort is not None:
        options = {name: effort != "none" for name in _SWITCHES if name in known}
        if "reasoning_effort" in known and effort != "none":
            options["reasoning_effort"] = _LEVELS.get(effort, effort)
        # Medium is the default of OpenAI's models.
        if not options and (effort not in ("none", "medium") or (effort == "none" and "reasoning_effort" in known)):
            _refuse("reasoning_effort", effort, is_strict)
    if verbosity is not None:
        if "verbosity" in known:
            options["verbosity"] = verbosity
        elif verbosity != "medium":
            _refuse("verbosity", verbosity, is_strict)
    return options


def _refuse(name: str, value: str, is_strict: bool) -> None:
    message = f"The model's chat template has no way to follow {name} {value!r}"
    if is_strict:
        raise RequestError(f"{message}; leave it out, or start the server with --unknown-fields ignore.", param=name)
    logger.debug("%s: it is ignored.", message)


@lru_cache(maxsize=16)
def _variables(template: str) -> frozenset[str]:
    """Return which of the names for effort and verbosity a template reads as variables."""
    code = " ".join(_code(template))
    names = ("reasoning_effort", "verbosity", *_SWITCHES)
    return frozenset(name for name in names if re.search(rf"(?<![.\w'\"]){name}\b(?!['\"])", code))


def _code(template: str) -> Iterator[str]:
    """Yield the code between the braces of a template, in one pass from left to right."""
    begin = None
    for found in _BRACES.finditer(template):
        if begin is None:
            begin = found.end() if found[0].startswith("{") else None
        elif not found[0].startswith("{"):
            yield template[begin : found.start()]
            begin = None
