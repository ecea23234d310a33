"""Adapters that the PEFT library writes give its logits in float32, on small random models: six architectures, and the
variants of LoRA that there are."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from octavo import LLM, SamplingParams
from octavo.lora.request import LoRARequest
from tests.models.small_experts import ALL_MODELS
from tests.models.small_models import VOCAB

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
NUM_TOKENS = 4
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 96, "max_num_batched_tokens": 48, "block_size": 8,
    "num_gpu_blocks_override": 96, "enable_prefix_caching": True, "check_invariants": True,
}  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True)
class Case:
    model: str
    adapters: dict[str, dict[str, Any]] = field(default_factory=dict)


ALL = {"all": {"target_modules": "all-linear", "r": 5, "lora_alpha": 7}}
CASES = [
    Case("llama ratio 3, head 64, tied", ALL | {
        "ranks": {
            "r": 4, "target_modules": [*ATTENTION, "gate_proj", "down_proj"],
            "rank_pattern": {"q_proj": 16, "layers.1.self_attn.k_proj": 1}, "alpha_pattern": {"down_proj": 32},
        },
        "stabilized": {"r": 8, "use_rslora": True, "target_modules": r".*layers\.1\..*(v_proj|up_proj)"},
        "magnitudes": {"r": 3, "use_dora": True, "target_modules": ["q_proj", "gate_proj", "down_proj"]},
        "with a bias": {"r": 2, "lora_bias": True, "target_modules": ["o_proj", "up_proj"]},
        "head": {"r": 4, "target_modules": ["lm_head", "v_proj"]},
        "embedding": {"r": 5, "target_modules": ["embed_tokens", "v_proj"]},
        "tied embedding": {"r": 3, "target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        "new embedding": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        "new output": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        "new matrix": {
            "r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True,
        },
    }),
    Case("qwen2", ALL | {
        "biases": {"r": 4, "bias": "all", "target_modules": ATTENTION},
        "both ends": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    }),
    Case("phi", {"new output with a bias": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}}),
    Case("phi3", ALL),
    Case("gpt2", ALL | {"magnitudes": {"r": 3, "use_dora": True, "target_modules": ["c_attn"]}}),
    Case("gemma 2", ALL | {  # whose embedding scales what is looked up
        "embedding": {"r": 4, "target_modules": ["embed_tokens"]},
        "new embedding": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    }),
    Case("mixtral", ALL | {  # experts of which gate and up have twice the rank, and routers
        "attention": {"r": 6, "target_modules": ATTENTION},
        "experts": {"r": 3, "target_parameters": EXPERTS},
        "down": {"r": 16, "target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"], "use_rslora": True},
        "up": {"r": 2, "target_parameters": EXPERTS[:1], "alpha_pattern": {"gate_up_proj": 32}},
    }),
    Case("qwen2 moe", ALL),  # a gated expert beside the others, and a layer without any
    Case("qwen3 moe", ALL),
    Case("gpt-oss", {"experts": {"r": 3, "target_parameters": EXPERTS}}),
    Case("llama 4", {"experts": {"r": 3, "target_parameters": ["gate_up_proj", "down_proj"]}}),
    Case("granite moe", ALL),
    Case("dots 1", ALL),
]  # fmt: skip


def write_adapter(model: Any, folder: Path, seed: int, settings: dict[str, Any]) -> Any:
    """An adapter of `model` with random numbers in all that it trains, and the model with it."""
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
            elif "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
            elif "lora_" in name or (parameter.requires_grad and name.endswith("bias")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    adapted.save_pretrained(str(folder))
    return adapted.eval()


def generate(llm: LLM, prompt: list[int], adapters: list[LoRARequest | None]) -> list[tuple[list[int], torch.Tensor]]:
    """The tokens of each adapter in one batch, and their logits [NUM_TOKENS, V]."""
    seen: list[list[torch.Tensor]] = [[] for _ in adapters]

    def keep(rows: list[torch.Tensor]) -> Any:
        def process(given: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            rows.append(logits.clone())
            return logits

        return process

    params = [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logits_processors=[keep(rows)])
        for rows in seen
    ]
    prompts = [{"prompt_token_ids": prompt}] * len(adapters)
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    return [(list(output.outputs[0].token_ids), torch.stack(rows)) for output, rows in zip(outputs, seen, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_logits_are_those_of_peft(case: Case, tiny_tokenizer: Path, tmp_path: Path) -> None:
    """All adapters of a model and the base in one batch, prompts in chunks and decodes; and the bits of each alone."""
    small = ALL_MODELS[case.model]
    reference = small.reference(seed=1)
    small.save(reference, tmp_path)
    llm = LLM(
        str(tmp_path), tokenizer=str(tiny_tokenizer), enable_lora=True, max_loras=16, max_lora_rank=16, **SETTINGS
    )
    adapters: dict[str, LoRARequest | None] = {"base": None}
    expected_models = {}
    for number, (name, settings) in enumerate(case.adapters.items(), 1):
        model = small.reference(seed=1)
        if settings.get("bias") == "all":  # norms of this model have none
            assert not any(n.endswith("norm.bias") for n, _ in model.named_parameters())
        expected_models[name] = write_adapter(model, tmp_path / name, number, settings)
        adapters[name] = LoRARequest(name, number, str(tmp_path / name))
    expected_models["base"] = reference
    prompt = torch.randint(3, VOCAB, (21,), generator=torch.Generator().manual_seed(0)).tolist()
    together = generate(llm, prompt, list(adapters.values()))
    first = []
    for (name, adapter), (tokens, logits) in zip(adapters.items(), together, strict=True):
        with torch.no_grad():
            expected = expected_models[name](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert (logits - expected).abs().max() < 1e-4, name
        first.append(expected[0])
        llm.reset_prefix_cache()
        [(_, alone)] = generate(llm, prompt, [adapter])
        assert torch.equal(alone, logits), f"{name}: the bits of a batch"
    plain = LLM(str(tmp_path), tokenizer=str(tiny_tokenizer), enable_lora=False, **SETTINGS)
    [(_, alone)] = generate(plain, prompt, [None])
    assert torch.equal(alone, together[0][1]), "a row of the base has the bits that it has without adapters"
    assert all(not torch.allclose(first[0], other, atol=1e-2) for other in first[1:]), "adapters do something"
