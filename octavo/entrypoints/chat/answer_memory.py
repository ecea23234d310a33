"""Remembers the tokens of the server's own answers, so that the next prompt of a conversation has them as they were.

A client sends an answer back as a message, and the chat template writes it in its own way: other blanks, arguments in
another form, other tokens for the same text. So the new prompt would differ from the cached tokens at the first answer.
`AnswerMemory` keeps the tokens of prompts and answers, and `recall` finds the ones with which a new prompt begins.
`answer_recall.py` calls both for a conversation.

A conversation keeps its meaning. The rendered prompt must begin with the text of the earlier prompt, which ends where
the answer began. The model's text, the template's text in its place and the message must have the same content,
reasoning and calls, and the template must then write the token with which the answer ended.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.call_arguments import read_arguments
from octavo.entrypoints.chat.reasoning import Reasoning, new_splitter
from octavo.entrypoints.chat.tools.format_detection import ModelFormats
from octavo.entrypoints.chat.tools.format_parser import FormatParser, trigger_marks
from octavo.entrypoints.chat.tools.tool_parser_base import Call
from octavo.request import pack_tokens

if TYPE_CHECKING:
    from octavo.entrypoints.http.store import Database, Store
    from octavo.entrypoints.openai.chat_messages import ChatMessage
    from octavo.loading.tokenizer import ModelTokenizer

KIND = "answer"  # kind of the objects in the store
MAX_ANSWERS = 8  # kept for the same messages
_OBJECT_BYTES = 500  # roughly what an answer takes beside its tokens
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class RememberedAnswer:
    """An answer and its prompt."""

    key: bytes  # key of the prompt's messages: the last of `message_keys`
    parent: tuple[bytes, bytes] | None  # key and digest of the earlier answer with whose tokens the prompt begins
    tokens: bytes  # int32: the rest of the prompt, then the answer
    num_tokens: int  # of the answer
    has_end: bool  # the answer ends with a token for the end of turn
    text_length: int  # characters of the rendered prompt
    text_digest: bytes
    digest: bytes = field(init=False)  # distinguishes the answers to the same messages

    def __post_init__(self) -> None:
        before = b"" if self.parent is None else self.parent[1]
        object.__setattr__(self, "digest", _digest(before + self.tokens))


class _Kept(msgspec.Struct, array_like=True):
    """A `RememberedAnswer` in the store."""

    parent_key: bytes | None
    parent_digest: bytes | None
    tokens: bytes
    num_tokens: int
    has_end: bool
    text_length: int
    text_digest: bytes


_encode_kept = msgspec.msgpack.Encoder().encode
_decode_kept = msgspec.msgpack.Decoder(list[_Kept]).decode


class AnswerMemory:
    """The answers used last, in up to `max_bytes`. With a `store` they are also kept there, and outlive the server. Any
    thread may call its methods, except `load`."""

    def __init__(self, max_bytes: int, store: Store | None = None) -> None:
        self._max_bytes, self._store = max_bytes, store
        self._answers: OrderedDict[bytes, list[RememberedAnswer]] = OrderedDict()  # by key, the last used last
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def is_kept(self) -> bool:
        """Return whether `load` may find answers that are not in memory."""
        return self._store is not None

    def add(self, answer: RememberedAnswer) -> None:
        """Remember an answer."""
        with self._lock:
            known = self._insert(answer)
            self._make_room()
        if self._store is not None:
            id, body = answer.key.hex(), _encode_kept([_kept(one) for one in known])
            self._store.post(lambda database: database.put(KIND, id, body), len(body))

    def find(self, key: bytes) -> Sequence[RememberedAnswer]:
        """Return the answers to the messages with this key, the latest first."""
        with self._lock:
            return self._answers.get(key, [])[::-1]

    def chain(self, answer: RememberedAnswer) -> list[RememberedAnswer] | None:
        """Return the answers in the prompt of `answer`, the first one first, and `answer`; None if one of them is
        gone."""
        with self._lock:
            return self._chain(answer)

    def _chain(self, answer: RememberedAnswer) -> list[RememberedAnswer] | None:
        chain = [answer]
        while (parent := chain[-1].parent) is not None:
            key, digest = parent
            found = next((one for one in self._answers.get(key, ()) if one.digest == digest), None)
            if found is None:
                return None
            chain.append(found)
        return chain[::-1]

    def touch(self, chain: Sequence[RememberedAnswer]) -> None:
        """Note that the answers of a chain are used. The first one counts as the most recent, because the others need
        it."""
        with self._lock:
            self._touch(chain)

    def _touch(self, chain: Sequence[RememberedAnswer]) -> None:
        for one in reversed(chain):
            if one.key in self._answers:
                self._answers.move_to_end(one.key)

    async def load(self, keys: Sequence[bytes]) -> None:
        """Read answers that only the store has. `keys` are those of one conversation, the shortest first."""
        assert self._store is not None
        with self._lock:
            missing = [key for key in keys if key not in self._answers]

        def read(database: Database) -> list[tuple[bytes, list[_Kept]]]:
            found = [(key, database.get(KIND, key.hex())) for key in missing]
            return [(key, _decode_kept(stored.body)) for key, stored in found if stored is not None]

        for key, kept in await self._store.run(read) if missing else ():
            for one in kept:
                parent = None
                if one.parent_key is not None and one.parent_digest is not None:
                    parent = one.parent_key, one.parent_digest
                answer = RememberedAnswer(
                    key, parent, one.tokens, one.num_tokens, one.has_end, one.text_length, one.text_digest
                )
                with self._lock:
                    if self._chain(answer) is not None:
                        self._insert(answer)
        with self._lock:
            self._make_room()

    def _insert(self, answer: RememberedAnswer) -> list[RememberedAnswer]:
        known = self._answers.setdefault(answer.key, [])
        self._answers.move_to_end(answer.key)
        for one in [one for one in known if one.digest == answer.digest]:
            known.remove(one)
            self._num_bytes -= _size(one)
        known.append(answer)
        self._num_bytes += _size(answer)
        if len(known) > MAX_ANSWERS:
            self._num_bytes -= _size(known.pop(0))
        self._touch(self._chain(answer) or ())
        return list(known)

    def _make_room(self) -> None:
        while self._num_bytes > self._max_bytes:
            _, dropped = self._answers.popitem(last=False)
            self._num_bytes -= sum(map(_size, dropped))


def _size(answer: RememberedAnswer) -> int:
    return _OBJECT_BYTES + len(answer.tokens)


def _kept(answer: RememberedAnswer) -> _Kept:
    key, digest = answer.parent or (None, None)
    return _Kept(key, digest, answer.tokens, answer.num_tokens, answer.has_end, answer.text_length, answer.text_digest)


def message_keys(messages: Sequence[ChatMessage], salt: str | None) -> list[bytes]:
    """Return a key for each beginning of a conversation: its first message, its first two, and so on. Different salts
    give different keys."""
    keys, key = [], _digest(repr(salt).encode())
    for message in messages:
        key = _digest(key + msgspec.json.encode(message.given_fields()))
        keys.append(key)
    return keys


@dataclass(frozen=True, slots=True)
class Recalled:
    """A prompt that begins with an earlier answer and its prompt."""

    answer: RememberedAnswer
    num_known: int  # tokens of the answer's prompt and the answer
    token_ids: list[int]  # of the whole prompt


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """The means to read answers and to tokenize texts. `schemas` has the schemas of the functions' arguments, by
    name."""

    tokenizer: ModelTokenizer
    formats: ModelFormats
    schemas: Mapping[str, dict[str, Any]]
    encode: Callable[[str], list[int]]


def recall(
    memory: AnswerMemory, keys: Sequence[bytes], messages: Sequence[ChatMessage], prompt: str, reading: AnswerReading
) -> Recalled | None:
    """Return the tokens of `prompt`, the rendered `messages`, with the server's own tokens for its answers; None
    without such an answer. Finding the latest one is enough, as its prompt has the earlier ones."""
    for i in range(len(messages) - 1, 0, -1):
        if messages[i].role != "assistant":
            continue
        for answer in memory.find(keys[i - 1]):
            if not _begins(prompt, answer) or (chain := memory.chain(answer)) is None:
                continue
            known = array("i", b"".join(one.tokens for one in chain)).tolist()
            rest = _continued(answer, known, messages[i], prompt, reading)
            if rest is not None:
                memory.touch(chain)
                return Recalled(answer, len(known), known + rest)
    return None


def _begins(prompt: str, answer: RememberedAnswer) -> bool:
    """Return whether a rendered prompt begins with the text of an answer's prompt."""
    return len(prompt) > answer.text_length and text_digest(prompt[: answer.text_length]) == answer.text_digest


