"""Named tensors of a checkpoint, one at a time: in the type that the model computes in, or as quantized matrices.

Files stay memory-mapped until a tensor is taken, so that loading needs room for the model once. Names and shapes are
Hugging Face's whatever the format. The executor calls `check_fits`; the model takes what its configuration names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.gguf import read_gguf
from octavo.loading.gguf_config import NamedTensor, named_tensors
from octavo.loading.gguf_dequant import PLAIN_TYPES, dequantize, packed_rows
from octavo.ops import QuantizedMatrix
from octavo.quantization import fp8, int8, layout_of
from octavo.quantization.layout import BLOCK, PANEL

if TYPE_CHECKING:  # octavo.models imports this module
    from octavo.models.decoder_config import DecoderConfig

GIB = 1 << 30
QUANTIZED_AT_LOAD = {"int8": int8.FORMAT, "fp8": fp8.FORMAT}  # --quantization -> format of `QuantizedMatrix`
# Pages of a mapped file count as the process's memory: after so many bytes they are let go of.
_MAPPED_BYTES = 32 << 20
_CPU = torch.device("cpu")
_PROC_CGROUP = Path("/proc/self/cgroup")

# In checkpoints but not part of a model here: rotary frequencies and masks are computed from the configuration.
_IGNORED = re.compile(r".*(rotary_emb\.(inv_freq|cos_cached|sin_cached)|attn\.(masked_)?bias|position_ids)")


class Weights(Protocol):
    """An open checkpoint. Tensors that were taken stay valid after `close`, and may alias the files: never write."""

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in the type asked of `open_weights`. Raises `LoadError` if it is absent or of another shape."""

    def take_matrix(self, name: str, shape: tuple[int, int]) -> Tensor | QuantizedMatrix:
        """A matrix that is going to be packed: as `take` gives it, or with fewer bits where `open_weights` says so."""

    def check_all_taken(self) -> None:
        """Raise `LoadError` if the checkpoint has weights that the model did not ask for: it would compute nonsense."""

    def close(self) -> None: ...


def open_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    seed: int | None = None,
    quantization: str | None = None,
    device: torch.device = _CPU,
) -> Weights:
    """Open a checkpoint's weights. `seed` is that of dummy weights, which are made on `device`; without one they differ
    from run to run.

    Matrices of GGUF files keep their few bits, unless `dtype` is float32: that is the reference, which computes with
    what the blocks stand for. With `quantization` "int8" or "fp8" matrices of floats are to be quantized as they are
    packed.
    """
    if checkpoint.format == "dummy":
        from octavo.loading.dummy_weights import DummyWeights
        from octavo.models.decoder_config import DecoderConfig

        return DummyWeights(DecoderConfig.from_hf(checkpoint.config), dtype, seed, quantization, device)
    tied = bool(checkpoint.config.get("tie_word_embeddings"))
    if checkpoint.format == "gguf":
        return GGUFWeights(checkpoint.weight_files, dtype, tied, quantization)
    if checkpoint.format == "pt":
        return PtWeights(checkpoint.weight_files, dtype, tied, quantization)
    return SafetensorsWeights(checkpoint.weight_files, dtype, tied, quantization)


def check_fits(
    checkpoint: Checkpoint,
    decoder: DecoderConfig,
    dtype: torch.dtype,
    quantization: str | None = None,
    available_bytes: int | None = None,
) -> None:
    """Raise `LoadError` if the model's weights exceed the memory that is free (by default, to this process)."""
    needed, kind = weight_bytes(checkpoint, decoder, dtype, quantization)
    available = available_memory_bytes() if available_bytes is None else available_bytes
    if needed > available:
        raise LoadError(
            f"the model needs {needed / GIB:.2f} GiB of memory for its weights in {kind}, "
            f"and {available / GIB:.2f} GiB are free; free some, choose a smaller --dtype or a smaller model."
        )


