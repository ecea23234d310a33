"""Forms of sounds, as OpenAI's and vLLM's clients fill them in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import FormData

from octavo.entrypoints.audio.transcription_routes import AudioRequest, _body_of
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.errors import RequestError


def read(task: str = "transcribe", **fields: str) -> AudioRequest:
    state: Any = SimpleNamespace(args=ServerArgs())
    return _body_of(FormData(list(fields.items())), task, state)


def test_fields_of_vllm_reach_the_sampling() -> None:
    numbers = {
        "top_p": "0.5", "top_k": "3", "min_p": "0.1", "repetition_penalty": "1.5", "presence_penalty": "1",
        "frequency_penalty": "-1", "max_completion_tokens": "7",
    }  # fmt: skip
    body = read(**numbers, stream_include_usage="True", use_beam_search="false", stream="Yes")
    expected = {name: float(text) for name, text in numbers.items() if name != "max_completion_tokens"}
    assert body.sampling == {**expected, "max_tokens": 7} and body.stream is True
    assert read().sampling == {}


def test_translations_may_say_the_language() -> None:
    assert read("translate", language="de").language == "de"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": "true"}, "use_beam_search"),
        ({"top_k": "x"}, "top_k"),
        ({"max_completion_tokens": "0"}, "max_completion_tokens"),
        ({"stream": "maybe"}, "stream"),
        ({"stream_include_usage": "maybe"}, "stream_include_usage"),
    ],
)
def test_what_is_wrong_with_a_form_is_said(fields: dict[str, str], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(**fields)
    assert refused.value.param == param
