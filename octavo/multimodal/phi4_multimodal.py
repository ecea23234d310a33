"""Phi-4-multimodal's processor of pictures and sounds. The one in `transformers` needs torchvision; this one does not.
The half for pictures follows the class `Phi4MultimodalImageProcessor` of transformers 5.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from octavo.media_kinds import IMAGE
from octavo.multimodal.sound_decoder import RATE

_SIDE = {"height": 448, "width": 448}
_MIN_SIDE = 10  # pixels of the shorter side of a picture that is fitted into its tiles
_DEFAULTS: dict[str, Any] = {
    "size": _SIDE, "patch_size": 14, "dynamic_hd": 36, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "rescale_factor": 1 / 255,
}  # fmt: skip
# Settings of which only these values are built.
_FIXED = {"do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3}


class PictureTiles:
    """Cuts a picture into tiles that keep its proportions (HD). The first tile is an overview of the whole picture."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Take the settings of the checkpoint's file. Raises `ValueError` for settings that are not built."""
        self._settings = {name: settings.get(name, default) for name, default in _DEFAULTS.items()}
        for name, built in _FIXED.items():
            if settings.get(name, built) != built:
                raise ValueError(f"{name} of Phi-4-multimodal's pictures is {settings[name]}; {built} is built.")
        size = self._settings["size"]
        self._side, self._patch = int(size["height"]), int(self._settings["patch_size"])
        if size["width"] != self._side or self._side % self._patch:
            raise ValueError(f"tiles of Phi-4-multimodal's pictures must be squares of patches, got {size}.")

    def to_dict(self) -> dict[str, Any]:
        return self._settings

    def __call__(self, picture: Any) -> dict[str, Any]:
        """Return the arrays of a picture: the tiles [1, tiles, 3, side, side]; a mask of the patches that show the
        picture and no padding [1, tiles, patches, patches]; the size of all tiles together [1, 2]; the number of rows
        [1]. Raises `RequestError` for a picture too long for its width."""
        import torch
        from torch.nn.functional import interpolate, pad

        side, num_patches = self._side, self._side // self._patch
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)  # [3, height, width]
        columns, rows = self._grid(picture.width, picture.height)
        height, width = self._fitted(picture.width, picture.height, columns, rows)
        if min(height, width) < _MIN_SIDE:
            raise IMAGE.refusal("it is too long for its width: the model's tiles would have too little of it.")
        if (height, width) != pixels.shape[1:]:
            [pixels] = interpolate(pixels[None], (height, width), mode="bilinear", align_corners=False, antialias=True)
        below, beside = rows * side - height, columns * side - width
        whole = pad(pixels, (0, beside, 0, below), value=255).float()
        scale = 1 / self._settings["rescale_factor"]
        mean, std = (torch.tensor(self._settings[f"image_{name}"])[:, None, None] * scale for name in ("mean", "std"))
        whole = (whole - mean) / std
        [overview] = interpolate(whole[None], (side, side), mode="bicubic", align_corners=False)
        seen = torch.ones(rows * num_patches, columns * num_patches)
        seen[len(seen) - below // self._patch :] = 0
        seen[:, seen.shape[1] - beside // self._patch :] = 0
        tiles = whole.reshape(3, rows, side, columns, side).permute(1, 3, 0, 2, 4).reshape(-1, 3, side, side)
        masks = seen.reshape(rows, num_patches, columns, num_patches).transpose(1, 2)
        masks = masks.reshape(-1, num_patches, num_patches)
        # A row stands for 2 x 2 patches, at an edge for two or one. Each line of rows is followed by a separator row.
        num_rows = sum(
            int(of_lines.sum()) + int(of_lines[:, 0].sum())
            for of_lines in (torch.ones(num_patches, num_patches)[::2, ::2], _every_second(masks, rows, columns))
        )
        return {
            "image_pixel_values": torch.cat([overview[None], tiles])[None].numpy(),
            "image_attention_mask": torch.cat([torch.ones(1, num_patches, num_patches), masks])[None].numpy(),
            "image_sizes": np.array([[rows * side, columns * side]]),
            "num_img_tokens": np.array([num_rows + 1]),  # and a separator row between the tiles and the overview
        }

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows of tiles that cover the picture; if these are too many, the grid with the nearest
        proportions."""
        side, most = self._side, int(self._settings["dynamic_hd"])
        columns, rows = math.ceil(width / side), math.ceil(height / side)
        if columns * rows <= most:
            return columns, rows
        # Of grids with equal proportions, the largest wins that the picture fills by more than half. Grids with equally
        # many tiles are tried in the order of a set, as in transformers.
        grids = {(i, j) for n in range(1, most + 1) for i in range(1, n + 1) for j in range(1, n + 1) if i * j <= most}
        best, difference = (1, 1), math.inf
        for columns, rows in sorted(grids, key=math.prod):
            found = abs(width / height - columns / rows)
            if found < difference or (found == difference and width * height > 0.5 * side * side * columns * rows):
                best, difference = (columns, rows), found
        return best

    def _fitted(self, width: int, height: int, columns: int, rows: int) -> tuple[int, int]:
        """Return the height and width of the picture after it is scaled to fit its tiles."""
        by_width, by_height = columns * self._side / width, rows * self._side / height
        if by_width < by_height:
            return int(height * by_width), columns * self._side
        return rows * self._side, int(width * by_height)


def _every_second(masks: Any, rows: int, columns: int) -> Any:
    """Return the masks of all tiles put together as one picture, with every second patch in height and in width."""
    found = masks[:, ::2, ::2]
    size = found.shape[-1]
    return found.reshape(rows, columns, size, size).transpose(1, 2).reshape(rows * size, columns * size)


class Phi4Processor:
    """Processes one picture or one sound. It is called like the `transformers` processors that replace placeholders in
    a text."""

    def __init__(self, folder: str, _token_id: int) -> None:
        """Load the settings and the tokenizer in `folder`. Raises `OSError` or `ValueError`."""
        from transformers import AutoTokenizer, Phi4MultimodalFeatureExtractor
        from transformers.image_processing_base import ImageProcessingMixin

        self.feature_extractor = Phi4MultimodalFeatureExtractor.from_pretrained(folder)
        settings, _ = ImageProcessingMixin.get_image_processor_dict(folder)
        self.image_processor = PictureTiles(settings)
        self._tokenizer = tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.audio_token, self.image_token = str(tokenizer.audio_token), str(tokenizer.image_token)

    def __call__(
        self, *, images: list[Any] | None = None, audio: list[Any] | None = None, is_beside: bool = False, **_: Any
    ) -> dict[str, Any]:
        """Return the arrays of a picture from `PictureTiles`, or of a sound: its frames [1, frames, mels], and as many
        placeholder tokens as the encoder makes rows. `is_beside` says that the sound's prompt has pictures too."""
        if images:
            made = self.image_processor(images[0])
            return self._with_text(made, self.image_token, int(made["num_img_tokens"][0]))
        assert audio is not None
        num_tokens, frames = 0, np.zeros((1, 0, self.feature_extractor.feature_size), np.float32)
        if len(audio[0]) >= self.feature_extractor.win_length:
            found = self.feature_extractor(audio, sampling_rate=RATE)
            num_tokens, frames = int(found["audio_embed_sizes"][0]), found["audio_input_features"].numpy()
        made = {"audio_input_features": frames} | ({"is_beside_pictures": np.ones(1, bool)} if is_beside else {})
        return self._with_text(made, self.audio_token, num_tokens)

    def _with_text(self, made: dict[str, Any], token: str, num_tokens: int) -> dict[str, Any]:
        return {
            **made,
            "input_ids": np.full(num_tokens, self._tokenizer.convert_tokens_to_ids(token)),
            "text_replacement_offsets": [[{"replacement": token * num_tokens}]],
        }
