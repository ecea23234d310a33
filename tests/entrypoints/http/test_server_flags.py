"""Flags of vLLM's server that change what a client meets, and its variables."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.entrypoints.chat.chat_template import render_chat
from octavo.entrypoints.chat.tools import tool_formats
from octavo.entrypoints.http import server_args
from octavo.entrypoints.http.server import _bind, _warn_of_vllm_variables
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.errors import ConfigError
from tests.entrypoints.fake_engine import FakeEngine, serving
from tests.waiting import within

HERE = "tests.entrypoints.http.test_server_flags"
LOOP = "{%% for m in messages %%}{%% for p in %s %%}{{ p.text }}!{%% endfor %%}{%% endfor %%}"
ASKED = {"prompt": "a", "stream": True}


async def add_header(request: Request, call_next: Any) -> Response:
    response: Response = await call_next(request)
    response.headers["x-seen"] = "yes"
    return response


async def fail(request: Request, call_next: Any) -> Response:
    raise ZeroDivisionError("secret")


class Shout:
    """Changes what a stream says, event by event."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def shout(message: Any) -> None:
            if body := message.get("body"):
                message = {**message, "body": body.replace(b'"text"', b'"TEXT"')}
            await send(message)

        await self._app(scope, receive, shout)


def test_middlewares_see_every_answer_and_the_bodies_of_streams(engine: FakeEngine) -> None:
    with serving(engine, disable_log_requests=True, middleware=[f"{HERE}.Shout", f"{HERE}.add_header"]) as url:
        answer = httpx.post(f"{url}/v1/completions", json=ASKED)
        assert answer.headers["x-seen"] == "yes"
        assert '"TEXT"' in answer.text and answer.text.endswith("data: [DONE]\n\n")
        assert httpx.get(f"{url}/nowhere").headers["x-seen"] == "yes"


def test_an_error_of_a_middleware_has_the_error_body(engine: FakeEngine) -> None:
    with serving(engine, middleware=[f"{HERE}.fail"]) as url:
        answer = httpx.post(f"{url}/v1/completions", json=ASKED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert "secret" not in answer.text and "x-request-id" in answer.headers


def test_streams_that_middlewares_see_and_streams_that_are_pushed_have_the_same_bytes(engine: FakeEngine) -> None:
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    wanted = [{"stream": True, **fields} for fields in ({}, {"n": 2}, usage, {"stop": "r"})]
    prompts = {"completions": {"prompt": "Hi"}, "chat/completions": {"messages": [{"role": "user", "content": "Hi"}]}}
    streams: list[list[str]] = []
    for middleware in ([], [f"{HERE}.add_header"]):
        with (
            serving(engine, disable_log_requests=True, middleware=middleware) as url,
            httpx.Client(base_url=f"{url}/v1/", headers={"X-Request-Id": "a"}, timeout=within(60)) as http,
        ):
            texts = [http.post(path, json=prompt | body).text for path, prompt in prompts.items() for body in wanted]
        streams.append([re.sub(r'"created":\d+', "", text) for text in texts])
    assert streams[0] == streams[1] and all(text.count("data: ") > 5 for text in streams[0])


@pytest.mark.parametrize("path", ["no.such.Thing", f"{HERE}.HERE", "Thing"])
def test_what_is_no_middleware_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=f"--middleware {path} "):
        ServerArgs(middleware=[path]).check()


def test_variables_of_the_template_have_defaults(engine: FakeEngine) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    with serving(engine, disable_log_requests=True, default_chat_template_kwargs={"shout": True}) as url:
        for more, is_loud in (({}, True), ({"chat_template_kwargs": {"shout": False}}, False)):
            assert httpx.post(f"{url}/v1/chat/completions", json={**chat, **more}).status_code == 200
            assert ("LOUD" in engine.tokenizer.decode(engine.seen[-1][0])) is is_loud


