"""Reads a request's body: the model's name, the ids of earlier responses and files, and the hashes of the
conversation's prefixes. Of a body's bytes only the model's name is ever replaced."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from octavo.body_errors import plain_reason
from octavo.errors import RequestError

BYTES_PER_TOKEN = 4  # of prompts, about
_MAX_CANDIDATES = 16  # places that look like the model's name, each tried by parsing
_MAX_MEDIA = 1024  # of a message; later ones count with all their bytes
_DIGESTED_BYTES = 1 << 16  # of a body without a conversation: enough to tell requests apart
_MEDIA_BYTES = 4096  # that a picture or sound counts at most: some 1,000 tokens
# What comes before the base64 of a picture or sound: a data URL's beginning, or Anthropic's or OpenAI's key `data`.
_MEDIUM = re.compile(rb'(?<!\\)"data(?::[^",]{0,200};base64,|"\s*:\s*")')  # quotes in texts are escaped
_CHUNK_CHARS = 1024  # of a prompt that is one text
_MAX_PREFIXES = 1024  # of a conversation; later ones do not change its replica
# At the beginning of a line only, so that a line is searched once.
_FORM_FIELD = re.compile(
    rb'^content-disposition:[^\r\n]*;\s*name="?(model|stream)"?\s*[;\r]', re.IGNORECASE | re.MULTILINE
)
_MAX_PARTS = 64  # of a form
_PART_HEAD = re.compile(rb"\r\n((?:[^\r\n]{1,8192}\r\n){1,32})\r\n")
_MAX_COMMAS = 1 << 18  # of a conversation that is split into messages; of a longer one, which takes 20 ms, into texts
_MAX_FIELD_BYTES = 4096  # of a field that decides about the replica
_MAX_SEARCHED_BYTES = 64 << 20  # for the place of the model's name
_ON = (True, "1", "on", "t", "true", "y", "yes")  # true to pydantic, by which many servers read bodies
_TOKENS = re.compile(rb"\[\s*\d")  # a prompt of token ids, which is split like a text
_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')


_T = TypeVar("_T")


class _Fields(msgspec.Struct):
    """The fields that decide which replica gets a request. They are read one by one: a client may put anything of any
    size into them."""

    model: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    stream_options: msgspec.Raw = msgspec.Raw()
    background: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    conversation: msgspec.Raw = msgspec.Raw()
    session_id: msgspec.Raw = msgspec.Raw()
    input_file_id: msgspec.Raw = msgspec.Raw()
    resume: msgspec.Raw = msgspec.Raw()


class _Conversation(msgspec.Struct):
    """The fields that make a prompt, of all APIs: Chat Completions, Responses, Anthropic's."""

    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


_decode_fields = msgspec.json.Decoder(_Fields).decode
_decode_conversation = msgspec.json.Decoder(_Conversation).decode
_ABSENT = (b"", b"null")
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


@dataclass(frozen=True)
class RequestBody:
    """A body and the fields of it that decide which replica gets it."""

    data: bytes
    model: str | None = None
    streams: bool = False
    refers_to: str | None = None  # the id of something that a replica keeps
    model_span: tuple[int, int] | None = None  # where a multipart form has the name
    is_json: bool = False
    wants_usage: bool = False  # asks for the usage at the stream's end
    is_background: bool = False
    is_resumed: bool = False  # goes on with another server's stream
    session_id: str | None = None

    def having(self, **fields: Any) -> RequestBody:
        """Return the body with these fields in place of its own."""
        return replace(self, data=with_fields(self.data, {name: msgspec.json.encode(fields[name]) for name in fields}))

    def naming(self, model: str) -> bytes:
        """Return the bytes with another model's name, and otherwise unchanged. Raises `RequestError`."""
        if model == self.model or self.model is None:
            return self.data
        if self.model_span is not None:
            begin, end = self.model_span
            return self.data[:begin] + model.encode() + self.data[end:]
        name = msgspec.json.encode(model)
        # Nested objects may have a key "model" too: the right one changes the parsed name.
        for number, found in enumerate(_MODEL.finditer(self.data)):
            if number == _MAX_CANDIDATES or number * len(self.data) > _MAX_SEARCHED_BYTES:
                break
            changed = b"".join((self.data[: found.start(1)], name, self.data[found.end(1) :]))
            if _value(_decode_fields(changed).model) == model:
                return changed
        raise RequestError(
            f"The alias {self.model} stands for {model}, and its place in the body was not found: put the key "
            '"model" first.', param="model",
        )  # fmt: skip

    @property
    def digest(self) -> bytes | None:
        """A digest of the first bytes, without a form's boundary, as clients draw it; None for an empty body."""
        head = self.data[:_DIGESTED_BYTES]
        boundary = b"" if self.is_json else head.partition(b"\r\n")[0]
        return hashlib.blake2b(head.replace(boundary, b""), digest_size=16).digest() if head else None

    @cached_property
    def prefixes(self) -> tuple[dict[bytes, int], bytes | None]:
        """Two values. The hashes of the conversation's prefixes and their bytes, the shortest first: one for
        each message, or for each kilobyte of a text; all include the instructions and tools. And the hash that all
        turns of the conversation share: of the prefix that ends with the user's first message or the text's first
        kilobyte; None without a prefix."""
        if not self.is_json:
            return {}, None
        try:
            said = _decode_conversation(self.data)
        except msgspec.DecodeError:
            return {}, None
        items = next((raw for raw in (said.messages, said.input, said.prompt) if bytes(raw)), msgspec.Raw())
        chain = hashlib.blake2b(digest_size=16)
        num_bytes = 0
        for raw in (said.tools, said.system, said.instructions):
            chain.update(bytes(raw) + b"\0")
            num_bytes += len(bytes(raw))
        found, shared = dict[bytes, int](), None
        for item in _split(bytes(items)):
            chain.update(item + b"\0")
            num_bytes += _num_text_bytes(item)
            found[chain.digest()] = num_bytes
            if shared is None and b'"user"' in item:  # the role, as quotes in texts are escaped
                shared = chain.digest()
        return found, shared or next(iter(found), None)


