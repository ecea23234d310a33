"""Log-probabilities in the API's three shapes: completions, chat, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from octavo.engine.detokenizer import GPT2_BYTES, Detokenizer, make_detokenizer
from octavo.entrypoints.openai.response_bodies import (
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
)
from octavo.outputs import Logprob, PositionLogprobs

if TYPE_CHECKING:
    from octavo.loading.tokenizer import ModelTokenizer

LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON does not have
REPLACEMENT = "�"


class TextOffsets:
    """Finds where each token's text begins in the text of its choice, in characters, counted from `start`.

    All tokens of one character begin where the character begins. A token without text begins where the next token does.
    """

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._length = start

    def add(self, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._length)
            self._length += len(self._detokenizer.add([token_id]))
        return offsets

    def end(self) -> int:
        """Return the length of the whole text."""
        return self._length + len(self._detokenizer.flush())


def echo_offsets(tokenizer: ModelTokenizer, token_ids: list[int], echo: str) -> list[int]:
    """Return where the text of each prompt token begins in `echo`. Tokens that the tokenizer has added before it begin
    at 0."""
    offsets = TextOffsets(make_detokenizer(tokenizer.backend_tokenizer, [], skip_special_tokens=False))
    found = offsets.add(token_ids)
    num_before = offsets.end() - len(echo)
    return [min(max(offset - num_before, 0), len(echo)) for offset in found]


class LogprobsFormatter:
    """Writes log-probabilities of one tokenizer's tokens; `as_token_ids` writes tokens as `token_id:N`."""

    def __init__(self, tokenizer: ModelTokenizer, *, as_token_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def completion(
        self,
        token_ids: Sequence[int],
        positions: Iterable[PositionLogprobs | None],
        num_top: int,
        text_offset: list[int],
    ) -> CompletionLogprobs:
        """Return the completions shape: each chosen token, then the `num_top` most likely tokens, or all (-1)."""
        result = CompletionLogprobs(text_offset=text_offset, top_logprobs=[])
        for token_id, position in zip(token_ids, positions, strict=True):
            chosen = position.get(token_id) if position else None
            result.tokens.append(self._text(token_id, chosen))
            result.token_logprobs.append(_finite(chosen.logprob) if chosen else None)
            result.top_logprobs.append(self._top_by_text(token_id, position, num_top) if position else None)
        return result

    def chat(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs], num_top: int) -> ChatLogprobs:
        """Return the chat shape: each token with its bytes and the `num_top` most likely tokens, or all (-1)."""
        content = []
        for token_id, position in zip(token_ids, positions, strict=True):
            token = self._chat_token(token_id, position[token_id])
            top = [self._chat_token(*item) for item in _best_first(position)[: _count(num_top, position)]]
            content.append(ChatTokenLogprob(**token.__dict__, top_logprobs=top))
        return ChatLogprobs(content=content)

    def prompt(self, positions: Sequence[PositionLogprobs | None]) -> PromptLogprobs:
        """Return vLLM's shape: a map of token ids for each position, null for the first."""
        return [None if position is None else self._prompt_position(position) for position in positions]

    def _prompt_position(self, position: PositionLogprobs) -> dict[int, PromptLogprob]:
        return {
            token_id: PromptLogprob(
                logprob=_finite(entry.logprob), rank=entry.rank, decoded_token=self._plain_text(token_id, entry)
            )
            for token_id, entry in position.items()
        }

    def _top_by_text(self, token_id: int, position: PositionLogprobs, num_top: int) -> dict[str, float]:
        chosen = [(token_id, position[token_id])] if token_id in position else []
        shown = chosen + _best_first(position)[: _count(num_top, position)]
        result: dict[str, float] = {}
        for other_id, entry in shown:  # several tokens may have one text, as parts of characters do: keep the best
            result.setdefault(self._text(other_id, entry), _finite(entry.logprob))
        return result

    def _chat_token(self, token_id: int, entry: Logprob) -> ChatTopLogprob:
        text = self._plain_text(token_id, entry)
        return ChatTopLogprob(
            token=self._text(token_id, entry),
            logprob=_finite(entry.logprob),
            bytes=list(token_bytes(text, lambda: self._tokenizer.convert_ids_to_tokens(token_id))),
        )

    def _text(self, token_id: int, entry: Logprob | None) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._plain_text(token_id, entry)

    def _plain_text(self, token_id: int, entry: Logprob | None) -> str:
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return self._decode(token_id)

    def _decode(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id]))


def token_bytes(text: str, piece: Callable[[], str | None]) -> bytes:
    """Return the bytes of a token: of its text, or, for a part of a character, of the vocabulary's `piece`.

    Pieces write bytes as `<0xE2>` (SentencePiece) or as one printable character a byte (GPT-2).
    """
    if REPLACEMENT not in text or (name := piece()) is None:
        return text.encode()
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    try:
        return bytes(GPT2_BYTES[char] for char in name)
    except KeyError:
        return text.encode()


def _best_first(position: PositionLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(position.items(), key=lambda item: -item[1].logprob)


def _count(num_top: int, position: PositionLogprobs) -> int:
    return len(position) if num_top < 0 else num_top


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
