"""Ollama's routes at the gateway, asked by Ollama's own Python client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import ollama
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from octavo.entrypoints.cli.run import ps, stop
from octavo.errors import OctavoError, RequestError
from octavo.gateway import octavo_commands, ollama_routes
from octavo.gateway.catalogue import Catalogue, ModelEntry
from octavo.gateway.memory_budget import MemoryBudget
from octavo.gateway.models import Models
from octavo.ollama.answers import AnswerTranslator
from octavo.ollama.to_openai import translate
from tests.gateway.fakes import Asked, FakeLaunch, Gateway, fake_servers, gateway, until
from tests.waiting import Clock, virtual_sleep

EVENTS = b"text/event-stream"
CARD = {
    "name": "a", "path": "/models/a", "architecture": "llama", "num_parameters": 134_515_008, "num_layers": 30,
    "hidden_size": 576, "context_length": 8192, "format": "gguf", "quantization": "Q4_1",
    "capabilities": ["completion", "thinking"], "template": "{{ messages }}", "device": "cpu", "num_bytes": 98_362_432,
    "modified_at": "2026-01-02T03:04:05Z", "digest": "ab" * 32,
}  # fmt: skip


class Commands:
    """Stands for `octavo show`, `pull` and `rm`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[tuple[str, ...]] = []
        self.lines: list[dict[str, Any]] = []  # of pull
        self.error: str | None = None
        self.shows = True
        monkeypatch.setattr(octavo_commands, "run_octavo", self.run)
        monkeypatch.setattr(ollama_routes, "run_octavo", self.run)

    async def run(self, *words: str, offline: bool = False) -> AsyncIterator[dict[str, Any]]:
        self.ran.append(words)
        for name in words[2:] if words[0] == "show" and self.shows else ():
            yield {"asked": name, **CARD}
        for line in self.lines if words[0] == "pull" else ():
            yield line
        if self.error is not None:
            raise OctavoError(self.error)


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(monkeypatch)


