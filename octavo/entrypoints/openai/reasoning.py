"""Answers that begin with reasoning: where it ends, in a text that comes in pieces.

A style is a pair of marks around the reasoning, as in `<think> … </think>`. What a chat template writes at the end of a
prompt decides whether the answer begins inside of it, after it, or before it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """`is_implied`: an answer begins with reasoning although no mark says so."""

    start: str
    end: str
    is_implied: bool = False


STYLES = {
    "deepseek_r1": ReasoningStyle("<think>", "</think>", is_implied=True),
    "glm45": ReasoningStyle("<think>", "</think>"),
    "mistral": ReasoningStyle("[THINK]", "[/THINK]"),
    "qwen3": ReasoningStyle("<think>", "</think>"),
    "seed_oss": ReasoningStyle("<seed:think>", "</seed:think>"),
}


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning of one request's answers."""

    style: ReasoningStyle
    is_open: bool  # an answer begins inside of the reasoning, or as if it did
    is_optional: bool  # an answer may have none

    @classmethod
    def after(cls, prompt: str, style: ReasoningStyle) -> Reasoning | None:
        """None if the prompt has ended the reasoning already, as templates do that are told not to think."""
        end = prompt.rstrip()
        if end.endswith(style.end):
            return None
        if end.endswith(style.start):
            return cls(style, is_open=True, is_optional=False)
        return cls(style, is_open=style.is_implied, is_optional=not style.is_implied)


class ReasoningSplitter:
    """Takes the text of one answer and gives (reasoning, content), the same in sum however the text is cut.

    Line breaks next to the marks belong to neither.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self._style = reasoning.style
        self._state = "inside" if reasoning.is_open else "before"
        self._held = ""  # may be part of a mark, or line breaks before one
        self._is_at_start = True  # of the reasoning, or of the content

    def add(self, text: str) -> tuple[str, str]:
        """The reasoning and the content that `text` completes."""
        self._held += text
        if self._state == "before":
            self._look_for_start()
        reasoning = self._take_reasoning() if self._state == "inside" else ""
        return reasoning, self._take_content() if self._state == "after" else ""

    def finish(self) -> tuple[str, str]:
        """What is still held back when the answer ends."""
        held, self._held = self._held, ""
        if self._state == "inside":
            return held.rstrip("\n"), ""
        return "", held if self._state == "before" else held.lstrip("\n") if self._is_at_start else held

    def _look_for_start(self) -> None:
        text = self._held.lstrip()
        if text.startswith(self._style.start):
            self._held = text[len(self._style.start) :]
            self._state = "inside"
        elif not self._style.start.startswith(text):
            self._state = "after"
            self._is_at_start = False

    def _take_reasoning(self) -> str:
        if self._is_at_start:
            # An answer that is taken to begin inside may have the mark all the same.
            text = self._held.lstrip("\n")
            if self._style.start.startswith(text):
                return ""
            self._held = text.removeprefix(self._style.start).lstrip("\n")
            if not self._held:
                return ""
            self._is_at_start = False
        before, end, after = self._held.partition(self._style.end)
        if end:
            self._held, self._state, self._is_at_start = after, "after", True
            return before.rstrip("\n")
        shown = len(self._held) - held_back(self._held, self._style.end)
        shown = len(self._held[:shown].rstrip("\n"))
        taken, self._held = self._held[:shown], self._held[shown:]
        return taken

    def _take_content(self) -> str:
        if self._is_at_start:
            self._held = self._held.lstrip("\n")
            self._is_at_start = not self._held
        taken, self._held = self._held, ""
        return taken


def held_back(text: str, mark: str) -> int:
    """Characters at the end of `text` that may turn out to begin `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
