"""A GGUF file's tensors as a checkpoint of `transformers` has them: renamed, split and with rows reordered."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.errors import LoadError
from octavo.loading.gguf_config import architecture_of
from octavo.loading.gguf_file import GGUFFile, TensorInfo
from octavo.loading.gguf_layout import RowOrder
from octavo.loading.gguf_values import ROPE_FREQS, ROPE_LONG, ROPE_SHORT
from octavo.quantization import StoredWeight
from octavo.quantization.array_functions import FLOATS
from octavo.quantization.formats import PLAIN


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor under its Hugging Face name: a whole tensor of the file, or `rows` of its first dimension in this order.

    The file's values have `offset` added. With `is_rate` the file has a state's rates of decay, and checkpoints have
    the logarithms of their negatives.
    """

    hf_name: str
    info: TensorInfo
    rows: list[int] | slice | int | None = None
    offset: float = 0.0
    is_untransposed: bool = False  # a matrix that checkpoints store transposed
    is_flat: bool = False  # the file has several rows that checkpoints have as one
    is_rate: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        first, *rest = self.info.shape
        if self.is_flat:
            return (math.prod(self.info.shape),)
        if isinstance(self.rows, int):
            return tuple(rest)
        if isinstance(self.rows, slice):
            first = len(range(first)[self.rows])
        return (first, *rest)


def named_tensors(file: GGUFFile, config: Mapping[str, Any]) -> Iterator[NamedTensor]:
    """Yield the tensors of the file that a model reads, in file order. Unknown names stay as they are. `config` is the
    result of `gguf_config`."""
    metadata, architecture = architecture_of(file)
    names, top_names = architecture.all_names(metadata), architecture.all_top_names(metadata)
    has_mtp = metadata.number("nextn_predict_layers", 0) > 0  # such layers come last and are no part of the model
    for info in file.tensors.values():
        if info.name in (ROPE_FREQS, ROPE_LONG, ROPE_SHORT):
            continue  # part of the configuration
        parts = info.name.split(".")
        is_of_layer = parts[0] == "blk" and len(parts) > 2
        is_number = is_of_layer and parts[1].isdecimal() and len(parts[1]) < 10
        if has_mtp and is_number and int(parts[1]) >= config["num_hidden_layers"]:
            continue
        if is_of_layer and (own := architecture.tensor_names.get(".".join(parts[2:]))) is not None:
            yield NamedTensor(f"{architecture.layer_prefix}{parts[1]}.{own}", info, is_rate=parts[2] == "ssm_a")
            continue
        if is_of_layer and ".".join(parts[2:-1]) in names:
            layer, module, kind = parts[1], ".".join(parts[2:-1]), parts[-1]
            name, prefix = names[module], f"{architecture.layer_prefix}{layer}."
        elif (module := ".".join(parts[:-1])) in top_names:
            name, prefix, kind = top_names[module], "", parts[-1]
        else:
            yield NamedTensor(info.name, info)
            continue
        is_state_norm = module == "ssm_norm"
        is_norm = module.endswith("norm") and kind == "weight" and not is_state_norm
        offset = architecture.norm_offset if is_norm else 0.0
        if isinstance(name, str):
            order = architecture.rows.get(module)
            rows = _ordered(file, info, order, config) if order else None
            is_untransposed = module in architecture.transposed_modules and kind == "weight"
            yield NamedTensor(f"{prefix}{name}.{kind}", info, rows, offset, is_untransposed, is_flat=is_state_norm)
        elif len(name) == 1:
            for i in range(info.shape[0]):
                yield NamedTensor(f"{prefix}{name[0].format(i)}.{kind}", info, i, offset)
        else:
            size = info.shape[0] // len(name)
            for i, one in enumerate(name):
                yield NamedTensor(f"{prefix}{one}.{kind}", info, slice(i * size, (i + 1) * size), offset)


def _ordered(file: GGUFFile, info: TensorInfo, order: RowOrder, config: Mapping[str, Any]) -> list[int]:
    """Return the rows of a tensor in the model's order. Raises `LoadError` unless heads divide the rows."""
    count = info.shape[0]
    try:
        rows = order(config, count)
        if len(rows) == count and max(rows) < count:
            return rows
    except (ValueError, ArithmeticError):
        pass
    raise LoadError(f"{file.path} is damaged: the heads of the model do not divide the {count} rows of {info.name}.")


def stored_tensor(file: GGUFFile, tensor: NamedTensor) -> StoredWeight:
    """Return the tensor [rows, elements of a row] in the file's type, with rows in the model's order. A tensor of one
    dimension becomes one row. The result aliases the mapped file unless rows are moved or values change."""
    info, shape = tensor.info, tensor.shape
    packed = file.array(info)
    if tensor.rows is not None:
        packed = packed.reshape(info.shape[0], -1)[tensor.rows]
    num_rows = shape[0] if len(shape) > 1 else 1
    packed = packed.reshape(num_rows, -1)
    plain = PLAIN.get(info.type.name)
    data = packed.view(FLOATS[plain]) if plain else packed
    if tensor.offset:
        if plain is None:
            raise LoadError(f"{file.path}: {info.name} is a norm of type {info.type.name}, which is not built.")
        data = (data.astype(np.float32) - np.float32(tensor.offset)).astype(data.dtype)
    if tensor.is_rate:
        if plain is None:
            raise LoadError(f"{file.path}: {info.name} is of type {info.type.name}, which is not built for rates.")
        if not (data < 0).all():
            raise LoadError(f"{file.path} is damaged: the rates of decay of {info.name} are not all negative.")
        data = np.log(-data.astype(np.float32)).astype(data.dtype)
    return StoredWeight(info.type.name, {"data": data}, (num_rows, math.prod(shape) // num_rows))
