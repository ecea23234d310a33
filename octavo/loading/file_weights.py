"""Opens checkpoints: safetensors (Mistral's own too), PyTorch's .bin, GGUF, and random weights in their place.

The module of each format lists its tensors and reads them; names and shapes are checked here. Tensors stay in
memory-mapped files until they are taken, so that loading needs memory for the model only once.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import LoadError
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.checkpoint_formats import method_of, quantized_tensors
from octavo.loading.dummy_weights import DummyWeights
from octavo.loading.file_tensor import FileTensor, element_tensor
from octavo.loading.gguf_file import read_gguf
from octavo.loading.gguf_tensors import named_tensors, stored_tensor
from octavo.loading.mapped_file import MappedFile
from octavo.loading.mistral_format import mistral_name
from octavo.loading.safetensors import read_safetensors
from octavo.loading.torch_archive import read_torch_archive
from octavo.loading.weights import Weights
from octavo.quantization import Layout, StoredWeight
from octavo.quantization.formats import AXES, PLAIN, QUANTIZED_AT_LOAD, TENSOR_TYPES

# Tensors that checkpoints have and models here do not take: rotary frequencies and masks are computed from the
# configuration.
_IGNORED = re.compile(
    r".*(rotary_emb\.(inv_freq|cos_cached|sin_cached)|att(n|ention)\.(masked_)?bias|position_ids|attn\.causal_mask"
    r"|embed_positions\.weights)"
)
# Names of output matrices. Some checkpoints store one although it equals the embedding.
_TIED = {"lm_head.weight", "embed_out.weight", "output_projection.weight", "decoder.weight"}
# The prefix of the decoder's tensors in a vision-language model, in transformers 4 and 5.
_LANGUAGE_MODEL = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(lm_head\.)?")
# Name parts of PEFT's wrappers around a model and around its modules, in checkpoints that were saved with the wrappers.
_PEFT_MODEL, _PEFT_MODULE = re.compile(r"^base_model\.model\."), ".base_layer."
_PEFT_ADAPTER = re.compile(r"\.(lora_\w+|modules_to_save|original_module)\.")
_READ_FORMATS = {t.name for t in TENSOR_TYPES.values()} | AXES.keys()


def open_weights(checkpoint: Checkpoint, dtype: str, seed: int | None, quantization: str | None, tied: bool) -> Weights:
    """Open a checkpoint's weights for a model that computes in `dtype`; see `Weights`.

    `seed` is the seed of dummy weights; without a seed they differ from run to run. `tied` says that the model's output
    matrix is its embedding, so that an output matrix in the file may stay unused.
    """
    files = checkpoint.weight_files
    if checkpoint.format == "dummy":
        return DummyWeights(dtype, seed, quantization)
    if checkpoint.format == "gguf":
        tensors, mapped = _gguf_tensors(checkpoint, quantization)
    else:
        tensors, mapped = _element_tensors(files)
    source = files[0] if checkpoint.format == "gguf" else os.path.dirname(files[0])
    if checkpoint.format == "mistral":
        tensors = _of_mistral(tensors, checkpoint.config, source)
    for prefix, path in checkpoint.module_files.items():
        of_module, more = _element_tensors([path])
        named = [(f"{prefix}.{name}", tensor, path) for name, tensor in of_module.items()]
        tensors = _by_name([*((name, tensor, source) for name, tensor in tensors.items()), *named])
        mapped += more
    if checkpoint.format != "gguf" and (settings := checkpoint.config.get("quantization_config")):
        if quantization is not None:
            raise LoadError(
                f"--quantization {quantization} quantizes weights of floats, but {source} is quantized already "
                f"({method_of(settings)}); leave the flag out to serve it as it is."
            )
        tensors = quantized_tensors(tensors, settings, source)  # before renaming: `settings` has the file's names
    if checkpoint.config.get("text_config") is not None:
        tensors = _renamed(tensors, lambda name: _LANGUAGE_MODEL.sub(_in_language_model, name), source)
    return FileWeights(tensors, mapped, source, dtype, quantization, tied)


def tensor_index(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the format and shape of each tensor in a checkpoint's files; nothing for dummy weights. Raises
    `LoadError`."""
    if checkpoint.format == "dummy":
        return {}
    if checkpoint.format == "gguf":
        tensors, _ = _gguf_tensors(checkpoint, None)
    else:
        tensors, _ = _element_tensors(checkpoint.weight_files)
    return {name: (tensor.format, tensor.shape) for name, tensor in tensors.items()}


