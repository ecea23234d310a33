"""More than 500 hostile pictures, made by a program, through a running server: each a 4xx, memory flat, other streams
untouched."""

from __future__ import annotations

import contextlib
import random
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.e2e.server import Server, running_server
from tests.multimodal.conftest import encoded, picture
from tests.multimodal.test_connector import PRIVATE, serving_pictures
from tests.multimodal.test_pictures import CASES, chunk, gif, png, url, webp
from tests.multimodal.test_server import ask, image, said, text

MAX_GROWTH_BYTES = 96 << 20  # of all processes of the server: less than two of the bombs


@pytest.fixture
def attacker() -> Iterator[str]:
    """The address of a server of hostile answers."""
    with serving_pictures() as address:
        yield address


def hostile(attacker: str) -> list[str]:
    """URLs of pictures none of which may be answered."""
    chance = random.Random(0)
    good, jpeg = encoded(picture(0)), encoded(picture(0), "JPEG")
    zeros = zlib.compress(bytes(60_000_000), 9)
    found = [given if isinstance(given, str) else given() for given, _ in CASES.values()]
    # Truncated: before their pixels end.
    found += [url(good[: chance.randrange(len(good) - 100)]) for _ in range(120)]
    found += [url(jpeg[: chance.randrange(len(jpeg) * 9 // 10)], "image/jpeg") for _ in range(80)]
    for form in ("GIF", "WEBP"):
        data = encoded(picture(0), form)
        found += [url(data[: chance.randrange(len(data) * 9 // 10)], f"image/{form.lower()}") for _ in range(60)]
    # Headers that promise more than there is, and less.
    for _ in range(60):
        width, height = (chance.choice([0, 1, 999, 2**15, 2**31 - 1, 2**32 - 1]) for _ in range(2))
        found.append(url(png(width, height, zlib.compress(bytes(chance.randrange(5))))))
        found.append(url(gif(chance.choice([2**15, 2**16 - 1]), chance.choice([2**15, 2**16 - 1]))))
        found.append(
            url(webp(b"VP8X", b"\2\0\0\0" + b"".join(struct.pack("<I", side)[:3] for side in (width, height))))
        )
    # Bombs, in the pixels and in what is beside them.
    for kind in (b"iCCP", b"zTXt", b"iTXt"):
        head = b"a\0\1\0\0\0" if kind == b"iTXt" else b"a\0\0"
        found += [url(png(20, 20, zlib.compress(bytes(420)), chunk(kind, head + zeros))) for _ in range(5)]
    found += [url(png(8_000 + i, 8_000, zeros)) for i in range(15)]
    # Other kinds, and noise behind the signatures of these.
    for form in ("BMP", "TIFF", "PPM", "ICO", "TGA"):
        found += [url(encoded(picture(i), form)) for i in range(6)]
    for start in (
        b"",
        good[:8],
        good[:33],
        jpeg[:4],
        b"GIF89a",
        b"RIFF",
        encoded(picture(0), "GIF")[:800],
        encoded(picture(0), "WEBP")[:30],
        b"%PDF-1.7",
        b"PK\3\4",
        b"<svg>",
        b"\x1f\x8b",
    ):
        found += [url(start + chance.randbytes(chance.randrange(1, 3000))) for _ in range(7)]
    # Too small and too long.
    found += [
        url(encoded(picture(i, *size))) for i, size in enumerate([(1, 1), (1, 99), (99, 1), (2, 101), (150, 2)] * 4)
    ]
    # Addresses: private ones, chains that lead there, answers without an end, too large, slow, or of something else.
    found += [f"http://{host}:9/a.png" for host in PRIVATE if host != "127.0.0.1"]
    found += [f"{attacker}/to/http://{host}:9/a.png" for host in PRIVATE if host != "127.0.0.1"]
    found += [f"{attacker}/{path}/{i}" for path in ("loop", "endless", "declared", "cut", "garbage") for i in range(6)]
    found += [f"{attacker}/{path}" for path in ("drip", "slow-header")] * 3
    found += [f"{attacker}/status/{status}" for status in range(400, 420)]
    chance.shuffle(found)
    return found


def num_bytes(server: Server) -> int:
    main, total = psutil.Process(server.process.pid), 0
    for one in (main, *main.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # decoders come and go
            total += one.memory_info().rss
    return total


@pytest.mark.long
@pytest.mark.timeout(900)
def test_hostile_pictures_cost_nothing(tmp_path: Path, llava: Path, attacker: str) -> None:
    flags = [
        "--model", str(llava), "--served-model-name", "llava", "--dtype", "float32", "--max-model-len", "256",
        "--max-image-bytes", "100000", "--max-image-pixels", "1000000", "--num-gpu-blocks-override", "64",
        "--media-fetch-timeout", "1", "--allow-private-media-addresses", "--allowed-media-domains", "127.0.0.1",
    ]  # fmt: skip
    with (
        running_server(tmp_path, *flags) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        pictures = hostile(attacker)
        assert len(pictures) > 500
        alone = said(ask(client, text("A stream")))
        ask(client, image(url(encoded(picture(0)))))  # what is loaded with the first picture is there
        answers: list[Any] = []
        lock = threading.Lock()

        def attack() -> None:
            while True:
                with lock:
                    if not pictures:
                        return
                    given = pictures.pop()
                try:
                    answers.append((given, ask(client, image(given))))
                except openai.APIStatusError as error:
                    answers.append((given, error))

        def attack_with(num: int) -> None:
            kept, pictures[:] = pictures[num:], pictures[:num]
            threads = [threading.Thread(target=attack) for _ in range(6)]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                assert said(ask(client, text("A stream"))) == alone
            pictures[:] = kept

        attack_with(150)
        before = num_bytes(server)
        attack_with(len(pictures))
        assert num_bytes(server) - before < MAX_GROWTH_BYTES
        wrong = [
            (given[:80], getattr(answer, "body", answer))
            for given, answer in answers
            if not isinstance(answer, openai.BadRequestError) or answer.body["code"] != "invalid_image"  # type: ignore[index]
        ]
        assert not wrong
        server.wait_until_idle()
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()
