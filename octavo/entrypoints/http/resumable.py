"""Streams that another server can go on with, such as another replica behind `octavo gateway`.

A request with the header X-Octavo-Resumable is answered with the stream's id, time and seed in the same header. In the
stream a comment with tokens follows the events made of these tokens. If the prompt has tokens of earlier answers, which
the other server does not remember, a comment with the prompt's tokens comes first. The other server gets all this as
the field `resume`, replays the tokens through the readers, and sends the rest.

If this server ends a stream because it stops or its engine has died, a comment before the last events says that it
gives the stream up: whoever has another server asks that one to go on, and others take the events.
"""

import random
from typing import Protocol

from starlette.requests import Request

from octavo.entrypoints.http.server_state import state_of
from octavo.entrypoints.http.streaming import encode_json, tokens_comment
from octavo.errors import EngineDeadError
from octavo.sampling_params import SEED_BITS, SamplingParams

_HEADER, PROMPT_TOKENS = "X-Octavo-Resumable", "X-Octavo-Prompt-Tokens"
_GIVEN_UP = b": given up\n\n"


class Resumed(Protocol):
    """The field `resume` of a body."""

    id: str
    created: int
    seed: int
    tokens: list[list[int]]  # in groups as they came
    prompt: list[int] | None


class ResumableStream:
    """Makes one stream resumable, and skips the part of it that another server has sent. `shows_tokens`: its events are
    followed by tokens."""

    def __init__(
        self, raw: Request, params: SamplingParams, resume: Resumed | None, name: str, created: int, *, can_be: bool
    ) -> None:
        """Set the seed of `params`. `name` is the id of a stream that begins here."""
        self.id, self.created = (name, created) if resume is None else (resume.id, resume.created)
        self._num_replayed = 0 if resume is None else len(resume.tokens)  # outputs that another server has sent
        self.is_resumed, self.has_begun = resume is not None, self._num_replayed > 0  # the client has events
        self.shows_tokens = can_be and _HEADER in raw.headers
        self._state = state_of(raw)
        self.recalled_prompt: list[int] | None = None  # its tokens, if they are not those of its text
        if resume is not None:
            params.seed = resume.seed
        elif self.shows_tokens and params.seed is None:
            params.seed = random.getrandbits(SEED_BITS)
        self._seed = params.seed

    def headers(self, num_prompt_tokens: int) -> dict[str, str]:
        """Return the headers of the stream."""
        if not self.shows_tokens:
            return {}
        about = {"id": self.id, "created": self.created, "seed": self._seed}
        return {_HEADER: encode_json(about).decode(), PROMPT_TOKENS: str(num_prompt_tokens)}

    @property
    def is_given_up(self) -> bool:
        """Whether the server has cut the stream off, so that another server is to go on."""
        return self.shows_tokens and self._state.has_cut_off

    def before_error(self, error: Exception) -> bytes:
        """Return the comment that comes before the event of an error: none if another server could not go on."""
        return _GIVEN_UP if self.shows_tokens and isinstance(error, EngineDeadError) else b""

    def shown(self, events: bytes, token_ids: list[int], *, is_last: bool) -> bytes:
        """Return an output's events as the client gets them: none if another server has sent them."""
        if self._num_replayed:
            self._num_replayed -= 1
            return b""
        if is_last:
            return _GIVEN_UP + events if self.is_given_up else events
        if not self.shows_tokens:
            return events
        prompt, self.recalled_prompt = self.recalled_prompt, None
        before = b"" if prompt is None else b": prompt %b\n\n" % encode_json(prompt)
        return before + events + tokens_comment(token_ids)
