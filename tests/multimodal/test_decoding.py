"""The process that decodes files: it may die, and so may what it makes for each of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.errors import RequestError
from octavo.media_kinds import AUDIO, IMAGE
from octavo.multimodal import decoding
from octavo.multimodal.decoder_process import STARTED
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


def test_a_process_that_hangs_is_replaced(decoder: DecoderProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process takes what it is sent and forks nothing. Its next one has all the time that it needs."""
    decoder.decode(IMAGE, encoded(picture(0)), LIMITS)
    first, running = decoder._process, decoder._running
    assert first is not None

    def running_patiently() -> socket.socket:
        decoder._start_s = 0.01 if decoder._process is first else 600
        return running()

    monkeypatch.setattr(decoder, "_running", running_patiently)
    os.kill(first.pid, signal.SIGSTOP)
    assert decoder.decode(IMAGE, encoded(picture(0)), LIMITS)[1] == picture(0).tobytes()
    assert first.returncode == -signal.SIGKILL and decoder._process is not first
    second = decoder._process
    assert decoder.decode(AUDIO, wav(data=bytes(320)), LIMITS)[1] == bytes(640)
    assert decoder._process is second


def test_a_process_that_always_hangs_is_no_fault_of_the_file(
    decoder: DecoderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder._start_s = 0.01
    running = decoder._running

    def running_stopped() -> socket.socket:
        control = running()
        assert decoder._process is not None
        os.kill(decoder._process.pid, signal.SIGSTOP)
        return control

    monkeypatch.setattr(decoder, "_running", running_stopped)
    with pytest.raises(RequestError, match="This picture cannot be decoded now") as refused:
        decoder.decode(IMAGE, encoded(picture(0)), LIMITS)
    assert (refused.value.status, refused.value.code, decoder._process) == (503, "decoder_hangs", None)


def test_a_file_whose_process_was_ended_is_decoded_again(
    decoder: DecoderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another thread found that it hangs."""
    connected = decoder._connected

    def ended(byte: bytes) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
        monkeypatch.setattr(decoder, "_connected", connected)
        _, process = connected(byte)
        decoder._end_hung(process)
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours, process

    monkeypatch.setattr(decoder, "_connected", ended)
    assert decoder.decode(IMAGE, encoded(picture(0)), LIMITS)[1] == picture(0).tobytes()


def test_closing_ends_a_process_that_hangs(decoder: DecoderProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_GRACE_S", 0.01)
    decoder.decode(IMAGE, encoded(picture(0)), LIMITS)
    process = decoder._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    decoder.close()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.long
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
    monkeypatch.setattr(decoder, "_connected", lambda byte: (ours, None))
    theirs.sendall(STARTED + said)
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
