"""Splits answers that begin with reasoning, in texts that arrive in pieces.

A style is a pair of marks around the reasoning, as in `<think> … </think>`. The end of the rendered prompt decides
whether the answer begins inside the reasoning, after it, or before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.entrypoints.chat.tools.tool_parser_base import ToolParser


_RECIPIENT_MARK = ">>>"
_MAX_TRIALS = 32  # false marks of calls in one answer's reasoning, after which no more are tried
_MAX_HEADER = 512  # characters; a longer header is content. The name in it has at most 256


@dataclass(frozen=True, slots=True)
class Blocks:
    """Further marks of answers that consist of blocks: reasoning, content and calls, in any order."""

    calls: str
    calls_end: str
    last: str  # ends an answer
    header: str = ""  # begins every block; a name may follow it
    address: str = ""  # regular expression of a name before calls, for models that forget the header


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """The marks of a model's reasoning. `is_implied`: an answer begins with reasoning even without a mark. Some models
    mark the content after the reasoning, too. With `has_channels` an answer consists of Harmony's messages, each of
    which names its channel; with `blocks` it consists of blocks. With `stays_in_content` reasoning and its marks are
    part of the content. Without marks (`FUNCTIONARY`) there is no reasoning, but content has a mark beside calls."""

    start: str
    end: str
    is_implied: bool = False
    answer_start: str = ""
    answer_end: str = ""
    has_channels: bool = False
    blocks: Blocks | None = None
    stays_in_content: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts that must be visible to read an answer."""
        more = () if self.blocks is None else (self.blocks.last, self.blocks.header)
        return tuple(filter(None, (self.start, self.end, self.answer_start, self.answer_end, *more)))

    @property
    def end_beside_calls(self) -> str:
        """Return the end mark, which models also write before or behind a call in their reasoning; empty if it has
        another meaning there."""
        return "" if self.blocks is not None or self.has_channels or self.stays_in_content else self.end.strip()

    @property
    def text_marks(self) -> tuple[str, ...]:
        """Return the marks that may stand in the answer beside calls."""
        if self.blocks is not None:
            return self.marks
        return tuple(filter(None, (self.answer_start, self.answer_end)))


_THINK = ReasoningStyle("<think>", "</think>")
_IMPLIED = ReasoningStyle("<think>", "</think>", is_implied=True)
FUNCTIONARY = ReasoningStyle("", "", answer_start="all\n")

