"""Reads videos of requests into frames for models: RGB, sampled at equal distances before they are converted.

Strangers' files are decoded in a separate process, which has bounds on memory and time and may crash without harm.
Error texts say what is wrong with the video, and nothing about the machine.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.config import MediaConfig, VideoConfig
from octavo.media_kinds import VIDEO
from octavo.multimodal.decoding import decode

_MEMORY_BYTES = 2 << 30  # memory of the decoding process, without the frames and the file
_MIN_SIDE = 2
_MAX_ASPECT = 50
# Least and most frames a second, and seconds between frames, that callers may name: positions made of them are finite.
RATES = (0.001, 1000.0)


@dataclass(frozen=True, slots=True)
class Video:
    """Frames of a video, and their positions in it."""

    frames: NDArray[np.uint8]  # [frames, height, width, 3]
    indices: tuple[int, ...]  # position of each frame, below `total`
    total: int
    rate: float | None = None  # frames a second of the original video; None: not known

    @property
    def nbytes(self) -> int:
        return self.frames.nbytes


class VideoReader:
    """Reads videos within one engine's bounds. It is a `MediaReader`."""

    def __init__(self, config: MediaConfig) -> None:
        assert config.video is not None
        self._config, self._video = config, config.video

    def from_bytes(self, data: bytes) -> Video:
        return from_bytes(data, self._video, self._config.max_pixels)

    def normalized(self, given: object) -> Video:
        return normalized(given, self._video)

    def is_many(self, given: object) -> bool:
        return isinstance(given, list)

    def example(self) -> Video:
        return Video(np.zeros((2, 56, 56, 3), np.uint8), (0, 1), 2)

    def largest(self, share: float) -> list[Video]:
        count = self._video.num_frames
        pixels = min(self._video.max_pixels // count, self._config.max_pixels) * share
        side = max(_MIN_SIDE, int(pixels**0.5))
        return [Video(np.zeros((count, side, side, 3), np.uint8), tuple(range(count)), count, self._video.fps)]

    def content_hash(self, medium: Video, settings: str, salt: str | None) -> bytes:
        places = medium.indices, medium.total, medium.rate
        digest = hashlib.sha256(repr((salt or "", "video", settings, medium.frames.shape, places)).encode())
        digest.update(medium.frames.data)
        return digest.digest()


def from_bytes(data: bytes, config: VideoConfig, max_frame_pixels: int) -> Video:
    """Return the video in a file. Raises `RequestError`."""
    if len(data) > config.max_bytes:
        raise VIDEO.too_many_bytes(config.max_bytes)
    limits = {
        "max_seconds": config.max_seconds, "max_pixels": config.max_pixels, "max_frame_pixels": max_frame_pixels,
        "num_frames": config.num_frames, "fps": config.fps,
        "memory_bytes": _MEMORY_BYTES + config.max_pixels * 3 * 2 + max_frame_pixels * 3 * 16 + len(data) * 2,
    }  # fmt: skip
    found, pixels = decode(VIDEO, data, limits)
    frames = np.frombuffer(pixels, np.uint8).reshape(len(found["indices"]), *found["size"], 3)
    return Video(frames, tuple(found["indices"]), found["total"], found["rate"])


def normalized(given: Any, config: VideoConfig) -> Video:
    """Return the video of a caller in the same process. It gives frames [frames, height, width, 3] of uint8, or a pair
    of such frames and a dictionary. The dictionary may have `fps`, and for sampled frames `frames_indices` and
    `total_num_frames`. The model sees all given frames. Raises `RequestError`."""
    if isinstance(given, Video):
        return given
    more: Any = {}
    if isinstance(given, tuple) and len(given) == 2:
        given, more = given
    frames = np.ascontiguousarray(given) if isinstance(given, np.ndarray) else None
    if frames is None or frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8 or not len(frames):
        found = f"{given.dtype} {list(given.shape)}" if isinstance(given, np.ndarray) else type(given).__name__
        raise VIDEO.refusal(f"it must be an array of uint8 [frames, height, width, 3], got {found}.")
    count, height, width, _ = frames.shape
    if min(height, width) < _MIN_SIDE or max(height, width) > _MAX_ASPECT * min(height, width):
        raise VIDEO.refusal(f"its frames have {width} x {height} pixels.")
    if count * height * width > config.max_pixels:
        raise VIDEO.refusal(f"its frames have more than {config.max_pixels} pixels together (--max-video-pixels).")
    if not isinstance(more, Mapping):
        raise VIDEO.refusal("beside its frames may be a dictionary with fps, frames_indices and total_num_frames.")
    rate = more.get("fps")
    listed = more.get("frames_indices")
    indices = tuple(listed.tolist() if isinstance(listed, np.ndarray) else listed or range(count))
    total = more.get("total_num_frames") or max((*indices, count - 1)) + 1
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    is_rate = rate is None or (is_number and RATES[0] <= rate <= RATES[1])
    if not is_rate or len(indices) != count or not all(type(i) is int and 0 <= i < total for i in indices):
        raise VIDEO.refusal("its fps must be a number, and its frames_indices one place of total_num_frames each.")
    return Video(frames, indices, total, rate)
