"""Packed weights predict text as well as the floats they stand for; benchmarks/perplexity.py is the whole of it."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.perplexity import measure, quantize, requantize
from octavo import LLM, SamplingParams
from octavo.loading.checkpoint import resolve
from tests.quantization.blocks import BLOCKS

WINDOW = 512


@pytest.mark.slow
@pytest.mark.long
def test_the_default_models_weights_lose_less_than_one_percent() -> None:
    tokens = 4 * WINDOW
    expected, _ = measure("", "float32", tokens, WINDOW)
    found, _ = measure("", "bfloat16", tokens, WINDOW)
    assert 5 < expected < 50, "the text is one that the model understands"
    assert found == pytest.approx(expected, rel=0.01)
    cached, _ = measure("", "bfloat16", tokens, WINDOW, cache="int8")
    assert cached == pytest.approx(found, rel=0.005)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "int8", "BF16"])
def test_other_formats_of_the_same_weights_lose_less_than_one_percent(name: str, tmp_path: Path) -> None:
    # A part of the benchmark's 20,000 tokens.
    tokens = 8 * WINDOW
    stored = "BF16" if name == "int8" else name
    path = str(requantize(resolve("").path, tmp_path / "m.gguf", stored))
    expected, _ = measure(path, "float32", tokens, WINDOW)
    found, _ = measure(path, "bfloat16", tokens, WINDOW, "int8" if name == "int8" else None)
    assert found == pytest.approx(expected, rel=0.01)


# What the benchmark quantizes to: the simple types that the gguf package knows, and the K-quants from four bits on.
_QUANTIZED = [name for name in BLOCKS if name not in ("Q1_0", "Q2_K", "Q3_K") and name[0] == "Q"]


@pytest.mark.parametrize("name", [*_QUANTIZED, "BF16", "F32"])
def test_the_quantizers_of_the_benchmark_are_what_the_formats_mean(name: str) -> None:
    values = (np.random.default_rng(0).standard_normal((8, 512)) * 0.03).astype(np.float32)
    values[0] = 0
    read = gguf.dequantize(quantize(values, name), gguf.GGMLQuantizationType[name])
    error = np.sqrt(np.mean((read - values) ** 2)) / 0.03
    assert np.all(read[0] == 0)
    assert error < {"Q4": 0.1, "Q5": 0.05, "Q6": 0.025, "Q8": 0.01, "BF": 0.002, "F3": 1e-9}[name[:2]]


@pytest.mark.long
def test_the_first_layers_decide_in_sixteen_bits_what_later_ones_amplify() -> None:
    """With eight bits throughout the second of these tokens loses its attention sink: a divergence of 5."""

    def logprobs(**flags: Any) -> NDArray[np.float64]:
        llm = LLM("", max_model_len=16, max_logprobs=-1, **flags)
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1, detokenize=False)
        [output] = llm.generate({"prompt_token_ids": [10750, 6330]}, params, use_tqdm=False)
        [found] = output.outputs[0].logprobs or []
        return np.array([found[token].logprob for token in range(len(found))])

    expected = logprobs(dtype="float32")
    found = [logprobs(precise_layers=layers) for layers in (None, 30)]
    divergences = [float((np.exp(expected) * (expected - other)).sum()) for other in found]
    print("KL divergences", divergences)
    assert max(divergences) < 0.3
