"""Computes the output of a speech model's encoder with transformers, on the decoder's device, thirty seconds at a time.
This module runs in the core; `audio_features` runs in the front end.
"""

import os
from math import prod
from typing import Any

import numpy as np

from octavo.errors import LoadError
from octavo.multimodal.tower import Rows, memory_refused, quiet, to_device
from octavo.request import MediaArray, MediaInput


class SpeechEncoder:
    """The encoder of a Whisper checkpoint, without its decoder."""

    def __init__(self, folder: str, device: str = "cpu", dtype: str = "float32") -> None:
        """Load the encoder. It computes in `dtype` on torch's `device`, such as "cpu" or "cuda:0". Raises
        `LoadError`."""
        # As in `Tower`: waiting threads of torch would spin and take cores from the native kernels.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        import torch
        import transformers

        self._dtype: Any = getattr(torch, dtype)
        self._device = torch.device(device)
        try:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            config.decoder_layers = 0
            with quiet(transformers.logging):  # transformers would report the decoder's weights as unused
                model, report = transformers.WhisperForConditionalGeneration.from_pretrained(
                    folder, config=config, dtype=self._dtype, output_loading_info=True
                )
        except (OSError, ValueError, AttributeError, RuntimeError) as e:
            raise LoadError(f"the encoder of {folder} cannot be loaded: {str(e).splitlines()[0]}") from None
        if missing := sorted(name for name in report["missing_keys"] if ".encoder." in name):
            raise LoadError(f"{folder} has no tensor {missing[0]}, which its encoder calls for.")
        self._encoder: Any = model.eval().model.encoder
        to_device(self._encoder, self._device)

    def example(self) -> MediaInput:
        """Return a silent window. All windows are equally long."""
        config = self._encoder.config
        shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
        array = MediaArray("input_features", "float32", shape, bytes(4 * prod(shape)))
        return MediaInput(b"", config.max_source_positions, (array,))

    def rows(self, given: MediaInput) -> Rows:
        """Return the encoder's rows of one window, [num_tokens, H]. Windows are computed one at a time, so that their
        bits do not depend on other requests. Raises `RequestError` if the device has no memory for the window."""
        import torch

        [features] = given.arrays
        values = np.frombuffer(features.values, features.dtype).reshape(features.shape)
        with torch.inference_mode(), memory_refused():
            heard = self._encoder(torch.tensor(values, dtype=self._dtype, device=self._device), return_dict=True)
            found: Rows = heard.last_hidden_state[0].float().cpu().numpy()
        if len(found) != given.num_tokens:
            raise ValueError(f"an encoder gave {len(found)} rows for {given.num_tokens} tokens")
        return found
