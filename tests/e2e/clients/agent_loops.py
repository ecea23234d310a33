"""Loops of agents, as users of each client write them: `python agent_loops.py CLIENT URL...`.

It runs in an environment that holds the client and nothing of Octavo's. The server at each URL plays a model that
follows `plan`: twenty turns of calls, several at once, some of which fail, then an answer. A loop must run every call
once, in order, with its arguments, and see no text but the plan's.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable
from typing import Any

MODEL = "org/fake"
NUM_TURNS = 20
TEXTS = ("Rome", 'né "w" 世界 🎉', "a\nb", "<x> & </x> {} []", "12", "true", "C:\\new\\table", "it's 5% `ok`", "")
FAILURE = "no such place"
Call = tuple[str, dict[str, Any]]


def plan(name: str) -> list[tuple[str, list[Call]]]:
    """Return the turns of an agent: what is said, and the calls. The last one has none."""
    choose = random.Random(name)
    turns = []
    for turn in range(NUM_TURNS):
        calls = []
        for number in range(choose.choice([1, 1, 2, 3])):
            at, tags = choose.choice(TEXTS), choose.sample(TEXTS, choose.randrange(3))
            arguments = {"at": f"{turn}.{number} {at}".rstrip(), "days": choose.randrange(-9, 99), "tags": tags}
            calls.append(("fail" if choose.random() < 0.15 else "look", arguments))
        said = f"Turn {turn} of {name}." if choose.random() < 0.4 else ""
        turns.append((said, calls))
    return [*turns, (f"That was {name}.", [])]


class Tools:
    """The tools of one agent, and what was asked of them."""

    def __init__(self, name: str) -> None:
        self.name, self.seen = name, list[Call]()

    def run(self, tool: str, arguments: dict[str, Any]) -> str:
        """Run a call. Raises `ValueError` if it fails."""
        self.seen.append((tool, arguments))
        if tool == "fail":
            raise ValueError(FAILURE)
        return f"result of {arguments['at']}"

    def result(self, tool: str, arguments: dict[str, Any]) -> str:
        try:
            return self.run(tool, arguments)
        except ValueError as error:
            return f"Error: {error}"

    def check(self, texts: list[str]) -> None:
        """Fail unless all calls were made, in order, and `texts` are what was said, but for empty ones."""
        turns = plan(self.name)
        expected = [call for _, calls in turns for call in calls]
        pairs = zip([*self.seen, None], [*expected, None], strict=False)
        assert self.seen == expected, next((i, *pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        assert [text for text in texts if text] == [said for said, _ in turns if said], texts


PROPERTIES = {
    "at": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}},
}  # fmt: skip
PARAMETERS = {
    "type": "object", "properties": PROPERTIES, "required": list(PROPERTIES), "additionalProperties": False,
}  # fmt: skip
FUNCTIONS = [{"name": name, "description": f"To {name}.", "parameters": PARAMETERS} for name in ("look", "fail")]


def task(name: str) -> str:
    return f"Do the task of agent <{name}>."


def openai_chats(url: str, name: str, is_streamed: bool) -> None:
    import openai

    tools, texts, messages = Tools(name), list[str](), [{"role": "user", "content": task(name)}]
    asked: Any = {
        "model": MODEL,
        "messages": messages,
        "tools": [{"type": "function", "function": f} for f in FUNCTIONS],
    }
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        while True:
            if is_streamed:
                with client.chat.completions.stream(**asked) as stream:
                    message: Any = stream.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**asked).choices[0].message
            texts.append(message.content or "")
            calls = message.tool_calls or []
            sent = [
                {"id": call.id, "type": "function",
                 "function": {"name": call.function.name, "arguments": call.function.arguments}}
                for call in calls
            ]  # fmt: skip
            messages.append({"role": "assistant", "content": message.content, **({"tool_calls": sent} if sent else {})})
            for call in calls:
                found = tools.result(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
            if not calls:
                break
    tools.check(texts)


def openai_responses(url: str, name: str, way: str) -> None:
    """`way`: whole, with items that the client keeps; stream, with previous responses; or kept, in a conversation."""
    import openai

    tools, texts, items = Tools(name), list[str](), [{"role": "user", "content": task(name)}]
    functions = [{"type": "function", "strict": False, **function} for function in FUNCTIONS]
    asked: Any = {"model": MODEL, "tools": functions}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        if way == "kept":
            asked["conversation"] = client.conversations.create().id
        new: list[Any] = list(items)
        while True:
            if way == "stream":
                with client.responses.stream(input=new, **asked) as stream:
                    response = stream.get_final_response()
            else:
                response = client.responses.create(input=items if way == "whole" else new, **asked)
            texts.append(response.output_text)
            calls = [item for item in response.output if item.type == "function_call"]
            new = [
                {"type": "function_call_output", "call_id": call.call_id,
                 "output": tools.result(call.name, json.loads(call.arguments))}
                for call in calls
            ]  # fmt: skip
            items += [*response.output, *new]  # type: ignore[arg-type]
            if way == "stream":
                asked["previous_response_id"] = response.id
            if not calls:
                break
        if way == "kept":
            kept = list(client.conversations.items.list(asked["conversation"], order="asc"))
            num_calls = sum(item.type == "function_call" for item in kept)
            assert num_calls == len(tools.seen) == sum(item.type == "function_call_output" for item in kept)
    tools.check(texts)


def anthropic_messages(url: str, name: str, is_streamed: bool) -> None:
    import anthropic

    tools, texts, messages = Tools(name), list[str](), [{"role": "user", "content": task(name)}]
    functions = [{"name": f["name"], "input_schema": PARAMETERS} for f in FUNCTIONS]
    asked: Any = {"model": MODEL, "max_tokens": 4000, "messages": messages, "tools": functions}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        while True:
            if is_streamed:
                with client.messages.stream(**asked) as stream:
                    answer: Any = stream.get_final_message()
            else:
                answer = client.messages.create(**asked)
            texts.append("".join(block.text for block in answer.content if block.type == "text"))
            messages.append({"role": "assistant", "content": answer.content})
            results: list[Any] = []
            for block in (block for block in answer.content if block.type == "tool_use"):
                result: dict[str, Any] = {"type": "tool_result", "tool_use_id": block.id}
                try:
                    results.append({**result, "content": tools.run(block.name, block.input)})
                except ValueError as error:
                    results.append({**result, "content": str(error), "is_error": True})
            if not results:
                break
            messages.append({"role": "user", "content": results})
    tools.check(texts)


def langchain(url: str, name: str, kind: str) -> None:
    """`kind`: chats, stream, responses or anthropic."""
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model: Any
    if kind == "anthropic":
        model = ChatAnthropic(model=MODEL, base_url=url, api_key="none", max_tokens=4000, max_retries=0)
    else:
        model = ChatOpenAI(
            model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0, use_responses_api=kind == "responses"
        )
    bound, tools, texts = model.bind_tools(FUNCTIONS), Tools(name), list[str]()
    messages: list[Any] = [HumanMessage(task(name))]
    while True:
        if kind == "stream":
            parts = list(bound.stream(messages))
            answer = parts[0]
            for part in parts[1:]:
                answer += part
        else:
            answer = bound.invoke(messages)
        assert not answer.invalid_tool_calls, answer.invalid_tool_calls
        texts.append(answer.text)
        messages.append(answer)
        for call in answer.tool_calls:
            found = tools.result(call["name"], call["args"])
            messages.append(
                ToolMessage(found, tool_call_id=call["id"], status="error" if call["name"] == "fail" else "success")
            )
        if not answer.tool_calls:
            break
    tools.check(texts)


def pydantic_ai(url: str, name: str, kind: str) -> None:
    """`kind`: chats, stream or responses."""
    from pydantic_ai import Agent, ModelRetry
    from pydantic_ai.messages import ModelResponse, TextPart
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider, own = OpenAIProvider(base_url=f"{url}/v1", api_key="none"), Tools(name)
    model = (OpenAIResponsesModel if kind == "responses" else OpenAIChatModel)(MODEL, provider=provider)
    agent = Agent(model, retries=NUM_TURNS * 3)

    @agent.tool_plain(sequential=True)
    def look(at: str, days: int, tags: list[str]) -> str:
        """To look."""
        return own.run("look", {"at": at, "days": days, "tags": tags})

    @agent.tool_plain(sequential=True)
    def fail(at: str, days: int, tags: list[str]) -> str:
        """To fail."""
        try:
            return own.run("fail", {"at": at, "days": days, "tags": tags})
        except ValueError as error:
            raise ModelRetry(str(error)) from None

    async def follow(_: Any, events: Any) -> None:
        async for _ in events:
            pass

    result = asyncio.run(agent.run(task(name), event_stream_handler=follow if kind == "stream" else None))
    parts = [part for one in result.all_messages() if isinstance(one, ModelResponse) for part in one.parts]
    own.check([part.content for part in parts if isinstance(part, TextPart)])


def openai_agents(url: str, name: str, kind: str, is_streamed: bool) -> None:
    """`kind`: chats or responses."""
    import openai
    from agents import (
        Agent,
        ItemHelpers,
        MessageOutputItem,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    tools = Tools(name)

    @function_tool
    async def look(at: str, days: int, tags: list[str]) -> str:
        """To look."""
        return tools.run("look", {"at": at, "days": days, "tags": tags})

    @function_tool(failure_error_function=lambda _, error: f"Error: {error}")
    async def fail(at: str, days: int, tags: list[str]) -> str:
        """To fail."""
        return tools.run("fail", {"at": at, "days": days, "tags": tags})

    async def run() -> Any:
        own = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        model = (OpenAIResponsesModel if kind == "responses" else OpenAIChatCompletionsModel)(MODEL, own)
        agent = Agent(name="a", model=model, tools=[look, fail])
        if is_streamed:
            result: Any = Runner.run_streamed(agent, task(name), max_turns=NUM_TURNS + 2)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, task(name), max_turns=NUM_TURNS + 2)
        await own.close()
        return result

    items = [item for item in asyncio.run(run()).new_items if isinstance(item, MessageOutputItem)]
    tools.check([ItemHelpers.text_message_output(item) for item in items])


Loop = Callable[[str, str], None]
# By client: its loops, which are named.
LOOPS: dict[str, dict[str, Loop]] = {
    "openai": {
        "chats": lambda url, name: openai_chats(url, name, False),
        "chats streamed": lambda url, name: openai_chats(url, name, True),
        "responses": lambda url, name: openai_responses(url, name, "whole"),
        "responses streamed": lambda url, name: openai_responses(url, name, "stream"),
        "responses of a conversation": lambda url, name: openai_responses(url, name, "kept"),
    },
    "anthropic": {
        "messages": lambda url, name: anthropic_messages(url, name, False),
        "messages streamed": lambda url, name: anthropic_messages(url, name, True),
    },
    "openai_agents": {
        "chats": lambda url, name: openai_agents(url, name, "chats", False),
        "chats streamed": lambda url, name: openai_agents(url, name, "chats", True),
        "responses": lambda url, name: openai_agents(url, name, "responses", False),
        "responses streamed": lambda url, name: openai_agents(url, name, "responses", True),
    },
    "langchain": {
        "chats": lambda url, name: langchain(url, name, "chats"),
        "chats streamed": lambda url, name: langchain(url, name, "stream"),
        "responses": lambda url, name: langchain(url, name, "responses"),
        "messages": lambda url, name: langchain(url, name, "anthropic"),
    },
    "pydantic_ai": {
        "chats": lambda url, name: pydantic_ai(url, name, "chats"),
        "chats streamed": lambda url, name: pydantic_ai(url, name, "stream"),
        "responses": lambda url, name: pydantic_ai(url, name, "responses"),
    },
}


def main() -> None:
    client, *urls = sys.argv[1:]
    failed = []
    for place, url in enumerate(urls):
        for kind, loop in LOOPS[client].items():
            name = f"{client} {kind} {place}"
            try:
                loop(url, name)
            except Exception as error:  # a client may raise anything
                failed.append(f"{name}: {type(error).__name__}: {str(error)[:1500]}")
    print("\n\n".join(failed) or f"{len(urls) * len(LOOPS[client])} loops")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
