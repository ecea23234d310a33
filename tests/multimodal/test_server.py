"""A real server of a small model that sees, by OpenAI's client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo import LLM, SamplingParams
from octavo.multimodal.pictures import from_url
from tests.e2e.server import Server, running_server
from tests.multimodal.conftest import picture
from tests.multimodal.test_pictures import CASES, encoded, url

pytestmark = pytest.mark.slow

A, B = url(encoded(picture(0))), url(encoded(picture(1, 90, 33), "JPEG"), "image/jpeg")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, llava: Path) -> Iterator[Server]:
    with running_server(
        tmp_path_factory.mktemp("server"), "--model", str(llava), "--served-model-name", "llava", "--dtype", "float32",
        "--limit-mm-per-prompt", '{"image": 2}', "--max-image-bytes", "100000", "--max-image-pixels", "1000000",
        "--num-gpu-blocks-override", "64", "--max-model-len", "256",
    ) as server:  # fmt: skip
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(given: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": given, "detail": "auto"}}


def ask(client: openai.OpenAI, *content: dict[str, Any], **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": list(content)}]
    return client.chat.completions.create(
        model="llava", messages=messages, temperature=0, max_tokens=6, logprobs=True, extra_body={"ignore_eos": True},
        **more,
    )  # fmt: skip


def said(answer: Any) -> list[tuple[str, float]]:
    return [(token.token, token.logprob) for token in answer.choices[0].logprobs.content]


def test_pictures_are_answered_as_in_scripts(client: openai.OpenAI, llava: Path) -> None:
    answer = ask(client, text("See"), image(A), {"type": "image_url", "image_url": B}, text("and say"))
    assert answer.usage.prompt_tokens == len("USER: \n\nSee and say ASSISTANT:") + 2 * 4
    with LLM(str(llava), dtype="float32", max_model_len=256, num_gpu_blocks_override=64) as llm:
        images = [picture(0), from_url(B, 10**6, 10**6)]
        [output] = llm.generate(
            {"prompt": "USER: <image>\n<image>\nSee and say ASSISTANT:", "multi_modal_data": {"image": images}},
            SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True),
            use_tqdm=False,
        )
    found = output.outputs[0]
    expected = [logprobs[token].logprob for token, logprobs in zip(found.token_ids, found.logprobs or (), strict=True)]
    assert [logprob for _, logprob in said(answer)] == expected
    assert said(ask(client, image(A), text("See"))) != said(ask(client, image(B), text("See")))


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_picture_is_a_400(client: openai.OpenAI, name: str) -> None:
    given, _ = CASES[name]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, image(given if isinstance(given, str) else given()))
    assert refused.value.body["code"] == "invalid_image"  # type: ignore[index]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([image(A)] * 3, "3 pictures, and 2 are the most"),
        ([{"type": "video_url", "video_url": {"url": "data:"}}], "video_url.*not built"),
        ([image(A), {"type": "input_audio", "input_audio": {}}], "input_audio.*not built"),
        ([{"type": "image_embeds", "image_embeds": "x"}], "image_embeds.*not built"),
        ([{"type": "image_url"}], "a part that is not like"),
        ([{"type": "image_url", "image_url": {"url": 1}}], "a part that is not like"),
        ([{**image(A), "uuid": "x"}], "a part with uuid, which is not built"),
        ([image(A), text("<image>")], "2 placeholders and 1 pictures"),
    ],
)
def test_what_is_not_built_is_a_400(client: openai.OpenAI, content: list[Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(client, *content)


def test_other_roles_and_routes_refuse_pictures(client: openai.OpenAI, server: Server) -> None:
    system: Any = [{"role": "system", "content": [image(A)]}]
    with pytest.raises(openai.BadRequestError, match="only messages of the user"):
        client.chat.completions.create(model="llava", messages=system)
    with pytest.raises(openai.BadRequestError, match="for /v1/chat/completions only"):
        client.post(
            f"{server.url}/tokenize", body={"messages": [{"role": "user", "content": [image(A)]}]}, cast_to=object
        )


def test_streams_go_on_while_pictures_are_refused(client: openai.OpenAI, server: Server) -> None:
    alone = said(ask(client, text("A stream")))
    bomb = CASES["a bomb"][0]
    refused: list[str] = []

    def attack() -> None:
        for _ in range(5):
            try:
                ask(client, image(str(bomb)))
            except openai.BadRequestError as error:
                refused.append(json.dumps(error.body))

    threads = [threading.Thread(target=attack) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert [said(ask(client, text("A stream"))) for _ in range(5)] == [alone] * 5
    for thread in threads:
        thread.join()
    assert len(refused) == 20
    server.wait_until_idle()