# By vLLM's names for --reasoning-parser.
STYLES = {
    "cohere": ReasoningStyle(
        "<|START_THINKING|>", "<|END_THINKING|>", answer_start="<|START_RESPONSE|>", answer_end="<|END_RESPONSE|>"
    ),
    "deepseek_r1": _IMPLIED,
    "deepseek_v3": _THINK,
    "ernie45": ReasoningStyle("<think>", "</think>", answer_start="<response>", answer_end="</response>"),
    "gemma4": ReasoningStyle("<|channel>thought\n", "<channel|>"),
    "glm45": _THINK,
    "granite": ReasoningStyle("Here is my thought process:", "Here is my response:"),
    "hy_v3": ReasoningStyle("<think:opensource>", "</think:opensource>"),
    "hunyuan_a13b": ReasoningStyle("<think>", "</think>", answer_start="<answer>", answer_end="</answer>"),
    "inkling": ReasoningStyle(
        "<|content_thinking|>", "<|end_message|><|message_model|>", answer_start="<|content_text|>",
        answer_end="<|end_message|>", blocks=Blocks(
            "<|content_invoke_tool_json|>", "<|end_message|>", "<|content_model_end_sampling|>", "<|message_model|>"
        ),
    ),
    "kimi_k2": _THINK,
    "kimi_k3": ReasoningStyle(
        "<|open|>think<|sep|>", "<|close|>think<|sep|>", answer_start="<|open|>response<|sep|>",
        answer_end="<|close|>response<|sep|>",
        blocks=Blocks("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", "<|close|>message<|sep|>"),
    ),
    "minimax_m2": _IMPLIED,
    "minimax_m2_append_think": ReasoningStyle("<think>", "</think>", stays_in_content=True),
    "minimax_m3": ReasoningStyle("<mm:think>", "</mm:think>"),
    "mistral": ReasoningStyle("[THINK]", "[/THINK]"),
    "muse_glimmer": ReasoningStyle(
        " to=self<|message|>", "<|eom|><|start|>assistant", answer_start=" to=user<|message|>", answer_end="<|eom|>",
        blocks=Blocks(
            "<atem:function_calls>", "</atem:function_calls>", "<|eot|>", "<|start|>assistant",
            r"to=[\w.\-]{1,256}<\|message\|>",
        ),
    ),
    "olmo3": _THINK,
    "openai_gptoss": ReasoningStyle(
        "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", answer_start="<|channel|>final<|message|>",
        has_channels=True,
    ),
    "qwen3": _THINK,
    "seed_oss": ReasoningStyle("<seed:think>", "</seed:think>"),
    "solar_open": ReasoningStyle(
        "<|think|>", "<|end|><|begin|>assistant", answer_start="<|content|>", answer_end="<|end|>",
        blocks=Blocks("<|tool_calls|>", "<|calls|>", "<|flush|>", "<|begin|>assistant"),
    ),
    "solar_open2": ReasoningStyle("<|think:start|>", "<|think:end|>"),
    "step3": _IMPLIED,
}  # fmt: skip
# Other names of the same styles.
_ALIASES = {
    "cohere_command3": "cohere", "cohere_command4": "cohere", "deepseek_v4": "deepseek_v3", "glm47": "glm45",
    "holo2": "deepseek_v3", "mimo": "qwen3", "nemotron_v3": "qwen3", "poolside_v1": "qwen3", "step3p5": "qwen3",
}  # fmt: skip
STYLES |= {alias: STYLES[name] for alias, name in _ALIASES.items()}


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning of one request's answers."""

    style: ReasoningStyle
    is_open: bool  # an answer begins inside the reasoning, or is read as if it did
    is_optional: bool  # an answer may have none
    has_header: bool = False  # the prompt ends with the header of a block, or with the mark before a recipient
    goes_on: bool = False  # an answer begins within the text of the reasoning, so that its first line breaks count
    is_ended: bool = False  # the prompt has ended the reasoning: an answer has none, only marks around its content

    @classmethod
    def after(cls, prompt: str, style: ReasoningStyle, begun: str | None = None) -> Reasoning | None:
        """Return the reasoning of answers to `prompt`. None if the prompt has ended the reasoning already, as templates
        do when thinking is off, and the content has no marks. An answer that continues a message, whose content so far
        is `begun`, may begin in the middle of its reasoning."""
        end = prompt.rstrip()
        if style is FUNCTIONARY:
            is_begun = end.endswith(_RECIPIENT_MARK)
            return cls(style, is_open=False, is_optional=True, has_header=is_begun, is_ended=True)
        if style.has_channels:
            return cls(style, is_open=False, is_optional=True)
        if style.blocks is not None:
            has_header = bool(style.blocks.header) and end.endswith(style.blocks.header)
            return cls(style, is_open=end.endswith(style.start), is_optional=True, has_header=has_header)
        if end.endswith(style.end.rstrip()):
            return cls(style, is_open=False, is_optional=True, is_ended=True) if style.answer_start else None
        start = style.start.rstrip()
        begins = begun is not None and begun.lstrip().startswith(start) and style.end not in begun
        if (begins and not style.stays_in_content) or end.endswith(start):
            return cls(style, is_open=True, is_optional=False, goes_on=begins and not end.endswith(start))
        is_implied = style.is_implied and not begun
        return cls(style, is_open=is_implied, is_optional=not is_implied)


def new_splitter(
    reasoning: Reasoning, call_marks: Sequence[str] = (), new_tool_parser: Callable[[], ToolParser] | None = None
) -> Splitter:
    """Return a splitter for one answer."""
    if reasoning.style.stays_in_content:
        return WholeContent(reasoning.style.start if reasoning.is_open else "")
    if reasoning.style is FUNCTIONARY:
        return RecipientSplitter(reasoning.has_header, new_tool_parser)
    if reasoning.style.blocks is not None:
        return BlockSplitter(reasoning, reasoning.style.blocks)
    if reasoning.style.has_channels:
        return ChannelSplitter()
    return ReasoningSplitter(reasoning, call_marks, new_tool_parser)


