"""Tools and structured answers of a real server, through the real `openai` client."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.e2e.server import MODEL, Server, running_server
from tests.schemas import chained_schema, random_schema

pytestmark = pytest.mark.slow

QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris? Answer as JSON."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 3, 7]}},
            "required": ["city", "days"],
        },
    },
}
FORMATS = jsonschema.FormatChecker(("ipv4", "uuid"))


@FORMATS.checks("date", ValueError)
def _is_date(value: object) -> bool:
    """As RFC 3339 has it: with a year 0, which Python's calendar lacks, and which is a leap year as 2000 is."""
    return not isinstance(value, str) or bool(datetime.date.fromisoformat(re.sub("^0000", "2000", value)))


class Weather(pydantic.BaseModel):
    sky: Literal["clear", "cloudy", "rain"]
    celsius: int = pydantic.Field(ge=-50, le=60)
    places: list[Literal["Paris", "Rome"]] = pydantic.Field(max_length=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(
        tmp_path_factory.mktemp("tools"), "--max-model-len", "4096", "--max-num-seqs", "64", "--check-invariants",

    ) as server:  # fmt: skip
        yield server


@pytest.mark.long
def test_answers_are_parsed_into_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Weather, temperature=0)
    weather = answer.choices[0].message.parsed
    assert isinstance(weather, Weather)
    tools = [openai.pydantic_function_tool(Weather)]
    answer = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, tools=tools, tool_choice="required", temperature=0, parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)


@pytest.mark.long
@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_object"}, "max_tokens": 60},
        {"extra_body": {"structured_outputs": {"regex": "[a-z]{3,9}( [a-z]{3,9}){2}"}}},
        {"extra_body": {"guided_choice": ["rain", "sun"]}, "logprobs": True, "top_logprobs": 2},
        {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "n": 2},
        {"tools": [WEATHER], "max_tokens": 60},
        {"tools": [WEATHER], "tool_choice": "none", "max_tokens": 20},
    ],
)
def test_a_streamed_answer_equals_the_whole_one(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0.7, "seed": 4, **asked}
    whole = client.chat.completions.create(**fields)
    found: dict[int, dict[str, Any]] = {}
    for chunk in client.chat.completions.create(**fields, stream=True):
        for part in chunk.choices:
            state = found.setdefault(part.index, {"content": "", "calls": [], "reason": None})
            state["content"] += part.delta.content or ""
            state["reason"] = part.finish_reason or state["reason"]
            for call in part.delta.tool_calls or ():
                if call.id:
                    state["calls"].append([call.function.name, ""])
                state["calls"][call.index][1] += call.function.arguments
    for choice in whole.choices:
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
        content = choice.message.content or ""
        assert found[choice.index] == {"content": content, "calls": calls, "reason": choice.finish_reason}
        for name, arguments in calls:
            assert name == "get_weather"
            jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])
    if (wish := asked.get("tool_choice", "none")) != "none":
        expected = "stop" if isinstance(wish, dict) else "tool_calls"  # a call that was named is no surprise
        assert {choice.finish_reason for choice in whole.choices} == {expected}


def ask_at_once(server: Server, bodies: list[dict[str, Any]]) -> list[Any]:
    """The only choice of each chat, in their order."""

    async def ask_all() -> list[Any]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=280) as client:
            return await asyncio.gather(*(client.chat.completions.create(model=MODEL, **body) for body in bodies))

    return [answer.choices[0] for answer in asyncio.run(ask_all())]


NUMBERS = [6, pytest.param(200, marks=pytest.mark.long)]


@pytest.mark.parametrize("number", NUMBERS)
def test_random_schemas_are_followed(server: Server, number: int) -> None:
    schemas = [random_schema(seed) for seed in range(number)]
    asked: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "JSON."}], "temperature": 0.8 * (i % 2), "seed": i, "max_tokens": 900}
        for i in range(number)
    ]
    for i, schema in enumerate(schemas):
        if i % 3:
            json_schema = {"name": "x", "schema": schema, "strict": True}
            asked[i]["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        else:
            asked[i]["extra_body"] = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    for schema, choice in zip(schemas, ask_at_once(server, asked), strict=True):
        assert choice.finish_reason == "stop", (schema, choice)
        jsonschema.validate(
            json.loads(choice.message.content), schema, jsonschema.Draft202012Validator, format_checker=FORMATS
        )
    server.wait_until_idle()


@pytest.mark.long
@pytest.mark.parametrize("number", NUMBERS)
def test_random_functions_are_called_with_valid_arguments(server: Server, number: int) -> None:
    schemas = [{f"f{i}": random_schema(1000 + i), "other": random_schema(2000 + i)} for i in range(number)]
    asked = [
        {
            "messages": [{"role": "user", "content": "Go."}], "tool_choice": "required", "parallel_tool_calls": False,
            "tools": [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in schemas[i].items()],
            "temperature": 0.8 * (i % 2), "seed": i, "max_tokens": 1000,
            "extra_body": {"truncate_prompt_tokens": 32},  # to read the functions' descriptions would take a minute
        }
        for i in range(number)
    ]  # fmt: skip
    for known, choice in zip(schemas, ask_at_once(server, asked), strict=True):
        assert choice.finish_reason == "tool_calls", (known, choice)
        (call,) = choice.message.tool_calls
        schema = known[call.function.name]
        jsonschema.validate(
            json.loads(call.function.arguments), schema, jsonschema.Draft202012Validator, format_checker=FORMATS
        )
    server.wait_until_idle()


@pytest.mark.long
def test_bad_schemas_are_refused_and_hurt_nobody(server: Server, client: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL, "prompt": "Once", "max_tokens": 200, "temperature": 0, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    pieces = iter(client.completions.create(**asked, stream=True))
    text = next(pieces).choices[0].text
    deep: Any = {"type": "string"}
    for _ in range(110):
        deep = {"type": "array", "items": deep}
    unsatisfiable = {"minimum": 3, "maximum": 1, "type": "integer"}
    for schema in ({"type": "odd"}, {"$ref": "#/nowhere"}, unsatisfiable, deep, chained_schema(5000)):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model=MODEL, messages=QUESTION, max_tokens=5,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            )  # fmt: skip
        assert refused.value.param == "response_format.json_schema.schema"
    text += "".join(chunk.choices[0].text for chunk in pieces)
    assert text == client.completions.create(**asked).choices[0].text
    server.wait_until_idle()


def test_what_no_grammar_holds_is_checked_when_the_answer_ends(server: Server, client: openai.OpenAI) -> None:
    """All that this grammar leaves is ["a","a"], and the schema wants another item among them."""
    same: Any = {"type": "array", "items": {"const": "a"}, "minItems": 2, "maxItems": 2, "contains": {"const": "b"}}

    def ask(final_check: str, **fields: Any) -> Any:
        wanted = {"json": same, "final_check": final_check, "disable_any_whitespace": True}
        return client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=50, extra_body={"structured_outputs": wanted}, **fields
        )

    choice = ask("report").choices[0]
    assert (choice.message.content, choice.finish_reason) == ('["a","a"]', "stop")
    assert choice.stop_reason == "schema_mismatch"
    *_, last = ask("report", stream=True)
    assert last.choices[0].stop_reason == "schema_mismatch"
    with pytest.raises(openai.UnprocessableEntityError, match="does not satisfy its schema"):
        ask("error")
    with pytest.raises(openai.APIError, match="does not satisfy its schema"):
        list(ask("error", stream=True))
    with pytest.raises(openai.BadRequestError, match=r"structured_outputs\.json has contains, which a grammar cannot"):
        ask("refuse")
    server.wait_until_idle()
