"""Shows an answer on a terminal while it comes: as Markdown by `rich`, or as plain text."""

from __future__ import annotations

import sys
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from octavo.terminal_styles import has_styles

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# A model's text must not move the cursor or reach the clipboard: ESC and U+0080 to U+009F begin such commands.
_UNSAFE = dict.fromkeys([0x1B, *range(0x80, 0xA0)])
_FRAMES_PER_S = 12


class AnswerView(Protocol):
    """Shows one answer."""

    def think(self, text: str) -> None:
        """Show more of the reasoning."""

    def add(self, text: str) -> None:
        """Show more of the answer."""

    def end(self) -> None:
        """Show the rest, and go to the next line."""


def make_view(*, plain: bool) -> AnswerView:
    """Return a view for standard output. Only terminals with styles get Markdown."""
    return PlainView() if plain or not has_styles(sys.stdout) else MarkdownView()


class PlainView:
    """Prints the answer as it is, without its reasoning."""

    def think(self, text: str) -> None:
        pass

    def add(self, text: str) -> None:
        print(text.translate(_UNSAFE) if sys.stdout.isatty() else text, end="", flush=True)

    def end(self) -> None:
        print()


class MarkdownView:
    """Shows reasoning dimmed, and the answer as Markdown. A block (paragraph, list, table, code) is drawn again and
    again while it grows, and printed for good when the next block has begun. If it is taller than the terminal, only
    its end is drawn until then."""

    def __init__(self, console: Console | None = None) -> None:
        from markdown_it import MarkdownIt
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False) if console is None else console
        self._parser = MarkdownIt().enable("table")
        self._open_text = ""  # text of the last block and an unfinished line
        self._is_thinking = False
        self._live = Live(
            get_renderable=self._open_lines,
            console=self._console,
            refresh_per_second=_FRAMES_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def think(self, text: str) -> None:
        from rich.text import Text

        self._is_thinking = True
        self._console.print(Text(text.translate(_UNSAFE), style="dim"), end="", soft_wrap=True)

    def add(self, text: str) -> None:
        if self._is_thinking:
            self._is_thinking = False
            self._console.print("\n")
        self._live.start()
        self._open_text += text.translate(_UNSAFE)
        if "\n" in text and (finished := self._take_finished_blocks()):
            self._console.print(self._markdown(finished), "")

    def end(self) -> None:
        self._live.stop()
        if self._open_text or self._is_thinking:
            self._console.print(self._markdown(self._open_text))

    def _take_finished_blocks(self) -> str:
        """Return the text before the last block, and forget it. An unfinished line decides nothing: `2` may become a
        paragraph or the list item `2.`."""
        finished, _, rest = self._open_text.rpartition("\n")
        starts = [token.map[0] for token in self._parser.parse(finished) if token.level == 0 and token.map]
        lines = f"{finished}\n".splitlines(keepends=True)
        last = starts[-1] if starts else 0
        self._open_text = "".join(lines[last:]) + rest
        return "".join(lines[:last])

    def _open_lines(self) -> RenderableType:
        from rich.segment import Segment, Segments

        lines = self._console.render_lines(self._markdown(self._open_text), pad=False)
        shown = lines[-max(1, self._console.height - 2) :]
        return Segments(chain.from_iterable([*line, Segment.line()] for line in shown))

    def _markdown(self, text: str) -> RenderableType:
        from rich.markdown import Markdown

        return Markdown(text, hyperlinks=False)  # without links, so that addresses are visible
