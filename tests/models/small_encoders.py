"""Small encoders of every architecture, as `transformers` makes them, with random weights; and decoders that pool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

VOCAB = 128
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 130,
}  # fmt: skip
_DECODER = {**_SIZES, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}


class SmallEncoder(NamedTuple):
    architecture: str
    model_type: str
    settings: dict[str, Any]
    reference_architecture: str = ""  # where transformers computes it in another class

    def reference(self, seed: int) -> PreTrainedModel:
        torch.manual_seed(seed)
        sizes = _DECODER if self.model_type in ("qwen3", "gemma3_text", "mistral", "qwen2") else _SIZES
        config = AutoConfig.for_model(self.model_type, **sizes | self.settings)
        model_class = getattr(transformers, self.reference_architecture or self.architecture)
        reference = model_class._from_config(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                # Larger than the usual initialisation, so that attention is far from uniform and biases count.
                if parameter.dim() > 1 or name.endswith("bias"):
                    parameter.normal_(std=0.25 if parameter.dim() == 1 else 0.12)
                else:
                    parameter.uniform_(0.5, 1.5)
        return reference

    def save(self, reference: PreTrainedModel, folder: Path) -> None:
        reference.save_pretrained(folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [self.architecture]}))


_WIDE = {"type_vocab_size": 1}
_BY_BASE = {
    "Bert": ("bert", {}), "Roberta": ("roberta", _WIDE), "XLMRoberta": ("xlm-roberta", _WIDE),
    "Camembert": ("camembert", _WIDE), "MPNet": ("mpnet", {}), "DistilBert": ("distilbert", {"hidden_dim": 56}),
    "Electra": ("electra", {"embedding_size": 32}), "ModernBert": ("modernbert", {
        "local_attention": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
        "sep_token_id": 2,
    }),
    "NomicBert": ("nomic_bert", {}), "Gte": ("gte", {}),
}  # fmt: skip
ENCODERS = {
    f"{base}{kind}": SmallEncoder(f"{base}{kind}", model_type, settings)
    for base, (model_type, settings) in _BY_BASE.items()
    for kind in ("Model", "ForSequenceClassification", "ForTokenClassification")
}
ENCODERS["EuroBertModel"] = SmallEncoder(
    "EuroBertModel", "eurobert", {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 4}
)
DECODERS = {
    "qwen 2 tokens": SmallEncoder("Qwen2ForTokenClassification", "qwen2", {"num_labels": 3}),
    "qwen 3": SmallEncoder("Qwen3Model", "qwen3", {}),
    "mistral": SmallEncoder("MistralModel", "mistral", {"sliding_window": 16}),
    "qwen 3 classifier": SmallEncoder("Qwen3ForSequenceClassification", "qwen3", {"num_labels": 3}),
}