def test_requests_bring_templates_where_they_are_trusted(engine: FakeEngine) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    with serving(engine, disable_log_requests=True, trust_request_chat_template=True) as url:
        own = {**chat, "chat_template": "<{{ messages[0].content }}|{{ mood }}>", "chat_template_kwargs": {"mood": "y"}}
        assert httpx.post(f"{url}/v1/chat/completions", json=own).status_code == 200
        assert engine.tokenizer.decode(engine.seen[-1][0]) == "<x|y>"
        ids = httpx.post(f"{url}/tokenize", json=own).json()["tokens"]
        assert engine.tokenizer.decode(ids) == "<x|y>"
        wrong = httpx.post(f"{url}/v1/chat/completions", json={**chat, "chat_template": "{% if %}"})
        error = wrong.json()["error"]
        assert (wrong.status_code, error["param"]) == (400, "chat_template")
        assert error["message"].startswith("The chat template is not valid: ")
        assert httpx.post(f"{url}/v1/chat/completions", json=chat).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_nothing_looks_into_a_template_that_a_request_may_not_bring(
    http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def look(*args: object) -> None:
        raise AssertionError("the template of a request is read")

    monkeypatch.setattr(engine.tokenizer, "get_chat_template", look)
    messages = [{"role": "user", "content": "x"}]
    effort = {} if path == "/tokenize" else {"reasoning_effort": "high", "verbosity": "low"}
    answer = http.post(path, json={"messages": messages, "chat_template": "{%" * 99, **effort})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")


def test_answers_have_an_id_and_say_what_was_cached_unless_told_not_to(engine: FakeEngine) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "stream_options": {"include_usage": True}, "stream": True}
    message = {"messages": chat["messages"], "max_tokens": 4}
    with serving(engine, disable_log_requests=True) as url:
        ids = []
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/messages", message),
            ("/v1/completions", {}),
            ("/x", {}),
        ):
            ids += [httpx.post(url + path, json=body).headers["x-request-id"] for _ in range(2)]
            given = httpx.post(url + path, json=body, headers={"X-Request-Id": "mine"})
            assert given.headers.get_list("x-request-id") == ["mine"]
        assert len(set(ids)) == 8
        assert '"prompt_tokens_details":{"cached_tokens":3}' in httpx.post(f"{url}/v1/chat/completions", json=chat).text
    quiet = {"enable_request_id_headers": False, "enable_prompt_tokens_details": False}
    with serving(engine, disable_log_requests=True, **quiet) as url:
        for path in ("/v1/chat/completions", "/x"):
            assert "x-request-id" not in httpx.post(url + path, json=chat, headers={"X-Request-Id": "mine"}).headers
        assert '"prompt_tokens_details":null' in httpx.post(f"{url}/v1/chat/completions", json=chat).text


def test_credentials_are_for_pages_that_may_have_them(engine: FakeEngine) -> None:
    asked = {"Origin": "https://a", "Access-Control-Request-Method": "POST"}
    for flags, expected in (({}, None), ({"allow_credentials": True, "allowed_methods": ["GET"]}, "true")):
        with serving(engine, disable_log_requests=True, **flags) as url:
            answer = httpx.options(f"{url}/v1/completions", headers=asked)
            assert answer.headers.get("access-control-allow-credentials") == expected
            assert answer.status_code == (200 if expected is None else 400)


@pytest.mark.parametrize(
    ("template", "content_format", "expected"),
    [
        ("{{ messages[0].content }}", "auto", "Hi"),
        ("{{ messages[0].content }}", "openai", "[{'type': 'text', 'text': 'Hi'}]"),
        (LOOP % "m.content", "auto", "Hi!"),
        (LOOP % "m['content']", "auto", "Hi!"),
        (LOOP % "m.content", "string", "!!"),
        # A template that takes either gets texts; one that only seems to gets what it does not lose.
        ("{% if messages[0].content is string %}{{ messages[0].content }}{% else %}?{% endif %}", "auto", "Hi"),
        (LOOP % "m.content" + "{{ messages[0].content is string }}", "auto", "Hi!False"),
    ],
)
def test_templates_get_contents_as_they_read_them(
    engine: FakeEngine, template: str, content_format: str, expected: str
) -> None:
    message = {"role": "user", "content": "Hi"}
    found = render_chat(engine.tokenizer, [message], chat_template=template, content_format=content_format)
    assert found == expected


def test_the_servers_contents_follow_the_flag(engine: FakeEngine) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}
    with serving(engine, disable_log_requests=True, chat_template_content_format="openai") as url:
        for path in ("/v1/chat/completions", "/tokenize"):
            assert httpx.post(url + path, json=body).status_code == 200
        assert "user: [{'type': 'text', 'text': 'Hi'}]" in engine.tokenizer.decode(engine.seen[-1][0])
        num_tokens = httpx.post(f"{url}/tokenize", json=body).json()["count"]
        assert num_tokens == len(engine.seen[-1][0])


