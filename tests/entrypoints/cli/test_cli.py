"""The command line: flags, the YAML file, errors in one line, and the terminal clients."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from octavo.bench import offline
from octavo.bench import serve as bench_serve
from octavo.entrypoints.batch.run_batch_files import BatchFiles
from octavo.entrypoints.cli import kernels, local, main, plan, run_batch, serve
from octavo.entrypoints.cli.gateway import make_parser as gateway_parser
from octavo.entrypoints.cli.gateway import models as gateway_models
from octavo.entrypoints.cli.run import make_ps_parser, make_run_parser, ps, run
from octavo.entrypoints.cli.serve import parse_args
from octavo.entrypoints.cli.terminal import chat, complete, make_chat_parser, make_complete_parser
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.errors import ConfigError
from octavo.flags import FlagParser
from octavo.loading.default_model import DEFAULT_MODEL_NAME
from tests.entrypoints.fake_engine import FakeEngine


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """Run a server that answers everything with one body. Yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))  # closed with it unread, the answer could be lost
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


def write(folder: Path, text: str) -> str:
    path = folder / "octavo.yaml"
    path.write_text(text)
    return str(path)


def test_a_model_is_given_by_position_or_by_flag() -> None:
    assert parse_args(["some/model", "--port", "1"], "octavo serve")[0].model == "some/model"
    assert parse_args(["--model", "some/model"], "octavo serve")[0].model == "some/model"
    assert parse_args([], "octavo serve")[0].model == ""
    with pytest.raises(ConfigError, match="two models are given"):
        parse_args(["one", "--model", "two"], "octavo serve")


def test_a_model_that_a_list_has_taken_is_refused(tmp_path: Path) -> None:
    """Else the default model would be served, and the model's path would be a key or a name."""
    folder = tmp_path / "model"
    folder.mkdir()
    parse_args(["--api-key", "a", str(folder)], "octavo serve")
    (folder / "config.json").touch()
    for words in (["--api-key", "a", str(folder)], ["--served-model-name", "a", "model.gguf", "--port", "1"],
                  ["--api-key", "a", "org/name"]):  # fmt: skip
        with pytest.raises(ConfigError, match=f"Put the model first: MODEL {words[0]}"):
            parse_args(words, "octavo serve")
    with pytest.raises(ConfigError, match="Put the model first"):
        gateway_models(gateway_parser("octavo gateway").parse_args(["--api-key", "a", str(folder)]))
    for words in ([str(folder), "--api-key", "a", "org/name"], ["--served-model-name", "org/name"],
                  ["--api-key", "a", "n" * 5000], ["--lora-root", str(folder)],
                  ["--enable-lora", "--lora-modules", "a=adapter.gguf"]):  # fmt: skip
        parse_args(words, "octavo serve")


def test_flags_may_be_written_with_underscores_and_lists_repeated() -> None:
    engine, server = parse_args(
        ["--max_model_len", "64", "--api-key", "a", "--api-key", "b", "--no-enable-prefix-caching"], "octavo serve"
    )
    assert (engine.max_model_len, engine.enable_prefix_caching, server.api_key) == (64, False, ["a", "b"])
    assert ServerArgs().api_key == [], "the default is not shared"


def test_a_yaml_file_sets_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model: some/model\nport: 9000\nmax-model-len: 128\nmax_num_seqs: 4\nenable-prefix-caching: false\n"
        "served-model-name: [a, b]\nhost: 1.2.3.4\napi-key: k\nseed: null\n",
    )
    argv = ["--config", path, "--port=9001", "--max_model_len", "64", "--enable-prefix-caching"]
    engine, server = parse_args(argv, "octavo serve")
    assert (engine.model, engine.max_model_len, engine.max_num_seqs) == ("some/model", 64, 4)
    assert (engine.enable_prefix_caching, engine.served_model_name, engine.seed) == (True, ["a", "b"], None)
    assert (server.port, server.host, server.api_key) == (9001, "1.2.3.4", ["k"])


@pytest.mark.parametrize("words", [["my/model"], ["--model", "my/model"], ["--model=my/model"]])
def test_a_model_on_the_command_line_wins_over_that_of_the_file(tmp_path: Path, words: list[str]) -> None:
    path = write(tmp_path, "model: some/model\nport: 9000\n")
    for argv in ([*words, "--config", path], ["--config", path, *words]):
        engine, server = parse_args(argv, "octavo serve")
        assert (engine.model, server.port) == ("my/model", 9000)


