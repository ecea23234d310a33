"""A real server process with the default model, talked to by the real `openai` client."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from octavo import LLM, SamplingParams
from tests.e2e.server import MODEL, Server, openai_client, running_server

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(
        tmp_path_factory.mktemp("server"), "--max-model-len", "1024", "--max-num-seqs", "64", "--check-invariants"
    ) as server:
        yield server


def test_readmes_curl_is_answered_with_paris(server: Server) -> None:
    body = json.dumps({"messages": QUESTION}).encode()
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_chat_answers_with_usage_and_finish_reason(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert "Paris" in chat.choices[0].message.content
    assert chat.choices[0].finish_reason == "stop"
    assert chat.id.startswith("chatcmpl-")
    assert chat.object == "chat.completion"
    assert chat.model == MODEL
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    short = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=3)
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == 3


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 5, "n": 3}, {"stop": [" is"], "logprobs": True}])
def test_a_streamed_chat_equals_the_whole_one(client: openai.OpenAI, options: dict[str, object]) -> None:
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0.0, **options}
    whole = client.chat.completions.create(**asked)
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_completions_take_text_tokens_and_batches_of_either(client: openai.OpenAI) -> None:
    texts = ["The capital of France is", "Two plus two is"]
    batch = client.completions.create(model=MODEL, prompt=texts, max_tokens=8, temperature=0)
    assert [choice.index for choice in batch.choices] == [0, 1]
    alone = [client.completions.create(model=MODEL, prompt=text, max_tokens=8, temperature=0) for text in texts]
    assert [choice.text for choice in batch.choices] == [one.choices[0].text for one in alone]
    assert batch.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    tokens = client.completions.create(model=MODEL, prompt=[504, 3575, 282, 4649, 314], max_tokens=8, temperature=0)
    assert tokens.choices[0].text == alone[0].choices[0].text
    echoed = client.completions.create(model=MODEL, prompt=texts[0], max_tokens=2, temperature=0, echo=True, logprobs=1)
    assert echoed.choices[0].text.startswith(texts[0])
    assert "".join(echoed.choices[0].logprobs.tokens) == echoed.choices[0].text
    assert echoed.choices[0].logprobs.token_logprobs[0] is None


def test_models_list_what_is_served(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


HOSTILE = [
    (b'{"messages": [', 400, None),
    (b"\xff\xfe{}", 400, None),
    (b'{"messages": "hello"}', 400, "messages"),
    (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": "hot"}', 400, "temperature"),
    (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}', 400, None),
    (b'{"messages": [{"role": "user", "content": "hi"}], "top_p": -1}', 400, "top_p"),
    (b'{"messages": [{"role": "user", "content": "hi"}], "n": 1000000}', 400, "n"),
    (b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1e400}', 400, None),
    (b'{"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"99999999": 1}}', 400, "logit_bias"),
    (b'{"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_schema"}}', 400, None),
    (b'{"messages": [{"role": "user", "content": "hi"}], "nonsense": 1}', 400, None),
    (b'{"model": "gpt-7", "messages": [{"role": "user", "content": "hi"}]}', 404, "model"),
    (b'{"messages": [{"role": "user", "content": "' + b"word " * 3000 + b'"}]}', 400, None),
    (b"[" * 20000, 400, None),
]


def test_bad_requests_fail_alone_with_openais_error_body(server: Server, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL,
        prompt="Once upon a time",
        max_tokens=160,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    pieces = iter(stream)
    text = next(pieces).choices[0].text
    for body, status, param in HOSTILE:
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"}, method="POST"
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        answer = json.loads(refused.value.read())
        assert refused.value.code == status, (body[:80], answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert "Traceback" not in answer["error"]["message"]
        if param is not None:
            assert answer["error"]["param"] == param
    text += "".join(chunk.choices[0].text for chunk in pieces)
    again = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=160, temperature=0, extra_body={"ignore_eos": True}
    )
    assert text == again.choices[0].text


@pytest.mark.long
def test_a_hundred_streams_of_which_a_third_hang_up(server: Server) -> None:
    prompts = [f"Number {i}. A short story about the number {i}:" for i in range(100)]
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)

    async def read(i: int) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=prompts[i], max_tokens=40, temperature=0.8, seed=i, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        text, num_chunks = "", 0
        async for chunk in stream:
            text += chunk.choices[0].text
            num_chunks += 1
            if i % 3 == 0 and num_chunks > i % 20:
                await stream.close()  # closes the connection in the middle of the answer
                return ""
        return text

    async def read_all() -> list[str]:
        return await asyncio.gather(*(read(i) for i in range(100)))

    texts = asyncio.run(read_all())
    server.wait_until_idle()

    llm = LLM(max_model_len=1024)
    kept = [i for i in range(100) if i % 3]
    params = [SamplingParams(max_tokens=40, temperature=0.8, seed=i, ignore_eos=True) for i in kept]
    expected = llm.generate([prompts[i] for i in kept], params, use_tqdm=False)
    assert [texts[i] for i in kept] == [output.outputs[0].text for output in expected]


def test_metrics_count_what_happened(server: Server, client: openai.OpenAI) -> None:
    server.wait_until_idle()
    prompt_tokens, output_tokens = server.metric("prompt_tokens_total"), server.metric("generation_tokens_total")
    first_tokens = server.metric("time_to_first_token_seconds_count")
    done = client.completions.create(
        model=MODEL, prompt="A prompt that nobody has sent before: 8461", max_tokens=7, extra_body={"ignore_eos": True}
    )
    server.wait_until_idle()
    assert server.metric("prompt_tokens_total") - prompt_tokens == done.usage.prompt_tokens
    assert server.metric("generation_tokens_total") - output_tokens == 7
    assert server.metric("time_to_first_token_seconds_count") - first_tokens == 1
    assert server.metric("inter_token_latency_seconds_count") > 0


def test_sigterm_ends_server_and_engine_with_status_0(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_server(tmp_path_factory.mktemp("stopping"), "--max-model-len", "512") as server:
        core = server.core_process()
        assert server.stop() == 0
        assert not core.is_running()
        log = server.log.read_text()
        assert re.search(r"KV cache.*blocks of 16", log)
        assert "Traceback" not in log


@pytest.mark.parametrize(
    ("flags", "shown"),
    [(("--max-log-len", "3"), ["'The'..."]), (("--max-log-len", "0"), [""]), (("--disable-log-requests",), [])],
)
def test_requests_are_logged_as_the_flags_say(tmp_path: Path, flags: tuple[str, ...], shown: list[str]) -> None:
    with running_server(tmp_path, "--max-model-len", "512", *flags) as server, openai_client(server) as client:
        client.completions.create(model=MODEL, prompt="The capital", max_tokens=2)
        assert server.stop() == 0
        lines = re.findall(r"prompt tokens.* output tokens:? ?(.*) \{", server.log.read_text())
        assert lines == shown
