"""Rows of a tower that a request brings in the place of a picture or a sound (`image_embeds`, `audio_embeds`): tensors
[tokens, hidden_size] as a tower and a projector make them, in base64 a file of `torch.save` or of safetensors.

A file is read without PyTorch and without running anything from it. Sizes are checked before values are looked at.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.config import MediaConfig
from octavo.errors import LoadError
from octavo.loading.mapped_file import MemoryFile
from octavo.loading.safetensors import parse_safetensors
from octavo.loading.torch_archive import read_torch_tensor
from octavo.media_kinds import KINDS
from octavo.multimodal.sound_decoder import MAX_CHANNELS

_FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The rows of one medium."""

    rows: NDArray[np.float32]  # [1 + D, tokens, hidden_size]
    grid: tuple[int, int, int] | None = None  # of patches, in time, height and width

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def content_hash(self, salt: str | None) -> bytes:
        """SHA-256 over all of it, and the salt that keeps tenants apart."""
        digest = hashlib.sha256(repr((salt or "", "embeddings", self.rows.shape, self.grid)).encode())
        digest.update(self.rows.data)
        return digest.digest()


class EmbeddingsReader:
    """Within the bounds of one kind of media of an engine."""

    def __init__(self, config: MediaConfig) -> None:
        self._config, self._kind = config, KINDS[config.kind]
        self._refusal = self._kind.refusal

    def is_one(self, given: object) -> bool:
        """Whether a value of `multi_modal_data` is the rows of one medium."""
        if isinstance(given, Mapping | Embeddings):
            return True
        shape: tuple[int, ...] = getattr(given, "shape", ())
        # Samples of a sound are [n] or [n, channels].
        return len(shape) == 2 and (self._kind.name != "audio" or shape[1] > MAX_CHANNELS)

    def read(self, given: object) -> Embeddings:
        """A tensor or an array [tokens, hidden_size], a file of such in base64, or one of these under the part's name
        beside `image_grid_thw`. Raises `RequestError`."""
        if isinstance(given, Embeddings):
            return given
        if not self._config.takes_embeddings:
            raise self._refusal("embeddings are taken in its place with --enable-mm-embeds only.")
        grid = None
        if isinstance(given, Mapping):
            known = {f"{self._kind.name}_embeds", "image_grid_thw"}
            if f"{self._kind.name}_embeds" not in given or set(given) - known:
                raise self._refusal(f"its embeddings must be a tensor, or an object with {', '.join(sorted(known))}.")
            grid = given.get("image_grid_thw")
            given = given[f"{self._kind.name}_embeds"]
        rows = self._rows(self._array(given))
        return Embeddings(rows, self._grid(grid))

    def _rows(self, found: NDArray[Any]) -> NDArray[np.float32]:
        parts, hidden, limit = self._config.num_parts, self._config.hidden_size, self._config.cache_tokens
        if found.ndim == 3 and found.shape[0] == 1:
            found = found[0]
        if found.ndim != 2 or found.shape[1] != parts * hidden or not 0 < found.shape[0] <= limit:
            raise self._refusal(
                f"its embeddings have the shape {list(found.shape)}; this model takes 1 to {limit} rows of "
                f"{parts * hidden} elements."
            )
        if found.dtype.name not in _FLOATS:
            raise self._refusal(f"its embeddings are of {found.dtype.name}; {', '.join(_FLOATS)} are taken.")
        with np.errstate(over="ignore"):
            rows = found.astype(np.float32)
        if not np.isfinite(rows).all():
            raise self._refusal("some of its embeddings are not finite numbers.")
        # A tower's rows for early layers lie behind its last ones.
        return np.ascontiguousarray(rows.reshape(-1, parts, hidden).swapaxes(0, 1))

    def _grid(self, given: object) -> tuple[int, int, int] | None:
        if given is None:
            if self._config.has_grids:
                raise self._refusal("its embeddings need image_grid_thw, which their positions follow from.")
            return None
        found = self._array(given).reshape(-1)
        if not self._config.has_grids or len(found) != 3 or found.dtype.kind not in "iu" or not (found > 0).all():
            raise self._refusal("its image_grid_thw must be three numbers of patches, of models that have grids.")
        time, height, width = (int(one) for one in found)
        return time, height, width

    def _array(self, given: object) -> NDArray[Any]:
        if isinstance(given, str):
            return self._from_base64(given)
        try:
            if type(given).__module__ == "torch":  # which has types that numpy lacks
                tensor: Any = given
                tensor = tensor.detach().cpu()
                is_bfloat16 = str(tensor.dtype) == "torch.bfloat16"
                return np.asarray(tensor.float().numpy().astype(ml_dtypes.bfloat16) if is_bfloat16 else tensor.numpy())
            return np.asarray(given)
        except Exception:
            raise self._refusal("its embeddings are no tensor.") from None

    def _from_base64(self, given: str) -> NDArray[Any]:
        if len(given) // 4 * 3 - 2 > self._config.max_bytes:
            raise self._kind.too_many_bytes(self._config.max_bytes)
        try:
            data = base64.b64decode(given, validate=True)
            if data[:2] == b"PK":
                return read_torch_tensor(data)
            file = parse_safetensors(MemoryFile(data))
            [name] = file.tensors
            return file.array(name)
        except (binascii.Error, ValueError, LoadError, RecursionError):
            raise self._refusal(
                "its embeddings are no base64 of one tensor as torch.save or safetensors write it."
            ) from None
