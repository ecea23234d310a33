"""Adapters over HTTP: by name, eight at once, loaded and unloaded while the server runs, from where it is allowed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from anthropic import Anthropic, NotFoundError

from octavo import LLM, SamplingParams
from octavo.lora.request import LoRARequest
from tests.e2e.server import MODEL, Server, running_server, serve
from tests.lora.random_adapters import write_random_adapter

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time"
NAMES = [f"a{i}" for i in range(8)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for i, name in enumerate(NAMES):
        write_random_adapter(folder / "root" / name, i, strength=1.0)
    write_random_adapter(folder / "outside", 50)
    (folder / "root" / "link").symlink_to(folder / "outside")
    broken = write_random_adapter(folder / "root" / "broken", 51)
    (broken / "adapter_model.safetensors").write_bytes(b"no tensors")
    return folder


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (
        "--max-model-len", "256", "--num-gpu-blocks-override", "400", "--check-invariants", "--enable-lora",
        "--max-loras", "4", "--max-cpu-loras", "6", "--lora-root", str(root / "root"), "--enable-runtime-lora-updating",
        "--lora-modules", f"first={root / 'root' / 'a0'}",
        f'{{"name": "elsewhere", "path": "{root / "outside"}", "base_model_name": "my-base"}}',
    )  # fmt: skip
    with running_server(tmp_path_factory.mktemp("server"), *flags) as server:
        yield server
        server.wait_until_idle()


def complete(client: openai.OpenAI, model: str) -> str:
    return client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0).choices[0].text


def post(server: Server, route: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{route}_lora_adapter", json=body, timeout=60)


@pytest.mark.long
def test_eight_adapters_at_once_say_what_each_says_alone(client: openai.OpenAI, root: Path) -> None:
    """More than fit a step, and more than the host holds; those that were not named at the start are found."""
    models = [*NAMES, MODEL] * 3
    with ThreadPoolExecutor(len(models)) as pool:
        said = list(pool.map(lambda model: complete(client, model), models))
    llm = LLM(max_model_len=256, num_gpu_blocks_override=100, enable_lora=True)
    asked = [LoRARequest(name, 1, str(root / "root" / name)) for name in NAMES]
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = [
        llm.generate(PROMPT, params, use_tqdm=False, lora_request=one)[0].outputs[0].text for one in [*asked, None]
    ]
    assert said == expected * 3
    assert len(set(expected)) > 5


def test_models_tell_of_adapters(client: openai.OpenAI, root: Path) -> None:
    cards = {card.id: card.model_dump() for card in client.models.list()}
    assert (cards[MODEL]["root"], cards[MODEL]["parent"]) == (MODEL, None)
    assert (cards["first"]["root"], cards["first"]["parent"]) == (str(root / "root" / "a0"), MODEL)
    assert cards["elsewhere"]["parent"] == "my-base"
    assert client.models.retrieve("a3").id == "a3"
    assert complete(client, "first") == complete(client, "a0")
    chat = client.chat.completions.create(model="first", messages=[{"role": "user", "content": "Hi"}], max_tokens=2)
    assert chat.model == "first"


def test_every_api_answers_with_the_adapter_that_it_names(server: Server, client: openai.OpenAI) -> None:
    """Whole and streamed; a model that is not there is not answered by the base."""
    anthropic = Anthropic(base_url=server.url, api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": PROMPT}]
    texts = set()
    for model in (MODEL, "first", "a3"):
        chat = client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0)
        options: Any = {"model": model, "max_output_tokens": 12, "temperature": 0}
        response = client.responses.create(input=PROMPT, **options)
        streamed: Any = list(client.responses.create(input=messages, stream=True, **options))[-1].response
        options = {"model": model, "messages": messages, "max_tokens": 12, "extra_body": {"temperature": 0}}
        message = anthropic.messages.create(**options)
        with anthropic.messages.stream(**options) as events:
            final = events.get_final_message()
        said = chat.choices[0].message.content
        assert [response.output_text, streamed.output_text] == [said, said]
        assert [one.text for one in (*message.content, *final.content)] == [said, said]
        assert {chat.model, response.model, streamed.model, message.model, final.model} == {model}
        texts.add(said)
    assert len(texts) == 3
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input=PROMPT, model="a33")
    with pytest.raises(NotFoundError):
        anthropic.messages.create(model="a33", messages=messages, max_tokens=1)


def test_adapters_come_and_go_by_name(server: Server, client: openai.OpenAI, root: Path) -> None:
    path = shutil.copytree(root / "root" / "a1", root / "root" / "mine")
    answer = post(server, "load", lora_name="mine too", lora_path=str(path))
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine too' added successfully.")
    before = complete(client, "mine too")
    assert before == complete(client, "a1")
    write_random_adapter(path, 70)
    assert complete(client, "mine too") == before, "as it was when it was loaded"
    again = post(server, "load", lora_name="mine too", lora_path=str(path))
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    assert post(server, "load", lora_name="mine too", lora_path=str(path), load_inplace=True).status_code == 200
    assert complete(client, "mine too") == complete(client, "mine") != before
    assert post(server, "unload", lora_name="mine too").status_code == 200
    with pytest.raises(openai.NotFoundError, match="'mine too' does not exist here"):
        complete(client, "mine too")
    assert post(server, "unload", lora_name="mine too").status_code == 404


def test_a_name_is_given_once_however_many_ask_at_once(server: Server, root: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = [str(root / "root" / name) for name in NAMES]
        answers = list(pool.map(lambda path: post(server, "load", lora_name="once", lora_path=path), paths))
    assert sorted(answer.status_code for answer in answers) == [200, *[400] * (len(paths) - 1)]
    assert post(server, "unload", lora_name="once").status_code == 200


OUTSIDE = "must be a folder or a .gguf file below a folder of --lora-root"


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("x", "{root}/outside", OUTSIDE),
        ("x", "{root}/root/link", OUTSIDE),
        ("x", "{root}/root/../outside", OUTSIDE),
        ("x", "/etc", OUTSIDE),
        ("x", "{root}/root/none", OUTSIDE),
        ("x", "org/adapter", OUTSIDE),
        ("x", "~no such user/x", OUTSIDE),
        ("x", "x" * 5000, OUTSIDE),
        ("x", "{root}/root/broken", "damaged"),
        ("", "a1", "1 to 256 printable characters"),
        (MODEL, "a1", "is the name of the base model"),
    ],
)
def test_what_may_not_be_loaded(server: Server, root: Path, name: str, path: str, message: str) -> None:
    answer = post(server, "load", lora_name=name, lora_path=path.format(root=root))
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert f"{root}/root/" not in answer.text, "clients get no paths of the server"


def test_a_broken_adapter_fails_its_own_request(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(complete, client, name) for name in ("a0", MODEL, "a2")]
        with pytest.raises(openai.BadRequestError, match=r"adapter 'broken': adapter_model\.safetensors is damaged"):
            complete(client, "broken")
        assert all(other.result() for other in others)
    for name in ("../outside", "link", "nothing", "a0/../a1/.."):
        with pytest.raises(openai.NotFoundError):
            complete(client, name)


def test_metrics_tell_of_adapters(server: Server, client: openai.OpenAI) -> None:
    complete(client, "a0")
    text = server.get("/metrics")[1]
    assert any('max_lora="4"' in line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{"))
    assert server.count("octavo:adapter_reads_total") > 0
    assert server.count("octavo:adapter_loads_total") >= server.count('octavo:adapters{place="device"}') > 0
    assert server.count("octavo:adapter_read_seconds_total") > 0


@pytest.mark.long
def test_a_server_that_was_not_told_so_loads_nothing(root: Path, tmp_path: Path) -> None:
    flags = (
        "--max-model-len",
        "64",
        "--num-gpu-blocks-override",
        "16",
        "--enable-lora",
        "--lora-root",
        str(root / "root"),
    )
    with running_server(tmp_path, *flags) as server:
        answer = post(server, "load", lora_name="x", lora_path="a1")
        assert answer.status_code == 404
        assert "--enable-runtime-lora-updating" in answer.json()["error"]["message"]


@pytest.mark.parametrize("num_front_ends", ["1", "2"])
def test_an_adapter_that_does_not_fit_is_found_at_the_start(tmp_path: Path, num_front_ends: str) -> None:
    fits, fat = write_random_adapter(tmp_path / "fits", 0), write_random_adapter(tmp_path / "fat", 1, rank=32)
    status, error = serve(
        "--num-gpu-blocks-override", "64", "--max-model-len", "256", "--enable-lora",
        "--api-server-count", num_front_ends, "--lora-modules", f"fits={fits}", f"fat={fat}",
    )  # fmt: skip
    assert status == 1
    assert "--lora-modules fat: " in error
    assert "has rank 32, and --max-lora-rank is 16" in error
