"""`octavo gateway` in front of real servers: the default model under two names, in the memory of one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import psutil
import pytest

from octavo.gateway.client_keys import DAY_S
from tests.e2e.server import GATEWAY, MODEL, Server, openai_client, running_server
from tests.gateway.key_databases import SERVERS
from tests.gateway.key_databases import server as database_server
from tests.waiting import wait_until, within

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the gateway needs SIGHUP and process groups")
CATALOGUE = f"""
models:
  first: {{model: {MODEL}, memory_gib: 1, flags: &small {{max-model-len: 512, kv-cache-memory-bytes: 64M}}}}
  second: {{model: {MODEL}, memory_gib: 1, aliases: [gpt-4o], flags: *small}}
  broken: {{model: {MODEL}, memory_gib: 1, flags: {{max-model-len: 99999999}}}}
"""


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Server]:
    file = tmp_path / "models.yaml"
    file.write_text(CATALOGUE)
    with running_server(tmp_path, "--catalogue", str(file), "--memory-gib", "1", command=GATEWAY) as server:
        yield server


def children(server: Server) -> list[psutil.Process]:
    """The servers that the gateway has started."""
    return psutil.Process(server.process.pid).children()


def say(client: openai.OpenAI, model: str) -> str:
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Count to five."}], max_tokens=12, temperature=0, stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


@pytest.mark.long
def test_models_start_when_asked_for_and_share_the_memory_of_one(gateway: Server) -> None:
    assert children(gateway) == []
    with openai_client(gateway) as client:
        assert {model.id for model in client.models.list()} == {"first", "second", "gpt-4o", "broken"}
        answer = say(client, "first")
        (first,) = children(gateway)
        assert answer and say(client, "gpt-4o") == answer
        (second,) = children(gateway)
        assert second.pid != first.pid and not first.is_running()
        second.kill()
        assert say(client, "second") == answer, "a server that was killed is started again"
        with pytest.raises(openai.InternalServerError, match="max-model-len") as caught:
            client.chat.completions.create(model="broken", messages=[{"role": "user", "content": "x"}])
        assert caught.value.code == "start_failed"
    assert gateway.count('octavo_gateway_starts_total{model="second"}') == 2
    assert gateway.stop() == 0 and "Traceback" not in gateway.log.read_text()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a child is not told that its parent has ended")
def test_no_server_outlives_a_gateway_that_is_killed(gateway: Server) -> None:
    with openai_client(gateway) as client:
        say(client, "first")
    (first,) = children(gateway)
    os.kill(gateway.process.pid, signal.SIGKILL)
    wait_until(lambda: not first.is_running() or first.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.long
def test_an_adapter_is_a_model_of_the_server_of_its_base(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from tests.lora.random_adapters import write_random_adapter

    folder = write_random_adapter(tmp_path / "pirate", 1, strength=1.0)
    file = tmp_path / "models.yaml"
    flags = "{max-model-len: 512, kv-cache-memory-bytes: 64M}"
    file.write_text(f"""models:
  base: {{model: {MODEL}, flags: {flags}}}
  pirate: {{adapter_of: base, model: {folder}, aliases: [jack]}}