def test_a_plugin_brings_a_tool_format(tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(tiny_tokenizer, max_model_len=4096)  # tools are described
    monkeypatch.setattr(tool_formats, "FORMATS", dict(tool_formats.FORMATS))
    monkeypatch.setattr(server_args, "FORMATS", tool_formats.FORMATS)
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from octavo.entrypoints.chat.tools.tool_formats import JsonCalls, ToolFormat, register_tool_format\n"
        "register_tool_format('mine', ToolFormat(JsonCalls(), start='<<', end='>>'))\n"
    )
    args = {"tool_parser_plugin": str(plugin), "tool_call_parser": "mine"}
    with pytest.raises(ConfigError, match="--tool-call-parser must be one of"):
        ServerArgs(tool_call_parser="mine").check()
    ServerArgs(**args).check()
    engine.answer = 'Well. <<{"name": "f", "arguments": {"a": 1}}>>'
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    }
    with serving(engine, disable_log_requests=True, **args) as url:
        (choice,) = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    plugin.write_text("from vllm.entrypoints.openai.tool_parsers import ToolParser")
    with pytest.raises(ConfigError, match=r"mine\.py fails: ModuleNotFoundError.*register_tool_format"):
        ServerArgs(**args).check()


def test_http_requests_are_logged_by_level_and_flag() -> None:
    levels = [ServerArgs(uvicorn_log_level=level).access_log for level in ("warning", "info", "debug")]
    assert levels == [False, True, True]
    assert not ServerArgs(uvicorn_log_level="info", disable_uvicorn_access_log=True).access_log


def test_keys_may_be_several_and_come_from_vllms_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    monkeypatch.setenv("OCTAVO_API_KEY", "ours")
    assert ServerArgs(api_key=["a", "b"]).api_keys == ["a", "b", "ours", "theirs"]


def test_a_socket_of_the_file_system_can_be_listened_at(tmp_path: Path) -> None:
    path = tmp_path / "octavo.sock"
    args = ServerArgs(uds=str(path))
    for _ in range(2):  # the second time over what a killed server has left
        with _bind(args) as sock:
            assert sock.getsockname() == str(path)
            with pytest.raises(ConfigError, match="Address already in use"), _bind(args):
                pass
        assert not path.exists()
        subprocess.run(
            [sys.executable, "-c", f"import socket as s; s.socket(s.AF_UNIX).bind({str(path)!r})"], check=True
        )
    with pytest.raises(ConfigError, match="--uds and --ssl-certfile exclude"):
        ServerArgs(uds="x", ssl_certfile=__file__, ssl_keyfile=__file__).check()


def test_each_of_vllms_variables_without_effect_gets_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("VLLM_USE_V1", "VLLM_SERVER_DEV_MODE", "VLLM_API_KEY", "VLLM_USAGE_STATS", "VLLM_USAGE_SOURCE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="octavo.server"):
        _warn_of_vllm_variables()
    assert [record.getMessage() for record in caplog.records] == [
        "VLLM_SERVER_DEV_MODE is set and has no effect; use --enable-server-dev-mode or OCTAVO_SERVER_DEV_MODE=1",
        "VLLM_USE_V1 is set and has no effect",
    ]


def test_control_routes_are_there_by_flag_or_variable_only(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ServerArgs().is_dev_mode and ServerArgs(enable_server_dev_mode=True).is_dev_mode
    with serving(engine, disable_log_requests=True) as url:
        assert httpx.post(f"{url}/sleep").status_code in (404, 415)
        assert httpx.get(f"{url}/is_sleeping").status_code == 404
    monkeypatch.setenv("OCTAVO_SERVER_DEV_MODE", "1")
    assert ServerArgs().is_dev_mode


def test_what_is_imported_is_there_on_windows() -> None:
    """Modules that only Unix has are imported where they are used, and do without them."""
    code = """
import importlib, pkgutil, sys
for name in ("resource", "fcntl", "pwd", "grp", "termios", "uvloop"):
    sys.modules[name] = None
import octavo
skipped = ("octavo.ops.triton", "octavo.ops.cuda", "octavo.ops.flash", "octavo.ops.torch", "octavo.models.transformers",
           "octavo.execution.cuda", "octavo.entrypoints.cli.__main__")
for module in pkgutil.walk_packages(octavo.__path__, "octavo."):
    if not module.name.startswith(skipped):
        importlib.import_module(module.name)
from octavo.processes import allow_files, event_loop_factory
allow_files()
event_loop_factory()().close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_flags_of_vllm_say_what_requests_leave_out(engine: FakeEngine) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    flags = {"enable_force_include_usage": True, "return_tokens_as_token_ids": True}
    with serving(engine, disable_log_requests=True, **flags) as url:
        streamed = httpx.post(f"{url}/v1/chat/completions", json={**chat, "stream": True}).text
        assert all('"usage":{"prompt_tokens"' in chunk for chunk in streamed.split("data: ")[1:-1])
        for asked, is_id in ((None, True), (True, True), (False, False)):
            answer = httpx.post(f"{url}/v1/chat/completions", json={**chat, "return_tokens_as_token_ids": asked})
            token = answer.json()["choices"][0]["logprobs"]["content"][0]["token"]
            assert token.startswith("token_id:") == is_id
