"""Stages and engines on hosts that have addresses of their own, and one of which is cut off in the middle of streams.

The hosts are namespaces (`tests.distributed.hosts`). The first test starts the others on the first host, beside Ray,
which the tests' environment lacks. Times are shown by `-rP`, and are not part of what is tested. All of it is left to
a machine with nothing else to do (`OCTAVO_TEST_HOSTS=1`): what Ray itself waits for cannot be had without a clock.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from octavo.distributed import ray_hosts
from tests import waiting
from tests.distributed.hosts import Host, first_host, network, why_no_hosts
from tests.distributed.rays import install_ray
from tests.e2e.server import Server, running_server
from tests.waiting import within

ROOT = Path(__file__).parents[2]
ON_HOST = "TESTS_ARE_ON_A_HOST"  # set there
WANTED = "OCTAVO_TEST_HOSTS"
on_first_host = pytest.mark.skipif(ON_HOST not in os.environ, reason="the first test runs these on the first host")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PROMPTS = [f"The {name} of the house is" for name in ("colour", "roof", "door", "owner")]
IS_BACK = "takes requests again"
ENDLESS = 60_000  # tokens of a stream that is cut off, or that a test has enough of


@pytest.mark.skipif(ON_HOST in os.environ, reason="this is the first host: the tests below are run")
@pytest.mark.skipif(WANTED not in os.environ, reason=f"{WANTED} is not set; two minutes of an idle machine")
@pytest.mark.timeout(3600)
def test_the_tests_below_pass_on_the_first_host(tmp_path: Path) -> None:
    if why := why_no_hosts():
        pytest.skip(why)
    why_no_ray = None if find_spec("ray") is not None else install_ray(tmp_path)
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT), str(tmp_path)]))
    environment = os.environ | {"PYTHONPATH": path, ON_HOST: "1", "OCTAVO_NODES_TOKEN": "of the tests"}
    command = [sys.executable, "-m", "pytest", "-q", "-rPs", "-n", "0", "--all", __file__]
    done = subprocess.run(first_host(command), cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    if why_no_ray:
        pytest.skip(f"all but Ray's tests have passed: {why_no_ray}")
    assert " 1 skipped" in done.stdout.splitlines()[-1], "this one"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> str:
    """Of random weights, with four layers and room for a long stream."""
    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=259, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1 << 16, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, architectures=["LlamaForCausalLM"], tie_word_embeddings=False, dtype="float32",
    ).save_pretrained(folder)  # fmt: skip
    for file in tiny_tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


def flags_of(model: str) -> list[str]:
    flags = ["--model", model, "--served-model-name", "m", "--load-format", "dummy", "--seed", "3", "--device", "cpu"]
    flags += ["--on-engine-death", "fail"]  # what is lost shows what was cut off
    return [*flags, "--cpu-threads", "1", "--kv-cache-memory-bytes", "200000000", "--max-num-seqs", "8"]


def complete(server: Server, prompt: str, engine: int | None = None, **fields: Any) -> Any:
    question = {"model": "m", "prompt": prompt, "temperature": 0, "ignore_eos": True, "logprobs": 1} | fields
    body = json.dumps(question).encode()
    headers = {"content-type": "application/json"} | ({} if engine is None else {"x-data-parallel-rank": str(engine)})
    return urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/completions", body, headers), timeout=300)


def answers(server: Server, engine: int | None = None) -> list[Any]:
    """Tokens and their log-probabilities, of greedy and of drawn answers."""
    asked: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}]
    return [
        json.load(complete(server, prompt, engine, max_tokens=24, **settings))["choices"]
        for prompt in PROMPTS
        for settings in asked
    ]


wait_until = functools.partial(waiting.wait_until, timeout_s=400)


def is_well(server: Server) -> bool:
    return server.get("/health")[0] == 200


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with network(4) as found:
        yield found


@pytest.fixture(scope="module")
def expected(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What one worker answers."""
    with running_server(tmp_path_factory.mktemp("alone"), *flags_of(model)) as server:
        return answers(server)


