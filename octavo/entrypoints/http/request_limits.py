"""The limits of one request, and the errors of requests beyond them: the number and depth of values in a JSON body, and
the sizes of fields that cost processor time. `body_reader` limits the bytes of bodies, the engine the lengths of
prompts, --limit-mm-per-prompt the media.

Each limit is a field of `ServerArgs`. `refuse_json` checks the bytes of a body before they are parsed. `refuse_fields`
checks the parsed body before any class validates it; fields have the same names in all APIs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.flags import flag
from octavo.json_size import CONTAINER_NODES, refuse_json

_STOPS = ("stop", "stop_sequences")
_TOKEN_IDS = ("logit_bias", "stop_token_ids")
_SCHEMAS = (
    "tools", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "structural_tag", "text", "output_config", "output_format",
)  # fmt: skip
_LIMITED = frozenset((*_STOPS, "bad_words", *_TOKEN_IDS, "chat_template", *_SCHEMAS))  # others are conversations
_CONVERSATIONS = ("messages", "input", "items", "system")


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The limits of a request, as flags of the server."""

    max_json_nodes: int = flag(
        1_000_000, f"The most values in a JSON body; a list or an object counts for {CONTAINER_NODES}.", positive=True
    )
    max_json_depth: int = flag(128, "The deepest nesting of lists and objects in a JSON body.", positive=True)
    max_stops: int = flag(64, "The most stop strings of a request.", positive=True)
    max_bad_words: int = flag(256, "The most bad words of a request.", positive=True)
    max_stop_chars: int = flag(1024, "The most characters of a stop string or a bad word.", positive=True)
    max_logit_biases: int = flag(4096, "The most tokens in a request's logit_bias or stop_token_ids.", positive=True)
    max_tools: int = flag(512, "The most tools of a request.", positive=True)
    max_schema_bytes: int = flag(
        512 << 10, "The most bytes of a request's tools, as JSON, and of its schema, grammar or choices.", positive=True
    )
    max_template_bytes: int = flag(256 << 10, "The most bytes of a request's own chat_template.", positive=True)
    max_parts: int = flag(16384, "The most messages of a request and parts of their contents, together.", positive=True)
    max_logprob_entries: int = flag(
        2_000_000, "The most log-probabilities in an answer: tokens of the prompt or of all completions, times the "
        "number for each token.", positive=True,
    )  # fmt: skip

    def refuse_json(self, body: bytes) -> None:
        """Raise `RequestError` for a body with too many values, or with values nested too deeply."""
        refuse_json(body, self.max_json_nodes, self.max_json_depth, ("--max-json-nodes", "--max-json-depth"))

    def refuse_fields(self, fields: object) -> None:
        """Raise `RequestError` for the first field beyond its limit. Fields of a wrong type are left for the body's
        class to refuse."""
        if not isinstance(fields, dict):
            return
        if not fields.keys().isdisjoint(_LIMITED):
            self._refuse_sizes(fields)
        for name in filter(fields.__contains__, _CONVERSATIONS):
            if not isinstance(messages := fields[name], list) or not messages:
                continue
            if name == "messages" or isinstance(messages[0], dict):  # others may be texts or tokens
                num_parts = sum(_length(one.get("content")) for one in messages if isinstance(one, dict))
                self._refuse("max_parts", name, len(messages) + num_parts, "messages and parts")

    def _refuse_sizes(self, fields: dict[str, Any]) -> None:
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

    def refuse_entries(self, name: str, num_each: int | None, num_tokens: int) -> None:
        """Raise `RequestError` if an answer would have too many log-probabilities: for each of `num_tokens` its own and
        `num_each` others."""
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
    return 0 if isinstance(value, str) or not isinstance(value, list | Mapping) else len(value)


def _num_bytes(value: Any) -> int:
    try:
        return len(value.encode()) if isinstance(value, str) else len(msgspec.json.encode(value))
    except UnicodeEncodeError:  # lone surrogates; the body's class refuses them
        return 0
