"""POST /v1/audio/transcriptions and /v1/audio/translations: a sound file in, its transcript out, as text, JSON or
subtitles, whole or as a stream.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from octavo.engine.off_loop import MAX_INLINE_LENGTH, run_off_loop
from octavo.entrypoints.audio.transcriber import Transcriber, TranscriptionOptions, WindowTranscript, segment_measures
from octavo.entrypoints.http.body_fields import Id, Int, RequestBody, ResponseModel, Text, described
from octavo.entrypoints.http.pagination import read_boolean
from octavo.entrypoints.http.router import Router, read_json, validate_body, whole_body
from octavo.entrypoints.http.server_state import ARRIVAL, ServerState, requested_rank, state_of
from octavo.entrypoints.http.streaming import EventStream, encode_json, run_until_disconnect
from octavo.errors import RequestError
from octavo.media_kinds import AUDIO
from octavo.multimodal.audio_features import AudioFeatureExtractor, Spectrum
from octavo.multimodal.transcript import as_srt, as_vtt

router = Router(tags=["OpenAI"])

_NOT_BUILT = (
    "chunking_strategy",
    "include",
    "keywords",
    "known_speaker_names",
    "known_speaker_references",
    "languages",
)
_NUMBERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("seed", "top_k", "max_completion_tokens"), int),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"), float
    ),
}
_IDLE_IF_FALSE = {"use_beam_search", "stream_include_usage", "stream_continuous_usage_stats"}
_Format = Literal["json", "text", "srt", "vtt", "verbose_json"]


class AudioRequest(RequestBody):
    """Fields of the form of POST /v1/audio/transcriptions, beside the file."""

    model: Text | None = described("The served model; it may be left out.")
    prompt: Text | None = described("The text before the sound: it shows style and spelling.")
    response_format: _Format = Field("json", description="json, text, srt, vtt or verbose_json.")
    temperature: float = Field(0.0, ge=0, le=1, description="0 always takes the likeliest token.")
    seed: Int | None = described("Makes answers with a temperature repeatable.")
    stream: bool = Field(False, description="Send the text as events while it is transcribed; with json or text.")
    language: Text | None = described("Language of the sound, such as en; detected if left out.")
    timestamp_granularities: list[Literal["segment", "word"]] | None = described("segment, word, or both.")
    request_id: Id | None = described("Names the request in the log, and comes back as header X-Request-Id.")
    # vLLM's.
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = described("The most tokens of each half minute.")
    top_p: float | None = described("Sample only the likeliest tokens of this total probability.", maximum=1)
    top_k: Int | None = described("Sample only from this many likeliest tokens; 0 or -1: all.", minimum=-1)
    min_p: float | None = described(
        "Tokens below this share of the likeliest token's probability are left out.", minimum=0, maximum=1
    )
    repetition_penalty: float | None = described("Above 1 makes tokens of the text less likely.", minimum=0)
    presence_penalty: float | None = described(
        "Lowers the logits of tokens that the answer has.", minimum=-2, maximum=2
    )
    frequency_penalty: float | None = described(
        "Lowers the logits of tokens by how often the answer has them.", minimum=-2, maximum=2
    )

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the request's sampling fields, as arguments of `SamplingParams`."""
        names = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.max_completion_tokens is not None:
            found["max_tokens"] = self.max_completion_tokens
        return found


class AudioUsage(ResponseModel):
    type: Literal["duration"] = "duration"
    seconds: int


class Transcription(ResponseModel):
    """The words of the sound."""

    text: str
    usage: AudioUsage


class TranscriptionSegment(ResponseModel):
    id: int
    start: float
    end: float
    text: str
    tokens: list[int]
    seek: int
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptionWord(ResponseModel):
    word: str
    start: float
    end: float


class VerboseTranscription(ResponseModel):
    """The words of the sound, with times."""

    task: str
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment] | None = None
    words: list[TranscriptionWord] | None = None
    usage: AudioUsage


def _form(*names: str) -> dict[str, Any]:
    fields = {"file": {"type": "string", "format": "binary"}}
    fields |= {name: {"type": "string"} for name in names}
    schema = {"type": "object", "required": ["file"], "properties": fields}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


_COMMON = ("model", "prompt", "response_format", *_NUMBERS, "stream")


@router.post(
    "/v1/audio/transcriptions", openapi_extra=_form(*_COMMON, "language", "timestamp_granularities[]"),
    response_model=Transcription,
)  # fmt: skip
async def create_transcription(raw: Request) -> Response:
    """Write down what is said in a file of sound."""
    return await _answer(raw, "transcribe")


@router.post("/v1/audio/translations", openapi_extra=_form(*_COMMON, "language"), response_model=Transcription)
async def create_translation(raw: Request) -> Response:
    """Write down in English what is said in a file of sound."""
    return await _answer(raw, "translate")


