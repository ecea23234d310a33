"""What was said and when: a window's tokens cut into segments at their timestamps, and segments as subtitles.

Cut as transformers' Whisper does it, which follows the paper's code (Radford et al. 2022).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

TIMESTAMP_S = 0.02  # from one timestamp to the next
TIMESTAMP_FRAMES = 2  # of the spectrum


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one stretch of a sound, timestamps included, and when it is, in seconds from the beginning."""

    start: float
    end: float
    tokens: list[int]


def split(tokens: Sequence[int], first_timestamp: int, seek: int, num_frames: int) -> tuple[list[Segment], int]:
    """The segments of a window of `num_frames` that begins at the frame `seek`, and by how many frames the next window
    begins later: where the last whole segment ends, if another one has begun, else behind this window.
    """
    offset = seek * TIMESTAMP_S / TIMESTAMP_FRAMES
    stamps = [token >= first_timestamp for token in tokens]
    ends_alone = stamps[-2:] == [False, True]  # nothing is said behind it
    cuts = [i + 1 for i in range(len(stamps) - 1) if stamps[i] and stamps[i + 1]]
    if not cuts:
        seen = [token - first_timestamp for token in tokens if token >= first_timestamp]
        length = seen[-1] if seen and seen[-1] else int(num_frames * 0.01 / TIMESTAMP_S)
        return [Segment(offset, offset + length * TIMESTAMP_S, list(tokens))], num_frames
    if ends_alone:
        cuts.append(len(tokens))
    else:
        cuts[-1] += 1  # the timestamp that another segment begins with tells that this one is whole
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
    """How much shorter zlib makes a text: of one that repeats itself, much."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def as_srt(segments: Sequence[tuple[float, float, str]]) -> str:
    """SubRip, of (start, end, text)."""
    return "".join(
        f"{number}\n{_clock(start, ',')} --> {_clock(end, ',')}\n{_subtitle(text)}\n\n"
        for number, (start, end, text) in enumerate(segments, 1)
    )


def as_vtt(segments: Sequence[tuple[float, float, str]]) -> str:
    """WebVTT, of (start, end, text)."""
    cues = (f"{_clock(start, '.')} --> {_clock(end, '.')}\n{_subtitle(text)}\n\n" for start, end, text in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _subtitle(text: str) -> str:
    """What neither format takes for anything else: an empty line ends a cue, an arrow is of its times."""
    return " ".join(text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
