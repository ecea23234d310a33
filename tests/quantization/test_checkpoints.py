"""Checkpoints that other tools have quantized, in every layout: the values of each matrix, what is packed of it, and
the logits of a model that is served from it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.errors import ConfigError, LoadError
from octavo.loading.checkpoint import resolve
from octavo.loading.file_weights import open_weights
from octavo.loading.recording import RecordingWeights
from octavo.loading.weights import Weights
from octavo.models.inventory import record
from octavo.models.registry import describe
from octavo.ops.cpu_pack import pack_quantized
from octavo.quantization import Layout, dequantize, take_rows
from octavo.quantization.array_functions import FLOATS
from tests.models.small_experts import EXPERT_MODELS
from tests.models.test_parity import logits_of
from tests.quantization.blocks import read_packed
from tests.quantization.checkpoints import CONFIG, FORMATS, SHAPES, VOCAB, fp4, fp8, tensors_of, write


def _open(folder: Path, dtype: str = "bfloat16", quantization: str | None = None) -> Weights:
    return open_weights(resolve(str(folder)), dtype, 0, quantization, False)


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_are_what_the_files_say_and_packed_near_to_it(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    stored, plain = tensors_of(form)
    folder = write(tmp_path / "m", stored, form.settings)
    weights, reference = _open(folder), _open(folder, "float32")
    for module, shape in SHAPES.items():
        full = f"model.layers.1.{module}.weight"
        expected = plain[full]
        assert np.allclose(reference.take_matrix(full, shape).data, expected, rtol=1e-6, atol=1e-7), full
        matrix = weights.take_matrix(full, shape)
        packed = pack_quantized([matrix])
        products, minima = read_packed(packed)
        if packed.order is not None:
            products, minima = (x[:, np.argsort(packed.order)] for x in (products, minima))
        allowed = form.tolerance * np.abs(expected).max() + 1e-6
        assert np.abs(products + minima - expected).max() <= allowed, full
        bits = packed.data.nbytes * 8 / expected.size
        assert bits == form.bits, full
        # A share of rows, as of a stacked or divided matrix.
        half = shape[0] // 2
        share = weights.take_matrix(full, shape, (half, shape[0]))
        assert np.allclose(dequantize(share), expected[half:], rtol=1e-6, atol=1e-7)
    for weights_of in (weights, reference):
        for full in set(plain) - {f"model.layers.{i}.{m}.weight" for i in range(2) for m in SHAPES}:
            weights_of.take(full, plain[full].shape)
    weights.ignore("model.layers.")
    weights.check_all_taken()


@pytest.mark.parametrize("name", FORMATS)
def test_memory_is_known_before_anything_is_read(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    stored, _ = tensors_of(form)
    weights = _open(write(tmp_path / "m", stored, form.settings))
    recorded = RecordingWeights("bfloat16", weights)
    record(describe(CONFIG), recorded)
    quantized = 2 * sum(n * k for n, k in SHAPES.values())
    rest = 2 * 2 * VOCAB * 128
    assert recorded.packed_bytes(keeps_superblocks=True)[0] == quantized * form.bits / 8 + rest
    bits_on_gpus = {"mxfp4": 4.5}.get(name, form.bits)  # scales of two bytes
    assert recorded.packed_bytes()[0] == quantized * bits_on_gpus / 8 + rest


# One of each layout and way through the packer; their matrices are tested above.
_SERVED = ("gptq 4 zeros", "gptq 4 desc_act", "awq", "w8a8", "fp8 blocks", "nvfp4", "nf4", "squeezellm 3 sparse")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
            for length in (1, 9, 40)]  # fmt: skip


def _logits(folder: Path, tokenizer: Path, prompts: list[list[int]], **options: Any) -> list[Any]:
    llm = LLM(
        str(folder), tokenizer=str(tokenizer), max_model_len=64, max_num_batched_tokens=32, block_size=8,
        num_gpu_blocks_override=40, enable_prefix_caching=False, **options,
    )  # fmt: skip
    return logits_of(llm, prompts)


@pytest.mark.parametrize("name", _SERVED)
def test_logits_are_those_of_the_values(name: str, tmp_path: Path, tiny_tokenizer: Path, prompts: Any) -> None:
    """In float32 they are the same; packed they are near. Alone a sequence has the bits that it has among others."""
    form = FORMATS[name]
    stored, plain = tensors_of(form)
    folder = write(tmp_path / "m", stored, form.settings)
    reference = _logits(write(tmp_path / "plain", plain, None), tiny_tokenizer, prompts, dtype="float32")
    for (_, expected), (_, found) in zip(
        reference, _logits(folder, tiny_tokenizer, prompts, dtype="float32"), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    method = form.settings["quant_method"]
    together = _logits(folder, tiny_tokenizer, prompts, dtype="bfloat16", quantization=method)
    for (tokens, expected), (own, found) in zip(reference, together, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(tokens, own, strict=True)) if a != b), len(own))
        steps = max(1, same - (len(own) - len(found)) + 1)
        error = (found - expected)[: min(steps, len(found))].abs().max() / expected.abs().max()
        assert error < 0.05
    [(_, alone)] = _logits(folder, tiny_tokenizer, prompts[-1:], dtype="bfloat16")
    assert torch.equal(alone, together[-1][1])


# What is wrong with a checkpoint is one line.

_Q = "model.layers.1.self_attn.q_proj"


_MOST = (1 << 31) - 1


def _spoiled(tensors: dict[str, np.ndarray], name: str, value: Any) -> dict[str, np.ndarray]:
    spoiled = {key: np.array(x) for key, x in tensors.items()}
    if value is None:
        del spoiled[f"{_Q}.{name}"]
    elif callable(value):
        spoiled[f"{_Q}.{name}"] = value(spoiled[f"{_Q}.{name}"])
    else:
        spoiled[f"{_Q}.{name}"].reshape(-1)[3] = value
    return spoiled


@pytest.mark.parametrize(
    ("name", "tensor", "value", "message"),
    [
        ("gptq 4", "scales", np.nan, "some of its scales are not finite"),
        ("gptq 4", "scales", lambda x: x[:-1], r"scales has the shape \[3, 128\]; the matrix makes it \[4, 128\]"),
        ("gptq 4", "qzeros", None, "it has no qzeros, which its quantization calls for"),
        ("gptq 4", "qweight", lambda x: x.astype(np.float32), "qweight is float32, not int32"),
        ("gptq 4", "qweight", lambda x: x.reshape(-1), "which is no matrix of 4 bits"),
        ("gptq 4", "qweight", lambda x: x[:-4], "groups of 32 divide|scales has the shape"),
        ("gptq 4", "qweight", lambda x: x[:-1], "groups of 32 do not divide its 120 inputs"),
        ("gptq 4 desc_act", "g_idx", -1, "g_idx does not divide 128 inputs into 4 groups"),
        ("gptq 4 desc_act", "g_idx", 4_000_000, "g_idx does not divide 128 inputs into 4 groups"),
        ("gptq 4 desc_act", "g_idx", lambda x: x.astype(np.int64) + 10**12, "g_idx does not divide 128 inputs"),
        ("gptq 4 desc_act", "g_idx", lambda x: x * 0, "g_idx does not divide 128 inputs into 4 groups"),
        ("gptq 3", "qweight", lambda x: x[:-1], "which is no matrix of 3 bits"),
        ("gptq 4 by row", "qweight", lambda x: x[:0], "its matrix has no inputs"),
        ("awq gemv", "qzeros", lambda x: x[0, 0], r"qzeros has the shape \[\], too narrow for 4 groups"),
        ("awq", "scales", np.inf, "some of its scales are not finite"),
        ("awq", "qzeros", lambda x: x[:, :-1], r"qzeros has the shape \[4, 15\]; the matrix makes it \[4, 16\]"),
        ("awq gemv", "qzeros", lambda x: x[:, :0], "too narrow for 4 groups"),
        ("w4a16", "weight_scale", np.nan, "some of its scales are not finite"),
        ("w4a16", "weight_packed", lambda x: x[:, :-1], "groups of 32 do not divide its 120 inputs"),
        ("w4a16 zeros", "weight_zero_point", None, "it has no weight_zero_point"),
        ("w4a16 actorder", "weight_g_idx", -1, "g_idx does not divide 128 inputs into 4 groups"),
        ("w8a8", "weight_scale", lambda x: x[:-1], r"weight_scale has the shape \[127, 1\]"),
        ("w4a8", "weight", 100, "some of its codes are out of the range of 4 bits, -8 to 7"),
        ("fp8", "weight", np.nan, "some of its elements are not finite"),
        ("fp8", "weight_scale", None, "it has no weight_scale"),
        ("fp8 blocks", "weight_scale_inv", lambda x: x[:, :0], r"the matrix makes it \[1, 1\]"),
        ("mxfp4", "weight_scale", 255, "some of its scales are not finite"),
        ("nvfp4", "weight_global_scale", lambda x: x * 0, "weight_global_scale is .*, not one number"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", 0, "its weight.quant_state is damaged"),
        ("nf4 nested", "weight.absmax", lambda x: x[:-1], r"weight.absmax has the shape \[255\]"),
        ("squeezellm", "lookup_table", lambda x: x[:, :8], r"lookup_table has the shape \[128, 8\]"),
        ("squeezellm", "lookup_table", np.nan, "some of its scales are not finite"),
        ("squeezellm 3 sparse", "qweight", lambda x: x[:-1], "which is no matrix of 3 bits"),
        ("squeezellm 3 sparse", "cols", 128, "some cols of its sparse part are not among its 128 inputs"),
        ("squeezellm 3 sparse", "rows", -1, "rows does not divide .* numbers of its sparse part among its outputs"),
        ("squeezellm 3 sparse", "rows", lambda x: np.array([0, _MOST, -_MOST - 1, -1, *x[4:]], np.int32),
         "rows does not divide .* numbers of its sparse part"),
        ("squeezellm 3 sparse", "rows", lambda x: np.where(np.arange(len(x)) > 0, x[-1], 0).astype(np.int32),
         "rows does not divide .* numbers of its sparse part"),
        ("squeezellm 3 sparse", "vals", lambda x: x[:-1], "vals has the shape"),
        ("bnb int8", "SCB", np.nan, "some of its scales are not finite"),
        ("bnb int8", "SCB", None, "it has no SCB"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_refused(name: str, tensor: str, value: Any, message: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    stored, _ = tensors_of(form)
    folder = write(tmp_path / "m", _spoiled(stored, tensor, value), form.settings)
    with pytest.raises(LoadError, match=message) as refused:
        _open(folder).take_matrix(f"{_Q}.weight", SHAPES["self_attn.q_proj"])
    assert _Q in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gptq 4", {"group_size": 48}, "groups of 48 do not divide its 256 inputs"),
        ("gptq 4", {"group_size": 16}, "groups of 16 are not built; multiples of 32 are"),
        ("gptq 4", {"group_size": "x"}, "groups of x do not divide"),
        ("gptq 4", {"group_size": 0}, "groups of 0 do not divide"),
        ("gptq 4", {"bits": 5}, "GPTQ with 5 bits is not built; 2, 3, 4 and 8 are"),
        ("gptq 4", {"bits": None}, "GPTQ with None bits is not built"),
        ("gptq 4", {"bits": 4.0}, "GPTQ with 4.0 bits is not built"),
        ("awq", {"bits": 4.0}, "AWQ with 4.0 bits is not built"),
        ("squeezellm", {"wbits": 4.0}, "SqueezeLLM with 4.0 bits is not built"),
        ("gptq 4", {"bits": 8}, r"has the shape|scales has the shape"),
        ("gptq 4", {"checkpoint_format": "marlin"}, "GPTQ in the format 'marlin' .* is not built"),
        ("gptq 4", {"dynamic": {"-:.*q_proj": {}}}, "leaves it out, but it is quantized"),
        ("gptq 4", {"dynamic": {"+:(": {}}}, r"quantization_config.dynamic: '\(' is no regular expression"),
        ("gptq 4", {"dynamic": {"+:(.+)+!": {}}}, "may take too long to match"),
        ("w4a16", {"ignore": ["re:(.+)+!"]}, "may take too long to match"),
        ("w4a16", {"config_groups": {"a": {"targets": ["re:(.+)+!"]}}}, "may take too long to match"),
        ("w4a16", {"ignore": ["re:" + ".*a" * 6]}, "may take too long to match"),
        ("w4a16", {"ignore": [r"re:(?!.*mlp).*\.layers\..*\.q_proj"]}, "leaves it out, but it is quantized"),
        ("gptq 4", {"quant_method": "aqlm"}, "is quantized with 'aqlm', which is not built; awq, "),
        ("squeezellm", {"wbits": 2}, "SqueezeLLM with 2 bits is not built; 3 and 4 are"),
        ("awq", {"bits": 3}, "AWQ with 3 bits is not built"),
        ("awq", {"version": "gemv_fast"}, "AWQ in the layout 'gemv_fast' is not built"),
        ("w4a16", {"config_groups": {}}, "no group of the configuration's config_groups targets it"),
        ("w4a16", {"ignore": ["re:.*q_proj"]}, "leaves it out, but it is quantized"),
        ("w4a16", {"transform_config": {"config_groups": 1}}, "with transforms .* are not built"),
        ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse matrices .* are not built"),
        ("w4a16", {"config_groups": 7}, "its quantization configuration is damaged"),
        ("fp8 blocks", {"weight_block_size": [0, 128]}, r"blocks cannot have the size \[0, 128\]"),
        ("fp8 blocks", {"weight_block_size": 7}, "its quantization configuration is damaged"),
        ("fp8 blocks", {"weight_block_size": [32]}, "its quantization configuration is damaged"),
        ("modelopt fp8", {"quant_algo": "W4A8_AWQ"}, "ModelOpt's 'W4A8_AWQ' is not built; FP8 and NVFP4 are"),
    ],
)  # fmt: skip
def test_configurations_that_do_not_fit_are_refused(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    form = FORMATS[name]
    stored, _ = tensors_of(form)
    with pytest.raises(LoadError, match=message) as refused:
        _open(write(tmp_path / "m", stored, form.settings | settings)).take_matrix(f"{_Q}.weight", (128, 128))
    assert "\n" not in str(refused.value)


_STATE = f"{_Q}.weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocksize": 1}, "groups of 1 are not built; multiples of 32 are"),
        ({"nested_offset": 10**400}, "its weight.quant_state is damaged"),
        ({"nested_offset": math.nan}, "its weight.quant_state is damaged"),
        ({"shape": [[]] * 2}, "its weight.quant_state is damaged"),
    ],
)
def test_states_of_codebooks_that_do_not_fit_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    stored, _ = tensors_of(FORMATS["nf4 nested"])
    state = json.loads(stored[_STATE].tobytes()) | changes
    stored[_STATE] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    with pytest.raises(LoadError, match=message) as refused:
        _open(write(tmp_path / "m", stored, FORMATS["nf4 nested"].settings)).take_matrix(f"{_Q}.weight", (128, 128))
    assert "\n" not in str(refused.value)


def test_sizes_of_blocks_beyond_the_matrix_take_no_memory(tmp_path: Path) -> None:
    """A checkpoint may say anything that its scales' shape allows."""
    form = FORMATS["fp8 blocks"]
    stored, plain = tensors_of(form)
    settings = form.settings | {"weight_block_size": [10**12, 10**12]}
    folder = write(tmp_path / "m", {n: x[:1, :1] if "scale" in n else x for n, x in stored.items()}, settings)
    found = dequantize(_open(folder, "float32").take_matrix(f"{_Q}.weight", (128, 128)))
    assert np.array_equal(found, plain[f"{_Q}.weight"])
    stored, plain = tensors_of(FORMATS["nf4 nested"])
    for name, tensor in stored.items():
        if name.endswith("nf4"):
            state = json.loads(tensor.tobytes()) | {"nested_blocksize": 10**12}
            stored[name] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        elif name.endswith("nested_absmax"):
            stored[name] = tensor[:1]
    folder = write(tmp_path / "n", stored, FORMATS["nf4 nested"].settings)
    found = dequantize(_open(folder, "float32").take_matrix(f"{_Q}.weight", (128, 128)))
    assert np.allclose(found, plain[f"{_Q}.weight"])


