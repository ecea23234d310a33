"""What Phi-4-multimodal's processor makes of a sound. That of `transformers` has a half for pictures, which asks for
torchvision; here is its half for sounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.multimodal.sound_decoder import RATE


class Phi4Processor:
    """Called as the processors of `transformers` are that replace placeholders in a text, here with one sound."""

    def __init__(self, folder: str, token_id: int) -> None:
        from transformers import AutoTokenizer, Phi4MultimodalFeatureExtractor

        self.feature_extractor = Phi4MultimodalFeatureExtractor.from_pretrained(folder)
        self._token_id = token_id
        self.audio_token = str(AutoTokenizer.from_pretrained(folder, trust_remote_code=False).audio_token)

    def __call__(self, *, audio: list[Any], **_: Any) -> dict[str, Any]:
        """Of a sound its frames, [1, frames, mels], and as many tokens as the encoder leaves of them."""
        num_tokens, frames = 0, np.zeros((1, 0, self.feature_extractor.feature_size), np.float32)
        if len(audio[0]) >= self.feature_extractor.win_length:
            found = self.feature_extractor(audio, sampling_rate=RATE)
            num_tokens, frames = int(found["audio_embed_sizes"][0]), found["audio_input_features"].numpy()
        return {
            "audio_input_features": frames,
            "input_ids": np.full(num_tokens, self._token_id),
            "text_replacement_offsets": [[{"replacement": self.audio_token * num_tokens}]],
        }
