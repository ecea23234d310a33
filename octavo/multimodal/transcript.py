"""Cuts a window's tokens into segments at their timestamps, and writes segments as subtitles.

The cuts are those of transformers' Whisper, which follows the paper's code (Radford et al. 2022).
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

TIMESTAMP_S = 0.02  # seconds from one timestamp to the next
TIMESTAMP_FRAMES = 2  # spectrum frames from one timestamp to the next


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one stretch of a sound, timestamps included, and its start and end in seconds from the sound's
    beginning."""

    start: float
    end: float
    tokens: list[int]


def split(tokens: Sequence[int], first_timestamp: int, seek: int, num_frames: int) -> tuple[list[Segment], int]:
    """Return the segments of a window, and the number of frames from its start to the next window's start. The window
    has `num_frames` frames and begins at frame `seek`. The next window begins at the end of the last whole segment if
    another segment has begun after it, otherwise behind this window.
    """
    offset = seek * TIMESTAMP_S / TIMESTAMP_FRAMES
    stamps = [token >= first_timestamp for token in tokens]
    ends_alone = stamps[-2:] == [False, True]  # nothing is said after the last timestamp
    cuts = [i + 1 for i in range(len(stamps) - 1) if stamps[i] and stamps[i + 1]]
    if not cuts:
        seen = [token - first_timestamp for token in tokens if token >= first_timestamp]
        length = seen[-1] if seen and seen[-1] else int(num_frames * 0.01 / TIMESTAMP_S)
        return [Segment(offset, offset + length * TIMESTAMP_S, list(tokens))], num_frames
    if ends_alone:
        cuts.append(len(tokens))
    else:
        cuts[-1] += 1  # the next segment's first timestamp proves that this segment is whole
    segments, begin = [], 0
    for cut in cuts:
        part = list(tokens[begin:cut])
        last = part[-2] if cut == cuts[-1] and not ends_alone else part[-1]
        start, end = (offset + (token - first_timestamp) * TIMESTAMP_S for token in (part[0], last))
        segments.append(Segment(start, end, part))
        begin = cut
    if ends_alone:
        return segments, num_frames
    return segments, (tokens[begin - 2] - first_timestamp) * TIMESTAMP_FRAMES


def compression_ratio(text: str) -> float:
    """Return a text's length divided by its length after zlib. Repetitive texts have a high ratio."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def as_srt(segments: Sequence[tuple[float, float, str]]) -> str:
    """Return (start, end, text) segments as SubRip."""
    return "".join(
        f"{number}\n{_clock(start, ',')} --> {_clock(end, ',')}\n{_subtitle(text)}\n\n"
        for number, (start, end, text) in enumerate(segments, 1)
    )


def as_vtt(segments: Sequence[tuple[float, float, str]]) -> str:
    """Return (start, end, text) segments as WebVTT."""
    cues = (f"{_clock(start, '.')} --> {_clock(end, '.')}\n{_subtitle(text)}\n\n" for start, end, text in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _subtitle(text: str) -> str:
    """Return a text without the syntax of both formats: an empty line would end a cue, and an arrow separates times."""
    return " ".join(text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