def test_another_method_than_the_files_is_refused(tmp_path: Path, tiny_tokenizer: Path) -> None:
    stored, plain = tensors_of(FORMATS["gptq 4"])
    folder = write(tmp_path / "m", stored, FORMATS["gptq 4"].settings)
    with pytest.raises(
        ConfigError, match=r"--quantization awq is for checkpoints quantized with awq, .* has gptq weig"
    ):
        LLM(str(folder), tokenizer=str(tiny_tokenizer), quantization="awq")
    with pytest.raises(LoadError, match=r"--quantization int8 quantizes weights of floats, but .* already \(gptq\)"):
        _open(folder, quantization="int8")
    floats = write(tmp_path / "plain", plain, None)
    with pytest.raises(ConfigError, match="--quantization gptq is for checkpoints quantized with gptq"):
        LLM(str(floats), tokenizer=str(tiny_tokenizer), quantization="gptq")
    # Without a word in the configuration nothing says what the tensors mean.
    unsaid = _open(write(tmp_path / "unsaid", tensors_of(FORMATS["fp8"])[0], None))
    with pytest.raises(LoadError, match=r"float8_e4m3fn; no quantization_config in config\.json says what that mean"):
        unsaid.take_matrix(f"{_Q}.weight", (128, 128))


def test_modules_may_differ(tmp_path: Path) -> None:
    """Bits by module, modules that are left out, and settings in a file beside config.json."""
    (four, plain), (eight, wide) = (tensors_of(FORMATS[name]) for name in ("gptq 4", "gptq 8"))
    up, down = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
    mixed = {name: x for name, x in four.items() if not name.startswith((up, down))}
    mixed |= {name: x for name, x in eight.items() if name.startswith(up)}
    mixed[f"{down}.weight"] = plain[f"{down}.weight"]
    mixed[f"{_Q}.bias"] = np.zeros(128, np.float32)  # of a model that has none
    dynamic = {r"-:.*\.0\.mlp\.down_proj": {}, r"+:model\.layers\.0\.mlp\.up_proj": {"bits": 8}}
    folder = write(tmp_path / "m", mixed, None)
    settings = {"bits": 4, "group_size": 32, "dynamic": dynamic}
    (folder / "quantize_config.json").write_text(json.dumps(settings))
    weights = _open(folder)
    for name, expected in ((up, wide), (down, plain), (_Q, plain)):
        values = expected[f"{name}.weight"]
        assert np.allclose(dequantize(weights.take_matrix(f"{name}.weight", values.shape)), values, atol=0.002)
    weights.ignore("model.")
    weights.ignore("lm_head")
    weights.check_all_taken()


