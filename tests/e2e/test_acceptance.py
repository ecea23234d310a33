"""What guides to vLLM tell people to type, in Python and from clients, with the package's name changed and the model's.

All of the guides' Python and clients; docs/switching.md lists the rest of what they type. Launch flags are
tests/test_compat.py's, more snippets of vLLM's own examples test_snippets.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import prometheus_client
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from octavo.entrypoints.openai import api_server
from octavo.entrypoints.openai.cli_args import validate_parsed_serve_args
from octavo.errors import ConfigError
from octavo.loading.checkpoint import resolve
from tests.e2e.server import Server, running_server
from tests.ports import held_port
from tests.waiting import wait_until, within

pytestmark = pytest.mark.slow

MODEL = resolve("").path
METRICS = (
    "num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc", "cpu_cache_usage_perc",
    "time_to_first_token_seconds_count", "time_per_output_token_seconds_count", "e2e_request_latency_seconds_count",
    'request_success_total{finished_reason="length"}', "prompt_tokens_total", "generation_tokens_total",
    "avg_prompt_throughput_toks_per_s", "avg_generation_throughput_toks_per_s",
)  # fmt: skip


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return held_port()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[Server]:
    flags = f"""--model {MODEL} --api-key K --served-model-name N --tensor-parallel-size 1
        --gpu-memory-utilization 0.90 --max-model-len 512 --max-num-seqs 16 --dtype auto --enable-prefix-caching
        --enable-chunked-prefill --max-num-batched-tokens 2048 --num-scheduler-steps 1 --block-size 16 --swap-space 4
        --preemption-mode recompute --enforce-eager --load-format auto --trust-remote-code --enable-prometheus
        --prometheus-port {metrics_port} --disable-log-requests"""
    with running_server(tmp_path_factory.mktemp("acceptance"), *flags.split()) as server:
        yield server


OFFLINE = """
from octavo import LLM, SamplingParams
llm = LLM(model="MODEL", tensor_parallel_size=1, gpu_memory_utilization=0.9, max_model_len=256)
params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, presence_penalty=0.1, frequency_penalty=0.1,
                        repetition_penalty=1.05, stop=["\\n\\n"])
outputs = llm.generate(["Hello, my name is", "The capital of France is"], params)
for output in outputs:
    print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
"""
STEPS = """
from octavo import EngineArgs, SamplingParams, TextPrompt, TokensPrompt
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.arg_utils import AsyncEngineArgs
engine = LLMEngine.from_engine_args(EngineArgs(model="MODEL", max_model_len=256))
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
engine.add_request("a", TextPrompt(prompt="Hello"), params)
engine.add_request("b", TokensPrompt(prompt_token_ids=[504, 3575]), params)
engine.add_request("c", "Never", params)
engine.abort_request("c")
finished = {}
while engine.has_unfinished_requests():
    for output in engine.step():
        if output.finished:
            finished[output.request_id] = len(output.outputs[0].token_ids)
assert finished == {"a": 4, "b": 4}, finished
assert engine.get_model_config().max_model_len == 256
"""
ASYNC = """
import asyncio
import prometheus_client
from octavo import SamplingParams
from octavo.engine.arg_utils import AsyncEngineArgs
from octavo.engine.async_llm_engine import AsyncLLMEngine

ASKED = prometheus_client.Counter("acceptance_requests", "Requests of the user's own.")

async def main():
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(
        model="MODEL", tensor_parallel_size=1, gpu_memory_utilization=0.90, max_num_seqs=16,
        max_num_batched_tokens=2048, max_model_len=256, quantization=None, trust_remote_code=True,
        disable_log_stats=False, max_log_len=100,
    ))
    try:
        ASKED.inc()
        text, params = "", SamplingParams(temperature=0, max_tokens=6)
        async for output in engine.generate("Once upon a time", params, request_id="1"):
            text = output.outputs[0].text
        await engine.abort("1")
        return text, (await engine.get_model_config()).max_model_len
    finally:
        engine.shutdown()

text, length = asyncio.run(main())
"""


def run(snippet: str) -> dict[str, Any]:
    """The variables of a snippet that has been run."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(snippet.replace("MODEL", MODEL), "snippet", "exec"), variables)
    return variables


def test_python_offline(capfd: pytest.CaptureFixture[str]) -> None:
    run(OFFLINE)
    assert capfd.readouterr().out.count("Generated text: ") == 2
    run(STEPS)


def test_python_async_with_metrics_of_the_users_own() -> None:
    found = run(ASYNC)
    assert found["text"] and found["length"] == 256
    assert prometheus_client.REGISTRY.get_sample_value("acceptance_requests_total") == 1


def test_the_version_can_be_printed() -> None:
    code = "import octavo; print(octavo.__version__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip()