""")
    with running_server(tmp_path, "--catalogue", str(file), command=GATEWAY) as server, openai_client(server) as client:
        answer = say(client, "jack")
        assert answer != say(client, "base") and answer == say(client, "pirate")
        assert len(children(server)) == 1
        file.write_text(file.read_text().replace(str(folder), str(tmp_path)))
        wait_until(lambda: "the catalogue was read again" in server.log.read_text())
        with pytest.raises(openai.InternalServerError, match="is no adapter of PEFT") as caught:
            client.chat.completions.create(model="pirate", messages=[{"role": "user", "content": "x"}])
        assert caught.value.code == "start_failed"


def octavo(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GATEWAY[:-1], *words], capture_output=True, text=True, timeout=within(90))


@pytest.mark.long
def test_people_and_ollamas_clients_use_it(gateway: Server) -> None:
    client = ollama.Client(gateway.url)
    options = {"num_predict": 8, "temperature": 0}
    parts = list(client.chat("first", [{"role": "user", "content": "Hi"}], stream=True, options=options))
    assert parts[-1].done and 1 <= parts[-1].eval_count <= 8 and parts[-1].prompt_eval_count > 1
    assert "completion" in client.show("first").capabilities
    (before,) = children(gateway)
    assert octavo("ps", "--url", gateway.url).stdout.splitlines()[1].startswith("first ")
    asking = ("run", "first", "--url", gateway.url, "-q", "Hi", "--max-tokens", "4")
    assert octavo(*asking).returncode == 0 and children(gateway) == [before]
    refused = octavo(*asking, "--max-model-len", "64")
    assert refused.returncode == 1 and "--max-model-len" in refused.stderr
    assert octavo("stop", "first", "--url", gateway.url).returncode == 0
    wait_until(lambda: not children(gateway))


@pytest.mark.long
def test_a_model_that_nobody_serves_is_served_while_one_talks() -> None:
    flags = ("--max-model-len", "512", "--kv-cache-memory-bytes", "64M", "--max-tokens", "4")
    done = octavo("run", MODEL, "-q", "Hi", "--url", "http://127.0.0.1:1", *flags)
    assert done.returncode == 0 and done.stdout.endswith("\n"), done.stderr
    broken = octavo("run", MODEL, "-q", "Hi", "--url", "http://127.0.0.1:1", "--max-model-len", "99999999")
    assert broken.returncode == 1 and broken.stderr.splitlines()[-1].count("max-model-len") >= 1


@pytest.fixture
def two_replicas(tmp_path: Path) -> Iterator[Server]:
    file = tmp_path / "models.yaml"
    flags = "{max-model-len: 512, kv-cache-memory-bytes: 64M, cpu-threads: 1, shutdown-timeout: 0}"
    file.write_text(f"models:\n  pair: {{model: {MODEL}, replicas: 2, preload: true, flags: {flags}}}\n")
    with running_server(tmp_path, "--catalogue", str(file), command=GATEWAY) as server:
        wait_until(lambda: server.count('octavo_gateway_model_ready{model="pair"}') == 1)
        yield server


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 400, "stream_options": {"include_usage": True}},
    "/v1/responses": {"max_output_tokens": 400},
    "/v1/messages": {"max_tokens": 400},
}


def read_stream(path: str, text: str) -> list[Any]:
    """The answer in a stream's events, which may part it anywhere: its text, and what its end says."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if path == "/v1/chat/completions":
        assert lines[-1] == "[DONE]" and len({event["id"] for event in events}) == 1
        choices = [choice for event in events for choice in event["choices"]]
        deltas = [choice["delta"].get("content") or "" for choice in choices]
        return ["".join(deltas), choices[-1]["finish_reason"], events[-1]["usage"]["completion_tokens"]]
    if path == "/v1/responses":
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        response = events[-1]["response"]
        assert response["id"] == events[0]["response"]["id"]
        assert response["output"][0]["content"][0]["text"] == "".join(deltas)
        return ["".join(deltas), response["status"], response["usage"]["output_tokens"]]
    assert events[-1]["type"] == "message_stop"
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    end = next(event for event in events if event["type"] == "message_delta")
    return ["".join(deltas), end["delta"]["stop_reason"], end["usage"]["output_tokens"]]


@pytest.mark.long
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_streams_of_a_replica_that_ends_go_on_with_equal_bits(
    two_replicas: Server, path: str, end: signal.Signals
) -> None:
    with continued_streams(two_replicas, path, 6):
        children(two_replicas)[0].send_signal(end)
    resumed = re.findall(r"octavo_gateway_resumed_streams_total\{.*\} (\S+)", two_replicas.get("/metrics")[1])
    assert sum(map(float, resumed)) >= 1, "each replica had some of the streams"


