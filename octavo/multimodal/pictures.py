"""Pictures as they come: base64 `data:` URLs, files that `connector` has fetched, or Pillow's images of a caller in the
same process. What comes out is RGB, upright and without transparency, and known by a hash.

What strangers send is checked in the order in which it costs: the length of the text, the bytes, then the size that the
header gives, and only then the pixels. Error texts say what is wrong with the picture, and nothing of the machine.
"""

from __future__ import annotations

import hashlib
import io
from typing import TYPE_CHECKING, Any

from octavo.config import MediaConfig
from octavo.errors import RequestError
from octavo.media_kinds import IMAGE

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG")
MIN_SIDE = 2  # a picture of one pixel is a mistake or an attack; processors take its sides for channels
MAX_ASPECT = 50  # processors scale the shorter side to a fixed size, and the longer one grows with it


class PictureReader:
    """Of one engine's bounds: a `MediaReader`."""

    def __init__(self, config: MediaConfig) -> None:
        self._config = config

    def from_bytes(self, data: bytes) -> Image:
        return from_bytes(data, self._config.max_bytes, self._config.max_pixels)

    def normalized(self, given: object) -> Image:
        return normalized(given, self._config.max_pixels)

    def is_many(self, given: object) -> bool:
        return isinstance(given, list | tuple)

    def example(self) -> Image:
        from PIL import Image

        return Image.new("RGB", (56, 56))

    def content_hash(self, medium: Image, settings: str, salt: str | None) -> bytes:
        return content_hash(medium, settings, salt)


def from_url(url: str, max_bytes: int, max_pixels: int) -> Image:
    """The picture of a `data:` URL, as `normalized` leaves it. Raises `RequestError`."""
    return from_bytes(IMAGE.data_of(url, max_bytes), max_bytes, max_pixels)


def from_bytes(data: bytes, max_bytes: int, max_pixels: int) -> Image:
    """The picture of a PNG or JPEG file, as `normalized` leaves it. Raises `RequestError`."""
    from PIL import Image

    if len(data) > max_bytes:
        raise IMAGE.too_many_bytes(max_bytes)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(image, max_pixels)  # of the header
            image.load()
            return normalized(image, max_pixels)
    except RequestError:
        raise
    except Image.DecompressionBombError:
        raise IMAGE.refusal(f"it has more than {max_pixels} pixels (--max-image-pixels).") from None
    except Exception:  # decoders of strangers' bytes raise what they like
        raise IMAGE.refusal("it is not a readable PNG or JPEG file.") from None


def normalized(image: Any, max_pixels: int) -> Image:
    """A Pillow image as RGB: turned upright by its EXIF orientation, what is transparent on white. Raises
    `RequestError`."""
    from PIL import Image, ImageOps

    if not isinstance(image, Image.Image):
        raise IMAGE.refusal(f"it must be a PIL.Image, got {type(image).__name__}.")
    _check_size(image, max_pixels)
    try:
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I;16"):  # Pillow clips what is above 255
            upright = upright.point(lambda value: value / 256).convert("L")
        if upright.has_transparency_data:
            upright = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
        return upright.convert("RGB")
    except Exception:
        raise IMAGE.refusal("it is not a readable picture.") from None


def content_hash(image: Image, settings: str, salt: str | None) -> bytes:
    """SHA-256 over all that a tower's rows depend on, and the salt that keeps tenants apart."""
    digest = hashlib.sha256(repr((salt or "", settings, image.mode, image.size)).encode())
    digest.update(image.tobytes())
    return digest.digest()


def _check_size(image: Image, max_pixels: int) -> None:
    width, height = image.size
    if min(width, height) < MIN_SIDE:
        raise IMAGE.refusal(f"it has {width} x {height} pixels; {MIN_SIDE} x {MIN_SIDE} are the least.")
    if width * height > max_pixels:
        raise IMAGE.refusal(f"it has {width} x {height} pixels; {max_pixels} are the most (--max-image-pixels).")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise IMAGE.refusal(f"it has {width} x {height} pixels; one side may be {MAX_ASPECT} times the other at most.")
