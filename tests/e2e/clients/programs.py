"""What users of each client write, run against a server: `python programs.py CLIENT URL POOLING_URL`.

It runs in an environment that holds the client and nothing of Octavo's. The server at URL has the default model, that
at POOLING_URL an embedder. A program asserts what its user would rely on.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from pydantic import BaseModel, Field

MODEL = "SmolLM2-135M-Instruct"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
ABOUT = "Ann is 3 years old."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}}


class Person(BaseModel):
    """Who somebody is."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def run_litellm(url: str, pooling: str) -> None:
    import litellm

    for provider, base in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
        asked: Any = {"model": f"{provider}/{MODEL}", "messages": QUESTION, "api_base": base, "api_key": "none"}
        asked |= {"max_tokens": 12, "temperature": 0}
        whole = litellm.completion(**asked).choices[0].message.content
        parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
        assert whole and "".join(parts) == whole and len(parts) > 3, (provider, whole, parts)
        called = litellm.completion(**(asked | {"max_tokens": 100}), tools=[TOOL], tool_choice="required")
        assert called.choices[0].message.tool_calls[0].function.name == "get_weather"
    asked = {"model": f"openai/{MODEL}", "input": "Hi", "api_base": f"{url}/v1", "api_key": "none"}
    assert litellm.responses(**asked, max_output_tokens=16).output[0].content[0].text
    kinds = [event.type for event in litellm.responses(**asked, stream=True)]
    assert kinds.count("response.output_text.delta") > 1 and kinds[-1] == "response.completed"
    for provider in ("openai", "hosted_vllm"):
        found = litellm.embedding(
            model=f"{provider}/{MODEL}", input=["a cat", "a dog"], api_base=f"{pooling}/v1", api_key="none"
        )
        assert len(found.data) == 2
    for provider in ("hosted_vllm", "cohere"):
        found = litellm.rerank(
            model=f"{provider}/{MODEL}", query="cat", documents=["a cat", "a dog"], top_n=2, api_base=pooling,
            api_key="none",
        )  # fmt: skip
        assert sorted(entry["index"] for entry in found.results) == [0, 1]


def run_langchain(url: str, pooling: str) -> None:
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    def chat(**more: Any) -> Any:
        return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_retries=0, **more)

    for model in (
        chat(max_tokens=12), chat(max_tokens=16, use_responses_api=True),
        ChatAnthropic(model=MODEL, base_url=url, api_key="none", max_tokens=12, temperature=0),
    ):  # fmt: skip
        whole = model.invoke("Capital of France?").text
        parts = [chunk.text for chunk in model.stream("Capital of France?")]
        assert whole and "".join(parts) == whole and len(parts) > 3, (whole, parts)
    bound = chat(max_tokens=100).bind_tools([TOOL], tool_choice="any")
    assert bound.invoke("Weather in Paris?").tool_calls[0]["name"] == "get_weather"
    for method in ("json_schema", "function_calling"):
        structured = chat(max_tokens=200).with_structured_output(Person, method=method)
        assert isinstance(structured.invoke(ABOUT), Person)
    assert OpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=8).invoke("Once")
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=f"{pooling}/v1", api_key="none", check_embedding_ctx_length=False
    )  # fmt: skip
    assert len(embeddings.embed_documents(["a cat", "a dog"])) == 2 and embeddings.embed_query("cat")


