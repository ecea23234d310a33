"""A real server of a small Whisper, by OpenAI's client."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import math
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import soundfile
import torch
import transformers
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from octavo.entrypoints.audio.transcriber import Transcriber, TranscriptionOptions
from octavo.entrypoints.audio.transcription_routes import AudioRequest, TranscriptionJob
from octavo.errors import RequestError
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from tests.e2e.server import Server, openai_client, served
from tests.speech.conftest import features, marks, sound
from tests.speech.test_sounds import CASES, encoded
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

FLAGS = ("--dtype", "float32", "--num-gpu-blocks-override", "400", "--max-num-seqs", "3")
SHORT = encoded("FLAC", 44_100, 1.5, 2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, whisper: Path) -> Iterator[Server]:
    with served(
        tmp_path_factory.mktemp("server"), "--model", str(whisper), "--served-model-name", "whisper-1", *FLAGS,
        "--max-audio-bytes", "6000000", "--max-audio-seconds", "75",
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


def ask(client: openai.OpenAI, data: bytes = SHORT, **more: Any) -> Any:
    return client.audio.transcriptions.create(file=("sound.flac", data), model="whisper-1", **more)


def clock(seconds: float, point: str) -> str:
    return f"00:00:{int(seconds):02}{point}{round(seconds % 1 * 1000):03}"


@pytest.mark.long
def test_a_sound_is_written_down_in_all_forms(client: openai.OpenAI) -> None:
    plain = ask(client, language="en")
    assert plain.text and plain.usage.seconds == 2 and plain.usage.type == "duration"
    assert ask(client, language="english", response_format="text").strip() == plain.text.strip()
    verbose = ask(client, language="de", response_format="verbose_json", timestamp_granularities=["segment"])
    assert (verbose.task, verbose.language, verbose.duration) == ("transcribe", "german", pytest.approx(1.5, abs=0.01))
    assert "".join(segment.text for segment in verbose.segments).strip() == verbose.text
    for number, segment in enumerate(verbose.segments):
        assert segment.id == number and 0 <= segment.start <= segment.end <= 1.51
        assert segment.avg_logprob < 0 < segment.no_speech_prob < 1 and segment.tokens
    shown = [segment for segment in verbose.segments if segment.text.strip()]
    for form, point in (("srt", ","), ("vtt", ".")):
        subtitles = ask(client, language="de", response_format=form)
        assert subtitles.startswith("WEBVTT\n\n") == (form == "vtt") and subtitles.count(" --> ") == len(shown)
        times = [f"{clock(segment.start, point)} --> {clock(segment.end, point)}\n" for segment in shown]
        assert [line for line in subtitles.splitlines(True) if " --> " in line] == times


@pytest.mark.long
def test_lines_of_a_batch_are_answered_as_forms_are(client: openai.OpenAI) -> None:
    url = "/v1/audio/transcriptions"
    sound_url = f"data:audio/flac;base64,{base64.b64encode(SHORT).decode()}"
    bodies: list[dict[str, Any]] = [
        {"file_url": sound_url, "language": "en"},
        {"file_url": sound_url, "language": "en", "response_format": "text"},
        {"file_url": sound_url, "language": "de", "response_format": "verbose_json",
         "timestamp_granularities": ["segment"]},
        {"language": "en"},
    ]  # fmt: skip
    lines = [{"custom_id": str(i), "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")  # type: ignore[arg-type]
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    batch = client.batches.retrieve(batch.id)
    files = [client.files.content(one).text for one in (batch.output_file_id, batch.error_file_id) if one]
    answers = {one["custom_id"]: one["response"] for text in files for one in map(json.loads, text.splitlines())}
    plain = ask(client, language="en")
    assert answers["0"]["body"]["text"] == plain.text
    assert answers["1"]["body"] == ask(client, language="en", response_format="text")
    assert answers["2"]["body"]["segments"]
    assert answers["3"]["status_code"] == 400 and answers["3"]["body"]["error"]["param"] == "file_url"


@pytest.mark.parametrize("seconds", [0, pytest.param(35, marks=pytest.mark.long)])
def test_a_stream_says_the_same(client: openai.OpenAI, seconds: int) -> None:
    data = exact(sound(3, seconds)) if seconds else SHORT  # several windows, or one
    *deltas, done = list(ask(client, data, stream=True, language="en"))
    assert all(event.type == "transcript.text.delta" for event in deltas) and deltas
    assert "".join(event.delta for event in deltas) == done.text and done.type == "transcript.text.done"
    assert done.text.strip() == ask(client, data, language="en").text
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens > 1500


# Name -> seconds of sound, and what is asked of it.
AS_TRANSFORMERS: dict[str, tuple[float, dict[str, str]]] = {
    "times": (5, {"language": "en"}),
    "times, detected, after a prompt": (4, {"prompt": "before"}),
    "a long sound": (70, {"language": "de"}),
    "a long sound after a prompt": (41, {"prompt": "Mr. X"}),
}


@pytest.mark.long
def test_segments_and_their_times_are_those_of_transformers(client: openai.OpenAI, whisper: Path, theirs: Any) -> None:
    num_segments = 0
    for number, (name, (seconds, asked)) in enumerate(AS_TRANSFORMERS.items()):
        samples = sound(number, seconds)
        found = ask(client, exact(samples), response_format="verbose_json", **asked)
        expected = in_transformers(whisper, theirs, samples, asked, return_timestamps=True, return_segments=True)
        segments = expected["segments"][0]
        assert [one.tokens for one in found.segments] == [one["tokens"].tolist() for one in segments], name
        times = [min(float(one[end]), seconds) for one in segments for end in ("start", "end")]
        assert [time for one in found.segments for time in (one.start, one.end)] == pytest.approx(times), name
        num_segments += len(segments)
        assert found.text, name
    assert num_segments > 3 * len(AS_TRANSFORMERS)


@pytest.mark.long
def test_words_and_their_times_are_those_of_transformers(client: openai.OpenAI, whisper: Path, theirs: Any) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(whisper)
    num_words = num_joined = 0
    for number, (name, (seconds, asked)) in enumerate(AS_TRANSFORMERS.items()):
        asked = {"language": "en", **asked}
        samples = sound(number, seconds)
        found = ask(
            client, exact(samples), response_format="verbose_json", timestamp_granularities=["word", "segment"], **asked
        )
        mask = torch.ones(1, math.ceil(len(samples) / 160), dtype=torch.long)
        expected = in_transformers(
            whisper, theirs, samples, asked, return_timestamps=True, return_segments=True, return_token_timestamps=True,
            attention_mask=mask,
        )  # fmt: skip
        words = []
        for segment in expected["segments"][0]:
            first, _ = segment["idxs"]
            times = segment["result"]["token_timestamps"]
            offset = segment["token_timestamps"][0] - times[first]
            text = [i for i, token in enumerate(segment["tokens"].tolist()) if token < tokenizer.eos_token_id]
            said, _, places = _combine_tokens_into_words(tokenizer, segment["tokens"][text].tolist(), "english")
            for word, of_word in zip(said, places, strict=True):
                start, end = times[first + text[of_word[0]] - 1], times[first + text[of_word[-1]]]
                words.append((word.strip(), *(min(float(time + offset), seconds) for time in (start, end))))
                num_joined += len(of_word) > 1
        assert [word.word for word in found.words] == [word for word, *_ in words], name
        assert [(word.start, word.end) for word in found.words] == [
            pytest.approx(times, abs=0.006) for _, *times in words
        ]
        assert found.segments, name
        num_words += len(words)
    assert num_words > 4 * num_joined > 4
    alone = ask(client, response_format="verbose_json", timestamp_granularities=["word"])
    assert alone.words and alone.segments is None


def test_short_sounds_are_written_down_as_transformers_does(client: openai.OpenAI, whisper: Path, theirs: Any) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(whisper)
    for number, (task, asked) in enumerate([("transcribe", {"language": "fr"}), ("translate", {"prompt": "So"})]):
        samples = sound(number)
        route = client.audio.transcriptions if task == "transcribe" else client.audio.translations
        text = route.create(file=("a.wav", exact(samples)), model="whisper-1", **asked).text  # type: ignore[attr-defined]
        first = marks(whisper, "0.00")[0]  # a trained model writes no timestamps where it is told not to
        suppressed = [*theirs.generation_config.suppress_tokens, *range(first, first + 1501)]
        tokens = in_transformers(whisper, theirs, samples, asked, task, suppress_tokens=suppressed)[0]
        assert text == tokenizer.decode(tokens, skip_special_tokens=True).strip() != "", task
    detected = ask(client, exact(samples), response_format="verbose_json").language
    [token] = theirs.detect_language(features(whisper, samples))
    assert detected == {"<|en|>": "english", "<|de|>": "german", "<|fr|>": "french"}[tokenizer.decode(token)]


def exact(samples: Any) -> bytes:
    """A file that is decoded to these samples."""
    out = io.BytesIO()
    soundfile.write(out, samples, 16_000, format="WAV", subtype="FLOAT")
    return out.getvalue()


def in_transformers(
    folder: Path, theirs: Any, samples: Any, asked: dict[str, str], task: str = "transcribe", **more: Any
) -> Any:
    if "prompt" in asked:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        before = tokenizer.encode(" " + asked["prompt"], add_special_tokens=False)
        more["prompt_ids"] = torch.tensor([*marks(folder, "startofprev"), *before])
    return theirs.generate(
        features(folder, samples), task=task, language=asked.get("language"), do_sample=False, **more
    )


def test_transcriptions_are_logged_traced_and_refused_as_other_requests() -> None:
    names = ["startoftranscript", "en", "transcribe", "startofprev", "nospeech", "notimestamps", "endoftext"]
    seen = list[Any]()

    def process(given: Any, params: SamplingParams, data_parallel_rank: int | None) -> EngineRequest:
        return EngineRequest("1", Prompt([0]), params, [], 1, 0.0)

    class State:
        args = SimpleNamespace(max_request_time=None)
        engine = SimpleNamespace(
            tokenizer=SimpleNamespace(vocab={f"<|{name}|>": number for number, name in enumerate(names)}),
            inputs=SimpleNamespace(process=process),
            config=SimpleNamespace(model=SimpleNamespace(checkpoint=SimpleNamespace(generation_config={}))),
        )

        def resolve_model(self, name: str | None) -> None: ...

        def response_id(self, *_: Any) -> tuple[str, dict[str, str]]:
            return "audio-r", {}

        def check_ttft(self, num_tokens: int) -> None:
            seen.append(num_tokens)

        async def outputs_of(self, request: EngineRequest, name: str) -> AsyncIterator[Any]:
            seen.append(name)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1], finish_reason="length")])

    state: Any = State()
    nothing: Any = None
    job = TranscriptionJob(state, nothing, AudioRequest(), nothing, "transcribe")
    answer = asyncio.run(job._transcriber._answer([0], nothing, SamplingParams(), job._name))
    assert answer.outputs[0].token_ids == [1]
    assert seen == [4, "r-1"]


def test_models_of_english_alone_are_told_of_no_language() -> None:
    names = ["startoftranscript", "en", "transcribe", "startofprev", "nospeech", "notimestamps", "endoftext"]
    checkpoint = SimpleNamespace(generation_config={"is_multilingual": False})
    engine: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(vocab={f"<|{name}|>": number for number, name in enumerate(names)}),
        inputs=SimpleNamespace(encode=lambda text, add_special_tokens: [number % 6 for number in range(100)]),
        config=SimpleNamespace(model=SimpleNamespace(checkpoint=checkpoint, max_model_len=40)),
    )
    scribe = Transcriber(engine)
    assert scribe._prompt(TranscriptionOptions("transcribe"), "en", has_times=False) == [0, 5]
    options = TranscriptionOptions("transcribe", prompt="x")
    assert scribe._prompt(options, "en", has_times=True) == [3, *(number % 6 for number in range(81, 100)), 0]
    with pytest.raises(RequestError, match="English only"):
        scribe.check(TranscriptionOptions("translate"))
    checkpoint.generation_config = {}
    assert Transcriber(engine)._prompt(TranscriptionOptions("transcribe"), "en", has_times=True) == [0, 1, 2]
    del engine.tokenizer.vocab["<|notimestamps|>"]
    with pytest.raises(RequestError, match=r"no token <\|notimestamps"):
        Transcriber(engine).check(TranscriptionOptions("translate"))


def test_a_prompt_tells_the_model_nothing_and_its_end_alone_is_read() -> None:
    names = ["startoftranscript", "startofprev", "nospeech", "notimestamps", "endoftext"]
    read: list[str] = []

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        read.append(text)
        return [4 if "<|endoftext|>" in text else 1]

    engine: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(vocab={f"<|{name}|>": number for number, name in enumerate(names)}),
        inputs=SimpleNamespace(encode=encode),
        config=SimpleNamespace(
            model=SimpleNamespace(checkpoint=SimpleNamespace(generation_config={}), max_model_len=40)
        ),
    )
    with pytest.raises(RequestError, match="prompt has marks of the model") as refused:
        Transcriber(engine).check(TranscriptionOptions("transcribe", prompt="so <|endoftext|>"))
    assert refused.value.param == "prompt"
    Transcriber(engine).check(TranscriptionOptions("transcribe", prompt="x" * 400_000))
    assert len(read[-1]) < 1000


def test_temperatures_draw_by_the_seed(client: openai.OpenAI) -> None:
    drawn = [ask(client, language="en", temperature=1.0, extra_body={"seed": seed}).text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "words alone": ({"timestamp_granularities": ["word"]}, "needs response_format verbose_json"),
    "granularities alone": ({"timestamp_granularities": ["segment"]}, "needs response_format verbose_json"),
    "a language": ({"language": "xx"}, "language 'xx'"),
    "another of Whisper's": ({"language": "it"}, "language 'it'"),
    "a form": ({"response_format": "diarized_json"}, "response_format"),
    "a temperature": ({"temperature": 2}, "temperature"),
    "no temperature": ({"extra_body": {"temperature": "hot"}}, "temperature must be a number"),
    "a stream of subtitles": ({"stream": True, "response_format": "srt"}, "stream has no srt"),
    "a stream of no tokens": ({"stream": True, "extra_body": {"top_p": 0}}, "top_p must be"),
    "log-probabilities": ({"include": ["logprobs"]}, "include is not built"),
    "chunks": ({"chunking_strategy": "auto"}, "chunking_strategy is not built"),
    "no field": ({"extra_body": {"nothing": "1"}}, "nothing"),
    "a model": ({"extra_body": {"model": "other"}}, "other"),
}


def test_what_is_not_built_is_refused(client: openai.OpenAI, server: Server) -> None:
    for name, (more, message) in REFUSED.items():
        with pytest.raises(openai.APIStatusError, match=message) as refused:
            ask(client, **more)
        assert refused.value.status_code in (400, 404), name
    with pytest.raises(openai.BadRequestError, match="file is required"):
        client.post("/audio/transcriptions", body={"model": "whisper-1"}, files={"other": b"x"}, cast_to=object,
                    options={"headers": {"Content-Type": "multipart/form-data"}})  # fmt: skip
    messages: Any = [{"role": "user", "content": "Hello"}]
    for call in (
        lambda: client.chat.completions.create(model="whisper-1", messages=messages),
        lambda: client.completions.create(model="whisper-1", prompt="Hello"),
    ):
        with pytest.raises(openai.BadRequestError):
            call()
    server.wait_until_idle()


def test_hostile_sounds_are_refused_beside_others(client: openai.OpenAI, server: Server) -> None:
    alone = ask(client, language="en").text
    refused: list[int] = []
    # In the server's bounds some of them are sounds.
    names = [name for name in CASES if name not in ("too long", "too many bytes", "a bomb")]

    def attack(share: list[str]) -> None:
        for name in share:
            try:
                ask(client, CASES[name][0](), language="en")
            except openai.APIStatusError as error:
                refused.append(error.status_code)

    threads = [threading.Thread(target=attack, args=(names[i::3],)) for i in range(3)]
    for thread in threads:
        thread.start()
    assert [ask(client, language="en").text for _ in range(3)] == [alone] * 3
    for thread in threads:
        thread.join()
    assert refused == [400] * len(names)
    with pytest.raises(openai.APIStatusError, match="--max-audio-bytes") as too_large:
        ask(client, bytes(8_000_000))
    assert too_large.value.status_code == 413
    server.wait_until_idle()
    assert server.count('octavo:media_total{kind="audio",outcome="refused"}') >= len(names)
    assert server.count('octavo:media_total{kind="audio",outcome="taken"}') >= 4


@pytest.mark.long
def test_clients_that_leave_free_what_they_had(client: openai.OpenAI, server: Server) -> None:
    data = encoded("FLAC", 16_000, 35)
    for _ in range(20):  # more than may be held at once
        with ask(client, data, stream=True, language="en") as stream:
            assert list(itertools.islice(stream, 1))  # an event
    assert ask(client, language="en").text
    server.wait_until_idle()