def _in_language_model(match: re.Match[str]) -> str:
    return match[1] or "model."


class FileWeights(Weights):
    """The weights in `tensors`, whose files are `mapped`. `source` names the checkpoint in errors."""

    def __init__(
        self,
        tensors: dict[str, FileTensor],
        mapped: list[MappedFile],
        source: str,
        dtype: str,
        quantization: str | None,
        tied: bool,
    ) -> None:
        super().__init__(dtype, quantization)
        self._tensors, self._mapped, self._source = tensors, mapped, source
        self._left = dict.fromkeys(tensors)
        self._num_taken, self._num_elements = 0, sum(math.prod(tensor.shape) for tensor in tensors.values())
        self._tied = tied

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._tensors

    def stored_format(self, name: str) -> str:
        stored_format = self._find(name).format
        if stored_format not in _READ_FORMATS:
            raise LoadError(
                f"{self._source}: tensor {name} is stored as {stored_format}; no quantization_config in config.json "
                "says what that means."
            )
        return stored_format

    def matrix_layout(self, name: str) -> Layout | None:
        return self._find(name).layout

    def is_untransposed(self, name: str, untransposed_shape: tuple[int, ...] | None = None) -> bool:
        tensor = self._find(name)
        return tensor.is_untransposed or tensor.shape == untransposed_shape

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        tensor = self._find(name)
        # GGUF leaves out sizes of 1. Rows of blocks stay rows.
        is_row = tensor.format in PLAIN or tensor.shape[-1:] == shape[-1:]
        if tensor.shape != shape and not (is_row and _without_ones(tensor.shape) == _without_ones(shape)):
            raise LoadError(
                f"{self._source}: tensor {name} has the shape {list(tensor.shape)}; the model's configuration makes it "
                f"{list(shape)}."
            )

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        self.check_shape(name, shape)
        tensor = self._find(name)
        self.stored_format(name)
        self._mark_taken(name, tensor)
        return tensor.read()

    def take_integers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int64]:
        tensor = self._find(name)
        found = None if tensor.array is None else tensor.array()
        if found is None or tensor.shape != shape or not np.issubdtype(found.dtype, np.integer):
            raise LoadError(
                f"{self._source}: tensor {name} has the shape {list(tensor.shape)} and type {tensor.format}; "
                f"{list(shape)} integers are expected."
            )
        self._mark_taken(name, tensor)
        return found.astype(np.int64)

    def _mark_taken(self, name: str, tensor: FileTensor) -> None:
        if self._left.pop(self._stored_name(name), False) is False:
            return  # it was taken before
        self._num_taken += math.prod(tensor.shape)
        if self.on_taken is not None:
            self.on_taken(self._num_taken / self._num_elements)

    def _stored_name(self, name: str) -> str:
        """Return the name of a tensor in the files. Older checkpoints were written from the model's first module, so
        their names lack its prefix."""
        short = name.partition(".")[2]
        return short if name not in self._tensors and short in self._tensors else name

    def _find(self, name: str) -> FileTensor:
        stored = self._stored_name(name)
        if stored not in self._tensors:
            raise LoadError(f"{self._source} has no tensor {name}, which the model's configuration calls for.")
        return self._tensors[stored]

    def ignore(self, prefix: str) -> None:
        short = prefix.partition(".")[2]  # as in `_stored_name`
        prefixes = (prefix, short) if short else (prefix,)
        for name in [name for name in self._left if name.startswith(prefixes)]:
            del self._left[name]

    def check_all_taken(self) -> None:
        left = [n for n in self._left if not _IGNORED.fullmatch(n) and not (self._tied and n in _TIED)]
        left = [n for n in left if not self._is_zero_bias(n)]
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise LoadError(
                f"{self._source} has {len(left)} tensors that the model's configuration has no place for: "
                f"{', '.join(left[:5])}{more}; its config.json may be another model's, or its architecture is not "
                "wholly built."
            )

    def _is_zero_bias(self, name: str) -> bool:
        """Return True for a bias of zeros, which quantizers add to modules without a bias."""
        array = self._tensors[name].array
        return name.endswith(".bias") and array is not None and not array().any()

    def close(self) -> None:
        for file in self._mapped:
            file.forget_pages()
        # A mapping ends with the last array that aliases it; closing it here would invalidate the arrays.
        self._tensors, self._mapped = {}, []


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _element_tensors(files: list[str]) -> tuple[dict[str, FileTensor], list[MappedFile]]:
    """Return the tensors of safetensors files or PyTorch's files, and the mapped files."""
    opened = [read_safetensors(path) if path.endswith(".safetensors") else read_torch_archive(path) for path in files]
    tensors = _by_name(
        (name, element_tensor(tensor.dtype.name, tensor.shape, partial(file.array, name)), file.file.path)
        for file in opened
        for name, tensor in file.tensors.items()
    )
    return _without_peft(tensors, files[0]), [file.file for file in opened]


