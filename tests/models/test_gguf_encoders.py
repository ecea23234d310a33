"""GGUF files of models for embeddings, small ones and their tokenizers, as llama.cpp's converter writes them: vectors
are those of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import PreTrainedTokenizerFast

from octavo import LLM
from octavo.errors import ConfigError, LoadError
from tests.models.small_text_encoder import write_model

TEXTS = ("the cat sat on a mat", "query : what is fast", "dog", "who ran slow on the hill " * 6)
_POOLING = {"MEAN": 1, "CLS": 2, "RANK": 4}
# Of a file.
ARCHITECTURES = {
    "BertModel": "bert", "RobertaModel": "bert", "RobertaForSequenceClassification": "bert",
    "BertForSequenceClassification": "bert", "NomicBertModel": "nomic-bert",
    "Gemma3TextModel": "gemma-embedding",  # test_gguf_pooling
}  # fmt: skip


def write(folder: Path, name: str, path: Path, pooling: str, labels: list[str] | None = None, **settings: Any) -> Any:
    """Returns the reference."""
    reference = write_model(folder, name, **settings)
    config, architecture = reference.config, ARCHITECTURES[name]
    arch = next(a for a, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    offset = config.pad_token_id + 1 if name.startswith("Roberta") else 0
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings - offset)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(_POOLING[pooling]))
    if labels is not None:
        writer.add_classifier_output_labels(labels)
    if architecture == "nomic-bert":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    tokens = [
        token if token in special else token[2:] if token.startswith("##") else f"\u2581{token}"
        for token in sorted(vocab, key=vocab.__getitem__)
    ]
    tokens += [f"[unused{i}]" for i in range(len(tokens), config.vocab_size)]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("[") else 1 for token in tokens])
    writer.add_bos_token_id(vocab["[CLS]"])
    writer.add_sep_token_id(vocab["[SEP]"])
    writer.add_unk_token_id(vocab["[UNK]"])
    writer.add_pad_token_id(vocab["[PAD]"])
    for key, tensor in load_file(folder / "model.safetensors").items():
        if "pooler" in key or "position_ids" in key:
            continue
        if "position_embeddings" in key:
            tensor = tensor[offset:]
        for prefix in ("nomic_bert.", "roberta.", "bert."):
            key = key.removeprefix(prefix)
        if name.startswith("BertFor"):  # as the converter calls it
            key = key.replace("classifier.", "classifier.out_proj.")
        found = names.get_name(key, (".weight", ".bias"))
        assert found is not None, key
        writer.add_tensor(found, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return reference


@pytest.mark.parametrize(
    ("name", "pooling"), [("BertModel", "MEAN"), ("RobertaModel", "CLS"), ("NomicBertModel", "MEAN")]
)
def test_vectors_are_those_of_transformers(name: str, pooling: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    reference = write(tmp_path, name, path, pooling)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    llm = LLM(str(path), dtype="float32", max_num_seqs=4)
    for text, output in zip(TEXTS, llm.embed(list(TEXTS), use_tqdm=False), strict=True):
        tokens = tokenizer(text)["input_ids"]
        assert output.prompt_token_ids == tokens
        with torch.no_grad():
            hidden = reference(torch.tensor([tokens])).last_hidden_state[0]
        expected = hidden.mean(0) if pooling == "MEAN" else hidden[0]
        expected = torch.nn.functional.normalize(expected, dim=0).numpy()
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_pairs_are_judged_as_by_transformers(num_labels: int, tmp_path: Path) -> None:
    """By RoBERTa's head: bge-reranker-v2-m3 has it."""
    path, labels = tmp_path / "m.gguf", None if num_labels == 1 else ["good", "fair", "poor"]
    settings = {"num_labels": num_labels, "type_vocab_size": 2}
    reference = write(tmp_path, "RobertaForSequenceClassification", path, "RANK", labels, **settings)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    llm = LLM(str(path), dtype="float32")
    if labels is not None:
        for text, output in zip(TEXTS, llm.classify(list(TEXTS), use_tqdm=False), strict=True):
            with torch.no_grad():
                expected = reference(**tokenizer(text, return_tensors="pt")).logits[0].softmax(0)
            np.testing.assert_allclose(output.outputs.probs, expected, atol=1e-5)
        return
    outputs = llm.score(TEXTS[0], list(TEXTS[1:]), use_tqdm=False)
    for text, output in zip(TEXTS[1:], outputs, strict=True):
        inputs = tokenizer(TEXTS[0], text, return_tensors="pt", return_token_type_ids=True)
        assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
        with torch.no_grad():
            expected = reference(**inputs).logits[0, 0].sigmoid().item()
        assert abs(output.outputs.score - expected) < 1e-5
    assert len({output.outputs.score for output in outputs}) == len(outputs)


def test_what_such_files_cannot_do_is_said(tmp_path: Path) -> None:
    write(tmp_path, "BertForSequenceClassification", tmp_path / "m.gguf", "RANK")  # the converter drops its pooler
    with pytest.raises(LoadError, match=r"this head of a reranker \(pooling_type 4\) is not built; those of bert with"):
        LLM(str(tmp_path / "m.gguf"))
    write(tmp_path, "BertModel", tmp_path / "m.gguf", "MEAN")
    with pytest.raises(ConfigError, match="no output matrix to generate with"):
        LLM(str(tmp_path / "m.gguf"), runner="generate")
