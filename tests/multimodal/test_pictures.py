"""Pictures of strangers: what is taken and how it is normalized, and a table of what is refused."""

from __future__ import annotations

import base64
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image, features

from octavo.errors import RequestError
from octavo.media_kinds import IMAGE
from octavo.multimodal.decoder_process import Refused
from octavo.multimodal.picture_decoder import decode
from octavo.multimodal.picture_reader import PictureReader
from tests.multimodal.conftest import encoded, picture

MAX_BYTES, MAX_PIXELS = 100_000, 1_000_000


def reader(max_bytes: int = MAX_BYTES, max_pixels: int = MAX_PIXELS) -> PictureReader:
    return PictureReader(SimpleNamespace(max_bytes=max_bytes, max_pixels=max_pixels))  # type: ignore[arg-type]


def from_url(given: str) -> Any:
    return reader().from_bytes(IMAGE.data_of(given, MAX_BYTES))


def url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes, *more: bytes) -> bytes:
    """A PNG file of grey pixels whose header says what it likes."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"".join([b"\x89PNG\r\n\x1a\n", header, *more, chunk(b"IDAT", data), chunk(b"IEND", b"")])


def gif(width: int, height: int, *frame: int) -> bytes:
    """`GIF` with another size in its header, and of its frame: from left and top, width and height."""
    at = GIF.index(b",", 13 + 3 * 256)  # behind the palette
    head, place = struct.pack("<HH", width, height), struct.pack("<HHHH", *frame) if frame else GIF[at + 1 : at + 9]
    return GIF[:6] + head + GIF[10 : at + 1] + place + GIF[at + 9 :]


def webp(kind: bytes, fields: bytes) -> bytes:
    """A WebP file of a header that says what it likes."""
    return b"RIFF" + struct.pack("<I", 12 + len(fields)) + b"WEBP" + kind + struct.pack("<I", len(fields)) + fields


GOOD = encoded(picture(0))
JPEG = encoded(picture(0), "JPEG")
GIF, WEBP = encoded(picture(0), "GIF"), encoded(picture(0), "WEBP")
MOVING = [picture(0), picture(1), picture(2)]
MOVING_WEBP = encoded(MOVING[0], "WEBP", save_all=True, append_images=MOVING[1:])
ZEROS = zlib.compress(bytes(90_000_000), 9)


def of_many_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan comes `count` times more."""
    data = encoded(Image.new("L", (64, 64), 128), "JPEG", progressive=True)
    last = data[data.rfind(b"\xff\xda") : -2]
    return data[:-2] + last * count + data[-2:]


