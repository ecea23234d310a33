"""The clients that agents use, as they are, against a real server: Responses, Messages, background work and batches."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from tests.e2e.server import MODEL, Server, running_server
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 3, 7]}},
    "required": ["city", "days"],
}


class Weather(pydantic.BaseModel):
    """The weather somewhere."""

    city: str = pydantic.Field(max_length=20)
    celsius: int = pydantic.Field(ge=-50, le=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("agents")
    with running_server(
        folder, "--max-model-len", "2048", "--max-num-seqs", "16", "--check-invariants", "--response-store",
        str(folder / "store.db"), "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_the_three_apis_say_the_same(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a river."}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=12)
    said = chat.choices[0].message.content
    asked: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(input="Name a river.", instructions="Be brief.", **asked)
    with client.responses.stream(input="Name a river.", instructions="Be brief.", **asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    of_claude: Any = {"model": MODEL, "max_tokens": 12, "system": "Be brief.", "messages": messages[1:]}
    with claude.messages.stream(**of_claude, extra_body={"temperature": 0}) as events:
        streamed = "".join(events.text_stream)
    message = claude.messages.create(**of_claude, extra_body={"temperature": 0})
    assert whole.output_text == text == streamed == message.content[0].text == said  # type: ignore[union-attr]
    assert whole.usage is not None and chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        chat.usage.prompt_tokens, chat.usage.completion_tokens
    )  # fmt: skip
    assert claude.messages.count_tokens(model=MODEL, system="Be brief.", messages=messages[1:]).input_tokens == (
        chat.usage.prompt_tokens
    )


@pytest.mark.long
def test_tools_and_formats_are_followed(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    parsed = client.responses.parse(model=MODEL, input="Weather in Paris?", text_format=Weather, temperature=0)
    assert isinstance(parsed.output_parsed, Weather)
    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
    made = client.responses.create(model=MODEL, input="Weather?", tools=[tool], tool_choice="required", temperature=0)
    calls = [item for item in made.output if item.type == "function_call"]
    assert calls and all(json.loads(call.arguments)["city"] in ("Paris", "Rome") for call in calls)
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "Rain"} for call in calls]
    again = client.responses.create(model=MODEL, previous_response_id=made.id, input=results, max_output_tokens=8)
    assert again.output_text

    tools: Any = [{"name": "get_weather", "input_schema": SCHEMA}]
    question: Any = [{"role": "user", "content": "Weather?"}]
    message = claude.messages.create(
        model=MODEL, max_tokens=100, messages=question, tools=tools, tool_choice={"type": "tool", "name": "get_weather"}
    )
    (call,) = message.content
    assert isinstance(call, anthropic.types.ToolUseBlock) and call.input["days"] in (1, 3, 7)
    output: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Rain"}]}]
    turns: Any = [*question, {"role": "assistant", "content": message.content}, {"role": "user", "content": output}]
    assert claude.messages.create(model=MODEL, max_tokens=8, messages=turns, tools=tools).content


@pytest.mark.long
def test_an_agent_of_openai_runs_with_its_default_model_class(server: Server) -> None:
    agents = pytest.importorskip("agents")
    asked: list[str] = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "Rain"

    async def run() -> list[str]:
        agents.set_tracing_disabled(True)
        own = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        agents.set_default_openai_client(own)
        agent = agents.Agent(
            name="Weatherman", instructions="Use the tool.", model=MODEL, tools=[get_weather],
            model_settings=agents.ModelSettings(
                tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=200
            ),
        )  # fmt: skip
        result = await agents.Runner.run(agent, "Weather in Paris?", max_turns=3)
        streamed = agents.Runner.run_streamed(agent, "Weather in Rome?", max_turns=3)
        kinds = [event.type async for event in streamed.stream_events()]
        formed = agents.Agent(name="Form", model=MODEL, output_type=Weather)
        weather = (await agents.Runner.run(formed, "Weather in Paris?")).final_output
        assert isinstance(weather, Weather) and "raw_response_event" in kinds and streamed.final_output
        await own.close()
        return [str(result.final_output), str(streamed.final_output)]

    assert all(asyncio.run(run())) and len(asked) >= 2


def test_background_work_survives_its_client(client: openai.OpenAI, server: Server) -> None:
    made = client.responses.create(
        model=MODEL, input="Tell a story.", background=True, max_output_tokens=300, extra_body={"ignore_eos": True}
    )
    assert made.status == "queued"
    stopped = client.responses.cancel(made.id)
    assert stopped.status == "cancelled"
    server.wait_until_idle()
    stream = client.responses.create(model=MODEL, input="Hi", background=True, stream=True, max_output_tokens=40)
    first = next(iter(stream))
    assert first.type == "response.created"
    stream.close()
    rest = list(client.responses.retrieve(first.response.id, stream=True, starting_after=first.sequence_number))
    assert [event.sequence_number for event in rest] == list(range(1, len(rest) + 1))
    assert rest[-1].type in ("response.completed", "response.incomplete")
    assert client.responses.retrieve(first.response.id).output_text == rest[-1].response.output_text


def test_a_batch_through_the_client(client: openai.OpenAI) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    lines = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body})
        for i in range(20)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id and len(client.files.content(batch.output_file_id).text.splitlines()) == 20


NUM_QUESTIONS = 40  # that a batch asks again and again


def write_requests(path: Path, number: int) -> None:
    with open(path, "w") as file:
        for i in range(number):
            asked = i % NUM_QUESTIONS
            url, body = "/v1/completions", {"prompt": f"{asked} and", "max_tokens": 2, "temperature": 0}
            if asked % 3 == 1:
                messages = [{"role": "user", "content": f"{asked}"}]
                url, body = "/v1/chat/completions", {"messages": messages, "max_tokens": 1, "temperature": 0}
            file.write(json.dumps({"custom_id": f"r{i}", "method": "POST", "url": url, "body": body}) + "\n")


def run_batch(source: Path, target: Path, num_at_kill: int | None) -> None:
    """Run `octavo run-batch`, and kill it when the output has so many lines more."""
    command = [sys.executable, "-m", "octavo.entrypoints.cli.main", "run-batch", "-i", str(source), "-o", str(target)]
    command += ["--max-model-len", "256", "--max-num-seqs", "32"]
    before = target.read_bytes().count(b"\n") if target.exists() else 0
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        if num_at_kill is not None:

            def is_far_enough() -> bool:
                assert process.poll() is None
                return target.exists() and target.read_bytes().count(b"\n") >= before + num_at_kill

            wait_until(is_far_enough, timeout_s=120)
            process.send_signal(signal.SIGKILL)
        _, said = process.communicate(timeout=300)
        assert num_at_kill is not None or process.returncode == 0, said.decode()


def answers_of(target: Path) -> dict[int, Any]:
    """What each line was answered, by its number."""
    answers: dict[int, Any] = {}
    for line in target.read_bytes().splitlines():
        answer = json.loads(line)
        number, response = int(answer["custom_id"][1:]), answer["response"]
        assert number not in answers and response["status_code"] == 200
        [choice] = response["body"]["choices"]
        answers[number] = choice["text"] if "text" in choice else choice["message"]["content"]
    return answers


@pytest.mark.long
@pytest.mark.parametrize("number", [2 * NUM_QUESTIONS, 5000])
def test_a_batch_that_is_killed_loses_and_repeats_no_line(tmp_path: Path, number: int) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(source, number)
    chosen = random.Random(number)
    for _ in range(3 if number > 1000 else 1):
        run_batch(source, target, chosen.randrange(1, number // 4))
    run_batch(source, target, None)
    answers = answers_of(target)
    assert sorted(answers) == list(range(number))
    # Each question has one right answer, whatever it was asked with: that of a batch which nothing has disturbed.
    write_requests(tmp_path / "once.jsonl", NUM_QUESTIONS)
    run_batch(tmp_path / "once.jsonl", tmp_path / "right.jsonl", None)
    right = answers_of(tmp_path / "right.jsonl")
    assert {i: text for i, text in answers.items() if text != right[i % NUM_QUESTIONS]} == {}