async def _answer(raw: Request, task: str) -> Response:
    state = state_of(raw)
    listener = state.engine.inputs.listener
    if listener is None:
        raise RequestError(
            f"{state.model_names[0]} takes no sounds; {raw.url.path} needs a Whisper model.", code="model_is_deaf"
        )
    async with await _form_of_line(raw, listener.config.max_bytes) or raw.form(max_files=1, max_fields=32) as form:
        upload = form.get("file")
        if not isinstance(upload, UploadFile):
            raise RequestError("file is required, as an uploaded file.", param="file")
        body = _body_of(form, task, state)
        job = TranscriptionJob(state, listener, body, raw, task)
        return await run_until_disconnect(job.stream(upload) if body.stream else job.whole(upload), raw.receive)


async def _form_of_line(raw: Request, max_bytes: int) -> AbstractAsyncContextManager[FormData] | None:
    """Return the form that a line of a batch stands for: its fields, and its `file_url` as the file. None for a request
    that is a form itself. Raises `RequestError`."""
    if not raw.headers.get("content-type", "").startswith("application/json"):
        return None

    def read(fields: Any) -> FormData:
        url = fields.pop("file_url", None) if isinstance(fields, dict) else None
        if not isinstance(url, str):
            raise RequestError("file_url is required: the sound as a data: URL.", param="file_url")
        file = UploadFile(io.BytesIO(AUDIO.data_of(url, max_bytes)), filename="sound")
        pairs = [
            (name, one) for name, value in fields.items() for one in (value if isinstance(value, list) else [value])
        ]
        texts = [(name, one if isinstance(one, str) else json.dumps(one)) for name, one in pairs if one is not None]
        return FormData([*texts, ("file", file)])

    return contextlib.nullcontext(await read_json(raw, await whole_body(raw), read))


