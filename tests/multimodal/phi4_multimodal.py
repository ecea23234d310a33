"""Phi-4-multimodal with small random weights, and its own processor: without its half for pictures where torchvision is
not installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerFast

from octavo.multimodal.phi4_multimodal import PictureTiles
from tests.multimodal.granite_speech import with_adapter

ADAPTERS = {"image": "vision-lora", "audio": "speech-lora"}
TARGETS = r"model\.layers\.\d+\.(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)"
TOKENS = {"image_token": "<image>", "audio_token": "<sound>"}


def towers(tokenizer: Any, side: int) -> dict[str, Any]:
    """The settings of both, the first of which sees tiles of so many pixels in height and width."""
    return {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": side, "crop_size": side, "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        },
        "audio_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_blocks": 2, "num_attention_heads": 2,
            "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16,
            "audio_token_id": tokenizer.convert_tokens_to_ids("<sound>"),
        },
    }  # fmt: skip


def tokens_of_both(tokenizer: Any) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(tokenizer.name_or_path, extra_special_tokens=TOKENS)


def with_adapters(folder: Path) -> None:
    for seed, name in enumerate(ADAPTERS.values()):
        with_adapter(folder, name, TARGETS, seed)


class Phi4:
    """With `side` of tiles its own half for pictures, in the place of torchvision's: `test_phi4_multimodal` compares
    the two."""

    def __init__(self, tokenizer: Any, side: int | None = None) -> None:
        self.feature_extractor, self.tokenizer = transformers.Phi4MultimodalFeatureExtractor(), tokenizer
        self.side = side or 448
        self._size = {"height": self.side, "width": self.side}
        self._tiles = PictureTiles({"size": self._size}) if side is not None else None
        self._heard: list[torch.Tensor] = []
        self._adapter: Path | None = None
        self._sounds: list[Any] = []

    @classmethod
    def of(cls, folder: Path, kind: str, side: int | None = None, sounds: list[Any] | None = None) -> Phi4:
        """That of a checkpoint, for prompts in the adapter of this kind, with these sounds beside what it is given."""
        found = cls(PreTrainedTokenizerFast.from_pretrained(folder), side)
        found._adapter, found._sounds = folder / ADAPTERS[kind], sounds or []
        return found

    def __call__(
        self, text: str, return_tensors: str, images: list[Any] | None = None, audio: list[Any] | None = None
    ) -> dict[str, Any]:
        more: dict[str, Any] = {}
        audio = audio or self._sounds
        if images and self._tiles is None:
            more = dict(transformers.Phi4MultimodalImageProcessor()(images, return_tensors=return_tensors))
        elif images:
            more = _together([self._tiles(one) for one in images])  # type: ignore[misc]
        if images:
            text = _expanded(text, self.tokenizer.image_token, more.pop("num_img_tokens"))
        if audio:
            more |= dict(self.feature_extractor(audio, sampling_rate=16000, return_tensors=return_tensors))
            self._heard = [self.feature_extractor([one], sampling_rate=16000)["audio_input_features"] for one in audio]
            text = _expanded(text, self.tokenizer.audio_token, more["audio_embed_sizes"].tolist())
        return {**self.tokenizer(text, return_tensors=return_tensors), **more}

    def prepare(self, model: Any) -> None:
        """Give the model its adapter, let patches of tiles that are full see those behind them too, as the eager
        attention of transformers has it, and let it hear each sound without the silence behind the shorter ones."""
        model.load_adapter(str(self._adapter))
        model.model.embed_tokens_extend.image_embed.img_processor.set_attn_implementation("eager")
        embed = model.model.embed_tokens_extend.audio_embed
        encode = embed.encoder.forward

        def one_by_one(*_: Any) -> Any:
            return torch.nn.utils.rnn.pad_sequence([encode(one, None)[0] for one in self._heard], batch_first=True)

        embed.encoder.forward = one_by_one

    def save_pretrained(self, folder: Path) -> None:
        """As the class of transformers saves itself."""
        halves = {
            "processor_class": "Phi4MultimodalProcessor",
            "image_processor": {"image_processor_type": "Phi4MultimodalImageProcessor", "size": self._size},
            "audio_processor": self.feature_extractor.to_dict(),
        }
        (folder / "processor_config.json").write_text(json.dumps(halves, default=lambda array: array.tolist()))
        self.tokenizer.save_pretrained(folder)


def _expanded(text: str, token: str, sizes: Any) -> str:
    first, *rest = text.split(token)
    return "".join([first, *(token * int(size) + part for size, part in zip(sizes, rest, strict=True))])


def _together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Pictures' arrays [1, ...] as those of one batch, with black tiles behind the fewer."""
    tensors = {name: [torch.tensor(one[name]) for one in found] for name in found[0]}
    most = max(one.shape[1] for one in tensors["image_pixel_values"])
    for name, value in (("image_pixel_values", 0), ("image_attention_mask", 1)):
        for i, one in enumerate(tensors[name]):
            padding = one.new_full((1, most - one.shape[1], *one.shape[2:]), value)
            tensors[name][i] = torch.cat([one, padding], 1)
    return {name: torch.cat(of_all) for name, of_all in tensors.items()}