def _continued(
    answer: RememberedAnswer, known: list[int], message: ChatMessage, prompt: str, reading: AnswerReading
) -> list[int] | None:
    """Return the tokens of `prompt` after the answer, if `message` may be `answer`, else None. `known` are the tokens
    of the answer's prompt and the answer."""
    earlier, begun = prompt[: answer.text_length], prompt[answer.text_length :]
    own = known[-answer.num_tokens :]
    decode = reading.tokenizer.decode
    written = decode(own[:-1] if answer.has_end else own)
    if answer.has_end:
        rendered, end, rest = begun.partition(decode(own[-1:]))
        if not end:
            return None
        rest = end + rest
    elif begun.startswith(written):  # a cut answer: the template must go on with the same text
        rendered, rest = written, begun[len(written) :]
    else:
        return None
    said = _said(written, earlier, message, reading)
    if not said.is_of(message) or said != _said(rendered, earlier, message, reading):
        return None
    encoded = reading.encode(rest)
    if not answer.has_end:
        return encoded
    return encoded[1:] if encoded[:1] == own[-1:] else None


@dataclass(frozen=True, slots=True)
class _Said:
    """The contents of an answer. Calls have their name, arguments as JSON with sorted keys, and the id that was
    written."""

    reasoning: str
    content: str
    calls: list[tuple[str, str, str]]

    def is_of(self, message: ChatMessage) -> bool:
        """Return whether a message has the same contents. Ids are compared if the answer has them."""
        content, thought = message.content, message.reasoning_content or message.reasoning or ""
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        sent = [
            (call.function.name, _as_json(read_arguments(call.function.arguments)), own[2] and (call.id or ""))
            for call, own in zip(message.tool_calls or (), self.calls, strict=False)
        ]
        return (
            (self.reasoning, self.content) == (thought.strip(), (content or "").strip())
            and len(message.tool_calls or ()) == len(self.calls)
            and sent == self.calls
        )