class _HeldStream(EventStream):
    """The stream of a sound that holds one of `transcription_slots`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            scope["app"].state.octavo.transcription_slots.release()


def _body_of(form: FormData, task: str, state: ServerState) -> AudioRequest:
    fields: dict[str, Any] = {}
    for name in dict.fromkeys(form):
        values = [value for value in form.getlist(name) if isinstance(value, str)]
        plain = name.removesuffix("[]")
        if plain in _NOT_BUILT or (task == "translate" and plain == "timestamp_granularities"):
            if any(values):
                raise RequestError(f"{plain} is not built here; leave it out.", param=plain)
        elif plain == "timestamp_granularities":
            fields[plain] = fields.get(plain, []) + values
        elif name != "file":
            fields[name] = values[-1] if values else ""
    for name, read in _NUMBERS.items():
        if name in fields:
            try:
                fields[name] = read(fields[name])
            except ValueError:
                raise RequestError(f"{name} must be a number, got {fields[name]!r:.40}.", param=name) from None
    for name in _IDLE_IF_FALSE & fields.keys():  # streams always have their usage
        if read_boolean(fields.pop(name), name) and name == "use_beam_search":
            raise RequestError("use_beam_search is not built here; leave it out.", param=name)
    if (stream := fields.get("stream")) is not None:
        fields["stream"] = read_boolean(stream, "stream")
    if not fields.get("language", "-"):
        del fields["language"]  # some clients send an empty field instead of none
    body = validate_body(fields, AudioRequest, state.args.unknown_fields)
    assert isinstance(body, AudioRequest)
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise RequestError("timestamp_granularities needs response_format verbose_json.", param="response_format")
    if body.stream and body.response_format not in ("json", "text"):
        raise RequestError(f"a stream has no {body.response_format}; json and text have one.", param="response_format")
    return body


class TranscriptionJob:
    """Answers a request for one sound."""

    def __init__(
        self, state: ServerState, listener: AudioFeatureExtractor, body: AudioRequest, raw: Request, task: str
    ) -> None:
        self._state, self._listener, self._body = state, listener, body
        state.resolve_model(body.model)
        name, self.headers = state.response_id("audio", body, raw)
        self._name = name.removeprefix("audio-")
        arrival, limit_s = ARRIVAL.get(), state.args.max_request_time
        deadline = None if arrival is None or limit_s is None else arrival.at + limit_s
        client = None if arrival is None else arrival.client
        self._transcriber = Transcriber(state.engine, requested_rank(), deadline, client, state.outputs_of)
        is_verbose = body.response_format == "verbose_json"
        has_times = is_verbose or body.response_format in ("srt", "vtt")
        language = None if body.language is None else self._transcriber.language_of(body.language)
        granularities = body.timestamp_granularities or ["segment"]
        self._has_segments, has_words = "segment" in granularities, "word" in granularities
        self._options = TranscriptionOptions(
            task, language, body.prompt, body.temperature, body.seed, has_times, is_verbose, has_words, body.sampling
        )
        state.check_ttft(self._transcriber.check(self._options))

    async def whole(self, upload: UploadFile) -> Response:
        async with self._state.transcription_slots:
            spectrum = await self.hear(upload)
            language = await self._language(spectrum)
            heard = [
                transcript
                async for transcript in self._transcriber.transcribe(spectrum, self._options, language, self._name)
            ]
        # The segments and words of ten minutes take longer to write than streams may wait.
        length = MAX_INLINE_LENGTH + 1 if len(heard) > 1 else 0
        return await run_off_loop(lambda: self._written(heard, spectrum.seconds, language), length=length)

    def _written(self, heard: list[WindowTranscript], seconds: float, language: str) -> Response:
        """Return the answer in the form that the request asks for. `seconds` is the length of the sound."""
        text, kind = "".join(transcript.text for transcript in heard).strip(), self._body.response_format
        if kind == "text":
            return PlainTextResponse(text + "\n", headers=self.headers)
        usage = AudioUsage(seconds=math.ceil(seconds))
        if kind == "json":
            return self._json(Transcription(text=text, usage=usage))
        segments = self._segments(heard, seconds)
        if kind == "verbose_json":
            return self._json(
                VerboseTranscription(
                    task=self._options.task, language=self._transcriber.name_of(language), duration=seconds,
                    text=text, usage=usage, segments=segments if self._has_segments else None,
                    words=self._words(heard, seconds) if self._options.has_words else None,
                )
            )  # fmt: skip
        cues = [(one.start, one.end, one.text) for one in segments if one.text.strip()]
        made = as_srt(cues) if kind == "srt" else as_vtt(cues)
        return PlainTextResponse(made, headers=self.headers)

    async def stream(self, upload: UploadFile) -> Response:
        """Return the answer as a stream. The sound is read now: the form's file is deleted before the stream begins."""
        await self._state.transcription_slots.acquire()
        try:
            spectrum = await self.hear(upload)
        except BaseException:
            self._state.transcription_slots.release()
            raise
        return _HeldStream(self.events(spectrum), self.headers)

    async def hear(self, upload: UploadFile) -> Spectrum:
        """Return the spectrum of an uploaded sound file. Raises `RequestError`."""

        def work() -> Spectrum:
            # Read here, so that only as many files are in memory as are decoded at once.
            return self._listener.hear(self._listener.decode(upload.file.read(self._listener.config.max_bytes + 1)))

        return await run_off_loop(work, length=0, media=("audio",))

    async def events(self, spectrum: Spectrum) -> AsyncGenerator[bytes, None]:
        """Yield the answer as a stream of events."""
        whole, num_input, num_output = "", 0, 0
        language = await self._language(spectrum)
        async for transcript in self._transcriber.transcribe(spectrum, self._options, language, self._name):
            text = transcript.text if whole else transcript.text.lstrip()
            if text:
                whole += text
                yield _event({"type": "transcript.text.delta", "delta": text})
            num_input, num_output = self._count(transcript, num_input, num_output)
        usage = {"type": "tokens", "input_tokens": num_input, "output_tokens": num_output}
        usage["total_tokens"] = num_input + num_output
        yield _event({"type": "transcript.text.done", "text": whole, "usage": usage})

    def _count(self, transcript: WindowTranscript, num_input: int, num_output: int) -> tuple[int, int]:
        heard = transcript.num_prompt_tokens + self._listener.config.num_rows
        if transcript.segments:  # one of several windows
            return num_input + heard, num_output + transcript.num_tokens
        return heard, transcript.num_tokens

    async def _language(self, spectrum: Spectrum) -> str:
        return self._options.language or await self._transcriber.detect(spectrum, self._name)

    def _segments(self, heard: list[WindowTranscript], seconds: float) -> list[TranscriptionSegment]:
        found: list[TranscriptionSegment] = []
        for transcript in heard:
            for segment in transcript.segments:
                text = self._transcriber.text(segment)
                # Silence follows a short sound, so times may exceed its length.
                start, end = (round(min(time, seconds), 2) for time in (segment.start, segment.end))
                more = segment_measures(transcript, text, self._options.temperature)
                found.append(
                    TranscriptionSegment(
                        id=len(found), start=start, end=end, text=text, tokens=segment.tokens, **more
                    )
                )  # fmt: skip
        return found

    def _words(self, heard: list[WindowTranscript], seconds: float) -> list[TranscriptionWord]:
        found = []
        for word in (word for transcript in heard for word in transcript.words):
            start, end = (round(min(time, seconds), 2) for time in (word.start, word.end))
            found.append(TranscriptionWord(word=word.text.strip(), start=start, end=end))
        return found

    def _json(self, body: ResponseModel) -> Response:
        return Response(body.model_dump_json(exclude_none=True), headers=self.headers, media_type="application/json")


def _event(event: Mapping[str, Any]) -> bytes:
    return b"data: " + encode_json(event) + b"\n\n"
