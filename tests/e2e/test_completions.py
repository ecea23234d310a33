"""Completions with the default model: whatever is asked for, a stream has token for token what a whole answer has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from octavo import LLM, SamplingParams
from tests.e2e.server import MODEL, Server, running_server

pytestmark = pytest.mark.slow

STORY = "Once upon a time"
IDS = [504, 3575, 282, 4649, 314]  # The capital of France is


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--max-model-len", "512", "--max-num-seqs", "32", "--check-invariants", "--scheduling-policy", "priority")
    with running_server(tmp_path_factory.mktemp("completions"), *flags) as server:
        yield server
        server.wait_until_idle()


COMBINATIONS: list[dict[str, Any]] = [
    {},
    {"prompt": [STORY, "Two plus two is"]},
    {"prompt": IDS},
    {"prompt": [IDS, IDS[:3]], "n": 2, "temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"stop": [" the", "\n"], "max_tokens": 24},
    {"stop": [" the"], "max_tokens": 24, "extra_body": {"include_stop_str_in_output": True}},
    {"logprobs": 3},
    {"logprobs": 0, "n": 3, "temperature": 1.0, "seed": 2},
    {"echo": True, "logprobs": 2},
    {"echo": True, "max_tokens": 0, "logprobs": 1},
    {"echo": True, "prompt": [IDS, STORY]},
    {"logit_bias": {"28": -100, "260": 5}},
    {"max_tokens": 1},
    {"max_tokens": 0},
    {"extra_body": {"ignore_eos": True, "min_tokens": 5, "top_k": 3}, "temperature": 0.9, "seed": 3},
    {"extra_body": {"truncate_prompt_tokens": 2}, "echo": True, "logprobs": 1},
    {"extra_body": {"truncate_prompt_tokens": -1}, "prompt": "word " * 600, "max_tokens": 4},
    {"extra_body": {"return_token_ids": True}, "n": 2, "temperature": 1.0, "seed": 4},
    {"extra_body": {"priority": 5, "request_id": "mine", "cache_salt": "s"}, "user": "me"},
    {"extra_body": {"use_beam_search": True, "length_penalty": 0.5}, "n": 2, "best_of": 4, "logprobs": 1},
    {"extra_body": {"return_tokens_as_token_ids": True}, "logprobs": 1},
    {"extra_body": {"bad_words": ["there"], "repetition_penalty": 1.2, "skip_special_tokens": False}},
]


@pytest.mark.parametrize("fields", COMBINATIONS, ids=str)
def test_a_stream_has_what_the_whole_answer_has(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    asked = {"model": MODEL, "prompt": STORY, "max_tokens": 12, "temperature": 0.0, **fields}
    whole = client.completions.create(**asked)
    parts: dict[int, dict[str, Any]] = {}
    usage = None
    options = {"include_usage": True, "continuous_usage_stats": True}
    for chunk in client.completions.create(**asked, stream=True, stream_options=options):
        usage = chunk.usage
        for choice in chunk.choices:
            part = parts.setdefault(
                choice.index,
                {"text": "", "ids": [], "prompt_ids": None, "tokens": [], "values": [], "tops": [], "at": []},
            )
            part["text"] += choice.text
            part["ids"] += getattr(choice, "token_ids", None) or []
            part["prompt_ids"] = part["prompt_ids"] or getattr(choice, "prompt_token_ids", None)
            part["end"] = choice.finish_reason, getattr(choice, "stop_reason", None)
            if choice.logprobs is not None:
                part["tokens"] += choice.logprobs.tokens
                part["values"] += choice.logprobs.token_logprobs
                part["tops"] += choice.logprobs.top_logprobs or []
                part["at"] += choice.logprobs.text_offset
    expected = {}
    for choice in whole.choices:
        logprobs = choice.logprobs
        expected[choice.index] = {
            "text": choice.text,
            "ids": getattr(choice, "token_ids", None) or [],
            "prompt_ids": getattr(choice, "prompt_token_ids", None),
            "end": (choice.finish_reason, getattr(choice, "stop_reason", None)),
            "tokens": logprobs.tokens if logprobs else [],
            "values": logprobs.token_logprobs if logprobs else [],
            "tops": (logprobs.top_logprobs or []) if logprobs else [],
            "at": logprobs.text_offset if logprobs else [],
        }
    assert parts == expected
    assert usage is not None and whole.usage is not None
    # What is cached depends on who came before; the rest must be equal.
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_every_way_to_the_engine_gives_the_same_text(server: Server, client: openai.OpenAI) -> None:
    body = {"prompt": STORY, "max_tokens": 20, "temperature": 0}
    answer = client.completions.create(model=MODEL, **body).choices[0].text
    with httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.post("/generate", json=body).json() == {"text": [STORY + answer]}
        lines = http.post("/generate", json={**body, "stream": True}).text.splitlines()
        assert lines[-1] == http.post("/generate", json=body).text
        tokens = http.post("/tokenize", json={"prompt": STORY}).json()["tokens"]
        assert client.completions.create(model=MODEL, **{**body, "prompt": tokens}).choices[0].text == answer
        assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": STORY}


def test_a_search_over_http_is_the_search_of_the_library(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=STORY, max_tokens=12, n=2, best_of=3, extra_body={"use_beam_search": True}
    )
    llm = LLM(max_model_len=512)
    params = SamplingParams(use_beam_search=True, n=2, best_of=3, temperature=0, max_tokens=12)
    (output,) = llm.generate(STORY, params, use_tqdm=False)
    assert [choice.text for choice in answer.choices] == [completion.text for completion in output.outputs]


def test_a_suffix_is_refused_clearly(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="was not trained to fill in") as refused:
        client.completions.create(model=MODEL, prompt=STORY, suffix="the end")
    assert refused.value.param == "suffix"


def test_a_prediction_changes_nothing_but_the_time(server: Server, client: openai.OpenAI) -> None:
    """OpenAI's predicted outputs, in completions and chats, with what was accepted of them in the usage and metrics."""
    asked = {"model": MODEL, "max_tokens": 40, "temperature": 0.8, "seed": 5, "logprobs": 2}
    plain = client.completions.create(prompt=STORY, **asked)
    predicted = {"type": "content", "content": plain.choices[0].text}
    found = client.completions.create(prompt=STORY, **asked, extra_body={"prediction": predicted})
    assert found.choices[0].text == plain.choices[0].text
    assert found.choices[0].logprobs == plain.choices[0].logprobs
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert found.usage.completion_tokens_details.accepted_prediction_tokens > 10

    messages = [{"role": "user", "content": "Count to nine."}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=30)
    answer = chat.choices[0].message.content
    parts = [{"type": "text", "text": answer}]
    prediction = {"type": "content", "content": parts}
    again = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=30, prediction=prediction)
    assert again.choices[0].message.content == answer
    details = again.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 10
    assert details.rejected_prediction_tokens < details.accepted_prediction_tokens

    num_accepted = server.metric("spec_decode_num_accepted_tokens_total")
    assert server.metric("spec_decode_num_draft_tokens_total") >= num_accepted > 20

    with pytest.raises(openai.BadRequestError, match="prediction"):
        client.completions.create(prompt=STORY, **asked, extra_body={"prediction": {"type": "text", "content": "x"}})
