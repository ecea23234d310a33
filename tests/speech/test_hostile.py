"""More than 300 hostile sounds, made by a program, through a running server: each a 4xx, memory flat, other requests
untouched."""

from __future__ import annotations

import random
import struct
import threading
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.e2e.server import Server, running_server
from tests.speech.test_server import FLAGS, SHORT, ask
from tests.speech.test_sounds import CASES, encoded, wav

MAX_GROWTH_BYTES = 96 << 20  # of all processes of the server, after the first sounds
MAX_BYTES = 200_000


def hostile() -> list[bytes]:
    """Files none of which may be heard."""
    chance = random.Random(0)
    found = [make() for make, _ in CASES.values()]
    whole = {form: encoded(form, 44_100, 0.5, 2) for form in ("FLAC", "OGG", "MP3")}
    # Their beginnings alone, and noise behind the signatures of these.
    found += [whole[form][: chance.randrange(40)] for form in ("FLAC", "OGG") for _ in range(30)]
    found += [encoded()[: chance.randrange(44)] for _ in range(30)]
    signatures = (
        b"",
        b"RIFF",
        b"fLaC",
        b"OggS",
        b"FORM",
        b"\x1aE\xdf\xa3",
        b"%PDF-1.7",
        b"PK\3\4",
        b"\x00\x00\x00\x18ftypmp42",
    )
    found += [start + bytes(12) + chance.randbytes(chance.randrange(1, 3000)) for start in signatures for _ in range(8)]
    # Headers with rates and channels that no sound has.
    for _ in range(60):
        rate = chance.choice([0, 1, 100, 3_999, 384_001, 2**31 - 1, 2**32 - 1])
        found.append(wav(rate, chance.choice([1, 2]), data=bytes(chance.randrange(400, 2000))))
    found += [wav(channels=chance.randrange(9, 2**16), data=bytes(1000)) for _ in range(30)]
    found += [wav(bits=chance.choice([0, 1, 7, 65_535]), kind=chance.choice([0, 5, 99, 65_534])) for _ in range(30)]
    found += [wav(bits=32, kind=3, data=struct.pack("<f", value) * 200) for value in (float("inf"), float("nan")) * 5]
    # Too long, though their files are small, and too large.
    found += [encoded("FLAC", 4_000, 80 + i, subtype="PCM_S8") for i in range(3)]
    found += [encoded("OGG", 8_000, 70 + i) for i in range(3)]
    found += [bytes(MAX_BYTES + 1 + i) for i in range(20)]
    chance.shuffle(found)
    return found


def num_bytes(server: Server) -> int:
    main = psutil.Process(server.process.pid)
    return sum(one.memory_info().rss for one in (main, server.core_process()))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_hostile_sounds_cost_nothing(tmp_path: Path, whisper: Path) -> None:
    flags = ["--model", str(whisper), "--served-model-name", "whisper-1", *FLAGS]
    limits = ["--max-audio-bytes", str(MAX_BYTES), "--max-audio-seconds", "2"]
    with (
        running_server(tmp_path, *flags, *limits) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        sounds = hostile()
        count = len(sounds)
        assert count > 300
        alone = ask(client, language="en").text
        before = num_bytes(server)
        answers: list[Any] = []
        lock = threading.Lock()

        def attack() -> None:
            while True:
                with lock:
                    if not sounds:
                        return
                    data = sounds.pop()
                try:
                    answers.append((data[:60], ask(client, data, language="en")))
                except openai.APIStatusError as error:
                    answers.append((data[:60], error))

        threads = [threading.Thread(target=attack) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert ask(client, SHORT, language="en").text == alone
        for thread in threads:
            thread.join()
        assert len(answers) == count
        taken = [data for data, answer in answers if not isinstance(answer, openai.APIStatusError)]
        assert taken == []
        assert {answer.status_code for _, answer in answers} <= {400, 413}
        assert num_bytes(server) - before < MAX_GROWTH_BYTES
        server.wait_until_idle()
        assert "Traceback" not in server.log.read_text()
