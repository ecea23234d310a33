"""Reads a request's body: the model's name, the ids of earlier responses and files, and the hashes of the
conversation's prefixes. Of a body's bytes only the model's name is ever replaced.

A long body is scanned once on the event loop: 10 ms for 64 MB of texts, 40 ms for 64 MB of token ids. Everything else
is done in a thread (`prepare`) by calls that take `PIECE_BYTES` at most, or that let the event loop run.
"""

import asyncio
import contextlib
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import msgspec

from octavo.body_errors import plain_reason
from octavo.errors import RequestError

Part = bytes | memoryview  # of a body
BYTES_PER_TOKEN = 4  # of prompts, about
LARGE_BYTES = 1 << 20  # of a body: a thread does the work on a larger one
PIECE_BYTES = 1 << 18  # of a large body that one call takes while the event loop waits: less than a millisecond
_MAX_CANDIDATES = 16  # places that look like the model's name, each tried by parsing
_MAX_MEDIA = 1024  # of a message; later ones count with all their bytes
_DIGESTED_BYTES = 1 << 16  # of a body without a conversation: enough to tell requests apart
_MEDIA_BYTES = 4096  # that a picture or sound counts at most: some 1,000 tokens
# What comes before the base64 of a picture or sound: a data URL's beginning, or Anthropic's or OpenAI's key `data`.
_MEDIUM = re.compile(rb'(?<!\\)"data(?::[^",]{0,200};base64,|"\s*:\s*")')  # quotes in texts are escaped
_CHUNK_CHARS = 1024  # of a prompt that is one text
_MAX_PREFIXES = 1024  # of a conversation; later ones do not change its replica
_MAX_PARTS = 64  # of a form
_BOUNDARY = re.compile(r'\s*("?)([^";,\s]{1,70})\1\s*')
_PART_HEAD = re.compile(rb"\r\n((?:[^\r\n]{1,8192}\r\n){1,32})\r\n")
_DISPOSITION = re.compile(rb"content-disposition", re.IGNORECASE)
# The forms of that line in which every server reads the same name: of two, some servers read the one behind the file's.
_NAME = re.compile(
    rb'^content-disposition: ?form-data; ?name=(?:"([^"\\\r\n]*)"|([^\s";\\]+))'
    rb"(?:; ?filename(?:(?!;[^;\w]*name)[^\r\n])*)?\r\n(?![ \t])",
    re.IGNORECASE | re.MULTILINE,
)
_MAX_COMMAS = 1 << 18  # of a conversation that is split into messages; of a longer one, which takes 20 ms, into texts
_MAX_FIELD_BYTES = 4096  # of a field that decides about the replica
_MAX_SEARCHED_BYTES = 64 << 20  # for the place of the model's name
_ON = (True, "1", "on", "t", "true", "y", "yes")  # true to pydantic, by which many servers read bodies
_TOKENS = re.compile(rb"\[\s*\d")  # a prompt of token ids, which is split like a text
_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')


_T = TypeVar("_T")


class _Fields(msgspec.Struct):
    """The fields that decide which replica gets a request. They are read one by one: a client may put anything of any
    size into them. None is a copy of the body's bytes."""

    model: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    stream_options: msgspec.Raw = msgspec.Raw()
    background: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    conversation: msgspec.Raw = msgspec.Raw()
    session_id: msgspec.Raw = msgspec.Raw()
    input_file_id: msgspec.Raw = msgspec.Raw()
    resume: msgspec.Raw = msgspec.Raw()
    # The fields that make a prompt, of all APIs: Chat Completions, Responses, Anthropic's.
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


_decode_fields = msgspec.json.Decoder(_Fields).decode
# Spellings of `model` in other letters, which servers written in Go read as `model`.
_CASES = ["".join(letters) for letters in itertools.product("mM", "oO", "dD", "eE", "lL")][1:]
MAX_COLONS = 1 << 20  # of a body that is searched for them: a field takes up to 0.7 µs
_decode_cases = msgspec.json.Decoder(
    msgspec.defstruct("_Cases", [(one, msgspec.Raw, msgspec.Raw()) for one in _CASES])
).decode
_ABSENT = (b"", b"null")
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


