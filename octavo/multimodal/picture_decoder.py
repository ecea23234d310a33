"""Decodes pictures to RGB, upright and without transparency, from files (for `decoder_process`) and from Pillow images.
Of an animation it takes the first frame. The size in the header is checked before pixels are decoded.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from octavo.multimodal.decoder_process import Refused

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MIN_SIDE = 2  # a picture of one pixel is a mistake or an attack; processors take its sides for channels
# Scans of a JPEG. Each is a pass over the whole picture, however few bytes it has (bugzilla.redhat.com/1344214: 20,000
# scans of 32 megapixels in 1.2 MB took 40 s). Progressive files have about ten.
MAX_SCANS = 500
# EXIF's tag, and by its value Pillow's number of the transposition that turns the picture upright.
_ORIENTATION, _TRANSPOSED = 0x0112, {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
MAX_ASPECT = 50  # processors scale the shorter side to a fixed size, and the longer one grows with it


def decode(data: bytes, limits: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
    """Return the size of the picture in a file of `FORMATS`, and its pixels. Raises `Refused`."""
    from PIL import Image, features

    max_pixels = limits["max_pixels"]
    if (size := _webp_size(data)) is not None:
        if not features.check("webp"):
            raise Refused("it is a WebP file, and this server's Pillow cannot read WebP.")
        check_size(size, max_pixels)
    # Compressed data cannot contain a scan marker; a thumbnail adds one each.
    if data[:2] == b"\xff\xd8" and data.count(b"\xff\xda") > MAX_SCANS:
        raise Refused(f"it has more than {MAX_SCANS} scans.")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            check_size(image.size, max_pixels)  # the size in the header
            image.load()
            found = upright(image)
    except Image.DecompressionBombError:
        raise Refused(f"it has more than {max_pixels} pixels (--max-image-pixels).") from None
    return {"size": found.size}, [found.tobytes()]


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Return the size in the header of a WebP file (RFC 9649), or None for other files. It must be checked before the
    file is opened, as libwebp allocates the frames on opening."""
    head = data[:30]
    if len(head) < 30 or head[:4] != b"RIFF" or head[8:12] != b"WEBP":
        return None
    match head[12:16]:
        case b"VP8X":
            return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
        case b"VP8L":
            sides = int.from_bytes(head[21:25], "little")
            return (sides & 0x3FFF) + 1, (sides >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            return int.from_bytes(head[26:28], "little") & 0x3FFF, int.from_bytes(head[28:30], "little") & 0x3FFF
    return None


def upright(image: Image) -> Image:
    """Return the picture in RGB, turned by its EXIF orientation, transparent parts on white. Pillow may raise any
    exception for a broken picture."""
    from PIL import Image

    image.load()
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # the metadata are broken, and the pixels may be whole
        orientation = None
    turned = image
    if orientation in _TRANSPOSED:
        turned = image.transpose(Image.Transpose(_TRANSPOSED[orientation]))
    if turned.mode.startswith("I;16"):  # Pillow would clip values above 255, and take the low byte of a transparent one
        turned = turned.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        turned.info.pop("transparency", None)
    if turned.has_transparency_data:
        turned = turned.convert("RGBA")
        turned = Image.alpha_composite(Image.new("RGBA", turned.size, "white"), turned)
    return turned.convert("RGB")


def check_size(size: tuple[int, int], max_pixels: int) -> None:
    """Raise `Refused` for a picture that is too large, too small or too long."""
    width, height = size
    if min(width, height) < MIN_SIDE:
        raise Refused(f"it has {width} x {height} pixels; {MIN_SIDE} x {MIN_SIDE} are the least.")
    if width * height > max_pixels:
        raise Refused(f"it has {width} x {height} pixels; {max_pixels} are the most (--max-image-pixels).")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise Refused(f"it has {width} x {height} pixels; one side may be {MAX_ASPECT} times the other at most.")
