"""Decodes sound files to samples at 16 kHz, for `decoder_process`."""

import io
from typing import Any

from octavo.multimodal.decoder_process import Refused

RATE = 16_000
RATES = (4_000, 384_000)
MAX_CHANNELS = 8
# By libsndfile's names. AIFF, raw samples and others are refused.
FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3", "MPEG")
_BLOCK_FRAMES = 1 << 16


def decode(data: bytes, limits: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
    """Return the file's samples as float32, one channel, 16 kHz. Raises `Refused`."""
    import numpy as np
    import soundfile
    import soxr

    pieces, max_seconds = [], limits["max_seconds"]
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate, channels = file.samplerate, file.channels
            if file.format not in FORMATS:
                raise Refused("only wav, flac, ogg and mp3 are built.")
            if not RATES[0] <= rate <= RATES[1]:
                raise Refused(f"its rate is {rate} samples a second; {RATES[0]} to {RATES[1]} are taken.")
            if not 1 <= channels <= MAX_CHANNELS:
                raise Refused(f"it has {channels} channels; {MAX_CHANNELS} are the most.")
            resampler = soxr.ResampleStream(rate, RATE, 1, "float32")
            num_frames = 0  # counted, as the header may lie
            while len(block := file.read(_BLOCK_FRAMES, "float32", always_2d=True)):
                num_frames += len(block)
                if num_frames > max_seconds * rate:
                    raise Refused(f"it is longer than {max_seconds:g} s (--max-audio-seconds).")
                mono = block.mean(1, dtype=np.float32)
                pieces.append(mono if rate == RATE else resampler.resample_chunk(mono))
            if rate != RATE:
                pieces.append(resampler.resample_chunk(np.zeros(0, np.float32), last=True))
    except soundfile.LibsndfileError:
        raise Refused("it is not a readable file of sound: wav, flac, ogg or mp3.") from None
    return {}, [piece.tobytes() for piece in pieces]
