"""GGUF files of decoders that pool: embeddings of Gemma with the matrices behind them, and Qwen3 as a reranker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, PoolingParams, PoolingRequestOutput
from octavo.errors import LoadError
from tests.models.small_encoders import SmallEncoder
from tests.models.test_gguf_architectures import Case, Tensors, one_more, write

_RANK = {"pooling_type": 4}


def test_gemma_embeds(tmp_path: Path, tiny_tokenizer: Path) -> None:
    """Both ways, with windows, and with the two matrices behind the mean."""
    settings = {
        "use_bidirectional_attention": True, "sliding_window": 16, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }  # fmt: skip
    reference = SmallEncoder("Gemma3TextModel", "gemma3_text", settings).reference(0)
    sizes = reference.config.hidden_size
    dense = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((64, sizes), (sizes, 64))]

    def named(tensors: Tensors, config: Any) -> Tensors:
        named = {f"model.{name}": tensor for name, tensor in tensors.items()}
        return named | {"dense_2_out.weight": dense[0], "dense_3_out.weight": dense[1]}

    metadata = {"attention.sliding_window": 16, "attention.sliding_window_pattern": 3, "pooling_type": 1}
    case = Case("gemma-embedding", reference.config, metadata, (one_more, named))
    path = write(case, reference, tmp_path / "m.gguf")
    llm = LLM(str(path), dtype="float32", tokenizer=str(tiny_tokenizer))
    prompts = [torch.arange(3, 90), torch.arange(5, 12)]
    for tokens, output in zip(prompts, llm.embed([{"prompt_token_ids": p.tolist()} for p in prompts]), strict=True):
        with torch.no_grad():
            expected = reference(tokens[None]).last_hidden_state[0].mean(0) @ dense[0].T @ dense[1].T
        expected = torch.nn.functional.normalize(expected, dim=0).numpy()
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-4)
    engine = llm.llm_engine
    for name, params in (("a", PoolingParams()), ("b", None)):  # what is asked for follows from the model
        engine.add_request(name, {"prompt_token_ids": prompts[1].tolist()}, params)
        [given] = engine.step()
        assert isinstance(given, PoolingRequestOutput) and given.request_id == name
        np.testing.assert_array_equal(given.outputs.data, output.outputs.embedding)


def _qwen3(folder: Path, labels: list[str]) -> tuple[Path, Any]:
    """A file of which only two rows of the output matrix are there, and the reference."""
    settings = {"vocab_size": 259, "max_position_embeddings": 700}
    reference = SmallEncoder("Qwen3ForCausalLM", "qwen3", settings).reference(0)

    def judging(tensors: Tensors, config: Any) -> Tensors:
        rows = tensors.pop("lm_head.weight")[[100, 50]]
        return tensors | {"cls.output.weight": rows}

    metadata = _RANK | {"classifier.output_labels": labels}
    return write(Case("qwen3", reference.config, metadata, (judging,)), reference, folder / "m.gguf"), reference


def test_qwen3_judges_by_yes_and_no(tmp_path: Path, tiny_tokenizer: Path) -> None:
    path, reference = _qwen3(tmp_path, ["yes", "no"])
    llm = LLM(str(path), tokenizer=str(tiny_tokenizer), dtype="float32")
    outputs = llm.score("x", ["a", "b"], use_tqdm=False)
    for output in outputs:
        with torch.no_grad():
            yes, no = reference(torch.tensor([output.prompt_token_ids])).logits[0, -1][[100, 50]]
        assert abs(output.outputs.score - torch.sigmoid(yes - no).item()) < 1e-5
    assert outputs[0].outputs.score != outputs[1].outputs.score


def test_other_labels_are_refused(tmp_path: Path) -> None:
    path, _ = _qwen3(tmp_path, ["good", "bad"])
    with pytest.raises(LoadError, match=r"labels \['good', 'bad'\] is not built"):
        LLM(str(path))
