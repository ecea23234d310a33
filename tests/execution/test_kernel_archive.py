"""Archives of compiled kernels: made without a GPU, and whole, so that a start that has one compiles nothing."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.errors import ConfigError
from octavo.execution import cuda_device, executor
from octavo.layers.tensor_parallel import Shard
from octavo.ops import cuda_collectives
from octavo.ops.triton import kernel_archive

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "dtype": "bfloat16",
}  # fmt: skip
_FLAGS = ["--load-format", "dummy", "--max-num-seqs", "16", "--max-num-batched-tokens", "64"]
# A start on a GPU that is not there, without a C compiler.
_START = """if True:
    import json, sys
    from octavo import hardware
    hardware.expect_cuda()
    from pathlib import Path
    from triton import knobs
    from octavo.config import EngineArgs
    from octavo.execution.compile_ahead import compile_model
    from octavo.ops.triton import kernel_archive

    model, archive, folder, size, num_stages = sys.argv[1:]
    found = []
    knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    kernel_archive.build._load_module_from_path = lambda name, path: kernel_archive._Anything()
    kernel_archive.launch._capability = lambda device: (9, 0)
    is_used = kernel_archive.use_archive(archive, Path(folder))
    kernel_archive._become_absent((9, 0))
    compile_model(
        EngineArgs(
            model=model, tokenizer=model, load_format="dummy", device="cuda", max_num_seqs=16,
            max_num_batched_tokens=64, tensor_parallel_size=int(size), pipeline_parallel_size=int(num_stages),
        ).create_engine_config()
    )
    print(json.dumps([is_used, found]))
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("size", "num_stages"), [(1, 1), (2, 1), (1, 2)])
def test_a_start_with_an_archive_compiles_nothing(tmp_path: Path, size: int, num_stages: int) -> None:
    model, archive = tmp_path / "model", tmp_path / "kernels.tar.gz"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(_CONFIG))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, "-m", "octavo.entrypoints.cli.main", "kernels", str(model), "--tokenizer", str(model)]
    done = subprocess.run(
        [*command, *_FLAGS, "-tp", str(size), "-pp", str(num_stages), "--output", str(archive)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "compiled for 9.0" in done.stdout
    (tmp_path / "libcuda.so.1").touch()  # Triton looks for the driver's before it asks for what is built
    started = subprocess.run(
        [sys.executable, "-c", _START, str(model), str(archive), str(tmp_path / "cache"), str(size), str(num_stages)],
        env=environment | {"CC": "/bin/false", "TRITON_LIBCUDA_PATH": str(tmp_path)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    is_used, found = json.loads(started.stdout.splitlines()[-1])
    assert is_used
    assert len(found) > 20, "every kernel of a step is asked for"
    assert all(found), "and all of them are there"
    with tarfile.open(archive) as made:
        kernels = {Path(name).name for name in made.getnames()}
    assert ("_sum_in_tree.cubin" in kernels) == (size > 1)
    assert {"_embed.cubin", "_draw.cubin"} <= kernels, "of the first stage, and of the last"


def test_workers_have_the_archive_before_they_exchange_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first exchange launches a kernel."""
    order: list[str] = []
    half = Shard(0, 2)
    monkeypatch.setenv("OCTAVO_KERNELS", "kernels.tar.gz")
    monkeypatch.setattr(cuda_device, "CudaDevice", lambda rank: None)
    monkeypatch.setattr(kernel_archive, "use_archive", lambda path, folder: order.append(path))
    monkeypatch.setattr(cuda_collectives, "join_group", lambda *args: order.append("exchange"))
    group = SimpleNamespace(
        worker_rank=SimpleNamespace(on_host=half), shard=half, memory=-1, connections=[],
        largest=lambda own: order.append("all are here"),
    )  # fmt: skip
    executor._open_cuda(cast(Any, group))
    assert order == ["kernels.tar.gz", "all are here", "exchange"]


def _archive(path: Path, **manifest: object) -> Path:
    content = json.dumps(manifest).encode()
    with tarfile.open(path, "w:gz") as archive:
        files = {"manifest.json": content, "ABC/_k.cubin": b"cubin", "../evil/x.so": b"", "/evil": b""}
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what `use_archive` changes for the whole process."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    monkeypatch.setattr(kernel_archive.triton_cache, "triton_key", kernel_archive.triton_cache.triton_key)
    monkeypatch.setattr(kernel_archive.build, "_get_cache_manager", None, raising=False)


def test_an_archive_is_unpacked_where_triton_looks(tmp_path: Path, kept: None) -> None:
    path = _archive(tmp_path / "a.tar.gz", key=kernel_archive.archive_key(), capabilities=[[9, 0]])
    assert kernel_archive.use_archive(str(path), tmp_path / "cache")
    folder = tmp_path / "cache" / kernel_archive.archive_key()
    assert os.environ["TRITON_CACHE_DIR"] == str(folder)
    assert [file.relative_to(folder).as_posix() for file in folder.rglob("*.*")] == ["ABC/_k.cubin"]
    assert kernel_archive.use_archive(str(path), tmp_path / "cache"), "again, by another worker"


def test_an_archive_that_was_cut_off_is_refused(tmp_path: Path, kept: None) -> None:
    whole = _archive(tmp_path / "a.tar.gz", key=kernel_archive.archive_key(), capabilities=[[9, 0]]).read_bytes()
    for content in (whole[: len(whole) // 2], whole[:40] + bytes(20) + whole[60:], b""):
        (part := tmp_path / "part.tar.gz").write_bytes(content)
        with pytest.raises(ConfigError, match="is not an archive of"):
            kernel_archive.use_archive(str(part), tmp_path / "cache")


def test_an_archive_of_something_else_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = dict(os.environ)
    other = _archive(tmp_path / "a.tar.gz", key="of-another-triton", capabilities=[[9, 0]])
    assert not kernel_archive.use_archive(str(other), tmp_path)
    assert "is of of-another-triton and this is" in caplog.text
    older = _archive(tmp_path / "b.tar.gz", key=kernel_archive.archive_key(), capabilities=[[8, 0]])
    assert not kernel_archive.use_archive(str(older), tmp_path)
    assert "no kernels for compute capability 9.0" in caplog.text
    assert dict(os.environ) == before


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"text")
    for name in ("x", "nothing"):
        with pytest.raises(ConfigError, match="is not an archive of `octavo kernels`"):
            kernel_archive.use_archive(str(tmp_path / name), tmp_path)


def test_paths_of_a_group_follow_the_archive() -> None:
    group = {"child_paths": {"a.cubin": "/there/K/a.cubin", "a.source": "/there/K/a.source"}}
    moved = kernel_archive._with_paths(json.dumps(group).encode(), Path("/here/K"))
    assert json.loads(moved) == {"child_paths": {"a.cubin": "/here/K/a.cubin"}}
