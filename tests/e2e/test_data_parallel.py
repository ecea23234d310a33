"""A real server of two engines, one of which is killed."""

from __future__ import annotations

import re
from pathlib import Path

import openai
import psutil
import pytest

from tests.e2e.server import MODEL, Server, running_server
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def cores(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "core_process" in " ".join(child.cmdline())]


def counts(server: Server) -> list[int]:
    """Requests that have reached their length, by engine."""
    found = re.findall(
        r'request_success_total{engine="[01]",finished_reason="length",.*} (\d+)', server.get("/metrics")[1]
    )
    return list(map(int, found))


def ask(client: openai.OpenAI, prompt: str) -> str:
    return client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0).choices[0].text


@pytest.mark.long
def test_two_engines_answer_alike_and_go_on_with_the_streams_of_one_that_is_killed(tmp_path: Path) -> None:
    flags = ("-dp", "2", "--max-model-len", "1024", "--max-engine-restarts", "3")
    with running_server(tmp_path, *flags) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        first = cores(server)
        assert len(first) == 2
        prompts = [f"The {number} of the house is" for number in ("colour", "roof", "door", "owner")]
        answers = [ask(client, prompt) for prompt in prompts]
        counted = server.get("/metrics")[1]
        for engine in (0, 1):
            served = f'vllm:request_success_total{{engine="{engine}",finished_reason="length",model_name="{MODEL}"}} '
            assert served in counted and f"{served}0.0" not in counted
        by_engine = counts(server)
        for rank in (0, 1, 1):
            named = {"X-data-parallel-rank": str(rank)}
            asked = client.completions.create(model=MODEL, prompt=prompts[0], max_tokens=1, extra_headers=named)
            assert asked.choices[0].finish_reason == "length"
        assert counts(server) == [by_engine[0] + 1, by_engine[1] + 2]
        with pytest.raises(openai.BadRequestError, match="data_parallel_rank must be 0 to 1"):
            client.completions.create(model=MODEL, prompt="a", extra_headers={"X-data-parallel-rank": "2"})

        streams = [
            client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=400, temperature=0, stream=True, extra_body={"ignore_eos": True}
            )
            for prompt in prompts[:2]
        ]
        begun = [next(stream).choices[0].text for stream in streams]
        first[0].kill()
        ends = []
        for text, stream in zip(begun, streams, strict=True):
            ends.append(text + "".join(chunk.choices[0].text for chunk in stream))
            assert server.get("/health")[0] == 200
        assert [ask(client, prompt) for prompt in prompts] == answers
        wait_until(lambda: len(cores(server)) >= 2 and "takes requests again" in server.log.read_text())
        assert [ask(client, prompt) for prompt in prompts] == answers
        assert re.search(r"octavo:requests_continued_total{.*} [1-9]", server.get("/metrics")[1])
        assert ends == [
            client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=400, temperature=0, extra_body={"ignore_eos": True}
            ).choices[0].text
            for prompt in prompts[:2]
        ]  # fmt: skip
        last = cores(server)
        assert server.stop() == 0
        assert not any(core.is_running() and core.status() != "zombie" for core in last)
        assert "Traceback" not in server.log.read_text()


@pytest.mark.long
def test_a_host_with_a_server_of_its_own_opens_no_other_port(tmp_path: Path) -> None:
    """And waits for no other engine; its own has the number that it was given."""
    flags = ("-dp", "4", "--data-parallel-hybrid-lb", "--data-parallel-size-local", "1")
    with running_server(tmp_path, *flags, "--data-parallel-start-rank", "3", "--max-model-len", "1024") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        assert ask(client, "The colour of the house is")
        counted = server.get("/metrics")[1]
        assert f'vllm:request_success_total{{engine="3",finished_reason="length",model_name="{MODEL}"}} 1.0' in counted
        assert 'engine="0"' not in counted
        processes = [psutil.Process(server.process.pid), *cores(server)]
        assert len(processes) == 2
        ports = [
            connection.laddr.port
            for process in processes
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert ports == [int(server.url.rpartition(":")[2])]
        assert server.stop() == 0
