"""`octavo chat` and `octavo complete` in a terminal of their own: what a person sees, and what Ctrl-C does."""

from __future__ import annotations

import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from octavo.entrypoints.cli.answer_view import MarkdownView
from tests.entrypoints.fake_engine import FakeEngine
from tests.terminal import TIMEOUT_S, terminal
from tests.waiting import wait_until


def test_chat_streams_stops_and_remembers(address: str, engine: FakeEngine) -> None:
    with terminal("chat", "--url", address + "/v1", "--system-prompt", "Be kind") as chat:
        chat.expect("Ctrl-C stops an answer, Ctrl-D ends")
        chat.expect("> ")
        engine.is_paused = True
        chat.type("one\n")
        chat.expect("\nH")  # the first token is shown while the others are still to come
        chat.interrupt(until="> ")
        wait_until(lambda: not engine.active)  # the server was told
        engine.is_paused = False
        chat.type("forget this")
        chat.expect("forget this")
        chat.interrupt(until="> ")
        chat.type("two\n")
        chat.expect("Hello there\n")
        chat.expect("> ")
        assert engine.tokenizer.decode(engine.seen[-1][0]) == (
            "system: Be kind\nuser: one\nassistant: H\nuser: two\nassistant:"
        )
        chat.type("refuse me\n")
        chat.expect("octavo: error: ")
        chat.expect("No such talk.")
        chat.expect("> ")
        chat.type("three\n")
        chat.expect("Hello there\n")
        assert "refuse me" not in engine.tokenizer.decode(engine.seen[-1][0])
        chat.expect("> ")
        chat.type("\x04")
        assert chat.process.wait(TIMEOUT_S) == 0


def test_complete_goes_on_after_a_stop(address: str, engine: FakeEngine) -> None:
    with terminal("complete", "--url", address + "/v1") as complete:
        complete.expect("> ")
        engine.is_paused = True
        complete.type("Once\n")
        complete.expect("\nH")
        complete.interrupt(until="> ")
        engine.is_paused = False
        complete.type("Twice\n")
        complete.expect("Hello there\n")
        complete.expect("> ")
        complete.type("\x04")
        assert complete.process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_no_server_is_one_line(command: str) -> None:
    with terminal(command, "--url", "http://127.0.0.1:1/v1") as none:
        shown = none.expect("or give --url.\n")
        assert shown.startswith("octavo: error: no server answers at http://127.0.0.1:1/v1")
        assert none.process.wait(TIMEOUT_S) == 1


def test_pipes_get_answers_and_nothing_else(address: str, engine: FakeEngine) -> None:
    command = [sys.executable, "-m", "octavo.entrypoints.cli.main"]
    for name in ("chat", "complete"):
        asked = subprocess.run(
            [*command, name, "--url", address + "/v1"], input="one\n\ntwo\n", capture_output=True, text=True, check=True
        )
        assert (asked.stdout, asked.stderr) == ("Hello there\nHello there\n", "")


def test_commands_of_a_chat_come_from_pipes_too(address: str, engine: FakeEngine) -> None:
    command = [sys.executable, "-m", "octavo.entrypoints.cli.main", "chat", "--url", address + "/v1"]
    asked = subprocess.run(command, input="/help\n/foo\n /foo\n", capture_output=True, text=True, check=True)
    assert asked.stdout == "Hello there\n" and len(engine.seen) == 1
    assert "forget the conversation" in asked.stderr and "/foo is no command" in asked.stderr


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_stats_tell_the_tokens_and_their_speed(command: str, address: str) -> None:
    words = [sys.executable, "-m", "octavo.entrypoints.cli.main", command, "--url", address + "/v1", "-q", "Hi"]
    asked = subprocess.run([*words, "--stats"], capture_output=True, text=True, check=True)
    assert asked.stdout == "Hello there\n"
    assert re.fullmatch(r"12 tokens: the first after \d+ ms, then [\d.]+ tokens/s\n", asked.stderr)
    assert "tokens/s" not in subprocess.run(words, capture_output=True, text=True, check=True).stderr


def test_a_terminal_shows_markdown_unless_it_is_told_not_to(address: str, engine: FakeEngine) -> None:
    engine.answer = "**Hello**\n\n- there"
    question = ("chat", "--url", address + "/v1", "-q", "Hi")
    with terminal(*question, TERM="xterm") as styled:
        assert "**" not in styled.expect(" • ").rpartition("\x1b[1mHello")[2]
        assert styled.process.wait(TIMEOUT_S) == 0
    for flags, variables in (((), {"TERM": "xterm", "NO_COLOR": "1"}), (("--plain",), {"TERM": "xterm"})):
        with terminal(*question, *flags, **variables) as plain:
            assert plain.expect("- there\n") == "**Hello**\n\n- there\n"