def weight_bytes(
    checkpoint: Checkpoint, decoder: DecoderConfig, dtype: torch.dtype, quantization: str | None = None
) -> tuple[int, str]:
    """Bytes that the model's matrices take once they are packed, and in what they are held."""
    kind = str(dtype).removeprefix("torch.")
    if quantization in QUANTIZED_AT_LOAD:
        num_bytes = decoder.num_weight_parameters() * int8.LAYOUT.packed_bytes(PANEL, BLOCK) // (PANEL * BLOCK)
        return num_bytes, quantization
    if checkpoint.format != "gguf" or dtype is torch.float32:
        return decoder.num_weight_parameters() * dtype.itemsize, kind
    num_bytes, formats = 0, dict[str, None]()
    for info in read_gguf(checkpoint.weight_files[0]).tensors.values():
        if len(info.shape) != 2:
            continue
        is_float = info.type.name in PLAIN_TYPES
        formats[kind if is_float else info.type.name] = None
        num_out, num_in = info.shape
        num_bytes += (
            num_out * num_in * dtype.itemsize if is_float else layout_of(info.type.name).packed_bytes(*info.shape)
        )
    return num_bytes, " and ".join(formats)


def available_memory_bytes(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """RAM that this process can still get: the machine's free memory, or its container's allowance if that is less."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_cgroup_rooms(cgroup_root)])


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Room under each memory limit above this process: cgroup version 2, or version 1. Empty outside of Linux."""
    try:
        lines = _PROC_CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cached = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        own = base / path.lstrip("/")
        # Inside a container the path is often the host's and only the root of the mount exists.
        for group in (own, *own.parents):
            if group.is_relative_to(base):
                try:
                    allowed = int((group / limit).read_text())  # "max" is no number, and no limit
                    stat = dict(entry.split() for entry in (group / "memory.stat").read_text().splitlines())
                    # Pages of files count as used until something wants their room.
                    yield max(0, allowed - int((group / usage).read_text()) + int(stat.get(cached, 0)))
                except (OSError, ValueError):
                    continue


class _FileWeights:
    """What the file formats share: which names there are, and which of them were taken."""

    def __init__(self, names: list[str], tied: bool, source: str) -> None:
        self._left = dict.fromkeys(names)
        self._names = frozenset(names)
        self._tied = tied
        self._source = source

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def _taking(self, name: str, shape: tuple[int, ...], stored_shape: tuple[int, ...] | None) -> None:
        """Check the name and the shape, and note that the tensor is taken."""
        if stored_shape is None:
            raise LoadError(f"{self._source} has no tensor {name}, which the model's configuration calls for.")
        if stored_shape != shape:
            raise LoadError(
                f"{self._source}: tensor {name} has the shape {list(stored_shape)}; the model's configuration makes it "
                f"{list(shape)}."
            )
        self._left.pop(name, None)

    def check_all_taken(self) -> None:
        left = [n for n in self._left if not _IGNORED.fullmatch(n) and not (self._tied and n == "lm_head.weight")]
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise LoadError(
                f"{self._source} has {len(left)} tensors that the model's configuration has no place for: "
                f"{', '.join(left[:5])}{more}; its config.json may be another model's, or its architecture is not "
                "wholly built."
            )


class _FloatWeights(_FileWeights):
    """What the formats share that hold floats only."""

    _dtype: torch.dtype
    _quantization: str | None

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor as the file has it."""
        raise NotImplementedError

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return _float_tensor(self._stored(name, shape), name, self._source).to(self._dtype).contiguous()

    def take_matrix(self, name: str, shape: tuple[int, int]) -> Tensor | QuantizedMatrix:
        if self._quantization in QUANTIZED_AT_LOAD:
            return to_be_quantized(_float_tensor(self._stored(name, shape), name, self._source), self._quantization)
        return self.take(name, shape)


class SafetensorsWeights(_FloatWeights):
    """Safetensors files, memory-mapped."""

    def __init__(self, files: list[str], dtype: torch.dtype, tied: bool, quantization: str | None) -> None:
        from safetensors import SafetensorError, safe_open

        self._dtype, self._quantization = dtype, quantization
        self._files: dict[str, Any] = {}  # name of a tensor -> the open file that has it
        for path in files:
            try:
                file = safe_open(path, framework="pt")
                names: list[str] = file.keys()  # type: ignore[no-untyped-call]
                self._files.update(dict.fromkeys(names, file))
            except (SafetensorError, OSError) as e:
                raise LoadError(f"{path} is damaged or truncated ({e}); fetch it again.") from None
        super().__init__(list(self._files), tied, os.path.dirname(files[0]))

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        file = self._files.get(name)
        self._taking(name, shape, None if file is None else tuple(file.get_slice(name).get_shape()))
        assert file is not None
        tensor: Tensor = file.get_tensor(name)
        return tensor

    def close(self) -> None:
        self._files = {}


class PtWeights(_FloatWeights):
    """PyTorch's own .bin files: archives of tensors, read without running any code from them."""

    def __init__(self, files: list[str], dtype: torch.dtype, tied: bool, quantization: str | None) -> None:
        self._dtype, self._quantization = dtype, quantization
        self._tensors: dict[str, Tensor] = {}
        for path in files:
            self._tensors.update(_load_pt(path))
        super().__init__(list(self._tensors), tied, os.path.dirname(files[0]))

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensors.get(name)
        self._taking(name, shape, None if tensor is None else tuple(tensor.shape))
        assert tensor is not None
        return tensor

    def close(self) -> None:
        self._tensors = {}


class GGUFWeights(_FileWeights):
    """A GGUF file, whose matrices of few bits stay as they are unless the model computes in float32."""

    def __init__(self, files: list[str], dtype: torch.dtype, tied: bool, quantization: str | None) -> None:
        self._dtype, self._quantization = dtype, quantization
        self._file = read_gguf(files[0])
        self._tensors = {t.hf_name: t for t in named_tensors(self._file)}
        self._mapped_bytes = 0
        super().__init__(list(self._tensors), tied, files[0])
        quantized = {t.info.type.name for t in self._tensors.values()} - set(PLAIN_TYPES)
        if quantization in QUANTIZED_AT_LOAD and quantized:
            raise LoadError(
                f"--quantization {quantization} quantizes weights of floats, but {files[0]} is quantized already "
                f"({', '.join(sorted(quantized))}); leave the flag out to serve it as it is."
            )

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return dequantize(self._file, self._tensor(name, shape), self._dtype)

    def take_matrix(self, name: str, shape: tuple[int, int]) -> Tensor | QuantizedMatrix:
        tensor = self._tensor(name, shape)
        tensor_type = tensor.info.type.name
        if plain := PLAIN_TYPES.get(tensor_type):
            if self._quantization in QUANTIZED_AT_LOAD:
                return to_be_quantized(packed_rows(self._file, tensor).view(plain), self._quantization)
        elif self._dtype is not torch.float32:
            return QuantizedMatrix(tensor_type, packed_rows(self._file, tensor), shape)
        return dequantize(self._file, tensor, self._dtype)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> NamedTensor:
        tensor = self._tensors.get(name)
        self._taking(name, shape, None if tensor is None else tensor.info.shape)
        assert tensor is not None
        if self._mapped_bytes > _MAPPED_BYTES:
            self._file.forget_pages()
            self._mapped_bytes = 0
        self._mapped_bytes += tensor.info.num_bytes
        return tensor

    def close(self) -> None:
        self._file.forget_pages()
        # The mapping goes with the last tensor that aliases it; closing it by hand would pull it from under them.
        self._tensors = {}
        del self._file


def _load_pt(path: str) -> dict[str, Tensor]:
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as e:
            if "mmap" not in str(e):
                raise
            loaded = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except Exception as e:  # torch.load raises whatever its parsers meet; a damaged file is all that it can mean here
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise LoadError(f"{path} is damaged, or no file of tensors ({reason}); fetch it again.") from None
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise LoadError(f"{path} holds a {type(loaded).__name__}, expected a dictionary of tensors.")
    return loaded


def _float_tensor(tensor: Tensor, name: str, source: str) -> Tensor:
    """The tensor itself, if it holds floats that mean something by themselves."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        stored = str(tensor.dtype).removeprefix("torch.")
        raise LoadError(
            f"{source}: tensor {name} is stored as {stored}; quantized checkpoints of this kind are not built yet."
        )
    return tensor


def to_be_quantized(tensor: Tensor, quantization: str) -> QuantizedMatrix:
    """Nothing is computed here: the packer quantizes as it reads."""
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        tensor = tensor.float()
    num_out, num_in = tensor.shape
    return QuantizedMatrix(QUANTIZED_AT_LOAD[quantization], tensor.contiguous(), (num_out, num_in))
