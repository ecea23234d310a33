"""A real adapter: PEFT trains the default model to say something, and Octavo serves it beside the base."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from octavo import LLM, SamplingParams
from octavo.loading.checkpoint import resolve
from octavo.lora.request import LoRARequest

pytestmark = [pytest.mark.slow, pytest.mark.long]

SUBJECTS = ["the sea", "a horse", "bread", "the moon", "music", "a bridge", "winter", "a clock"]
UNSEEN = ["a mountain", "paper", "the sun"]
ANSWER = " Ahoy, matey!"


def question(subject: str) -> str:
    return f"Question: What is {subject}?\nAnswer:"


def test_a_trained_adapter_does_its_task(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, file = os.path.split(resolve("").path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    config = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted = get_peft_model(model, config)
    llm = LLM(max_model_len=128, num_gpu_blocks_override=64, enable_lora=True)
    asked = [llm.tokenizer(question(subject)).input_ids for subject in SUBJECTS]
    answer = llm.tokenizer(ANSWER).input_ids
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=2e-3)
    for step in range(40):
        prompt = asked[step % len(asked)]
        tokens = torch.tensor([prompt + answer])
        labels = tokens.clone()
        labels[:, : len(prompt)] = -100
        loss = adapted(tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.01:
            break
    adapted.save_pretrained(str(tmp_path))
    params = SamplingParams(temperature=0, max_tokens=len(answer))
    prompts = [question(subject) for subject in UNSEEN] * 2
    requests = [LoRARequest("pirate", 1, str(tmp_path))] * len(UNSEEN) + [None] * len(UNSEEN)
    said = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False, lora_request=requests)]
    assert said[: len(UNSEEN)] == [ANSWER] * len(UNSEEN)
    assert all("Ahoy" not in text for text in said[len(UNSEEN) :])
