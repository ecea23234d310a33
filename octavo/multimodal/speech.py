"""What a model hears: the output of its encoder, which transformers computes in float32 on the CPU, thirty seconds at a
time. The core's half of a model that hears; the other is `listening`.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from octavo.errors import LoadError
from octavo.multimodal.tower import Rows, quiet
from octavo.request import MediaInput


class SpeechEncoder:
    """The encoder of a Whisper checkpoint, without its decoder."""

    def __init__(self, folder: str) -> None:
        """Raises `LoadError`."""
        # As in `Tower`: torch's threads would take the cores from the native kernels'.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        import torch
        import transformers

        try:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            config.decoder_layers = 0
            with quiet(transformers.logging):  # it would report the decoder's weights as left over
                model, report = transformers.WhisperForConditionalGeneration.from_pretrained(
                    folder, config=config, dtype=torch.float32, output_loading_info=True
                )
        except (OSError, ValueError, AttributeError, RuntimeError) as e:
            raise LoadError(f"the encoder of {folder} cannot be loaded: {str(e).splitlines()[0]}") from None
        if missing := sorted(name for name in report["missing_keys"] if ".encoder." in name):
            raise LoadError(f"{folder} has no tensor {missing[0]}, which its encoder calls for.")
        self._encoder: Any = model.eval().model.encoder

    def rows(self, given: MediaInput) -> Rows:
        """[num_tokens, H] of one window at a time: their bits must not depend on other requests."""
        import torch

        [features] = given.arrays
        values = np.frombuffer(features.values, features.dtype).reshape(features.shape)
        with torch.inference_mode():
            found: Rows = self._encoder(torch.tensor(values), return_dict=True).last_hidden_state[0].numpy()
        if len(found) != given.num_tokens:
            raise ValueError(f"an encoder gave {len(found)} rows for {given.num_tokens} tokens")
        return found
