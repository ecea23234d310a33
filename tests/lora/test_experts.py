"""Adapters of experts as files have them that the parity tests do not write: expert by expert, as PEFT did before
transformers stacked experts, and such that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import PeftModel
from safetensors.numpy import save_file

from octavo import LLM
from octavo.errors import RequestError
from octavo.lora.request import LoRARequest
from tests.lora import test_peft_parity as parity
from tests.lora.test_peft_parity import SETTINGS, Case, generate
from tests.models.small_experts import ALL_MODELS, EXPERT_MODELS

EXPERTS, RANK, LAYERS, HIDDEN = 6, 3, 2, 64
PROMPT = list(range(5, 26))
# Where its experts are, the names of gate, up and down, and their size.
WAYS = {
    "mixtral": ("block_sparse_moe.experts.{}", ("w1", "w3", "w2"), 56),
    "qwen3 moe": ("mlp.experts.{}", ("gate_proj", "up_proj", "down_proj"), 24),
}


def write(folder: Path, tensors: dict[str, NDArray[np.float32]], **config: object) -> LoRARequest:
    folder.mkdir()
    save_file(
        {f"base_model.model.model.layers.{k}": v for k, v in tensors.items()}, folder / "adapter_model.safetensors"
    )
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "", "r": RANK}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"lora_alpha": 6} | config))
    return LoRARequest(folder.name, 1, str(folder))


def random(*shape: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(0.15)


def one_by_one(model: str, layers: int = LAYERS) -> dict[str, NDArray[np.float32]]:
    where, names, size = WAYS[model]
    tensors = {}
    for layer in range(layers):
        for expert in range(EXPERTS):
            for i, name in enumerate(names):
                num_out, num_in = (HIDDEN, size) if i == 2 else (size, HIDDEN)
                key, seed = f"{layer}.{where.format(expert)}.{name}", 100 * layer + 10 * expert + i
                tensors[f"{key}.lora_A.weight"] = random(RANK, num_in, seed=seed)
                tensors[f"{key}.lora_B.weight"] = random(num_out, RANK, seed=seed + 1000)
    return tensors


def start(model: str, tokenizer: Path, folder: Path, **settings: object) -> LLM:
    small = ALL_MODELS[model]
    small.save(small.reference(seed=1), folder)
    given = SETTINGS | {"max_loras": 2} | settings
    return LLM(str(folder), tokenizer=str(tokenizer), enable_lora=True, **given)


@pytest.mark.parametrize("model", WAYS)
def test_adapters_of_one_expert_after_the_other_are_those_that_peft_makes_of_them(
    model: str, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    llm = start(model, tiny_tokenizer, tmp_path / "model")
    asked = write(tmp_path / "adapter", one_by_one(model), target_modules=list(WAYS[model][1]))
    reference = PeftModel.from_pretrained(ALL_MODELS[model].reference(seed=1), asked.path).eval()
    [(tokens, logits), (_, base)] = generate(llm, PROMPT, [asked, None])
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    assert (logits - expected).abs().max() < 1e-4
    assert not torch.allclose(logits[0], base[0], atol=1e-2)


def test_gguf_adapters_of_experts_are_those_of_one_after_the_other(llm: LLM, tmp_path: Path) -> None:
    tensors = one_by_one("mixtral")
    writer = gguf.GGUFWriter(tmp_path / "adapter.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 6.0)
    for layer in range(LAYERS):
        for name, ours in zip(WAYS["mixtral"][1], ("gate", "up", "down"), strict=True):
            for half in "AB":
                of_all = [
                    tensors[f"{layer}.block_sparse_moe.experts.{e}.{name}.lora_{half}.weight"] for e in range(EXPERTS)
                ]
                writer.add_tensor(f"blk.{layer}.ffn_{ours}_exps.weight.lora_{half.lower()}", np.stack(of_all))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    asked = [write(tmp_path / "peft", tensors), LoRARequest("gguf", 2, str(tmp_path / "adapter.gguf")), None]
    (_, of_peft), (_, of_gguf), (_, base) = generate(llm, PROMPT, asked)
    assert torch.equal(of_peft, of_gguf) and not torch.equal(of_peft, base)


@pytest.mark.parametrize(
    "workers", [{"tensor_parallel_size": 2, "enable_expert_parallel": True}, {"pipeline_parallel_size": 2}], ids=str
)
def test_workers_have_the_factors_of_their_own_experts(
    workers: dict[str, object], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """Of one expert after the other, and of all together."""
    stacked = {name.replace("0.", f"{layer}.", 1): size for layer in range(LAYERS) for name, size in STACKED.items()}
    asked = [
        write(tmp_path / "single", one_by_one("mixtral")),
        write(
            tmp_path / "stacked",
            {name: random(*size, seed=i) for i, (name, size) in enumerate(stacked.items())},
            **DOWN,
        ),
    ]
    alone, together = (
        generate(start("mixtral", tiny_tokenizer, tmp_path / f"model {i}", **flags), PROMPT, [*asked, None])
        for i, flags in enumerate(({}, workers))
    )
    for (tokens, logits), (same_tokens, others) in zip(alone, together, strict=True):
        assert tokens == same_tokens
        assert (logits - others).abs().max() < 1e-4
    assert not torch.allclose(alone[0][1][0], alone[1][1][0], atol=1e-2)


def test_experts_of_adapters_make_room_for_each_other(llm: LLM, tiny_tokenizer: Path, tmp_path: Path) -> None:
    stacked = {name: random(*size, seed=i) for i, (name, size) in enumerate(STACKED.items())}
    asked = [write(tmp_path / "single", one_by_one("mixtral")), write(tmp_path / "stacked", stacked, **DOWN), None]
    scarce = start("mixtral", tiny_tokenizer, tmp_path / "model", max_lora_rank=4, max_loras=1, max_cpu_loras=1)
    library = scarce.core.adapters  # type: ignore[union-attr]
    expected = generate(llm, PROMPT, asked)
    for _ in range(2):
        for (_, logits), (_, others) in zip(generate(scarce, PROMPT, asked), expected, strict=True):
            assert torch.equal(logits, others)
        assert library is not None and len(library) == 1, "there is no room for both"
    assert not any(torch.equal(expected[i][1], expected[i - 1][1]) for i in range(3))


@pytest.mark.long
@pytest.mark.parametrize("model", sorted(set(EXPERT_MODELS) - {"dbrx"}))  # whose experts PEFT cannot adapt
def test_logits_are_those_of_peft_for_every_architecture_with_experts(
    model: str, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    adapters = {"experts": {"r": RANK, "target_parameters": ["gate_up_proj", "down_proj", "up_proj"]}}
    if model not in ("phimoe", "llama 4"):  # with a router that PEFT cannot call
        adapters["all"] = {"r": 5, "target_modules": "all-linear"}
    parity.test_logits_are_those_of_peft(Case(model, adapters), tiny_tokenizer, tmp_path)


@pytest.fixture(scope="module")
def llm(tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return start("mixtral", tiny_tokenizer, tmp_path_factory.mktemp("model"), max_lora_rank=4)


STACKED = {"0.mlp.experts.lora_A.weight": (EXPERTS * RANK, 56), "0.mlp.experts.lora_B.weight": (64, EXPERTS * RANK)}
DOWN = {"target_parameters": ["mlp.experts.down_proj"]}
ALL = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize(
    ("sizes", "config", "message"),
    [
        ({"0.mlp.experts.lora_A.weight": (18, 55)}, DOWN, r"experts.lora_A.weight is \[18, 55\].*take \[6 r, 56\]"),
        ({"0.mlp.experts.lora_B.weight": (63, 18)}, DOWN, r"experts.lora_B.weight is \[63, 18\].*take \[64, 6 r\]"),
        (
            {"0.mlp.experts.lora_A.weight": (15, 56), "0.mlp.experts.lora_B.weight": (64, 15)},
            DOWN, "experts.lora_A.weight is of 5 experts, and the model has 6",
        ),
        (
            {"0.mlp.experts.lora_A.weight": (17, 56), "0.mlp.experts.lora_B.weight": (64, 17)},
            DOWN, "experts.lora_A.weight has 17 rows, and the configuration says rank 3",
        ),
        (
            {"0.mlp.experts.lora_A.weight": (30, 56), "0.mlp.experts.lora_B.weight": (64, 30)},
            DOWN | {"r": 5}, "has rank 5 for each expert, and --max-lora-rank is 4",
        ),
        ({}, ALL, "experts.lora_A.weight is one of 1 layers around .*mlp.experts, and target_parameters names 2"),
        ({}, {}, "has rank 18, and the configuration says 3"),
        ({"0.mlp.experts.lora_B.bias": (64,)}, DOWN, "lora_B.bias is of experts, which have"),
        ({"0.mlp.experts.lora_B.weight": None}, DOWN, "experts.lora_A.weight without its other half"),
        ({"0.block_sparse_moe.experts.6.w1.lora_A.weight": (3, 64),
          "0.block_sparse_moe.experts.6.w1.lora_B.weight": (56, 3)}, DOWN, r"experts\.6\.w1\. Adapters of this model"),
        ({}, {"target_parameters": "down_proj"}, "target_parameters must be a list of names"),
    ],
)  # fmt: skip
def test_what_does_not_fit_experts_is_refused_by_name(
    llm: LLM, tmp_path: Path, sizes: dict[str, tuple[int, ...] | None], config: dict[str, object], message: str
) -> None:
    shapes = {name: shape for name, shape in (STACKED | sizes).items() if shape is not None}
    asked = write(tmp_path / "broken", {name: random(*shape, seed=0) for name, shape in shapes.items()}, **config)
    with pytest.raises(RequestError, match=message):
        generate(llm, PROMPT, [asked])


def test_experts_that_are_not_open_are_refused(tiny_tokenizer: Path, tmp_path: Path) -> None:
    llm = start("mixtral", tiny_tokenizer, tmp_path / "model", lora_target_modules=["q_proj"])
    asked = write(tmp_path / "a", {name: random(*shape, seed=0) for name, shape in STACKED.items()}, **DOWN)
    with pytest.raises(RequestError, match="down_proj, and --lora-target-modules lets adapters change q_proj"):
        generate(llm, PROMPT, [asked])
