"""Log-mel spectra of sounds, made by the model's own feature extractor. The encoder reads windows of thirty seconds of
a spectrum. This module runs in the front end; `speech_encoder` runs in the core.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.config import SoundConfig
from octavo.errors import LoadError, RequestError
from octavo.metrics.media_metrics import MediaMetrics
from octavo.multimodal import sounds
from octavo.multimodal.sound_decoder import RATE
from octavo.request import MediaArray, MediaInput, MediaItem

logger = logging.getLogger(__name__)

FRAME_S = 0.01  # seconds from one frame of a spectrum to the next


@dataclass(frozen=True, slots=True)
class Spectrum:
    """The spectrum of a sound. It may be longer than the encoder's window."""

    values: NDArray[np.float32]  # [bins, frames]; a short sound is padded with silence
    seconds: float  # length of the sound, without padding

    @property
    def num_heard_frames(self) -> int:
        """Return the number of frames without the padding."""
        return math.ceil(round(self.seconds / FRAME_S, 3))

    @property
    def num_frames(self) -> int:
        return int(self.values.shape[1])

    def window(self, first: int, num_frames: int) -> Spectrum:
        """Return `num_frames` frames from frame `first` on, padded with zeros behind the end, as in transformers."""
        values = self.values[:, first : first + num_frames]
        behind = num_frames - values.shape[1]
        return Spectrum(np.pad(values, ((0, 0), (0, behind))) if behind else values, num_frames * FRAME_S)


class AudioFeatureExtractor:
    """The feature extractor of one model. Threads may share it."""

    def __init__(self, config: SoundConfig) -> None:
        self.config = config
        self.metrics = MediaMetrics("audio")
        self._lock = Lock()
        self._extractor: Any = None
        # The import takes seconds; the first sound should not wait for it.
        Thread(target=self._warm_up, name="octavo-sounds", daemon=True).start()

    @property
    def window_frames(self) -> int:
        """Return the number of spectrum frames that the encoder reads at once."""
        return 2 * self.config.num_rows

    def decode(self, data: bytes) -> sounds.Samples:
        """Return the samples of a sound file. Raises `RequestError`."""
        with self.metrics.phase("audio", "decode"):
            return sounds.from_bytes(data, self.config.max_bytes, self.config.max_seconds)

    def hear(self, samples: sounds.Samples) -> Spectrum:
        """Return the spectrum of a sound. Raises `LoadError` if the extractor cannot be loaded."""
        self._load()
        self.metrics.count("audio", "taken")
        is_long = len(samples) > self._extractor.n_samples
        more = {"truncation": False, "padding": "longest"} if is_long else {}
        with self.metrics.phase("audio", "process"):
            found = self._extractor(samples, sampling_rate=RATE, return_tensors="np", **more)
        return Spectrum(np.asarray(found["input_features"][0], np.float32), len(samples) / RATE)

    def take(self, given: object, salt: str | None) -> tuple[MediaItem, MediaInput]:
        """Return the item and the input of a prompt's one sound, from its `multi_modal_data`. The value of "audio" is a
        window of a `Spectrum`, samples at 16 kHz, or a pair of samples and their rate. Raises `RequestError`."""
        audio = given.get("audio") if isinstance(given, dict) and set(given) == {"audio"} else None
        if isinstance(audio, list) and len(audio) == 1 and not isinstance(audio[0], int | float):
            [audio] = audio
        if audio is None:
            raise RequestError(
                "multi_modal_data must be a dictionary with audio: samples at 16 kHz, or (samples, rate); one sound a "
                "prompt.",
                param="multi_modal_data",
            )
        if not isinstance(audio, Spectrum):
            audio = self.hear(sounds.from_array(audio, self.window_frames * FRAME_S))
        assert audio.num_frames == self.window_frames
        digest = sounds.content_hash(audio.values, salt)
        values = np.ascontiguousarray(audio.values)[None]
        array = MediaArray("input_features", values.dtype.name, values.shape, values.tobytes())
        num_rows = self.config.num_rows
        return MediaItem(0, 0, digest, num_rows=num_rows), MediaInput(digest, num_rows, (array,))

    def _warm_up(self) -> None:
        try:
            self._load()
        except Exception as e:  # the first request with a sound raises the error too
            logger.error("the extractor of features cannot be loaded: %s", e)

    def _load(self) -> None:
        """Load the extractor once. Raises `LoadError`."""
        with self._lock:
            if self._extractor is not None:
                return
            try:
                from transformers import WhisperFeatureExtractor

                extractor = WhisperFeatureExtractor.from_pretrained(self.config.folder)
            except (AttributeError, ImportError, OSError, TypeError, ValueError) as e:
                reason = str(e).strip().splitlines()[0]
                raise LoadError(f"the extractor of features cannot be loaded: {reason}") from None
            if extractor.sampling_rate != RATE or extractor.nb_max_frames != self.window_frames:
                raise LoadError(
                    f"the extractor of features makes {extractor.nb_max_frames} frames at {extractor.sampling_rate} "
                    f"Hz; the encoder reads {self.window_frames} at {RATE} Hz."
                )
            self._extractor = extractor
