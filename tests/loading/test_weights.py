"""Named tensors out of every format, and the refusal of files that do not fit their configuration."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from octavo.errors import LoadError
from octavo.loading import weights as weights_module
from octavo.loading.checkpoint import Checkpoint, resolve
from octavo.loading.weights import GIB, available_memory_bytes, check_fits, open_weights, weight_bytes
from octavo.models.decoder_config import DecoderConfig
from octavo.ops import QuantizedMatrix
from octavo.quantization import dequantize

Write = Callable[..., Path]
HfTensors = Callable[..., dict[str, torch.Tensor]]


def _all_equal(checkpoint: Checkpoint, expected: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    weights = open_weights(checkpoint, dtype)
    taken = {name: weights.take(name, tuple(t.shape)) for name, t in expected.items()}
    weights.check_all_taken()
    weights.close()  # before the comparison: what was taken must outlive it
    for name, tensor in expected.items():
        assert taken[name].dtype == dtype
        assert taken[name].is_contiguous()
        assert torch.equal(taken[name], tensor.to(dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("file_format", ["safetensors", "pt", "pt before torch 1.6", "gguf"])
def test_every_format_yields_the_same_tensors(
    file_format: str, dtype: torch.dtype, hf_folder: Path, hf_tensors: HfTensors, write_gguf: Write,
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
    _all_equal(resolve(str(path)), hf_tensors(**options), torch.float32)


def test_untied_output_weights_are_read_from_gguf(
    tmp_path: Path, hf_tensors: HfTensors, write_gguf: Write, gguf_tensors: Callable[..., dict[str, np.ndarray]]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(tied=False))
    _all_equal(resolve(str(path)), hf_tensors(tied=False), torch.float32)


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
    _all_equal(checkpoint, hf_tensors(), torch.float32)


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
    weights = open_weights(resolve(str(hf_folder)), torch.float32)
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
    _all_equal(resolve(str(hf_folder)), hf_tensors(), torch.float32)


def test_output_weights_left_over_in_an_untied_model_are_not_ignored(hf_folder: Path, hf_tensors: HfTensors) -> None:
    save_file(hf_tensors(tied=False), hf_folder / "model.safetensors")
    config = json.loads((hf_folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (hf_folder / "config.json").write_text(json.dumps(config))
    weights = open_weights(resolve(str(hf_folder)), torch.float32)
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
        open_weights(resolve(str(hf_folder)), torch.float32)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("stored", [torch.int8, torch.int64, torch.float8_e4m3fn])
def test_quantized_values_without_their_scales_are_refused(stored: torch.dtype, hf_folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64).to(stored)}, hf_folder / "model.safetensors")
    weights = open_weights(resolve(str(hf_folder)), torch.float32)
    with pytest.raises(LoadError, match=f"stored as {str(stored).removeprefix('torch.')}"):
        weights.take("model.norm.weight", (64,))


def test_a_pt_file_that_would_run_code_is_refused(hf_folder: Path) -> None:
    (hf_folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": print}, hf_folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"pytorch_model\.bin is damaged, or no file of tensors") as e:
        open_weights(resolve(str(hf_folder)), torch.float32)
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
    weights, reference = (open_weights(checkpoint, dtype) for dtype in (torch.bfloat16, torch.float32))
    formats = set()
    for name, tensor in hf_tensors().items():
        expected = reference.take(name, tuple(tensor.shape))
        if tensor.dim() == 1:
            assert torch.equal(weights.take(name, tuple(tensor.shape)), expected.bfloat16())
            continue
        matrix = weights.take_matrix(name, (tensor.shape[0], tensor.shape[1]))
        if "o_proj" in name:
            assert isinstance(matrix, torch.Tensor)
            assert torch.equal(matrix, expected.bfloat16())
        else:
            assert isinstance(matrix, QuantizedMatrix)
            formats.add(matrix.format)
            assert matrix.shape == tensor.shape
            assert torch.equal(dequantize(matrix), expected), name  # rows of q and k in order
        # In float32 they are what the blocks stand for.
        assert torch.equal(reference.take_matrix(name, (tensor.shape[0], tensor.shape[1])), expected)
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
    weights = open_weights(checkpoint, torch.bfloat16, 0, "int8")
    plain = open_weights(checkpoint, torch.bfloat16, 0)
    for name, tensor in hf_tensors().items():
        if tensor.dim() == 1:
            assert torch.equal(weights.take(name, tuple(tensor.shape)), plain.take(name, tuple(tensor.shape)))
            continue
        matrix = weights.take_matrix(name, (tensor.shape[0], tensor.shape[1]))
        expected = plain.take_matrix(name, (tensor.shape[0], tensor.shape[1]))
        assert isinstance(matrix, QuantizedMatrix)
        assert isinstance(expected, torch.Tensor)
        assert matrix.format == "INT8"
        assert matrix.shape == tensor.shape
        assert torch.equal(matrix.data.bfloat16(), expected)
    weights.check_all_taken()


def test_int8_of_a_quantized_file_is_refused(mixed_gguf: Path) -> None:
    with pytest.raises(LoadError, match=r"--quantization int8 .* is quantized already \(Q4_1, Q5_1, Q8_0\)"):
        open_weights(resolve(str(mixed_gguf)), torch.bfloat16, quantization="int8")


def test_the_default_model_stays_in_its_98_megabytes(default_checkpoint: Checkpoint) -> None:
    decoder = DecoderConfig.from_hf(default_checkpoint.config)
    parameters = decoder.num_weight_parameters()
    num_bytes, kind = weight_bytes(default_checkpoint, decoder, torch.bfloat16)
    assert kind == "Q8_0 and Q4_1"  # the embedding takes eight bits
    assert num_bytes < 100e6
    assert weight_bytes(default_checkpoint, decoder, torch.float32) == (parameters * 4, "float32")
    assert weight_bytes(default_checkpoint, decoder, torch.bfloat16, "int8") == (parameters * 34 // 32, "int8")
    with pytest.raises(LoadError, match=r"needs 0\.09 GiB of memory for its weights in Q8_0 and Q4_1"):
        check_fits(default_checkpoint, decoder, torch.bfloat16, None, 1 << 20)


# Dummy weights


def _dummy(config: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int | None = 0) -> Any:
    return open_weights(Checkpoint("d", "dummy", "", [], "", config), dtype, seed)


def test_dummy_weights_depend_on_seed_and_name_only(hf_config: dict[str, Any]) -> None:
    up, down = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    first = _dummy(hf_config).take(up, (96, 64))
    again = _dummy(hf_config)
    again.take(down, (64, 96))
    assert torch.equal(again.take(up, (96, 64)), first)
    assert not torch.equal(again.take(down, (96, 64)), first)
    assert not torch.equal(_dummy(hf_config, seed=1).take(up, (96, 64)), first)
    assert not torch.equal(_dummy(hf_config, seed=None).take(up, (96, 64)), first)
    assert torch.equal(_dummy(hf_config, torch.bfloat16).take(up, (96, 64)), first.bfloat16())
    assert first.std() == pytest.approx(0.02, rel=0.05)
    # The same in any process and on any machine: no hash() and nothing of the machine in it.
    assert first[0, :3].tolist() == pytest.approx(_FIRST_VALUES, rel=1e-5)


_FIRST_VALUES = [-0.0067176246, -0.0300370622, 0.0159099139]


def test_dummy_norms_are_ones_and_large_tensors_repeat_no_row(hf_config: dict[str, Any]) -> None:
    weights = _dummy(hf_config)
    assert torch.equal(weights.take("model.norm.weight", (64,)), torch.ones(64))
    large = weights.take("model.embed_tokens.weight", (3000, 700))
    assert large.std() == pytest.approx(0.02, rel=0.01)
    assert len(large.unique(dim=0)) == 3000
    weights.check_all_taken()


@pytest.mark.parametrize(
    ("architecture", "settings", "present", "absent"),
    [
        ("Llama", {}, ["q_proj.weight", "down_proj.weight"], ["lm_head.weight", "q_proj.bias", "q_norm.weight"]),
        ("Llama", {"tie_word_embeddings": False}, ["lm_head.weight"], ["qkv_proj.weight"]),
        ("Llama", {"attention_bias": True}, ["q_proj.bias", "o_proj.bias"], ["up_proj.bias"]),
        ("Llama", {"mlp_bias": True}, ["up_proj.bias", "down_proj.bias"], ["q_proj.bias", "lm_head.bias"]),
        ("Qwen2", {}, ["q_proj.bias", "v_proj.bias"], ["o_proj.bias", "down_proj.bias", "input_layernorm.bias"]),
        ("Qwen3", {}, ["q_norm.weight", "k_norm.weight"], ["q_proj.bias"]),
        ("Phi3", {}, ["qkv_proj.weight", "gate_up_proj.weight", "o_proj.weight"], ["q_proj.weight", "up_proj.weight"]),
    ],
)  # fmt: skip
def test_dummy_weights_have_what_a_checkpoint_of_the_configuration_would_have(
    architecture: str, settings: dict[str, Any], present: list[str], absent: list[str], hf_config: dict[str, Any]
) -> None:
    weights = _dummy(hf_config | settings | {"architectures": [f"{architecture}ForCausalLM"]})
    for name, expected in [(n, True) for n in present] + [(n, False) for n in absent]:
        full = name if name.startswith("lm_head") else f"model.layers.1.module.{name}"
        assert (full in weights) is expected, full
        if not expected:
            with pytest.raises(LoadError, match="have no tensor"):
                weights.take(full, (4,))


# Memory


def test_a_model_larger_than_memory_is_refused_with_both_sizes(hf_config: dict[str, Any]) -> None:
    big = hf_config | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "head_dim": 128,
                       "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
    decoder, checkpoint = DecoderConfig.from_hf(big), Checkpoint("d", "dummy", "", [], "", big)
    with pytest.raises(LoadError, match=r"needs 129\.46 GiB .* in bfloat16, and 64\.00 GiB are free"):
        check_fits(checkpoint, decoder, torch.bfloat16, None, 64 * GIB)
    check_fits(checkpoint, decoder, torch.bfloat16, None, 130 * GIB)
    with pytest.raises(LoadError, match=r"needs 68\.77 GiB .* in int8"):
        check_fits(checkpoint, decoder, torch.bfloat16, "int8", 64 * GIB)
    check_fits(checkpoint, DecoderConfig.from_hf(hf_config), torch.float32)


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/pods/a", {"memory.max": "3000", "memory.current": "2000", "memory.stat": "anon 1\ninactive_file 500"}),
        (
            "5:cpu,memory:/pods/a",
            {
                "memory/memory.limit_in_bytes": "3000",
                "memory/memory.usage_in_bytes": "2000",
                "memory/memory.stat": "total_inactive_file 500",
            },
        ),
    ],
)
def test_a_containers_limit_counts_if_it_is_lower_than_the_machines(
    line: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    proc = tmp_path / "proc"
    proc.write_text(f"3:pids:/x\n{line}\n")
    monkeypatch.setattr(weights_module, "_PROC_CGROUP", proc)
    assert available_memory_bytes(tmp_path) == 3000 - 2000 + 500


def test_without_limits_the_machines_free_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("max")
    monkeypatch.setattr(weights_module, "_PROC_CGROUP", tmp_path / "none")
    assert 0 < available_memory_bytes(tmp_path) <= psutil.virtual_memory().total
