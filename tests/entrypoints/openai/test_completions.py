"""POST /v1/completions, as the openai client and as the bytes on the wire."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from octavo.entrypoints.openai.logprobs_format import echo_offsets
from tests.entrypoints.fake_engine import MAX_MODEL_LEN, MODEL, FakeEngine


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": "Say hi", "max_tokens": 64, **fields})


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[dict[int, str], dict[int, str], list[Any]]:
    """Texts and finish reasons by choice, and the chunks."""
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    chunks = list(complete(client, stream=True, **fields))
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in ends, "nothing comes after a choice's end"
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
    return texts, ends, chunks


def test_an_answer_has_the_text_the_reason_and_the_usage(client: openai.OpenAI) -> None:
    answer = complete(client)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "Hello there", "stop", None)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 12, 18)
    assert usage.prompt_tokens_details.cached_tokens == 3


def test_sixteen_tokens_are_the_default(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = "x" * 100
    answer = client.completions.create(model=MODEL, prompt="a")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("x" * 16, "length")


def test_prompts_come_as_text_or_token_ids_and_alone_or_in_batches(client: openai.OpenAI, engine: FakeEngine) -> None:
    ids = engine.inputs.encode("ab")
    for prompt, expected in [("ab", [ids]), (ids, [ids]), (["ab", "ab"], [ids, ids]), ([ids, [5]], [ids, [5]])]:
        engine.seen.clear()
        answer = complete(client, prompt=prompt)
        assert sorted(seen[0] for seen in engine.seen) == sorted(expected)
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))
        assert answer.usage.prompt_tokens == sum(map(len, expected))


def test_choices_of_a_batch_are_numbered_prompt_by_prompt(client: openai.OpenAI) -> None:
    answer = complete(client, prompt=["a", "b"], n=2)
    assert [(c.index, c.text) for c in answer.choices] == [
        (0, "Hello there"),
        (1, "Hello there1"),
        (2, "Hello there"),
        (3, "Hello there1"),
    ]
    assert answer.usage.completion_tokens == 2 * (12 + 13)


@pytest.mark.parametrize("answer", ["Hello there", "Grüße, 世界 👋🏽!", 'a\nb\t"quoted" \\ \u2028 </s>'])
@pytest.mark.parametrize(
    "fields", [{}, {"n": 3}, {"prompt": ["a", "b"], "n": 2}, {"stop": ["ere", "界"]}, {"echo": True}]
)
def test_streamed_text_equals_the_text_of_the_whole_answer(
    client: openai.OpenAI, engine: FakeEngine, answer: str, fields: dict[str, Any]
) -> None:
    engine.answer = answer
    whole = complete(client, **fields)
    texts, ends, _ = streamed(client, **fields)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}


def test_a_stream_is_server_sent_events_that_end_with_done(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    first, last = (json.loads(event.removeprefix("data: ")) for event in (events[0], events[-3]))
    assert first["choices"] == [{"index": 0, "text": "H", "logprobs": None, "finish_reason": None}]
    assert last["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    assert first.keys() == {"id", "object", "created", "model", "system_fingerprint", "choices"}
    assert all(json.loads(event.removeprefix("data: "))["id"] == first["id"] for event in events[:-2])


def test_the_last_chunk_has_the_usage_when_asked(client: openai.OpenAI) -> None:
    _, _, chunks = streamed(client, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage == complete(client).usage


def test_every_chunk_has_the_usage_so_far_when_asked(client: openai.OpenAI) -> None:
    _, _, chunks = streamed(client, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 12)


def test_logprobs_are_those_of_each_token_with_the_most_likely_ones(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = "ab"
    logprobs = complete(client, max_tokens=2, logprobs=1).choices[0].logprobs
    assert logprobs.tokens == ["a", "b"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.text_offset == [0, 1]
    # The most likely one, and the chosen one because it is not that.
    assert logprobs.top_logprobs == [{"b": -0.25, "a": -0.5}, {"c": -0.25, "b": -0.5}]


def test_text_offsets_are_places_in_the_text_whatever_tokens_show(client: openai.OpenAI, engine: FakeEngine) -> None:
    """Characters of several tokens count once, and the token that ends the answer shows nothing."""
    engine.answer = "aé🎉b"
    choice = complete(client, prompt="<s>é", echo=True, logprobs=0).choices[0]
    assert choice.text == "<s>éaé🎉b"
    assert choice.logprobs.text_offset == [0, 3, 3, 4, 5, 5, 6, 6, 6, 6, 7, 8]
    _, _, chunks = streamed(client, logprobs=0)
    offsets = [offset for chunk in chunks for choice in chunk.choices for offset in choice.logprobs.text_offset]
    assert offsets == [0, 1, 1, 2, 2, 2, 2, 3, 4]


def test_what_the_tokenizer_puts_before_a_prompt_is_at_the_beginning_of_its_echo(engine: FakeEngine) -> None:
    begin = engine.tokenizer.bos_token_id
    assert echo_offsets(engine.tokenizer, [begin, *engine.inputs.encode("aéb")], "aéb") == [0, 0, 1, 1, 2]


def test_an_impossible_token_has_a_logprob_that_json_can_hold(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = "a"
    logprobs = complete(client, max_tokens=1, logprobs=3).choices[0].logprobs
    assert logprobs.top_logprobs == [{"b": -0.25, "a": -0.5, "c": -9999.0}]
    engine.inputs.model = replace(engine.inputs.model, max_logprobs=-1)
    of_all = complete(client, max_tokens=1, logprobs=-1).choices[0].logprobs
    assert of_all.top_logprobs == logprobs.top_logprobs, "the stand-in has three"


@pytest.mark.parametrize("fields", [{"logprobs": 2}, {"logprobs": 0}, {"logprobs": 1, "echo": True}])
def test_streamed_logprobs_equal_those_of_the_whole_answer(
    client: openai.OpenAI, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    engine.answer = "Grüße"
    whole = complete(client, **fields).choices[0].logprobs
    _, _, chunks = streamed(client, **fields)
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [token for part in parts for token in part.tokens] == whole.tokens
    assert [value for part in parts for value in part.token_logprobs] == whole.token_logprobs
    assert [offset for part in parts for offset in part.text_offset] == whole.text_offset


def test_echo_starts_the_text_with_the_prompt_and_its_logprobs(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = "c"
    choice = complete(client, prompt="ab", echo=True, logprobs=0, max_tokens=1).choices[0]
    assert choice.text == "abc"
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5]
    assert choice.logprobs.text_offset == [0, 1, 2]


def test_echo_shows_the_text_of_token_ids(client: openai.OpenAI, engine: FakeEngine) -> None:
    assert complete(client, prompt=engine.inputs.encode("ab"), echo=True).choices[0].text == "abHello there"


def test_max_tokens_zero_scores_the_prompt_and_generates_nothing(client: openai.OpenAI) -> None:
    answer = complete(client, prompt="ab", echo=True, logprobs=0, max_tokens=0)
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.5]
    assert answer.usage.completion_tokens == 0
    texts, ends, _ = streamed(client, prompt="ab", echo=True, max_tokens=0)
    assert (texts, ends) == ({0: "ab"}, {0: "length"})


def test_a_prompt_of_exactly_the_models_length_can_be_scored(http: httpx.Client) -> None:
    body = {"prompt": [1] * MAX_MODEL_LEN, "echo": True, "max_tokens": 0, "logprobs": 0}
    answer = http.post("/v1/completions", json=body)
    assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == MAX_MODEL_LEN
    for wrong in ({"max_tokens": 1}, {"prompt": [1] * (MAX_MODEL_LEN + 1)}):
        assert http.post("/v1/completions", json={**body, **wrong}).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_without_max_tokens_an_answer_is_no_longer_than_what_fits(
    http: httpx.Client, engine: FakeEngine, path: str
) -> None:
    body: dict[str, Any] = {"prompt": [1] * (MAX_MODEL_LEN - 2)}
    assert http.post(path, json=body).status_code == 200
    assert http.post(path, json={**body, "max_tokens": 3}).json()["error"]["param"] == "max_tokens"


def test_the_chosen_token_is_the_first_of_the_top_ones_and_the_only_one_of_none(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.answer = "a"
    for num_top, expected in ((0, [("a", -0.5)]), (1, [("a", -0.5), ("b", -0.25)]), (2, [("a", -0.5), ("b", -0.25)])):
        [top] = complete(client, max_tokens=1, logprobs=num_top).choices[0].logprobs.top_logprobs
        assert list(top.items()) == expected


def test_prompt_logprobs_have_their_own_place(client: openai.OpenAI, engine: FakeEngine) -> None:
    choice = complete(client, prompt="ab", extra_body={"prompt_logprobs": 0}).choices[0]
    token = engine.inputs.encode("b")[0]
    assert choice.prompt_logprobs == [None, {str(token): {"logprob": -0.5, "rank": 2, "decoded_token": "b"}}]


def test_tokens_are_shown_as_ids_when_asked(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = "a"
    logprobs = (
        complete(client, max_tokens=1, logprobs=0, extra_body={"return_tokens_as_token_ids": True}).choices[0].logprobs
    )
    assert logprobs.tokens == [f"token_id:{engine.inputs.encode('a')[0]}"]


def test_sampling_fields_reach_the_engine(http: httpx.Client, engine: FakeEngine) -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "best_of": 3,
        "presence_penalty": 1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 2**63,
        "stop": "zz",
        "stop_token_ids": [7],
        "bad_words": ["bad"],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 20,
        "min_tokens": 2,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logit_bias": {"5": -100},
        "allowed_token_ids": [5, 6],
        "truncate_prompt_tokens": 3,
    }
    response = http.post("/v1/completions", json={"prompt": "abcdef", "cache_salt": "s", **fields})
    assert response.status_code == 200, response.text
    prompt, params, others = engine.seen[0]
    assert prompt == engine.inputs.encode("def")
    cache = {"cache_session": None, "cache_ttl_s": 0.0, "blocks_from": None}
    assert others == {"priority": 0, "salt": "s", "rank": None, "session": None, **cache}
    for name, value in {**fields, "stop": ["zz"], "logit_bias": {5: -100.0}}.items():
        assert getattr(params, name) == value, name


def test_the_model_says_what_sampling_is_where_the_request_does_not(
    http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = engine.config.model.default_sampling_params
    monkeypatch.setitem(defaults, "temperature", 0.2)
    monkeypatch.setitem(defaults, "top_k", 7)
    http.post("/v1/completions", json={"prompt": "a", "top_k": 9})
    http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    assert [(params.temperature, params.top_k) for _, params, _ in engine.seen] == [(0.2, 9), (0.2, 7)]


def test_ids_come_from_the_request_and_go_back_in_a_header(http: httpx.Client) -> None:
    body = {"prompt": "a"}
    by_header = http.post("/v1/completions", json=body, headers={"X-Request-Id": "trace-1"})
    assert (by_header.json()["id"], by_header.headers["x-request-id"]) == ("cmpl-trace-1", "trace-1")
    by_field = http.post("/v1/completions", json={**body, "request_id": "r2", "stream": True})
    assert by_field.headers["x-request-id"] == "r2"
    assert '"id":"cmpl-r2"' in by_field.text


def test_the_engine_is_named_by_a_header(http: httpx.Client, engine: FakeEngine) -> None:
    no_number = "X-data-parallel-rank must be the number of an engine, got"
    for rank, said in {"0": "", "1": "data_parallel_rank must be 0 to 0", "-1": no_number, "": no_number}.items():
        response = http.post("/v1/completions", json={"prompt": "a"}, headers={"X-data-parallel-rank": rank})
        assert response.status_code == (400 if said else 200) and said in response.text
    assert [others["rank"] for _, _, others in engine.seen] == [0]


def test_two_requests_may_have_the_same_id_at_once(http: httpx.Client, engine: FakeEngine) -> None:
    response = http.post("/v1/completions", json={"prompt": ["a", "b"], "request_id": "same"})
    assert response.status_code == 200
    assert len(response.json()["choices"]) == 2


def test_a_scored_prompt_has_reached_its_length_whatever_would_come_next(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.answer = ""
    answer = complete(client, prompt="ab", echo=True, logprobs=0, max_tokens=0)
    assert (answer.choices[0].finish_reason, answer.choices[0].text) == ("length", "ab")
    _, ends, _ = streamed(client, prompt="ab", echo=True, max_tokens=0)
    assert ends == {0: "length"}


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"echo": True, "logprobs": 1}, {"prompt": ["a", "bc"]}])
def test_token_ids_come_when_asked_and_streams_have_the_same(
    client: openai.OpenAI, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    engine.answer = "Grüße, 世界"
    asked = {**fields, "extra_body": {"return_token_ids": True, "return_prompt_text": True}}
    whole = complete(client, **asked)
    prompts = fields.get("prompt", ["Say hi"])
    for choice in whole.choices:
        text = engine.answer + str(choice.index or "") * ("n" in fields)
        assert choice.token_ids == [*engine.inputs.encode(text), engine.tokenizer.eos_token_id]
        prompt = prompts[choice.index if len(prompts) > 1 else 0]
        assert (choice.prompt_token_ids, choice.prompt_text) == (engine.inputs.encode(prompt), prompt)
    _, _, chunks = streamed(client, **asked)
    token_ids: dict[int, list[int]] = {}
    prompt_ids: dict[int, list[int]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        if getattr(choice, "prompt_token_ids", None) is not None:
            assert choice.index not in token_ids, "the prompt comes with the first chunk of its choice"
            prompt_ids[choice.index] = choice.prompt_token_ids
            assert choice.prompt_text == prompts[choice.index if len(prompts) > 1 else 0]
        token_ids.setdefault(choice.index, []).extend(choice.token_ids)
    assert token_ids == {choice.index: choice.token_ids for choice in whole.choices}
    assert prompt_ids == {choice.index: choice.prompt_token_ids for choice in whole.choices}


def test_answers_without_token_ids_do_not_mention_them(http: httpx.Client) -> None:
    assert '"token_ids":[' not in http.post("/v1/completions", json={"prompt": "a"}).text
    assert "token_ids" not in http.post("/v1/completions", json={"prompt": "a", "stream": True}).text
