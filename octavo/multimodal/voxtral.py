"""Voxtral's processor of sounds. The one in `transformers` needs mistral-common, whose tokenizer handles its text. Here
the model's own tokenizer handles the text, as for all models.
"""

from typing import Any

import numpy as np

from octavo.multimodal.sound_decoder import RATE

_MARK = "[BEGIN_AUDIO]"  # before the rows of a sound
_FRAMES_PER_ROW = 8  # the tower's convolutions halve the frames, and the projector joins four of these


class VoxtralProcessor:
    """Processes one sound. It is called like the `transformers` processors that replace placeholders in a text."""

    audio_token = "[AUDIO]"

    def __init__(self, folder: str, token_id: int) -> None:
        from transformers import WhisperFeatureExtractor

        self.feature_extractor = WhisperFeatureExtractor.from_pretrained(folder)
        if self.feature_extractor.sampling_rate != RATE:
            raise ValueError(f"its feature extractor reads {self.feature_extractor.sampling_rate} Hz, not {RATE}.")
        self._token_id = token_id

    def __call__(self, *, audio: list[Any], **_: Any) -> dict[str, Any]:
        """Return the windows of a sound, each thirty seconds, padded with silence, [windows, bins, frames], and its
        tokens."""
        [samples], extractor = audio, self.feature_extractor
        found = extractor(
            samples,
            sampling_rate=RATE,
            truncation=False,
            padding=True,
            pad_to_multiple_of=extractor.n_samples,
            return_tensors="np",
        )
        features = found["input_features"][0]
        windows = features.reshape(len(features), -1, extractor.nb_max_frames).transpose(1, 0, 2)
        num_tokens = windows.shape[0] * windows.shape[2] // _FRAMES_PER_ROW
        return {
            "input_features": windows,
            "input_ids": np.full(num_tokens, self._token_id),
            "text_replacement_offsets": [[{"replacement": _MARK + self.audio_token * num_tokens}]],
        }
