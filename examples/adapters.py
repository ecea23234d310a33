"""A LoRA adapter over the default model, for some requests of a batch.

The program writes a folder with a random adapter in PEFT's format. A trained adapter is a folder of the same form.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from octavo import LLM, SamplingParams
from octavo.lora.request import LoRARequest

HIDDEN_SIZE, RANK, LAYERS = 576, 4, (3, 17)


def make_adapter(folder: Path) -> None:
    """Write an adapter that adds a product of two narrow matrices to the query projections of two layers."""
    random = np.random.default_rng(0)
    tensors = {}
    for layer in LAYERS:
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = random.standard_normal((RANK, HIDDEN_SIZE), np.float32) / HIDDEN_SIZE**0.5
        tensors[f"{name}.lora_B.weight"] = random.standard_normal((HIDDEN_SIZE, RANK), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4 * RANK, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make_adapter(Path(folder))
        llm = LLM(max_model_len=512, enable_lora=True)
        params = SamplingParams(temperature=0, max_tokens=12)
        prompt = "Once upon a time"
        adapter = LoRARequest("random", 1, folder)
        for output, name in zip(
            llm.generate([prompt] * 2, params, lora_request=[None, adapter]), ("base", "adapter"), strict=True
        ):
            print(f"{name}: {output.outputs[0].text!r}")