CASES: dict[str, tuple[str | Callable[[], str], str]] = {
    "no base64": ("data:image/png,abc", "must look like"),
    "no comma": ("data:image/png;base64", "must look like"),
    "long type": ("data:" + "a" * 100_000 + "/png;base64,", "must look like"),
    "many parameters": ("data:image/png" + ";a=b" * 100_000 + ";base64,", "must look like"),
    "svg": (url(b"<svg/>", "image/svg+xml"), "only image/png, image/jpeg"),
    "tiff type": (url(GOOD, "image/tiff"), "only image/png, image/jpeg, image/webp and image/gif"),
    "video": (url(GOOD, "video/mp4"), "only image/png, image/jpeg"),
    "not base64": ("data:image/png;base64,!!!!", "not valid base64"),
    "cut base64": (url(GOOD)[:-3], "not valid base64"),
    "other letters": ("data:image/png;base64,äöü", "not valid base64"),
    "no bytes": (url(b""), "not a readable"),
    "a JPEG of many scans": (url(of_many_scans(500), "image/jpeg"), "it has more than 500 scans"),
    "text": (url(b"GET / HTTP/1.1"), "not a readable"),
    "signature only": (url(GOOD[:8]), "not a readable"),
    "header only": (url(GOOD[:33]), "not a readable"),
    "half a PNG": (url(GOOD[: len(GOOD) // 2]), "not a readable"),
    "half a JPEG": (url(JPEG[: len(JPEG) // 2]), "not a readable"),
    "broken checksum": (url(GOOD[:20] + b"\xff" + GOOD[21:]), "not a readable"),
    "broken data": (url(png(20, 20, b"no deflate")), "not a readable"),
    "TIFF": (url(encoded(picture(0), "TIFF")), "not a readable"),
    "BMP": (url(encoded(picture(0), "BMP")), "not a readable"),
    "postscript": (url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "not a readable"),
    "one pixel": (url(encoded(picture(0, 1, 1))), "1 x 1 pixels; 2 x 2 are the least"),
    "one row": (url(encoded(picture(0, 60, 1))), "60 x 1 pixels; 2 x 2 are the least"),
    "no pixels": (url(png(0, 0, b"")), "not a readable|0 x 0 pixels"),
    "a strip": (url(encoded(picture(0, 2, 150))), "one side may be 50 times the other"),
    "many bytes": (url(GOOD + bytes(MAX_BYTES)), "more than 100000 bytes"),
    "many pixels": (lambda: url(encoded(Image.new("L", (1001, 1000)))), "1001 x 1000 pixels; 1000000 are the most"),
    "a bomb": (url(png(9_000, 10_000, ZEROS)), "9000 x 10000 pixels"),
    "a large bomb": (url(png(2**31 - 1, 2**31 - 1, ZEROS)), "pixels"),
    "half a GIF": (url(GIF[: len(GIF) // 2], "image/gif"), "not a readable"),
    "half a WebP": (url(WEBP[: len(WEBP) // 2], "image/webp"), "not a readable"),
    "half of one that moves": (url(MOVING_WEBP[: len(MOVING_WEBP) // 2]), "not a readable"),
    "a GIF without a frame": (url(GIF[: 13 + 3 * 256] + b";"), "not a readable"),
    "a GIF with an empty frame": (url(gif(40, 60, 0, 0, 0, 0)), "not a readable"),
    "one pixel of GIF": (url(encoded(picture(0, 1, 1), "GIF")), "1 x 1 pixels; 2 x 2 are the least"),
    "one pixel of WebP": (url(encoded(picture(0, 1, 1), "WEBP")), "1 x 1 pixels; 2 x 2 are the least"),
    "a GIF of many pixels": (url(gif(1001, 1000)), "1001 x 1000 pixels; 1000000 are the most"),
    "a GIF that is a bomb": (url(gif(65535, 65535)), "more than 1000000 pixels"),
    "a frame that is a bomb": (url(gif(40, 60, 65535, 65535, 9000, 9000)), "more than 1000000 pixels"),
    "a frame outside": (url(gif(40, 60, 900, 1100, 101, 100)), "1001 x 1200 pixels; 1000000 are the most"),
    "a WebP of many pixels": (
        lambda: url(encoded(Image.new("L", (1001, 1000)), "WEBP")), "1001 x 1000 pixels; 1000000 are the most",
    ),
    "a WebP without loss of many pixels": (
        lambda: url(encoded(Image.new("L", (1001, 1000)), "WEBP", lossless=True)), "1001 x 1000 pixels",
    ),
    "a WebP that moves on a large canvas": (url(webp(b"VP8X", b"\2\0\0\0" + b"\xff" * 6)), "16777216 x 16777216"),
    "a WebP that is its header": (url(webp(b"VP8X", b"\2\0\0\0" + b"\x13\0\0" * 2)), "not a readable"),
    "a WebP without pixels": (url(webp(b"VP8 ", bytes(3) + b"\x9d\1\x2a" + bytes(4))), "0 x 0 pixels"),
    "a WebP of another codec": (url(webp(b"AVIF", bytes(20))), "not a readable"),
    "a profile that is a bomb": (
        url(png(20, 20, zlib.compress(bytes(20 * 21)), chunk(b"iCCP", b"a\0\0" + ZEROS))), "not a readable",
    ),
    "a text that is a bomb": (
        url(png(20, 20, zlib.compress(bytes(20 * 21)), chunk(b"zTXt", b"a\0\0" + ZEROS))), "not a readable",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # which is what is tested
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_picture_is_refused_before_it_costs_much(name: str) -> None:
    given, said = CASES[name]
    given = given if isinstance(given, str) else given()
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=said) as refused:
            from_url(given)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20  # the bombs are of 90 MB
    finally:
        tracemalloc.stop()
    message = str(refused.value)
    assert refused.value.status == 400 and len(message) < 200
    assert " at 0x" not in message and "PIL" not in message and "passwd" not in message


def test_progressive_files_are_taken() -> None:
    assert from_url(url(of_many_scans(3), "image/jpeg")).size == (64, 64)


@pytest.mark.parametrize(
    ("data", "media_type"),
    [(GOOD, "image/png"), (JPEG, "image/jpeg"), (JPEG, "IMAGE/JPG"), (GIF, "image/gif"), (WEBP, "image/webp")],
)
def test_files_that_people_send_are_taken(data: bytes, media_type: str) -> None:
    found = from_url(url(data, media_type))
    assert found.mode == "RGB" and found.size == (40, 60)
    if data is GOOD:
        assert found.tobytes() == picture(0).tobytes()


@pytest.mark.parametrize(("form", "options"), [("GIF", {}), ("WEBP", {"lossless": True})])
def test_of_what_moves_the_first_frame_is_seen(form: str, options: dict[str, Any]) -> None:
    flat = [image.quantize(200) for image in MOVING]
    data = encoded(flat[0], form, save_all=True, append_images=flat[1:], **options)
    assert reader().from_bytes(data).tobytes() == flat[0].convert("RGB").tobytes()


def test_codecs_are_those_of_the_list_and_pillow_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert features.check("webp")
    monkeypatch.setattr(features, "check", lambda name: name != "webp")
    with pytest.raises(Refused, match="this server's Pillow cannot read WebP"):
        decode(WEBP, {"max_pixels": MAX_PIXELS})


def test_what_looks_alike_is_alike() -> None:
    """Orientation is applied and transparency shown on white, before anything is hashed."""
    upright = picture(0)
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6
    assert reader().from_bytes(encoded(turned, exif=exif)).tobytes() == upright.tobytes()
    assert reader().from_bytes(encoded(upright, exif=b"Exif\0\0broken")).tobytes() == upright.tobytes()
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    white = Image.new("RGB", (8, 8), "white")
    palette = Image.new("P", (8, 8))
    for data in (encoded(palette, "GIF", transparency=0), encoded(clear, "WEBP")):
        assert reader(10**4, 10**4).from_bytes(data).tobytes() == white.tobytes()
    for image in (
        clear,
        Image.new("LA", (8, 8), (0, 0)),
        reader(10**4, 10**4).from_bytes(encoded(palette, transparency=0)),
    ):
        assert reader().normalized(image).tobytes() == white.tobytes()
    for mode in ("I;16", "I;16B"):
        grey = Image.new(mode, (8, 8), 0x8000)
        assert reader().normalized(grey).getpixel((0, 0)) == (128, 128, 128)
    black = Image.new("I;16", (8, 8), 0)
    assert reader().from_bytes(encoded(black, transparency=0x0100)).getpixel((0, 0)) == (0, 0, 0)


def test_a_hash_takes_in_size_settings_bytes_and_salt() -> None:
    wide, tall = Image.new("RGB", (4, 9)), Image.new("RGB", (9, 4))
    other = Image.new("RGB", (4, 9), (0, 0, 1))
    keys = [(wide, "{}", None), (tall, "{}", None), (other, "{}", None), (wide, "{1}", None), (wide, "{}", "mine")]
    found = {reader().content_hash(*key) for key in keys}
    assert len(found) == len(keys) and {len(digest) for digest in found} == {32}
    assert reader().content_hash(Image.new("RGB", (4, 9)), "{}", None) in found
