"""Remembers the tokens of a stream, so that another replica can go on with it.

Octavo's servers answer the header X-Octavo-Resumable with the stream's id, time and seed. In the stream, a comment with
tokens follows the events made of these tokens. Events wait here for that comment, so that the client has the text of
exactly the known tokens. The first events of a response come before any tokens, and pass at once. A comment with the
prompt's tokens comes where another replica would not find them by itself. A replica that stops before the stream has
ended gives it up with a comment, whose next events only a client without another replica gets.
"""

import re

import msgspec

from octavo.gateway.request_body import with_fields

RESUMABLE = b"x-octavo-resumable"
CUT_OFF = b"x-octavo-cut-off"  # header of an answer that is not whole, as its replica stops or has lost its engine
RESUMABLE_PATHS = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"))
_TOKENS, _PROMPT, _GIVEN_UP = b": tokens ", b": prompt ", b": given up"
_UNNAMED = b"data: {"
# An event and the comment with its tokens. Such events are one line each.
_PAIR = re.compile(rb"(data: \{[^\n]*\n\n): tokens ([^\n]*)\n\n")
_PAIR_BYTES = len(_TOKENS) + 2  # of a pair without its event and tokens
_ENDS = (
    b"data: [DONE]", b"event: message_stop",
    b"event: response.completed", b"event: response.incomplete", b"event: response.failed",
)  # fmt: skip
_KEEP_ALIVES = (b":", b"event: ping")
_BEGINS = (b"event: response.created", b"event: response.in_progress")


class _About(msgspec.Struct):
    id: str


class StreamProgress:
    """One stream's tokens. There are none until a replica says that the stream is resumable."""

    def __init__(self) -> None:
        self._about: bytes | None = None  # JSON
        self.id = ""  # the answer's id
        self._prompt = b""  # JSON list; empty if there was none
        self._tokens: list[bytes] = []  # JSON lists
        self._begun: set[bytes] = set()  # the events of `_BEGINS` that the client has
        self._waiting: list[bytes] = []  # events without their tokens
        self._rest = b""  # the part of an event that has come
        self._num_seen = 0  # entries of `_tokens` at the last `take_growth`
        self.num_tokens = 0
        self.is_given_up = False  # by its replica; the events after that wait for `flush`
        self.has_ended = False  # the client has the last event

    def begin(self, about: bytes) -> None:
        """Note that a replica begins or resumes the stream. `about` is its header's value, which may be empty."""
        if self._about is None and about:
            try:
                self.id = msgspec.json.decode(about, type=_About).id
            except (msgspec.DecodeError, UnicodeDecodeError):
                return
            self._about = about
        self._waiting, self._rest, self.is_given_up = [], b"", False

    @property
    def is_resumable(self) -> bool:
        return self._about is not None

    def add(self, data: bytes) -> bytes:
        """Take a piece of the stream and return the events that the client may have now."""
        if not self._rest and not self._waiting and (due := self._add_pairs(data)):
            return due
        *events, self._rest = (self._rest + data).split(b"\n\n")
        ready: list[bytes] = []
        for event in events:
            if event.startswith(_UNNAMED):  # most events: neither the first ones of a response nor the last
                self._waiting.append(event)
            elif event.startswith(_TOKENS):
                self._tokens.append(event[len(_TOKENS) :])
                self.num_tokens += 1 + event.count(b",")
                ready += self._waiting
                self._waiting = []
            elif event.startswith(_PROMPT):
                self._prompt = event[len(_PROMPT) :]
            elif event == _GIVEN_UP:
                self.is_given_up = True
            elif event.startswith(_KEEP_ALIVES):
                ready.append(event)
            elif (name := event.partition(b"\n")[0]) in _BEGINS:
                if name not in self._begun:  # a replica that resumes without tokens sends them again
                    self._begun.add(name)
                    ready.append(event)
            else:
                self._waiting.append(event)
                if event.startswith(_ENDS) and not self.is_given_up:
                    ready += self._waiting
                    self._waiting, self.has_ended = [], True
        return b"\n\n".join((*ready, b""))

    def _add_pairs(self, data: bytes) -> bytes:
        """Take a piece that has only whole events, each with its tokens, as most pieces do, and return the events.
        Return nothing, and do nothing, for another piece."""
        if not data.endswith(b"\n\n"):
            return b""
        end = data.rfind(b"\n\n" + _TOKENS) + 2
        begin = end + len(_TOKENS)
        if data.startswith(_UNNAMED) and data.find(b"\n") == end - 2 and data.find(b"\n", begin) == len(data) - 2:
            due, known = data[:end], data[begin:-2]  # one event
        else:
            pairs = _PAIR.findall(data)
            due, known = b"".join([event for event, _ in pairs]), b",".join([tokens for _, tokens in pairs])
            if not pairs or len(due) + len(known) + _PAIR_BYTES * len(pairs) != len(data) + len(pairs) - 1:
                return b""
        self._tokens.append(known)
        self.num_tokens += 1 + known.count(b",")
        return due

    def flush(self) -> bytes:
        """Return the rest of a stream that has ended."""
        rest = b"".join(event + b"\n\n" for event in self._waiting) + self._rest
        self._waiting, self._rest = [], b""
        return rest

    def take_growth(self) -> bool:
        """Return whether tokens have come since the last call, and count them as seen."""
        before, self._num_seen = self._num_seen, len(self._tokens)
        return self._num_seen > before

    def resume_fields(self) -> dict[str, bytes]:
        """Return the fields (JSON) of a request that asks to go on with the stream; none if it has no tokens to go on
        with."""
        if self._about is None:
            return {}
        more = {"tokens": b"[" + b",".join(self._tokens) + b"]"}
        if self._prompt:
            more["prompt"] = self._prompt
        return {"resume": with_fields(self._about, more)}
