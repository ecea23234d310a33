"""Changes of a server behind a real nginx by deploy/blue-green: under load, to broken versions, and killed half way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.test_containers import debian
from tests.deploy.test_systemd import analyze
from tests.ports import held_port
from tests.waiting import wait_until

CHANGE = Path(__file__).parents[2] / "deploy" / "blue-green" / "change.py"
STUB = (sys.executable, str(Path(__file__).with_name("stub_server.py")))
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 259, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Site:
    """Blue and green behind nginx, with times for tests."""

    def __init__(self, folder: Path) -> None:
        debian("nginx", "nginx-light")
        self.state, self.port, self.ports = folder / "state", held_port(), (held_port(), held_port())
        self.at = f"127.0.0.2:{self.port}"  # not where the servers listen
        self.url = f"http://{self.at}"

    def start(self, what: str, *command: str, **options: object) -> subprocess.Popen[str]:
        given = {"watch": 0.2, "ready_timeout": 120, "drain_timeout": 120, "stop_timeout": 30} | options
        flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        if not self.state.exists():  # it is kept
            flags += ["--listen", self.at]
        return subprocess.Popen(
            [
                sys.executable, str(CHANGE), what, str(self.state), "--ports", *map(str, self.ports), *flags,
                *(["--", *command] if command else []),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, what: str, *command: str, **options: object) -> tuple[int, str, str]:
        """Exit status, output and errors."""
        process = self.start(what, *command, **options)
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err

    def change(self, *command: str) -> None:
        code, out, err = self.run("to", *command)
        assert code == 0, f"{out}{err}{self.logs()}"

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.run("status")[1])
        return status

    def logs(self) -> str:
        return "".join(path.read_text()[-4000:] for path in self.state.glob("*.log") if path.name != "access.log")

    def ask(self, prompt: str = "Hi") -> Any:
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        return urllib.request.urlopen(urllib.request.Request(f"{self.url}/v1/completions", body), timeout=60)

    def says(self) -> str:
        text: str = self.ask().read().decode()
        return text.removesuffix("end")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    code, out, err = site.run("stop")
    assert code == 0, out + err
    status = site.status()
    assert not any(status.values()), status


def read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None and process.stderr is not None
    for said in process.stdout:
        if said.strip() == line:
            return
    raise AssertionError(f"it ended before it said {line!r}: {process.stderr.read()}")


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@contextlib.contextmanager
def asked_all_the_time(site: Site) -> Iterator[None]:
    """So that a version that fails only requests has some."""
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            with contextlib.suppress(OSError):
                site.says()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.long
@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("start", "green has ended"),
        ("health", "green is not ready after 2 s"),
        ("warm", "green does not answer: /v1/completions is 500 b'broken'"),
        ("later", "green fails requests"),
        ("dies", "green has ended"),
    ],
)
def test_a_broken_version_leaves_what_there_was(site: Site, broken: str, error: str) -> None:
    site.change(*STUB, "--token", "first")
    before = site.status()
    with asked_all_the_time(site):
        # Watched until it fails: how soon it does is the machine's business.
        patience = {"ready_timeout": 2} if broken == "health" else {"watch": 120}
        code, out, err = site.run("to", *STUB, "--token", "second", "--broken", broken, **patience)
    assert code == 1 and f"change.py: error: {error}" in err, out + err
    assert site.status() == before
    assert {site.says() for _ in range(10)} == {"first"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "serves"),
    [
        ("green starts at port {}", "first"),
        ("green has 50%", "first"),
        ("blue drains", "first"),
        ("blue ends", "second"),
    ],
)
def test_a_change_that_is_killed_is_brought_to_one_server(site: Site, at: str, serves: str) -> None:
    site.change(*STUB, "--token", "first", "--ignore-sigterm")
    with site.ask("wait") as stream:  # nothing can be drained before it ends
        drains_itself = at == "blue ends"
        change = site.start("to", *STUB, "--token", "second", drain_timeout=0 if drains_itself else 120)
        read_until(change, at.format(site.ports[1]))
        code, _, err = site.run("recover")
        assert code == 1 and "another change.py works on" in err
        kill(change)
        if not drains_itself:
            assert site.run("recover")[0] == 0
            urllib.request.urlopen(f"http://127.0.0.1:{site.ports[0]}/go-on").close()
            assert stream.read() == b"firstend"
    assert site.run("recover", stop_timeout=0)[0] == 0
    assert {site.says() for _ in range(10)} == {serves}
    status = site.status()
    assert (status["live"]["colour"], status["next"], status["old"]) == (
        "blue" if serves == "first" else "green",
        None,
        None,
    )
    assert site.run("stop", stop_timeout=0)[0] == 0


def test_streams_end_where_they_began_before_their_server_is_told_to_end(site: Site) -> None:
    site.change(*STUB, "--token", "first")
    with site.ask("wait") as stream:
        change = site.start("to", *STUB, "--token", "second")
        read_until(change, "blue drains")
        assert {site.says() for _ in range(10)} == {"second"}
        assert site.status()["live"]["colour"] == "blue", "until it has been told to end"
        urllib.request.urlopen(f"http://127.0.0.1:{site.ports[0]}/go-on").close()
        assert stream.read() == b"firstend"
    assert change.communicate(timeout=60)[0].splitlines() == ["blue ends", "green serves"]
    assert change.returncode == 0


def test_a_server_that_died_is_not_gone_back_to(site: Site) -> None:
    """Not by a change that was killed, nor by the next one."""
    site.change(*STUB, "--token", "first", "--broken", "dies")  # its warm-up was its last answer
    change = site.start("to", *STUB, "--token", "second", watch=120)
    read_until(change, "green has 10%")
    kill(change)
    assert {site.says() for _ in range(10)} == {"second"}, "each is asked of the other when the one dies"
    assert site.run("recover")[0] == 0
    assert site.status()["live"]["colour"] == "green"
    assert site.says() == "second"


@pytest.mark.long
def test_after_a_reboot_the_live_version_and_nginx_come_back(site: Site) -> None:
    site.change(*STUB, "--token", "first")
    site.change(*STUB, "--token", "second")
    before = site.status()
    os.kill(before["nginx"], signal.SIGTERM)
    os.kill(before["live"]["pid"], signal.SIGKILL)
    wait_until(lambda: (now := site.status())["nginx"] is None and now["live"]["pid"] is None)
    code, out, err = site.run("recover")
    assert code == 0, out + err
    assert {site.says() for _ in range(10)} == {"second"}
    assert site.status()["live"] == before["live"] | {"pid": site.status()["live"]["pid"]}


def test_systemd_takes_the_unit_that_brings_a_site_back(tmp_path: Path) -> None:
    text = CHANGE.with_name("octavo-site.service").read_text()
    for line in re.findall(r"^Exec\w+=\S+ (.+)$", text, re.MULTILINE):
        change, what, _ = line.split()
        assert change.endswith("deploy/blue-green/change.py") and what in ("recover", "stop")
    unit = tmp_path / "octavo-site.service"
    unit.write_text(text)
    assert analyze("verify", unit) == ""


def test_commands_that_cannot_be_meant(site: Site) -> None:
    assert "is followed by -- and the server's command" in site.run("to")[2]
    assert "a share lies between 0 and 100%" in site.run("recover", weights=100)[2]
    assert "'/run/x' is not an address" in site.run("recover", listen="/run/x")[2]
    with socket.create_server(("127.0.0.1", site.ports[0])):
        code, _, err = site.run("to", *STUB, "--token", "first")
    assert code == 1 and f"port {site.ports[0]} is taken by another program" in err


@pytest.mark.parametrize(
    ("nginx", "command", "error"),
    [
        ("/nowhere/nginx", STUB, "there is no program /nowhere/nginx: install it, or name it with --nginx"),
        (sys.executable, ("octavoo", "serve"), "there is no program octavoo: check its path"),
    ],
)
def test_nothing_starts_without_its_programs(tmp_path: Path, nginx: str, command: tuple[str, ...], error: str) -> None:
    argv = [sys.executable, str(CHANGE), "to", str(tmp_path / "state"), "--nginx", nginx, "--", *command]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"change.py: error: {error}\n")


class Clients:
    """Streams without a pause, each on a connection of its own, until they are told to end."""

    def __init__(self, url: str, number: int) -> None:
        self.url, self.number = url, number
        self.failures: list[str] = []
        self.done, self.ended = 0, threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.all()))

    async def all(self) -> None:
        limits = httpx.Limits(max_connections=self.number)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as client:
            await asyncio.gather(*(self.one(client, i) for i in range(self.number)))

    async def one(self, client: httpx.AsyncClient, i: int) -> None:
        body = {
            "model": "m", "prompt": f"{i}: ", "max_tokens": 24, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        while not self.ended.is_set():
            try:
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
                assert answer.status_code == 200, lines
                assert lines[-1] == "[DONE]", lines
                assert json.loads(lines[-2])["usage"]["completion_tokens"] == 24, lines
                self.done += 1
            except (httpx.HTTPError, AssertionError) as error:
                self.failures.append(repr(error))

    def __enter__(self) -> Clients:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("num_clients", "num_changes", "num_broken"), [(8, 2, 0), pytest.param(64, 10, 4, marks=pytest.mark.timeout(1200))]
)
def test_no_request_fails_while_servers_change(
    site: Site, tmp_path: Path, tiny_tokenizer: Path, num_clients: int, num_changes: int, num_broken: int
) -> None:
    """Real servers of a small random model; the broken version does not have it by the name that clients know."""
    for file in tiny_tokenizer.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    serve = (
        sys.executable, "-m", "octavo.entrypoints.openai.api_server", "--model", str(tmp_path),
        "--load-format", "dummy", "--kv-cache-memory-bytes", "64M", "--cpu-threads", "1", "--served-model-name",
    )  # fmt: skip
    site.change(*serve, "m")
    colours = ["blue"]
    with Clients(site.url, num_clients) as clients:
        wait_until(lambda: clients.done >= num_clients)
        for i in range(num_changes):
            before = clients.done
            if i == num_broken:
                code, _, err = site.run("to", *serve, "other")
                assert code == 1 and "does not answer: /v1/completions is 404" in err, err
            else:
                site.change(*serve, "m")
                colours.append(site.status()["live"]["colour"])
            wait_until(lambda before=before: clients.done >= before + num_clients)
    assert not clients.failures
    assert colours == [("blue", "green")[i % 2] for i in range(num_changes)]
    asked = Counter(line.split()[-2] for line in (site.state / "access.log").read_text().splitlines())
    assert all(asked[f"127.0.0.1:{port}"] > 0 for port in site.ports), asked
