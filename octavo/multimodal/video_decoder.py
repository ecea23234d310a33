"""Decodes sampled frames of a video file to RGB, with their positions in the video, for `decoder_process`."""

import io
from typing import Any

from octavo.multimodal.decoder_process import Refused

# By the first bytes of a file. No other format is opened, as some formats refer to other files.
_FORMATS = {b"ftyp": "mp4", b"\x1a\x45\xdf\xa3": "matroska"}
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4")
_MIN_SIDE = 2
_MAX_ASPECT = 50
_RATES = (0.1, 240.0)  # plausible frames a second


def decode(data: bytes, limits: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
    """Return a dictionary about the video (size, positions of frames, rate, total), and its sampled frames in RGB.
    Raises `Refused`."""
    import av

    form = _FORMATS.get(data[4:8]) or _FORMATS.get(data[:4])
    if form is None:
        raise Refused("only mp4, mov, webm and mkv are built.")
    with av.open(io.BytesIO(data), format=form) as file:
        count, rate = _frames_of(file, limits)
    indices = _sampled(count, rate, limits)
    with av.open(io.BytesIO(data), format=form) as file:
        frames, size, total = _decoded(file, set(indices), limits)
    if not frames:
        raise Refused("it has no frames that can be read.")
    kept = [index for index in indices if index in frames]
    found = {"size": size, "indices": kept, "rate": rate, "total": total}
    return found, [frames[index] for index in kept]


def _stream_of(file: Any, limits: dict[str, Any]) -> Any:
    if not file.streams.video:
        raise Refused("it has no pictures.")
    stream = file.streams.video[0]
    context = stream.codec_context
    if context is None or context.codec.canonical_name not in CODECS:
        raise Refused(f"only {', '.join(CODECS)} are built.")
    context.thread_count = 1
    context.options = {"max_pixels": str(limits["max_frame_pixels"])}
    _check_size(context.width, context.height, limits)
    return stream


def _check_size(width: int, height: int, limits: dict[str, Any]) -> None:
    if min(width, height) < _MIN_SIDE or max(width, height) > _MAX_ASPECT * min(width, height):
        raise Refused(f"its frames have {width} x {height} pixels.")
    if width * height > limits["max_frame_pixels"]:
        raise Refused(
            f"its frames have {width} x {height} pixels; {limits['max_frame_pixels']} are the most "
            "(--max-image-pixels)."
        )


def _frames_of(file: Any, limits: dict[str, Any]) -> tuple[int, float]:
    """Return the number of frames and the frames a second. Packets are counted, as headers may lie."""
    stream = _stream_of(file, limits)
    times, count = [], 0
    for packet in file.demux(stream):
        if packet.size:
            count += 1
            if packet.pts is not None:
                times.append(packet.pts)
        if count > limits["max_seconds"] * _RATES[1]:
            raise Refused(f"it is longer than {limits['max_seconds']:g} s (--max-video-seconds).")
    if not count:
        raise Refused("it has no frames.")
    rate = float(stream.average_rate or 0)
    span = float((max(times) - min(times)) * stream.time_base) if times and stream.time_base else 0.0
    if count > 1 and span > 0:
        rate = (count - 1) / span
    if not _RATES[0] <= rate <= _RATES[1]:
        raise Refused(f"it has {rate:g} frames a second; {_RATES[0]:g} to {_RATES[1]:g} are taken.")
    if count / rate > limits["max_seconds"]:
        raise Refused(f"it is longer than {limits['max_seconds']:g} s (--max-video-seconds).")
    return count, rate


def _sampled(count: int, rate: float, limits: dict[str, Any]) -> list[int]:
    """Return the positions of frames at equal distances, including the first and the last."""
    wanted = limits["num_frames"]
    if limits["fps"]:
        wanted = min(wanted, max(1, int(count / rate * limits["fps"])))
    if wanted >= count:
        return list(range(count))
    return [round(i * (count - 1) / max(wanted - 1, 1)) for i in range(wanted)]


def _decoded(file: Any, wanted: set[int], limits: dict[str, Any]) -> tuple[dict[int, bytes], list[int], int]:
    """Return the pixels of each wanted frame by position, upright, the frames' height and width, and the number of
    frames seen."""
    import numpy as np

    stream = _stream_of(file, limits)
    frames: dict[int, bytes] = {}
    size: list[int] = []
    index = -1
    for index, frame in enumerate(file.decode(stream)):
        _check_size(frame.width, frame.height, limits)
        turns = round(frame.rotation / 90) % 4  # counterclockwise, as phones say it
        upright = [frame.height, frame.width][:: -1 if turns % 2 else 1]
        size = size or upright
        if size != upright:
            raise Refused("its frames are of different sizes.")
        if index in wanted:
            if len(wanted) * frame.width * frame.height > limits["max_pixels"]:
                raise Refused(
                    f"{len(wanted)} of its frames have more than {limits['max_pixels']} pixels together "
                    "(--max-video-pixels)."
                )
            frames[index] = np.rot90(frame.to_ndarray(format="rgb24"), turns).tobytes()
            if index == max(wanted):
                break
    return frames, size, max(index, max(wanted)) + 1
