"""Adapters' files: what is packed are bytes of the identity that was asked for, whatever has become of the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.errors import LoadError
from octavo.lora.adapter_files import parse_config, read, refusal, source


def write(folder: Path, config: str = "{}", weights: bytes = b"weights") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)


def test_equal_contents_have_one_identity_and_others_another(tmp_path: Path) -> None:
    for name, config, weights in (("a", "{}", b"one"), ("b", "{}", b"one"), ("c", "{} ", b"one"), ("d", "{}", b"two")):
        write(tmp_path / name, config, weights)
    a, b, c, d = (source(name, str(tmp_path / name)).identity for name in "abcd")
    assert a == b
    assert len({a, c, d}) == 3


def test_what_was_read_stays_though_the_file_is_written_over(tmp_path: Path) -> None:
    write(tmp_path / "a", weights=b"before")
    contents = read(source("a", str(tmp_path / "a")))
    with open(tmp_path / "a" / "adapter_model.safetensors", "r+b") as file:
        file.write(b"after!")
    assert bytes(contents.weights.data) == b"before"
    assert contents.config is not None and parse_config(contents.config) == {}


def test_a_file_that_changes_between_is_refused_though_its_size_and_times_are_those_of_before(tmp_path: Path) -> None:
    write(tmp_path / "a", weights=b"before")
    weights = tmp_path / "a" / "adapter_model.safetensors"
    asked, stat = source("a", str(tmp_path / "a")), weights.stat()
    with open(weights, "r+b") as file:
        file.write(b"after!")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(LoadError, match="have changed since it was asked for"):
        read(asked)
    assert read(source("a", str(tmp_path / "a"))).identity != asked.identity


def test_a_configuration_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "a", config=" " * ((1 << 20) + 1))
    with pytest.raises(LoadError, match=r"too large: it has 1048577 bytes, and 1048576 are read at most"):
        read(source("a", str(tmp_path / "a")))


def test_files_that_are_empty_or_gone_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a", weights=b"")
    asked = source("a", str(tmp_path / "a"))
    with pytest.raises(LoadError, match=r"adapter_model.safetensors is damaged: it has 0 bytes"):
        read(asked)
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"cannot read .*adapter_model.safetensors: No such file"):
        read(asked)


@pytest.mark.parametrize("path", ["lora", "lora.gguf"])
def test_a_refusal_has_no_path_of_the_server_and_is_whole_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    write(tmp_path / "lora")
    (tmp_path / "lora.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    found = source("a", path)
    error = LoadError(f"{found.weights}: tensor q_proj.lora_A and/or another does not fit.")
    said = str(refusal("a", error, os.path.dirname(found.weights), "model"))
    assert said == f"adapter 'a': {Path(found.weights).name}: tensor q_proj.lora_A and/or another does not fit."