@pytest.mark.parametrize(
    ("make", "usage"),
    [
        (kernels.make_parser, "octavo x MODEL --output FILE [--flags]"),
        (run_batch.make_parser, "octavo x --input-file INPUT_FILE --output-file OUTPUT_FILE [--flags]"),
        (plan.make_parser, "octavo x [MODEL] [--flags]"),
        (offline.make_throughput_parser, "octavo x [MODEL] [--flags]"),
        (bench_serve.make_parser, "octavo x [--flags]"),
    ],
)
def test_the_usage_of_many_flags_is_one_line_with_those_that_are_required(
    make: Callable[[str], FlagParser], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = make("octavo x")
    with pytest.raises(SystemExit):
        parser.error("wrong")
    assert capsys.readouterr().err == f"usage: {usage}\noctavo x: error: wrong\n"
    assert parser.format_help().startswith(f"usage: {usage}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "unknown key 'prot'"),
        ("config: x.yaml", "unknown key 'config'"),
        ("- a\n- b", "must map flags' names to values, got a list"),
        ("a: [", "is not valid YAML"),
        ("port: true", "port must be a string or a number, got True"),
        ("enable-prefix-caching: maybe", "must be true or false, got 'maybe'"),
        ("port: {a: 1}", "must be a string or a number"),
    ],
)
def test_a_bad_yaml_file_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        parse_args(["--config", write(tmp_path, text)], "octavo serve")


def test_values_of_the_file_are_checked_as_flags_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_args(["--config", write(tmp_path, "port: many")], "octavo serve")
    assert end.value.code == 2
    assert "invalid int value: 'many'" in capsys.readouterr().err


def test_a_word_in_a_list_of_numbers_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan.make_parser("octavo plan").parse_args(["--lengths", "2048", "./model"])
    assert "--lengths: must be a whole number of 1 or more, got './model'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parser", "argv", "advice"),
    [
        (
            serve.make_parser,
            ["./one", "./two"],
            "unrecognized arguments: ./two\n  A server has one model; `octavo gateway",
        ),
        (make_chat_parser, ["./model"], "unrecognized arguments: ./model\n  A message follows -q; `octavo run MODEL`"),
        (make_complete_parser, ["Hello"], "unrecognized arguments: Hello\n  A text follows -q;"),
    ],
)
def test_a_word_too_many_says_where_it_belongs(
    parser: Callable[[str], FlagParser], argv: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser("octavo x").parse_args(argv)
    assert advice in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--colour", "red"], "unrecognized arguments: --colour\n  octavo serve --help=all lists the flags."),
        (["--prot", "1"], "prot: did you mean port?"),
        (["--max-model-len", "abc"], "--max-model-len: must be auto or a whole number such as 32000, 32k (32,000)"),
        (["--kv-cache-memory-bytes", "1.5K"], "must be a whole number such as 32000, 32k (32,000) or 32K (32,768)"),
        (["--target-step-time", "fast"], "must be auto or a number of milliseconds, got 'fast'"),
        (["--max-model", "5"], "unrecognized arguments: --max-model\n  max-model: did you mean max-model-len?"),
        (["--dtype", "int3"], "invalid choice: 'int3'"),
        (["--speculative-config", "{method: ngram}"], "is not JSON (Expecting property name"),
        (["--speculative-config", "[1]"], "a JSON list is no object: [1]"),
    ],
)
def test_flags_that_are_unknown_or_of_a_wrong_type_end_with_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse_args(argv, "octavo serve")
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-scheduler-steps", "2"], "--num-scheduler-steps 2 is not built yet"),
        (["--speculative_model=x"], "x is not a folder or file here"),
        (["--tool-call-parser", "x"], "--tool-call-parser must be one of"),
        (["--reasoning-parser", "x"], "--reasoning-parser must be one of"),
        (["--port", "70000"], "--port must be between 0 and 65535"),
        (["--prometheus-port", "9"], "--prometheus-port needs --enable-prometheus"),
        (["--ssl-ca-certs", __file__], "--ssl-ca-certs needs --ssl-certfile"),
        (["--ssl-keyfile", "k"], "--ssl-keyfile and --ssl-certfile go together"),
        (["--ssl-keyfile", "k", "--ssl-certfile", "c"], "there is no file k"),
        (["--ssl-keyfile", __file__, "--ssl-certfile", __file__], "are not a certificate and its key in PEM form"),
        (["--root-path", "llm"], "--root-path must start with /"),
        (["--chat-template", "/nowhere"], "--chat-template /nowhere is neither a template"),
        (["--allowed-origins", "[1]"], "is not a JSON list of strings"),
        (["--max-log-len", "-1"], "--max-log-len must be 0 or more"),
        (["--host", "256.1.1.1"], "cannot listen at 256.1.1.1:0"),
    ],
)
def test_flags_that_cannot_be_honoured_end_with_one_line_and_code_1(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["--port", "0", *argv]) == 1
    error = capsys.readouterr().err
    assert error.startswith("octavo: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_taken_port_is_refused_before_a_model_is_looked_for(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = address.rpartition(":")[2]
    assert serve.main(["/no/such/model", "--host", "127.0.0.1", "--port", port]) == 1
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_origins_may_be_words_or_a_json_list() -> None:
    assert ServerArgs(allowed_origins=["https://a", "https://b"]).cors["allow_origins"] == ["https://a", "https://b"]
    assert ServerArgs(allowed_origins=['["https://a"]']).cors["allow_origins"] == ["https://a"]
    found = ServerArgs(allow_credentials=True).cors
    assert [found[f"allow_{name}"] for name in ("origins", "methods", "headers", "credentials")] == [*[["*"]] * 3, True]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom octavo.entrypoints.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'transformers', 'fastapi', 'pydantic', 'uvicorn') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
    assert "serve a model over the OpenAI API" in result.stdout