@pytest.fixture(scope="module")
def rays_hosts(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """All, of one cluster of Ray's, which notices in less than a minute that one does not answer."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("RAY_raylet_start_wait_time_s", "300")  # instead of 30, where others compute too
        changed.setenv("RAY_health_check_timeout_ms", "2000")  # instead of 10,000, five times in a row
        log = tmp_path_factory.mktemp("ray") / "ray.log"
        for host in hosts:
            host.start_ray(log, hosts[0])
        ray_hosts._connect("--distributed-executor-backend")
        yield hosts
        sys.modules["ray"].shutdown()


@pytest.fixture
def cluster(rays_hosts: list[Host], tmp_path: Path) -> list[Host]:
    """All are there, and nothing of them is taken. A host that Ray has given up meanwhile joins again."""
    import ray

    def is_free() -> bool:
        for host in rays_hosts:
            if not host.has_ray():
                host.start_ray(tmp_path / "ray.log", rays_hosts[0])
        return bool(ray.available_resources().get("CPU") == 2 * len(rays_hosts))

    wait_until(is_free, ray.available_resources)
    return rays_hosts


def host_of(server: Server, member: str, hosts: list[Host]) -> Host:
    """Where a node or an engine is, as the server's log says."""
    named = re.findall(rf"{member} \((\w+), ", server.log.read_text())[-1]
    return next(host for host in hosts if host.name == named)


def cut_off(server: Server, host: Host) -> int:
    """Cut a host off amid four streams. Returns how many of them are lost by that; the others go on."""
    streams = [complete(server, one, max_tokens=ENDLESS, stream=True, logprobs=None) for one in PROMPTS]
    num_lines, lost, has_seen_enough = [0] * len(streams), [False] * len(streams), threading.Event()
    first_loss: list[list[int]] = []

    def read(i: int) -> None:
        for line in streams[i]:
            num_lines[i] += 1
            if b"engine_dead" in line:
                print(f"stream {i} was lost {time.monotonic() - begin:.2f} s after the cut")
                lost[i] = True
                first_loss.append(list(num_lines))
            if lost[i] or has_seen_enough.is_set():
                break
        streams[i].close()

    def have_all_gone_on() -> bool:
        if not first_loss:
            return False
        before = first_loss[0]
        return all(lost[i] or num_lines[i] > before[i] + 20 for i in range(len(streams)))

    threads = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(len(streams))]
    for thread in threads:
        thread.start()
    wait_until(lambda: min(num_lines) > 20, server.log.read_text)
    begin = time.monotonic()
    host.cut_off()
    wait_until(have_all_gone_on, server.log.read_text)
    has_seen_enough.set()
    for thread in threads:
        thread.join()
    return sum(lost)


def back_again(server: Server, host: Host) -> None:
    """Give a host its link again, and wait until all is as it was."""
    num_back = server.log.read_text().count(IS_BACK)
    begin = time.monotonic()
    host.reconnect()
    wait_until(lambda: server.log.read_text().count(IS_BACK) > num_back and is_well(server), server.log.read_text)
    print(f"requests are taken {time.monotonic() - begin:.1f} s after the link is back")


STAGES_BY_RAY = ["--distributed-executor-backend", "ray"]
ENGINES_BY_RAY = ["--data-parallel-size-local", "1", "--data-parallel-backend", "ray"]


@on_first_host
@needs_ray
def test_stages_of_ray_go_on_on_another_host(
    cluster: list[Host], model: str, expected: list[Any], tmp_path: Path
) -> None:
    with running_server(tmp_path, *flags_of(model), "-pp", "2", *STAGES_BY_RAY) as server:
        assert answers(server) == expected
        host = host_of(server, "node 1", cluster)
        begin = time.monotonic()
        assert cut_off(server, host) == 4
        wait_until(lambda: IS_BACK in server.log.read_text() and is_well(server), server.log.read_text)
        print(f"another host has its place {time.monotonic() - begin:.1f} s after the streams began")
        assert host_of(server, "node 1", cluster) is not host
        assert answers(server) == expected
        host.reconnect()
        assert server.stop() == 0


