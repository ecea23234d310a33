"""Turns media in a request into decoded media for the model's processor."""

import hashlib
from typing import Any

from octavo.config import MediaConfig
from octavo.errors import RequestError
from octavo.media_kinds import KINDS, VIDEO, MediaReader
from octavo.multimodal.connector import MediaConnector
from octavo.multimodal.embeddings import EmbeddingsReader
from octavo.multimodal.media_cache import MediaCache, medium_bytes


class MediaLoader:
    """Loads media of one kind within the bounds of that kind's `MediaConfig`."""

    def __init__(self, config: MediaConfig, kept: MediaCache) -> None:
        self.config = config
        self._kept = kept
        self.kind = KINDS[config.kind]
        self.reader = _reader(config)
        self.embeddings = EmbeddingsReader(config)
        self.connector = MediaConnector(config)

    def check_number(self, count: int) -> None:
        """Raise `RequestError` for more media than a prompt may have."""
        if count > self.config.max_count:
            raise RequestError(
                f"the prompt has {count} {self.kind.noun}s, and {self.config.max_count} are the most "
                "(--limit-mm-per-prompt).",
                param="messages",
            )

    def is_many(self, given: object) -> bool:
        """Return whether a value of `multi_modal_data` is a sequence of media."""
        if self.embeddings.is_one(given):
            return False
        return self.reader.is_many(given) or (self.kind is not VIDEO and len(getattr(given, "shape", ())) == 3)

    def normalized(self, given: object) -> Any:
        """Return the medium in a value of `multi_modal_data`. Raises `RequestError`."""
        return self.embeddings.read(given) if self.embeddings.is_one(given) else self.reader.normalized(given)

    def read(self, url: str, file: bytes | None, salt: str | None) -> Any:
        """Return the medium of a data: URL, or of the file that was fetched from `url`. It comes from the cache if it
        was recently decoded for the same salt. Raises `RequestError`."""
        data = self.kind.data_of(url, self.config.max_bytes) if file is None else file
        key = "file", self.kind.name, salt or "", hashlib.sha256(data).digest()
        if (medium := self._kept.find(key)) is None:
            medium = self.reader.from_bytes(data)
            self._kept.keep(key, medium, medium_bytes(medium))
        return medium


def _reader(config: MediaConfig) -> MediaReader:
    if config.kind == "video":
        from octavo.multimodal.videos import VideoReader

        return VideoReader(config)
    if config.kind == "audio":
        from octavo.multimodal.sounds import SoundReader

        return SoundReader(config)
    from octavo.multimodal.picture_reader import PictureReader

    return PictureReader(config)