class ReasoningSplitter:
    """Splits the text of one answer into (reasoning, content). The sums do not depend on how the text is cut into
    pieces.

    Line breaks next to the marks belong to neither. A tool call ends the reasoning too, because models forget the end
    mark. Text in the reasoning that begins with one of `call_marks` is a call if a parser reads one, otherwise
    reasoning.
    """

    def __init__(
        self,
        reasoning: Reasoning,
        call_marks: Sequence[str] = (),
        new_tool_parser: Callable[[], ToolParser] | None = None,
    ) -> None:
        self._style = reasoning.style
        # One of these marks may begin an answer that does not begin inside the reasoning.
        self._first_marks = [mark for mark in (reasoning.style.start, reasoning.style.answer_start) if mark]
        if reasoning.is_ended:
            self._first_marks.remove(reasoning.style.start)
        self._call_marks = call_marks if new_tool_parser is not None else ()
        self._new_tool_parser = new_tool_parser
        self._trial: ToolParser | None = None  # parser of the held text, which begins with a mark of calls
        self._num_trials = 0
        self._num_tried = 0  # characters given to the trial
        self._no_call = 0  # characters at the beginning of the held text that cannot begin a call
        self._state = "inside" if reasoning.is_open else "before"
        self._held = ""  # text that may be part of a mark, or line breaks before a mark
        self._is_at_start = not reasoning.goes_on  # of the reasoning, or of the content
        self._is_marked = False  # the content has marks
        self._before_call = ""  # line breaks between the reasoning and a possible call
        self.is_ended_by_call = False

    @property
    def is_inside(self) -> bool:
        """Return whether the next text is reasoning."""
        return self._state == "inside"

    @property
    def is_undecided(self) -> bool:
        """Return whether later text decides if the text held back is reasoning."""
        return self._state == "before" or self._trial is not None

    @property
    def is_over(self) -> bool:
        """Return whether all further text is content."""
        return self._state == "after"

    def passes_over(self, text: str) -> bool:
        """Return whether `text` is certainly more of the reasoning. A caller that wants no text need not add it."""
        is_within = self._state == "inside" and self._trial is None and not (self._held or self._is_at_start)
        return is_within and not any(mark[0] in text for mark in (self._style.end, *self._call_marks))

    def add(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that `text` completes."""
        self._held += text
        if self._state == "before":
            self._look_for_start()
        reasoning = self._take_reasoning() if self._state == "inside" else ""
        return reasoning, self._take_content() if self._state == "after" else ""

    def finish(self) -> tuple[str, str]:
        """Return the reasoning and the content still held back when the answer ends."""
        held, self._held = self._held, ""
        if self._state == "inside":
            if self._trial is not None:  # the end of the answer may decide whether it is a call
                trial, self._trial = self._trial, None
                if _has_call(trial.add(held[self._num_tried :]) + trial.finish(is_cut=True)):
                    self._state, self.is_ended_by_call = "after", True
                    return "", held
                self._give_up(held)
                return _sum(self.add(""), self.finish())
            return held.rstrip("\n"), ""
        if self._state == "before":
            return "", held
        held = held.lstrip("\n") if self._is_at_start else held
        return "", held.rstrip("\n") if self._is_marked else held

    def _look_for_start(self) -> None:
        text = self._held.lstrip()
        found = next((mark for mark in self._first_marks if text.startswith(mark)), None)
        if found is None:
            if not any(mark.startswith(text) for mark in self._first_marks):
                self._state, self._is_at_start = "after", False
        elif found == self._style.start:
            self._held, self._state = text[len(found) :], "inside"
        else:  # an answer without reasoning
            self._held, self._state = text, "after"

    def _take_reasoning(self) -> str:
        if self._is_at_start:
            # An answer that is assumed to begin inside the reasoning may still have the start mark.
            text = self._held.lstrip("\n")
            if self._style.start.startswith(text):
                return ""
            self._held = text.removeprefix(self._style.start).lstrip("\n")
            if not self._held:
                return ""
            self._is_at_start = False
        taken = ""
        while True:
            if self._trial is not None and not self._try_call():
                return taken
            if self._state == "after":
                return taken
            ends = [found for mark in self._call_marks if (found := self._held.find(mark, self._no_call)) >= 0]
            end = self._held.find(self._style.end)
            if end >= 0 and not any(begin < end for begin in ends):
                taken += self._held[:end].rstrip("\n")
                self._held = self._held[end + len(self._style.end) :]
                self._state, self._is_at_start = "after", True
                return taken
            if not ends:
                break
            before = self._held[: min(ends)]
            shown = len(before.rstrip("\n"))
            taken += before[:shown]
            self._before_call, self._held, self._no_call = before[shown:], self._held[min(ends) :], 0
            self._trial, self._num_tried = self._new_tool_parser() if self._new_tool_parser else None, 0
        shown = len(self._held) - max(held_back(self._held, mark) for mark in (self._style.end, *self._call_marks))
        shown = len(self._held[:shown].rstrip("\n"))
        given, self._held = self._held[:shown], self._held[shown:]
        self._no_call = max(0, self._no_call - shown)
        return taken + given

    def _try_call(self) -> bool:
        """Return whether it is decided that the held text, which begins with a mark, is a call or not. A call ends the
        reasoning."""
        assert self._trial is not None
        pieces = self._trial.add(self._held[self._num_tried :])
        self._num_tried = len(self._held)
        if not pieces:
            return False
        self._trial = None
        if _has_call(pieces[:1]):
            self._state, self._is_at_start, self.is_ended_by_call = "after", False, True
        else:
            self._give_up(self._held)
        return True

    def _give_up(self, held: str) -> None:
        """Note that the text after a mark of calls is no call."""
        self._held, self._no_call = self._before_call + held, len(self._before_call) + 1
        self._num_trials += 1
        if self._num_trials == _MAX_TRIALS:
            self._call_marks = ()

    def _take_content(self) -> str:
        style = self._style
        if self._is_at_start:
            self._held = self._held.lstrip("\n")
            if style.answer_start and style.answer_start.startswith(self._held[: len(style.answer_start)]):
                if not self._held.startswith(style.answer_start):
                    return ""
                self._held = self._held[len(style.answer_start) :].lstrip("\n")
                self._is_marked = True
                if not self._held:
                    return ""
            self._is_at_start = not self._held
        if not self._is_marked:
            taken, self._held = self._held, ""
            return taken
        before, end, after = self._held.partition(style.answer_end)
        if end:
            self._held, self._is_marked = after, False
            return before.rstrip("\n")
        shown = len(self._held) - held_back(self._held, style.answer_end)
        shown = len(self._held[:shown].rstrip("\n"))
        taken, self._held = self._held[:shown], self._held[shown:]
        return taken


def _has_call(pieces: Sequence[object]) -> bool:
    return bool(pieces) and not isinstance(pieces[0], str)


def _sum(first: tuple[str, str], second: tuple[str, str]) -> tuple[str, str]:
    return first[0] + second[0], first[1] + second[1]


class ChannelSplitter:
    """Splits an answer of Harmony's messages, as gpt-oss writes them, into (reasoning, content). The sums do not depend
    on how the text is cut. The channel "analysis" is reasoning, all others are content. Calls stay in the content, in
    the form of the format "openai". (github.com/openai/harmony, docs/format.md)"""

    is_undecided = is_over = is_ended_by_call = False  # each mark is decided when it comes, and reasoning may follow

    _RECIPIENT = re.compile(r"to=[\w.\-]{0,256}(?:\s[^<\n]{0,64})?")
    _CONSTRAINT = "<|constrain|>"
    _MARK = re.compile(r"<\|(?:start|end|return|call|channel|message)\|>")

    def __init__(self) -> None:
        self._held = ""
        self._header: str | None = ""  # header of the message that begins; None within a message
        self._channel = ""

    def add(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that `text` completes."""
        held, at = self._held + text, 0
        parts: dict[bool, list[str]] = {True: [], False: []}
        for found in self._MARK.finditer(held):
            before, mark, at = held[at : found.start()], found[0], found.end()
            parts[self.is_inside].append(self._take(before))
            if mark == "<|message|>" and self._header is not None:
                parts[False].append(self._begin())
            elif mark in ("<|start|>", "<|channel|>"):
                parts[False].append(self._lengthen((self._header or "") + mark))
            else:
                if mark == "<|call|>" and self._is_call:
                    parts[False].append(mark)
                self._header, self._channel = "", ""
        shown = held.rfind("<", at)
        shown = len(held) if shown < 0 or len(held) - shown > len("<|message|>") else shown
        self._held = held[shown:]
        parts[self.is_inside].append(self._take(held[at:shown]))
        return "".join(parts[True]), "".join(parts[False])

    def finish(self) -> tuple[str, str]:
        """Return the reasoning and the content still held back when the answer ends."""
        held, self._held = self._held, ""
        if self._header and "<|" not in self._header:
            held = self._header + held
        return (held, "") if self.is_inside else ("", held)

    @property
    def is_inside(self) -> bool:
        """Return whether the next text is reasoning."""
        return self._header is None and self._channel == "analysis"

    @property
    def _is_call(self) -> bool:
        return self._channel.startswith("to=")

    def _take(self, text: str) -> str:
        """Return the part of `text` that belongs to the message and not to its header."""
        if self._header is None:
            return text
        header = self._header + text
        if "<|" in self._header or self._may_begin_header(header):
            return self._lengthen(header)
        self._header, self._channel = None, "final"  # a text without a header
        return header

    def _lengthen(self, header: str) -> str:
        """Set the header so far. Return its text if it is too long for a header: the message is content."""
        if len(header) <= _MAX_HEADER:
            self._header = header
            return ""
        self._header, self._channel = None, "final"
        return self._MARK.sub("", header)

    def _may_begin_header(self, text: str) -> bool:
        """Return whether `text` may begin a message's header: a recipient, or the beginning of a recipient. Any other
        text begins no header, so that the result does not depend on how the text is cut."""
        text = text.lstrip().replace(self._CONSTRAINT, " ")
        text = text[: len(text) - held_back(text, self._CONSTRAINT)]
        return "to=".startswith(text[:3]) and (len(text) < 3 or self._RECIPIENT.fullmatch(text) is not None)

    def _begin(self) -> str:
        """Begin a message with its header. Return the part of the header that goes into the content, where calls are
        read."""
        header, self._header = self._header or "", None
        channel = header.partition("<|channel|>")[2]
        recipients = re.findall(r"to=([\w.\-]{1,256})", header)
        self._channel = "to=" if recipients else channel.split()[0] if channel.split() else "final"
        return f"<|channel|>commentary to={recipients[-1]} <|constrain|>json<|message|>" if recipients else ""


class BlockSplitter:
    """Splits an answer of blocks into (reasoning, content). The sums do not depend on how the text is cut. Calls stay
    in the content, with their marks; they end a block that the model forgot to end."""

    is_undecided = is_over = is_ended_by_call = False  # each mark is decided when it comes, and reasoning may follow

    _ADDRESS_SO_FAR = re.compile(r"to=[\w.\-]{0,256}(?:<\|?m?e?s?s?a?g?e?\|?)?\Z")

    def __init__(self, reasoning: Reasoning, blocks: Blocks) -> None:
        style, self._blocks = reasoning.style, blocks
        end = style.end.removesuffix(blocks.header) if blocks.header else style.end
        self._states = {style.start.strip(): "reasoning", style.answer_start.strip(): "content", blocks.calls: "calls"}
        self._marks = {*self._states, end, style.answer_end, blocks.calls_end, blocks.last, blocks.header} - {""}
        self._any_mark = re.compile("|".join(filter(None, (*map(re.escape, self._marks), blocks.address))))
        self._state = "reasoning" if reasoning.is_open else "header" if reasoning.has_header else "content"
        self._held = ""
        self._name = ""  # text after a header, left out if the mark of a block follows
        self._follows_call = False

    @property
    def is_inside(self) -> bool:
        """Return whether the next text is reasoning."""
        return self._state == "reasoning"

    def add(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that `text` completes."""
        held, at, parts = self._held + text, 0, list[tuple[str, str]]()
        for found in self._any_mark.finditer(held):
            parts += self._take(held[at : found.start()]), ("", self._go_on(found[0]))
            at = found.end()
        rest = held[at:]
        shown = len(rest) - max(held_back(rest, mark) for mark in self._marks)
        if self._blocks.address and (begun := self._ADDRESS_SO_FAR.search(rest, max(0, len(rest) - _MAX_HEADER))):
            shown = min(shown, begun.start())
        self._held = rest[shown:]
        parts.append(self._take(rest[:shown]))
        return "".join(part[0] for part in parts), "".join(part[1] for part in parts)

    def finish(self) -> tuple[str, str]:
        """Return the reasoning and the content still held back when the answer ends."""
        parts, self._held = self._take(self._held), ""
        return parts[0], parts[1] + self._name

    def _take(self, text: str) -> tuple[str, str]:
        if self._state == "header":
            self._name += text
            if len(self._name) <= _MAX_HEADER:
                return "", ""
            self._state, text, self._name = "content", self._name, ""
        return (text, "") if self.is_inside else ("", text)

    def _go_on(self, mark: str) -> str:
        """Go on after `mark`. Return the content that it adds: marks of calls, and a name that begins no block."""
        blocks, name = self._blocks, self._name
        self._name = ""
        if self._state == "calls" and mark != blocks.last:
            if mark == blocks.calls_end:
                self._state, self._follows_call = "content", True
            return mark
        if mark == blocks.header:
            self._state = "header"
            return name
        if mark not in self._marks:  # an address
            self._state, self._name = "header", name + mark
            return ""
        self._state, follows_call = self._states.get(mark, "content"), self._follows_call
        self._follows_call = False
        if mark == blocks.calls:
            return blocks.header + mark if follows_call else mark
        return "" if mark in self._states else name


class RecipientSplitter:
    """Reads an answer of Functionary 3.2's messages. Each begins with `>>>` and a line: "all" before content, otherwise
    the name of a function. Calls stay in the content, with their lines. The sums do not depend on how the text is
    cut."""

    is_inside = is_undecided = is_ended_by_call = False
    is_over = True  # there is no reasoning

    _LINE = re.compile(r">>>(?:(all)[ \t]{0,32}\n|[\w.\-]{1,256}[ \t]{0,32}\n\s{0,32}\{)")
    _LINE_SO_FAR = re.compile(r">{0,3}|>>>[\w.\-]{0,256}[ \t]{0,32}(?:\n\s{0,32})?")

    def __init__(self, is_begun: bool, new_tool_parser: Callable[[], ToolParser] | None = None) -> None:
        """`is_begun`: the prompt ends with the first mark."""
        self._new_tool_parser = new_tool_parser
        self._held = _RECIPIENT_MARK if is_begun else ""
        self._is_first = is_begun  # whether the held text begins with the prompt's mark

    def add(self, text: str) -> tuple[str, str]:
        """Return no reasoning, and the content that `text` completes."""
        held, begin, at, taken = self._held + text, 0, 0, list[str]()
        while (at := held.find(">", at)) >= 0:
            if (line := self._LINE.match(held, at)) is not None:
                taken += (held[begin:at], "" if line[1] else line[0])
                begin = at = line.end()
            elif self._LINE_SO_FAR.fullmatch(held, at):
                break
            elif self._is_first:
                begin = at = len(_RECIPIENT_MARK)
            else:
                at += 1
            self._is_first = False
        end = len(held) if at < 0 else at
        self._held = held[end:]
        return "", "".join(taken) + held[begin:end]

    def finish(self) -> tuple[str, str]:
        """Return the text still held back when the answer ends."""
        held, self._held = self._held, ""
        if self._is_first and self._new_tool_parser is not None:  # perhaps a call without arguments
            parser = self._new_tool_parser()
            self._is_first = not _has_call(parser.add(held) + parser.finish())
        return "", held.removeprefix(_RECIPIENT_MARK) if self._is_first else held


class WholeContent:
    """Returns an answer as content, with the mark of reasoning that the prompt has opened."""

    is_inside = is_undecided = is_ended_by_call = False
    is_over = True

    def __init__(self, start: str) -> None:
        self._start = start

    def add(self, text: str) -> tuple[str, str]:
        start, self._start = self._start, ""
        return "", start + text

    def finish(self) -> tuple[str, str]:
        return "", ""


Splitter = ReasoningSplitter | ChannelSplitter | BlockSplitter | RecipientSplitter | WholeContent


def held_back(text: str, mark: str) -> int:
    """Return the number of characters at the end of `text` that may begin `mark`."""
    if len(mark) < 2:
        return 0
    tail = text[1 - len(mark) :]
    at = tail.find(mark[0])
    while at >= 0 and not mark.startswith(tail[at:]):
        at = tail.find(mark[0], at + 1)
    return len(tail) - at if at >= 0 else 0
