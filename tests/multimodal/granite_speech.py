"""Granite Speech with small random weights, and its own processor over a spectrogram of this file."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.granite_speech import feature_extraction_granite_speech


def encoder(is_plus: bool = False) -> dict[str, Any]:
    """The configuration of its tower."""
    return {
        "encoder_config": {
            "model_type": f"granite_speech{'_plus' if is_plus else ''}_encoder", "num_layers": 2, "hidden_dim": 32,
            "num_heads": 2, "context_size": 20, "max_pos_emb": 32, **({"cat_hidden_layers": [1]} if is_plus else {}),
        },
        "projector_config": {
            "model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 48, "encoder_hidden_size": 64 if is_plus else 32,
        },
    }  # fmt: skip


class MelSpectrogram:
    """torchaudio's with the settings that it has by default, of its documentation, in numpy's float64."""

    def __init__(self, sample_rate: int, n_fft: int, win_length: int, hop_length: int, n_mels: int) -> None:
        self._n_fft, self._hop = n_fft, hop_length
        window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(win_length) / win_length)  # Hann's, periodic
        self._window = np.pad(window, (n_fft - win_length) // 2)
        top = 2595 * np.log10(1 + sample_rate / 2 / 700)
        corners = 700 * (10 ** (np.linspace(0, top, n_mels + 2) / 2595) - 1)
        bins = np.linspace(0, sample_rate / 2, n_fft // 2 + 1)[:, None]
        rising = (bins - corners[:-2]) / np.diff(corners)[:-1]
        falling = (corners[2:] - bins) / np.diff(corners)[1:]
        self._filters = np.maximum(0, np.minimum(rising, falling))

    def to(self, _: Any) -> MelSpectrogram:
        return self

    def __call__(self, waveform: torch.Tensor) -> torch.Tensor:
        padded = np.pad(waveform.double().numpy(), ((0, 0), (self._n_fft // 2,) * 2), "reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, self._n_fft, 1)[:, :: self._hop]
        powers = np.abs(np.fft.rfft(frames * self._window)) ** 2
        return torch.tensor(powers @ self._filters, dtype=torch.float32).transpose(1, 2)


def granite_speech(tokenizer: Any) -> Any:
    """Its processor in transformers, over this file's spectrogram: torchaudio has no wheel for each torch."""
    module = feature_extraction_granite_speech
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "requires_backends", lambda *_: None)
        transforms = SimpleNamespace(MelSpectrogram=MelSpectrogram)
        patch.setattr(module, "torchaudio", SimpleNamespace(transforms=transforms), raising=False)
        features = transformers.GraniteSpeechFeatureExtractor()
    return transformers.GraniteSpeechProcessor(features, tokenizer)


class SavedGraniteSpeech:
    """Its encoder takes the silence behind the shorter of several sounds for sound: it is to hear each alone."""

    def __init__(self, folder: Path) -> None:
        self._processor = granite_speech(transformers.PreTrainedTokenizerFast.from_pretrained(folder))
        self._heard: list[torch.Tensor] = []

    def __call__(self, text: str, audio: list[Any] | None, return_tensors: str) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(feature_extraction_granite_speech, "requires_backends", lambda *_: None)
            if audio is None:
                return dict(self._processor.tokenizer(text, return_tensors=return_tensors))
            self._heard = [self._processor.audio_processor([one])["input_features"] for one in audio]
            return dict(self._processor(text=text, audio=audio, return_tensors=return_tensors))

    def prepare(self, model: Any) -> None:
        listen = model.model.get_audio_features

        def one_by_one(*_: Any, **__: Any) -> Any:
            rows = [listen(one, return_dict=True).pooler_output[0] for one in self._heard]
            return BaseModelOutputWithPooling(pooler_output=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))

        model.model.get_audio_features = one_by_one


def with_adapter(folder: Path) -> None:
    """Save an adapter of the decoder beside the weights, as Granite Speech has one."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder)
    model.add_adapter(peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(1)
    with torch.no_grad():
        for of, parameter in model.named_parameters():
            if "lora_" in of:
                parameter.normal_(std=0.3)
    with tempfile.TemporaryDirectory() as whole:  # the base too, under PEFT's names
        model.save_pretrained(whole)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(Path(whole) / file, folder)
