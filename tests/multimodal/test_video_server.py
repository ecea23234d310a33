"""A real server of a small model that sees videos, by the clients of OpenAI and Anthropic."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from octavo import LLM, SamplingParams
from octavo.config import VideoConfig
from octavo.multimodal.videos import from_bytes
from tests.e2e.server import Server, served
from tests.multimodal.test_hostile import MAX_GROWTH_BYTES, num_bytes
from tests.multimodal.test_server import said
from tests.multimodal.test_videos import WRONG, encoded, save_case, shades

pytest.importorskip("torchvision")
pytest.importorskip("av")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SIZES = {"max_model_len": 384, "num_gpu_blocks_override": 120}
VIDEO = encoded(shades(9, 56, 56))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    save_case(folder, "Qwen2VLForConditionalGeneration", tiny_tokenizer)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    sizes = [word for name, value in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with served(
        tmp_path_factory.mktemp("server"), "--model", str(model), "--served-model-name", "sees", "--dtype", "float32",
        "--chat-template", TEMPLATE, "--media-io-kwargs", '{"video": {"num_frames": 4}}', "--max-image-pixels",
        "1000000", "--max-video-bytes", "100000", "--max-video-seconds", "11", "--max-video-pixels", "60000", *sizes,
    ) as server:  # fmt: skip
        yield server


def video(data: bytes = VIDEO, **more: Any) -> dict[str, Any]:
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    return {"type": "video_url", "video_url": {"url": url}, **more}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def ask(client: openai.OpenAI, *content: dict[str, Any], **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": list(content)}]
    return client.chat.completions.create(
        model="sees", messages=messages, temperature=0, max_tokens=6, logprobs=True, extra_body={"ignore_eos": True},
        **more,
    )  # fmt: skip


def test_videos_are_answered_as_in_scripts_and_streamed(client: openai.OpenAI, model: Path) -> None:
    answer = ask(client, text("See"), video())
    bounds = VideoConfig(
        token_id=0, max_count=1, max_bytes=100_000, max_seconds=11.0, max_pixels=60_000, num_frames=4
    )  # fmt: skip
    seen = from_bytes(VIDEO, bounds, 10**6)
    more = {"fps": seen.rate, "frames_indices": list(seen.indices), "total_num_frames": seen.total}
    with LLM(str(model), dtype="float32", **SIZES) as llm:  # type: ignore[arg-type]
        [output] = llm.generate(
            {"prompt": "See\n<video>", "multi_modal_data": {"video": (seen.frames, more)}},
            SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True), use_tqdm=False,
        )  # fmt: skip
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    found = output.outputs[0]
    expected = [logprobs[token].logprob for token, logprobs in zip(found.token_ids, found.logprobs or (), strict=True)]
    assert [logprob for _, logprob in said(answer)] == expected
    assert said(ask(client, text("See"), video(encoded(shades(9, 56, 56)[::-1])))) != said(answer)
    chunks = list(ask(client, text("See"), video(), stream=True))
    streamed = [token for chunk in chunks for choice in chunk.choices if choice.logprobs for token in
                choice.logprobs.content or ()]  # fmt: skip
    assert [(token.token, token.logprob) for token in streamed] == said(answer)


def test_a_video_is_asked_about_again_by_its_uuid(client: openai.OpenAI) -> None:
    first = said(ask(client, text("See"), video(uuid="a")))
    assert said(ask(client, text("See"), {"type": "video_url", "uuid": "a"})) == first
    with pytest.raises(openai.BadRequestError, match="nothing is kept under its uuid"):
        ask(client, {"type": "video_url", "uuid": "another"})


def test_hostile_videos_are_refused_beside_others(client: openai.OpenAI, server: Server) -> None:
    hostile = {name: make() for name, (make, bounds, _) in WRONG.items() if not bounds}
    hostile |= {
        "too many bytes": VIDEO + bytes(100_000),
        "too long": encoded(shades(12), rate=1),
        "a bomb": encoded(shades(60, 400, 400), codec="libx264"),
        "too large frames": encoded(shades(1, 1008, 1008), codec="libx264"),
    }
    alone, refused = said(ask(client, text("A stream"))), dict.fromkeys(hostile, 0)

    def attack() -> None:
        for name, data in hostile.items():
            with pytest.raises(openai.BadRequestError) as error:
                ask(client, video(data))
            refused[name] += error.value.body["code"] == "invalid_video"  # type: ignore[index]

    attack()  # what is loaded with the first video is there
    assert refused == dict.fromkeys(hostile, 1)
    before, size = server.count('octavo:media_total{kind="video",outcome="refused"}'), num_bytes(server)
    threads = [threading.Thread(target=attack) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert said(ask(client, text("A stream"))) == alone
    assert refused == dict.fromkeys(hostile, 3)
    assert num_bytes(server) - size < MAX_GROWTH_BYTES
    with pytest.raises(openai.BadRequestError, match="2 videos, and 1 are the most"):
        ask(client, video(), video())
    assert server.count('octavo:media_total{kind="video",outcome="refused"}') >= before + 2 * len(hostile)
    server.wait_until_idle()


def test_other_routes_refuse_videos(client: openai.OpenAI, server: Server) -> None:
    for part in ({"type": "input_video", "video_url": "data:"}, video()):
        wrong: Any = [{"role": "user", "content": [part]}]
        with pytest.raises(openai.BadRequestError, match=f"'{part['type']}', which is not built here"):
            client.responses.create(model="sees", input=wrong)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        source = {"type": "base64", "media_type": "video/mp4", "data": ""}
        messages: Any = [{"role": "user", "content": [{"type": "video", "source": source}]}]
        with pytest.raises(anthropic.BadRequestError, match=r"video.* not built"):
            other.messages.create(model="sees", max_tokens=6, messages=messages)
