"""A real server whose model six processes share, two stages of three workers each, on however few processors; and
servers of small models whose layers are of other kinds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from octavo import LLM, SamplingParams
from tests.e2e.server import MODEL, Server, openai_client, running_server, served
from tests.execution.small_overrides import CUT, DEEPSEEK, QWEN_3_NEXT
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

INDEX = {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 8, "index_n_heads": 4, "index_head_dim": 32}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(
        tmp_path_factory.mktemp("parallel"), "-tp", "3", "-pp", "2", "--distributed-executor-backend", "mp",
        "--max-model-len", "2048", "--max-engine-restarts", "3",
    ) as server:  # fmt: skip
        yield server
        workers = followers(server)
        assert server.stop() == 0
        assert not any(worker.is_running() and worker.status() != "zombie" for worker in workers)
        assert "Traceback" not in server.log.read_text()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def followers(server: Server) -> list[psutil.Process]:
    return [p for p in server.core_process().children() if "octavo.execution.follower" in p.cmdline()]


def ask(client: openai.OpenAI) -> str:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=16, temperature=0)
    return answer.choices[0].message.content or ""


@pytest.mark.long
def test_six_processes_answer(server: Server, client: openai.OpenAI) -> None:
    assert len(followers(server)) == 5
    assert "Paris" in ask(client)
    streamed = client.completions.create(
        model=MODEL, prompt="One, two, three,", max_tokens=8, temperature=0, stream=True
    )
    assert "four" in "".join(chunk.choices[0].text for chunk in streamed)


@pytest.mark.long
def test_its_answers_are_to_the_bit_those_of_one_process(client: openai.OpenAI) -> None:
    """Of the default model, quantized: three workers have three of nine heads, and a third of the inner elements."""
    prompt = "The octavo is a book format in which each printed sheet is folded three times to make eight leaves. " * 4
    alone = LLM(max_model_len=2048)
    [expected] = alone.generate([prompt], SamplingParams(temperature=0, max_tokens=32, logprobs=3, ignore_eos=True))
    found = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=32, temperature=0, logprobs=3, extra_body={"ignore_eos": True}
    )
    [of_one], [of_six] = expected.outputs, found.choices
    assert of_six.text == of_one.text
    assert of_one.logprobs is not None and of_six.logprobs is not None
    chosen = zip(of_one.token_ids, of_one.logprobs, strict=True)
    assert of_six.logprobs.token_logprobs == [entries[token].logprob for token, entries in chosen]


@pytest.mark.long
def test_a_worker_that_dies_while_nothing_runs_is_replaced_with_the_others(
    server: Server, client: openai.OpenAI
) -> None:
    before = followers(server)
    before[1].kill()
    wait_until(lambda: not any(p.is_running() for p in before) and server.get("/health")[0] == 200)
    assert len(followers(server)) == 5
    assert "Paris" in ask(client)
    assert "worker 1 of 3 of stage 0 of 2 ended with status -9; the engine core ends" in server.log.read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [DEEPSEEK, QWEN_3_NEXT, DEEPSEEK | INDEX],
    ids=["latent attention", "gated delta rule", "an index of keys"],
)
def test_two_workers_serve_what_one_answers(overrides: dict[str, Any], tiny_tokenizer: Path, tmp_path: Path) -> None:
    from tests.execution.test_runner import save_model  # with torch, which other tests here do without

    model = str(save_model(tmp_path, tiny_tokenizer))
    config = CUT | overrides | {"max_position_embeddings": 256}
    alone = LLM(model, load_format="dummy", dtype="float32", seed=3, hf_overrides=config)
    prompts = [[5, *range(10, 10 + 30 * number)] for number in range(1, 5)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    results = alone.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    expected = [result.outputs[0].text for result in results]
    flags = ["--load-format", "dummy", "--dtype", "float32", "--seed", "3", "--hf-overrides", json.dumps(config)]
    flags += ["-tp", "2", "--enable-expert-parallel", "--served-model-name", "small"]
    with served(tmp_path, "--model", model, *flags) as server, openai_client(server) as client:
        assert len(followers(server)) == 1
        answer = client.completions.create(
            model="small", prompt=prompts, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
        )
        assert [choice.text for choice in answer.choices] == expected
