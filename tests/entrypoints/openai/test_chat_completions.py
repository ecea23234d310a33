"""POST /v1/chat/completions, as the openai client and as the bytes on the wire."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ParsedChatCompletionMessage, ParsedFunction, ParsedFunctionToolCall

from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest
from octavo.entrypoints.openai.tool_choice import NamedToolChoice
from octavo.entrypoints.responses.items_to_chat import to_chat
from octavo.entrypoints.responses.response_tools import callable_tools
from octavo.entrypoints.responses.responses_protocol import ResponsesRequest
from tests.entrypoints.fake_engine import MODEL, FakeEngine

G = {"type": "function", "name": "g"}
F = {"type": "function", "function": {"name": "f"}}
USER = {"role": "user", "content": "Hi"}


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": [USER], **fields})


def prompt_of(engine: FakeEngine) -> str:
    return str(engine.tokenizer.decode(engine.seen[-1][0]))


def test_an_answer_has_the_message_the_reason_and_the_usage(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = chat(client)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello there", "stop")
    assert prompt_of(engine) == "user: Hi\nassistant:"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len("user: Hi\nassistant:"), 12)


def test_notes_for_caches_of_other_servers_change_nothing(client: openai.OpenAI, engine: FakeEngine) -> None:
    """LiteLLM and OpenRouter have clients put them on parts, messages and tools."""
    note: Any = {"cache_control": {"type": "ephemeral"}}
    function = {"type": "function", "function": {"name": "f"}}
    chat(client, tools=[function])
    chat(client, messages=[{**USER, **note}], tools=[{**function, **note}])
    chat(client, messages=[{"role": "user", "content": [{"type": "text", "text": "Hi", **note}]}], tools=[function])
    assert (
        prompt_of(engine) == engine.tokenizer.decode(engine.seen[-2][0]) == engine.tokenizer.decode(engine.seen[-3][0])
    )
    with pytest.raises(openai.BadRequestError, match="'file', which is not built yet; text, image_url"):
        chat(client, messages=[{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}])


def test_an_answer_may_be_as_long_as_the_context_allows(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = "x" * 1000
    answer = chat(client)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == engine.config.model.max_model_len


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_is_no_longer_than_asked(client: openai.OpenAI, name: str) -> None:
    assert chat(client, **{name: 5}).choices[0].message.content == "Hello"


@pytest.mark.parametrize("answer", ["Hello there", "Grüße, 世界 👋🏽!", 'line\nline "quoted" \u2028'])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stop": "e"}, {"logprobs": True}])
def test_streamed_text_equals_the_text_of_the_whole_answer(
    client: openai.OpenAI, engine: FakeEngine, answer: str, fields: dict[str, Any]
) -> None:
    engine.answer = answer
    whole = chat(client, **fields)
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for chunk in chat(client, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}


def test_a_stream_gives_the_role_the_text_and_the_end_in_this_order(http: httpx.Client, engine: FakeEngine) -> None:
    engine.answer = "ab"
    response = http.post("/v1/chat/completions", json={"messages": [USER], "stream": True, "n": 2})
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"][0]["index"] == 1] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {"content": "1"},
        {},
    ]
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert chunks[-1]["choices"] == [
        {"index": 1, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]


def test_the_last_chunk_has_the_usage_when_asked(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == chat(client).usage
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stop_string_is_named_and_left_out(http: httpx.Client, engine: FakeEngine) -> None:
    choice = http.post("/v1/chat/completions", json={"messages": [USER], "stop": ["there"]}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("Hello ", "stop", "there")


def test_logprobs_have_bytes_that_add_up_to_the_text(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = "aü"
    choice = chat(client, logprobs=True, top_logprobs=2, max_tokens=3).choices[0]
    content = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in content) == "aü".encode()
    assert [token.logprob for token in content] == [-0.5] * 3
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("b", -0.25), ("a", -0.5)]


def test_all_logprobs_are_given_where_the_server_allows_it(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.inputs.model = replace(engine.inputs.model, max_logprobs=-1)
    content = chat(client, logprobs=True, top_logprobs=-1, max_tokens=1).choices[0].logprobs.content
    assert [top.logprob for top in content[0].top_logprobs] == [-0.25, -0.5, -9999.0]
    assert engine.seen[0][1].logprobs == 259


def test_no_top_logprobs_are_given_unless_asked(client: openai.OpenAI) -> None:
    content = chat(client, logprobs=True).choices[0].logprobs.content
    assert all(token.top_logprobs == [] for token in content)


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 1}, {"tools": [F], "tool_choice": "required"}, {"stop": "W"}],
)
def test_token_ids_come_when_asked_and_streams_have_the_same(
    client: openai.OpenAI, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    engine.answer = '[{"name": "f", "parameters": {"a": "Grüße, 世界"}}]' if "tools" in fields else "Grüße, Welt"
    asked = {**fields, "extra_body": {"return_token_ids": True, "return_prompt_text": True}}
    whole = chat(client, **asked)
    assert whole.prompt_token_ids == engine.seen[-1][0] == engine.inputs.encode(whole.prompt_text, False)
    for choice in whole.choices:
        text = engine.answer + str(choice.index or "")
        every = [*engine.inputs.encode(text), engine.tokenizer.eos_token_id]
        assert choice.token_ids == (every[: len("Grüße, W".encode())] if "stop" in fields else every)
    token_ids: dict[int, list[int]] = {}
    for chunk in chat(client, stream=True, **asked):
        (choice,) = chunk.choices
        if choice.delta.role:
            assert (chunk.prompt_token_ids, choice.index in token_ids) == (whole.prompt_token_ids, False)
            assert chunk.prompt_text == whole.prompt_text
        else:
            assert not hasattr(chunk, "prompt_token_ids")
        token_ids.setdefault(choice.index, []).extend(getattr(choice, "token_ids", []))
    assert token_ids == {choice.index: choice.token_ids for choice in whole.choices}


def test_answers_without_token_ids_do_not_mention_them(http: httpx.Client) -> None:
    assert 'token_ids":[' not in http.post("/v1/chat/completions", json={"messages": [USER]}).text
    assert "token_ids" not in http.post("/v1/chat/completions", json={"messages": [USER], "stream": True}).text


def test_content_may_come_in_text_parts(client: openai.OpenAI, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat(client, messages=[{"role": "user", "content": parts}])
    assert prompt_of(engine) == "user: one\ntwo\nassistant:"


def test_the_developer_is_the_system_where_templates_do_not_know_it(client: openai.OpenAI, engine: FakeEngine) -> None:
    chat(client, messages=[{"role": "developer", "content": "Be kind"}, USER])
    assert prompt_of(engine) == "system: Be kind\nuser: Hi\nassistant:"


def test_an_answer_can_be_sent_back_as_it_came(client: openai.OpenAI, engine: FakeEngine) -> None:
    message = chat(client).choices[0].message
    chat(client, messages=[USER, message.model_dump(), {"role": "tool", "content": "4", "tool_call_id": "x"}])
    shown = "<tool_response>\n4\n</tool_response>"  # the template knows nothing of tools
    assert prompt_of(engine) == f"user: Hi\nassistant: Hello there\nuser: {shown}\nassistant:"


def test_a_parsed_answer_can_be_sent_back_as_it_came(client: openai.OpenAI, engine: FakeEngine) -> None:
    function = ParsedFunction(name="f", arguments="{}", parsed_arguments={})
    call = ParsedFunctionToolCall(id="x", type="function", function=function)
    answer = ParsedChatCompletionMessage(role="assistant", content="Hello", parsed={"a": 1}, tool_calls=[call])
    sent: list[Any] = [USER, answer, {"role": "tool", "content": "4", "tool_call_id": "x"}]
    chat(client, messages=sent)
    shown = prompt_of(engine)
    assert "Hello" in shown and "parsed" not in shown
    with pytest.raises(openai.BadRequestError, match="parsed"):
        chat(client, messages=[{**USER, "parsed": {"a": 1}}])


def test_nulls_in_calls_that_are_sent_back_are_as_if_absent(http: httpx.Client, engine: FakeEngine) -> None:
    plain = {"id": "x", "function": {"name": "f", "arguments": "{}"}}
    nulls = {**plain, "type": None, "custom": None, "function": {**plain["function"], "description": None}}
    prompts = []
    for call in (plain, nulls):
        messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]
        assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
        prompts.append(prompt_of(engine))
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "refusal": "No."},
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": "No.", "refusal": None, "annotations": [{"type": "url_citation"}], "audio": None},
    ],
)
def test_a_refusal_is_what_was_said(http: httpx.Client, engine: FakeEngine, message: dict[str, Any]) -> None:
    messages = [USER, {"role": "assistant", **message}, USER]
    answer = http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 200, answer.text
    assert "assistant: No.\n" in prompt_of(engine)


ALLOWED: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}
FLAT: Any = {"mode": "auto", "tools": [{"type": "function", "name": "f"}]}


@pytest.mark.parametrize(
    ("choice", "mode"),
    [
        ({"type": "allowed_tools", "allowed_tools": ALLOWED}, "required"),
        ({"type": "allowed_tools", "allowed_tools": FLAT}, "auto"),
        ({"type": "allowed_tools", **FLAT}, "auto"),
        ({"type": "allowed_tools", **ALLOWED}, "required"),
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "function", "function": {"name": "f"}}, "f"),
    ],
)
def test_the_choice_of_tools_has_the_forms_of_both_apis(choice: Any, mode: str) -> None:
    g = {**F, "function": {"name": "g"}}
    chat = ChatCompletionRequest.model_validate({"messages": [USER], "tools": [F, g], "tool_choice": choice})
    asked = {"input": "Hi", "tools": [F, g], "tool_choice": choice}
    body = ResponsesRequest.model_validate(asked)
    of_response = to_chat(body, [USER], callable_tools(body.tools))
    for body in (chat, of_response):
        if mode == "f":
            assert isinstance(body.tool_choice, NamedToolChoice) and body.tool_choice.function.name == "f"
        else:
            assert (body.tool_choice, list(body.chosen_tools), len(body.tools or ())) == (mode, ["f"], 1)


def test_template_options_reach_the_template(client: openai.OpenAI, engine: FakeEngine) -> None:
    chat(client, extra_body={"chat_template_kwargs": {"shout": True}, "add_generation_prompt": False})
    assert prompt_of(engine) == "user: Hi\nLOUD "


def test_the_last_message_can_be_continued(client: openai.OpenAI, engine: FakeEngine) -> None:
    messages = [USER, {"role": "assistant", "content": "I think"}]
    chat(client, messages=messages, extra_body={"continue_final_message": True})
    assert prompt_of(engine) == "user: Hi\nassistant: I think"


@pytest.mark.parametrize("nothing", [{}, {"content": None}, {"content": None, "tool_calls": None}, {"content": ""}])
def test_a_message_of_the_assistant_may_be_empty(
    client: openai.OpenAI, engine: FakeEngine, nothing: dict[str, Any]
) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", **nothing},
        {"role": "user", "content": "Well?"},
    ]
    chat(client, messages=messages)
    assert prompt_of(engine) == "user: Hi\nassistant: \nuser: Well?\nassistant:"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "The chat template refuses these messages: No such"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role should have at least 1 character"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is required."),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content should be a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "supplied: messages[0].mood"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function is required"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "only messages of the assistant have"),
        ({"top_logprobs": 2}, "top_logprobs is only allowed when logprobs is true"),
        ({"logprobs": True, "top_logprobs": 21}, "20 log-probabilities of a position here (--max-logprobs), got 21."),
        ({"logprobs": True, "top_logprobs": 10**9}, "top_logprobs"),
        ({"max_completion_tokens": 9000}, "max_completion_tokens is 9000, but the prompt has"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs must not set tokenize"),
        ({"max_completion_tokens": 0}, "max_completion_tokens should be greater than or equal to 1"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "exclude each other"),
        ({"tools": [F, F], "tool_choice": "required"}, "tools must have different names"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "names 'g', which is not in"),
        ({"tools": [F], "tool_choice": {"type": "custom", "name": "f"}}, "names 'f' as custom, which it is not"),
        *(
            ({"tools": [F], "tool_choice": wrong}, '{"name": ...}}, {"type": "custom", "custom": {"name": ...}} or')
            for wrong in (
                "any",
                3,
                {"type": "function"},
                {"type": "custom"},
                {"type": "custom", "custom": {"name": "f"}, "function": {"name": "f"}},
                {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}},
                {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            )
        ),
        (
            {"tools": [F], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [G]}},
            "names 'g', which is not in",
        ),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "audio of messages is not built; send what"),
        ({"tools": [F], "tool_choice": "required", "guided_regex": "a"}, "guided_regex and tool_choice exclude"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"name": "f"}]},
            'tools[0].type is required: a tool is {"type": "function", "function": {"name": ...,',
        ),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].function is required: a tool is {"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name is required."),
        (
            {"tools": [{**F, "function": {"name": "f", "parameters": {"not": {}}}}], "tool_choice": "required"},
            "tools[0].function.parameters cannot be followed: Unsatisfiable",
        ),
        (
            {"tools": [{**F, "function": {"name": "f", "parameters": {"type": "array"}}}], "tool_choice": "required"},
            "tools[0].function.parameters must describe an object, not 'array'",
        ),
        ({"response_format": {"type": "json_schema"}}, 'type json_schema needs "json_schema": {"name": ...'),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
            "response_format.json_schema goes with type json_schema, and only with it.",
        ),
        (
            {"response_format": {"type": "text", "schema": {}}},
            "response_format.schema goes with type json_object, and only with it.",
        ),
        ({"response_format": {"type": "mood"}}, "response_format.type should be 'text', 'json_object'"),
        ({"response_format": {"type": "structural_tag"}}, "needs either format or structures and triggers"),
        (
            {"response_format": {"type": "text", "triggers": []}},
            "response_format.triggers goes with type structural_tag",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "x"}}},
            "response_format cannot be read: format.type is one of const_string, ",
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [{"begin": "<"}], "triggers": ["<"]}},
            "response_format cannot be read: structures[0] has no schema.",
        ),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag cannot be read: it has no"),
        (
            {"structured_outputs": {"structural_tag": "{"}},
            "structured_outputs.structural_tag cannot be read: Expecting",
        ),
        ({"functions": [{}]}, "functions is not a field here: tools takes functions."),
        ({"documents": [{"text": "a"}]}, 'chat_template_kwargs {"documents": [...]} gives them to the chat template'),
        ({"chat_template": "x"}, "this server takes no chat_template from requests: start it with --trust-request-"),
        ({"enable_thinking": False}, 'did you mean chat_template_kwargs {"enable_thinking": ...}?'),
        (
            {"structured_outputs": {"regex": "(a"}},
            'followed: the regular expression "(a" cannot be read: unclosed group.',
        ),
        ({"structured_outputs": {"mood": 1}}, "supplied: structured_outputs.mood"),
        ({"structured_outputs": {}}, "structured_outputs needs exactly one of json, regex, choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "got regex and choice"),
        ({"structured_outputs": {"json": {}}, "guided_regex": "a"}, "structured_outputs and guided_regex exclude each"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice exclude each other"),
        ({"guided_regex": "(?=a)"}, "guided_regex cannot be followed: "),
        ({"guided_json": "{"}, "guided_json cannot be read: "),
        ({"guided_grammar": "start: nobody"}, 'guided_grammar cannot be followed: at 1(8): unknown name: "nobody"'),
        ({"structural_tag": "{"}, "structural_tag cannot be read: Expecting"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json cannot be followed: Unsatisfiable"),
    ],
)
def test_what_is_wrong_with_a_conversation_is_said(http: httpx.Client, fields: dict[str, Any], message: str) -> None:
    response = http.post("/v1/chat/completions", json={"messages": [USER], **fields})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


DISTINCT = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
OF_CHATS = {"type": "json_schema", "json_schema": {"name": "a", "schema": DISTINCT}}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"response_format": OF_CHATS}, "response_format.json_schema.schema"),
        ("/v1/chat/completions", {"guided_json": DISTINCT}, "guided_json"),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": DISTINCT}}},
            "text.format",
        ),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": DISTINCT}}}, "output_config"),
    ],
)
def test_options_of_structured_outputs_apply_to_the_schema_of_another_field(
    http: httpx.Client, path: str, body: dict[str, Any], field: str
) -> None:
    prompt = {"input": "Hi"} if path == "/v1/responses" else {"messages": [USER], "max_tokens": 8}
    asked = prompt | body
    assert http.post(path, json=asked).status_code == 200
    options = {"final_check": "refuse", "json_object": False}
    refused = http.post(path, json=asked | {"structured_outputs": options})
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message.startswith(field)
    assert "has uniqueItems, which a grammar cannot enforce" in message


def test_an_error_of_the_prompt_names_the_messages(http: httpx.Client) -> None:
    long = {"role": "user", "content": "x" * 5000}
    error = http.post("/v1/chat/completions", json={"messages": [long]}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_values_that_ask_for_nothing_are_taken(http: httpx.Client) -> None:
    idle = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "functions": None,
        "top_logprobs": 0,
        "structural_tag": None,
        "echo": False,
        "vllm_xargs": {},
        "truncation_side": "left",
        "stream_interval": 1,
        "return_prompt_text": False,
        "session_id": None,
        "repetition_detection": None,
        "media_io_kwargs": None,
        "audio": None,
        "user": "me",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "store": False,
        "modalities": ["text"],
    }
    assert http.post("/v1/chat/completions", json={"messages": [USER], **idle}).status_code == 200


def test_log_probabilities_are_of_the_tokens_that_are_named(http: httpx.Client, engine: FakeEngine) -> None:
    body = {"messages": [USER], "logprobs": True, "top_logprobs": 2, "logprob_token_ids": [65, 66, 67]}
    answer = http.post("/v1/chat/completions", json={**body, "max_tokens": 1, "return_tokens_as_token_ids": True})
    [entry] = answer.json()["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["logprob"]) for one in entry["top_logprobs"]] == [
        (entry["token"], -0.5), *((f"token_id:{id}", -1.0) for id in (65, 66, 67)),
    ]  # fmt: skip
    assert (engine.seen[-1][1].logprobs, engine.seen[-1][1].logprob_token_ids) == (0, [65, 66, 67])
    for number in (0, 1):  # completions have log-probabilities with 0 too
        whole = http.post(
            "/v1/completions", json={"prompt": "a", "logprobs": number, "logprob_token_ids": [65], "max_tokens": 1}
        )
        [top] = whole.json()["choices"][0]["logprobs"]["top_logprobs"]
        assert sorted(top.values()) == [-1.0, -0.5]
    for fields in ({"logprob_token_ids": [300]}, {"logprob_token_ids": [1] * 129}, {"logprobs": False}):
        refused = http.post("/v1/chat/completions", json=body | fields | {"top_logprobs": 0})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprob_token_ids"), refused.text


def test_a_session_is_named_in_the_body_or_by_a_header(http: httpx.Client, engine: FakeEngine) -> None:
    for path, body in {
        "/v1/chat/completions": {"messages": [USER]},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": [USER], "max_tokens": 4, "model": "alias"},
    }.items():
        assert http.post(path, json=body, headers={"X-Session-ID": "mine"}).status_code == 200
        assert engine.seen[-1][2]["session"] == "mine"
        if path != "/v1/messages":
            named = http.post(path, json={**body, "session_id": "other"}, headers={"X-Session-ID": "mine"})
            assert named.status_code == 200 and engine.seen[-1][2]["session"] == "other"
        http.post(path, json=body)
        assert engine.seen[-1][2]["session"] is None
        refused = http.post(path, json=body, headers={"X-Session-ID": "s" * 1025})
        assert refused.status_code == 400 and "X-Session-ID must have 1024 characters at most" in refused.text


def test_a_schema_may_stand_beside_json_object(http: httpx.Client, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    grammars = []
    for form in (
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        {"type": "json_object"},
    ):
        answer = http.post("/v1/chat/completions", json={"messages": [USER], "response_format": form})
        assert answer.status_code == 200, answer.text
        grammars.append(engine.seen[-1][1].grammar)
    assert grammars[0] == grammars[1] != grammars[2]


BEGUN = {"role": "assistant", "content": [{"type": "text", "text": "Once "}, {"type": "text", "text": "upon"}]}


@pytest.mark.parametrize(("last", "echoed"), [(BEGUN, "Once upon"), ({**BEGUN, "content": "It"}, "It"), (USER, "")])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"continue_final_message": True, "add_generation_prompt": False}])
def test_an_echo_is_the_last_message_if_it_is_the_assistants(
    client: openai.OpenAI, last: Any, echoed: str, fields: dict[str, Any]
) -> None:
    known, more = {"n": fields.get("n", 1)}, {key: value for key, value in fields.items() if key != "n"}
    asked: Any = {"model": MODEL, "messages": [USER, last], **known, "extra_body": {"echo": True, **more}}
    plain: Any = {**asked, "extra_body": more}
    expected = [echoed + (one.message.content or "") for one in client.chat.completions.create(**plain).choices]
    assert [one.message.content for one in client.chat.completions.create(**asked).choices] == expected
    texts = [""] * len(expected)
    for chunk in client.chat.completions.create(**asked, stream=True):
        for one in chunk.choices:
            texts[one.index] += one.delta.content or ""
    assert texts == expected


@pytest.mark.parametrize("role", ["ipython", "critic", "Rückfrage"])
def test_any_role_reaches_the_template(http: httpx.Client, engine: FakeEngine, role: str) -> None:
    messages = [USER, {"role": role, "content": "x"}]
    for path, body in (("/v1/chat/completions", {}), ("/tokenize", {})):
        assert http.post(path, json={"messages": messages, **body}).status_code == 200
    assert f"{role}: x\n" in engine.tokenizer.decode(engine.seen[-1][0])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_completion_tokens": 9000}, "max_completion_tokens"),
        ({"max_tokens": 9000}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_errors_name_the_field_that_was_sent(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    assert http.post("/v1/chat/completions", json=body).json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}, "prompt_cache_retention": "24h"}, 200),
        ({"prompt_cache_options": {"mode": "explicit"}}, 400),
        ({"prompt_cache_retention": "1h"}, 400),
    ],
)
def test_what_asks_nothing_of_the_cache_is_taken(
    http: httpx.Client, path: str, fields: dict[str, Any], status: int
) -> None:
    messages = "input" if path == "/v1/responses" else "messages"
    body = {messages: [{"role": "user", "content": "Hi"}], **fields}
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert status == 200 or answer.json()["error"]["param"] in fields


FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
NULLS: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "required": None}, "new": None}
SCHEMA_OF_A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
SCHEMA_WITH_NULLS = {**SCHEMA_OF_A, "required": None, "properties": {"a": {"type": "string", "enum": None}}}
CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
CLEAR = {"type": "clear_thinking_20251015"}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", **fields}]}


def form(schema: Any, beside: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, **fields}, **beside}}


@pytest.mark.parametrize(
    ("path", "fields", "nulls"),
    [
        (CHAT, {}, {"new": None}),
        (CHAT, {"prompt_cache_options": {}}, {"prompt_cache_options": {"mode": None, "ttl": None}}),
        (CHAT, tool(function=FUNCTION), tool(function=NULLS, new=None)),
        (
            CHAT, form(SCHEMA_OF_A, {}),
            form(SCHEMA_WITH_NULLS, {"schema": None, "strict": None}, name=None, description=None, strict=None, a=None),
        ),
        (RESPONSES, tool(**FUNCTION), tool(**NULLS, **{"async": None})),
        (RESPONSES, tool(**FUNCTION), tool(function=NULLS, custom=None)),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, {"thinking": {"type": "adaptive", "new": None}, "new": None}),
        (
            MESSAGES, {"context_management": {"edits": [CLEAR]}},
            {"context_management": {"edits": [{**CLEAR, "keep": None}]}},
        ),
    ],
)  # fmt: skip
def test_fields_that_are_null_ask_for_nothing(
    http: httpx.Client, engine: FakeEngine, path: str, fields: Any, nulls: Any
) -> None:
    body: dict[str, Any] = {"seed": 1, "input": "Hi"} if path == "responses" else {"messages": [USER], "max_tokens": 9}
    for one in (fields, nulls):
        answer = http.post(f"/v1/{path}", json=body | one)
        assert answer.status_code == 200, answer.text
    (prompt, params, _), (other, others, _) = engine.seen[-2:]
    assert (prompt, params.grammar, params.max_tokens) == (other, others.grammar, others.max_tokens)
    wrong = http.post(f"/v1/{path}", json={**body, "new": 1})
    assert wrong.status_code == 400 and "new" in wrong.json()["error"]["message"]
