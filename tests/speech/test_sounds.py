"""Files of sound that strangers send, and the segments of what is said in them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import soundfile
import torch

from octavo.errors import RequestError
from octavo.multimodal.sounds import from_array, from_bytes
from octavo.multimodal.transcript import Segment, as_srt, as_vtt, compression_ratio, split
from octavo.ops import Ops
from octavo.sampling.sampling_table import RowSettings, SpecialSample
from octavo.sampling.timestamp_rules import allowed_tokens, follow_rules
from octavo.sampling_params import SamplingParams, SpeechRules
from tests.ops import torch_ref
from tests.speech.conftest import sound


def encoded(form: str = "WAV", rate: int = 16_000, seconds: float = 0.5, channels: int = 1, **more: Any) -> bytes:
    out = io.BytesIO()
    samples = np.stack([np.resize(sound(0, 1), int(rate * seconds))] * channels, 1)
    soundfile.write(out, samples, rate, format=form, **more)
    return out.getvalue()


def wav(rate: int = 16_000, channels: int = 1, *, size: int | None = None, data: bytes = bytes(200), bits: int = 16,
        kind: int = 1) -> bytes:  # fmt: skip
    """A WAV file whose header says what it is told to."""
    size = len(data) if size is None else size
    step = channels * bits // 8
    head = struct.pack("<HHIIHH", kind, channels, rate, rate * step & 0xFFFFFFFF, step & 0xFFFF, bits)
    body = b"WAVEfmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


# Name -> a file, and what it is refused with. Sounds may have 100,000 bytes and 2 seconds.
CASES: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "not a readable file"),
    "noise": (lambda: bytes(range(256)) * 20, "not a readable file"),
    "a picture": (lambda: b"\x89PNG\r\n\x1a\n" + bytes(100), "not a readable file"),
    "a header alone": (lambda: encoded()[:44], "no samples|not a readable"),
    "cut in its header": (lambda: encoded("FLAC")[:30], "not a readable file"),
    "another format": (lambda: encoded("AIFF"), "only wav, flac, ogg and mp3"),
    "no rate": (lambda: wav(0), "not a readable file|rate is 0"),
    "a forged rate": (lambda: wav(2**31 - 1), "rate is 2147483647"),
    "a low rate": (lambda: wav(100), "rate is 100"),
    "many channels": (lambda: wav(channels=1000, data=bytes(4000)), "1000 channels|not a readable"),
    "too long": (lambda: encoded(seconds=2.1), "longer than 2 s"),
    "a bomb": (lambda: encoded("FLAC", seconds=60), "more than 100000 bytes"),
    "too many bytes": (lambda: bytes(100_001), "more than 100000 bytes"),
    "not numbers": (lambda: wav(bits=32, kind=3, data=struct.pack("<4f", 0, float("nan"), 0, 0)), "not finite"),
}


def test_a_hostile_sound_is_refused_with_the_reason() -> None:
    def check(name: str) -> None:
        make, message = CASES[name]
        with pytest.raises(RequestError, match=message) as refused:
            from_bytes(make(), 100_000, 2)
        assert refused.value.code == "invalid_audio", name
        assert "\n" not in str(refused.value), name

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(check, CASES))) == len(CASES)


@pytest.mark.parametrize(("form", "rate", "channels"), [("WAV", 16_000, 1), ("FLAC", 44_100, 2), ("OGG", 48_000, 1),
                                                        ("MP3", 22_050, 2)])  # fmt: skip
def test_sounds_of_all_formats_are_read(form: str, rate: int, channels: int) -> None:
    times = np.arange(rate) / rate
    out = io.BytesIO()
    soundfile.write(out, np.stack([np.sin(2 * np.pi * 440 * times) / 2] * channels, 1), rate, format=form)
    samples = from_bytes(out.getvalue(), 10**6, 2)
    assert abs(len(samples) - 16_000) <= 2400 * (form == "MP3")  # which pads
    spectrum = np.abs(np.fft.rfft(samples[2000:10_000]))
    assert np.argmax(spectrum) * 2 == pytest.approx(440, abs=2)


def test_a_wav_that_promises_more_than_it_has_is_what_it_has() -> None:
    samples = from_bytes(wav(size=2**31, data=bytes(32_000)), 100_000, 2)
    assert len(samples) == 16_000 and not samples.any()


def test_samples_of_integers_are_those_of_their_type() -> None:
    """As soundfile and librosa have it. What is above 1 is clipped, which would make noise of them."""
    as_floats = np.array([0.0, 0.5, -1.0, 0.25], np.float32)
    for kind in (np.int16, np.int32):
        samples = (as_floats * -float(np.iinfo(kind).min)).astype(kind)
        assert np.array_equal(from_array((samples, np.int64(16_000)), 1), as_floats)
        assert np.array_equal(from_array((np.stack([samples, samples], 1), 16_000.0), 1), as_floats)


T = 100  # the first timestamp


@pytest.mark.parametrize(
    ("tokens", "segments", "step"),
    [
        ([T, 1, 2, T + 50], [(7.0, 8.0)], 3000),
        ([T, 1, T + 50, T + 50, 2, T + 60], [(7.0, 8.0), (8.0, 8.2)], 3000),
        ([T, 1, T + 50, T + 60, 2], [(7.0, 8.0)], 100),  # what follows is heard again
        ([1, 2], [(7.0, 37.0)], 3000),
        ([T, 1, 2], [(7.0, 37.0)], 3000),
        ([], [(7.0, 37.0)], 3000),
    ],
)
def test_windows_are_cut_at_pairs_of_timestamps(tokens: list[int], segments: list[Any], step: int) -> None:
    found, advance = split(tokens, T, 700, 3000)
    assert [(round(one.start, 3), round(one.end, 3)) for one in found] == segments and advance == step


def test_subtitles() -> None:
    cues = [(0.0, 1.5, " Hello --> you\n\nthere"), (3661.25, 3662.0, " B")]
    assert as_srt(cues) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello -> you there\n\n2\n01:01:01,250 --> 01:01:02,000\nB\n\n"
    )
    assert as_vtt(cues[:1]) == "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello -> you there\n\n"
    assert compression_ratio("ha " * 100) > 2.4 > compression_ratio("A sentence as people say them.")
    assert compression_ratio("") == 0 and len(zlib.compress(b"")) > 0
    assert Segment(0, 1, [1]).tokens == [1]


def test_timestamps_are_said_in_pairs_and_do_not_go_back() -> None:
    rules = SpeechRules([3], [4], end=90, first_timestamp=T, has_times=True, last_initial=T + 5)
    flat = np.zeros(120, np.float32)
    likely = flat.copy()
    likely[7] = likely[95] = 50.0

    def allowed(*output: int, logits: Any = likely) -> set[int]:
        return set(np.flatnonzero(allowed_tokens(rules, output, logits)).tolist())

    text = set(range(90)) - {3}
    marks = set(range(90, T - 1))  # the end among them
    assert allowed() == set(range(T, T + 6))
    assert allowed(T) == text | marks
    assert allowed(T, 7) == text | marks | set(range(T + 1, 120))
    assert allowed(T, 7, T + 3) == marks | set(range(T + 3, 120))
    assert allowed(T, 7, T + 3, T + 3) == text | marks
    assert allowed(T, 7, T + 3, T + 3, 7) == text | marks | set(range(T + 4, 120))
    assert allowed(T, 7, logits=flat) == set(range(T + 1, 120))  # likelier together than any other token
    without = SpeechRules([3], [4], end=90, first_timestamp=T)
    assert set(np.flatnonzero(~allowed_tokens(without, [], flat))) == {3, 4, *range(T, 120)}


class OnDevice(torch.Tensor):
    """Which numpy cannot read, as it cannot read a CUDA tensor."""

    def __array__(self, *_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def test_rules_are_followed_where_logits_lie_on_a_device() -> None:
    rules = SpeechRules([3], [4], end=90, first_timestamp=T, has_times=True, last_initial=T + 5)
    params = SamplingParams(speech=rules)
    logits = torch.zeros(3, 120).as_subclass(OnDevice)
    special = [
        SpecialSample(sample, RowSettings(settings, 1, []), np.array([9, *output], np.int32), 1 + len(output))
        for sample, settings, output in ((0, params, [T]), (1, SamplingParams(), []), (2, params, []))
    ]
    assert follow_rules(cast(Ops, torch_ref), cast(Any, logits), special)
    found = [set(np.flatnonzero(np.isfinite(row.cpu().numpy())).tolist()) for row in logits]
    assert found == [(set(range(90)) | set(range(90, T - 1))) - {3}, set(range(120)), set(range(T, T + 6))]
    assert not follow_rules(cast(Ops, torch_ref), cast(Any, logits), special[1:2])
