"""Named tensors out of every format, and the refusal of files that do not fit their configuration."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from octavo.errors import ConfigError, LoadError
from octavo.loading.checkpoint import Checkpoint, resolve
from octavo.loading.file_weights import open_weights
from octavo.loading.weights import Weights
from octavo.quantization import dequantize
from octavo.quantization.array_functions import FLOATS
from tests.children import in_child

Write = Callable[..., Path]
HfTensors = Callable[..., dict[str, torch.Tensor]]


def _open(checkpoint: Checkpoint, dtype: str = "float32", quantization: str | None = None) -> Weights:
    return open_weights(checkpoint, dtype, 0, quantization, bool(checkpoint.config["tie_word_embeddings"]))


def _numpy(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    """As torch rounds it."""
    rounded = tensor.to(getattr(torch, dtype))
    return rounded.float().numpy().astype(FLOATS[dtype])  # exact


def _all_equal(checkpoint: Checkpoint, expected: dict[str, torch.Tensor], dtype: str) -> None:
    weights = _open(checkpoint, dtype)
    taken = {name: weights.take(name, tuple(t.shape)) for name, t in expected.items()}
    weights.check_all_taken()
    weights.close()  # before the comparison: what was taken must outlive it
    for name, tensor in expected.items():
        assert taken[name].dtype == FLOATS[dtype]
        assert taken[name].flags.c_contiguous
        assert np.array_equal(taken[name], _numpy(tensor, dtype)), name


def test_weights_tell_what_share_of_them_is_taken(hf_folder: Path, hf_tensors: HfTensors) -> None:
    shares: list[float] = []
    weights, sizes = _open(resolve(str(hf_folder))), {name: tensor.numel() for name, tensor in hf_tensors().items()}
    weights.on_taken = shares.append
    for name, tensor in hf_tensors().items():
        for _ in range(2):  # a tensor that is taken again counts once
            weights.take(name, tuple(tensor.shape))
    assert shares == pytest.approx(np.cumsum(list(sizes.values())) / sum(sizes.values()))
    assert shares[-1] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("file_format", ["safetensors", "pt", "pt before torch 1.6", "gguf"])
def test_every_format_yields_the_same_tensors(
    file_format: str, dtype: str, hf_folder: Path, hf_tensors: HfTensors, write_gguf: Write,
    gguf_tensors: Callable[..., dict[str, np.ndarray]],
) -> None:  # fmt: skip
    if file_format != "safetensors":
        (hf_folder / "model.safetensors").unlink()
    if file_format.startswith("pt"):
        zipped = file_format == "pt"
        torch.save(hf_tensors(), hf_folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    if file_format == "gguf":
        write_gguf(hf_folder / "m.gguf", gguf_tensors())
    checkpoint = resolve(str(hf_folder))
    assert checkpoint.format == file_format.split()[0]
    _all_equal(checkpoint, hf_tensors(), dtype)


@pytest.mark.parametrize(("arch", "options"), [("qwen2", {"qkv_bias": True}), ("qwen3", {"qk_norm": True})])
def test_gguf_files_of_the_qwen_family_keep_their_rows_in_order(
    arch: str, options: dict[str, bool], tmp_path: Path, hf_tensors: HfTensors, write_gguf: Write,
    gguf_tensors: Callable[..., dict[str, np.ndarray]],
) -> None:  # fmt: skip
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(arch, **options), arch=arch)
    _all_equal(resolve(str(path)), hf_tensors(**options), "float32")


def test_untied_output_weights_are_read_from_gguf(
    tmp_path: Path, hf_tensors: HfTensors, write_gguf: Write, gguf_tensors: Callable[..., dict[str, np.ndarray]]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(tied=False))
    _all_equal(resolve(str(path)), hf_tensors(tied=False), "float32")


@pytest.mark.parametrize("file_format", ["safetensors", "pt"])
def test_shards_are_read_through_their_index(file_format: str, hf_folder: Path, hf_tensors: HfTensors) -> None:
    (hf_folder / "model.safetensors").unlink()
    single, save = {"safetensors": ("model.safetensors", save_file), "pt": ("pytorch_model.bin", torch.save)}[
        file_format
    ]
    stem, suffix = single.split(".")
    names = sorted(hf_tensors())
    weight_map = {name: f"{stem}-0000{1 + i % 3}-of-00003.{suffix}" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save({n: hf_tensors()[n] for n in names if weight_map[n] == shard}, hf_folder / shard)
    # Not in the index, so not part of the model.
    save({"model.norm.weight": torch.zeros(1)}, hf_folder / f"{stem}-00009-of-00009.{suffix}")
    (hf_folder / f"{single}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = resolve(str(hf_folder))
    assert len(checkpoint.weight_files) == 3
    _all_equal(checkpoint, hf_tensors(), "float32")


def test_tensors_of_one_name_are_refused_with_the_name_and_the_files(hf_folder: Path, hf_tensors: HfTensors) -> None:
    """The last one won."""
    name = "model.layers.0.mlp.up_proj.weight"
    up = hf_tensors()[name]
    first, second = (str(hf_folder / f"model-0000{i}-of-00002.safetensors") for i in (1, 2))
    save_file({name: up}, first)

    def refused(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, second)
        checkpoint = replace(resolve(str(hf_folder)), weight_files=[first, second])
        with pytest.raises(LoadError) as caught:
            _open(checkpoint)
        return str(caught.value)

    twice = f"two tensors have the name {name}: in "
    assert refused({name: up + 1}).startswith(f"{twice}{first} and in {second}.")
    assert refused({f"base_model.model.{name}": up + 1}).startswith(f"{twice}{first} as {name} and in")


@pytest.mark.parametrize("file_format", ["safetensors", "pt", "gguf"])
def test_absent_misshapen_and_left_over_tensors_are_refused(
    file_format: str, hf_folder: Path, hf_tensors: HfTensors, write_gguf: Write,
    gguf_tensors: Callable[..., dict[str, np.ndarray]],
) -> None:  # fmt: skip
    (hf_folder / "model.safetensors").unlink()
    if file_format == "safetensors":
        save_file(hf_tensors(), hf_folder / "model.safetensors")
    elif file_format == "pt":
        torch.save(hf_tensors(), hf_folder / "pytorch_model.bin")
    else:
        write_gguf(hf_folder / "m.gguf", gguf_tensors())
    weights = _open(resolve(str(hf_folder)))
    assert "model.norm.weight" in weights
    assert "lm_head.weight" not in weights
    with pytest.raises(LoadError, match=r"no tensor model\.layers\.2\.mlp"):
        weights.take("model.layers.2.mlp.up_proj.weight", (96, 64))
    with pytest.raises(LoadError, match=r"model\.norm\.weight has the shape \[64\]; .* makes it \[65\]"):
        weights.take("model.norm.weight", (65,))
    for name, tensor in hf_tensors().items():
        if name != "model.layers.1.mlp.up_proj.weight":
            weights.take(name, tuple(tensor.shape))
    with pytest.raises(LoadError, match=r"has 1 tensors .*model\.layers\.1\.mlp\.up_proj\.weight"):
        weights.check_all_taken()


def test_leftovers_that_are_computed_or_tied_are_ignored(hf_folder: Path, hf_tensors: HfTensors) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.rotary_emb.inv_freq": torch.ones(8),
        "lm_head.weight": torch.ones(32, 64),
    }
    save_file(hf_tensors() | extra, hf_folder / "model.safetensors")
    _all_equal(resolve(str(hf_folder)), hf_tensors(), "float32")


def test_output_weights_left_over_in_an_untied_model_are_not_ignored(hf_folder: Path, hf_tensors: HfTensors) -> None:
    save_file(hf_tensors(tied=False), hf_folder / "model.safetensors")
    config = json.loads((hf_folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (hf_folder / "config.json").write_text(json.dumps(config))
    weights = _open(resolve(str(hf_folder)))
    for name, tensor in hf_tensors().items():
        weights.take(name, tuple(tensor.shape))
    with pytest.raises(LoadError, match=r"lm_head\.weight"):
        weights.check_all_taken()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(share=st.floats(0, 0.999))
@pytest.mark.parametrize("file_name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_cut_anywhere_is_refused(file_name: str, share: float, hf_folder: Path, hf_tensors: HfTensors) -> None:
    for path in hf_folder.glob("*model*"):
        path.unlink()
    if file_name == "pytorch_model.bin":
        torch.save(hf_tensors(), hf_folder / file_name)
    else:
        save_file(hf_tensors(), hf_folder / file_name)
    whole = (hf_folder / file_name).read_bytes()
    (hf_folder / file_name).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(LoadError, match=rf"{file_name} is damaged") as e:
        _open(resolve(str(hf_folder)))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("stored", [torch.int8, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize("file_format", ["safetensors", "pt"])
def test_quantized_values_without_their_scales_are_refused(
    file_format: str, stored: torch.dtype, hf_folder: Path
) -> None:
    tensors = {"model.norm.weight": torch.ones(64).to(stored), "m": torch.ones(4, 4).to(stored)}
    (hf_folder / "model.safetensors").unlink()
    if file_format == "pt":
        torch.save(tensors, hf_folder / "pytorch_model.bin")
    else:
        save_file(tensors, hf_folder / "model.safetensors")
    weights = _open(resolve(str(hf_folder)))
    message = f"stored as {str(stored).removeprefix('torch.')}"
    with pytest.raises(LoadError, match=message):
        weights.take("model.norm.weight", (64,))
    with pytest.raises(LoadError, match=message):
        weights.take_matrix("m", (4, 4))
    with pytest.raises(LoadError, match=message):
        weights.matrix_format("m")


def test_a_pt_file_that_would_run_code_is_refused(hf_folder: Path) -> None:
    (hf_folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": print}, hf_folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"pytorch_model\.bin is damaged, or no file of tensors") as e:
        _open(resolve(str(hf_folder)))
    assert "\n" not in str(e.value)


# Matrices


@pytest.fixture
def mixed_gguf(tmp_path: Path, write_gguf: Write, gguf_tensors: Callable[..., dict[str, np.ndarray]]) -> Path:
    """The tiny model with matrices in several formats, as files of small models have them."""
    tensors, types = gguf_tensors(), {}
    for name, value in tensors.items():
        if value.ndim == 2:
            kind = {"attn_v": "Q8_0", "ffn_down": "Q5_1", "attn_output": "F16"}.get(name.split(".")[-2], "Q4_1")
            types[name] = gguf.GGMLQuantizationType[kind]
            tensors[name] = gguf.quantize(value, types[name])
    return write_gguf(tmp_path / "mixed.gguf", tensors, types=types)


def test_matrices_of_gguf_files_keep_their_bits(mixed_gguf: Path, hf_tensors: HfTensors) -> None:
    checkpoint = resolve(str(mixed_gguf))
    weights, reference = (_open(checkpoint, dtype) for dtype in ("bfloat16", "float32"))
    formats = set()
    for name, tensor in hf_tensors().items():
        expected = reference.take(name, tuple(tensor.shape))
        rounded = expected.astype(ml_dtypes.bfloat16)
        if tensor.dim() == 1:
            assert np.array_equal(weights.take(name, tuple(tensor.shape)), rounded)
            continue
        shape = (tensor.shape[0], tensor.shape[1])
        assert np.array_equal(weights.take(name, shape), rounded)
        matrix = weights.take_matrix(name, shape)
        assert matrix.format == weights.matrix_format(name)
        assert matrix.shape == shape
        if "o_proj" in name:
            assert matrix.format == "BF16"
            assert np.array_equal(matrix.data, rounded)
        else:
            formats.add(matrix.format)
            assert np.array_equal(dequantize(matrix), expected), name  # rows of q and k in order
        # In float32 they are what the blocks stand for.
        plain = reference.take_matrix(name, shape)
        assert plain.format == reference.matrix_format(name) == "F32"
        assert np.array_equal(plain.data, expected)
    weights.check_all_taken()
    assert formats == {"Q4_1", "Q8_0", "Q5_1"}
    with pytest.raises(LoadError, match=r"down_proj\.weight has the shape \[64, 96\]; .* makes it \[96, 64\]"):
        weights.take_matrix("model.layers.0.mlp.down_proj.weight", (96, 64))
    with pytest.raises(LoadError, match=r"no tensor lm_head\.weight"):
        weights.take_matrix("lm_head.weight", (32, 64))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("file_format", ["safetensors", "pt", "gguf", "dummy"])
def test_int8_hands_the_stored_floats_to_the_packer(
    file_format: str, stored: torch.dtype, hf_folder: Path, hf_tensors: HfTensors, write_gguf: Write,
    gguf_tensors: Callable[..., dict[str, np.ndarray]], hf_config: dict[str, Any],
) -> None:  # fmt: skip
    (hf_folder / "model.safetensors").unlink()
    tensors = {name: tensor.to(stored) for name, tensor in hf_tensors().items()}
    if file_format == "safetensors":
        save_file(tensors, hf_folder / "model.safetensors")
    elif file_format == "pt":
        torch.save(tensors, hf_folder / "pytorch_model.bin")
    elif file_format == "gguf":
        kind = {torch.float16: "F16", torch.bfloat16: "BF16"}.get(stored, "F32")
        raw = {n: gguf.quantize(t, gguf.GGMLQuantizationType[kind]) for n, t in gguf_tensors().items()}
        types = dict.fromkeys(raw, gguf.GGMLQuantizationType[kind])
        write_gguf(hf_folder / "m.gguf", raw, types=types)
    checkpoint = resolve(str(hf_folder), load_format="dummy" if file_format == "dummy" else "auto")
    weights = _open(checkpoint, "bfloat16", "int8")
    plain = _open(checkpoint, "bfloat16")
    for name, tensor in hf_tensors().items():
        if tensor.dim() == 1:
            taken = weights.take(name, tuple(tensor.shape))
            assert np.array_equal(taken, plain.take(name, tuple(tensor.shape)))
            continue
        matrix = weights.take_matrix(name, (tensor.shape[0], tensor.shape[1]))
        expected = plain.take_matrix(name, (tensor.shape[0], tensor.shape[1]))
        assert expected.format == plain.matrix_format(name) == "BF16"
        assert matrix.format == weights.matrix_format(name) == "INT8"
        assert matrix.shape == expected.shape == tensor.shape
        assert matrix.data.dtype.itemsize <= 4, "what packers read"
        assert np.array_equal(matrix.data.astype(ml_dtypes.bfloat16), expected.data)
    weights.check_all_taken()


def test_int8_of_a_quantized_file_is_refused(mixed_gguf: Path) -> None:
    with pytest.raises(LoadError, match=r"--quantization int8 .* is quantized already \(Q4_1, Q5_1, Q8_0\)"):
        _open(resolve(str(mixed_gguf)), "bfloat16", "int8")


@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("file_format", ["safetensors", "pt", "gguf", "dummy"])
def test_a_share_of_a_matrix_is_that_share(
    file_format: str, dtype: str, quantization: str | None, hf_folder: Path, hf_tensors: HfTensors, mixed_gguf: Path
) -> None:
    if file_format == "pt":
        (hf_folder / "model.safetensors").unlink()
        torch.save(hf_tensors(), hf_folder / "pytorch_model.bin")
    if file_format == "gguf":
        quantization = None  # a quantized file is not quantized again
    path = mixed_gguf if file_format == "gguf" else hf_folder
    checkpoint = resolve(str(path), load_format="dummy" if file_format == "dummy" else "auto")
    weights = _open(checkpoint, dtype, quantization)
    for name, tensor in hf_tensors().items():
        if tensor.dim() == 2:
            shape = (tensor.shape[0], tensor.shape[1])
            whole = dequantize(weights.take_matrix(name, shape))
            rows = weights.take_matrix(name, shape, rows=(16, 32))
            both = weights.take_matrix(name, shape, (0, 16), (32, 64))
            assert (rows.shape, both.shape) == ((16, shape[1]), (16, 32))
            assert np.array_equal(dequantize(rows), whole[16:32])
            if quantization != "fp8":  # which quantizes whole rows
                assert np.array_equal(dequantize(both), whole[:16, 32:64])


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_matrix_may_be_stored_transposed(quantization: str | None, hf_folder: Path, hf_tensors: HfTensors) -> None:
    weights, name = _open(resolve(str(hf_folder)), "bfloat16", quantization), "model.layers.0.mlp.up_proj.weight"
    whole = hf_tensors()[name].bfloat16().float().numpy().T
    taken = weights.take_matrix(name, (whole.shape[1], whole.shape[0]), (8, 24), is_transposed=True)
    assert taken.shape == (16, whole.shape[1])
    np.testing.assert_allclose(dequantize(taken, "float32"), whole[8:24], atol=0.02 if quantization else 0)


def test_names_may_lack_the_first_module(hf_folder: Path, hf_tensors: HfTensors) -> None:
    """As those of GPT-2's and Bloom's checkpoints do."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in hf_tensors().items()}
    save_file(tensors | {"layers.0.attn.bias": torch.ones(1, 1, 8, 8)}, hf_folder / "model.safetensors")
    weights = _open(resolve(str(hf_folder)))
    for name, tensor in hf_tensors().items():
        assert name in weights
        assert np.array_equal(weights.take(name, tuple(tensor.shape)), tensor.numpy())
    weights.check_all_taken()
    with pytest.raises(LoadError, match=r"no tensor model\.layers\.9\.weight"):
        weights.take("model.layers.9.weight", (8,))