@pytest.mark.parametrize("command", ["models", "collect-env"])
def test_a_reader_that_has_gone_is_no_error(command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "octavo.entrypoints.cli.main", command], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_help_may_be_asked_about_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("num-seqs", "max_num_seqs", "all"):
        with pytest.raises(SystemExit) as end:
            parse_args([f"--help={word}"], "octavo serve")
        assert end.value.code == 0
        shown = capsys.readouterr().out
        assert "--max-num-seqs INT" in shown
        assert ("--port INT" in shown) == (word == "all")
    with pytest.raises(SystemExit):
        parse_args(["--help=colour"], "octavo serve")
    assert "no flag has colour in its name" in capsys.readouterr().err


def test_help_of_serve_shows_twenty_flags_and_all_shows_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--help"], "octavo serve")
    shown = capsys.readouterr().out
    flags = {name for names in serve._COMMON_FLAGS.values() for name in names}
    assert len(flags) == 20
    assert set(re.findall(r"^  (--[\w-]+)", shown, re.MULTILINE)) == flags
    every = {name for name in serve.make_parser("octavo serve")._option_string_actions if name.startswith("--")}
    with pytest.raises(SystemExit):
        parse_args(["--help=all"], "octavo serve")
    assert set(re.findall(r"--[a-z][\w-]+", capsys.readouterr().out)) >= every


def test_each_command_belongs_to_one_task_whose_example_is_one_of_its_commands() -> None:
    assert sorted(name for names, _ in main.TASKS.values() for name in names) == sorted(main.COMMANDS)
    parser = main.make_parser()
    for names, example in main.TASKS.values():
        words = example.split()
        assert words[0] == "octavo" and words[1] in names
        _, unknown = parser.parse_known_args(words[1:])
        assert unknown == (words[2:] if words[1] == "run" else []), "run takes its MODEL before it parses"


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    assert "serve a model over the OpenAI API" in capsys.readouterr().err


def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> ModuleType:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.entrypoints.cli.main.importlib.import_module", interrupted)
    assert main.main(["serve"]) == 130


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sing"], "octavo: error: there is no command 'sing'; octavo --help lists them\n"),
        (["serv", "model"], "octavo: error: there is no command 'serv'; did you mean octavo serve?\n"),
        (
            ["bench", "latancy"],
            "octavo bench: error: there is no command 'latancy'; did you mean octavo bench latency?\n",
        ),
    ],
)
def test_unknown_commands_end_with_code_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(words)
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(said)