@dataclass(frozen=True)
class RequestBody:
    """A body and the fields of it that decide which replica gets it."""

    data: bytes
    model: str | None = None
    streams: bool = False
    refers_to: str | None = None  # the id of something that a replica keeps
    is_json: bool = False
    wants_usage: bool = False  # asks for the usage at the stream's end
    is_background: bool = False
    is_resumed: bool = False  # goes on with another server's stream
    session_id: str | None = None
    more: Mapping[str, bytes] = field(default_factory=dict)  # JSON of fields in place of the body's own
    _said: _Fields | None = None
    _found: dict[str, Any] = field(default_factory=dict)  # what was looked for in `data`

    def having(self, **fields: Any) -> Self:
        """Return the body with these fields in place of its own."""
        return replace(self, more={**self.more, **{name: msgspec.json.encode(fields[name]) for name in fields}})

    @property
    def has_model_in_capitals(self) -> bool:
        """Whether some servers could find another model, under a name such as `Model`."""
        if self.data.count(b":") > MAX_COLONS:
            return True  # the search would take too long
        return self.is_json and any(map(bytes, msgspec.structs.astuple(_decode_cases(self.data))))

    async def prepare(self, model: str | None, *, reads_prefixes: bool) -> None:
        """Find what `parts` for another model's name, and `prefixes`, need to know of a large body, in a thread."""
        if len(self.data) > LARGE_BYTES:
            if reads_prefixes:
                await asyncio.to_thread(lambda: self.prefixes)
            if self._is_renamed_to(model):
                await asyncio.to_thread(lambda: self._model_span)

    def parts(self, model: str | None = None, fields: Mapping[str, bytes] | None = None) -> list[Part]:
        """Return the bytes for a replica: with another model's name and with further `fields` (JSON), and otherwise
        unchanged and not copied. Raises `RequestError`."""
        if model is not None and self._is_renamed_to(model):
            begin, end = self._model_span
            name = msgspec.json.encode(model) if self.is_json else model.encode()
            data = memoryview(self.data)
            parts: list[Part] = [data[:begin], name, data[end:]]
        else:
            parts = [self.data]
        if self.is_json and (more := {**self.more, **(fields or {})}):
            end = self.data.rindex(b"}")
            parts[-1] = memoryview(parts[-1])[: end - len(self.data)]
            parts.append(_members(more, has_others=self.data.find(b'"', 0, end) >= 0) + b"}")
        return parts

    def _is_renamed_to(self, model: str | None) -> bool:
        return None not in (model, self.model) and model != self.model

    @property
    def _model_span(self) -> tuple[int, int]:
        """Where the model's name stands, in JSON with its quotes. Raises `RequestError`."""
        if "model_span" not in self._found:
            self._found["model_span"] = self._find_model()
        span: tuple[int, int] = self._found["model_span"]
        return span

    def _find_model(self) -> tuple[int, int]:
        # Nested objects may have a key "model" too: the right one changes the parsed name.
        other = f"{self.model}-"
        name = msgspec.json.encode(other)
        for number, found in enumerate(_model_keys(self.data)):
            if number == _MAX_CANDIDATES or number * len(self.data) > _MAX_SEARCHED_BYTES:
                break
            begin, end = found.span(1)
            data = memoryview(self.data)
            changed = b"".join((*_pieces(data[:begin]), name, *_pieces(data[end:])))
            if _value(_decode_fields(changed).model) == other:
                return begin, end
        raise RequestError(
            f"{self.model} stands for another name at the servers, and its place in the body was not found: put the "
            'key "model" first.', param="model",
        )  # fmt: skip

    @property
    def digest(self) -> bytes | None:
        """A digest of the first bytes, without a form's boundary, as clients draw it; None for an empty body."""
        head = self.data[:_DIGESTED_BYTES]
        boundary = b"" if self.is_json else head.partition(b"\r\n")[0]
        return hashlib.blake2b(head.replace(boundary, b""), digest_size=16).digest() if head else None

    @property
    def prefixes(self) -> tuple[dict[bytes, int], bytes | None]:
        """Two values. The hashes of the conversation's prefixes and their bytes, the shortest first: one for
        each message, or for each kilobyte of a text; all include the instructions and tools. And the hash that all
        turns of the conversation share: of the prefix that ends with the user's first message or the text's first
        kilobyte; None without a prefix."""
        if "prefixes" not in self._found:
            self._found["prefixes"] = self._find_prefixes()
        prefixes: tuple[dict[bytes, int], bytes | None] = self._found["prefixes"]
        return prefixes

    def _find_prefixes(self) -> tuple[dict[bytes, int], bytes | None]:
        if not self.is_json:
            return {}, None
        try:
            said = self._said or _decode_fields(self.data)
        except msgspec.DecodeError:
            return {}, None
        items = next(filter(None, _views(said.messages, said.input, said.prompt)), memoryview(b""))
        chain = hashlib.blake2b(digest_size=16)
        num_bytes = 0
        for raw in _views(said.tools, said.system, said.instructions):
            chain.update(raw)
            chain.update(b"\0")
            num_bytes += len(raw)
        found, shared = dict[bytes, int](), None
        for item in _split(items):
            chain.update(item)
            chain.update(b"\0")
            data = b"".join(_pieces(item))
            num_bytes += _num_text_bytes(data)
            found[chain.digest()] = num_bytes
            if shared is None and _find(data, b'"user"') >= 0:  # the role, as quotes in texts are escaped
                shared = chain.digest()
        return found, shared or next(iter(found), None)


def _views(*fields: msgspec.Raw) -> list[memoryview]:
    return [memoryview(one) for one in fields]


