"""Reads sounds of requests into samples for models: one channel of float32 at 16 kHz.

Strangers' files are decoded in a separate process, which has bounds on memory and time and may crash without harm.
Error texts say what is wrong with the sound, and nothing about the machine.
"""

import hashlib
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from octavo.config import MediaConfig
from octavo.errors import RequestError
from octavo.media_kinds import AUDIO
from octavo.multimodal.decoding import decode
from octavo.multimodal.sound_decoder import MAX_CHANNELS, RATE, RATES

_MEMORY_BYTES = 1 << 30  # memory of the decoding process, without the samples

Samples = NDArray[np.float32]  # [n], 16,000 samples a second


class SoundReader:
    """Reads sounds within one engine's bounds. It is a `MediaReader`."""

    def __init__(self, config: MediaConfig) -> None:
        self._config = config

    def from_bytes(self, data: bytes) -> Samples:
        return from_bytes(data, self._config.max_bytes, self._config.max_seconds)

    def normalized(self, given: object) -> Samples:
        return from_array(given, self._config.max_seconds)

    def is_many(self, given: object) -> bool:
        """Return whether a value is several sounds. A list of numbers is one sound; so is a pair of samples and their
        rate."""
        return isinstance(given, list) and not (given and isinstance(given[0], int | float))

    def example(self) -> Samples:
        return np.zeros(RATE, np.float32)

    def largest(self, share: float) -> list[Samples]:
        seconds = min(self._config.max_seconds, self._config.longest_s or self._config.max_seconds)
        return [np.zeros(max(1, int(share * seconds * RATE)), np.float32)]

    def content_hash(self, medium: Samples, settings: str, salt: str | None) -> bytes:
        return content_hash(medium, salt, settings)


def from_bytes(data: bytes, max_bytes: int, max_seconds: float) -> Samples:
    """Return the samples of a sound file. Raises `RequestError`."""
    if len(data) > max_bytes:
        raise too_many_bytes(max_bytes)
    limits = {"max_seconds": max_seconds, "memory_bytes": _MEMORY_BYTES + int(max_seconds * RATE * 8)}
    try:
        _, samples = decode(AUDIO, data, limits)
    except RequestError as error:
        raise _of_file(error) from None
    return checked(np.frombuffer(samples, np.float32), max_seconds)


def from_array(given: Any, max_seconds: float) -> Samples:
    """Return the samples of a caller in the same process. It gives samples [n] or [n, channels] at 16 kHz, or a pair of
    such samples and their rate. Samples are -1 to 1, or of int16 or int32 (PCM). Raises `RequestError`."""
    rate: Any = RATE
    if isinstance(given, tuple) and len(given) == 2:
        given, rate = given
    rate = rate.item() if isinstance(rate, np.generic) else rate
    rate = int(rate) if isinstance(rate, float) and rate.is_integer() else rate
    try:
        samples = np.asarray(given)
        if samples.dtype in (np.int16, np.int32):
            samples = samples / -float(np.iinfo(samples.dtype).min)
        samples = np.asarray(samples, np.float32)
    except (TypeError, ValueError):
        refuse("it must be an array of samples, or such an array and its rate.")
    if samples.ndim == 2 and samples.shape[1] <= MAX_CHANNELS:
        samples = samples.mean(1, dtype=np.float32)
    if samples.ndim != 1:
        refuse(f"its samples must be [n], or [n, channels] of up to {MAX_CHANNELS}, got the shape {samples.shape}.")
    if isinstance(rate, bool) or not isinstance(rate, int) or not RATES[0] <= rate <= RATES[1]:
        refuse(f"its rate must be {RATES[0]} to {RATES[1]} samples a second, got {rate!r:.40}.")
    if len(samples) > max_seconds * rate:
        too_long(max_seconds)
    if rate != RATE and len(samples):
        import soxr

        samples = soxr.resample(samples, rate, RATE)
    return checked(samples, max_seconds)


def checked(samples: Samples, max_seconds: float) -> Samples:
    """Return samples clipped to -1 to 1, after checking their number and that all are finite. Raises `RequestError`."""
    if not len(samples):
        refuse("it has no samples.")
    if len(samples) > max_seconds * RATE + 1:
        too_long(max_seconds)
    if not np.isfinite(samples).all():
        refuse("some of its samples are not finite numbers.")
    return np.clip(samples, -1.0, 1.0)


def content_hash(values: NDArray[np.float32], salt: str | None, settings: str = "") -> bytes:
    """Return the SHA-256 of everything that an encoder's output depends on, and of the salt that keeps tenants
    apart."""
    digest = hashlib.sha256(repr((salt or "", settings, values.shape, values.dtype.name)).encode())
    digest.update(np.ascontiguousarray(values).data)
    return digest.digest()


def too_many_bytes(max_bytes: int) -> RequestError:
    """Return the error for an uploaded sound file that is too large."""
    return _of_file(AUDIO.too_many_bytes(max_bytes))


def too_long(max_seconds: float) -> NoReturn:
    refuse(f"it is longer than {max_seconds:g} s (--max-audio-seconds).")


def refuse(reason: str) -> NoReturn:
    raise refusal(reason)


def refusal(reason: str) -> RequestError:
    """Return the error for an uploaded sound."""
    return _of_file(AUDIO.refusal(reason))


def _of_file(error: RequestError) -> RequestError:
    error.param = "file"
    return error