@pytest.mark.long
def test_streams_of_the_only_server_go_on_with_equal_bits_when_it_is_started_again(tmp_path: Path) -> None:
    flags = (
        "--served-model-name", "pair", "--max-model-len", "512", "--kv-cache-memory-bytes", "64M", "--cpu-threads", "1"
    )  # fmt: skip
    serve = [*GATEWAY[:-1], "serve", MODEL]
    with running_server(tmp_path, *flags, command=serve) as server:
        file = tmp_path / "models.yaml"
        file.write_text(f"models:\n  pair: {{addresses: ['{server.url}']}}\n")
        here = "--port", server.url.rpartition(":")[2]
        with (
            running_server(tmp_path, "--catalogue", str(file), command=GATEWAY) as gate,
            contextlib.ExitStack() as again,
            continued_streams(gate, "/v1/chat/completions", 3),
        ):
            server.process.kill()
            server.process.wait()
            again.enter_context(running_server(tmp_path, *flags, *here, command=serve, wait=False))


@contextlib.contextmanager
def continued_streams(gateway: Server, path: str, num_streams: int) -> Iterator[None]:
    """In the block streams are under way. They end as they do alone, whatever happens in it."""
    begun = threading.Semaphore(0)

    def ask(number: int) -> list[Any]:
        said = [{"role": "user", "content": f"Tell a tale of {number} hens."}]
        body: dict[str, Any] = {"model": "pair", "stream": True, "temperature": 0.8, "seed": number, **BODIES[path]}
        if path == "/v1/messages":
            del body["seed"]
            body["temperature"] = 0.0
        else:
            body["ignore_eos"] = True  # none ends before the kill, whatever its tokens
        body["input" if path == "/v1/responses" else "messages"] = said
        text = ""
        with httpx.stream("POST", gateway.url + path, json=body, timeout=within(90)) as response:
            is_begun = False
            for piece in response.iter_text():  # of several events, maybe
                text += piece
                if not is_begun and text.count("data: ") >= 8:
                    is_begun = True
                    begun.release()
        return read_stream(path, text)

    with ThreadPoolExecutor(num_streams) as threads:
        expected = list(threads.map(ask, range(num_streams)))
        for _ in range(num_streams):
            assert begun.acquire(blocking=False)
        asking = [threads.submit(ask, number) for number in range(num_streams)]
        for _ in range(num_streams):
            assert begun.acquire(timeout=within(90))
        yield
        assert [one.result() for one in asking] == expected


