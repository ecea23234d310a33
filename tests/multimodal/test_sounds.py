"""Sounds in chats: a real server of a small model that hears, by OpenAI's client, and what it refuses."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

from octavo import LLM, SamplingParams
from octavo.errors import RequestError
from octavo.multimodal.sounds import from_bytes
from octavo.multimodal.voxtral import VoxtralProcessor
from tests.e2e.server import Server, served
from tests.multimodal.conftest import encoded, picture
from tests.multimodal.small_media import save_case
from tests.multimodal.small_processors import Voxtral
from tests.speech.conftest import sound

MODEL = "Qwen2AudioForConditionalGeneration"
in_a_server = pytest.mark.long
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)


def file_of(samples: NDArray[np.float32], form: str = "WAV", rate: int = 16_000) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=form)
    return out.getvalue()


A, B = file_of(sound(0, 0.5)), file_of(sound(1, 1.2), "FLAC", 22_050)


@pytest.fixture(scope="module")
def hears(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("hears")
    save_case(folder, MODEL, PreTrainedTokenizerFast.from_pretrained(tiny_tokenizer))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, hears: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "b.flac").write_bytes(B)
    with served(
        tmp_path_factory.mktemp("server"), "--model", str(hears), "--served-model-name", "hears", "--dtype", "float32",
        "--limit-mm-per-prompt", '{"audio": 2}', "--max-audio-bytes", "1000000", "--max-audio-seconds", "40",
        "--num-gpu-blocks-override", "64", "--max-model-len", "256", "--allowed-local-media-path", str(folder),
    ) as server:  # fmt: skip
        server.files = folder  # type: ignore[attr-defined]
        yield server


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def url(data: bytes, media_type: str = "audio/wav") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def given(data: bytes, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": form}}


def at(address: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": address}}


def ask(client: openai.OpenAI, *content: dict[str, Any]) -> Any:
    messages: Any = [{"role": "user", "content": list(content)}]
    return client.chat.completions.create(
        model="hears", messages=messages, temperature=0, max_tokens=6, logprobs=True, extra_body={"ignore_eos": True}
    )


def said(answer: Any) -> list[float]:
    return [one.logprob for one in answer.choices[0].logprobs.content]


@in_a_server
def test_sounds_are_answered_as_in_scripts(client: openai.OpenAI, server: Server, llm: LLM) -> None:
    parts = text("Hear"), given(A), text("and"), given(B, "flac"), text("!")
    answer = ask(client, *parts)
    assert answer.usage.prompt_tokens == len("USER: Hearand! ASSISTANT:") + 12 + 22  # rows of 0.5 s and 0.87 s
    local = f"file://{server.files}/b.flac"  # type: ignore[attr-defined]
    assert said(ask(client, parts[0], at(url(A)), parts[2], at(local), parts[4])) == said(answer)
    assert said(ask(client, parts[0], given(B, "flac"), parts[2], given(A), parts[4])) != said(answer)
    as_mp3 = ask(client, text("Hear"), given(file_of(sound(1, 1.2), "MP3"), "mp3"))
    assert as_mp3.usage.prompt_tokens >= len("USER: Hear ASSISTANT:") + 30  # its frames end behind it
    samples = [from_bytes(one, 10**6, 30.0) for one in (A, B)]
    prompt = {"prompt": "USER: Hear<sound>and<sound>! ASSISTANT:", "multi_modal_data": {"audio": samples}}
    [asked] = llm.generate(prompt, GREEDY, use_tqdm=False)
    [chat] = llm.chat([{"role": "user", "content": list(parts)}], GREEDY, use_tqdm=False)
    for output in (asked, chat):
        found = output.outputs[0]
        tokens = zip(found.token_ids, found.logprobs or (), strict=True)
        assert [logprobs[token].logprob for token, logprobs in tokens] == said(answer)
    for media, message in (
        ({"image": picture(0)}, "takes no pictures here, but sounds"),
        ({"audio": (samples[0], 0)}, "its rate must be"),
        ({"audio": "a.wav"}, "must be an array of samples"),
        ({"audio": np.zeros(16_000 * 31, np.float32)}, "longer than 30 s, the most that this model takes"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate({"prompt": "<sound>", "multi_modal_data": media}, GREEDY, use_tqdm=False)


REFUSED: dict[str, tuple[list[dict[str, Any]], str, str | None]] = {
    "half a FLAC": ([given(B[: len(B) // 2], "flac")], "not a readable", "invalid_audio"),
    "a header": ([given(A[:20])], "not a readable", "invalid_audio"),
    "nothing": ([given(b"")], "not a readable", "invalid_audio"),
    "a picture": ([given(encoded(picture(0)))], "not a readable", "invalid_audio"),
    "no base64": ([at("data:audio/wav;base64,!!!!")], "not valid base64", "invalid_audio"),
    "a video": ([at(url(A, "video/mp4"))], "only wav, mp3, flac and ogg", "invalid_audio"),
    "too long": ([given(file_of(np.zeros(8000 * 41, np.float32), "FLAC", 8000), "flac")], "longer than 40 s",
                 "invalid_audio"),
    "longer than it hears": ([given(file_of(np.zeros(8000 * 31, np.float32), "FLAC", 8000), "flac")],
                             "longer than 30 s, the most that this model takes", "invalid_audio"),
    "too short": ([given(file_of(np.zeros(200, np.float32)))], "too short", "invalid_audio"),
    "too many bytes": ([given(bytes(1_000_010))], "more than 1000000 bytes", "invalid_audio"),
    "a private address": ([at("http://127.0.0.1/a.wav")], "not on the public internet", "invalid_audio"),
    "another file": ([at("file:///etc/passwd")], "no readable file below", "invalid_audio"),
    "a format": ([given(A, "aac")], "with the format wav, mp3, flac, ogg", None),
    "three": ([given(A)] * 3, "3 sounds, and 2 are the most", None),
    "an image": ([{"type": "image_url", "image_url": {"url": url(encoded(picture(0)), "image/png")}}],
                 "takes no pictures here, but sounds", "no_media"),
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(hears: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    llm = LLM(
        str(hears), dtype="float32", max_model_len=256, num_gpu_blocks_override=64, limit_mm_per_prompt={"audio": 2},
        max_audio_bytes=10**6, max_audio_seconds=40, allowed_local_media_path=str(tmp_path_factory.mktemp("none")),
    )  # fmt: skip
    yield llm
    llm.close()


def test_chats_of_scripts_have_sounds(llm: LLM) -> None:
    parts = [text("Hear"), given(A), text("and"), at(url(B, "audio/flac")), text("!")]
    [chat] = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    samples = [from_bytes(A, 10**6, 30.0), (np.asarray(soundfile.read(io.BytesIO(B))[0]), 22_050)]
    prompt = {"prompt": "USER: Hear<sound>and<sound>! ASSISTANT:", "multi_modal_data": {"audio": samples}}
    [asked] = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert chat.prompt_token_ids == asked.prompt_token_ids
    assert chat.outputs[0].token_ids == asked.outputs[0].token_ids
    with pytest.raises(RequestError, match="only messages of the user"):
        llm.chat([{"role": "system", "content": [given(A)]}])
    with pytest.raises(RequestError, match="takes no pictures here, but sounds"):
        llm.chat([{"role": "user", "content": [given(A), {"type": "image_url", "image_url": url(A)}]}])


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_sound_is_refused(llm: LLM, name: str) -> None:
    content, message, code = REFUSED[name]
    with pytest.raises(RequestError, match=message) as refused:
        llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    assert refused.value.code == code
    if code == "invalid_audio":
        assert refused.value.param == "audio_url"


@in_a_server
@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_sound_is_a_400(client: openai.OpenAI, name: str) -> None:
    content, message, code = REFUSED[name]
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        ask(client, *content)
    assert code is None or refused.value.code == code
    if code == "invalid_audio":
        assert refused.value.param == "audio_url"


@in_a_server
def test_sounds_are_counted(client: openai.OpenAI, server: Server) -> None:
    names = [f'octavo:media_total{{kind="audio",outcome="{outcome}"}}' for outcome in ("taken", "refused")]
    hits = "vllm:mm_cache_hits_total"
    ask(client, given(A))
    before = [server.count(name) for name in [*names, hits]]
    ask(client, text("Again"), given(A))
    with pytest.raises(openai.BadRequestError):
        ask(client, given(b"no sound"))
    server.wait_until_idle()
    assert [server.count(name) for name in [*names, hits]] == [value + 1 for value in before]


@in_a_server
def test_responses_have_sounds(client: openai.OpenAI) -> None:
    more: Any = {"model": "hears", "temperature": 0, "max_output_tokens": 6, "extra_body": {"ignore_eos": True}}
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Hear"}, given(A)]}]
    response = client.responses.create(input=asked, **more)
    answer = ask(client, text("Hear"), given(A))
    assert response.output_text == answer.choices[0].message.content
    assert response.usage is not None and response.usage.input_tokens == answer.usage.prompt_tokens
    kept = client.responses.input_items.list(response.id).data[0].model_dump()
    assert [part["type"] for part in kept["content"]] == ["input_text", "input_audio"]
    then: Any = [{"role": "user", "content": [given(B, "flac")]}]
    again = client.responses.create(input=then, previous_response_id=response.id, **more)
    assert again.usage is not None and again.usage.input_tokens > response.usage.input_tokens + 22
    for part, message in (
        ({"type": "input_audio"}, "should be an object with data and format"),
        (given(b"no sound"), "not a readable file of sound"),
        ({"type": "input_file", "file_data": "x"}, "input_file.*not built"),
    ):
        wrong: Any = [{"role": "user", "content": [part]}]
        with pytest.raises(openai.BadRequestError, match=message):
            client.responses.create(input=wrong, **more)


def test_voxtral_hears_long_sounds_window_by_window(tmp_path: Path) -> None:
    extractor = WhisperFeatureExtractor(feature_size=16)
    extractor.save_pretrained(tmp_path)
    samples = sound(0, 31.0)
    found = VoxtralProcessor(str(tmp_path), 7)(audio=[samples])
    assert found["input_ids"].tolist() == [7] * 2 * 375
    theirs = Voxtral(extractor, lambda text, return_tensors: {})("", [samples], "pt")
    np.testing.assert_array_equal(found["input_features"], theirs["input_features"])
