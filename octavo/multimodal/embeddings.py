"""Embeddings that a request brings in place of a picture, a sound or a video (`image_embeds`, `audio_embeds`,
`video_embeds`). They are tensors [tokens, hidden_size] as a tower and a projector compute them, sent as base64 of a
`torch.save` file or a safetensors file.

Files are read without PyTorch, and no code in them runs. Sizes are checked before values.
"""

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
from octavo.media_kinds import KINDS, VIDEO
from octavo.multimodal.sound_decoder import MAX_CHANNELS
from octavo.multimodal.videos import RATES

_FLOATS = ("float32", "float16", "bfloat16", "float64")
_OF_VIDEO = ("fps", "frames_indices", "total_num_frames", "second_per_grid_ts")  # keys of a video, with rows and grid
_MAX_FRAMES = 1 << 20


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """The positions, in the original video, of the frames that the rows were computed from."""

    rate: float | None = None  # frames a second of the original video; None: not known
    indices: tuple[int, ...] | None = None  # position of each frame, below `total`; None: all frames were used
    total: int | None = None
    grid_s: float | None = None  # seconds from one grid place to the next; None: computed from the other fields


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The rows of one medium."""

    rows: NDArray[np.float32]  # [1 + D, tokens, hidden_size]
    grid: tuple[int, int, int] | None = None  # numbers of patches in time, height and width
    times: FrameTimes = FrameTimes()  # used only for videos

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def content_hash(self, kind: str, salt: str | None) -> bytes:
        """Return the SHA-256 of the embeddings, the kind of medium, and the salt that keeps tenants apart."""
        digest = hashlib.sha256(repr((salt or "", "embeddings", kind, self.rows.shape, self.grid, self.times)).encode())
        digest.update(self.rows.data)
        return digest.digest()


class EmbeddingsReader:
    """Reads embeddings within an engine's bounds for one kind of media."""

    def __init__(self, config: MediaConfig) -> None:
        self._config, self._kind = config, KINDS[config.kind]
        self._refusal = self._kind.refusal

    def is_one(self, given: object) -> bool:
        """Return whether a value of `multi_modal_data` is the embeddings of one medium."""
        if isinstance(given, Mapping | Embeddings):
            return True
        if self._kind is VIDEO:
            return False  # an array holds frames
        shape: tuple[int, ...] = getattr(given, "shape", ())
        # Samples of a sound are [n] or [n, channels].
        return len(shape) == 2 and (self._kind.name != "audio" or shape[1] > MAX_CHANNELS)

    def read(self, given: object) -> Embeddings:
        """Return the embeddings in a value of a request. The value is a tensor or an array [tokens, hidden_size],
        base64 of a file with one, or a mapping. A mapping has one of these under "image_embeds" or "audio_embeds", and
        `image_grid_thw`; for a video under "video_embeds", with `video_grid_thw` and the times of its frames. Raises
        `RequestError`."""
        if isinstance(given, Embeddings):
            return given
        if not self._config.takes_embeddings:
            raise self._refusal("embeddings are taken in its place with --enable-mm-embeds only.")
        grid, times = None, FrameTimes()
        if self._kind is VIDEO and not self._config.has_grids:
            raise self._refusal("embeddings need a model whose positions follow from grids.")
        if isinstance(given, Mapping):
            known = {f"{self._kind.name}_embeds", self._grid_name, *(_OF_VIDEO if self._kind is VIDEO else ())}
            if f"{self._kind.name}_embeds" not in given or set(given) - known:
                raise self._refusal(f"its embeddings must be a tensor, or an object with {', '.join(sorted(known))}.")
            grid = given.get(self._grid_name)
            times = self._times(given) if self._kind is VIDEO else times
            given = given[f"{self._kind.name}_embeds"]
        try:
            rows = self._rows(given)
        except ValueError as e:
            raise self._refusal(f"its embeddings {e}") from None
        return Embeddings(rows, self._grid(grid), times)

    @property
    def _grid_name(self) -> str:
        return "video_grid_thw" if self._kind is VIDEO else "image_grid_thw"

    def _times(self, given: Mapping[Any, Any]) -> FrameTimes:
        said: list[Any] = [given.get(name) for name in _OF_VIDEO]
        rate, indices, total, grid_s = said
        if isinstance(grid_s, list | tuple) and len(grid_s) == 1:  # vLLM's form: one number for each video
            grid_s = grid_s[0]
        elif getattr(grid_s, "shape", None) in ((), (1,)):
            grid_s = grid_s.item()
        for name, number in (("fps", rate), ("second_per_grid_ts", grid_s)):
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if number is not None and not (is_number and RATES[0] <= number <= RATES[1]):
                raise self._refusal(f"its {name} must be a number from {RATES[0]:g} to {RATES[1]:g}.")
        if total is not None and (type(total) is not int or not 0 < total <= _MAX_FRAMES):
            raise self._refusal(f"its total_num_frames must be a number of frames, up to {_MAX_FRAMES}.")
        if indices is not None:
            limit = _MAX_FRAMES if total is None else total
            if not isinstance(indices, list | tuple) or not all(type(i) is int and 0 <= i < limit for i in indices):
                raise self._refusal("its frames_indices must be a list of places of its total_num_frames.")
            indices = tuple(indices)
        return FrameTimes(rate, indices, total, grid_s)

    def _rows(self, given: object) -> NDArray[np.float32]:
        parts, hidden = self._config.num_parts, self._config.hidden_size
        if isinstance(given, str) and len(given) // 4 * 3 - 2 > self._config.max_bytes:
            raise self._kind.too_many_bytes(self._config.max_bytes)
        rows = float_rows(read_tensor(given), parts * hidden, self._config.cache_tokens)
        # Each row has the tower's last output first, then the parts for early layers.
        return np.ascontiguousarray(rows.reshape(-1, parts, hidden).swapaxes(0, 1))

    def _grid(self, given: object) -> tuple[int, int, int] | None:
        if given is None:
            if self._config.has_grids:
                raise self._refusal(f"its embeddings need {self._grid_name}, which their positions follow from.")
            return None
        try:
            found = read_tensor(given).reshape(-1)
        except ValueError as e:
            raise self._refusal(f"the numbers of its {self._grid_name} {e}") from None
        if not self._config.has_grids or len(found) != 3 or found.dtype.kind not in "iu" or not (found > 0).all():
            raise self._refusal(f"its {self._grid_name} must be three numbers of patches, of models that have grids.")
        time, height, width = (int(one) for one in found)
        return time, height, width


