"""The process that decodes one file of sound: the file on its standard input, samples at 16 kHz on its standard output.

It is started by `sounds.from_bytes` with bounds as JSON, which it puts on itself before it looks at the file; what it
refuses it says there too, with exit status 3. It imports nothing of Octavo, so that it starts in 0.1 s.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

RATE = 16_000
RATES = (4_000, 384_000)
MAX_CHANNELS = 8
# As libsndfile names them; AIFF, raw samples and others are not taken.
FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3", "MPEG")
_BLOCK_FRAMES = 1 << 16
_CPU_S = 60


class Refused(Exception):
    """What is wrong with the file, in words for whoever has sent it."""


def decode(data: bytes, max_seconds: float) -> bytes:
    """The file's samples as float32 of one channel at 16 kHz. Raises `Refused`."""
    import numpy as np
    import soundfile
    import soxr

    pieces = []
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
            num_frames = 0  # counted: what the header says of them need not be true
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
    return b"".join(piece.tobytes() for piece in pieces)


def main() -> None:
    asked = json.loads(sys.argv[1])
    sys.path[:] = asked["path"]
    with contextlib.suppress(ImportError, ValueError, OSError):  # a system may have lower bounds, or none
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
        resource.setrlimit(resource.RLIMIT_AS, (asked["memory_bytes"], asked["memory_bytes"]))
    try:
        samples = decode(sys.stdin.buffer.read(), asked["max_seconds"])
    except Refused as e:
        sys.stdout.write(str(e))
        sys.exit(3)
    except Exception:  # decoders of strangers' bytes raise what they like
        sys.exit(4)
    sys.stdout.buffer.write(samples)


if __name__ == "__main__":
    main()
