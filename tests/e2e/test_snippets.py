"""What users of vLLM have, run as it is but for the package's name, the model's and the port; and the pages
of PAGES, run as they are written but for the ports.

The blocks of a page run in order, in one namespace of Python's. A server of `octavo serve` lives to the page's end.
A block of `text` is what the block before it prints, with … for anything. `<!-- not run: reason -->` leaves the next
block out.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.loading.checkpoint import resolve
from tests.e2e.server import Server, running_server
from tests.waiting import within

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(path.stem for path in (ROOT / "docs").glob("tutorial_*.md")), "structured_output"]
BLOCK = re.compile(r"^(<!-- not run: .+ -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = "facebook/opt-125m"  # what the snippets call their model
KEY = "token-abc123"


def run(snippet: str, server: Server | None = None) -> dict[str, Any]:
    """Run a snippet and return its variables."""
    old, new = (NAME, resolve("").path) if server is None else ("http://localhost:8000", server.url)
    code = snippet.replace("vllm", "octavo").replace(old, new)
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "snippet", "exec"), variables)
    return variables


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A launch script's command line, with as many flags as one finds in them."""
    flags = f"""
        --model {resolve("").path} --served-model-name {NAME} my-model --dtype auto --max-model-len 512
        --tensor-parallel-size 1 --gpu-memory-utilization 0.90 --max_num_seqs 16 --max-num-batched-tokens=2048
        --enable-prefix-caching --enable-chunked-prefill --swap-space 4 --block-size 16 --seed 0 --disable-log-requests
        --api-key {KEY} --load-format auto --enforce-eager --uvicorn-log-level warning
    """
    with running_server(tmp_path_factory.mktemp("launch"), *flags.split()) as server:
        yield server


@pytest.mark.long
def test_offline_inference(capsys: pytest.CaptureFixture[str]) -> None:
    run(
        """
from vllm import LLM, SamplingParams

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model="facebook/opt-125m")
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""
    )
    assert capsys.readouterr().out.count("Generated text: ") == 4


@pytest.mark.long
def test_offline_chat_beam_search_and_keywords() -> None:
    found = run(
        """
from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams

llm = LLM(
    model="facebook/opt-125m", tensor_parallel_size=1, gpu_memory_utilization=0.90, max_model_len=512, dtype="auto",
    enforce_eager=True, trust_remote_code=False, seed=0, swap_space=4, max_num_seqs=16, enable_prefix_caching=True,
)
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 20
sampling_params.temperature = 0.0
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "What is the capital of France?"},
]
chat = llm.chat(conversation, sampling_params, use_tqdm=False)
params = BeamSearchParams(beam_width=5, max_tokens=10)
beams = llm.beam_search([{"prompt": "Hello, my name is "}], params)
ids = llm.generate({"prompt_token_ids": [504, 3575]}, SamplingParams(max_tokens=3, n=2, best_of=2), use_tqdm=False)
"""
    )
    assert "Paris" in found["chat"][0].outputs[0].text
    assert len(found["beams"][0].sequences) == 5
    assert found["beams"][0].sequences[0].text.startswith("Hello, my name is ")
    assert len(found["ids"][0].outputs) == 2


@pytest.mark.long
def test_a_script_that_passes_on_what_it_was_not_given_and_cleans_up() -> None:
    found = run("""
import gc
import weakref
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.sampling_params import BeamSearchParams

llm = LLM(
    model="facebook/opt-125m", max_model_len=128, num_gpu_blocks_override=64, tensor_parallel_size=1, seed=42,
    enforce_eager=True, gpu_memory_utilization=0.8, trust_remote_code=True, quantization=None, cpu_offload_gb=0,
    skip_tokenizer_init=False, disable_custom_all_reduce=False, tokenizer_revision=None, hf_overrides=None,
)
beams = llm.beam_search([{"prompt": "Hello, my name is "}], BeamSearchParams(beam_width=2, max_tokens=3))
texts = [beam.text for beam in beams[0].sequences]
[output] = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=2, thinking_token_budget=None))
gone = weakref.ref(llm.llm_engine)
gc.disable()
del llm
cleanup_dist_env_and_memory()
gc.enable()
""")
    assert len(found["texts"]) == 2 and all(text.startswith("Hello, my name is") for text in found["texts"])
    assert found["output"].outputs[0].token_ids and found["gone"]() is None


@pytest.mark.long
def test_the_async_engine() -> None:
    found = run(
        """
import asyncio
from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams

async def main():
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="facebook/opt-125m", max_model_len=512))
    final = None
    async for request_output in engine.generate(
        "The capital of France is", SamplingParams(temperature=0, max_tokens=8), "request-1"
    ):
        final = request_output
    await engine.abort("request-1")
    engine.shutdown()
    return final

final = asyncio.run(main())
"""
    )
    assert "Paris" in found["final"].outputs[0].text


@pytest.mark.long
def test_the_openai_client(server: Server) -> None:
    found = run(
        """
from openai import OpenAI