def test_curl(server: Server) -> None:
    def curl(path: str, body: dict[str, Any] | None = None) -> str:
        key = ["-H", "Authorization: Bearer K", "-H", "Content-Type: application/json"]
        data = [] if body is None else ["-d", json.dumps(body)]
        done = subprocess.run(["curl", "-sSf", server.url + path, *key, *data], capture_output=True, check=True)
        return done.stdout.decode()

    body = {"model": "N", "prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0, "ignore_eos": True}
    assert json.loads(curl("/v1/completions", body))["usage"]["completion_tokens"] == 7
    chat = {"model": "N", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 7, "stream": True}
    assert "data: [DONE]" in curl("/v1/chat/completions", chat)
    assert json.loads(curl("/v1/models"))["data"][0]["id"] == "N"
    curl("/health")
    assert "vllm:num_requests_running" in curl("/metrics")


def test_the_openai_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="K", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Hi"}]
        whole = client.chat.completions.create(model="N", messages=messages, max_tokens=6, temperature=0)
        chunks = client.chat.completions.create(
            model="N", messages=messages, max_tokens=6, temperature=0, stream=True
        )  # fmt: skip
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        said = client.completions.create(model="N", prompt="A", max_tokens=6, temperature=0).choices[0].text
        parts = client.completions.create(model="N", prompt="A", max_tokens=6, temperature=0, stream=True)
        assert "".join(part.choices[0].text for part in parts) == said


def test_curl_of_embeddings(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the model is made with it")
    from tests.models.small_text_encoder import write_model

    write_model(tmp_path, "BertModel")
    with running_server(tmp_path, "--model", str(tmp_path), "--served-model-name", "E", "--cpu-threads", "1") as server:
        body = json.dumps({"model": "E", "input": ["the cat", "a dog"]})
        command = ["curl", "-sSf", f"{server.url}/v1/embeddings", "-H", "Content-Type: application/json", "-d", body]
        answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        assert [len(entry["embedding"]) for entry in answer["data"]] == [48, 48]


def test_metrics_have_their_names_on_both_ports(server: Server, metrics_port: int) -> None:
    body = {"model": "N", "prompt": "A", "max_tokens": 3, "ignore_eos": True}
    httpx.post(f"{server.url}/v1/completions", json=body, headers={"Authorization": "Bearer K"}).raise_for_status()
    refused = httpx.post(f"{server.url}/v1/completions", json=body)
    assert refused.status_code == 401
    for name in METRICS:
        server.metric(name)
    assert server.metric("request_max_num_generation_tokens_count") >= 1
    assert server.count("process_resident_memory_bytes") > 1e6
    assert server.count('http_requests_total{handler="/v1/completions",method="POST",status="4xx"}') >= 1
    assert server.count('http_request_duration_seconds_count{handler="/v1/completions",method="POST"}') >= 2
    text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").text
    assert 'vllm:num_requests_running{engine="0",model_name="N"}' in text


def test_a_health_script_measures_the_first_token(server: Server) -> None:
    with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer K"}, timeout=30) as client:
        assert client.get("/health").status_code == 200
        start, first = time.perf_counter(), None
        body = {"model": "N", "prompt": "ping", "max_tokens": 5, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data:") and first is None:
                    first = time.perf_counter() - start
    assert first is not None


def test_a_router_of_fastapi_and_httpx_forwards_by_model(server: Server) -> None:
    app, backends = FastAPI(), {"N": server.url}

    @app.post("/v1/chat/completions")
    async def forward(request: Request) -> StreamingResponse:
        body = await request.json()
        client = httpx.AsyncClient(timeout=60)
        sent = client.build_request(
            "POST", f"{backends[body['model']]}/v1/chat/completions", json=body,
            headers={"Authorization": request.headers["authorization"]},
        )  # fmt: skip
        response = await client.send(sent, stream=True)
        return StreamingResponse(response.aiter_bytes(), response.status_code, {"content-type": "text/event-stream"})

    port = held_port()
    router = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=router.run)
    thread.start()
    try:
        wait_until(lambda: router.started)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="K", max_retries=0)
        chunks = client.chat.completions.create(
            model="N", messages=[{"role": "user", "content": "Hi"}], max_tokens=6, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    finally:
        router.should_exit = True
        thread.join()


LOCUSTFILE = """
from locust import HttpUser, between, task

class User(HttpUser):
    wait_time = between(0.01, 0.05)

    @task
    def chat(self):
        self.client.post("/v1/chat/completions", headers={"Authorization": "Bearer K"}, json={
            "model": "N", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4})
"""


@pytest.mark.long
def test_locust(server: Server, tmp_path: Path) -> None:
    if find_spec("locust") is None:  # not imported: it would change this process's sockets and threads
        pytest.skip("locust is not installed")
    (tmp_path / "locustfile.py").write_text(LOCUSTFILE)
    command = [sys.executable, "-m", "locust", "--headless", "-u", "2", "-r", "2", "-t", "3s", "--host", server.url]
    subprocess.run([*command, "-f", str(tmp_path / "locustfile.py"), "--only-summary"], check=True, timeout=60)


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        "benchmarks/benchmark_throughput.py --dataset FILE --num-prompts 2 --output-len 4",
        "benchmarks/benchmark_latency.py --input-len 8 --output-len 4 --num-iters 1 --batch-size 1",
        "-m octavo.benchmark_throughput --input-len 8 --output-len 4 --num-prompts 2",
    ],
)
def test_benchmarks(tmp_path: Path, words: str) -> None:
    talk = [
        {"from": "human", "value": "How are you today?"},
        {"from": "gpt", "value": "I am well, thank you very much."},
    ]
    file = tmp_path / "ShareGPT.json"
    file.write_text(json.dumps([{"conversations": talk}] * 4))
    root = Path(__file__).parents[2]
    command = [sys.executable, *words.replace("FILE", str(file)).split(), "--model", MODEL, "--max-model-len", "256"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


SERVER = """
import asyncio
import sys

from octavo.entrypoints.openai.api_server import run_server
from octavo.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from octavo.entrypoints.utils import cli_env_setup
from octavo.utils import FlexibleArgumentParser

if __name__ == "__main__":
    cli_env_setup()
    parser = FlexibleArgumentParser(description="OpenAI-Compatible RESTful API server.")
    parser.add_argument("--mine", default="")
    parser = make_arg_parser(parser)
    args = parser.parse_args()
    validate_parsed_serve_args(args)
    assert args.mine == "yes"
    args.served_model_name = ["program"]
    asyncio.run(run_server(args))
    print("has ended")
"""


def test_a_program_serves(tmp_path: Path) -> None:
    (tmp_path / "serves.py").write_text(SERVER)
    (tmp_path / "flags.yaml").write_text("max-model-len: 512\n")
    command = [
        sys.executable,
        str(tmp_path / "serves.py"),
        MODEL,
        "--mine=yes",
        "--config",
        str(tmp_path / "flags.yaml"),
    ]
    with running_server(tmp_path, command=command) as server:
        [model] = json.loads(server.get("/v1/models")[1])["data"]
        assert (model["id"], model["max_model_len"]) == ("program", 512)
        assert server.stop() == 0
        assert server.log.read_text().endswith("has ended\n")


def arguments(*words: str) -> Any:
    parser = api_server.make_arg_parser(api_server.FlexibleArgumentParser())
    return parser.parse_args(["--model", MODEL, "--max-model-len", "256", "--host", "127.0.0.1", *words])


async def until_healthy(client: httpx.AsyncClient) -> None:
    while True:
        with contextlib.suppress(httpx.ConnectError):
            if (await client.get("/health")).status_code == 200:
                return
        await asyncio.sleep(0)


def test_a_programs_task_serves_until_it_is_cancelled() -> None:
    port = held_port()

    async def main() -> None:
        task = asyncio.create_task(api_server.run_server(arguments("--port", str(port))))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            await until_healthy(client)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(httpx.ConnectError):
                await client.get("/health")

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    asyncio.run(asyncio.wait_for(main(), within(60)))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.parametrize("older", [False, True])
def test_a_program_has_the_application_in_its_own(older: bool) -> None:
    """Beside its own routes; earlier versions of vLLM want a configuration too."""
    args = arguments()

    async def hello(request: Any) -> JSONResponse:
        return JSONResponse({"hello": request.app.state.engine_client.model_config.max_model_len})

    async def main() -> None:
        async with api_server.build_async_engine_client(args) as engine:
            app = api_server.build_app(args)
            app.add_route("/hello", hello)
            outer = FastAPI()
            outer.mount("/llm", app)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(outer), base_url="http://here/llm") as client:
                assert (await client.get("/v1/models")).status_code == 503
                between = [await engine.get_vllm_config()] if older else []
                with pytest.raises(TypeError, match="takes an engine, the application's state and parsed"):
                    await api_server.init_app_state(engine, app.state)
                if older:
                    await api_server.init_app_state(engine, *between, app.state, args)
                else:
                    await api_server.init_app_state(engine, state=app.state, args=args, supported_tasks=("generate",))
                assert (await client.get("/hello")).json() == {"hello": 256}
                body = {"prompt": "Once upon a time", "max_tokens": 3, "temperature": 0}
                answer = (await client.post("/v1/completions", json=body)).json()
                assert answer["usage"]["completion_tokens"] == 3
                streamed = await client.post("/v1/completions", json={**body, "stream": True})
                assert streamed.text.endswith("data: [DONE]\n\n")
                assert "Invalid URL (GET /nowhere)" in (await client.get("/nowhere")).json()["error"]["message"]
            with pytest.raises(AttributeError, match=r"has no post: app.add_route\(path, function"):
                app.post("/mine")  # type: ignore[attr-defined]

    asyncio.run(asyncio.wait_for(main(), within(60)))


def test_what_programs_cannot_have_says_why() -> None:
    with pytest.raises(ImportError, match="router"):
        from octavo.entrypoints.openai.api_server import router  # noqa: F401
    with pytest.raises(AttributeError, match=r"'router': app.add_route\(path, function"):
        _ = api_server.router
    with pytest.raises(ConfigError, match="takes no arguments for uvicorn, got workers"):
        asyncio.run(api_server.run_server(arguments(), workers=2))
    with pytest.raises(ConfigError, match="--port must be between"):
        validate_parsed_serve_args(arguments("--port", "70000"))
