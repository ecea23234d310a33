"""Hub ids against a small hub of our own, in processes of their own: the client reads its environment at import."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import LoadError
from octavo.loading.checkpoint import resolve
from tests.loading.fake_hub import COMMIT, Hub


@pytest.fixture(scope="module")
def hub(
    tmp_path_factory: pytest.TempPathFactory, hf_config: dict[str, Any], write_gguf: Callable[..., Path]
) -> Iterator[Hub]:
    path = tmp_path_factory.mktemp("hub") / "m.gguf"
    gguf_file = write_gguf(path, {"token_embd.weight": np.ones((4, 64), np.float32)}).read_bytes()
    config = json.dumps(hf_config).encode()
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    shards = {"model-1.safetensors": b"1", "model-2.safetensors": b"2", "model.safetensors.index.json": index}
    parts = []
    for i, tensor in enumerate(("token_embd.weight", "output.weight")):
        metadata = {"split.no": i, "split.count": 2}
        parts.append(write_gguf(path, {tensor: np.ones((4, 64), np.float32)}, metadata).read_bytes())
    sizes = ("dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "norm_eps", "vocab_size")
    params = json.dumps(dict.fromkeys(sizes, 1)).encode()
    common = {"config.json": config, "tokenizer.json": b"{}", "README.md": b"hello", "onnx/model.bin": b"x"}
    repos = {
        "org/both": common | {"model.safetensors": b"s", "pytorch_model.bin": b"p", "consolidated.safetensors": b"c"},
        "org/shards": common | shards,
        "org/pt": common | {"pytorch_model.bin": b"p"},
        "org/gguf": {"M-Q4_0.gguf": gguf_file, "M-Q8_0.gguf": gguf_file},
        "org/one": {"M-Q4_0.gguf": gguf_file},
        "org/split": {"M-00001-of-00002.gguf": parts[0], "M-00002-of-00002.gguf": parts[1], "N.gguf": gguf_file},
        "org/mistral": {
            "params.json": params, "consolidated.safetensors": b"c", "tekken.json": b"{}", "README.md": b"hello",
            "additional_chat_templates/rag.jinja": b"rag",
        },
        "org/media": {
            "config.json": config, "model.safetensors": b"s", "adapter_config.json": b"{}",
            "adapter_model.safetensors": b"a", "speech-lora/adapter_config.json": b"{}",
            "speech-lora/adapter_model.safetensors": b"a", "other-lora/adapter_model.safetensors": b"a",
        },
        "org/empty": {"README.md": b"hello"},
    }  # fmt: skip
    with Hub(repos).running() as server:
        yield server


_SCRIPT = """
import json, os, sys
from octavo.errors import LoadError
from octavo.loading.checkpoint import resolve
for call in json.loads(sys.argv[1]):
    try:
        c = resolve(**call)
        files = [os.path.basename(f) for f in c.weight_files]
        print(json.dumps({"files": files, "format": c.format, "folder": sorted(os.listdir(os.path.dirname(c.path)
            if c.path.endswith(".gguf") else c.path)), "tokenizer": c.tokenizer_path, "path": c.path}))
    except LoadError as e:
        print(json.dumps({"error": str(e)}))
