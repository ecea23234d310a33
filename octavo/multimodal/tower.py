"""What a model sees of a picture, or hears of a sound: the rows that its tower and projector make, which transformers
computes on the device of the decoder, and which are kept on the host for later turns. The core's half of
such a model; the other is `processor`.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

_NICENESS = 10  # of the tower's threads
_OF_DECODER = re.compile(r"\b(language_model|text_model|lm_head)\b")
Rows = NDArray[np.float32]  # [1 + D, tokens, H]: in the place of embeddings, and after each of the first D layers


class Tower:
    """The tower and the projector of a checkpoint, without its decoder."""

    def __init__(
        self,
        folder: str,
        kind: str,
        multiplier: float = 1.0,
        device: str = "cpu",
        dtype: str = "float32",
        hears_too: bool = False,
    ) -> None:
        """Of media of `kind`, "image" or "audio", or of both where it `hears_too`; its rows are multiplied by
        `multiplier`. It computes in `dtype` on torch's `device`, as "cpu" or "cuda:0". Raises `LoadError`."""
        # torch's threads would wait by spinning, and take the cores from the native kernels': read when they start.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        import torch
        import transformers

        self._dtype: Any = getattr(torch, dtype)
        try:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            is_quantized = hasattr(config, "quantization_config")
            if is_quantized:  # the decoder: its tensors are none of transformers' concern
                del config.quantization_config
            text = getattr(config, "text_config", config)
            text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
            for name in ("layer_types", "mlp_layer_types"):  # one entry a layer
                if getattr(text, name, None):
                    setattr(text, name, [])
            for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):  # Gemma 4's
                if getattr(text, name, None):
                    setattr(text, name, 0)
            is_phi4 = config.model_type == "phi4_multimodal"  # which is built of both only
            if kind == "image" and not is_phi4 and getattr(config, "audio_config", None) is not None:
                config.audio_config = None  # the other tower of models with two
            name = config.architectures[0]
            builder = getattr(transformers, OTHER_NAMES.get(name, name))
            with quiet(transformers.logging):  # it would report the decoder's weights as left over
                model, report = builder.from_pretrained(
                    folder, config=config, dtype=self._dtype, ignore_mismatched_sizes=True, output_loading_info=True,
                    adapter_kwargs={"subfolder": "none"},  # of the decoder, for which transformers would look here
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
        if is_phi4:
            extend = self._model.embed_tokens_extend
            features = partial(_of_phi4_multimodal, extend)
            if not hears_too:
                extend.audio_embed = None
            for layer in extend.image_embed.img_processor.encoder.layers:
                layer.self_attn.is_causal = False  # which SigLIP's is not; torch's would be of tiles without a mask
        if config.model_type == "mllama":
            features = partial(_of_mllama, self._model)
        to_device(self._model, self._device)
        self._features = getattr(self._model, f"get_{kind}_features", None) or features

    def rows(self, given: MediaInput) -> Rows:
        """Of one medium at a time: their bits must not depend on other requests. Raises `RequestError` where the device
        has no memory for it."""
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
        # Each one tensor [tiles, tokens, H], or a list of such of its own number of tokens a picture;
        # of sounds also [tokens, H].
        pooled = getattr(features, "pooler_output", None)
        if pooled is None:  # Llama 4's, of the tower alone
            with torch.inference_mode():
                pooled = self._model.multi_modal_projector(features.last_hidden_state)
        parts = [pooled, *(getattr(features, "deepstack_features", None) or ())]
        tensors = [part if isinstance(part, torch.Tensor) else torch.cat(list(part)) for part in parts]
        rows = torch.stack([one.reshape(-1, one.shape[-1]) for one in tensors]).float().mul(self._multiplier)
        kept = next((array for array in given.arrays if array.name == "video_compression_mask"), None)
        if kept is not None:  # VideoLLaMA 3's: what a frame has like the one before reaches no token
            rows = rows[:, torch.from_numpy(np.frombuffer(kept.values, bool).copy()).to(rows.device)]
        found: Rows = rows.cpu().numpy()
        if found.shape[1] != given.num_tokens:
            raise ValueError(f"a tower gave {found.shape[1]} rows for {given.num_tokens} tokens")
        return found


def to_device(model: Any, device: Any) -> None:
    """Move a network of torch, which is then there for threads of any stream. Steps have a stream of their own: what
    other threads compute goes to torch's default one, which theirs does not wait for."""
    import torch

    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # convolutions in float32, as on the CPU
        model.to(device)
        torch.cuda.synchronize(device)


def _of_qwen2_audio(model: Any, input_features: Any, feature_attention_mask: Any, return_dict: bool) -> Any:
    """What Qwen2-Audio has of a sound, [tokens, H]; its class in transformers 5 makes that only within a whole step."""
    import torch
    from transformers.masking_utils import create_bidirectional_mask
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    tower, device = model.audio_tower, input_features.device
    [num_seen], [num_rows] = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    num_positions = (input_features.shape[-1] - 2) // 2 + 1  # as many as the tower's convolutions leave
    inputs = input_features.new_zeros(1, num_positions, 1)
    is_sound = (torch.arange(num_positions, device=device) < num_seen).long()[None]
    mask = create_bidirectional_mask(config=tower.config, inputs_embeds=inputs, attention_mask=is_sound)
    seen = tower(input_features, attention_mask=mask, return_dict=return_dict).last_hidden_state
    return BaseModelOutputWithPooling(pooler_output=model.multi_modal_projector(seen)[0, :num_rows])


def _of_phi4_multimodal(
    extend: Any,
    image_pixel_values: Any = None,
    image_attention_mask: Any = None,
    image_sizes: Any = None,
    num_img_tokens: Any = None,
    audio_input_features: Any = None,
    is_beside_pictures: Any = None,
    return_dict: bool = True,
) -> Any:
    """What Phi-4-multimodal has of a picture, or of a sound, [1, tokens, H]; its class in transformers 5 makes that
    only within a whole step."""
    import torch
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    if audio_input_features is None:
        embed, config = extend.image_embed, extend.config
        tokens = image_sizes.new_full((1, int(num_img_tokens)), config.vision_config.image_token_id)
        rows = embed(
            tokens, image_pixel_values.new_zeros(*tokens.shape, config.hidden_size), image_pixel_values, image_sizes,
            image_attention_mask,
        )  # fmt: skip
        return BaseModelOutputWithPooling(pooler_output=rows)
    embed = extend.audio_embed
    mode = "speech" if is_beside_pictures is None else "vision_speech"
    up, down = (getattr(embed, f"{name}_proj_for_{mode}") for name in ("up", "down"))
    heard = up(embed.encoder(audio_input_features, None))
    return BaseModelOutputWithPooling(pooler_output=down(torch.nn.functional.gelu(heard)))


def _of_mllama(model: Any, pixel_values: Any, aspect_ratio_ids: Any, aspect_ratio_mask: Any, return_dict: bool) -> Any:
    """What Llama 3.2 Vision has of a picture, [tokens, H], without tiles of padding; its class in transformers 5 makes
    that only within a whole step."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    seen = model.vision_model(pixel_values, aspect_ratio_ids, aspect_ratio_mask, return_dict=return_dict)
    tiles = seen.last_hidden_state[0, 0, : int(aspect_ratio_mask.sum())]
    return BaseModelOutputWithPooling(pooler_output=model.multi_modal_projector(tiles).flatten(0, 1))


def _check_floats(model: Any, unexpected: Iterable[str], folder: str) -> None:
    """Raise `LoadError` if a matrix of the tower comes with tensors that a matrix of floats does not have."""
    matrices = [name for name, _ in model.named_parameters() if name.endswith(".weight")]
    for name in sorted(unexpected):
        if any(matrix.removesuffix("weight") in name for matrix in matrices):
            raise LoadError(f"{folder}: the tower is quantized too (tensor {name}), which is not built.")


@contextmanager
def quiet(log: Any) -> Iterator[None]:
    """Let transformers' logger say errors only."""
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
    """Raise `RequestError` where the device has no memory left."""
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
    """The rows of media on workers other than the first, which has the tower."""

    def __init__(self) -> None:
        self._rows: dict[bytes, Rows] = {}

    def take(self, rows: Mapping[bytes, Rows], in_use: set[bytes]) -> None:
        """`rows` by content, of pictures of the next plan. Those that neither are among them nor `in_use` go."""
        kept = {digest: found for digest, found in self._rows.items() if digest in in_use}
        self._rows = {**kept, **rows}

    def rows(self, content_hash: bytes) -> Rows:
        return self._rows[content_hash]


class BroughtRows:
    """In the place of a tower: rows that requests bring, which are multiplied by `multiplier`."""

    def __init__(self, multiplier: float) -> None:
        self._multiplier = multiplier

    def rows(self, given: MediaInput) -> Rows:
        return _brought(given, self._multiplier)


def _brought(given: MediaInput, multiplier: float) -> Rows:
    [array] = given.arrays
    return np.frombuffer(array.values, np.float32).reshape(array.shape) * np.float32(multiplier)


class RowMaker(Protocol):
    """What makes rows of media."""

    def rows(self, given: MediaInput) -> Rows: ...


def _yield_to_steps() -> None:
    """Lower the priority of the calling thread and its children: the threads of a step wait
    for each other, and for each that is not running. Linux alone has priorities of threads."""
    if sys.platform == "linux":
        os.nice(_NICENESS)


class TowerCache:
    """The rows of pictures, by content: those of requests that are under way, and others as long as there is room for
    so many tokens. Made in a thread, one picture after the other; everything else is the core's thread's."""

    def __init__(self, tower: RowMaker, max_tokens: int) -> None:
        self._tower, self._max_tokens = tower, max_tokens
        self._entries: OrderedDict[bytes, tuple[int, Future[Rows]]] = OrderedDict()  # the latest used last
        self._thread = ThreadPoolExecutor(1, "octavo-tower", _yield_to_steps)
        self.num_runs = 0  # of the tower
        self._num_queries = self._num_hits = 0
        self.is_making = False  # in the tower's thread
        self._seconds = self._told_seconds = 0.0  # of the tower's thread, and of the core's

    @property
    def num_tokens(self) -> int:
        return sum(count for count, _ in self._entries.values())

    def prepare(self, inputs: Sequence[MediaInput], in_use: set[bytes]) -> list[Future[Rows]] | None:
        """The rows of a request's pictures, which are not forgotten while they are `in_use`; None where there is no
        room for them beside those that are now. A request that is alone always has room."""
        wanted = {one.content_hash: one.num_tokens for one in inputs}
        used = {digest: count for digest, (count, _) in self._entries.items() if digest in in_use}
        if used and sum((used | wanted).values()) > self._max_tokens:
            return None
        for digest in list(self._entries):
            if sum((self._counts() | wanted).values()) <= self._max_tokens:
                break
            if digest not in in_use and digest not in wanted:
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
        """Make rows that nobody keeps, where others will be made."""
        self._thread.submit(self._tower.rows, given).result()

    def take_stats(self) -> tuple[int, int, float]:
        """See `Executor.take_media_stats`."""
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
        """Of a picture that is in use, and ready."""
        return self._entries[content_hash][1].result()

    def _counts(self) -> dict[bytes, int]:
        return {digest: count for digest, (count, _) in self._entries.items()}