def _pieces(data: memoryview) -> Iterator[bytes]:
    for begin in range(0, len(data), PIECE_BYTES):
        yield bytes(data[begin : begin + PIECE_BYTES])


def _find(data: bytes, wanted: bytes, begin: int = 0, end: int | None = None) -> int:
    """Return what `data.find` returns."""
    end = len(data) if end is None else end
    for at in range(begin, end, PIECE_BYTES):
        if (found := data.find(wanted, at, min(end, at + PIECE_BYTES + len(wanted) - 1))) >= 0:
            return found
    return -1


def _model_keys(data: bytes) -> Iterator[re.Match[bytes]]:
    """Yield what may be the model's name."""
    at = -1
    while (at := _find(data, b'"model"', at + 1)) >= 0:
        if (found := _MODEL.match(data, at, at + 2 * _MAX_FIELD_BYTES)) is not None:
            yield found


def _num_text_bytes(item: bytes) -> int:
    """Return the bytes of a message, where each picture or sound counts as `_MEDIA_BYTES` at most."""
    num_bytes, at = len(item), 0
    for _ in range(_MAX_MEDIA):
        if (at := _find(item, b'"data', at)) < 0:
            break
        medium = _MEDIUM.match(item, at)
        at += 1
        if medium is not None and (end := _find(item, b'"', medium.end())) >= 0:
            at = end
            if _find(item, b" ", medium.end(), end) < 0:  # else it is the `data` of a document, a text
                num_bytes -= max(0, end - medium.end() - _MEDIA_BYTES)
    return num_bytes


def _split(data: memoryview) -> list[memoryview]:
    """Return the messages of a conversation, or the pieces of a text."""
    head = bytes(data[:_CHUNK_CHARS])
    if head.startswith(b"[") and not _TOKENS.match(head):
        num_commas = 0
        for piece in _pieces(data):
            num_commas += piece.count(b",")
            if num_commas > _MAX_COMMAS:
                break
        else:
            with contextlib.suppress(msgspec.DecodeError):
                return [memoryview(item) for item in _decode_items(data)[:_MAX_PREFIXES]]
    # The last piece may be partial: a longer text does not have it.
    return [data[at : at + _CHUNK_CHARS] for at in range(0, len(data), _CHUNK_CHARS)[:_MAX_PREFIXES]]


def read_body(data: bytes, content_type: str) -> RequestBody:
    """Read a body once. Raises `RequestError` for one that is neither a JSON object nor a form."""
    if content_type.partition(";")[0].strip().lower() == "multipart/form-data":
        return _read_form(data, content_type)
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
        session_id=session_id if isinstance(session_id, str) else None, _said=fields,
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
    body = data.rstrip()[:-1].rstrip()
    return body + _members(fields, has_others=not body.endswith(b"{")) + b"}"


def _members(fields: Mapping[str, bytes], *, has_others: bool) -> bytes:
    members = b",".join(b'"%b":%b' % (name.encode(), value) for name, value in fields.items())
    return (b"," if has_others else b"") + members


def _read_form(data: bytes, content_type: str) -> RequestBody:
    """Read a form. Raises `RequestError` for one in which a server might find another model than the gateway."""
    options = [one.partition("=") for one in content_type.split(";")[1:]]
    found = [value for name, _, value in options if name.strip().lower().startswith("boundary")]
    if len(found) != 1 or (boundary := _BOUNDARY.fullmatch(found[0])) is None:
        raise RequestError("A multipart body must name its boundary once in the Content-Type.", code="invalid_body")
    delimiter = b"\r\n--" + boundary[2].encode("latin-1")
    fields, num_parts, at = dict[str, tuple[int, int]](), 0, len(delimiter) - 2
    is_clear = data.startswith(delimiter[2:])
    while is_clear and not data.startswith(b"--", at):
        end, num_parts = data.find(delimiter, at), num_parts + 1
        head = _PART_HEAD.match(data, at, max(end, at))
        names = [] if head is None or len(_DISPOSITION.findall(head[1])) > 1 else _NAME.findall(head[1])
        name = b"".join(names[0]).decode("latin-1") if names else ""
        is_clear = bool(names) and num_parts <= _MAX_PARTS and name not in fields
        if head is not None and name in ("model", "stream"):
            fields[name] = head.end(), end
        at = end + len(delimiter)
    if not is_clear:
        raise RequestError(
            f"Part {num_parts} of the form may be read in several ways: a form has {_MAX_PARTS} parts at most, each "
            'begins with a line such as Content-Disposition: form-data; name="model", and there is one model.',
            code="invalid_body",
        )  # fmt: skip

    def text(field: str) -> str | None:
        begin, end = fields.get(field, (0, 0))
        return data[begin:end].decode("utf-8", "replace") if field in fields else None

    places = {"model_span": fields["model"]} if "model" in fields else {}
    return RequestBody(data, text("model"), _is_on(text("stream")), _found=places)