openai_api_key = "token-abc123"
openai_api_base = "http://localhost:8000/v1"
client = OpenAI(api_key=openai_api_key, base_url=openai_api_base)
models = client.models.list()
model = models.data[0].id

completion = client.completions.create(model=model, prompt="San Francisco is a")
chat_response = client.chat.completions.create(
    model="my-model",
    messages=[
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Name the capital of France."},
    ],
    temperature=0,
)
stream = client.completions.create(
    model=model, prompt="A robot may not injure a human being", echo=False, n=2, stream=True, logprobs=3
)
chunks = [chunk for chunk in stream]
extra = client.completions.create(
    model=model, prompt="San Francisco is a", max_tokens=7, temperature=0.7,
    extra_body={
        "top_k": 50, "min_p": 0.05, "repetition_penalty": 1.05, "stop_token_ids": [2], "ignore_eos": True,
        "min_tokens": 2, "skip_special_tokens": True, "spaces_between_special_tokens": True, "add_special_tokens": True,
    },
)
beams = client.completions.create(
    model=model, prompt="San Francisco is a", n=2, temperature=0, extra_body={"use_beam_search": True}
)
chat_extra = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Hi"}], max_tokens=5,
    extra_body={"chat_template_kwargs": {}, "top_k": 20, "add_generation_prompt": True},
    extra_headers={"X-Request-Id": "mine"},
)
""",
        server,
    )
    assert found["model"] == NAME
    assert found["completion"].choices[0].text
    assert "Paris" in found["chat_response"].choices[0].message.content
    assert {choice.index for chunk in found["chunks"] for choice in chunk.choices} == {0, 1}
    assert found["extra"].usage.completion_tokens == 7
    assert len(found["beams"].choices) == 2
    assert found["chat_extra"].id == "chatcmpl-mine"


def test_curl(server: Server) -> None:
    """The quickstart's, with the key that this server wants."""
    command = f"""
        curl -s {server.url}/v1/completions \\
            -H "Content-Type: application/json" -H "Authorization: Bearer {KEY}" \\
            -d '{{
                "model": "{NAME}",
                "prompt": "San Francisco is a",
                "max_tokens": 7,
                "temperature": 0
            }}'
    """
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["text"]


@pytest.mark.long
def test_the_plain_server_and_its_client(tmp_path: Path) -> None:
    flags = ("--model", resolve("").path, "--max-model-len", "256", "--disable-log-requests")
    with running_server(tmp_path, *flags, module="octavo.entrypoints.api_server") as server:
        # What vLLM's examples/api_client.py sends.
        for stream in (False, True):
            payload = {
                "prompt": "San Francisco is a", "n": 2, "use_beam_search": True, "temperature": 0.0, "max_tokens": 16,
                "stream": stream,
            }  # fmt: skip
            request = urllib.request.Request(
                f"{server.url}/generate", json.dumps(payload).encode(),
                {"User-Agent": "Test Client", "Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(request, timeout=60) as response:
                lines = [json.loads(line)["text"] for line in response.read().split(b"\n") if line]
            assert len(lines[-1]) == 2
            assert all(text.startswith("San Francisco is a") for text in lines[-1])


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs_as_it_is_written(name: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    (tmp_path / "octavo").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m octavo.entrypoints.cli.main "$@"\n')
    (tmp_path / "octavo").chmod(0o755)
    urls: dict[str, str] = {}  # of the servers, by the page's ports
    variables: dict[str, Any] = {"__name__": "__main__"}
    printed, num_compared = "", 0
    with contextlib.ExitStack() as servers:

        def serve(flags: list[str]) -> None:
            at = flags.index("--port") if "--port" in flags else len(flags)
            server = servers.enter_context(running_server(tmp_path, *flags[:at], *flags[at + 2 :]))
            urls[flags[at + 1] if at < len(flags) else "8000"] = server.url

        if "octavo serve" not in page and "scripts/serve" not in page:
            serve([])
        for not_run, language, code in BLOCK.findall(page):
            for port, url in urls.items():
                code = code.replace(f"http://localhost:{port}", url)
            if language == "text":
                expected = ".*".join(map(re.escape, code.strip().split("…")))
                assert re.search(expected, printed, re.DOTALL), f"{code} is not in: {printed}"
                num_compared += 1
            elif language == "bash" and not not_run:
                printed = _run_shell(code, tmp_path, serve)
            elif language == "python" and not not_run:
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    exec(compile(code, name, "exec"), variables)
                printed = out.getvalue()
    assert urls and num_compared


def _run_shell(code: str, folder: Path, serve: Callable[[list[str]], None]) -> str:
    """Run commands, with `octavo serve` by `serve`, and return what they print."""
    others = []
    for line in code.replace("\\\n", "").splitlines():
        command = re.match(r"(octavo serve|scripts/serve)\b(.*)", line)
        if command:
            serve(shlex.split(command[2].rstrip(" &"), comments=True))
        else:
            others.append(line)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(others)],
        capture_output=True,
        text=True,
        timeout=within(120),
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
