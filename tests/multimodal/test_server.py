"""A real server of a small model that sees, by OpenAI's client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from octavo import LLM, SamplingParams
from tests.e2e.server import Server, served
from tests.multimodal.conftest import encoded, picture
from tests.multimodal.test_pictures import CASES, from_url, url

pytestmark = pytest.mark.slow

A, B = url(encoded(picture(0))), url(encoded(picture(1, 90, 33), "JPEG"), "image/jpeg")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, llava: Path) -> Iterator[Server]:
    with served(
        tmp_path_factory.mktemp("server"), "--model", str(llava), "--served-model-name", "llava", "--dtype", "float32",
        "--limit-mm-per-prompt", '{"image": 2}', "--max-image-bytes", "100000", "--max-image-pixels", "1000000",
        "--num-gpu-blocks-override", "64", "--max-model-len", "256",
    ) as server:  # fmt: skip
        yield server


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(given: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": given, "detail": "auto"}}


SOUND = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}


def ask(client: openai.OpenAI, *content: dict[str, Any], **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": list(content)}]
    return client.chat.completions.create(
        model="llava", messages=messages, temperature=0, max_tokens=6, logprobs=True, extra_body={"ignore_eos": True},
        **more,
    )  # fmt: skip


def said(answer: Any) -> list[tuple[str, float]]:
    return [(token.token, token.logprob) for token in answer.choices[0].logprobs.content]


@pytest.mark.long
def test_the_example_asks_about_a_picture(server: Server) -> None:
    command = [sys.executable, str(Path(__file__).parents[2] / "examples" / "pictures.py")]
    env = os.environ | {"OPENAI_BASE_URL": f"{server.url}/v1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    text = "USER: \nWhat is in this picture? ASSISTANT:"
    assert done.stdout.endswith(f"\n{len(text) + 4} tokens of prompt, the picture's rows among them\n")


@pytest.mark.long
def test_pictures_are_answered_as_in_scripts(client: openai.OpenAI, llava: Path) -> None:
    answer = ask(client, text("See"), image(A), {"type": "image_url", "image_url": B}, text("and say"))
    assert answer.usage.prompt_tokens == len("USER: \n\nSee and say ASSISTANT:") + 2 * 4
    with LLM(str(llava), dtype="float32", max_model_len=256, num_gpu_blocks_override=64) as llm:
        images = [picture(0), from_url(B)]
        [output] = llm.generate(
            {"prompt": "USER: <image>\n<image>\nSee and say ASSISTANT:", "multi_modal_data": {"image": images}},
            SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True),
            use_tqdm=False,
        )
    found = output.outputs[0]
    expected = [logprobs[token].logprob for token, logprobs in zip(found.token_ids, found.logprobs or (), strict=True)]
    assert [logprob for _, logprob in said(answer)] == expected
    assert said(ask(client, image(A), text("See"))) != said(ask(client, image(B), text("See")))


ADDRESSES = {
    address: (address, "")
    for address in (
        "http://127.0.0.1/a.png", "http://[::ffff:127.0.0.1]/a.png", "https://user:word@example.org/a.png", "a.png", "",
        "file:///etc/passwd", "ftp://example.org/a.png",
    )
}  # fmt: skip


@pytest.mark.parametrize("name", [*CASES, *ADDRESSES])
def test_a_hostile_picture_is_a_400(client: openai.OpenAI, name: str) -> None:
    given, _ = {**CASES, **ADDRESSES}[name]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, image(given if isinstance(given, str) else given()))
    assert refused.value.body["code"] == "invalid_image"  # type: ignore[index]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([image(A)] * 3, "3 pictures, and 2 are the most"),
        ([{"type": "video_url", "video_url": {"url": "data:"}}], "takes no videos here, but pictures"),
        ([image(A), {"type": "input_audio", "input_audio": {}}], "a part that is not like"),
        ([SOUND], "takes no sounds here, but pictures"),
        ([image(A), SOUND], "takes no sounds here, but pictures"),
        ([{"type": "image_embeds", "image_embeds": "x"}], "with --enable-mm-embeds only"),
        ([{"type": "image_embeds", "image_embeds": 1}], "a part that is not like"),
        ([{"type": "audio_embeds", "audio_embeds": "x"}], "takes no sounds here, but pictures"),
        ([{"type": "image_url"}], "a part that is not like"),
        ([{"type": "image_url", "image_url": {"url": 1}}], "a part that is not like"),
        ([{**image(A), "uuid": 1}], "the uuid of a medium must be a string"),
        ([{"type": "image_url", "image_url": None, "uuid": "x"}], "nothing is kept under its uuid"),
        ([image(A), text("<image>")], "2 placeholders and 1 pictures"),
    ],
)
def test_what_is_not_built_is_a_400(client: openai.OpenAI, content: list[Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(client, *content)


def test_a_picture_is_asked_about_again_by_its_uuid(client: openai.OpenAI) -> None:
    mine: Any = {"extra_body": {"ignore_eos": True, "cache_salt": "mine"}}

    def ask_by(part: dict[str, Any], **more: Any) -> Any:
        messages: Any = [{"role": "user", "content": [text("See"), {**part, "uuid": "a"}]}]
        more = {"extra_body": {"ignore_eos": True}} | more
        return client.chat.completions.create(
            model="llava", messages=messages, temperature=0, max_tokens=6, logprobs=True, **more
        )

    first = said(ask_by(image(A)))
    for part in ({"image_url": None}, {"image_url": {}}, {}):
        assert said(ask_by({"type": "image_url", **part})) == first == said(ask(client, text("See"), image(A)))
    with pytest.raises(openai.BadRequestError, match="nothing is kept under its uuid"):
        ask_by({"type": "image_url"}, **mine)
    other = said(ask_by(image(B), **mine))
    assert said(ask_by({"type": "image_url"}, **mine)) == other != first == said(ask_by({"type": "image_url"}))


def test_other_roles_and_routes_refuse_pictures(client: openai.OpenAI, server: Server) -> None:
    system: Any = [{"role": "system", "content": [image(A)]}]
    with pytest.raises(openai.BadRequestError, match="only messages of the user and of tools"):
        client.chat.completions.create(model="llava", messages=system)
    with pytest.raises(openai.BadRequestError, match="are not supported here"):
        client.post(
            f"{server.url}/tokenize", body={"messages": [{"role": "user", "content": [image(A)]}]}, cast_to=object
        )


def test_responses_have_pictures(client: openai.OpenAI) -> None:
    more: Any = {"model": "llava", "temperature": 0, "max_output_tokens": 6, "extra_body": {"ignore_eos": True}}
    see, look = {"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": A, "detail": "auto"}
    first: Any = [{"role": "user", "content": [see, look]}]
    response = client.responses.create(input=first, **more)
    answer = ask(client, text("See"), image(A))
    assert response.output_text == answer.choices[0].message.content
    assert response.usage is not None and response.usage.input_tokens == answer.usage.prompt_tokens
    then: Any = [{"role": "user", "content": [{**look, "image_url": B}, {"type": "input_text", "text": "and this"}]}]
    again = client.responses.create(input=then, previous_response_id=response.id, **more)
    assert again.usage is not None and again.usage.input_tokens > response.usage.input_tokens + 4
    kept = client.responses.input_items.list(response.id).data[0].model_dump()
    assert [part["type"] for part in kept["content"]] == ["input_text", "input_image"]
    for given in ({"image_url": A}, {"image_url": None}, {}):
        named: Any = [{"role": "user", "content": [see, {"type": "input_image", "uuid": "of responses", **given}]}]
        assert client.responses.create(input=named, **more).output_text == response.output_text
    for content, message in (
        ([{"type": "input_image", "file_id": "file-1"}], "file_id is not built"),
        ([{"type": "input_image", "uuid": "another"}], "nothing is kept under its uuid"),
        ([{"type": "input_image", "uuid": 1}], "uuid should be a string"),
        ([{"type": "input_video", "video_url": "data:"}], "'input_video', which is not built here; text and, of"),
        ([{"type": "input_image", "image_url": 1}], r"image_url should be a string"),
        ([look] * 3, "3 pictures, and 2 are the most"),
        ([{**look, "image_url": "http://127.0.0.1/"}], "not on the public internet"),
        ([{"type": "input_file", "file_data": "x"}], "input_file.*not built"),
    ):
        wrong: Any = [{"role": "user", "content": content}]
        with pytest.raises(openai.BadRequestError, match=message):
            client.responses.create(input=wrong, **more)


def block(url: str) -> dict[str, Any]:
    """A picture in Anthropic's form."""
    kind, data = url.removeprefix("data:").split(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def test_messages_have_pictures(client: openai.OpenAI, server: Server) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        content: Any = [text("See"), block(A), text("and"), block(B)]
        messages: Any = [{"role": "user", "content": content}]
        message = other.messages.create(model="llava", max_tokens=6, messages=messages, extra_body={"temperature": 0})
        answer = ask(client, text("See"), image(A), text("and"), image(B))
        words = "".join(one.model_dump()["text"] for one in message.content)
        assert answer.choices[0].message.content.startswith(words)  # that one goes on after an end
        used = message.usage  # what of the prompt another test has asked before comes from the cache
        assert used.input_tokens + (used.cache_read_input_tokens or 0) == answer.usage.prompt_tokens
        assert other.messages.count_tokens(model="llava", messages=messages).input_tokens == answer.usage.prompt_tokens
        for role, wrong_block, said in (
            ("user", {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}, "not on the public"),
            (
                "user",
                {"type": "image", "source": {"type": "file", "file_id": "x"}},
                "should be 'base64' or 'url', got 'file'",
            ),
            ("assistant", block(A), "belongs to a message of the user"),
        ):
            wrong: Any = [{"role": role, "content": [wrong_block]}]
            with pytest.raises(anthropic.BadRequestError, match=said):
                other.messages.create(model="llava", max_tokens=6, messages=wrong)


def test_results_of_tools_have_pictures(client: openai.OpenAI, server: Server) -> None:
    """The same in all three APIs, and as a message of the user that says it: the template knows nothing of tools."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked: Any = [{"role": "user", "content": "Look"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result: Any = {"role": "tool", "tool_call_id": "c", "content": [text("Seen:"), image(A)]}
    more: Any = {"temperature": 0, "max_tokens": 6, "extra_body": {"ignore_eos": True}, "logprobs": True}
    found = client.chat.completions.create(model="llava", messages=[*asked, result], **more)
    called: Any = {"role": "assistant", "content": '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'}
    parts: Any = [text("<tool_response>\n"), text("Seen:"), image(A), text("\n</tool_response>")]
    by_hand = client.chat.completions.create(
        model="llava", messages=[asked[0], called, {"role": "user", "content": parts}], **more
    )
    assert said(found) == said(by_hand)
    answer, num_tokens = found.choices[0].message.content, found.usage.prompt_tokens

    items: Any = [
        {"role": "user", "content": "Look"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output", "call_id": "c",
            "output": [{"type": "input_text", "text": "Seen:"}, {"type": "input_image", "image_url": A}],
        },
    ]  # fmt: skip
    settings: Any = {"temperature": 0, "max_output_tokens": 6, "extra_body": {"ignore_eos": True}}
    response = client.responses.create(model="llava", input=items, **settings)
    assert response.output_text == answer
    assert response.usage is not None and response.usage.input_tokens == num_tokens
    [kept] = [
        item.model_dump()
        for item in client.responses.input_items.list(response.id).data
        if item.type == "function_call_output"
    ]
    assert [part["type"] for part in kept["output"]] == ["input_text", "input_image"]
    then: Any = [{"role": "user", "content": "And?"}]
    again = client.responses.create(model="llava", input=then, previous_response_id=response.id, **settings)
    assert again.usage is not None and again.usage.input_tokens > num_tokens
    wrong: Any = [*items[:2], {**items[2], "output": [{"type": "input_file", "file_data": "x"}]}]
    with pytest.raises(openai.BadRequestError, match=r"input_file.*not built"):
        client.responses.create(model="llava", input=wrong, **settings)

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        for is_error, added in ((False, 0), (True, len("Error: ") + 1)):
            content: Any = [{"type": "text", "text": "Seen:"}, block(A)]
            messages: Any = [
                {"role": "user", "content": "Look"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": content, "is_error": is_error}],
                },
            ]
            counted = other.messages.count_tokens(model="llava", messages=messages)
            assert counted.input_tokens == num_tokens + added
        seen = {"type": "document", "source": {"type": "content", "content": content}}
        messages[-1]["content"][0]["content"] = [seen]
        marked = other.messages.count_tokens(model="llava", messages=messages)
        assert marked.input_tokens > counted.input_tokens, "a document may have pictures"
        content[1] = {"type": "container_upload", "file_id": "x"}
        messages[-1]["content"][0]["content"] = content
        with pytest.raises(anthropic.BadRequestError, match=r"container_upload\W+which is not built; text, image"):
            other.messages.create(model="llava", max_tokens=6, messages=messages)


def test_metrics_of_pictures(client: openai.OpenAI, server: Server) -> None:
    names = (
        "vllm:mm_cache_queries_total",
        "vllm:mm_cache_hits_total",
        'octavo:media_total{kind="image",outcome="taken"}',
    )
    refused = 'octavo:media_total{kind="image",outcome="refused"}'
    ask(client, image(A))  # its rows are kept from here on
    before = [server.count(name) for name in names]
    num_refused = server.count(refused)
    ask(client, image(A), text("and so on"))
    with pytest.raises(openai.BadRequestError):
        ask(client, image(url(b"")))
    server.wait_until_idle()
    assert [server.count(name) for name in names] == [value + 1 for value in before]
    assert server.count(refused) == num_refused + 1
    assert server.count("octavo:tower_seconds_total") > 0
    for phase in ("decode", "process"):
        assert server.count(f'octavo:media_seconds_count{{kind="image",phase="{phase}"}}') >= 2


@pytest.mark.long
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
