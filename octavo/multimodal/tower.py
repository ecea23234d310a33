"""Computes the rows of pictures, sounds and videos: the output of the model's tower and projector, by transformers on
the decoder's device. Rows are kept on the host for later turns. This module runs in the core; `model_processor`
runs in the front end.
"""

import inspect
import logging
import os
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.errors import LoadError, RequestError
from octavo.models.multimodal_models import OTHER_NAMES
from octavo.request import EMBEDDINGS, MediaInput

logger = logging.getLogger(__name__)

_NICENESS = 10  # added niceness of the tower's threads
_OF_DECODER = re.compile(r"\b(language_model|text_model|lm_head)\b")
Rows = NDArray[np.float32]  # [1 + D, tokens, H]: rows[0] replaces embeddings, rows[1 + i] is added after layer i


class Tower:
    """The tower and the projector of a checkpoint, without its decoder."""

    def __init__(
        self, folder: str, kind: str, multiplier: float = 1.0, device: str = "cpu", dtype: str = "float32"
    ) -> None:
        """Load the tower for media of `kind`, "image" or "audio". Its rows are multiplied by `multiplier`. It computes
        in `dtype` on torch's `device`, such as "cpu" or "cuda:0". Raises `LoadError`."""
        # Waiting threads of torch would spin and take cores from the native kernels. Torch reads this when they start.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        import torch
        import transformers

        self._dtype: Any = getattr(torch, dtype)
        try:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            is_quantized = hasattr(config, "quantization_config")
            if is_quantized:  # only the decoder is quantized, and transformers does not load it
                del config.quantization_config
            text = getattr(config, "text_config", config)
            text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
            for name in ("layer_types", "mlp_layer_types"):  # lists with an entry for each layer
                if getattr(text, name, None):
                    setattr(text, name, [])
            for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):  # Gemma 4's
                if getattr(text, name, None):
                    setattr(text, name, 0)
            if kind == "image" and getattr(config, "audio_config", None) is not None:
                config.audio_config = None  # the other tower of models with two
            name = config.architectures[0]
            builder = getattr(transformers, OTHER_NAMES.get(name, name))
            with quiet(transformers.logging):  # transformers would report the decoder's weights as unused
                model, report = builder.from_pretrained(
                    folder, config=config, dtype=self._dtype, ignore_mismatched_sizes=True, output_loading_info=True,
                    # No such folder: otherwise transformers would load the decoder's adapters here.
                    adapter_kwargs={"subfolder": "none"},
                )  # fmt: skip
        except (OSError, ValueError, AttributeError) as e:
            raise LoadError(f"the tower of {folder} cannot be loaded: {str(e).splitlines()[0]}") from None
        if missing := sorted(name for name in report["missing_keys"] if not _OF_DECODER.search(name)):
            raise LoadError(f"{folder} has no tensor {missing[0]}, which its tower calls for.")
        self._model: Any = getattr(model.eval(), "model", model)
        for name in ("language_model", "text_model"):
            if hasattr(self._model, name):
                setattr(self._model, name, None)
        if is_quantized:
            _check_floats(self._model, report["unexpected_keys"], folder)
        self._multiplier, self._device = multiplier, torch.device(device)
        features = partial(_of_qwen2_audio, self._model)
        if config.model_type == "mllama":
            features = partial(_of_mllama, self._model)
        to_device(self._model, self._device)
        self._features = getattr(self._model, f"get_{kind}_features", None) or features

    def rows(self, given: MediaInput) -> Rows:
        """Return the rows of one medium. Media are computed one at a time, so that their bits do not depend on other
        requests. Raises `RequestError` if the device has no memory for the medium."""
        with memory_refused():
            return self._rows(given)

    def _rows(self, given: MediaInput) -> Rows:
        import torch

        if given.arrays[0].name == EMBEDDINGS:
            return _brought(given, self._multiplier)
        is_video = any(array.name == "pixel_values_videos" for array in given.arrays)
        compute = self._model.get_video_features if is_video else self._features
        takes = inspect.signature(compute).parameters
        arguments = {}
        for array in given.arrays:
            if array.name in takes:
                values = torch.tensor(
                    np.frombuffer(array.values, array.dtype).reshape(array.shape), device=self._device
                )
                arguments[array.name] = values.to(self._dtype) if values.is_floating_point() else values
        with torch.inference_mode():
            features = compute(**arguments, return_dict=True)
        # Each part is a tensor [tiles, tokens, H], or a list of tensors with a number of tokens for each picture; for
        # sounds also [tokens, H].
        pooled = getattr(features, "pooler_output", None)
        if pooled is None:  # Llama 4 returns the output of the tower alone
            with torch.inference_mode():
                pooled = self._model.multi_modal_projector(features.last_hidden_state)
        parts = [pooled, *(getattr(features, "deepstack_features", None) or ())]
        tensors = [part if isinstance(part, torch.Tensor) else torch.cat(list(part)) for part in parts]
        rows = torch.stack([one.reshape(-1, one.shape[-1]) for one in tensors]).float().mul(self._multiplier)
        kept = next((array for array in given.arrays if array.name == "video_compression_mask"), None)
        if kept is not None:  # VideoLLaMA 3 drops rows of patches like those of the frame before
            rows = rows[:, torch.from_numpy(np.frombuffer(kept.values, bool).copy()).to(rows.device)]
        found: Rows = rows.cpu().numpy()
        if found.shape[1] != given.num_tokens:
            raise ValueError(f"a tower gave {found.shape[1]} rows for {given.num_tokens} tokens")
        return found


