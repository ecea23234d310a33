"""Reads answers that must be calls (`tool_choice` "required", or a function). Their grammar allows one spelling, so
arguments are passed on as they arrive, but no escape in two pieces."""

from octavo.call_arguments import without_open_escape
from octavo.entrypoints.chat.tools.tool_parser_base import Call, JsonScanner, Piece
from octavo.structured_output.answer_parts import Spelling


class ForcedCallsReader:
    """Reads calls whose arguments are JSON objects."""

    def __init__(self, spelling: Spelling) -> None:
        self._heads = {
            begin + call.before: name
            for name, call in spelling.calls.items()
            for begin in (spelling.open, spelling.separator)
        }
        # One head may begin with another head.
        self._ordered = sorted(self._heads, key=len, reverse=True)
        self._afters = {name: call.after for name, call in spelling.calls.items()}
        self._held = ""
        self._name: str | None = None  # name of the last call
        self._scanner: JsonScanner | None = None  # set within arguments
        self._num_scanned = 0  # characters of the held text, an escape that is not complete

    @property
    def is_within_call(self) -> bool:
        return self._scanner is not None

    def add(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            if self._scanner is None:
                if not self._skip_head():
                    break
                assert self._name is not None
                pieces.append(Call(self._name, ""))
                self._scanner = JsonScanner()
            else:
                end = self._scanner.end(self._held, self._num_scanned)
                taken = without_open_escape(self._held) if end is None else self._held[:end]
                if taken:
                    pieces.append(Call(None, taken))
                self._held = self._held[len(taken) :]
                self._num_scanned = 0
                if end is None:
                    self._num_scanned = len(self._held)
                    break
                self._scanner = None
        return pieces

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        is_open = self._scanner is not None and self._held
        return [Call(None, self._held)] if is_open else []

    def _skip_head(self) -> bool:
        """Go to the next call's arguments. Return whether the text before them is complete."""
        text = self._held
        if self._name is not None:
            after = self._afters[self._name]
            if len(text) < len(after):
                return False
            text = text[len(after) :]
        for head in self._ordered:
            if text.startswith(head):
                self._held, self._name = text[len(head) :], self._heads[head]
                return True
            if head.startswith(text):
                return False  # it may still become this head
        return False
