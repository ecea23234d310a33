"""Sleep, pause and the prefix cache of a real server, and of `LLM`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from octavo import LLM, SamplingParams
from octavo.errors import OctavoError
from tests.e2e.server import MODEL, Server, running_server
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ASKED: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time " * 40, "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(
        tmp_path_factory.mktemp("control"), "--max-model-len", "2048", "--max-num-seqs", "8",
        "--enable-server-dev-mode", "--check-invariants",
    ) as server:  # fmt: skip
        yield server


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def load_of(http: httpx.Client) -> int:
    return http.get("/load").json()["server_load"]


def answer(http: httpx.Client) -> dict[str, Any]:
    response = http.post("/v1/completions", json=ASKED)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


@pytest.mark.long
def test_sleeping_frees_memory_and_waking_brings_the_same_answers(server: Server, http: httpx.Client) -> None:
    expected = answer(http)["choices"]
    core = server.core_process()
    awake = core.memory_info().rss
    assert http.post("/sleep?level=1").status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.get("/health").status_code == 200
    assert core.memory_info().rss < awake - (4 << 20)  # 320 tokens of keys and values, in bfloat16, are 7 MiB
    assert http.post("/wake_up").status_code == 200
    again = answer(http)
    assert again["choices"] == expected and not again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert http.post("/sleep?level=2").status_code == 200
    assert not core.is_running()
    assert server.core_process().memory_info().rss < awake / 2  # the next one, without a model
    waiting: list[Any] = []
    asking = threading.Thread(target=lambda: waiting.append(answer(http)))
    asking.start()
    wait_until(lambda: waiting or load_of(http) == 1)
    assert not waiting
    assert http.post("/wake_up?tags=weights").status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.post("/wake_up?tags=kv_cache").status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    asking.join()
    assert waiting[0]["choices"] == expected
    assert answer(http)["choices"] == expected


def test_the_prefix_cache_can_be_reset(http: httpx.Client) -> None:
    answer(http)
    assert answer(http)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert http.post("/reset_prefix_cache").status_code == 200
    assert not answer(http)["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_paused_engine_lets_requests_wait(server: Server, http: httpx.Client, mode: str) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked = {**ASKED, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    begin = time.monotonic()
    whole = client.completions.create(**asked).choices[0].text
    whole_s = time.monotonic() - begin
    stream = client.completions.create(**asked, stream=True)
    text = next(stream).choices[0].text
    assert http.post(f"/pause?mode={mode}").json() == {"status": "paused"}
    assert http.get("/is_paused").json() == {"is_paused": True}
    rest: list[Any] = []
    reading = threading.Thread(target=lambda: rest.extend(chunk.choices[0] for chunk in stream))
    reading.start()
    late: list[Any] = []
    asking = threading.Thread(target=lambda: late.append(answer(http)))
    asking.start()
    if mode != "keep":
        reading.join()
        assert rest[-1].finish_reason == ("abort" if mode == "abort" else "length")
    else:
        paused_at = time.monotonic()
        wait_until(lambda: time.monotonic() > paused_at + 2 * whole_s)  # it would have ended
        assert not rest or rest[-1].finish_reason is None
    wait_until(lambda: late or load_of(http) == (2 if mode == "keep" else 1))
    assert not late
    with httpx.Client(base_url=server.url) as other:
        assert other.post("/resume").json() == {"status": "resumed"}
    reading.join()
    asking.join()
    assert late[0]["choices"][0]["finish_reason"] == "length"
    text += "".join(choice.text for choice in rest)
    assert text == whole or (mode == "abort" and whole.startswith(text))


@pytest.mark.parametrize(
    "path", ["/sleep?level=3", "/sleep?mode=x", "/pause?mode=x", "/wake_up?tags=x", "/pause?clear_cache=2"]
)
def test_what_is_no_level_or_mode_is_refused(http: httpx.Client, path: str) -> None:
    if path.startswith("/wake_up"):
        assert http.post("/sleep").status_code == 200
    response = http.post(path)
    assert response.status_code == 400, response.text
    assert http.post("/wake_up").status_code == 200


@pytest.mark.long
def test_an_llm_sleeps_wakes_and_closes() -> None:
    params = SamplingParams(max_tokens=5, temperature=0)
    with LLM(max_model_len=512, max_num_seqs=2) as llm:
        expected = llm.generate("Hello", params, use_tqdm=False)[0].outputs[0].text
        for level in (1, 2):
            llm.sleep(level)
            llm.sleep(level)  # as it is
            assert llm.is_sleeping()
            llm.wake_up()
            assert llm.generate("Hello", params, use_tqdm=False)[0].outputs[0].text == expected
        assert llm.reset_prefix_cache()
    with pytest.raises(OctavoError, match="closed"):
        llm.generate("Hello", params, use_tqdm=False)