def chunks(*choices: dict[str, Any], usage: tuple[int, int] = (7, 3)) -> Callable[[Asked], Any]:
    """A server whose stream has these choices, a usage and an end."""

    async def behave(asked: Asked) -> None:
        asked.begin_stream()
        for choice in choices:
            asked.piece(b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n")
        counted = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
        asked.piece(b"data: " + json.dumps({"choices": [], "usage": counted}).encode() + b"\n\ndata: [DONE]\n\n")
        asked.piece(b"")

    return behave


def delta(content: str = "", finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"delta": {"content": content, **more}, "finish_reason": finish_reason}


def client_of(gate: Gateway) -> ollama.AsyncClient:
    return ollama.AsyncClient(str(gate.http.base_url))


def test_a_chat_is_streamed_and_whole(clock: Clock) -> None:
    behave = chunks(
        delta(role="assistant"), delta('say "', reasoning_content="hm"), delta('no"\n'), delta("", "length")
    )

    async def run() -> None:
        async with gateway({"org/m": {"aliases": ["m"]}}, FakeLaunch(behave)) as gate:
            client = client_of(gate)
            messages = [{"role": "user", "content": "Hi", "images": [b"\x89PNG"]}]
            options = {"num_predict": 5, "temperature": 0, "repeat_penalty": 1.1, "num_ctx": 4096, "stop": ["x"]}
            parts = [
                part
                async for part in await client.chat(
                    "hf.co/org/m:latest", messages, stream=True, options=options, think="low", format="json"
                )
            ]
            assert [part.message.content for part in parts] == ['say "', 'no"\n', ""]
            assert [part.message.thinking for part in parts] == ["hm", None, None]
            assert [part.done for part in parts] == [False, False, True]
            assert all(part.model == "hf.co/org/m:latest" and part.created_at for part in parts)
            last = parts[-1]
            assert (last.done_reason, last.prompt_eval_count, last.eval_count) == ("length", 7, 3)
            assert last.total_duration >= last.load_duration >= 0 and last.eval_duration >= 0
            asked = gate.launch.last("org/m").asked[-1].json
            assert asked["model"] == "org/m" and asked["max_tokens"] == 5 and asked["repetition_penalty"] == 1.1
            assert asked["reasoning_effort"] == "low" and asked["response_format"] == {"type": "json_object"}
            image, text = asked["messages"][0]["content"]
            assert image["image_url"]["url"].startswith("data:image/png;base64,iVBOR") and text["text"] == "Hi"
            assert "num_ctx" not in asked and asked["stop"] == ["x"]
            whole = await client.chat("m", messages)
            assert gate.launch.last("org/m").asked[-1].headers["x-octavo-truncation"] == "auto"
            assert (whole.message.content, whole.message.thinking, whole.done) == ('say "no"\n', "hm", True)

    clock.run(run())


def test_a_body_of_many_values_is_refused_before_it_is_parsed_whatever_its_texts_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a, [b], " * 99}], "options": {"seed": 1}}
    monkeypatch.setattr("octavo.ollama.to_openai._MAX_NODES", 4 * 8 + 4)
    assert translate("/api/chat", json.dumps(body).encode()).model == "m"
    monkeypatch.setattr(msgspec.json, "decode", None)
    with pytest.raises(RequestError, match="more than 36 values"):
        translate("/api/chat", json.dumps(body | {"x": [1]}).encode())


@pytest.mark.parametrize("streams", [True, False])
@given(st.lists(st.booleans(), min_size=8, max_size=8))
def test_no_line_is_lost_whether_or_not_the_client_has_to_read_first(streams: bool, may_write: list[bool]) -> None:
    class Client:
        sent = b""

        async def __call__(self, message: Message) -> None:
            self.sent += message.get("body", b"")

        def at_once(self, data: bytes) -> bool:
            may = decisions.pop()
            self.sent += data if may else b""
            return may

    async def run() -> None:
        client = Client()
        body = json.dumps({"model": "a", "prompt": "x", "stream": streams}).encode()
        translator = AnswerTranslator(client, translate("/api/generate", body), 0.0)
        await translator({"type": "http.response.start", "status": 200, "headers": [(b"content-type", EVENTS)]})
        for number in range(8):
            piece = b'data: {"choices": [{"text": "%d"}]}\n\ndata: {"choices"' % number + b": []}\n\n"
            if not translator.at_once(piece):
                await translator({"type": "http.response.body", "body": piece, "more_body": True})
        await translator({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        lines = [json.loads(line) for line in client.sent.splitlines()]
        assert "".join(line.get("response", "") for line in lines) == "01234567" and lines[-1]["done"]
        assert len(lines) == (9 if streams else 1) and (decisions == [] or not streams)

    decisions = may_write[1:]  # the first piece begins the answer
    asyncio.run(run())


def test_chunks_are_written_where_they_are_received(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []
    call = AnswerTranslator.__call__

    async def noted(self: AnswerTranslator, message: Message) -> None:
        kinds.append(message["type"])
        await call(self, message)

    monkeypatch.setattr(AnswerTranslator, "__call__", noted)
    pieces = [asyncio.Event() for _ in range(9)]

    async def behave(asked: Asked) -> None:
        asked.begin_stream()
        for number, event in enumerate(pieces):
            asked.piece(b"data: " + json.dumps({"choices": [delta(str(number))]}).encode() + b"\n\n")
            await event.wait()
        asked.piece(b"data: [DONE]\n\n")
        asked.piece(b"")

    async def run() -> None:
        async with gateway({"a": {}}, FakeLaunch(behave)) as gate:
            found = ""
            async for part in await client_of(gate).chat("a", [{"role": "user", "content": "Hi"}], stream=True):
                found += part.message.content or ""
                if not part.done:
                    pieces[int(found[-1])].set()
            assert found == "012345678"
            assert kinds == ["http.response.start", *["http.response.body"] * 2], "the first chunk, and the end"

    clock.run(run())


def test_a_model_that_cannot_think_is_not_asked_to(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CARD, "capabilities", ["completion"])

    async def run() -> None:
        async with gateway({"a": {}}, FakeLaunch(chunks(delta("x", "stop")))) as gate:
            asked = {"model": "a:latest", "prompt": "Hi", "stream": False}
            refused = await gate.http.post("/api/generate", json=asked | {"think": True})
            assert refused.status_code == 400
            assert refused.json() == {"error": '"a:latest" does not support thinking'}
            assert (await gate.http.post("/api/generate", json=asked | {"think": False})).status_code == 200

    clock.run(run())


def test_a_card_that_cannot_be_made_is_asked_for_once(clock: Clock, commands: Commands) -> None:
    commands.shows, commands.error = False, "no files"

    async def run() -> None:
        async with gateway({"a": {}}, FakeLaunch(chunks(delta("x", "stop")))) as gate:
            asked = {"model": "a", "prompt": "Hi", "stream": False, "think": True}
            asks = [gate.http.post("/api/generate", json=asked) for _ in range(3)]
            await asyncio.gather(*asks)
            await gate.http.post("/api/generate", json=asked)
            assert len(commands.ran) == 1
            clock.advance(octavo_commands._FAILED_S)
            commands.shows = True
            await gate.http.post("/api/generate", json=asked)
            assert len(commands.ran) == 2 and (await client_of(gate).show("a")).details.parameter_size == "134.5M"

    clock.run(run())


def test_calls_of_tools_are_whole_and_their_results_find_them(clock: Clock) -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, "id": f"x{index}", "function": function}]}

    behave = chunks(
        delta(**call(0, name="f", arguments='{"city": "')), delta(**call(0, arguments='Köln"}')),
        delta(**call(1, name="g", arguments="{}")), delta(**call(2, name="h", arguments='{"cut')),
        delta("", "tool_calls"),
    )  # fmt: skip

    async def run() -> None:
        async with gateway({"a": {}}, FakeLaunch(behave)) as gate:
            client = client_of(gate)

            def f(city: str) -> str:
                """Say the weather.

                Args:
                    city: Where.
                """
                return city

            found = await client.chat("a", [{"role": "user", "content": "Weather?"}], tools=[f])
            calls = [(one.function.name, one.function.arguments) for one in found.message.tool_calls or ()]
            assert calls == [("f", {"city": "Köln"}), ("g", {})]
            assert found.done_reason == "stop"
            results = [{"role": "tool", "tool_name": name, "content": name} for name in ("g", "f")]
            await client.chat("a", [found.message, *results])
            first, *answers = gate.launch.last("a").asked[-1].json["messages"]
            ids = {one["function"]["name"]: one["id"] for one in first["tool_calls"]}
            assert json.loads(first["tool_calls"][0]["function"]["arguments"]) == {"city": "Köln"}
            assert [one["tool_call_id"] for one in answers] == [ids["g"], ids["f"]]
            (tool,) = gate.launch.last("a").asked[0].json["tools"]
            assert tool["function"]["parameters"]["properties"]["city"]["type"] == "string"

    clock.run(run())


def test_texts_are_generated_from_prompts_raw_prompts_and_gaps(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        is_chat = asked.target == "/v1/chat/completions"
        await chunks(delta("one", "stop") if is_chat else {"text": "two", "finish_reason": "stop"})(asked)

    async def run() -> None:
        async with gateway({"a": {}}, FakeLaunch(behave)) as gate:
            client = client_of(gate)
            assert (await client.generate("a", "Hi", system="Be brief.", format={"type": "object"})).response == "one"
            asked = gate.launch.last("a").asked
            assert [one["role"] for one in asked[-1].json["messages"]] == ["system", "user"]
            assert asked[-1].json["response_format"]["json_schema"]["schema"] == {"type": "object"}
            assert (await client.generate("a", "def f(", suffix="return x")).response == "two"
            assert asked[-1].json["suffix"] == "return x"
            async for part in await client.generate("a", "<s>Hi", raw=True, stream=True):
                assert part.response in ("two", "")
            assert asked[-1].json["prompt"] == "<s>Hi" and "suffix" not in asked[-1].json

    clock.run(run())


def test_texts_become_vectors(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        data = [{"index": i, "embedding": [float(i), 0.5]} for i in (1, 0)][: 2 if "b" in asked.json["input"] else 1]
        asked.reply(json.dumps({"data": data, "usage": {"prompt_tokens": 4}}).encode())

    async def run() -> None:
        async with gateway({"a": {}}, FakeLaunch(behave)) as gate:
            client = client_of(gate)
            found = await client.embed("a", ["a", "b"], dimensions=2)
            assert found.embeddings == [[0.0, 0.5], [1.0, 0.5]] and found.prompt_eval_count == 4
            asked = gate.launch.last("a").asked
            assert asked[-1].json == {
                "model": "a", "input": ["a", "b"], "truncate_prompt_tokens": -1, "dimensions": 2,
            }  # fmt: skip
            assert (await client.embed("a", [])).embeddings == []
            assert (await client.embeddings("a", "x")).embedding == [1.0, 0.5]
            await client.embed("a", "x", truncate=False)
            assert "truncate_prompt_tokens" not in asked[-1].json

    clock.run(run())


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (
            "chat",
            {"model": "a", "messages": [{"role": 3}]},
            400,
            "messages[0].role should be a string, got an integer.",
        ),
        ("chat", {"model": "a", "messages": [{}]}, 400, "messages[0].role is required."),
        ("chat", {"messages": []}, 400, "model is required."),
        ("show", {"model": [1]}, 400, "model should be a string, got a list."),
        ("chat", {"model": "nothing", "messages": [{"role": "user", "content": "x"}]}, 404, "nothing"),
        ("chat", {"model": "a", "messages": [{"role": "user"}], "options": {"mirostat": 2}}, 400, "options.mirostat"),
        ("generate", {"model": "a", "prompt": "x", "context": [1]}, 400, "/api/chat"),
        ("generate", {"model": "a", "prompt": "x", "template": "{{ .Prompt }}"}, 400, "template"),
        ("generate", {"model": "a", "prompt": "x", "keep_alive": "5 minutes"}, 400, "5m"),
        ("generate", {"model": "a", "prompt": "x", "format": "xml"}, 400, "format"),
        ("create", {"model": "a"}, 404, "docs/gateway.md"),
        ("pull", {"model": "a"}, 403, "catalogue"),
        ("tags", {}, 405, "POST"),
        ("nothing", {}, 404, "/api/nothing"),
    ],
)
def test_what_cannot_be_done_is_said_in_ollamas_form(
    clock: Clock, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    async def run() -> None:
        async with gateway({"a": {}}) as gate:
            response = await gate.http.post(f"/api/{path}", json=body)
            assert response.status_code == status and says in response.json()["error"]
            assert gate.launch.begun == []

    clock.run(run())


def test_errors_have_their_status_before_the_answer_and_a_line_within_it(clock: Clock) -> None:
    async def refuse(asked: Asked) -> None:
        asked.reply(b'{"error": {"message": "too \\"long\\"", "code": 1}}', 400)

    async def break_off(asked: Asked) -> None:
        asked.begin_stream()
        asked.piece(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n')
        asked.die()

    async def run() -> None:
        async with fake_servers(refuse, break_off) as (first, second):
            models = {"a": {"addresses": [first.address]}, "b": {"addresses": [second.address]}}
            async with gateway(models, api_key=["key"]) as gate:
                with pytest.raises(ollama.ResponseError, match="API key"):
                    await client_of(gate).list()
                client = ollama.AsyncClient(str(gate.http.base_url), headers={"Authorization": "Bearer key"})
                messages = [{"role": "user", "content": "x"}]
                with pytest.raises(ollama.ResponseError, match='too "long"') as caught:
                    await client.chat("a", messages)
                assert caught.value.status_code == 400
                parts = await client.chat("b", messages, stream=True)
                assert (await anext(parts)).message.content == "a"
                with pytest.raises(ollama.ResponseError, match="lost amid the answer"):
                    await anext(parts)
                with pytest.raises(ollama.ResponseError, match="lost amid the answer"):
                    await client.chat("b", messages)

    clock.run(run())


STREAMED_NONSENSE = (
    b'{"choices": "\xff"}', b"7", b"null", b'{"choices": 7}', b'{"choices": [7]}', b'{"choices": [{"delta": "x"}]}',
    b'{"choices": [{"delta": {"content": 7}}]}', b'{"choices": [{"delta": {"tool_calls": [7]}}]}',
    b'{"choices": [{"delta": {"tool_calls": [{"index": {}}]}}]}', b'{"choices": [{"logprobs": {"tokens": 7}}]}',
    b'{"usage": 7}', b'{"usage": {"prompt_tokens": "x"}}',
)  # fmt: skip


def test_a_server_that_answers_nonsense_is_an_error_in_ollamas_form(clock: Clock) -> None:
    nonsense = b""

    async def not_modified(asked: Asked) -> None:
        asked.head(304)

    async def stream(asked: Asked) -> None:
        asked.begin_stream()
        asked.piece(b"data: " + nonsense + b"\n\n")
        asked.piece(b"")

    async def whole(asked: Asked) -> None:
        asked.reply(nonsense)

    async def broken_off(asked: Asked) -> None:
        asked.head(content_type="application/json", content_length="100")
        asked.writer.write(b'{"data')
        await asked.writer.drain()
        asked.die()

    async def run() -> None:
        nonlocal nonsense
        async with fake_servers(not_modified, stream, whole, broken_off) as servers:
            models = {name: {"addresses": [one.address]} for name, one in zip("abcd", servers, strict=True)}
            async with gateway(models) as gate:
                messages = [{"role": "user", "content": "x"}]
                answer = await gate.ask("a", "/api/chat", messages=messages)
                assert answer.status_code == 502 and "status 304" in answer.json()["error"]
                for nonsense in STREAMED_NONSENSE:
                    for streams in (True, False):
                        answer = await gate.ask("b", "/api/chat", messages=messages, stream=streams)
                        assert answer.status_code == 500 and "cannot be read" in answer.json()["error"], nonsense
                for nonsense in (b"7", b"[]", b'{"data": 7}', b'{"data": [7]}', b'{"data": [], "usage": 7}', b"\xff"):
                    answer = await gate.ask("c", "/api/embed", input="x")
                    assert answer.status_code == 502 and answer.json()["error"], nonsense
                chat: dict[str, Any] = {"messages": messages}
                for path, fields in (("chat", chat), ("chat", chat | {"stream": False}), ("embed", {"input": "x"})):
                    answer = await gate.ask("d", f"/api/{path}", **fields)
                    assert answer.status_code == 503 and "its replica was lost" in answer.json()["error"]
                answer = await gate.http.post("/api/chat", content=b'{"model": "\xff"}')
                assert answer.status_code == 400 and "utf-8" in answer.json()["error"]

    clock.run(run())


def test_octavo_ps_and_stop_say_what_runs_and_what_stops(
    clock: Clock, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with gateway({"a": {"aliases": ["x"]}, "b": {}}) as gate:
            at = ["--url", f"{gate.http.base_url}/v1"]
            await gate.ask("a")
            assert await asyncio.to_thread(ps, at) == 0
            rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
            assert [(row[0], row[-1]) for row in rows] == [("a", "s"), ("b", "stopped")]
            assert await asyncio.to_thread(stop, ["x", *at]) == 0
            assert capsys.readouterr().out == "x stops, once its requests have ended.\n"
            await until(lambda: gate.deployment("a").state == "stopped")

    with caplog.at_level("INFO", "octavo.gateway"):
        clock.run(run())
    assert "a: stops, as a client has asked for it" in caplog.messages


@pytest.mark.parametrize(
    ("command", "answer", "says"),
    [
        (ps, b"[1]", "no JSON object"),
        (ps, b'{"choices": []}', "models"),
        (ps, b'{"models": [1]}', "models"),
        (ps, b'{"models": {"a": 1}}', "models"),
        (ps, b'{"models": [{"name": "x", "expires_at": "soon"}]}', "expires_at"),
        (ps, b'{"models": [], "data": [7]}', "data"),
        (stop, b"{}", "done_reason"),
        (stop, b'{"done_reason": "stop"}', "does not unload"),
    ],
)
def test_octavo_ps_and_stop_say_that_a_server_answers_nonsense(
    clock: Clock, capsys: pytest.CaptureFixture[str], command: Any, answer: bytes, says: str
) -> None:
    async def reply(asked: Asked) -> None:
        asked.reply(answer)

    async def run() -> None:
        async with fake_servers(reply) as (server,):
            words = ["--url", server.address] if command is ps else ["x", "--url", server.address]
            assert await asyncio.to_thread(command, words) == 1

    clock.run(run())
    said = capsys.readouterr().err
    assert says in said and said.startswith("octavo: error: ") and said.count("\n") == 1


def test_octavo_ps_lists_what_other_servers_of_the_api_have(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Older servers do not say the context's length."""

    async def reply(asked: Asked) -> None:
        listed = (
            b'{"models": [{"name": "m:latest", "expires_at": "2999-01-01T00:00:00.123456789+02:00", "size": 5000000}]}'
        )
        asked.reply(listed if asked.target == "/api/ps" else b'{"object": "list", "data": null}')

    async def run() -> None:
        async with fake_servers(reply) as (server,):
            assert await asyncio.to_thread(ps, ["--url", server.address]) == 0

    clock.run(run())
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["m:latest", "5", "MB"]


def test_models_are_loaded_kept_and_unloaded_as_clients_say(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {}, "b": {"keep_alive": None}}, FakeLaunch(chunks(delta("x", "stop")))) as gate:
            client = client_of(gate)
            assert (await client.ps()).models == []
            assert (await client.generate("a", keep_alive="10m")).done_reason == "load"
            assert gate.launch.begun == ["a"]
            (running,) = (await client.ps()).models
            assert (running.name, running.context_length, running.size) == ("a", 8192, CARD["num_bytes"])
            assert gate.deployment("a").keep_alive == 600
            await client.chat("a", [{"role": "user", "content": "x"}], keep_alive=-1)
            assert gate.deployment("a").keep_alive is None
            assert (await client.chat("a", [], keep_alive=0)).done_reason == "unload"
            await until(lambda: gate.deployment("a").state == "stopped")
            await client.chat("a", [{"role": "user", "content": "x"}])
            assert gate.deployment("a").keep_alive == 300, "the wish has ended with the model"
            await client.generate("b", "x", keep_alive=0)
            await until(lambda: gate.deployment("b").state == "stopped")

    clock.run(run())


def test_sizes_count_a_model_once_however_many_adapters_it_has(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        async with gateway({"a": {}, "p": {"adapter_of": "a"}, "q": {"adapter_of": "a"}}) as gate:
            await gate.ask("p")
            for listed in ((await client_of(gate).ps()).models, (await client_of(gate).list()).models):
                sizes = {one.model: (one.size, one.details.parent_model) for one in listed}
                assert sizes == {"a": (CARD["num_bytes"], ""), "p": (0, "a"), "q": (0, "a")}
            assert await asyncio.to_thread(ps, ["--url", f"{gate.http.base_url}/v1"]) == 0

    clock.run(run())
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:3] for row in rows] == [["a", "98", "MB"], ["p", "8192", rows[1][2]], ["q", "8192", rows[2][2]]]


def test_the_context_of_a_running_model_is_that_of_its_server(clock: Clock) -> None:
    """--max-model-len may have made it shorter than the model's."""
    body = b"rubbish"

    async def say(asked: Asked) -> None:
        asked.reply(body)

    async def run() -> None:
        nonlocal body
        async with fake_servers(say) as (server,):
            models = {"a": {"addresses": [server.address], "served_model_name": "org/a"}}
            async with gateway(models) as gate:
                for listed, length in (
                    ("rubbish", 0), ({"data": [{"id": "other", "max_model_len": 7}]}, 0),
                    ({"data": [{"id": "org/a"}]}, 0),
                    ({"object": "list", "data": [{"id": "b"}, {"id": "org/a", "max_model_len": 4096}]}, 4096),
                ):  # fmt: skip
                    body = json.dumps(listed).encode()
                    (running,) = (await client_of(gate).ps()).models
                    assert running.context_length == length
                assert {one.target for one in server.asked} == {"/v1/models"}

    clock.run(run())


def test_models_are_listed_and_shown(clock: Clock, commands: Commands) -> None:
    async def elsewhere(asked: Asked) -> None:
        asked.reply(json.dumps({"capabilities": ["vision"], "model_info": {"x": 1}}).encode())

    async def run() -> None:
        async with fake_servers(elsewhere) as (server,):
            models = {"a": {"aliases": ["x"]}, "far": {"addresses": [server.address], "served_model_name": "org/far"}}
            async with gateway(models) as gate:
                client = client_of(gate)
                listed = {one.model: one for one in (await client.list()).models}
                assert set(listed) == {"a", "far", "x"}
                assert listed["x"].size == CARD["num_bytes"] and listed["x"].details.parameter_size == "134.5M"
                found = await client.show("a:latest")
                assert found.capabilities == ["completion", "thinking"] and found.template == CARD["template"]
                assert found.modelinfo["llama.context_length"] == 8192
                assert found.details.quantization_level == "Q4_1"
                assert (await client.show("far")).capabilities == ["vision"]
                assert server.asked[-1].json == {"model": "org/far"}
                assert commands.ran == [("show", "--json", "a")], "a card is made once"
                version = (await gate.http.get("/api/version")).json()["version"]
                assert tuple(map(int, version.split("."))) >= (0, 6, 4), "which editors ask for"
                assert (await gate.http.head("/")).status_code == 200

    clock.run(run())


def test_models_come_with_pulls_and_go_with_deletes(clock: Clock, commands: Commands, tmp_path: Path) -> None:
    here = {"a": ModelEntry(model="/a")}

    async def run() -> None:
        async with gateway({}, FakeLaunch(chunks(delta("x", "stop"))), find_local=lambda: dict(here)) as gate:
            client = client_of(gate)
            with pytest.raises(ollama.ResponseError, match="org/b"):
                await client.generate("org/b", "x")
            commands.lines = [{"status": "pulling f", "digest": "sha256:1", "total": 9, "completed": 3}]
            here["org/b"] = ModelEntry(model="/b")
            progress = [part async for part in await client.pull("hf.co/org/b", stream=True)]
            assert [part.status for part in progress] == ["pulling f", "success"]
            assert (progress[0].total, progress[0].completed) == (9, 3)
            assert commands.ran[-1] == ("pull", "--json", "--", "org/b"), "a name is no flag"
            assert (await client.generate("org/b", "x")).response == "x"
            assert (await client.pull("org/b")).status == "success"
            del here["org/b"]
            assert (await client.delete("org/b")).status == "success"
            assert commands.ran[-1] == ("rm", "--json", "org/b")
            await until(lambda: gate.launch.running("org/b") == 0)
            assert [one.model for one in (await client.list()).models] == ["a"]
            commands.error = "no such thing"
            with pytest.raises(ollama.ResponseError, match="no such thing"):
                async for _ in await client.pull("org/b", stream=True):
                    pass
            page = {"origin": "https://page.example"}
            assert (await gate.http.post("/api/pull", json={"model": "x"}, headers=page)).status_code == 403

    clock.run(run())


def test_folders_are_read_in_threads_and_not_once_for_each_request(clock: Clock) -> None:
    """Else the event loop would wait for the disk."""
    threads, may_end = list[threading.Thread](), threading.Event()

    def find() -> dict[str, ModelEntry]:
        if threading.current_thread() is not threading.main_thread():
            threads.append(threading.current_thread())
            may_end.wait()
        return {"a": ModelEntry(model="/a")}

    async def run() -> None:
        async with gateway({}, FakeLaunch(chunks(delta("x", "stop"))), find_local=find) as gate:
            asks = [asyncio.ensure_future(gate.ask("nobody")) for _ in range(9)]
            asks += [
                asyncio.ensure_future(gate.http.get("/v1/models")),
                asyncio.ensure_future(gate.http.get("/api/tags")),
            ]
            await until(lambda: threads and gate.server.app.num_in_flight == len(asks))
            may_end.set()
            statuses = [(await ask).status_code for ask in asks]
            assert statuses == [404] * 9 + [200] * 2 and len(threads) < 4

    clock.run(run())


@pytest.mark.parametrize("fails", [False, True])
def test_requests_that_waited_for_a_search_that_failed_or_was_cancelled_search_again(fails: bool) -> None:
    async def run() -> None:
        here, num_looks, may_end = dict[str, ModelEntry](), 0, threading.Event()

        def find() -> dict[str, ModelEntry]:
            nonlocal num_looks
            num_looks += 1
            if num_looks > 1:
                return dict(here)
            may_end.wait()
            raise OSError

        models = Models(Catalogue({}), MemoryBudget(None), FakeLaunch(), replica_timeout_s=1, find_local=find)
        first = asyncio.ensure_future(models.look_for("a"))
        await until(lambda: num_looks)
        others = [asyncio.ensure_future(models.look_for("a")) for _ in range(3)]
        await asyncio.sleep(0)  # they wait for the first
        here["a"] = ModelEntry(model="/a")
        if fails:
            may_end.set()
        else:
            first.cancel()
        with pytest.raises(OSError if fails else asyncio.CancelledError):
            await first
        await asyncio.gather(*others)
        may_end.set()
        assert models.find("a").name == "a" and num_looks == 2

    asyncio.run(run())


def test_a_cold_start_counts_as_loading(clock: Clock) -> None:
    launch = FakeLaunch(chunks(delta("x", "stop")))

    async def run() -> None:
        launch.may_start.clear()
        async with gateway({"a": {}}, launch) as gate:
            asking = asyncio.ensure_future(client_of(gate).generate("a", "x"))
            await until(lambda: launch.begun)
            await virtual_sleep(3)
            launch.may_start.set()
            found = await asking
            assert found.load_duration >= 3e9 and found.total_duration >= found.load_duration

    clock.run(run())


def test_ollamas_requests_need_no_content_type(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {}}, FakeLaunch(chunks(delta("x", "stop")))) as gate:
            body = b'{"model": "a", "prompt": "x", "stream": false}'
            response: httpx.Response = await gate.http.post("/api/generate", content=body)
            assert response.json()["response"] == "x"
            assert response.headers["content-type"].startswith("application/json")

    clock.run(run())


def test_the_first_request_of_ollamas_command_line_is_answered(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {}}, FakeLaunch(chunks())) as gate:
            assert (await gate.http.get("/")).text == "Ollama is running"
            assert (await gate.http.head("/")).status_code == 200
            assert (await gate.http.get("/", headers={"Accept": "text/html"})).json() == {"status": "ok"}

    clock.run(run())