@on_first_host
@needs_ray
def test_stages_of_ray_wait_for_the_host_that_they_need(
    cluster: list[Host], model: str, expected: list[Any], tmp_path: Path
) -> None:
    with running_server(tmp_path, *flags_of(model), "-pp", "4", *STAGES_BY_RAY) as server:
        assert answers(server) == expected
        host = host_of(server, "node 3", cluster)
        assert cut_off(server, host) == 4
        wait_until(lambda: "It is waited for." in server.log.read_text(), server.log.read_text)
        back_again(server, host)
        assert server.log.read_text().count("quick deaths") == 1, "a host that lacks is none"
        assert answers(server) == expected
        assert server.stop() == 0


@on_first_host
@needs_ray
@pytest.mark.parametrize("size", [2, 4])
def test_engines_of_ray_go_on_without_one(
    cluster: list[Host], model: str, expected: list[Any], tmp_path: Path, size: int
) -> None:
    with running_server(tmp_path, *flags_of(model), "-dp", str(size), *ENGINES_BY_RAY) as server:
        loses_an_engine(server, cluster, size - 1, expected)
        assert server.stop() == 0


def loses_an_engine(server: Server, hosts: list[Host], rank: int, expected: list[Any]) -> None:
    assert answers(server) == expected
    host = host_of(server, f"engine {rank}", hosts)
    assert 0 < cut_off(server, host) < 4
    assert is_well(server)
    assert answers(server) == expected
    back_again(server, host)
    for engine in range(rank + 1):
        assert answers(server, engine) == expected


@on_first_host
@needs_ray
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-pp", "4", "--cpu-threads", "3", *STAGES_BY_RAY], "no room for 4 nodes on hosts of their own, this one"),
        (["-dp", "5", *ENGINES_BY_RAY], "no room for 5 nodes on hosts of their own, this one among them, with 1 CPUs"),
    ],
)
def test_a_cluster_that_has_too_little_is_told(
    cluster: list[Host], model: str, tmp_path: Path, flags: list[str], message: str
) -> None:
    begin = time.monotonic()
    with running_server(tmp_path, *flags_of(model), *flags, wait=False) as server:
        assert server.process.wait(within(240)) == 1
        print(f"ended {time.monotonic() - begin:.1f} s after its start")
        told = server.log.read_text()
        assert message in told
        assert all(f"{host.name} 2" in told for host in cluster), "what each has"


@contextlib.contextmanager
def started_by_hand(hosts: list[Host], log: Path, *flags: str, which: str) -> Iterator[None]:
    """`--headless` servers on all hosts but the first, each with its number; which end with the first host's."""
    with open(log, "wb") as out, contextlib.ExitStack() as processes:
        headless = [sys.executable, "-m", "octavo.entrypoints.openai.api_server", "--headless", *flags]
        started = [
            processes.enter_context(
                subprocess.Popen(host.command(*headless, which, str(i)), stdout=out, stderr=subprocess.STDOUT)
            )
            for i, host in enumerate(hosts)
            if i > 0
        ]
        for process in started:
            processes.callback(process.kill)
        yield
        wait_until(lambda: all(process.poll() is not None for process in started), log.read_text)
        assert [process.returncode for process in started] == [0] * len(started), log.read_text()


@on_first_host
def test_stages_by_hand(hosts: list[Host], model: str, expected: list[Any], tmp_path: Path) -> None:
    flags = [*flags_of(model), "-pp", "4", "--nnodes", "4", "--master-addr", hosts[0].address]
    with (
        started_by_hand(hosts, tmp_path / "nodes.log", *flags, which="--node-rank"),
        running_server(tmp_path, *flags) as server,
    ):
        assert answers(server) == expected
        for rank in (1, 3):
            host = host_of(server, f"node {rank}", hosts)
            assert cut_off(server, host) == 4
            assert server.get("/health")[0] == 503
            back_again(server, host)
            assert answers(server) == expected
        assert server.stop() == 0


@on_first_host
def test_engines_by_hand(hosts: list[Host], model: str, expected: list[Any], tmp_path: Path) -> None:
    flags = [*flags_of(model), "-dp", "4", "--data-parallel-size-local", "1"]
    flags += ["--data-parallel-address", hosts[0].address]
    with (
        started_by_hand(hosts, tmp_path / "engines.log", *flags, which="--data-parallel-start-rank"),
        running_server(tmp_path, *flags) as server,
    ):
        loses_an_engine(server, hosts, 3, expected)
        assert server.stop() == 0