def test_markdown_prints_each_block_once_and_nothing_that_commands_the_terminal() -> None:
    text = (
        "# Title\n\nOne *two*.\n\n1. a\n\n2. b\n   - c\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\n```py\nprint(1)\n\n"
        "print(2)\n```\nEnd \x1b]52;c;AAAA\x07 [here](http://a/b)"
    )
    shown = []
    for size in (1, 7, len(text)):
        out = StringIO()
        view = MarkdownView(Console(file=out, width=40, height=20, force_terminal=False, color_system=None))
        for begin in range(0, len(text), size):
            view.add(text[begin : begin + size])
        view.end()
        shown.append([line.rstrip() for line in out.getvalue().splitlines() if line.strip()])
    assert shown[0] == shown[1] == shown[2]
    lines = "\n".join(shown[0])
    for part in ("Title", "One two.", " 1 a", " 2 b", "print(1)", "print(2)", "End", "http://a/b"):
        assert lines.count(part) == 1, part
    assert "\x1b" not in lines


def test_reasoning_is_dimmed_and_ends_where_the_answer_begins() -> None:
    out = StringIO()
    view = MarkdownView(Console(file=out, width=40, force_terminal=True, color_system="standard", _environ={}))
    view.think("Hm, \x1b[2J")
    view.think("yes.")
    view.add("It is.")
    view.end()
    assert out.getvalue().startswith("\x1b[2mHm, [2J\x1b[0m\x1b[2myes.\x1b[0m\n\n")
    assert "It is." in out.getvalue()


def test_typed_lines_are_recalled_in_later_runs_unless_they_are_not_kept(
    address: str, engine: FakeEngine, tmp_path: Path
) -> None:
    pytest.importorskip("readline")
    command, home = ("chat", "--url", address + "/v1"), {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    up, history = "\x1b[A", tmp_path / "octavo" / "history"
    for flags, line, kept in (((), "one", ["one"]), (("--no-history",), "secret", ["one"])):
        with terminal(*command, *flags, **home) as chat:
            chat.expect("> ")
            chat.type(f"{line}\n")
            chat.expect("Hello there")
            chat.expect("> ")
            chat.type("\x04")
            assert chat.process.wait(TIMEOUT_S) == 0
        assert history.read_text().splitlines() == kept
    assert history.stat().st_mode & 0o777 == 0o600
    with terminal(*command, **home) as chat:
        chat.expect("> ")
        chat.type(f"{up}\n")
        chat.expect("Hello there")
    assert [engine.tokenizer.decode(seen[0]) for seen in engine.seen[::2]] == ["user: one\nassistant:"] * 2


def test_a_long_history_is_cut(address: str, tmp_path: Path) -> None:
    pytest.importorskip("readline")
    history = tmp_path / "octavo" / "history"
    history.parent.mkdir()
    history.write_text("".join(f"line {i}\n" for i in range(2001)))
    with terminal("chat", "--url", address + "/v1", XDG_STATE_HOME=str(tmp_path)) as chat:
        chat.expect("> ")
    assert history.read_text().splitlines() == [f"line {i}" for i in range(1001, 2001)]
    assert [path.name for path in history.parent.iterdir()] == ["history"]


def test_commands_of_a_chat(address: str, engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "talk.md"
    with terminal("chat", "--url", address + "/v1", "--system-prompt", "Be kind", "--no-history") as chat:
        chat.expect("/help has more.")
        chat.type("one\n")
        chat.expect("Hello there\n")
        for line, shown in (
            (f"/save {file}", f"Saved to {file}."),
            (f"/save {file}", "cannot be saved"),
            ("/nonsense", "/nonsense is no command"),
            ("/help", "forget the conversation"),
            ("/clear", "is forgotten."),
        ):
            chat.expect("> ")
            chat.type(f"{line}\n")
            chat.expect(shown)
        for line in (" /clear", "/etc/hosts is a file"):
            chat.type(f"{line}\n")
            chat.expect("Hello there\n")
    assert file.read_text() == "## system\n\nBe kind\n\n## user\n\none\n\n## assistant\n\nHello there\n"
    sent = [engine.tokenizer.decode(seen[0]) for seen in engine.seen]
    assert sent[1] == "system: Be kind\nuser:  /clear\nassistant:"
    assert sent[2].endswith("user: /etc/hosts is a file\nassistant:")


def test_errors_have_a_colour_and_a_next_step_on_a_terminal() -> None:
    with terminal("serve", "--port", "70000", TERM="xterm") as serve:
        shown = serve.expect("in their names.")
        assert shown.startswith("\x1b[1;31moctavo: error:\x1b[0m --port must be between")
        assert "octavo serve --help=WORD" in shown
