"""Pictures as they come: base64 `data:` URLs, files that `connector` has fetched, or Pillow's images of a caller in the
same process. What comes out is RGB, upright and without transparency, and known by a hash.

What strangers send is checked in the order in which it costs: the length of the text, the bytes, then the size that the
header gives, and only then the pixels. Error texts say what is wrong with the picture, and nothing of the machine.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG")
MIN_SIDE = 2  # a picture of one pixel is a mistake or an attack; processors take its sides for channels
MAX_ASPECT = 50  # processors scale the shorter side to a fixed size, and the longer one grows with it
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w-]+=[^;,]*)*);base64,", re.IGNORECASE)
_MEDIA_TYPES = ("image/png", "image/jpeg", "image/jpg")


def from_url(url: str, max_bytes: int, max_pixels: int) -> Image:
    """The picture of a `data:` URL, as `normalized` leaves it. Raises `RequestError`."""
    match = _DATA_URL.match(url, 0, 256)
    if match is None:
        raise refusal("its url must look like data:image/png;base64,...")
    if (match[1] or "image/png").lower() not in _MEDIA_TYPES:
        raise refusal("only image/png and image/jpeg are built.")
    if (len(url) - match.end()) // 4 * 3 - 2 > max_bytes:
        raise too_many_bytes(max_bytes)
    try:
        data = base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise refusal("its url is not valid base64.") from None
    return from_bytes(data, max_bytes, max_pixels)


def from_bytes(data: bytes, max_bytes: int, max_pixels: int) -> Image:
    """The picture of a PNG or JPEG file, as `normalized` leaves it. Raises `RequestError`."""
    from PIL import Image

    if len(data) > max_bytes:
        raise too_many_bytes(max_bytes)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(image, max_pixels)  # of the header
            image.load()
            return normalized(image, max_pixels)
    except RequestError:
        raise
    except Image.DecompressionBombError:
        raise refusal(f"it has more than {max_pixels} pixels (--max-image-pixels).") from None
    except Exception:  # decoders of strangers' bytes raise what they like
        raise refusal("it is not a readable PNG or JPEG file.") from None


def normalized(image: Any, max_pixels: int) -> Image:
    """A Pillow image as RGB: turned upright by its EXIF orientation, what is transparent on white. Raises
    `RequestError`."""
    from PIL import Image, ImageOps

    if not isinstance(image, Image.Image):
        raise refusal(f"it must be a PIL.Image, got {type(image).__name__}.")
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
        raise refusal("it is not a readable picture.") from None


def content_hash(image: Image, settings: str, salt: str | None) -> bytes:
    """SHA-256 over all that a tower's rows depend on, and the salt that keeps tenants apart."""
    digest = hashlib.sha256(repr((salt or "", settings, image.mode, image.size)).encode())
    digest.update(image.tobytes())
    return digest.digest()


def _check_size(image: Image, max_pixels: int) -> None:
    width, height = image.size
    if min(width, height) < MIN_SIDE:
        raise refusal(f"it has {width} x {height} pixels; {MIN_SIDE} x {MIN_SIDE} are the least.")
    if width * height > max_pixels:
        raise refusal(f"it has {width} x {height} pixels; {max_pixels} are the most (--max-image-pixels).")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise refusal(f"it has {width} x {height} pixels; one side may be {MAX_ASPECT} times the other at most.")


def too_many_bytes(max_bytes: int) -> RequestError:
    """What a picture's file is refused with that is too large."""
    return refusal(f"it has more than {max_bytes} bytes (--max-image-bytes).")


def refusal(reason: str) -> RequestError:
    """What a picture is refused with."""
    return RequestError(f"A picture is refused: {reason}", param="image_url", code="invalid_image")
