"""What sets the kinds of media apart, from a request's field to the argument of a processor. How a file of each is
decoded is in `octavo.multimodal`.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from octavo.errors import RequestError

_MAX_UUID = 256  # characters
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w-]+=[^;,]*)*);base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MediaKind:
    """Pictures, sounds or videos."""

    name: str  # in multi_modal_data, --limit-mm-per-prompt and metrics, and the type of a part as templates know it
    noun: str
    part: str  # the type of a part of a message that has a URL
    argument: str  # of transformers' processors
    extra: str  # of Octavo's package
    modules: tuple[str, ...]  # which decode and fetch it
    verb: str  # what a model that takes it does
    values: str  # what multi_modal_data has of it
    media_types: tuple[str, ...]  # of data: URLs, the first where those say none, and of what is fetched
    built: str  # the formats, in words
    file: str  # of these, in words

    def refusal(self, reason: str) -> RequestError:
        """What a medium is refused with."""
        return RequestError(f"A {self.noun} is refused: {reason}", param=self.part, code=f"invalid_{self.name}")

    def too_many_bytes(self, max_bytes: int) -> RequestError:
        """What a medium's file is refused with that is too large."""
        return self.refusal(f"it has more than {max_bytes} bytes (--max-{self.name}-bytes).")

    def data_of(self, url: str, max_bytes: int) -> bytes:
        """The file of a `data:` URL. Raises `RequestError`."""
        match = _DATA_URL.match(url, 0, 256)
        if match is None:
            raise self.refusal(f"its url must look like data:{self.media_types[0]};base64,...")
        if (match[1] or self.media_types[0]).lower() not in self.media_types:
            raise self.refusal(f"only {self.built} are built.")
        if (len(url) - match.end()) // 4 * 3 - 2 > max_bytes:
            raise self.too_many_bytes(max_bytes)
        try:
            return base64.b64decode(url[match.end() :], validate=True)
        except (binascii.Error, ValueError):
            raise self.refusal("its url is not valid base64.") from None


IMAGE = MediaKind(
    "image", "picture", "image_url", "images", "vision", ("PIL", "httpx"), "sees", "a PIL.Image",
    ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif"),
    "image/png, image/jpeg, image/webp and image/gif", "PNG, JPEG, WebP or GIF file",
)  # fmt: skip
AUDIO = MediaKind(
    "audio", "sound", "audio_url", "audio", "audio", ("soundfile", "soxr", "httpx"), "hears",
    "samples at 16 kHz or a pair of samples and their rate",
    (
        "audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave", "audio/mpeg", "audio/mp3", "audio/flac",
        "audio/x-flac", "audio/ogg",
    ),
    "wav, mp3, flac and ogg", "file of sound",
)  # fmt: skip
VIDEO = MediaKind(
    "video", "video", "video_url", "videos", "video", ("PIL", "av", "torchvision", "httpx"), "sees",
    "an array of uint8 [frames, height, width, 3], or a pair of one and a dictionary with fps",
    ("video/mp4", "video/quicktime", "video/webm", "video/x-matroska", "video/mkv", "video/x-m4v"),
    "mp4, mov, webm and mkv", "file of video",
)  # fmt: skip
KINDS = {kind.name: kind for kind in (IMAGE, AUDIO, VIDEO)}


class SentMedium(NamedTuple):
    """A medium of a request as it was sent."""

    kind: MediaKind
    given: (
        Any  # a URL, `SentEmbeddings`, or a value of a caller in the same process; None: what was sent as `uuid` before
    )
    uuid: str | None = None  # by which it is known to later requests


class SentEmbeddings(NamedTuple):
    """What is `given` in the place of a medium: what its tower would make of it."""

    value: Any  # in base64, alone or in an object beside its grid


def checked_uuid(given: object) -> str | None:
    """Raises `RequestError`."""
    if given is not None and not (isinstance(given, str) and 0 < len(given) <= _MAX_UUID):
        raise RequestError(f"the uuid of a medium must be a string of 1 to {_MAX_UUID} characters.", param="uuid")
    return given


class MediaReader(Protocol):
    """Files and values of one kind as what processors take, within an engine's bounds."""

    def from_bytes(self, data: bytes) -> Any:
        """The medium of a file. Raises `RequestError`."""

    def normalized(self, given: object) -> Any:
        """The medium of a caller in the same process. Raises `RequestError`."""

    def is_many(self, given: object) -> bool:
        """Whether that is a sequence of media."""

    def example(self) -> Any:
        """Some medium."""

    def largest(self, share: float) -> list[Any]:
        """Media of that share, up to 1, of what the bounds allow: one of each shape that makes a difference."""

    def content_hash(self, medium: Any, settings: str, salt: str | None) -> bytes:
        """SHA-256 over all that a tower's rows depend on, and the salt that keeps tenants apart."""
