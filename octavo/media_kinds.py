"""The differences between kinds of media, from a request's field to the argument of a processor. `octavo.multimodal`
decodes their files.
"""

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
    """A kind of media: pictures, sounds or videos."""

    name: str  # in multi_modal_data, --limit-mm-per-prompt, metrics, and as the type of a part in templates
    noun: str
    part: str  # type of a message's part with a URL
    argument: str  # argument of transformers' processors
    extra: str  # extra of Octavo's package
    modules: tuple[str, ...]  # Python modules that decode and fetch it
    verb: str  # verb for a model that takes it
    values: str  # the kind's values in multi_modal_data, in words
    media_types: tuple[str, ...]  # of data: URLs and fetched files; the first is the default of data: URLs
    built: str  # the built formats, in words
    file: str  # a file a file in these formats, in words

    def refusal(self, reason: str) -> RequestError:
        """Return the error for a refused medium."""
        return RequestError(f"A {self.noun} is refused: {reason}", param=self.part, code=f"invalid_{self.name}")

    def too_many_bytes(self, max_bytes: int) -> RequestError:
        """Return the error for a file that is too large."""
        return self.refusal(f"it has more than {max_bytes} bytes (--max-{self.name}-bytes).")

    def data_of(self, url: str, max_bytes: int) -> bytes:
        """Return the file in a `data:` URL. Raises `RequestError`."""
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
    "an array of uint8 [frames, height, width, 3], or a pair: such an array and a dictionary with fps",
    ("video/mp4", "video/quicktime", "video/webm", "video/x-matroska", "video/mkv", "video/x-m4v"),
    "mp4, mov, webm and mkv", "file of video",
)  # fmt: skip
KINDS = {kind.name: kind for kind in (IMAGE, AUDIO, VIDEO)}


class SentMedium(NamedTuple):
    """A request's medium as it was sent."""

    kind: MediaKind
    given: (
        Any  # a URL, `SentEmbeddings`, or a value of a caller in the same process; None: what was sent as `uuid` before
    )
    uuid: str | None = None  # its name for later requests


class SentEmbeddings(NamedTuple):
    """Embeddings `given` in place of a medium: the output that its tower would have."""

    value: Any  # base64, alone or in an object with its grid


def checked_uuid(given: object) -> str | None:
    """Return the uuid of a medium. Raises `RequestError` if it is not a string of a valid length."""
    if given is not None and not (isinstance(given, str) and 0 < len(given) <= _MAX_UUID):
        raise RequestError(f"the uuid of a medium must be a string of 1 to {_MAX_UUID} characters.", param="uuid")
    return given


class MediaReader(Protocol):
    """Reads files and values of one kind into the form that processors take, within an engine's bounds."""

    def from_bytes(self, data: bytes) -> Any:
        """Return the medium in a file. Raises `RequestError`."""

    def normalized(self, given: object) -> Any:
        """Return the medium of a caller in the same process. Raises `RequestError`."""

    def is_many(self, given: object) -> bool:
        """Return whether the value is a sequence of media."""

    def example(self) -> Any:
        """Return an example of a medium."""

    def largest(self, share: float) -> list[Any]:
        """Return media of `share`, up to 1, of the size that the bounds allow: one for each shape whose size in memory
        differs."""

    def content_hash(self, medium: Any, settings: str, salt: str | None) -> bytes:
        """Return the SHA-256 of everything that a tower's rows depend on, and of the salt that keeps tenants apart."""