def test_chat_prints_the_answer(address: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--url", address + "/v1", "--system-prompt", "Be kind", "-q", "Hi", "--max-tokens", "5"]
    assert chat(argv) == 0
    assert capsys.readouterr().out == "Hello\n"
    assert engine.tokenizer.decode(engine.seen[0][0]) == "system: Be kind\nuser: Hi\nassistant:"


def test_chat_remembers_the_conversation(
    address: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["one", " ", "two"])

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert chat(["--url", address + "/v1"]) == 0
    assert engine.tokenizer.decode(engine.seen[1][0]) == "user: one\nassistant: Hello there\nuser: two\nassistant:"


def test_complete_prints_the_continuation(address: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete(["--url", address + "/v1", "-q", "Hi"]) == 0
    assert capsys.readouterr().out == "Hello there\n"


def test_run_asks_a_served_model_the_message_behind_its_name(
    address: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    name = httpx.get(address + "/v1/models").json()["data"][0]["id"]
    assert run([name, "Hi", "--url", address + "/v1"]) == 0
    assert capsys.readouterr().out == "Hello there\n"
    assert engine.tokenizer.decode(engine.seen[0][0]) == "user: Hi\nassistant:"
    assert run([name, "Hi", "-q", "Hi", "--url", address + "/v1"]) == 1
    assert "two messages are given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html>", "answers no JSON object: is it the address of an OpenAI API"),
        (200, b"[]", "answers no JSON object"),
        (
            401,
            b'{"error": {"message": "No."}}',
            "answered 401: No. (It needs an API key, or a different one: --api-key,",
        ),
        (404, b"<!DOCTYPE html>\n<p>", "answered 404: the answer is a web page; check the API's address"),
    ],
)
@pytest.mark.parametrize("command", [chat, run, ps])
def test_an_address_of_another_kind_of_server_is_one_line(
    command: Callable[[list[str]], int], status: int, body: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(status, body) as url:
        assert command(["--url", url]) == 1
    assert message in capsys.readouterr().err


def test_clients_send_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OCTAVO_API_KEY"):  # the second one wins
        monkeypatch.setenv(name, f"of {name}")
        for make_parser in (make_chat_parser, make_run_parser, make_ps_parser, bench_serve.make_parser):
            assert make_parser("octavo").parse_known_args([])[0].api_key == f"of {name}"
    assert make_ps_parser("octavo").parse_args(["--api-key", "given"]).api_key == "given"


def test_pull_says_that_the_model_is_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(local, "fetch_default_model", lambda: None)
    assert local.pull([DEFAULT_MODEL_NAME]) == 0
    assert capsys.readouterr().out == f"{DEFAULT_MODEL_NAME} is here.\n"


@pytest.mark.parametrize("body", [b"{}", b'{"data": []}'])
def test_a_server_that_names_no_model_is_one_line(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200, body) as url:
        assert chat(["--url", url, "-q", "Hi"]) == 1
    assert "names no model for this key" in capsys.readouterr().err


@pytest.mark.parametrize("command", [chat, complete])
@pytest.mark.parametrize(
    ("event", "message"),
    [
        ('{"choices": [7]}', "has a wrong form"),
        ('{"choices": {"delta": {}}}', "has a wrong form"),
        ('{"error": "broken"}', "error: broken"),
        ('{"error": 7}', '{"error": 7}'),
        ('{"object": "x"}', "ended the answer too early"),
        ('{"choices": [{"index": 0}]}', "ended the answer too early"),
    ],
)
def test_a_stream_of_nonsense_is_one_line(
    command: Callable[[list[str]], int], event: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(200, f"data: {event}\n\n".encode()) as url:
        assert command(["--url", url, "--model", "m", "-q", "Hi"]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize("words", [["pull", ""], ["show", ""], ["rm", " "], ["run", ""], ["run", "", "Hi"]])
def test_the_empty_name_of_a_model_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    commands = {"pull": local.pull, "show": local.show, "rm": local.rm, "run": run}
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(commands[words[0]](words[1:]))
    assert ended.value.code in (1, 2) and "the model's name is empty" in capsys.readouterr().err


def test_the_clients_say_what_is_wrong_in_one_line(
    address: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complete(["--url", "http://127.0.0.1:1/v1", "-q", "Hi"]) == 1
    assert "no server answers at http://127.0.0.1:1/v1" in capsys.readouterr().err
    assert complete(["--url", address + "/v1", "--model", "other", "-q", "Hi"]) == 1
    assert "answered 404: The model 'other' does not exist here" in capsys.readouterr().err
    engine.fails_after = (2, RuntimeError("x"))
    assert complete(["--url", address + "/v1", "-q", "Hi"]) == 1
    assert capsys.readouterr() == ("He\n", "octavo: error: Internal error.\n")


def test_ctrl_c_of_run_batch_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def one_answer(app: object, left: AsyncIterator[tuple[int, bytes]], write: Any, at_once: int) -> None:
        async for number, _ in left:
            await write(number, True, b"{}\n")
            raise KeyboardInterrupt

    async def run_files(engine_args: object, args: object, files: BatchFiles) -> None:
        await files.run(Starlette(), at_once=1, progress=SimpleNamespace(update=lambda: None))  # type: ignore[arg-type]

    monkeypatch.setattr("octavo.entrypoints.batch.run_batch_files.answer_lines", one_answer)
    monkeypatch.setattr(run_batch, "_run", run_files)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"custom_id": "1"}\n{"custom_id": "2"}\n')
    assert run_batch.main(["-i", str(source), "-o", str(target)]) == 130
    assert f"Stopped: 1 of 2 requests have an answer in {target}. The same command" in capsys.readouterr().err