@pytest.mark.parametrize("name", ["gptq 4 zeros", "awq", "w4a16 zeros", "fp8 blocks", "gptq 4 desc_act"])
def test_rows_can_be_put_in_another_order(name: str, tmp_path: Path) -> None:
    """As heads of interleaved rotary pairs and fused projections are, also where outputs share words."""
    form = FORMATS[name]
    stored, plain = tensors_of(form)
    matrix = _open(write(tmp_path / "m", stored, form.settings)).take_matrix(f"{_Q}.weight", (128, 128))
    order = np.random.default_rng(0).permutation(128)
    assert np.allclose(dequantize(take_rows(matrix, order)), plain[f"{_Q}.weight"][order], rtol=1e-6, atol=1e-7)


def test_squeezellm_is_known_by_its_file_and_by_how_it_is_called(tmp_path: Path) -> None:
    """Its authors write quant_config.json, as AWQ's do, and sq-NAME.pt. A sparse part has all columns or none."""
    form = FORMATS["squeezellm 3 sparse"]
    stored, plain = tensors_of(form)
    folder = write(tmp_path / "m", stored, None)
    (folder / "quant_config.json").write_text('{"wbits": 3}')
    torch.save(load_file(folder / "model.safetensors"), folder / "sq-model-w3-s1.pt")
    (folder / "model.safetensors").unlink()
    name, shape = "model.layers.0.mlp.down_proj.weight", SHAPES["mlp.down_proj"]
    weights = _open(folder)
    assert np.allclose(dequantize(weights.take_matrix(name, shape)), plain[name], rtol=1e-6, atol=1e-7)
    with pytest.raises(ConfigError, match="with a sparse part cannot be divided among devices"):
        _open(folder).take_matrix(name, shape, None, (0, 128))


