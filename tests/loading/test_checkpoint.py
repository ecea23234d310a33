"""How a name becomes a checkpoint, for files and folders on disk."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from octavo.entrypoints import model_card
from octavo.errors import LoadError
from octavo.loading.checkpoint import Checkpoint, is_default_model, resolve

Write = Callable[..., Path]
EMBEDDINGS = {"token_embd.weight": np.ones((4, 64), np.float32)}


def test_no_name_is_the_default_model_and_so_is_its_own(
    default_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve("SmolLM2-135M-Instruct") == default_checkpoint
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    assert not is_default_model("SmolLM2-135M-Instruct"), "it is a folder here"
    assert default_checkpoint.name == "SmolLM2-135M-Instruct"
    assert default_checkpoint.format == "gguf"
    assert default_checkpoint.weight_files == [default_checkpoint.path] == [default_checkpoint.tokenizer_path]


def test_a_folder_is_read_with_its_configurations(hf_folder: Path) -> None:
    (hf_folder / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.6}')
    checkpoint = resolve(str(hf_folder))
    assert (checkpoint.name, checkpoint.format, checkpoint.path) == (str(hf_folder), "safetensors", str(hf_folder))
    assert checkpoint.weight_files == [str(hf_folder / "model.safetensors")]
    assert checkpoint.tokenizer_path == str(hf_folder)
    assert checkpoint.config == json.loads((hf_folder / "config.json").read_text())
    assert checkpoint.generation_config == {"eos_token_id": [2, 7], "temperature": 0.6, "bos_token_id": 1}
    assert checkpoint.eos_token_ids == (2, 7)


def test_without_a_generation_config_the_model_config_says_what_ends_an_answer(hf_folder: Path) -> None:
    checkpoint = resolve(str(hf_folder))
    assert checkpoint.generation_config == {"eos_token_id": 2, "bos_token_id": 1}
    assert checkpoint.eos_token_ids == (2,)
    assert Checkpoint("", "dummy", "", [], "", {}).eos_token_ids == ()


def test_a_relative_path_and_a_home_folder_are_found(hf_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hf_folder.parent)
    assert resolve("tiny").path == resolve("./tiny/").path == str(hf_folder)
    monkeypatch.setenv("HOME", str(hf_folder.parent))
    assert resolve("~/tiny").path == str(hf_folder)


def test_safetensors_are_preferred_and_other_formats_can_be_asked_for(hf_folder: Path, write_gguf: Write) -> None:
    torch.save({}, hf_folder / "pytorch_model.bin")
    gguf_path = write_gguf(hf_folder / "m.gguf", EMBEDDINGS)
    (hf_folder / "consolidated.safetensors").write_bytes(b"")
    (hf_folder / "training_args.bin").write_bytes(b"")
    assert resolve(str(hf_folder)).weight_files == [str(hf_folder / "model.safetensors")]
    assert resolve(str(hf_folder), load_format="pt").weight_files == [str(hf_folder / "pytorch_model.bin")]
    assert resolve(str(hf_folder), load_format="gguf").weight_files == [str(gguf_path)]
    assert resolve(str(hf_folder), load_format="gguf").config["vocab_size"] == 4


def test_a_gguf_file_and_a_folder_with_one_are_the_same(tmp_path: Path, write_gguf: Write) -> None:
    path = write_gguf(tmp_path / "m.gguf", EMBEDDINGS)
    by_file, by_folder = resolve(str(path)), resolve(str(tmp_path))
    assert by_file.weight_files == by_folder.weight_files == [str(path)]
    assert by_file.config == by_folder.config
    assert by_file.tokenizer_path == by_folder.tokenizer_path == str(path)


def test_dummy_weights_need_a_configuration_only(hf_folder: Path, tmp_path: Path, write_gguf: Write) -> None:
    (hf_folder / "model.safetensors").unlink()
    checkpoint = resolve(str(hf_folder), load_format="dummy")
    assert (checkpoint.format, checkpoint.weight_files) == ("dummy", [])
    from_gguf = resolve(str(write_gguf(tmp_path / "m.gguf", EMBEDDINGS)), load_format="dummy")
    assert (from_gguf.format, from_gguf.weight_files, from_gguf.config["vocab_size"]) == ("dummy", [], 4)


def test_the_tokenizer_can_come_from_elsewhere(hf_folder: Path, tmp_path: Path, write_gguf: Write) -> None:
    gguf_path = str(write_gguf(tmp_path / "m.gguf", EMBEDDINGS))
    assert resolve(gguf_path, tokenizer=str(hf_folder)).tokenizer_path == str(hf_folder)
    assert resolve(str(hf_folder), tokenizer=gguf_path).tokenizer_path == gguf_path
    for wrong in (str(hf_folder / "config.json"), "./none", "none.gguf"):
        with pytest.raises(LoadError, match=r"is not a folder, a \.gguf file or a Hugging Face id"):
            resolve(gguf_path, tokenizer=wrong)


def _remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("damage", "load_format", "message"),
    [
        ([_remove("config.json")], "auto", "has no config.json and no .gguf file among its 1 files"),
        ([_remove("model.safetensors")], "auto", "has no weights for --load-format auto: none of 1 files"),
        ([], "pt", "has no weights for --load-format pt"),
        (
            [_remove("config.json"), _remove("model.safetensors"), _write("adapter_config.json", "{}")],
            "auto",
            "is a LoRA adapter, not a model: serve its base model with it, octavo serve BASE_MODEL --enable-lora",
        ),
        (
            [_remove("model.safetensors"), _write("adapter_config.json", '{"base_model_name_or_path": "org/b"}')],
            "auto",
            "octavo serve org/b --enable-lora --lora-modules NAME=",
        ),
        ([_write("config.json", "{")], "auto", "config.json is damaged: it is not JSON"),
        ([_write("config.json", "[1]")], "auto", "config.json is damaged: it holds a JSON list"),
        ([_write("config.json", "[" * 100_000)], "auto", "config.json is damaged: it is not JSON"),
        ([_write("config.json", '{"a": %s}' % ("[" * 99 + "]" * 99))], "auto", "it is nested more than 64 deep"),
        ([_write("config.json", r'{"a": "\ud800"}')], "auto", "config.json is damaged: .* surrogates not allowed"),
        (
            [_remove("config.json"), lambda folder: os.mkfifo(folder / "config.json")],
            "auto",
            "config.json is not a file",
        ),
        ([_write("generation_config.json", "no")], "auto", "generation_config.json is damaged"),
        (
            [_write("a.gguf", ""), _write("b.gguf", "")],
            "gguf",
            r"has 2 GGUF files \(a.gguf, b.gguf\); pass one of them",
        ),
        (
            [_remove("model.safetensors"), _write("model-1.safetensors", ""), _write(INDEX, "{}")],
            "auto",
            "index.json is damaged: it has no weight_map",
        ),
        (
            [_remove("model.safetensors"), _write("model-1.safetensors", ""), _write(INDEX, '{"weight_map": {}}')],
            "auto",
            "index.json is damaged: its weight_map names no file",
        ),
        (
            [
                _remove("model.safetensors"),
                _write("model-1.safetensors", ""),
                _write(INDEX, json.dumps({"weight_map": {c: f"model-{c}.safetensors" for c in "12345"}})),
            ],
            "auto",
            "lacks 4 of 5 weight files: model-2.safetensors, model-3.safetensors, model-4.safetensors and 1 more",
        ),
        (
            [
                _remove("model.safetensors"),
                _write("model-1.safetensors", ""),
                _write(INDEX, json.dumps({"weight_map": {"a": "../tiny/model-1.safetensors"}})),
            ],
            "auto",
            "lacks 1 of 1 weight files",
        ),
    ],
)
def test_what_is_wrong_with_a_folder_is_said_in_a_line(
    damage: list[Callable[[Path], object]], load_format: str, message: str, hf_folder: Path
) -> None:
    for do in damage:
        do(hf_folder)
    with pytest.raises(LoadError, match=message) as e:
        resolve(str(hf_folder), load_format=load_format)
    assert "\n" not in str(e.value)


def test_numbers_that_no_process_takes_are_no_damage(hf_folder: Path) -> None:
    config = json.loads((hf_folder / "config.json").read_text())
    config |= {"model_max_length": int(1e30), "seed": (1 << 64) - 1, "a": math.nan, "b": 10**400, "c": -(1 << 63)}
    (hf_folder / "config.json").write_text(json.dumps(config))
    found = resolve(str(hf_folder)).config
    assert (found["model_max_length"], found["seed"], found["c"]) == (1e30, 2.0**64, -(1 << 63))
    assert (found["a"], found["b"]) == ({"__float__": "NaN"}, {"__float__": "Infinity"})
    assert msgspec.json.decode(msgspec.json.encode(found)) == found


def test_infinite_numbers_reach_every_process_as_transformers_writes_them(hf_folder: Path) -> None:
    config = json.loads((hf_folder / "config.json").read_text()) | {"time_step_limit": [0.0, math.inf], "a": 1}
    (hf_folder / "config.json").write_text(json.dumps(config).replace('"a": 1', '"a": -1e999'))
    found = resolve(str(hf_folder)).config
    assert found["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert found["a"] == {"__float__": "-Infinity"}
    assert msgspec.json.decode(msgspec.json.encode(found)) == found


@pytest.mark.parametrize("ids", ["2", [2, None], [[2]], 2.0, True, {"a": 2}])
def test_ends_of_answers_are_token_ids(ids: Any, hf_folder: Path) -> None:
    (hf_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(LoadError, match=r"eos_token_id is .*, not a token id or a list of such"):
        _ = resolve(str(hf_folder)).eos_token_ids
    (hf_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 3]}))
    assert resolve(str(hf_folder)).eos_token_ids == (3,)


@pytest.mark.parametrize("load_format", ["safetensors", "pt"])
def test_a_gguf_file_is_not_read_as_another_format(load_format: str, tmp_path: Path, write_gguf: Write) -> None:
    path = write_gguf(tmp_path / "m.gguf", EMBEDDINGS)
    with pytest.raises(LoadError, match=f"--load-format {load_format} does not read; use auto or gguf"):
        resolve(str(path), load_format=load_format)


@pytest.mark.parametrize("name", ["/none/such", "./none", "none.gguf", "a/b/c", "what is this", "../x", "org/"])
def test_a_path_that_is_not_there_never_reaches_the_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    where = "" if name.startswith("/") else f" in {tmp_path / 'here'}"
    with pytest.raises(LoadError) as refused:
        resolve(name)
    assert str(refused.value).startswith(f"there is no file or folder {name}{where}, and it is not a Hugging Face id")


def test_a_file_of_another_kind_is_refused(hf_folder: Path) -> None:
    with pytest.raises(LoadError, match=r"is a file but not a \.gguf file"):
        resolve(str(hf_folder / "config.json"))


@pytest.mark.parametrize("file_format", ["safetensors", "gguf"])
def test_finding_a_model_on_disk_imports_nothing_heavy(file_format: str, hf_folder: Path, write_gguf: Write) -> None:
    path = hf_folder if file_format == "safetensors" else write_gguf(hf_folder / "m.gguf", EMBEDDINGS)
    code = (
        "import sys; from octavo.loading.checkpoint import resolve; resolve(sys.argv[1]); "
        "print([m for m in ('torch', 'transformers', 'numpy', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_type_of_most_weights_is_that_of_a_gguf_file_without_one_in_its_name(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", EMBEDDINGS)
    assert model_card._quantization(resolve(str(path)), "float32") == "F32"
    named = path.rename(tmp_path / "m-Q4_K_M.gguf")
    assert model_card._quantization(resolve(str(named)), "float32") == "Q4_K_M"