@pytest.mark.parametrize("file_format", ["safetensors", "pt"])
def test_a_model_that_peft_wraps_is_read_without_the_wrapping_or_refused_with_what_to_do(
    file_format: str, hf_folder: Path, hf_tensors: HfTensors
) -> None:
    wrapped = {
        f"base_model.model.{name}".replace("q_proj.", "q_proj.base_layer."): tensor
        for name, tensor in hf_tensors().items()
    }
    assert any("q_proj.base_layer.weight" in name for name in wrapped)

    def write(tensors: dict[str, torch.Tensor]) -> Checkpoint:
        (hf_folder / "model.safetensors").unlink(missing_ok=True)
        save, name = (
            (save_file, "model.safetensors") if file_format == "safetensors" else (torch.save, "pytorch_model.bin")
        )
        save(tensors, hf_folder / name)
        return resolve(str(hf_folder))

    _all_equal(write(wrapped), hf_tensors(), "float32")
    adapter = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(2, 4)}
    with pytest.raises(LoadError, match=r"q_proj.lora_A.*merge_and_unload\(\)"):
        _open(write(wrapped | adapter))


def test_a_share_that_divides_blocks_is_refused(mixed_gguf: Path) -> None:
    weights = _open(resolve(str(mixed_gguf)), "bfloat16")
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ConfigError, match=r"columns 0 to 48 of a Q4_1 matrix \[96, 64\] .* groups of 32"):
        weights.take_matrix(name, (96, 64), columns=(0, 48))