def _said(text: str, prompt: str, message: ChatMessage, reading: AnswerReading) -> _Said:
    """Read an answer to `prompt`, or what a template wrote for one."""
    formats, form = reading.formats, reading.formats.tools
    style = formats.reasoning
    reasoning = None if style is None else Reasoning.after(prompt, style)

    def new_parser() -> FormatParser:
        assert form is not None
        return FormatParser(form, reading.schemas, "" if style is None else style.end_beside_calls)

    has_calls = form is not None and bool(reading.schemas or message.tool_calls)
    thought, content = "", text
    if reasoning is not None:
        marks = trigger_marks(form) if has_calls and form is not None else ()
        splitter = new_splitter(reasoning, marks, new_parser if has_calls else None)
        thought, content = (first + second for first, second in zip(splitter.add(text), splitter.finish(), strict=True))
    if not has_calls:
        return _Said(thought.strip(), content.strip(), [])
    parser = new_parser()
    texts, calls = list[str](), list[list[str]]()
    for piece in [*parser.add(content), *parser.finish()]:
        if not isinstance(piece, Call):
            texts.append(piece)
        elif piece.name is not None:
            calls.append([piece.name, piece.arguments, piece.id])
        else:
            calls[-1][1] += piece.arguments
    read = [(name, _as_json(read_arguments(arguments)), id) for name, arguments, id in calls]
    return _Said(thought.strip(), "".join(texts).strip(), read)


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def text_digest(text: str) -> bytes:
    """Return the digest of a rendered prompt in `RememberedAnswer`."""
    return _digest(text.encode())


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def remembered(
    key: bytes,
    recalled: Recalled | None,
    prompt: Sequence[int],
    answer: list[int],
    end_tokens: Sequence[int],
    text: tuple[int, bytes],
    tokenizer: ModelTokenizer,
    formats: ModelFormats,
) -> RememberedAnswer:
    """Return an answer to remember. `key` is the key of the messages, `prompt` the prompt's tokens, which begin with
    the `recalled` ones, and `text` the length and digest of the rendered prompt. An answer of Harmony's messages is
    remembered with the end that it has in a history (github.com/openai/harmony, docs/format.md)."""
    has_end, style = answer[-1] in end_tokens, formats.reasoning
    if style is not None and style.has_channels:
        final, end = map(tokenizer.backend_tokenizer.token_to_id, ("<|return|>", "<|end|>"))
        if end is not None and answer[-1] == final:
            answer = [*answer[:-1], end]
    parent, num_known = None, 0
    if recalled is not None:
        parent, num_known = (recalled.answer.key, recalled.answer.digest), recalled.num_known
    tokens = pack_tokens([*prompt[num_known:], *answer])
    return RememberedAnswer(key, parent, tokens, len(answer), has_end, *text)