def test_squeezellm_with_whole_outputs_is_refused(tmp_path: Path) -> None:
    form = FORMATS["squeezellm"]
    stored, _ = tensors_of(form)
    stored["model.layers.0.mlp.down_proj.full_rows"] = np.zeros((256, 2), np.float32)
    with pytest.raises(LoadError, match=r"whole outputs as floats \(full_rows\) are not built"):
        _open(write(tmp_path / "m", stored, form.settings))


def test_matrices_of_one_input_with_orders_of_their_own_are_refused(tmp_path: Path) -> None:
    form = FORMATS["gptq 4 desc_act"]
    weights = _open(write(tmp_path / "m", tensors_of(form)[0], form.settings))
    parts = [weights.take_matrix(f"model.layers.{i}.self_attn.q_proj.weight", (128, 128)) for i in range(2)]
    with pytest.raises(ConfigError, match=r"different column orders \(desc_act\)"):
        pack_quantized(parts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats_are_quantized_to_four_bits_at_load(dtype: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((70, 95)).astype(np.float32)
    values[3] = 0
    folder = write(tmp_path / "m", {"m.weight": values.astype(FLOATS[dtype])}, None)
    matrix = _open(folder, quantization="int4").take_matrix("m.weight", (70, 95))
    packed = pack_quantized([matrix])
    products, _ = read_packed(packed)
    assert packed.layout == Layout(4, 32, False)
    padded = np.pad(np.abs(values), ((0, 0), (0, 1))).reshape(70, 3, 32).max(-1) / 8
    step = padded.repeat(32, 1)[:, :95]
    assert (np.abs(products - values) <= step * 1.01 + 0.01 * step).all()  # on one side the last step is missing
    assert np.abs(products - values).mean() < 0.3 * step.mean()
    assert np.abs(products - dequantize(matrix)).max() <= 1.01 * step.max()
    assert (np.abs(products - dequantize(matrix)) < 0.01 * step.max()).mean() > 0.98


def test_experts_of_gpt_oss(tmp_path: Path, tiny_tokenizer: Path, prompts: Any) -> None:
    """All of a layer's in one tensor, rows of gate and up alternating. `transformers` computes the reference."""
    form, sizes = EXPERT_MODELS["gpt-oss"], {"hidden_size": 64, "intermediate_size": 32, "vocab_size": 128}
    model = form._replace(settings=form.settings | sizes)
    reference, rng = model.reference(seed=0), np.random.default_rng(0)
    experts = {name: p for name, p in reference.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))}
    quantized: dict[str, torch.Tensor] = {}
    for name, parameter in experts.items():
        num, num_in, num_out = parameter.shape
        tensors, values = fp4(rng, num * num_out, num_in, kind="mxfp4")
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values).reshape(num, num_out, num_in).transpose(1, 2))
        blocks = torch.from_numpy(tensors["weight_packed"]).reshape(num, num_out, num_in // 32, 16)
        quantized[f"{name}_blocks"] = blocks
        quantized[f"{name}_scales"] = torch.from_numpy(tensors["weight_scale"]).reshape(num, num_out, num_in // 32)
    folder = tmp_path / "m"
    model.save(reference, folder)
    stored = {name: x for name, x in load_file(folder / "model.safetensors").items() if name not in experts}
    save_file(stored | quantized, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.1)):
        [_, _, (tokens, found)] = _logits(folder, tiny_tokenizer, prompts, dtype=dtype, quantization="mxfp4")
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0, -len(found) - 1 : -1]
        assert (found - expected).abs().max() < tolerance * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("block", [None, [128, 128]])