def to_device(model: Any, device: Any) -> None:
    """Move a torch network to a device, and wait until it is there. Other threads compute on torch's default stream; a
    step has a stream of its own, which does not wait for the default stream."""
    import torch

    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # convolutions in float32, as on the CPU
        model.to(device)
        torch.cuda.synchronize(device)


def _of_qwen2_audio(model: Any, input_features: Any, feature_attention_mask: Any, return_dict: bool) -> Any:
    """Return Qwen2-Audio's rows of a sound, [tokens, H]. Its class in transformers 5 computes them only within a whole
    forward pass."""
    import torch
    from transformers.masking_utils import create_bidirectional_mask
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    tower, device = model.audio_tower, input_features.device
    [num_seen], [num_rows] = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    num_positions = (input_features.shape[-1] - 2) // 2 + 1  # the tower's convolutions leave as many
    inputs = input_features.new_zeros(1, num_positions, 1)
    is_sound = (torch.arange(num_positions, device=device) < num_seen).long()[None]
    mask = create_bidirectional_mask(config=tower.config, inputs_embeds=inputs, attention_mask=is_sound)
    seen = tower(input_features, attention_mask=mask, return_dict=return_dict).last_hidden_state
    return BaseModelOutputWithPooling(pooler_output=model.multi_modal_projector(seen)[0, :num_rows])


def _of_mllama(model: Any, pixel_values: Any, aspect_ratio_ids: Any, aspect_ratio_mask: Any, return_dict: bool) -> Any:
    """Return Llama 3.2 Vision's rows of a picture, [tokens, H], without padding tiles. Its class in transformers 5
    computes them only within a whole forward pass."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    seen = model.vision_model(pixel_values, aspect_ratio_ids, aspect_ratio_mask, return_dict=return_dict)
    tiles = seen.last_hidden_state[0, 0, : int(aspect_ratio_mask.sum())]
    return BaseModelOutputWithPooling(pooler_output=model.multi_modal_projector(tiles).flatten(0, 1))


def _check_floats(model: Any, unexpected: Iterable[str], folder: str) -> None:
    """Raise `LoadError` if the tower is quantized: one of its matrices has tensors that a matrix of floats has not."""
    matrices = [name for name, _ in model.named_parameters() if name.endswith(".weight")]
    for name in sorted(unexpected):
        if any(matrix.removesuffix("weight") in name for matrix in matrices):
            raise LoadError(f"{folder}: the tower is quantized too (tensor {name}), which is not built.")


@contextmanager
def quiet(log: Any) -> Iterator[None]:
    """Reduce transformers' logger to errors, without progress bars."""
    verbosity, shows_progress = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if shows_progress:
            log.enable_progress_bar()


