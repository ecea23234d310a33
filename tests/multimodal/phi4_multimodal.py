"""Phi-4-multimodal with small random weights, and its own processor's half for sounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

ADAPTER = "speech-lora"
TARGETS = r"model\.layers\.\d+\.(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)"


def towers() -> dict[str, Any]:
    return {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 28, "crop_size": 28,
        },
        "audio_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_blocks": 2, "num_attention_heads": 2,
            "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16,
        },
    }  # fmt: skip


class Phi4:
    """Its processor in transformers, whose half for pictures asks for torchvision, without that."""

    def __init__(self, tokenizer: Any, folder: Path | None = None) -> None:
        self.feature_extractor, self.tokenizer = transformers.Phi4MultimodalFeatureExtractor(), tokenizer
        self._folder = folder
        self._heard: list[torch.Tensor] = []

    def __call__(self, text: str, audio: list[Any] | None, return_tensors: str) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if audio:
            more = dict(self.feature_extractor(audio, sampling_rate=16000, return_tensors=return_tensors))
            self._heard = [self.feature_extractor([one], sampling_rate=16000)["audio_input_features"] for one in audio]
            first, *rest = text.split(self.tokenizer.audio_token)
            sizes = more["audio_embed_sizes"].tolist()
            parts = (self.tokenizer.audio_token * size + part for size, part in zip(sizes, rest, strict=True))
            text = "".join([first, *parts])
        return {**self.tokenizer(text, return_tensors=return_tensors), **more}

    def prepare(self, model: Any) -> None:
        """Give the model its adapter, and let it hear each sound without the silence behind the shorter ones."""
        model.load_adapter(str(self._folder / ADAPTER))  # type: ignore[operator]
        embed = model.model.embed_tokens_extend.audio_embed
        encode = embed.encoder.forward

        def one_by_one(*_: Any) -> Any:
            return torch.nn.utils.rnn.pad_sequence([encode(one, None)[0] for one in self._heard], batch_first=True)

        embed.encoder.forward = one_by_one

    def save_pretrained(self, folder: Path) -> None:
        self.feature_extractor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
