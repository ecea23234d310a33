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
ARCHITECTURES = {"BertModel": "bert", "RobertaModel": "bert", "NomicBertModel": "nomic-bert"}


def write(folder: Path, name: str, path: Path, pooling: str) -> Any:
    """Returns the reference."""
    reference = write_model(folder, name)
    config, architecture = reference.config, ARCHITECTURES[name]
    arch = next(a for a, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    offset = config.pad_token_id + 1 if name == "RobertaModel" else 0
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings - offset)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(_POOLING[pooling]))
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
        key = key.removeprefix("nomic_bert.")
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


def test_what_such_files_cannot_do_is_said(tmp_path: Path) -> None:
    write(tmp_path, "BertModel", tmp_path / "m.gguf", "RANK")
    with pytest.raises(LoadError, match=r"heads of rerankers \(pooling_type 4\) are not built for GGUF files"):
        LLM(str(tmp_path / "m.gguf"))
    write(tmp_path, "BertModel", tmp_path / "m.gguf", "MEAN")
    with pytest.raises(ConfigError, match="no output matrix to generate with"):
        LLM(str(tmp_path / "m.gguf"), runner="generate")
