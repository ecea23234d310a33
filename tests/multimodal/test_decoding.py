"""The process that decodes files: it may die, and so may what it makes for each of them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.errors import RequestError
from octavo.media_kinds import AUDIO, IMAGE
from octavo.multimodal.decoding import DecoderProcess
from tests.multimodal.conftest import encoded, picture
from tests.speech.test_sounds import wav

LIMITS = {"max_pixels": 10**6, "max_seconds": 2, "memory_bytes": 1 << 30}


@pytest.fixture
def decoder() -> Iterator[DecoderProcess]:
    process = DecoderProcess()
    yield process
    process.close()


def test_threads_share_a_process(decoder: DecoderProcess) -> None:
    def check(seed: int) -> None:
        found, pixels = decoder.decode(IMAGE, encoded(picture(seed, 20 + seed, 30)), LIMITS)
        assert found == {"size": [20 + seed, 30]} and pixels == picture(seed, 20 + seed, 30).tobytes()
        assert decoder.decode(AUDIO, wav(data=bytes(320)), LIMITS)[1] == bytes(640)

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(check, range(8)))) == 8


def test_a_process_that_is_gone_is_started_again(decoder: DecoderProcess) -> None:
    for end in ("killed", "closed"):
        assert decoder.decode(IMAGE, encoded(picture(0)), LIMITS)[1] == picture(0).tobytes()
        process = decoder._process
        assert process is not None
        if end == "killed":
            process.kill()
            process.wait()
        else:
            decoder.close()
        assert process.returncode is not None
    assert decoder.decode(IMAGE, encoded(picture(0)), LIMITS)[1] == picture(0).tobytes()


def test_a_decoder_that_hangs_is_ended(decoder: DecoderProcess) -> None:
    wide = picture(0, 2000, 2000)  # which nothing decodes in a millisecond
    limits = LIMITS | {"max_pixels": 10**7}
    for _ in range(2):
        with pytest.raises(RequestError, match=r"A picture is refused: it cannot be decoded within 0\.001 s\.$"):
            decoder.decode(IMAGE, encoded(wide), limits | {"seconds": 0.001})
    assert decoder.decode(IMAGE, encoded(wide), limits)[0] == {"size": [2000, 2000]}


@pytest.mark.parametrize("said", [b"d" + b"\xff" * 8, b"d" + bytes(8), b"x", b""])
def test_a_child_that_says_what_it_likes_is_not_believed(
    decoder: DecoderProcess, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """As if a file had taken it over."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(decoder, "_connected", lambda byte: ours)
    theirs.sendall(said)
    theirs.close()
    with pytest.raises(RequestError, match="it is not a readable PNG"):
        decoder.decode(IMAGE, b"", LIMITS)


def test_a_file_that_takes_more_than_it_may_is_refused_alone(decoder: DecoderProcess) -> None:
    for _ in range(2):
        with pytest.raises(
            RequestError, match=r"A picture is refused: it is not a readable PNG, JPEG, WebP or GIF file\.$"
        ):
            decoder.decode(IMAGE, encoded(picture(0)), LIMITS | {"memory_bytes": 1 << 20})
        first = decoder._process
        assert decoder.decode(IMAGE, encoded(picture(0)), LIMITS)[1] == picture(0).tobytes()
        assert decoder._process is first
