"""Small random-weight models that pool give what `transformers` gives in float32, in the whole engine on the CPU, and
the same bits alone and in company."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from octavo import LLM
from octavo.engine.pooling_input import PoolingInput, Text
from octavo.errors import ConfigError, LoadError, RequestError
from octavo.loading.sentence_transformers import read_sentence_transformer
from octavo.pooling_params import PoolingParams
from tests.models.small_encoders import DECODERS, ENCODERS, VOCAB, SmallEncoder
from tests.models.small_text_encoder import write_model, write_modules, write_tokenizer
from tests.seeds import seed_of

MODELS = ENCODERS | DECODERS
# One of each family and of each kind of head; the others differ from these in names.
_DEFAULT = {
    "BertModel", "BertForSequenceClassification", "BertForTokenClassification", "RobertaForSequenceClassification",
    "MPNetModel", "DistilBertForSequenceClassification", "ElectraForSequenceClassification", "NomicBertModel",
    "ModernBertForSequenceClassification", "ModernBertForTokenClassification", "GteForSequenceClassification",
    "EuroBertModel",
    *DECODERS,
}  # fmt: skip
CASES = [pytest.param(name, marks=() if name in _DEFAULT else pytest.mark.long) for name in MODELS]
LENGTHS = (1, 9, 70, 100, 23)
RAW = PoolingParams(use_activation=False)


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_the_reference(name: str, tmp_path: Path, tiny_tokenizer: Path) -> None:
    model = MODELS[name]
    reference = model.reference(seed=seed_of(name))
    model.save(reference, tmp_path)
    llm = LLM(str(tmp_path), tokenizer=str(tiny_tokenizer), dtype="float32", max_num_batched_tokens=160, max_num_seqs=4)
    texts = [torch.randint(3, VOCAB, (length,)).tolist() for length in LENGTHS]
    prompts = [{"prompt_token_ids": tokens} for tokens in texts]
    together = [output.outputs.data for output in llm.encode(prompts, RAW, use_tqdm=False)]
    for tokens, found in zip(texts, together, strict=True):
        np.testing.assert_allclose(found, expected(reference, model.architecture, tokens), atol=1e-4, rtol=0)
    [alone] = llm.encode(prompts[-1:], RAW, use_tqdm=False)
    assert np.array_equal(alone.outputs.data, together[-1])


def expected(reference: Any, architecture: str, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        output = reference(torch.tensor([tokens]))
    if architecture == "EuroBertModel":
        return output.last_hidden_state[0].mean(0).numpy()
    if architecture.endswith("Model"):
        at = 0 if architecture in ENCODERS else -1
        return output.last_hidden_state[0, at].numpy()
    return output.logits[0].numpy()


@pytest.mark.parametrize(
    "name", [
        pytest.param(name, marks=() if name == "MPNetModel" else pytest.mark.long)  # which has biases by distance
        for name in MODELS if name in DECODERS or name.endswith(("Model", "ForSequenceClassification"))
    ],
)  # fmt: skip
def test_two_workers_have_the_bits_of_one(name: str, tmp_path: Path, tiny_tokenizer: Path) -> None:
    model = MODELS[name]
    model.save(model.reference(seed=0), tmp_path)
    texts = [list(range(3, 3 + length)) for length in LENGTHS]
    flags: dict[str, Any] = {"tensor_parallel_size": 2, "reproducible_parallel": True}
    expected, found = (pooled(tmp_path, texts, RAW, tokenizer=str(tiny_tokenizer), **f) for f in ({}, flags))
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["mistral", "qwen 3 classifier", "EuroBertModel"])
def test_quantized_models_keep_the_direction(name: str, tmp_path: Path, tiny_tokenizer: Path) -> None:
    """Where every block quantizes what it reads, the stream that is pooled is float32 in a model of bfloat16."""
    model = MODELS[name]
    model = model._replace(settings={**model.settings, "hidden_size": 64, "intermediate_size": 96})
    reference = model.reference(seed=seed_of(name))
    model.save(reference, tmp_path)
    texts = [torch.randint(3, VOCAB, (length,)).tolist() for length in LENGTHS[1:]]
    settings = {"dtype": "bfloat16", "quantization": "int8", "tokenizer": str(tiny_tokenizer)}
    found = pooled(tmp_path, texts, RAW, **settings)
    for tokens, vector in zip(texts, found, strict=True):
        exact = expected(reference, model.architecture, tokens)
        assert vector @ exact > 0.99 * np.linalg.norm(vector) * np.linalg.norm(exact)
    assert np.array_equal(pooled(tmp_path, texts[-1:], RAW, **settings)[0], found[-1])


def pooled(folder: Path, texts: list[Any], params: PoolingParams | None = None, **settings: Any) -> list[np.ndarray]:
    with LLM(str(folder), **{"dtype": "float32", "max_num_seqs": 4, **settings}) as llm:
        prompts = [text if isinstance(text, str) else {"prompt_token_ids": text} for text in texts]
        return [output.outputs.data for output in llm.encode(prompts, params, use_tqdm=False)]


def test_pooling_normalization_and_dense_layers_of_a_sentence_transformers_folder(tmp_path: Path) -> None:
    reference = write_model(tmp_path, "BertModel")
    dense = torch.nn.Linear(48, 20)
    pooling = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "include_prompt": False}
    settings = {
        "in_features": 48, "out_features": 20, "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }  # fmt: skip
    write_modules(tmp_path, ("Pooling", pooling), ("Dense", settings), ("Normalize", None),
                  prompts={"q": "find the :"}, default_prompt_name="q")  # fmt: skip
    save_file({f"linear.{n}": p.detach() for n, p in dense.named_parameters()}, tmp_path / "2_Dense/model.safetensors")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    texts = ["the cat sat", "a dog ran fast on the hill"]
    for text, found in zip(texts, pooled(tmp_path, texts), strict=True):
        with torch.no_grad():
            tokens = tokenizer(f"find the :{text}", return_tensors="pt")["input_ids"]
            hidden = reference(tokens).last_hidden_state[0, 4:]  # without [CLS] and the prompt
            expected = torch.nn.functional.normalize(dense(hidden.mean(0)).tanh(), dim=0)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", [{"type": "x.Dense", "path": "../2_Dense"}], "at ../2_Dense, which is outside of the folder"),
        ("modules.json", [{"type": "x.Pooling", "path": "/tmp"}], "at /tmp, which is outside of the folder"),
        ("2_Dense/config.json", {"out_features": "20"}, "2_Dense/config.json: out_features is 20, no size"),
        ("1_Pooling/config.json", {"pooling_mode": 7}, "1_Pooling pools by nothing, which is not built"),
        (
            "sentence_bert_config.json",
            {"max_seq_length": "7"},
            "sentence_bert_config.json: max_seq_length is 7, no length",
        ),
        ("config_sentence_transformers.json", {"prompts": [1]}, r"prompts is \[1\], not an object"),
    ],
)
def test_damaged_settings_of_a_sentence_transformers_folder_are_named(
    name: str, content: Any, message: str, tmp_path: Path
) -> None:
    write_modules(tmp_path, ("Pooling", {"pooling_mode": "mean"}), ("Dense", {"out_features": 20}))
    assert read_sentence_transformer(str(tmp_path)) is not None
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(LoadError, match=message):
        read_sentence_transformer(str(tmp_path))


@pytest.mark.parametrize("kind", ["MEAN", "MAX", "MEAN_SQRT", "WEIGHTED_MEAN", "LAST", "ALL"])
def test_what_is_pooled_may_be_said(kind: str, small_bert: tuple[Any, Path], tiny_tokenizer: Path) -> None:
    reference, folder = small_bert
    tokens = list(range(3, 40))
    with torch.no_grad():
        hidden = reference(torch.tensor([tokens])).last_hidden_state[0]
    counts = torch.arange(1, 38)[:, None]
    expected = {
        "MEAN": hidden.mean(0), "MAX": hidden.amax(0), "MEAN_SQRT": hidden.sum(0) / 37**0.5, "LAST": hidden[-1],
        "WEIGHTED_MEAN": (hidden * counts).sum(0) / counts.sum(), "ALL": hidden,
    }  # fmt: skip
    config = {"pooling_type": kind, "normalize": False}
    [found] = pooled(folder, [tokens], pooler_config=config, tokenizer=str(tiny_tokenizer))
    np.testing.assert_allclose(found, expected[kind], atol=1e-4)


@pytest.fixture(scope="module")
def small_bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("bert")
    reference = ENCODERS["BertModel"].reference(0)
    ENCODERS["BertModel"].save(reference, folder)
    return reference, folder


def test_gemma_attends_both_ways(tmp_path: Path, tiny_tokenizer: Path) -> None:
    settings = {
        "use_bidirectional_attention": True, "sliding_window": 16, "layer_types": ["sliding_attention"] * 2
        + ["full_attention"],
    }  # fmt: skip
    model = SmallEncoder("Gemma3TextModel", "gemma3_text", settings)
    reference = model.reference(0)
    model.save(reference, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["sliding_window"] = 16  # transformers has halved it, and would again
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = torch.arange(3, 90)
    found = pooled(
        tmp_path, [tokens.tolist()], RAW, pooler_config={"pooling_type": "MEAN"}, tokenizer=str(tiny_tokenizer)
    )
    with torch.no_grad():
        expected = reference(tokens[None]).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(found[0], expected, atol=1e-4)


def test_a_decoder_judges_by_two_tokens(tmp_path: Path, tiny_tokenizer: Path) -> None:
    """As Qwen3-Reranker does; also in parts, and from cached blocks."""
    model = SmallEncoder("Qwen3ForCausalLM", "qwen3", {"tie_word_embeddings": True, "vocab_size": 259,
                                                       "max_position_embeddings": 700})  # fmt: skip
    reference = model.reference(0)
    model.save(reference, tmp_path)
    llm = LLM(
        str(tmp_path), tokenizer=str(tiny_tokenizer), dtype="float32", max_num_batched_tokens=64, block_size=8,
        hf_overrides={
            "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["n", "y"],
            "is_original_qwen3_reranker": True,
        },
    )  # fmt: skip
    outputs = llm.score("x", ["a", "b", "a"], instruction="find", use_tqdm=False)
    with torch.no_grad():
        logits = reference(torch.tensor([outputs[0].prompt_token_ids])).logits[0, -1]
    no, yes = llm.tokenizer.convert_tokens_to_ids(["n", "y"])
    expected = torch.stack([logits[no], logits[yes]]).softmax(0)[1].item()
    assert abs(outputs[0].outputs.score - expected) < 1e-5
    assert outputs[0].outputs.score == outputs[2].outputs.score != outputs[1].outputs.score
    [whole], [short] = (llm.score("x", document, use_tqdm=False) for document in ("abcdefgh", "abcde"))
    num_kept = len(whole.prompt_token_ids) - 3
    [cut] = llm.score("x", "abcdefgh", truncate_prompt_tokens=num_kept, use_tqdm=False)
    assert cut.prompt_token_ids == short.prompt_token_ids and cut.outputs.score == short.outputs.score
    with pytest.raises(RequestError, match="leaves no room beside the tokens that stay"):
        llm.score("x", "abcdefgh", truncate_prompt_tokens=num_kept - 5, use_tqdm=False)
    [again] = llm.score("x", "a", instruction="find", use_tqdm=False)
    assert again.num_cached_tokens > 100
    assert again.outputs.score == outputs[0].outputs.score


def test_late_interaction_compares_tokens(tmp_path: Path) -> None:
    model = SmallEncoder("HF_ColBERT", "bert", {}, "BertModel")
    reference = model.reference(0)
    reference.config.dim = 24
    model.save(reference, tmp_path)
    write_tokenizer(tmp_path)
    linear = torch.randn(24, 48, generator=torch.Generator().manual_seed(1))
    tensors = load_file(tmp_path / "model.safetensors")
    named = {f"bert.{name}": tensor for name, tensor in tensors.items()} | {"linear.weight": linear}
    save_file(named, tmp_path / "model.safetensors")
    llm = LLM(str(tmp_path), dtype="float32")
    found = [output.outputs.score for output in llm.score("the cat", ["a dog", "the cat sat"], use_tqdm=False)]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)

    def vectors(text: str) -> torch.Tensor:
        with torch.no_grad():
            hidden = reference(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        return torch.nn.functional.normalize(hidden @ linear.T, dim=1)

    expected = [(vectors("the cat") @ vectors(t).T).amax(1).sum().item() for t in ("a dog", "the cat sat")]
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"runner": "generate"}, "has no output matrix to generate with"),
        ({"task": "generate"}, "has no output matrix to generate with"),
        ({"convert": "classify"}, "has no classifier"),
        ({"task": "dream"}, "--task must be"),
        ({"pooler_config": {"pooling_type": "MEDIAN"}}, "pooling_type must be one of"),
        ({"pooler_config": {"step_tag_id": 3}}, "step_tag_id, which is not built"),
        ({"max_num_batched_tokens": 64}, "lower --max-model-len"),
        ({"enable_lora": True}, "--enable-lora is not built for models that pool"),
    ],
)
def test_what_cannot_be_is_refused(
    settings: dict[str, Any], message: str, small_bert: tuple[Any, Path], tiny_tokenizer: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(small_bert[1]), tokenizer=str(tiny_tokenizer), **settings)


def test_a_pooling_model_does_not_generate(small_bert: tuple[Any, Path], tiny_tokenizer: Path) -> None:
    llm = LLM(str(small_bert[1]), tokenizer=str(tiny_tokenizer))
    with pytest.raises(RequestError, match="is a pooling model and generates no text"):
        llm.generate("a")
    with pytest.raises(RequestError, match="gives embeddings"):
        llm.classify("a")
    params = [PoolingParams(), PoolingParams(), PoolingParams(truncate_prompt_tokens=9), PoolingParams()]
    for wrong, message in (
        ("\ud800", "the prompt is not valid Unicode text"),
        (5, "a prompt must be text"),
        ([10**6], ""),
    ):
        with pytest.raises(RequestError, match=rf"^prompts\[3\]: {message}") as refusal:
            llm.embed(["a", "b", "c", wrong], params, use_tqdm=False)  # type: ignore[list-item]
        assert refusal.value.param == "prompts"
    with pytest.raises(RequestError, match="multi_modal_data is not built for models that pool"):
        llm.embed({"prompt": "a", "multi_modal_data": {"image": 1}}, use_tqdm=False)
    with pytest.raises(RequestError, match="prompt_name needs a text"):
        llm.embed([1, 2], prompt_name="query", use_tqdm=False)
    with pytest.raises(RequestError, match="cache_salt must be a string"):
        llm.embed({"prompt": "a", "cache_salt": 5}, use_tqdm=False)
    assert PoolingInput(llm.inputs).process([Text.of({"prompt": "a", "cache_salt": "s"})])[0].prompt.cache_salt == "s"
    with pytest.raises(RequestError, match=r"^data_2\[1\]: "):
        llm.score("a", ["b", "\ud800"], use_tqdm=False)
    assert len(llm.embed("a", use_tqdm=False)[0].outputs.embedding) == 48


def test_a_second_text_has_the_only_type_of_a_model_with_one(tmp_path: Path) -> None:
    """Whatever the tokenizer says: a row that the table lacks would end the engine."""
    write_model(tmp_path, "BertForSequenceClassification", num_labels=1, type_vocab_size=1)
    with LLM(str(tmp_path), dtype="float32", max_num_seqs=4) as llm:
        assert 1 in llm.tokenizer.backend_tokenizer.encode("the cat", "a dog").type_ids
        assert len(llm.score("the cat", ["a dog", "the hill"], use_tqdm=False)) == 2
        [again] = llm.score("the cat", "a dog", use_tqdm=False)
        assert math.isfinite(again.outputs.score)
