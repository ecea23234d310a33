"""The example that a start shows on a terminal, and what pipes and logs of JSON get."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.wire import Ready
from octavo.entrypoints.http.server import _bind
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.start_display import StartDisplay
from tests.entrypoints.fake_engine import FakeEngine

READY = Ready(512, 64, 0, 16, 0, 0, {})


class Screen(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with _bind(ServerArgs(host="127.0.0.1", port=0)) as sock:
        yield sock


def on_a_screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Make standard output and standard error a terminal. In the test itself: pytest puts its own there before."""
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return screen


def pooling(config: EngineConfig, *tasks: str) -> EngineConfig:
    class Pooling:
        size = 4

    Pooling.tasks = tasks  # type: ignore[attr-defined]
    return replace(config, model=replace(config.model, pooling=Pooling()))


@pytest.mark.parametrize(
    ("options", "tasks", "example"),
    [
        ({}, (), """curl -H 'Content-Type: application/json' -d '{"messages": [{"role": "user", """
         """"content": "Hello!"}]}' """
         "http://127.0.0.1:PORT/v1/chat/completions"),
        ({"api_key": ["k"], "root_path": "/llm"}, ("embed",), """curl -H "Authorization: Bearer $OCTAVO_API_KEY" -H """
         """'Content-Type: application/json' -d '{"input": "Hello!"}' http://127.0.0.1:PORT/llm/v1/embeddings"""),
        ({"uds": "/run/o"}, ("classify",), "curl --unix-socket /run/o http://localhost/v1/models"),
    ],
)  # fmt: skip
def test_the_example_fits_what_is_served(
    options: dict[str, Any], tasks: tuple[str, ...], example: str, engine: FakeEngine, sock: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    screen = on_a_screen(monkeypatch)
    config = pooling(engine.config, *tasks) if tasks else engine.config
    StartDisplay(config, ServerArgs(**options), sock).show_ready(config, READY, 1.0)
    port = str(sock.getsockname()[1])
    assert screen.getvalue().splitlines()[-1] == "  try       " + example.replace("PORT", port)
    assert ("/ui" in screen.getvalue()) == ("uds" not in options)


@pytest.mark.parametrize(
    ("host", "options", "is_open"),
    [("0.0.0.0", {}, True), ("::", {}, True), ("0.0.0.0", {"api_key": ["k"]}, False), ("127.0.0.1", {}, False),
     ("0.0.0.0", {"uds": "/run/o"}, False), ("0.0.0.0", {"ssl_ca_certs": "clients.pem"}, False)],
)  # fmt: skip
def test_a_server_that_is_open_to_the_network_says_so_and_how_to_close_it(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], host: str, options: dict[str, Any], is_open: bool
) -> None:
    bound: Any = SimpleNamespace(getsockname=lambda: (host, 8000))
    StartDisplay(engine.config, ServerArgs(**options), bound).show_ready(engine.config, READY, 1.0)
    lines = capsys.readouterr().out.splitlines()
    [api] = [line for line in lines if line.startswith("  API ")]
    assert "uds" in options or api.split()[1] in ("http://127.0.0.1:8000/v1", "http://[::1]:8000/v1")
    said = [line for line in lines if line.startswith("  network ")]
    assert len(said) == is_open and all("--host 127.0.0.1" in line and "--api-key" in line for line in said)


def test_the_bar_is_the_slowest_engines_and_goes_away(
    engine: FakeEngine, sock: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = on_a_screen(monkeypatch)
    display = StartDisplay(engine.config, ServerArgs(), sock)
    for place, share in ((0, 0.5), (1, 0.1), (0, 1.0), (1, 1.0)):
        display.show_loading(place, share)
    shown = screen.getvalue()
    assert [part for part in ("50%", "10%", "100%", "Preparing") if part in shown] == ["50%", "10%", "Preparing"]
    display.show_ready(engine.config, READY, 1.0)
    assert screen.getvalue()[len(shown) :].startswith("\x1b[2K\r")
    shown = screen.getvalue()
    display.show_loading(0, 0.5)  # of an engine that starts again
    assert screen.getvalue() == shown


def test_pipes_and_logs_of_json_have_no_bar_and_no_example(
    engine: FakeEngine, sock: socket.socket, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    display = StartDisplay(engine.config, ServerArgs(), sock)
    display.show_loading(0, 0.5)
    display.show_ready(engine.config, READY, 1.0)
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["Octavo", "model", "context", "KV", "API"]
    assert err == ""
    with caplog.at_level(logging.INFO, "octavo.server"):
        logging.getLogger("octavo").propagate, before = True, logging.getLogger("octavo").propagate
        StartDisplay(engine.config, ServerArgs(log_format="json"), sock).show_ready(engine.config, READY, 1.0)
        logging.getLogger("octavo").propagate = before
    assert sorted(caplog.records[-1].ready) == ["API", "KV cache", "context", "model"]  # type: ignore[attr-defined]
