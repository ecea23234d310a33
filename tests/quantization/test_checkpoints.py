"""Checkpoints that other tools have quantized, in every layout: the values of each matrix, what is packed of it, and
the logits of a model that is served from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM
from octavo.errors import LoadError
from octavo.loading.checkpoint import resolve
from octavo.loading.file_weights import open_weights
from octavo.loading.recording import RecordingWeights
from octavo.loading.weights import Weights
from octavo.models.inventory import record
from octavo.models.registry import describe
from octavo.ops.cpu_pack import pack_quantized
from octavo.quantization import dequantize
from tests.models.test_parity import logits_of
from tests.quantization.blocks import read_packed
from tests.quantization.checkpoints import CONFIG, FORMATS, SHAPES, VOCAB, tensors_of, write


def _open(folder: Path, dtype: str = "bfloat16", quantization: str | None = None) -> Weights:
    return open_weights(resolve(str(folder)), dtype, 0, quantization, False)


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_are_what_the_files_say_and_packed_near_to_it(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    stored, plain = tensors_of(form)
    folder = write(tmp_path / "m", stored, form.settings)
    weights, reference = _open(folder), _open(folder, "float32")
    for module, shape in SHAPES.items():
        full = f"model.layers.1.{module}.weight"
        expected = plain[full]
        assert np.allclose(reference.take_matrix(full, shape).data, expected, rtol=1e-6, atol=1e-7), full
        matrix = weights.take_matrix(full, shape)
        packed = pack_quantized([matrix])
        products, minima = read_packed(packed)
        if packed.order is not None:
            products, minima = (x[:, np.argsort(packed.order)] for x in (products, minima))
        allowed = form.tolerance * np.abs(expected).max() + 1e-6
        assert np.abs(products + minima - expected).max() <= allowed, full
        bits = packed.data.nbytes * 8 / expected.size
        assert bits == form.bits, full
        # A share of rows, as of a stacked or divided matrix.
        half = shape[0] // 2
        share = weights.take_matrix(full, shape, (half, shape[0]))
        assert np.allclose(dequantize(share), expected[half:], rtol=1e-6, atol=1e-7)
    for weights_of in (weights, reference):
        for full in set(plain) - {f"model.layers.{i}.{m}.weight" for i in range(2) for m in SHAPES}:
            weights_of.take(full, plain[full].shape)
    weights.pass_over("model.layers.")
    weights.check_all_taken()


@pytest.mark.parametrize("name", FORMATS)
def test_memory_is_known_before_anything_is_read(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    stored, _ = tensors_of(form)
    weights = _open(write(tmp_path / "m", stored, form.settings))
    recorded = RecordingWeights("bfloat16", weights)
    record(describe(CONFIG), recorded)
    quantized = 2 * sum(n * k for n, k in SHAPES.values())
    num_bytes, _ = recorded.packed_bytes()
    assert num_bytes == quantized * form.bits / 8 + 2 * 2 * VOCAB * 128


# One of each layout and way through the packer; their matrices are tested above.
_SERVED = ("gptq 4 zeros", "gptq 4 desc_act", "awq", "w8a8", "fp8 blocks", "nvfp4", "nf4")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
            for length in (1, 9, 40)]  # fmt: skip


def _logits(folder: Path, tokenizer: Path, prompts: list[list[int]], **options: Any) -> list[Any]:
    llm = LLM(
        str(folder), tokenizer=str(tokenizer), max_model_len=64, max_num_batched_tokens=32, block_size=8,
        num_gpu_blocks_override=40, enable_prefix_caching=False, **options,
    )  # fmt: skip
    return logits_of(llm, prompts)


@pytest.mark.parametrize("name", _SERVED)
def test_logits_are_those_of_the_values(name: str, tmp_path: Path, tiny_tokenizer: Path, prompts: Any) -> None:
    """In float32 they are the same; packed they are near. Alone a sequence has the bits that it has among others."""
    form = FORMATS[name]
    stored, plain = tensors_of(form)
    folder = write(tmp_path / "m", stored, form.settings)
    reference = _logits(write(tmp_path / "plain", plain, None), tiny_tokenizer, prompts, dtype="float32")
    for (_, expected), (_, found) in zip(
        reference, _logits(folder, tiny_tokenizer, prompts, dtype="float32"), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    method = form.settings["quant_method"]
    together = _logits(folder, tiny_tokenizer, prompts, dtype="bfloat16", quantization=method)
    for (tokens, expected), (own, found) in zip(reference, together, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(tokens, own, strict=True)) if a != b), len(own))
        steps = max(1, same - (len(own) - len(found)) + 1)
        error = (found - expected)[: min(steps, len(found))].abs().max() / expected.abs().max()
        assert error < 0.05
    [(_, alone)] = _logits(folder, tiny_tokenizer, prompts[-1:], dtype="bfloat16")
    assert torch.equal(alone, together[-1][1])
