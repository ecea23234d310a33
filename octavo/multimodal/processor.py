"""Pictures and prompts as a model takes them, by the model's own processor: the values that its tower reads, and as
many placeholder tokens as the tower gives rows. The front end's half of a model that sees; the other is `tower`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.config import MediaConfig
from octavo.errors import LoadError, RequestError
from octavo.multimodal.connector import MediaConnector, fetch_all, needs_fetching
from octavo.multimodal.pictures import content_hash, from_bytes, from_url, normalized
from octavo.request import MediaInput, MediaItem

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)


class PictureProcessor:
    """Of one model. Threads may share it."""

    def __init__(self, config: MediaConfig) -> None:
        self.config = config
        self._connector = MediaConnector(config)
        self._lock = Lock()
        self._processor: Any = None
        self._settings = ""
        # It takes seconds to import, which the first picture should not wait for.
        Thread(target=self._warm_up, name="octavo-pictures", daemon=True).start()

    @property
    def placeholder(self) -> str:
        """The text that stands for a picture in a prompt. Raises `LoadError`."""
        self._load()
        return str(self._processor.image_token)

    def pictures(self, given: object) -> list[Image]:
        """The pictures of `multi_modal_data`. Raises `RequestError` for any that are refused."""
        if not isinstance(given, dict) or set(given) - {"image"}:
            raise RequestError(
                "multi_modal_data must be a dictionary with image: a PIL.Image or a list of them; other media are not "
                "built yet.",
                param="multi_modal_data",
            )
        found = given.get("image")
        found = list(found) if isinstance(found, list | tuple) else [] if found is None else [found]
        self.check_number(len(found))
        return [normalized(image, self.config.max_pixels) for image in found]

    def open(self, given: Sequence[object]) -> list[Image]:
        """The pictures of a caller in the same process: URLs, which are fetched at once and waited for, and PIL.Images.
        Raises `RequestError`."""
        self.check_number(len(given))
        futures = {url: self._connector.fetch(url) for url in given if isinstance(url, str) and needs_fetching(url)}
        files = {url: future.result() for url, future in futures.items()}
        return [
            self.decode(one, files.get(one)) if isinstance(one, str) else normalized(one, self.config.max_pixels)
            for one in given
        ]

    async def fetch(self, urls: Sequence[str]) -> dict[str, bytes]:
        """The files of those of a prompt's URLs that say where one is. Raises `RequestError`."""
        self.check_number(len(urls))
        return await fetch_all(self._connector, urls)

    def decode(self, url: str, file: bytes | None) -> Image:
        """The picture of a data: URL, or of the file that was fetched from `url`. Raises `RequestError`."""
        if file is None:
            return from_url(url, self.config.max_bytes, self.config.max_pixels)
        return from_bytes(file, self.config.max_bytes, self.config.max_pixels)

    def check_number(self, count: int) -> None:
        """Raise `RequestError` for more pictures than a prompt may have."""
        if count > self.config.max_images:
            raise RequestError(
                f"the prompt has {count} pictures, and {self.config.max_images} are the most (--limit-mm-per-prompt).",
                param="messages",
            )

    def expand(
        self, token_ids: Sequence[int], images: Sequence[Image], salt: str | None
    ) -> tuple[list[int], tuple[MediaItem, ...], list[MediaInput]]:
        """A prompt with one placeholder a picture -> with one for each row of it, where those are, and what the tower
        reads. Raises `RequestError` if there are not as many placeholders as pictures."""
        placeholder = self.config.token_id
        places = [i for i, token in enumerate(token_ids) if token == placeholder]
        if len(places) != len(images):
            raise RequestError(
                f"the prompt has {len(places)} placeholders and {len(images)} pictures; each picture needs one.",
                param="prompt",
            )
        self._load()
        expanded: list[int] = []
        items: list[MediaItem] = []
        inputs: dict[bytes, MediaInput] = {}
        end = 0
        for place, image in zip(places, images, strict=True):
            digest = content_hash(image, self._settings, salt)
            if digest not in inputs:
                inputs[digest] = self._process(image, digest)
            num_tokens = inputs[digest].num_tokens
            expanded += token_ids[end:place]
            items.append(MediaItem(len(expanded), num_tokens, digest))
            expanded += [placeholder] * num_tokens
            end = place + 1
        return [*expanded, *token_ids[end:]], tuple(items), list(inputs.values())

    def _process(self, image: Image, digest: bytes) -> MediaInput:
        found = self._processor.image_processor(images=[image], return_tensors="np")
        values = np.ascontiguousarray(found["pixel_values"], np.float32)
        [num_tokens] = self._processor._get_num_multimodal_tokens([[image.height, image.width]])["num_image_tokens"]
        return MediaInput(digest, num_tokens, values.shape, values.tobytes())

    def _warm_up(self) -> None:
        try:
            self._load()
        except Exception as e:  # the first request with a picture gets it too
            logger.error("the processor of pictures cannot be loaded: %s", e)

    def _load(self) -> None:
        """Raises `LoadError`."""
        with self._lock:
            if self._processor is not None:
                return
            from transformers import AutoProcessor

            # Pillow's arithmetic, whether torchvision is installed or not: the same picture has the same rows.
            try:
                processor = AutoProcessor.from_pretrained(self.config.folder, backend="pil", trust_remote_code=False)
                processor._get_num_multimodal_tokens([[100, 100]])  # older checkpoints do not say how many
            except (OSError, TypeError, ValueError) as e:
                raise LoadError(f"the processor of pictures cannot be loaded: {str(e).splitlines()[0]}") from None
            self._settings = json.dumps(processor.image_processor.to_dict(), sort_keys=True, default=str)
            self._processor = processor
