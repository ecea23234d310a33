"""Reads pictures of requests: base64 `data:` URLs, files that `connector` has fetched, or Pillow images of a caller in
the same process. The results are RGB, upright and without transparency, and are identified by a hash.

Checks of strangers' pictures run from cheap to costly: the length of the text, the bytes, and then, in a process with
bounds, the size in the header and the pixels. Error texts say what is wrong with the picture, and nothing about the
machine.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from octavo.config import MediaConfig
from octavo.media_kinds import IMAGE
from octavo.multimodal.decoder_process import Refused
from octavo.multimodal.decoding import decode
from octavo.multimodal.picture_decoder import MIN_SIDE, check_size, upright

if TYPE_CHECKING:
    from PIL.Image import Image

# Memory of the decoding process: its own, and for each pixel the copies of four bytes that Pillow makes.
_MEMORY_BYTES, _BYTES_A_PIXEL = 1 << 30, 32
_RATIOS = (1.0, 4 / 3, 3.0)  # ratios of sides; the number of tiles depends on them


class PictureReader:
    """Reads pictures within one engine's bounds. It is a `MediaReader`."""

    def __init__(self, config: MediaConfig) -> None:
        self._config = config

    def from_bytes(self, data: bytes) -> Image:
        """Return the picture in a file, in the form of `normalized`. Raises `RequestError`."""
        from PIL import Image

        if len(data) > self._config.max_bytes:
            raise IMAGE.too_many_bytes(self._config.max_bytes)
        max_pixels = self._config.max_pixels
        limits = {"max_pixels": max_pixels, "memory_bytes": _MEMORY_BYTES + max_pixels * _BYTES_A_PIXEL}
        found, pixels = decode(IMAGE, data, limits)
        return Image.frombytes("RGB", tuple(found["size"]), pixels)

    def normalized(self, given: object) -> Image:
        """Return a Pillow image as RGB, turned upright by its EXIF orientation, transparent parts on white. Raises
        `RequestError`."""
        from PIL import Image

        if not isinstance(given, Image.Image):
            raise IMAGE.refusal(f"it must be a PIL.Image, got {type(given).__name__}.")
        try:
            check_size(given.size, self._config.max_pixels)
            return upright(given)
        except Refused as e:
            raise IMAGE.refusal(str(e)) from None
        except Exception:
            raise IMAGE.refusal("it is not a readable picture.") from None

    def is_many(self, given: object) -> bool:
        return isinstance(given, list | tuple)

    def example(self) -> Image:
        from PIL import Image

        return Image.new("RGB", (56, 56))

    def largest(self, share: float) -> list[Image]:
        from PIL import Image

        pixels = share * self._config.max_pixels
        return [
            Image.new("RGB", (max(MIN_SIDE, int((pixels * r) ** 0.5)), max(MIN_SIDE, int((pixels / r) ** 0.5))))
            for r in _RATIOS
        ]

    def content_hash(self, medium: Image, settings: str, salt: str | None) -> bytes:
        digest = hashlib.sha256(repr((salt or "", settings, medium.mode, medium.size)).encode())
        digest.update(medium.tobytes())
        return digest.digest()
