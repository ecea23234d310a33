"""Pictures with what else a server may be asked for: quantized decoders, adapters, several workers, guesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.errors import LoadError, RequestError
from octavo.lora.request import LoRARequest
from tests.multimodal.conftest import picture
from tests.multimodal.test_llava import GREEDY, PROMPTS, asked, assert_as_transformers, engine, generate
from tests.quantization.checkpoints import FORMATS, _torch

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rewritten(llava: Path, folder: Path, tensors: dict[str, Any], **config: Any) -> Path:
    """The checkpoint with other tensors."""
    from safetensors.torch import save_file as save_tensors

    folder.mkdir()
    for file in llava.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(json.loads((llava / "config.json").read_text()) | config))
    save_tensors({name: _torch(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("awq", {}),
        pytest.param("w4a16", {"ignore": ["re:.*vision_tower.*", "lm_head"]}, marks=pytest.mark.long),
        pytest.param("fp8", {"modules_to_not_convert": ["vision_tower", "lm_head"]}, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_quantized_decoders_see(tmp_path: Path, llava: Path, name: str, more: dict[str, Any]) -> None:
    """In float32 they are the values that the codes stand for."""
    form, generator = FORMATS[name], np.random.default_rng(0)
    stored, plain = {}, {}
    for tensor, values in load_file(llava / "model.safetensors").items():
        module = tensor.rpartition(".")[0]
        if "language_model" in tensor and module.endswith(MATRICES):
            codes, plain[tensor] = form.write(generator, *values.shape)
            stored |= {f"{module}.{of}": array for of, array in codes.items()}
        else:
            stored[tensor] = plain[tensor] = values
    quantized = rewritten(llava, tmp_path / "quantized", stored, quantization_config=form.settings | more)
    floats = rewritten(llava, tmp_path / "floats", plain)
    llm = engine(quantized)
    prompt = "two of different sizes"
    [output] = generate(llm, asked(prompt))
    assert_as_transformers(floats, output, *PROMPTS[prompt])
    llm.close()
    if name == "awq":
        tower = next(tensor for tensor in stored if "vision_tower" in tensor and tensor.endswith("q_proj.weight"))
        stored[f"{tower}_scale"] = np.ones(1, np.float32)
        wrong = rewritten(llava, tmp_path / "wrong", stored, quantization_config=form.settings)
        with pytest.raises(LoadError, match="the tower is quantized too"):
            engine(wrong)


def test_adapters_change_what_is_said_of_a_picture(tmp_path: Path, llava: Path) -> None:
    """By the decoder's modules; those of the tower are no products that adapters may change."""
    paths = [write_adapter(tmp_path / f"a{seed}", seed, "language_model.layers.1.self_attn.q_proj") for seed in (0, 1)]
    adapters = [None, *(LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(paths))]
    llm = engine(llava, enable_lora=True, max_loras=2)
    prompt = asked("two of different sizes")
    alone = [llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=adapter)[0] for adapter in adapters]
    assert len({str(one.outputs[0].logprobs) for one in alone}) == 3
    again = llm.generate([prompt] * 3, GREEDY, use_tqdm=False, lora_request=adapters)
    assert [one.outputs[0].logprobs for one in again] == [one.outputs[0].logprobs for one in alone]
    tower = write_adapter(tmp_path / "tower", 2, "vision_tower.encoder.layers.0.self_attn.q_proj")
    with pytest.raises(RequestError, match="may change only products"):
        llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=LoRARequest("tower", 3, str(tower)))
    llm.close()
    merged = load_file(llava / "model.safetensors")
    factors = load_file(paths[0] / "adapter_model.safetensors")
    a, b = (next(x for name, x in factors.items() if f"lora_{part}" in name) for part in "AB")
    [name] = [name for name in merged if "language" in name and name.endswith("layers.1.self_attn.q_proj.weight")]
    merged[name] += 2 * b @ a  # alpha / r
    assert_as_transformers(rewritten(llava, tmp_path / "merged", merged), alone[1], *PROMPTS["two of different sizes"])


def write_adapter(folder: Path, seed: int, module: str) -> Path:
    generator, size = np.random.default_rng(seed), 64 if "language_model" in module else 32
    folder.mkdir()
    name = f"base_model.model.model.{module}"
    save_file(
        {
            f"{name}.lora_A.weight": generator.standard_normal((4, size), np.float32),
            f"{name}.lora_B.weight": generator.standard_normal((size, 4), np.float32) * np.float32(0.3),
        },
        folder / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    "sizes", [{"pipeline_parallel_size": 2}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.long)]
)
def test_several_workers_see(llava: Path, sizes: dict[str, int]) -> None:
    """The first has the tower, and sends its rows; bits are the same in company."""
    llm = engine(llava, num_gpu_blocks_override=20, **sizes)
    names = ["one", "two of different sizes", "the same twice", "none"]
    alone = []
    for name in names:
        llm.reset_prefix_cache()
        alone += generate(llm, asked(name))
        assert_as_transformers(llava, alone[-1], *PROMPTS[name])
    llm.reset_prefix_cache()
    for one, other in zip(alone, generate(llm, *(asked(name) for name in names)), strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    other = generate(llm, {"prompt": PROMPTS["one"][0], "multi_modal_data": {"image": picture(9)}})[0]
    assert other.outputs[0].logprobs != alone[0].outputs[0].logprobs
    llm.close()


@pytest.mark.parametrize("sizes", [{}, pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.long)])
def test_a_language_model_guesses_beside_pictures(llava: Path, draft_model: Path, sizes: dict[str, int]) -> None:
    """It sees a placeholder's tokens in the place of a picture, which is none of its vocabulary."""
    prompts = [asked(name) for name in PROMPTS]
    llm = engine(llava)
    expected = [output.outputs[0].logprobs for output in generate(llm, *prompts)]
    llm.close()
    llm = engine(llava, speculative_config={"model": str(draft_model), "num_speculative_tokens": 3}, **sizes)
    speculation = llm.core.scheduler._speculation
    assert speculation is not None
    speculation.cost = None  # however few of the guesses are right
    for _ in range(2):  # the second time with cached prefixes
        assert [output.outputs[0].logprobs for output in generate(llm, *prompts)] == expected
    llm.close()
