"""The models on this machine, and `octavo pull`, `list` and `rm`, against a small hub of our own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from octavo.loading.local_models import find_local, local_models, quantization_in, remove
from tests.loading.fake_hub import Hub

CUT = 100


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory, write_gguf: Callable[..., Path]) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(path, {"token_embd.weight": np.ones((4, 64), np.float32)}).read_bytes()


@pytest.fixture
def hub(gguf: bytes) -> Iterator[Hub]:
    with Hub(
        {"org/m": {"M-Q4_K_M.gguf": gguf, "M-Q8_0.gguf": gguf + b" "}, "org/empty": {"x.txt": b""}}
    ).running() as one:
        yield one


def octavo(hub: Hub, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command with this hub, and caches of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    own = {"HF_HOME": str(home), "HF_ENDPOINT": hub.address, "OCTAVO_CACHE": str(home / "octavo")}
    command = [sys.executable, "-m", "octavo.entrypoints.cli.main", *words]
    return subprocess.run(command, env=clean | own, capture_output=True, text=True, timeout=90)


@pytest.mark.long
def test_a_pull_goes_on_where_it_was_cut_off(hub: Hub, gguf: bytes, tmp_path: Path) -> None:
    hub.cuts_after = CUT
    for _ in range(2):  # both give up at the same byte
        assert octavo(hub, tmp_path, "pull", "org/m:q4_k_m").returncode == 1
    assert hub.begun_at == [0, CUT]
    assert len(octavo(hub, tmp_path, "list").stdout.splitlines()) == 1, "what is not whole is not listed"
    hub.cuts_after = None
    done = octavo(hub, tmp_path, "pull", "--json", "org/m:q4_k_m")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    digest = hashlib.sha256(gguf).hexdigest()
    assert hub.begun_at == [0, CUT, CUT] and lines[0] == {"status": "pulling manifest"}
    assert lines[-1] == {
        "status": "pulling M-Q4_K_M.gguf", "digest": f"sha256:{digest}", "total": len(gguf), "completed": len(gguf),
    }  # fmt: skip
    (blob,) = (tmp_path / "hub" / "models--org--m" / "blobs").glob("*")
    assert blob.name == digest and blob.read_bytes() == gguf
    assert "org/m:Q4_K_M" in octavo(hub, tmp_path, "list").stdout
    assert octavo(hub, tmp_path, "pull", "org/m:q4_k_m").returncode == 0
    assert len(hub.begun_at) == 3, "it is there already"


@pytest.mark.long
def test_bytes_that_are_not_the_hubs_are_refused(hub: Hub, tmp_path: Path) -> None:
    hub.damages = True
    done = octavo(hub, tmp_path, "pull", "org/m:Q4_K_M")
    assert done.returncode == 1 and "SHA-256" in done.stderr and "Traceback" not in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".part", ".gguf")]
    done = octavo(hub, tmp_path, "pull", "org/none")
    assert done.returncode == 1 and "org/none is neither" in done.stderr


@pytest.mark.long
def test_a_model_is_removed_with_what_no_other_needs(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Q4_K_M", "Q8_0"):
        assert octavo(hub, tmp_path, "pull", f"org/m:{name}").returncode == 0
    done = octavo(hub, tmp_path, "rm", "ORG/m:q4_k_m")
    assert done.stdout == "deleted org/m:Q4_K_M\n"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    (left,) = local_models()
    assert left.name == "org/m:Q8_0" and left.aliases == ("org/m",)
    assert len(list((tmp_path / "hub" / "models--org--m" / "blobs").iterdir())) == 1
    remove(left)
    assert local_models() == [] and not (tmp_path / "hub" / "models--org--m").exists()
    done = octavo(hub, tmp_path, "rm", "org/m")
    assert done.returncode == 1 and "octavo list" in done.stderr


def test_models_of_a_cache_and_of_folders_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*names: str) -> None:
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))

    whole, part, later = (f"hub/models--org--{name}/snapshots/c" for name in ("whole", "part", "later"))
    write(f"{whole}/config.json", f"{whole}/model-1.safetensors", f"{whole}/model-2.safetensors")
    write(f"{part}/config.json", f"{part}/model-1.safetensors", f"{whole}/model.safetensors.index.json")
    write(f"{part}/model.safetensors.index.json", f"{later}/M-Q8_0-00001-of-00002.gguf")
    write("files/a.gguf", "files/sub/B-Q4_0.gguf", "files/mmproj-a.gguf", "files/C-00002-of-00002.gguf")
    (tmp_path / "hub" / "models--org--later" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--later" / "refs" / "main").write_text("missing")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    found = local_models([str(tmp_path / "files")])
    assert [model.name for model in found] == ["org/whole", "a", "sub/B-Q4_0"]
    assert len(found[0].files) == 2 and found[0].num_bytes > 0
    model = find_local("ORG/Whole", found)
    assert model is not None and model.path == str(tmp_path / whole)
    assert find_local("org/part", found) is None


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("M-Q4_K_M.gguf", "Q4_K_M"), ("m.q8_0.gguf", "Q8_0"), ("M-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
        ("M-BF16-00001-of-00002.gguf", "BF16"), ("Q4-model.f16.gguf", "F16"), ("model.gguf", None),
    ],
)  # fmt: skip
def test_a_files_name_says_its_quantization(name: str, quantization: str | None) -> None:
    assert quantization_in(name) == quantization
