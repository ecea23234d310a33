"""Every limit of one request, and the errors of what is beyond: how many values a JSON body has and how deep they lie,
and how much of what costs a processor each field may have. Bytes are limited where bodies are read (`auth_and_limits`),
lengths of prompts by the engine, media by --limit-mm-per-prompt.

A limit is a field of `ServerArgs`. `refuse_json` looks at the bytes of a body, before anything is made of them, and
`refuse_fields` at what they are, before any class reads it: fields are called alike in all APIs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.flags import flag

CONTAINER_NODES = 8  # values that a list or an object counts for, by what it takes to make and to collect
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))  # everything else
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

_STOPS = ("stop", "stop_sequences")
_TOKEN_IDS = ("logit_bias", "stop_token_ids")
_SCHEMAS = (
    "tools", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "structural_tag", "text", "output_config", "output_format",
)  # fmt: skip
_CONVERSATIONS = ("messages", "input", "system")


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The limits, as flags of the server."""

    max_json_nodes: int = flag(
        1_000_000, f"Values in a JSON body at most; a list or an object counts for {CONTAINER_NODES}.", positive=True
    )
    max_json_depth: int = flag(128, "Lists and objects within each other in a JSON body at most.", positive=True)
    max_stops: int = flag(64, "Stop strings of a request at most.", positive=True)
    max_bad_words: int = flag(256, "Bad words of a request at most.", positive=True)
    max_stop_chars: int = flag(1024, "Characters of a stop string or a bad word at most.", positive=True)
    max_logit_biases: int = flag(4096, "Tokens in a request's logit_bias, or stop_token_ids, at most.", positive=True)
    max_tools: int = flag(512, "Tools of a request at most.", positive=True)
    max_schema_bytes: int = flag(
        512 << 10, "Bytes of a request's tools, as JSON, and of its schema, grammar or choices at most.", positive=True
    )
    max_template_bytes: int = flag(256 << 10, "Bytes of a request's own chat_template at most.", positive=True)
    max_parts: int = flag(16384, "Messages of a request, with the parts of their contents, at most.", positive=True)
    max_logprob_entries: int = flag(
        2_000_000, "Log-probabilities in an answer at most: tokens times those of each token, of the prompt or of all "
        "completions.", positive=True,
    )  # fmt: skip

    def refuse_json(self, body: bytes) -> None:
        """Raise `RequestError` for a body with too many values, or values within too many others."""
        num_openers = body.count(b"[") + body.count(b"{")
        if self._most_nodes(body) <= self.max_json_nodes and num_openers <= self.max_json_depth:
            return  # even if all of it were outside of strings
        rest = _STRINGS.sub(b"", body)
        num_nodes = self._most_nodes(rest)
        if num_nodes > self.max_json_nodes:
            raise RequestError(
                f"The body has {num_nodes} values, and a request may have {self.max_json_nodes} here "
                f"(--max-json-nodes); a list or an object counts for {CONTAINER_NODES}.",
                code="request_too_large",
            )
        steps = map(_STEPS.__getitem__, rest.translate(None, _BRACKETS))
        if any(depth > self.max_json_depth for depth in itertools.accumulate(steps)):
            raise RequestError(
                "The body is nested too deeply: it has more than --max-json-depth, "
                f"{self.max_json_depth}, lists and objects within each other.",
                code="request_too_large",
            )

    @staticmethod
    def _most_nodes(body: bytes) -> int:
        """The values of a body whose strings are empty; of others it may have less."""
        num_openers = body.count(b"[") + body.count(b"{")
        return 1 + body.count(b",") + num_openers * CONTAINER_NODES

    def refuse_fields(self, fields: object) -> None:
        """Raise `RequestError` for the first field that has too much of something. What is of a wrong type is for the
        class of the body to refuse."""
        if not isinstance(fields, dict):
            return
        for name in _STOPS:
            self._refuse_texts(name, fields.get(name), "max_stops")
        self._refuse_texts("bad_words", fields.get("bad_words"), "max_bad_words")
        for name in _TOKEN_IDS:
            self._refuse("max_logit_biases", name, _length(fields.get(name)), "tokens")
        self._refuse("max_tools", "tools", _length(fields.get("tools")), "tools")
        if isinstance(template := fields.get("chat_template"), str):
            self._refuse("max_template_bytes", "chat_template", _num_bytes(template), "bytes")
        for name in _SCHEMAS:
            if fields.get(name) is not None:
                self._refuse("max_schema_bytes", name, _num_bytes(fields[name]), "bytes")
        for name in _CONVERSATIONS:
            if isinstance(messages := fields.get(name), list) and messages and isinstance(messages[0], dict):
                num_parts = sum(_length(one.get("content")) for one in messages if isinstance(one, dict))
                self._refuse("max_parts", name, len(messages) + num_parts, "messages and parts")

    def refuse_entries(self, name: str, num_each: int | None, num_tokens: int) -> None:
        """Raise `RequestError` for more log-probabilities than an answer may have: `num_each`, beside its own, of each
        of `num_tokens`."""
        if num_each is not None:
            self._refuse("max_logprob_entries", name, (1 + num_each) * num_tokens, "log-probabilities in all")

    def _refuse_texts(self, name: str, given: object, limit: str) -> None:
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list):
            return
        self._refuse(limit, name, len(texts), "texts")
        longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
        self._refuse("max_stop_chars", name, longest, "characters in one text")

    def _refuse(self, limit: str, name: str, found: int, of_what: str) -> None:
        if found > (most := getattr(self, limit)):
            raise RequestError(
                f"{name} has {found} {of_what}, and a request may have {most} here (--{limit.replace('_', '-')}).",
                param=name,
                code="request_too_large",
            )


def _length(value: object) -> int:
    return len(value) if isinstance(value, list | Mapping) else 0


def _num_bytes(value: Any) -> int:
    try:
        return len(value.encode()) if isinstance(value, str) else len(msgspec.json.encode(value))
    except UnicodeEncodeError:  # lone surrogates, which the class of the body refuses
        return 0