class Upstream(ThreadingHTTPServer):
    """A server that answers with a usage of 4 and 3 tokens, and counts requests by their user."""

    request_queue_size = 512

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), _Answer)
        self.seen: Counter[str] = Counter()


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def do_GET(self) -> None:
        self._reply(b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen[body["user"]] += 1
        self._reply(b'{"usage": {"prompt_tokens": 4, "completion_tokens": 3}}')

    def _reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def admin(server: Server, method: str, path: str, **fields: Any) -> Any:
    address = re.findall(r"the admin routes listen at (\S+)", server.log.read_text())[-1]
    headers = {"authorization": "Bearer root"}
    return httpx.request(method, address + path, headers=headers, timeout=within(60), **fields).json()


@pytest.mark.parametrize(("num_keys", "limit"), [(8, 40), pytest.param(100, 100, marks=pytest.mark.long)])
def test_every_count_is_exact_and_limits_hold_after_a_kill(tmp_path: Path, num_keys: int, limit: int) -> None:
    """The keys use up their limits, half of it before the kill. Each key has one request under way at a time."""
    file = tmp_path / "models.yaml"
    flags = ("--catalogue", str(file), "--keys", str(tmp_path / "keys.db"), "--admin-port", "0", "--admin-key", "root")
    days = {int(time.time() // DAY_S)}
    answered: Counter[str] = Counter()

    def use_up(url: str, keys: list[dict[str, str]]) -> None:
        """Ask with each key in turn until it is refused, or the gateway has gone."""
        left = list(keys)
        with httpx.Client(timeout=within(60)) as client:
            while left:
                for key in list(left):
                    headers, body = {"authorization": f"Bearer {key['key']}"}, {"model": "m", "user": key["id"]}
                    try:
                        response = client.post(url + "/v1/chat/completions", json=body, headers=headers)
                    except httpx.TransportError:
                        return
                    assert response.status_code in (200, 429), response.text
                    answered[key["id"]] += response.status_code == 200
                    if response.status_code == 429:
                        left.remove(key)

    with Upstream() as upstream, ThreadPoolExecutor(9) as threads:
        threads.submit(upstream.serve_forever)
        try:
            file.write_text(f"models:\n  m: {{addresses: ['http://127.0.0.1:{upstream.server_port}']}}\n")
            with running_server(tmp_path, *flags, command=GATEWAY) as server:
                settings = [{"name": f"k{number}", "requests_per_day": limit} for number in range(num_keys)]
                made = [admin(server, "POST", "/keys", json=one) for one in settings]
                asking = [threads.submit(use_up, server.url, made[number::8]) for number in range(8)]
                wait_until(lambda: upstream.seen.total() >= num_keys * limit / 2, timeout_s=240)
                os.kill(server.process.pid, signal.SIGKILL)
                for one in asking:
                    one.result()
            assert num_keys * limit / 4 <= answered.total() < num_keys * limit, "the kill was amid them"
            with running_server(tmp_path, *flags, command=GATEWAY) as server:
                for one in [threads.submit(use_up, server.url, made[number::8]) for number in range(8)]:
                    one.result()
                used = {key["id"]: key["used"] for key in admin(server, "GET", "/keys")["data"]}
        finally:
            upstream.shutdown()
    days.add(int(time.time() // DAY_S))  # two, at midnight, when limits begin anew
    assert used.keys() == {key["id"] for key in made}
    for key_id, counts in used.items():
        assert counts["requests"] in {limit, limit * len(days)}, "no more, and no less"
        num_counted, rest = divmod(counts["completion_tokens"], 3)
        assert rest == 0 and counts["prompt_tokens"] == 4 * num_counted
        assert answered[key_id] <= num_counted <= upstream.seen[key_id] <= counts["requests"] <= answered[key_id] + 1
        assert len(days) == 2 or answered[key_id] >= limit - 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.parametrize("on_loss", ["refuse", "admit"])
def test_a_full_disk_refuses_or_admits_and_every_count_is_exact_once_there_is_room(
    tmp_path: Path, on_loss: str
) -> None:
    file, disk = tmp_path / "models.yaml", tmp_path / "disk"
    disk.mkdir()
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"', str(disk)]
    flags = ("--catalogue", str(file), "--keys", str(disk / "keys.db"), "--on-keys-lost", on_loss,
             "--admin-port", "0", "--admin-key", "root")  # fmt: skip
    statuses: Counter[int] = Counter()

    with Upstream() as upstream, ThreadPoolExecutor(1) as threads:
        threads.submit(upstream.serve_forever)
        try:
            file.write_text(f"models:\n  m: {{addresses: ['http://127.0.0.1:{upstream.server_port}']}}\n")
            with running_server(tmp_path, *flags, command=[*mount, *GATEWAY]) as server:
                key = admin(server, "POST", "/keys", json={"name": "a"})

                def ask() -> int:
                    status = httpx.post(
                        server.url + "/v1/chat/completions", json={"model": "m", "user": "u"}, timeout=within(60),
                        headers={"authorization": f"Bearer {key['key']}"},
                    ).status_code  # fmt: skip
                    statuses[status] += 1
                    return status

                assert ask() == 200
                ballast = Path(f"/proc/{server.process.pid}/root{disk}/ballast")
                with ballast.open("wb", buffering=0) as out, contextlib.suppress(OSError):  # "No space left"
                    while True:
                        out.write(bytes(1024))
                while "disk is full" not in server.log.read_text():
                    assert ask() in (200, 503) and statuses.total() < 500
                assert ask() == (503 if on_loss == "refuse" else 200)
                ballast.unlink()
                wait_until(lambda: ask() == 200)
                assert set(statuses) == ({200, 503} if on_loss == "refuse" else {200})

                def used() -> list[int]:
                    counts = admin(server, "GET", f"/keys/{key['id']}").get("used", {})  # an error for a moment
                    return [counts.get(name, -1) for name in ("requests", "prompt_tokens", "completion_tokens")]

                wait_until(lambda: used() == [statuses[200] * each for each in (1, 4, 3)], used)
                assert upstream.seen["u"] == statuses[200]
        finally:
            upstream.shutdown()


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a process another /etc/hosts")
def test_the_addresses_of_a_name_are_followed(tmp_path: Path) -> None:
    file, hosts = tmp_path / "models.yaml", tmp_path / "hosts"
    script = 'mount --bind "$0" /etc/hosts && mount --bind /dev/null /etc/resolv.conf && exec "$@"'
    resolver = ["env", "RESOLV_MULTI=on", "unshare", "--mount", "sh", "-c", script, str(hosts)]
    with Upstream() as one, Upstream("127.0.0.2", one.server_port) as other, ThreadPoolExecutor(2) as threads:
        for upstream in (one, other):
            threads.submit(upstream.serve_forever)
        try:
            file.write_text(f"models: {{m: {{discover: 'dns+http://replicas:{one.server_port}'}}}}")
            hosts.write_text("127.0.0.1 replicas\n")
            with running_server(tmp_path, "--catalogue", str(file), command=[*resolver, *GATEWAY]) as server:

                def ask() -> tuple[int, int]:
                    """Return how often each was asked, once one of them has been asked again."""
                    body = {"model": "m", "user": "u"}
                    response = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=within(60))
                    assert response.status_code == 200, response.text
                    return one.seen["u"], other.seen["u"]

                assert ask() == (1, 0)
                hosts.write_text("127.0.0.1 replicas\n127.0.0.2 replicas\n")
                wait_until(lambda: ask()[1] > 0)
                hosts.write_text("127.0.0.2 replicas\n")
                up = f'replica_up{{model="m",replica="http://127.0.0.1:{one.server_port}"}}'
                wait_until(lambda: up not in server.get("/metrics")[1])
                num_asked, before = ask()
                hosts.write_text("")
                wait_until(lambda: "replicas has no address now" in server.log.read_text())
                assert ask() == (num_asked, before + 1), "its replicas stay as they are"
        finally:
            one.shutdown()
            other.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("kind", SERVERS)
def test_gateways_with_one_database_keep_limits_though_one_is_killed(tmp_path: Path, kind: str) -> None:
    """Of three clients of each key two are at a gateway that is killed amid them, and go on at the other one."""
    num_keys, limit = 8, 50
    days = {int(time.time() // DAY_S)}
    answered: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    unsure: Counter[str] = Counter()
    file = tmp_path / "models.yaml"

    def ask(urls: list[str], key_id: str, secret: str) -> None:
        with httpx.Client(headers={"authorization": f"Bearer {secret}"}, timeout=within(60)) as client:
            while True:
                try:
                    response = client.post(urls[0] + "/v1/chat/completions", json={"model": "m", "user": key_id})
                except httpx.TransportError:
                    unsure[key_id] += len(urls) == 1  # a busy machine's connection that broke
                    assert unsure[key_id] < 100, "the other gateway is gone too"
                    urls = urls[1:] or urls
                    continue
                if response.status_code == 503:  # a machine that is too busy for one of the servers to answer
                    unsure[key_id] += 1
                    continue
                if response.status_code == 429:
                    refused[key_id] += 1
                    return
                assert response.status_code == 200, response.text
                answered[key_id] += 1

    with (
        database_server(kind) as database, Upstream() as upstream, ThreadPoolExecutor(3 * num_keys + 1) as threads
    ):  # fmt: skip
        threads.submit(upstream.serve_forever)
        try:
            file.write_text(f"models:\n  m: {{addresses: ['http://127.0.0.1:{upstream.server_port}']}}\n")
            flags = (
                "--catalogue", str(file), "--keys", database.url(), "--admin-port", "0", "--admin-key", "root"
            )  # fmt: skip
            (tmp_path / "other").mkdir()
            with (
                running_server(tmp_path, *flags, command=GATEWAY) as server,
                running_server(tmp_path / "other", *flags, command=GATEWAY) as other,
            ):
                settings = [{"name": f"k{number}", "requests_per_day": limit} for number in range(num_keys)]
                made = [admin(server, "POST", "/keys", json=one) for one in settings]
                ways = [[server.url, other.url], [server.url, other.url], [other.url]]
                asking = [threads.submit(ask, way, key["id"], key["key"]) for way in ways for key in made]
                wait_until(lambda: upstream.seen.total() >= num_keys * limit / 3)
                os.kill(server.process.pid, signal.SIGKILL)
                for one in asking:
                    one.result()
                used = {key["id"]: key["used"] for key in admin(other, "GET", "/keys")["data"]}
        finally:
            upstream.shutdown()
    assert used.keys() == {key["id"] for key in made} and set(refused.values()) == {3}
    days.add(int(time.time() // DAY_S))  # two, at midnight, when limits begin anew
    for key_id, counts in used.items():
        assert limit - unsure[key_id] <= counts["requests"] <= limit * len(days), "no more, and no less"
        num_counted, rest = divmod(counts["completion_tokens"], 3)
        assert rest == 0 and counts["prompt_tokens"] == 4 * num_counted
        # At the kill a key had two requests under way there at most.
        assert counts["requests"] - 2 - unsure[key_id] <= answered[key_id]
        assert answered[key_id] <= num_counted <= upstream.seen[key_id] <= counts["requests"]


@pytest.mark.long
def test_adapters_and_conversations_stay_at_their_servers_when_the_gateway_starts_again(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from tests.lora.random_adapters import write_random_adapter

    names = ("pirate", "knight")
    adapters = [f"{name}={write_random_adapter(tmp_path / name, seed)}" for seed, name in enumerate(names)]
    flags = ("--max-model-len", "512", "--kv-cache-memory-bytes", "64M", "--cpu-threads", "1")
    flags += ("--enable-lora", "--max-loras", "1", "--lora-modules", *adapters)
    with running_server(tmp_path, *flags) as one, running_server(tmp_path, *flags) as other:
        addresses = f"addresses: [{one.url}, {other.url}]"
        entries = [
            f"base: {{{addresses}, served_model_name: {MODEL}}}",
            *(f"{name}: {{{addresses}}}" for name in names),
        ]
        (tmp_path / "models.yaml").write_text("models:\n" + "".join(f"  {entry}\n" for entry in entries))
        messages = [{"role": "user", "content": "Tell me of the sea. " * 8}]
        hits = []
        for _ in range(2):
            gateway = running_server(tmp_path, "--catalogue", str(tmp_path / "models.yaml"), command=GATEWAY)
            with gateway as server, openai_client(server) as client:
                for number in range(8):
                    say(client, names[number % 2])
                answer = client.chat.completions.create(model="base", messages=messages, max_tokens=4, temperature=0)
                assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
                hits.append(answer.usage.prompt_tokens_details.cached_tokens)
                said = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
        assert [each.count("octavo:adapter_loads_total") for each in (one, other)] == [1, 1]
        assert hits[0] == 0 < hits[1], "the second gateway knows where the conversation is"
