"""Prompts that are embeddings (`prompt_embeds`): a tensor [tokens, hidden_size], as transformers' embedding makes it of
tokens. To the engine they are a medium whose rows stand in the place of a prompt's tokens, all of them.
"""

from __future__ import annotations

from octavo.config import PromptEmbedsConfig
from octavo.errors import RequestError
from octavo.multimodal.embeddings import Embeddings, float_rows, read_tensor
from octavo.request import EMBEDDINGS, MediaArray, MediaInput, MediaItem


class PromptEmbedsReader:
    """Of one model."""

    def __init__(self, config: PromptEmbedsConfig) -> None:
        self._config = config

    def take(self, given: object, salt: str | None) -> tuple[MediaItem, MediaInput]:
        """A tensor, an array, or a file of one in base64 -> where its rows stand, and these. Raises `RequestError`."""
        try:
            rows = float_rows(read_tensor(given), self._config.hidden_size, self._config.max_rows)[None]
        except ValueError as e:
            raise RequestError(f"prompt_embeds {e}", param="prompt_embeds") from None
        digest, count = Embeddings(rows).content_hash("prompt", salt), rows.shape[1]
        array = MediaArray(EMBEDDINGS, rows.dtype.name, rows.shape, rows.tobytes())
        return MediaItem(0, count, digest), MediaInput(digest, count, (array,))