@pytest.mark.parametrize("name", ["mlp.experts.gate_up_proj", "moe.gate_proj.weight"])
def test_fp8_matrices_of_all_experts_in_one_tensor(name: str, block: list[int] | None, tmp_path: Path) -> None:
    """As transformers 5 writes them, and Step 3.7; blocks do not reach from one expert into the next."""
    form, rng, num_out, num_in = FORMATS["fp8 blocks"], np.random.default_rng(0), 160, 288
    stored, _ = tensors_of(form)
    per, scale = ("block", "s") if block else ("tensor", "s")
    experts = [fp8(rng, num_out, num_in, per=per, name=scale) for _ in range(3)]
    whole = f"model.layers.0.{name}"
    more = {
        whole: np.stack([tensors["weight"] for tensors, _ in experts]),
        f"{whole}_scale_inv": np.stack([tensors[scale] for tensors, _ in experts]),
    }
    settings = {"quant_method": "fp8", "weight_block_size": block}
    kept = {key: x for key, x in stored.items() if block or "_scale_inv" not in key}
    if block is None:  # the others' scales are of matrices
        kept |= {key: np.ones((), np.float32) for key in stored if "_scale_inv" in key}
    weights = _open(write(tmp_path / "m", kept | more, settings))
    for i, (_, values) in enumerate(experts):
        found = weights.take_matrix(whole, (3, num_out, num_in), (i * num_out, (i + 1) * num_out))
        np.testing.assert_allclose(dequantize(found), values, rtol=1e-6)
