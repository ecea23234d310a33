"""Functions of vLLM that clients of its server import, for vectors in bytes, pictures, and embeddings in base64. Only
functions of tensors need torch, and only those of pictures Pillow. Octavo itself does not use them."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import ml_dtypes  # noqa: F401 - NumPy knows its types by their names then
import numpy as np

from octavo.pooling_params import EMBED_DTYPES, EmbedDtype

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "EMBED_DTYPES", "ENDIANNESS", "MetadataItem", "binary2tensor", "build_metadata_items", "decode_pooling_output",
    "encode_image_base64", "encode_image_url", "fetch_image", "print_embeddings", "tensor2base64",
]  # fmt: skip

ENDIANNESS = ("native", "big", "little")


def binary2tensor(binary: bytes, shape: tuple[int, ...], embed_dtype: EmbedDtype, endianness: str) -> Any:
    """Return the torch tensor of numbers in bytes."""
    import torch

    kind = np.dtype(EMBED_DTYPES[embed_dtype])
    order = sys.byteorder if endianness == "native" else endianness
    numbers = np.frombuffer(binary, f"{'<' if order == 'little' else '>'}i{kind.itemsize}").astype(f"=i{kind.itemsize}")
    return torch.from_numpy(numbers).view(getattr(torch, kind.name)).reshape(shape)


def tensor2base64(tensor: Any) -> str:
    """Return a torch tensor as base64 of `torch.save`, the form of `prompt_embeds`."""
    import torch

    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


@dataclass(frozen=True)
class MetadataItem:
    """The place and form of a vector in an answer with `encoding_format` bytes; an entry of its header `metadata`."""

    index: int
    embed_dtype: EmbedDtype
    endianness: str
    start: int
    end: int
    shape: tuple[int, ...]


def build_metadata_items(
    embed_dtype: EmbedDtype, endianness: str, shape: tuple[int, ...], n_request: int
) -> list[MetadataItem]:
    """Return the places of vectors of the same shape, for an answer with `encoding_format` bytes_only."""
    size = prod(shape) * np.dtype(EMBED_DTYPES[embed_dtype]).itemsize
    return [MetadataItem(i, embed_dtype, endianness, i * size, (i + 1) * size, shape) for i in range(n_request)]


def decode_pooling_output(items: Sequence[MetadataItem], body: bytes) -> list[Any]:
    """Return the torch tensor of each vector in an answer's body, by its index."""
    return [
        binary2tensor(body[one.start : one.end], tuple(one.shape), one.embed_dtype, one.endianness)
        for one in sorted(items, key=lambda one: one.index)
    ]


def fetch_image(image_url: str) -> Image:
    """Return the picture at an http, https, file or data URL."""
    from PIL import Image

    with urlopen(image_url) as response:
        return Image.open(io.BytesIO(response.read()))


def encode_image_base64(image: Image, *, image_mode: str = "RGB", format: str = "PNG") -> str:
    """Return a picture's file as base64."""
    file = io.BytesIO()
    image.convert(image_mode).save(file, format)
    return base64.b64encode(file.getvalue()).decode()


def encode_image_url(image: Image, *, image_mode: str = "RGB", format: str = "PNG") -> str:
    """Return a picture as a data URL, for a part `image_url` of a message."""
    return f"data:image/{format.lower()};base64,{encode_image_base64(image, image_mode=image_mode, format=format)}"


def print_embeddings(embeds: Sequence[float]) -> None:
    """Print the first numbers of a vector, and its size."""
    shown = ", ".join(map(str, embeds[:4]))
    print(f"Embeddings: [{shown}{', ...' if len(embeds) > 4 else ''}] (size={len(embeds)})")