def read_tensor(given: object) -> NDArray[Any]:
    """Return the array in a tensor, an array, or base64 of a tensor file. Raises `ValueError` with a text that
    completes the sentence "the embeddings ..."."""
    if isinstance(given, str):
        return _from_base64(given)
    try:
        if type(given).__module__ == "torch":  # torch has types that numpy lacks
            tensor: Any = given
            tensor = tensor.detach().cpu()
            is_bfloat16 = str(tensor.dtype) == "torch.bfloat16"
            return np.asarray(tensor.float().numpy().astype(ml_dtypes.bfloat16) if is_bfloat16 else tensor.numpy())
        return np.asarray(given)
    except Exception:
        raise ValueError("are no tensor.") from None


def float_rows(found: NDArray[Any], width: int, limit: int) -> NDArray[np.float32]:
    """Return the array as float32 rows [N, width], N up to `limit`. Raises `ValueError` like `read_tensor`."""
    if found.ndim == 3 and found.shape[0] == 1:
        found = found[0]
    if found.ndim != 2 or found.shape[1] != width or not 0 < found.shape[0] <= limit:
        raise ValueError(f"have the shape {list(found.shape)}; this model takes 1 to {limit} rows of {width} elements.")
    if found.dtype.name not in _FLOATS:
        raise ValueError(f"are of {found.dtype.name}; {', '.join(_FLOATS)} are taken.")
    with np.errstate(over="ignore"):
        rows = found.astype(np.float32)
    if not np.isfinite(rows).all():
        raise ValueError("have some that are not finite numbers.")
    return rows


def _from_base64(given: str) -> NDArray[Any]:
    try:
        data = base64.b64decode(given, validate=True)
        if data[:2] == b"PK":
            return read_torch_tensor(data)
        file = parse_safetensors(MemoryFile(data))
        [name] = file.tensors
        return file.array(name)
    except (binascii.Error, ValueError, LoadError, RecursionError):
        raise ValueError("are not base64 of one tensor as torch.save or safetensors write it.") from None


def in_place_of(
    processor: Any, grid: tuple[int, int, int], times: FrameTimes, positions_per_s: float
) -> tuple[str, float]:
    """Return the prompt text that stands for a video's rows, and the distance in positions between its places in time.
    `grid` counts patches. Raises `RequestError`."""
    from transformers.video_utils import VideoMetadata

    merged = processor.video_processor.temporal_patch_size
    indices = tuple(range(grid[0] * merged)) if times.indices is None else times.indices
    if -(-len(indices) // merged) != grid[0]:
        raise VIDEO.refusal(
            f"its frames_indices are {len(indices)}, and the {grid[0]} places in time of its video_grid_thw are made "
            f"of {merged} frames each."
        )
    total = times.total or max(indices) + 1
    metadata = VideoMetadata(total_num_frames=total, fps=times.rate, frames_indices=list(indices))
    text = processor.replace_video_token({"video_grid_thw": np.array([grid]), "video_metadata": [metadata]}, 0)
    if "second_per_grid_ts" not in processor.model_input_names:
        return text, 1.0
    grid_s = times.grid_s
    if grid_s is None:
        grid_s = 1.0 if times.rate is None else merged / metadata.sampled_fps
    return text, float(np.float32(positions_per_s) * np.float32(grid_s))