def _by_name(found: Iterable[tuple[str, FileTensor, str]]) -> dict[str, FileTensor]:
    """Return tensors by name. Each comes with the place where it is stored. Raises `LoadError` if two have the same
    name, because it is unknown which of them is the model's."""
    tensors, places = dict[str, FileTensor](), dict[str, str]()
    for name, tensor, place in found:
        if name in tensors:
            raise LoadError(
                f"two tensors have the name {name}: in {places[name]} and in {place}. Leave one file out, or fetch the "
                "model again."
            )
        tensors[name], places[name] = tensor, place
    return tensors


def _renamed(tensors: dict[str, FileTensor], rename: Callable[[str], str], source: str) -> dict[str, FileTensor]:
    """Return tensors of `source` by other names. Raises `LoadError` if two get the same name."""
    return _by_name((rename(name), tensor, f"{source} as {name}") for name, tensor in tensors.items())


def _without_peft(tensors: dict[str, FileTensor], path: str) -> dict[str, FileTensor]:
    """Return the tensors of a model that PEFT has wrapped by their names in the model itself. Raises `LoadError` if the
    file also holds an adapter's weights."""
    if not any(_PEFT_MODEL.match(name) for name in tensors):
        return tensors
    if adapter := next((name for name in tensors if _PEFT_ADAPTER.search(name)), None):
        raise LoadError(
            f"{path} has a model of PEFT's, with the model's weights and those of an adapter beside them ({adapter}); "
            "merge them with model.merge_and_unload().save_pretrained(...), or serve the base model with --enable-lora "
            "and the adapter as PEFT's save_pretrained writes it."
        )
    return _renamed(tensors, lambda name: _PEFT_MODEL.sub("", name).replace(_PEFT_MODULE, "."), path)


def _of_mistral(tensors: dict[str, FileTensor], config: Mapping[str, Any], source: str) -> dict[str, FileTensor]:
    """Return the tensors of Mistral's format by their Hugging Face names, with rows in Hugging Face's order."""

    def in_order(name: str, tensor: FileTensor) -> FileTensor:
        heads = mistral_name(name, config).rotary_heads
        return tensor._replace(read=partial(_halved, tensor.read, heads)) if heads else tensor

    ordered = {name: in_order(name, tensor) for name, tensor in tensors.items()}
    return _renamed(ordered, lambda name: mistral_name(name, config).hf_name, source)


def _halved(read: Callable[[], StoredWeight], heads: int) -> StoredWeight:
    stored = read()
    return StoredWeight(stored.format, {"data": _in_halves(stored.tensors["data"], heads)}, stored.shape)


def _in_halves(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Reorder rows that alternate between the two halves of each head: first one half, then the other."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _gguf_tensors(checkpoint: Checkpoint, quantization: str | None) -> tuple[dict[str, FileTensor], list[MappedFile]]:
    path = checkpoint.weight_files[0]
    file = read_gguf(path, texts=False)
    tensors = _by_name(
        (
            t.hf_name, FileTensor(t.info.type.name, t.shape, partial(stored_tensor, file, t), t.is_untransposed),
            f"{file.parts[t.info.part].path} as {t.info.name}",
        )
        for t in named_tensors(file, checkpoint.config)
    )  # fmt: skip
    quantized = {tensor.format for tensor in tensors.values()} - set(PLAIN)
    if quantization in QUANTIZED_AT_LOAD and quantized:
        raise LoadError(
            f"--quantization {quantization} quantizes weights of floats, but {path} is quantized already "
            f"({', '.join(sorted(quantized))}); leave the flag out to serve it as it is."
        )
    return tensors, [*file.parts]