def _num_text_bytes(item: bytes) -> int:
    """Return the bytes of a message, where each picture or sound counts as `_MEDIA_BYTES` at most."""
    num_bytes, at = len(item), 0
    for _ in range(_MAX_MEDIA):
        if (at := item.find(b'"data', at)) < 0:
            break
        medium = _MEDIUM.match(item, at)
        at += 1
        if medium is not None and (end := item.find(b'"', medium.end())) >= 0:
            at = end
            if item.find(b" ", medium.end(), end) < 0:  # else it is the `data` of a document, a text
                num_bytes -= max(0, end - medium.end() - _MEDIA_BYTES)
    return num_bytes


def _split(data: bytes) -> list[bytes]:
    if data.startswith(b"[") and not _TOKENS.match(data) and data.count(b",") <= _MAX_COMMAS:
        with contextlib.suppress(msgspec.DecodeError):
            return [bytes(item) for item in _decode_items(data)[:_MAX_PREFIXES]]
    # The last piece may be partial: a longer text does not have it.
    return [data[at : at + _CHUNK_CHARS] for at in range(0, len(data), _CHUNK_CHARS)[:_MAX_PREFIXES]]


def read_body(data: bytes, content_type: str) -> RequestBody:
    """Read a body once. Raises `RequestError` for one that is neither a JSON object nor a form."""
    kind, _, options = content_type.partition(";")
    if kind.strip().lower() == "multipart/form-data":
        return _read_form(data, options)
    if not data:
        return RequestBody(data)
    fields = parse(data, _decode_fields, "The body must be a JSON object")
    model, session_id = _value(fields.model), _value(fields.session_id)
    if not isinstance(model, str) and bytes(fields.model) not in _ABSENT:
        raise RequestError(f"model must be a string of at most {_MAX_FIELD_BYTES} bytes.", param="model")
    home = _value(fields.conversation)
    conversation_id = home.get("id") if isinstance(home, dict) else home
    ids = (conversation_id, _value(fields.previous_response_id), _value(fields.input_file_id))
    refers_to = next((one for one in ids if isinstance(one, str)), None)
    options = _value(fields.stream_options)
    wants_usage = isinstance(options, dict) and options.get("include_usage") is True
    return RequestBody(
        data, model, _is_on(_value(fields.stream)), refers_to, is_json=True, wants_usage=wants_usage,
        is_background=_is_on(_value(fields.background)), is_resumed=bytes(fields.resume) not in _ABSENT,
        session_id=session_id if isinstance(session_id, str) else None,
    )  # fmt: skip


def _value(field: msgspec.Raw) -> Any:
    """Return the value of a field, None for one that is absent or too long to decide about the replica. Raises
    `RequestError`."""
    data = bytes(field)
    return parse(data, msgspec.json.decode, "The body must be JSON") if 0 < len(data) <= _MAX_FIELD_BYTES else None


def _is_on(value: Any) -> bool:
    return (value.lower() if isinstance(value, str) else value) in _ON


def parse(data: bytes, decode: Callable[[bytes], _T], wanted: str) -> _T:
    """Return a body as decoded by `decode`. Raises `RequestError`, whose message begins with `wanted`."""
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        said = plain_reason(error) if isinstance(error, msgspec.DecodeError) else error
        raise RequestError(f"{wanted}: {said}.", code="invalid_body") from None
    except RecursionError:
        raise RequestError(f"{wanted}: this one is nested too deeply.", code="invalid_body") from None


def reason_of(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> str:
    """Return the text of an error about an object of `kind`. For an unknown field it names the known ones."""
    text = plain_reason(error)
    return f"{text}; known are {', '.join(kind.__struct_fields__)}" if "unknown field" in text else text


def with_fields(data: bytes, fields: Mapping[str, bytes]) -> bytes:
    """Return a JSON object with further fields at its end: of two fields with one name, readers take the last."""
    more = b",".join(b'"%b":%b' % (name.encode(), value) for name, value in fields.items())
    body = data.rstrip()[:-1].rstrip()
    return b"".join((body, b"" if body.endswith(b"{") else b",", more, b"}"))  # `+` would copy 100 MB thrice


def _read_form(data: bytes, options: str) -> RequestBody:
    found = re.search(r'boundary="?([^";,\s]{1,70})"?', options)
    if found is None:
        raise RequestError("A multipart body must name its boundary in the Content-Type.", code="invalid_body")
    boundary = b"--" + found[1].encode("latin-1")
    fields: dict[str, tuple[int, int]] = {}
    at = data.find(boundary)
    for _ in range(_MAX_PARTS):
        at += len(boundary)
        if (end := data.find(b"\r\n" + boundary, at)) < 0:
            break
        head = _PART_HEAD.match(data, at, end)
        name = None if head is None else _FORM_FIELD.search(head[1])
        if head is not None and name is not None:
            fields[name[1].decode()] = (head.end(), end)
        at = end + 2

    def text(field: str) -> str | None:
        begin, end = fields.get(field, (0, 0))
        return data[begin:end].decode("utf-8", "replace") if field in fields else None

    return RequestBody(data, text("model"), text("stream") in ("true", "True", "1"), model_span=fields.get("model"))
