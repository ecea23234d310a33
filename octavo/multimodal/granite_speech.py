"""Granite Speech's processor of sounds. The one in `transformers` computes mel spectrograms with torchaudio, which has
no wheel for every torch. This one computes the same with torch, in the same order of operations.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.multimodal.sound_decoder import RATE

if TYPE_CHECKING:
    from torch import Tensor

_DEFAULTS = {
    "sampling_rate": RATE, "n_fft": 512, "win_length": 400, "hop_length": 160, "n_mels": 80,
    "projector_window_size": 15, "projector_downsample_rate": 5,
}  # fmt: skip
_RANGE = 8.0  # powers of ten below the loudest that are told apart


class GraniteSpeechProcessor:
    """Processes one sound. It is called like the `transformers` processors that replace placeholders in a text."""

    audio_token = "<|audio|>"

    def __init__(self, folder: str, token_id: int) -> None:
        import torch
        from transformers import AutoTokenizer
        from transformers.audio_utils import mel_filter_bank

        self.feature_extractor = _Settings(_settings(folder))
        if self.feature_extractor["sampling_rate"] != RATE:
            raise ValueError(f"its features are of {self.feature_extractor['sampling_rate']} Hz, not of {RATE}.")
        self._token_id = token_id
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.audio_token = str(getattr(tokenizer, "audio_token", self.audio_token))
        self._window = torch.hann_window(self.feature_extractor["win_length"])
        num_bins, num_mels = self.feature_extractor["n_fft"] // 2 + 1, self.feature_extractor["n_mels"]
        self._filters = torch.from_numpy(mel_filter_bank(num_bins, num_mels, 0.0, RATE / 2, RATE)).float()

    def __call__(self, *, audio: list[Any], **_: Any) -> dict[str, Any]:
        """Return the features of a sound, two mel frames side by side for each encoder step, [1, steps, 2 * mels], and
        as many placeholder tokens as the projector makes rows."""
        import torch

        [samples] = audio
        features = self._features(torch.as_tensor(samples))
        if not len(features):
            num_tokens = 0
        else:
            size, rate = (self.feature_extractor[f"projector_{name}"] for name in ("window_size", "downsample_rate"))
            num_tokens = math.ceil(len(features) / size) * (size // rate)
        return {
            "input_features": features[None].numpy(),
            "input_ids": np.full(num_tokens, self._token_id),
            "text_replacement_offsets": [[{"replacement": self.audio_token * num_tokens}]],
        }

    def _features(self, samples: Tensor) -> Tensor:
        """Return the mel features of samples, [steps, 2 * mels]."""
        import torch

        settings = self.feature_extractor
        if len(samples) <= settings["n_fft"] // 2:  # the ends cannot be mirrored
            return torch.zeros(0, 2 * settings["n_mels"])
        spectrum = torch.stft(
            samples.float(), settings["n_fft"], settings["hop_length"], settings["win_length"], self._window,
            center=True, pad_mode="reflect", return_complex=True,
        )  # fmt: skip
        mel = (spectrum.abs().pow(2.0).T @ self._filters).clip(min=1e-10).log10()
        mel = torch.maximum(mel, mel.max() - _RANGE) / 4 + 1
        return mel[: len(mel) // 2 * 2].reshape(len(mel) // 2, -1)


class _Settings(dict[str, int]):
    """Settings of the feature extractor, with the `to_dict` method that `transformers` has."""

    def to_dict(self) -> dict[str, int]:
        return dict(self)


def _settings(folder: str) -> dict[str, int]:
    """Return the feature extractor's settings from the checkpoint's files."""
    from transformers import SequenceFeatureExtractor

    found, _ = SequenceFeatureExtractor.get_feature_extractor_dict(folder)
    if (size := found.get("feature_size")) is not None:  # the name of `n_mels` in saved files
        found["n_mels"] = size
    return {name: int(found.get(name, default)) for name, default in _DEFAULTS.items()}