"""


def _resolve(calls: list[dict[str, Any]], **env: str) -> list[dict[str, Any]]:
    """`resolve` for each of the calls, in a fresh process with this environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps(calls)], env=clean | env, capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_only_the_needed_files_are_fetched_and_the_cache_serves_without_a_network(hub: Hub, tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
    calls: list[dict[str, Any]] = [
        {"model": "org/both"},
        {"model": "org/shards"},
        {"model": "org/pt", "load_format": "pt", "tokenizer": "org/both"},
        {"model": "org/one"},
        {"model": "org/gguf:q8_0"},
        {"model": "org/gguf:M-Q4_0.gguf"},
        {"model": "org/split:M-"},
        {"model": "org/mistral"},
    ]
    found = _resolve(calls, **env)
    assert [f.get("files") for f in found] == [
        ["model.safetensors"], ["model-1.safetensors", "model-2.safetensors"], ["pytorch_model.bin"],
        ["M-Q4_0.gguf"], ["M-Q8_0.gguf"], ["M-Q4_0.gguf"], ["M-00001-of-00002.gguf"], ["consolidated.safetensors"],
    ]  # fmt: skip
    formats = [f["format"] for f in found]
    assert formats == ["safetensors", "safetensors", "pt", "gguf", "gguf", "gguf", "gguf", "mistral"]
    assert found[6]["folder"] == ["M-00001-of-00002.gguf", "M-00002-of-00002.gguf"]
    assert found[7]["folder"] == [
        "additional_chat_templates", "consolidated.safetensors", "params.json", "tekken.json"
    ]  # fmt: skip
    assert found[0]["folder"] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert found[2]["tokenizer"] == found[0]["path"]
    assert {"README.md", "onnx/model.bin", "N.gguf"}.isdisjoint(hub.fetched)
    assert hub.fetched.count("consolidated.safetensors") == 1  # of the one model that has nothing else

    for offline in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        again = _resolve(calls, **(env | offline))
        assert [(f["path"], f["files"]) for f in again] == [(f["path"], f["files"]) for f in found]


def test_adapters_that_a_model_brings_are_fetched_beside_its_weights(hub: Hub, tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
    (found,) = _resolve([{"model": "org/media"}], **env)
    assert found["files"] == ["model.safetensors"]
    assert found["folder"] == [
        "adapter_config.json", "adapter_model.safetensors", "config.json", "model.safetensors", "speech-lora"
    ]  # fmt: skip
    folder = Path(found["path"]) / "speech-lora"
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_dummy_weights_and_another_download_folder(hub: Hub, tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
    call = {"model": "org/both", "load_format": "dummy", "download_dir": str(tmp_path / "models"), "revision": COMMIT}
    (found,) = _resolve([call], **env)
    assert found["format"] == "dummy"
    assert found["folder"] == ["config.json", "tokenizer.json"]
    assert found["path"].startswith(str(tmp_path / "models"))
    (found,) = _resolve([{"model": "org/both"}], **env, TRANSFORMERS_CACHE=str(tmp_path / "former"))
    assert found["path"].startswith(str(tmp_path / "former"))


def test_a_revision_is_of_the_hub(tmp_path: Path) -> None:
    for model, name in ((str(tmp_path), str(tmp_path)), ("", "the default model, SmolLM2-135M-Instruct,")):
        with pytest.raises(LoadError, match=f"revision v2 is for models of the hub, and {name} is none"):
            resolve(model, revision="v2")


def test_what_the_hub_does_not_have_is_said_in_a_line(hub: Hub, tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
    expected = {
        "org/none": "neither a folder or .gguf file here nor a model on the Hugging Face hub",
        "org/gated": "is gated: accept its terms",
        "org/gguf": "org/gguf has 2 GGUF files (M-Q4_0.gguf, M-Q8_0.gguf); choose one as org/gguf:FILE.gguf",
        "org/gguf:Q6_K": "Q6_K fits 0 of the GGUF files of org/gguf (M-Q4_0.gguf, M-Q8_0.gguf)",
        "org/empty": "org/empty has no weights for --load-format auto: its files are README.md",
    }
    for (name, message), found in zip(expected.items(), _resolve([{"model": n} for n in expected], **env), strict=True):
        assert message in found["error"], name
        assert "\n" not in found["error"]
    (found,) = _resolve([{"model": "org/pt", "load_format": "safetensors"}], **env)
    assert "org/pt has no weights for --load-format safetensors: its files are config.json" in found["error"]


def test_offline_without_a_cache_says_where_it_looked(tmp_path: Path) -> None:
    (found,) = _resolve([{"model": "org/none"}], HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert "is not in the Hugging Face cache" in found["error"]
    assert "HF_HUB_OFFLINE" in found["error"]
