"""Forms of sounds, as OpenAI's and vLLM's clients fill them in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect, Request

from octavo.entrypoints.audio import transcription_routes
from octavo.entrypoints.audio.transcription_routes import AudioRequest, TranscriptionJob, _answer, _body_of
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
        ({"request_id": "a\r\nSet-Cookie: b"}, "request_id"),  # which becomes a header
    ],
)
def test_what_is_wrong_with_a_form_is_said(fields: dict[str, str], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "becomes", ["left", "left before its stream", "left in its stream", "refused", "refused, a stream"]
)
def test_what_becomes_of_a_request_leaves_no_file_open_and_no_place_taken(
    monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    uploads: list[Any] = []
    ended = asyncio.Event()
    is_stream, is_refused = "stream" in becomes, "refused" in becomes

    class Job(TranscriptionJob):
        def __init__(self, state: Any, *_: Any) -> None:
            self._state, self.headers = state, {}

        async def hear(self, upload: UploadFile) -> Any:
            uploads.append(upload.file)
            if is_refused:
                raise RequestError("not a sound.")
            if "before" in becomes:
                await asyncio.Event().wait()

        async def _language(self, spectrum: Any) -> str:
            await asyncio.Event().wait()
            raise AssertionError

        async def events(self, spectrum: Any) -> AsyncGenerator[bytes, None]:
            try:
                yield b"data: {}\n\n"
                await asyncio.Event().wait()
            finally:
                ended.set()

    async def main() -> None:
        state = SimpleNamespace(
            engine=SimpleNamespace(inputs=SimpleNamespace(listener=SimpleNamespace(config=SimpleNamespace(max_bytes=1)))),
            args=ServerArgs(), transcription_slots=asyncio.Semaphore(1),
        )  # fmt: skip
        sent = httpx.Request("POST", "http://x", data={"stream": str(is_stream)}, files={"file": bytes(2 << 20)})
        messages: list[Any] = [{"type": "http.request", "body": sent.read()}]
        leaves = asyncio.Event()

        async def receive() -> Any:
            if not messages:
                await leaves.wait()
                return {"type": "http.disconnect"}
            return messages.pop(0)

        async def send(message: Any) -> None:
            """The client reads nothing."""

        scope = {
            "type": "http", "method": "POST", "path": "/v1/audio/transcriptions", "query_string": b"",
            "headers": [(b"content-type", sent.headers["content-type"].encode())],
            "app": SimpleNamespace(state=SimpleNamespace(octavo=state)),
        }  # fmt: skip
        if "in its" not in becomes:
            leaves.set()
        if "in its" in becomes:
            response = await _answer(Request(scope, receive), "transcribe")
            assert uploads[0].closed
            assert state.transcription_slots.locked()
            leaves.set()
            await response(scope, receive, send)
            assert ended.is_set()
        else:
            with pytest.raises(RequestError if is_refused else ClientDisconnect):
                await _answer(Request(scope, receive), "transcribe")
        assert uploads[0].closed and not state.transcription_slots.locked()

    monkeypatch.setattr(transcription_routes, "TranscriptionJob", Job)
    asyncio.run(main())
