"""Hostile requests against a real server: each gets an error body or an answer in time, and nobody else notices."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import openai
import pytest

from tests.e2e.hostile import Answer, Case, corpus, send
from tests.e2e.server import MODEL, Server, running_server

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0  # of a request, on a machine that does much else
NUM_SENDERS = 4
NUM_STREAMS = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--max-model-len", "256", "--max-num-seqs", "128", "--check-invariants", "--disable-log-requests")
    with running_server(tmp_path_factory.mktemp("hostile"), *flags) as server:
        yield server


@pytest.mark.long
def test_the_corpus_is_large_and_always_the_same() -> None:
    cases = corpus()
    assert len(cases) >= 500
    assert [case.data for case in cases] == [case.data for case in corpus()]


@pytest.mark.long
@pytest.mark.parametrize("step", [4, 1])
def test_no_request_of_the_corpus_fails_hangs_or_harms_a_stream(server: Server, step: int) -> None:
    """Each `step`th of its bodies."""
    url = urlsplit(server.url)
    address = (str(url.hostname), int(url.port or 0))
    undisturbed = [_read_stream(server, i) for i in range(NUM_STREAMS)]
    is_over = threading.Event()

    def keep_reading(i: int) -> list[str]:
        texts = [_read_stream(server, i)]
        while not is_over.is_set():
            texts.append(_read_stream(server, i))
        return texts

    cases = corpus()[::step]
    with ThreadPoolExecutor(NUM_STREAMS) as readers, ThreadPoolExecutor(NUM_SENDERS) as senders:
        streams = [readers.submit(keep_reading, i) for i in range(NUM_STREAMS)]
        try:
            answers = list(senders.map(lambda case: send(address, case, TIMEOUT_S), cases))
        finally:
            is_over.set()
        for i, stream in enumerate(streams):
            assert set(stream.result()) == {undisturbed[i]}, "a stream was harmed"
    complaints = [text for case, answer in zip(cases, answers, strict=True) if (text := _complaint(case, answer))]
    assert not complaints, "\n".join(complaints)
    assert server.get("/health")[0] == 200
    server.wait_until_idle()
    assert "Traceback" not in server.log.read_text()


def _complaint(case: Case, answer: Answer | None) -> str | None:
    """What is wrong with an answer, or None."""
    if answer is None:
        return f"{case.name}: no answer" if case.is_whole else None
    if answer.status in (200, 307):  # 307: the path without its slash
        return None
    if not 400 <= answer.status < 500:
        return f"{case.name}: status {answer.status}, {answer.body[:200]!r}"
    try:
        body = json.loads(answer.body)
        error = body["error"]
    except (ValueError, KeyError, TypeError):
        return f"{case.name}: status {answer.status} without OpenAI's error body, {answer.body[:200]!r}"
    is_anthropic = "/v1/messages" in case.name
    fields = {"message", "type"} if is_anthropic else {"message", "type", "param", "code"}
    if (body.get("type") == "error") != is_anthropic:
        return f"{case.name}: the error body has the form of another API, {answer.body[:200]!r}"
    if error.keys() != fields or not 0 < len(error["message"]) < 2000:
        return f"{case.name}: the error body is {answer.body[:200]!r}"
    return f"{case.name}: it shows a traceback" if b"Traceback" in answer.body else None


def _read_stream(server: Server, i: int) -> str:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        stream = client.completions.create(
            model=MODEL, prompt=f"Story {i}:", max_tokens=150, temperature=0.8, seed=i, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        return "".join(chunk.choices[0].text for chunk in stream)