@pytest.mark.long
def test_a_large_file_does_not_stay_in_memory(tmp_path: Path) -> None:
    """Pages that were read are let go of, and what was taken is read again where it is used."""
    tensors = {f"t{i}": torch.full((1 << 20, 4), float(i)) for i in range(12)}  # 16 MB each
    save_file(tensors, tmp_path / "model.safetensors")
    in_child(_read_large, str(tmp_path / "model.safetensors"))


def _read_large(path: str) -> None:
    weights = open_weights(Checkpoint("d", "safetensors", "", [path], "", {}), "float32", None, None, False)
    process = psutil.Process()
    before = process.memory_info().rss
    taken = []
    for i in range(12):
        taken.append(weights.take(f"t{i}", (1 << 20, 4)))
        assert taken[i].min() == taken[i].max() == i
        assert process.memory_info().rss - before < 100 << 20
    weights.close()
    assert [float(t[-1, -1]) for t in taken] == list(range(12))


def test_weights_are_read_without_torch(
    hf_folder: Path, hf_tensors: HfTensors, mixed_gguf: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "archive"
    shutil.copytree(hf_folder, archive, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(hf_tensors(), archive / "pytorch_model.bin")
    code = (
        "import sys\nfrom octavo.loading.checkpoint import resolve\n"
        "from octavo.loading.file_weights import open_weights\n"
        "for path in sys.argv[1:]:\n"
        "    weights = open_weights(resolve(path), 'bfloat16', 0, None, True)\n"
        "    weights.take_matrix('model.layers.0.mlp.up_proj.weight', (96, 64))\n"
        "    weights.take('model.norm.weight', (64,))\n"
        "print([m for m in ('torch', 'safetensors', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(hf_folder), str(mixed_gguf), str(archive)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
