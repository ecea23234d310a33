"""POST /generate, as vLLM's plain server answers it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest

from octavo.errors import EngineDeadError
from tests.entrypoints.fake_engine import FakeEngine
from tests.entrypoints.http.test_errors import error_of
from tests.leaving import ask_and_leave
from tests.waiting import wait_until


def test_the_answer_is_prompt_and_text_for_each_completion(http: httpx.Client) -> None:
    body = {"prompt": "Say hi: ", "n": 2, "temperature": 0.5, "max_tokens": 64, "stream": False}
    response = http.post("/generate", json=body)
    assert response.json() == {"text": ["Say hi: Hello there", "Say hi: Hello there1"]}


def test_a_stream_is_lines_with_all_the_text_so_far(http: httpx.Client) -> None:
    response = http.post("/generate", json={"prompt": "ab", "n": 2, "max_tokens": 64, "stream": True})
    assert response.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line)["text"] for line in response.text.splitlines()]
    assert lines[0] == ["abH", "abH"]
    assert all(later[0].startswith(earlier[0]) for earlier, later in pairwise(lines))
    assert lines[-1] == ["abHello there", "abHello there1"]


def test_sampling_parameters_are_flat_and_sixteen_tokens_the_default(http: httpx.Client, engine: FakeEngine) -> None:
    engine.answer = "x" * 100
    body = {"prompt": "a", "top_k": 5, "stop_token_ids": [7], "seed": 3, "ignore_eos": True}
    assert http.post("/generate", json=body).json() == {"text": ["a" + "x" * 16]}
    _, params, _ = engine.seen[0]
    assert (params.top_k, params.stop_token_ids, params.seed, params.ignore_eos) == (5, [7], 3, True)


def test_a_prompt_of_token_ids_is_shown_as_text(http: httpx.Client, engine: FakeEngine) -> None:
    tokens = engine.inputs.encode("abc")
    assert http.post("/generate", json={"prompt": tokens}).json()["text"] == ["abcHello there"]
    cut = http.post("/generate", json={"prompt": "abc", "truncate_prompt_tokens": 2}).json()
    assert cut["text"] == ["bcHello there"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"n": 0}, "n"),
        ({"echo": True}, "echo"),
        ({"logprobs": 1}, "logprobs"),
        ({"stream_options": {"include_usage": True}, "stream": True}, "stream_options"),
        ({"max_tokens": 1000}, "max_tokens"),
    ],
)
def test_a_bad_field_is_named(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = http.post("/generate", json={"prompt": "a", **fields})
    assert (response.status_code, error_of(response)["param"]) == (400, param)


def test_an_error_in_mid_stream_is_the_last_line(http: httpx.Client, engine: FakeEngine) -> None:
    engine.fails_after = (2, EngineDeadError("the engine core has ended."))
    lines = http.post("/generate", json={"prompt": "a", "stream": True}).text.splitlines()
    assert len(lines) == 3
    assert json.loads(lines[-1])["error"]["message"] == "the engine core has ended."


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_the_request(address: str, engine: FakeEngine, stream: bool) -> None:
    engine.is_paused = True
    ask_and_leave(address, "/generate", {"prompt": "a", "stream": stream}, once=lambda: engine.active)
    wait_until(lambda: not engine.active)