@contextmanager
def memory_refused() -> Iterator[None]:
    """Raise `RequestError` if the device runs out of memory."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as e:
        torch.cuda.empty_cache()
        raise RequestError(
            f"the tower ran out of device memory ({str(e).splitlines()[0]}); send something smaller, or serve with a "
            "lower --gpu-memory-utilization.",
            status=503,
        ) from None


class ReceivedRows:
    """The rows of media on a worker without a tower. Only the first worker has the tower."""

    def __init__(self) -> None:
        self._rows: dict[bytes, Rows] = {}

    def take(self, rows: Mapping[bytes, Rows], in_use: set[bytes]) -> None:
        """Add `rows`, by content hash, of pictures of the next plan. Older rows that are not `in_use` are dropped."""
        kept = {digest: found for digest, found in self._rows.items() if digest in in_use}
        self._rows = {**kept, **rows}

    def rows(self, content_hash: bytes) -> Rows:
        return self._rows[content_hash]


class BroughtRows:
    """Replaces a tower where requests bring rows: multiplies these rows by `multiplier`."""

    def __init__(self, multiplier: float) -> None:
        self._multiplier = multiplier

    def rows(self, given: MediaInput) -> Rows:
        return _brought(given, self._multiplier)


def _brought(given: MediaInput, multiplier: float) -> Rows:
    [array] = given.arrays
    return np.frombuffer(array.values, np.float32).reshape(array.shape) * np.float32(multiplier)


class RowMaker(Protocol):
    """Computes rows of media: a tower, an encoder or `BroughtRows`."""

    def rows(self, given: MediaInput) -> Rows: ...


def _yield_to_steps() -> None:
    """Lower the priority of the calling thread and its children, because a step waits for all its threads, including
    one that has no core. Only Linux has priorities of threads."""
    if sys.platform == "linux":
        os.nice(_NICENESS)


class TowerCache:
    """A cache of pictures' rows, by content hash. It keeps the rows of running requests, and others within
    `max_tokens`. A thread makes the rows, one picture after the other; all other methods belong to the core's
    thread."""

    def __init__(self, tower: RowMaker, max_tokens: int) -> None:
        self._tower, self._max_tokens = tower, max_tokens
        self._entries: OrderedDict[bytes, tuple[int, Future[Rows]]] = OrderedDict()  # least recently used first
        self._thread = ThreadPoolExecutor(1, "octavo-tower", _yield_to_steps)
        self.num_runs = 0  # of the tower
        self._num_queries = self._num_hits = 0
        self.is_making = False  # written by the tower's thread
        self._seconds = self._told_seconds = 0.0  # written by the tower's thread; by the core's thread

    @property
    def num_tokens(self) -> int:
        return sum(count for count, _ in self._entries.values())

    def prepare(self, inputs: Sequence[MediaInput], in_use: Callable[[], set[bytes]]) -> list[Future[Rows]] | None:
        """Start the rows of a request's pictures and return their futures. They are kept while they are `in_use`, which
        is called only if room is short. Return None if the rows in use leave too little room; without rows in use there
        is always room."""
        wanted = {one.content_hash: one.num_tokens for one in inputs}
        counts = {digest: count for digest, (count, _) in self._entries.items()}
        num_tokens = sum((counts | wanted).values())
        if num_tokens > self._max_tokens:
            kept = in_use()
            used = {digest: count for digest, count in counts.items() if digest in kept}
            if used and sum((used | wanted).values()) > self._max_tokens:
                return None
            for digest in counts:  # the least recently used first
                if num_tokens <= self._max_tokens:
                    break
                if digest not in kept and digest not in wanted:
                    num_tokens -= counts[digest]
                    self._entries.pop(digest)[1].cancel()
        found = []
        for one in inputs:
            entry = self._entries.get(one.content_hash)
            self._num_queries += 1
            self._num_hits += entry is not None
            if entry is None or (entry[1].done() and (entry[1].cancelled() or entry[1].exception() is not None)):
                self.num_runs += 1
                entry = one.num_tokens, self._thread.submit(self._make, one)
                self._entries[one.content_hash] = entry
            self._entries.move_to_end(one.content_hash)
            found.append(entry[1])
        return found

    def try_out(self, given: MediaInput) -> None:
        """Compute rows in the tower's thread and discard them."""
        self._thread.submit(self._tower.rows, given).result()

    def take_stats(self) -> tuple[int, int, float]:
        """See `LocalExecutor.take_media_stats`."""
        seconds = self._seconds
        found = self._num_queries, self._num_hits, seconds - self._told_seconds
        self._num_queries, self._num_hits, self._told_seconds = 0, 0, seconds
        return found

    def _make(self, given: MediaInput) -> Rows:
        start = time.monotonic()
        self.is_making = True
        try:
            return self._tower.rows(given)
        finally:
            self.is_making = False
            self._seconds += time.monotonic() - start

    def rows(self, content_hash: bytes) -> Rows:
        """Return the rows of a picture that is in use and ready."""
        return self._entries[content_hash][1].result()
