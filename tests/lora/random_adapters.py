"""Adapters of random numbers for the default model, as PEFT writes them, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SIZES = {  # outputs and inputs
    "self_attn.q_proj": (576, 576), "self_attn.k_proj": (192, 576), "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576), "mlp.gate_proj": (1536, 576), "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}  # fmt: skip
TINY_SIZES = {  # of the linear layers of the tests' small Llama
    f"model.layers.{layer}.{name}": size
    for layer in range(2)
    for name, size in {
        "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96),
    }.items()
}  # fmt: skip


def write_random_adapter(
    folder: Path,
    seed: int,
    rank: int = 4,
    layers: Sequence[int] = (3, 17),
    modules: Sequence[str] = tuple(SIZES),
    strength: float = 0.3,
) -> Path:
    """Strong enough to change what is said at once."""
    sizes = {f"model.layers.{layer}.{module}": SIZES[module] for layer in layers for module in modules}
    return write_adapter_of(folder, seed, rank, sizes, strength)


def write_adapter_of(
    folder: Path,
    seed: int,
    rank: int,
    sizes: Mapping[str, tuple[int, int]],
    strength: float = 0.3,
    magnitudes: bool = False,
) -> Path:
    """Of modules with these outputs and inputs; with `magnitudes`, DoRA's, they have biases too."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for module, (num_out, num_in) in sizes.items():
        name = f"base_model.model.{module}"
        a = generator.standard_normal((rank, num_in), np.float32) / num_in**0.5
        tensors[f"{name}.lora_A.weight"] = a
        tensors[f"{name}.lora_B.weight"] = generator.standard_normal((num_out, rank), np.float32) * np.float32(strength)
        if magnitudes:
            tensors[f"{name}.lora_magnitude_vector"] = generator.uniform(0.1, 0.3, num_out).astype(np.float32)
            tensors[f"{name}.lora_B.bias"] = generator.standard_normal(num_out, np.float32) * np.float32(strength)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({module.rsplit(".", 1)[-1] for module in sizes})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    config |= {"use_dora": magnitudes, "lora_bias": magnitudes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
