"""Prompts given as embeddings (`prompt_embeds`): a tensor [tokens, hidden_size], like the output of transformers'
embedding. The engine treats them as a medium whose rows replace all tokens of the prompt.
"""

from octavo.config import PromptEmbedsConfig
from octavo.errors import RequestError
from octavo.multimodal.embeddings import Embeddings, float_rows, read_tensor
from octavo.request import EMBEDDINGS, MediaArray, MediaInput, MediaItem


class PromptEmbedsReader:
    """Reads embedded prompts for one model."""

    def __init__(self, config: PromptEmbedsConfig) -> None:
        self._config = config

    def take(self, given: object, salt: str | None) -> tuple[MediaItem, MediaInput]:
        """Return the item and the input of a tensor, an array, or base64 of a tensor file: the place of the rows, and
        the rows. Raises `RequestError`."""
        try:
            rows = float_rows(read_tensor(given), self._config.hidden_size, self._config.max_rows)[None]
        except ValueError as e:
            raise RequestError(f"prompt_embeds {e}", param="prompt_embeds") from None
        digest, count = Embeddings(rows).content_hash("prompt", salt), rows.shape[1]
        array = MediaArray(EMBEDDINGS, rows.dtype.name, rows.shape, rows.tobytes())
        return MediaItem(0, count, digest), MediaInput(digest, count, (array,))
