"""Counts the tokens of one answer's reasoning, for the usage. `ChatAnswers` gives it every token, shown or not."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.detokenizer import Detokenizer
from octavo.entrypoints.chat.reasoning import ReasoningSplitter, Splitter
from octavo.outputs import CompletionOutput


class ReasoningCounter:
    """Counts tokens from the one in which the reasoning begins to the one that completes its end mark.

    The answer is split again, token by token: the engine may give many tokens as one text, and the count does not
    depend on that. Tokens of a call that ends the reasoning do not count.
    """

    def __init__(self, splitter: Splitter, detokenizer: Detokenizer) -> None:
        """`detokenizer` is a new one, with the options of the request."""
        self.num_tokens = 0  # so far
        self._splitter: Splitter | None = splitter  # None when the rest is content
        self._detokenizer = detokenizer
        self._num_undecided = 0
        self._last: CompletionOutput | None = None

    def count(self, output: CompletionOutput, *, shows_stop: bool) -> None:
        """Count the tokens of the answer's next output. A second call with the same output does nothing. `shows_stop`:
        the stop token is part of the text."""
        if output is self._last:
            return
        self._last = output
        is_by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        num_hidden = int(is_by_token and not shows_stop and bool(output.token_ids))
        self.add(output.token_ids[: len(output.token_ids) - num_hidden])
        if output.finish_reason is not None:
            self.finish(num_hidden)

    def add(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens of the answer."""
        for token in token_ids:
            if (splitter := self._splitter) is None:
                return
            text = self._detokenizer.add([token])
            if isinstance(splitter, ReasoningSplitter) and splitter.passes_over(text):
                self.num_tokens += 1
                continue
            was_inside = splitter.is_inside
            splitter.add(text)
            self._num_undecided += 1
            if splitter.is_undecided:
                continue
            if (was_inside or splitter.is_inside) and not splitter.is_ended_by_call:
                self.num_tokens += self._num_undecided
            self._num_undecided = 0
            if splitter.is_over:
                self._splitter = None

    def finish(self, num_hidden: int = 0) -> None:
        """End the count with the answer. `num_hidden` tokens at its end have no text: they were not given to `add`."""
        if (splitter := self._splitter) is None:
            return
        was_inside = splitter.is_inside
        splitter.add(self._detokenizer.flush())
        splitter.finish()
        if was_inside and not splitter.is_ended_by_call:
            self.num_tokens += self._num_undecided + num_hidden
        self._splitter = None