def run_llama_index(url: str, pooling: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.embeddings.openai import OpenAIEmbedding
    from llama_index.llms.openai_like import OpenAILike

    def model(**more: Any) -> Any:
        settings: Any = {"model": MODEL, "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 12, "temperature": 0}
        return OpenAILike(**settings, **more)

    asked = [ChatMessage(role="user", content="Hi")]
    chat = model(is_chat_model=True)
    whole = chat.chat(asked).message.content
    streamed = list(chat.stream_chat(asked))
    assert whole and streamed[-1].message.content == whole and len(streamed) > 3
    assert model(is_chat_model=False).complete("Once").text
    embedding = OpenAIEmbedding(model_name=MODEL, api_base=f"{pooling}/v1", api_key="none")
    assert len(embedding.get_text_embedding_batch(["a cat", "a dog"])) == 2


def run_instructor(url: str, pooling: str) -> None:
    import anthropic
    import instructor
    import openai

    asked: Any = {"model": MODEL, "response_model": Person, "temperature": 0, "max_tokens": 200}
    asked["messages"] = [{"role": "user", "content": ABOUT}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client: Any = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
        assert isinstance(client.chat.completions.create(**asked), Person)
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"))
    partial = list(client.chat.completions.create_partial(**asked))
    assert len(partial) > 1 and partial[-1].name is not None
    responses: Any = instructor.from_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=instructor.Mode.RESPONSES_TOOLS
    )
    assert isinstance(responses.responses.create(model=MODEL, input=ABOUT, response_model=Person), Person)
    claude: Any = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="none"))
    del asked["temperature"]
    assert isinstance(claude.messages.create(**asked), Person)


def run_pydantic_ai(url: str, pooling: str) -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    def models() -> list[Any]:
        """Made for each event loop, since their connections belong to it."""
        openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
        claude = AnthropicProvider(base_url=url, api_key="none")
        return [
            OpenAIChatModel(MODEL, provider=openai), OpenAIResponsesModel(MODEL, provider=openai),
            AnthropicModel(MODEL, provider=claude),
        ]  # fmt: skip

    async def run() -> None:
        strict: Any = {"model_settings": {"max_tokens": 200, "temperature": 0}}
        for model in models():
            agent = Agent(model, model_settings={"max_tokens": 24})
            assert (await agent.run("Hi")).output
            async with agent.run_stream("Hi") as result:
                assert await result.get_output()
            forms: list[Any] = [Person] if isinstance(model, AnthropicModel) else [Person, NativeOutput(Person)]
            for form in forms:
                assert isinstance((await Agent(model, output_type=form, **strict).run(ABOUT)).output, Person)

    asyncio.run(run())
    for model in models():
        assert Agent(model, model_settings={"max_tokens": 24}).run_sync("Hi").output
        break  # the others' connections would belong to the loop that has ended


def run_cohere(url: str, pooling: str) -> None:
    import cohere

    documents = ["a cat", "a dog"]
    new = cohere.ClientV2(api_key="none", base_url=pooling)
    old = cohere.Client(api_key="none", base_url=pooling)
    ranked = new.rerank(model=MODEL, query="cat", documents=documents, top_n=2).results
    assert ranked[0].relevance_score >= ranked[1].relevance_score
    same = old.rerank(model=MODEL, query="cat", documents=documents, return_documents=True).results
    assert [entry.index for entry in same] == [entry.index for entry in ranked]
    assert same[0].document is not None and same[0].document.text == documents[same[0].index]
    embedded = new.embed(model=MODEL, texts=documents, input_type="search_document", embedding_types=["float"])
    assert embedded.embeddings.float_ is not None and len(embedded.embeddings.float_) == 2


def run_openai_agents(url: str, pooling: str) -> None:
    import openai
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    asked: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "Rain"

    async def run(kind: Any) -> None:
        own = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        model = kind(MODEL, own)
        settings = ModelSettings(max_tokens=200, temperature=0, tool_choice="required", parallel_tool_calls=False)
        agent = Agent(name="a", instructions="Use the tool.", model=model, tools=[get_weather], model_settings=settings)
        before = len(asked)
        assert (await Runner.run(agent, "Weather in Paris?", max_turns=4)).final_output
        streamed = Runner.run_streamed(agent, "Weather in Rome?", max_turns=4)
        assert len([event async for event in streamed.stream_events()]) > 3 and streamed.final_output
        assert len(asked) >= before + 2
        formed = Agent(name="a", model=model, output_type=Person, model_settings=ModelSettings(max_tokens=200))
        assert isinstance((await Runner.run(formed, ABOUT)).final_output, Person)
        await own.close()

    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        asyncio.run(run(kind))


if __name__ == "__main__":
    name, *urls = sys.argv[1:]
    globals()[f"run_{name}"](*urls)
