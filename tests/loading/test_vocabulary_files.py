"""Tokenizers out of vocabulary files alone, against the libraries that these files are of."""

import base64
import contextlib
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tiktoken

from octavo.errors import LoadError
from octavo.loading import vocabulary_files
from octavo.loading.checkpoint import Checkpoint, resolve
from octavo.loading.gguf_file import read_gguf
from octavo.loading.pre_tokenizers import GPT4O, LLAMA3, QWEN2, TEKKEN
from octavo.loading.sentencepiece_model import read_sentencepiece
from octavo.loading.tokenizer import load_tokenizer, read_tokenizer
from octavo.loading.tokenizer_parts import byte_letters, merges_from_scores
from tests.loading.test_load_tokenizer import CORPUS

# Texts with special tokens in them mean something else to sentencepiece, which knows of none.
PLAIN = [text for text in CORPUS if "<|" not in text]
TEXTS = [*PLAIN, "hello world", "  the   hello", " x ", "\u3000ＦＵＬＬ ﬁ ①", "naïve <think>  tabs\t<think>x"]
TEXTS += ["▁", " ▁", "▁ ", "a ▁ ", " ▁ x", "▁▁ a▁▁", "a  ▁  a"]  # blanks around what stands for one
TEXTS += ["a\r\nb", " \r\n\r\n c\r\r\n", "\n\r"]

Trained = Callable[..., Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A folder with a small sentencepiece model, trained on these texts."""

    def train(**options: Any) -> Path:
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(PLAIN * 4), model_writer=written, minloglevel=2, max_sentence_length=100000,
            **{"vocab_size": 560, "byte_fallback": True, "hard_vocab_limit": False, **options},
        )  # fmt: skip
        folder = tmp_path_factory.mktemp("spm")
        (folder / "tokenizer.model").write_bytes(written.getvalue())
        return folder

    return train


def check_pieces(ids: list[int], expected: list[int], oracle: Any) -> None:
    """The same pieces. Of two ways that are equally likely unigram takes one by rounding, as with "xxxx"."""
    if ids != expected:
        assert oracle.decode(ids) == oracle.decode(expected)
        assert sum(map(oracle.get_score, ids)) == pytest.approx(sum(map(oracle.get_score, expected)), rel=1e-6)


BPE, UNIGRAM = {"model_type": "bpe"}, {"model_type": "unigram"}
LLAMA = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.mark.parametrize(
    "options",
    [
        BPE | LLAMA,
        BPE | LLAMA | {"add_dummy_prefix": False, "user_defined_symbols": ["<think>", "▁▁"]},
        BPE | LLAMA | {"byte_fallback": False, "character_coverage": 0.98},
        BPE | {"normalization_rule_name": "identity"},
        UNIGRAM,
        UNIGRAM | LLAMA | {"split_by_whitespace": False},
        UNIGRAM | {"byte_fallback": False},
    ],
    ids=["Llama's", "Gemma's", "without bytes", "one blank", "unigram", "unigram over words", "unigram without bytes"],
)
def test_sentencepiece_models_are_read_as_the_library_does(options: dict[str, Any], trained: Trained) -> None:
    folder = trained(**options)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer = read_tokenizer(str(folder))
    assert set(tokenizer.get_vocab().values()) == set(range(oracle.vocab_size()))
    for text in TEXTS:
        ids = oracle.encode(text)
        found = tokenizer.encode(text, add_special_tokens=False)
        if options["model_type"] == "unigram":
            check_pieces(found, ids, oracle)
        else:
            assert found == ids, text
        if oracle.unk_id() not in ids:  # which the library writes as ⁇
            assert tokenizer.decode(ids) == oracle.decode(ids)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id
    assert tokenizer.encode("a</s>b")[-2:] != oracle.encode("a</s>b")[-2:], "special tokens are read in text"


def test_llama_tokenizers_are_read_as_transformers_does(trained: Trained) -> None:
    from transformers import LlamaTokenizer

    folder = trained(**BPE, **LLAMA)
    added = {"3": {"content": "<extra>", "special": True, "normalized": False, "lstrip": False, "rstrip": False,
                   "single_word": False}}  # fmt: skip
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True, "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": {"9999": added["3"]}}))
    tokenizer, oracle = read_tokenizer(str(folder)), LlamaTokenizer.from_pretrained(str(folder))
    for text in [*TEXTS, "a</s>b <s> c", "<extra>x"]:
        expected = oracle(text).input_ids
        assert tokenizer(text).input_ids == expected, text
        assert tokenizer.decode(expected) == oracle.decode(expected)
    assert tokenizer.get_vocab() == oracle.get_vocab()


def test_a_damaged_sentencepiece_model_is_refused(trained: Trained, tmp_path: Path) -> None:
    whole = (trained(**BPE, **LLAMA) / "tokenizer.model").read_bytes()
    path = tmp_path / "tokenizer.model"
    choose = random.Random(0)
    for _ in range(200):
        damaged = bytearray(whole[: choose.randrange(len(whole))] if choose.random() < 0.5 else whole)
        for _ in range(choose.randrange(4)):
            damaged[choose.randrange(len(damaged) or 1)] = choose.randrange(256) if damaged else 0
        path.write_bytes(damaged)
        with contextlib.suppress(LoadError):
            read_sentencepiece(str(path), True)
    path.write_bytes(b"neither this nor that")
    with pytest.raises(LoadError, match="neither a sentencepiece model nor a tiktoken file"):
        read_tokenizer(str(tmp_path))


def test_words_and_characters_are_refused(trained: Trained) -> None:
    folder = trained(model_type="char", byte_fallback=False)
    with pytest.raises(LoadError, match=r"sentencepiece model of kind 4, .*; unigram \(1\) and BPE"):
        read_tokenizer(str(folder))


# tiktoken


@pytest.fixture(scope="module")
def ranks(default_checkpoint: Checkpoint) -> dict[bytes, int]:
    """Bytes and the first 3,000 merges of the default model's vocabulary, in the order in which they were made."""
    letters = {letter: byte for byte, letter in byte_letters().items()}
    metadata = read_gguf(default_checkpoint.path).metadata
    merges = [merge.replace(" ", "") for merge in metadata["tokenizer.ggml.merges"][:3000]]
    tokens = dict.fromkeys(bytes([b]) for b in range(256)) | dict.fromkeys(
        bytes(letters[letter] for letter in token) for token in merges
    )
    return {token: i for i, token in enumerate(tokens)}


def _write_ranks(path: Path, ranks: dict[bytes, int]) -> None:
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % rank for t, rank in ranks.items()))


@pytest.mark.parametrize(
    ("name", "class_name", "pattern", "special", "roles"),
    [
        ("tokenizer.model", "", LLAMA3, "<|eot_id|>", ("<|begin_of_text|>", "<|end_of_text|>")),
        ("qwen.tiktoken", "QWenTokenizer", QWEN2, "<|im_end|>", (None, "<|endoftext|>")),
        ("o200k_base.tiktoken", "", GPT4O, "<|endoftext|>", (None, None)),
    ],
)
def test_tiktoken_files_are_read_as_the_library_does(
    name: str, class_name: str, pattern: str, special: str, roles: tuple[str | None, str | None], tmp_path: Path,
    ranks: dict[bytes, int],
) -> None:  # fmt: skip
    _write_ranks(tmp_path / name, ranks)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": class_name}))
    tokenizer = read_tokenizer(str(tmp_path))
    oracle = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in PLAIN:
        if "\u0301" in text and class_name:  # Qwen's composes letters first
            continue
        ids = oracle.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == oracle.decode(ids)
    assert tokenizer.convert_tokens_to_ids(special) >= len(ranks)
    assert len(tokenizer.encode(special, add_special_tokens=False)) == 1
    assert (tokenizer.bos_token, tokenizer.eos_token) == roles
    assert (tokenizer.encode("a")[0] == tokenizer.bos_token_id) == (roles[0] is not None)


def test_the_tokenizer_of_llama_4_is_told_from_that_of_llama_3_by_its_size(
    tmp_path: Path, ranks: dict[bytes, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary_files, "_MIN_LLAMA4_RANKS", len(ranks))
    _write_ranks(tmp_path / "tokenizer.model", ranks)
    tokenizer = read_tokenizer(str(tmp_path))
    oracle = tiktoken.Encoding("llama4", pat_str=GPT4O, mergeable_ranks=ranks, special_tokens={})
    for text in PLAIN:
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text), text
    # 200,000 ranks come first in Meta's own file, where these are 200,005, 200,008, 200,080 and 201,133.
    expected = {
        "<|header_start|>": 5,
        "<|eot|>": 8,
        "<|image_start|>": 80,
        "<|vision_reserved_special_token_1047|>": 1133,
    }
    assert {token: tokenizer.convert_tokens_to_ids(token) - len(ranks) for token in expected} == expected
    assert tokenizer.convert_tokens_to_ids("<|eot_id|>") is None


def test_special_tokens_of_tiktoken_files_have_the_ids_that_the_configuration_gives_them(
    tmp_path: Path, ranks: dict[bytes, int]
) -> None:
    _write_ranks(tmp_path / "tiktoken.model", ranks)
    token = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False) | {"special": True}
    added = {str(len(ranks) + i): token | {"content": f"[{i}]"} for i in (0, 3)}
    config = {"tokenizer_class": "TikTokenTokenizer", "eos_token": "[3]", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = read_tokenizer(str(tmp_path))
    assert tokenizer.eos_token_id == len(ranks) + 3
    assert tokenizer.encode("[0]a[3]") == [len(ranks), tokenizer.vocab["a"], len(ranks) + 3]
    (tmp_path / "tiktoken.model").write_bytes(base64.b64encode(b"a") + b" 0\nb c d\n")
    with pytest.raises(LoadError, match="not every line is a token and its rank"):
        read_tokenizer(str(tmp_path))


def test_a_vocabulary_has_no_more_tokens_than_a_file_can_list(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    """The ids between two of a file's tokens are filled, so two tokens can ask for any number."""
    _write_ranks(tmp_path / "tiktoken.model", ranks)
    added = {str(len(ranks) + i): {"content": f"[{i}]", "special": True} for i in (0, 10**12)}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=r"the largest id of added_tokens_decoder is .*, more than"):
        read_tokenizer(str(tmp_path))
    settings = {"pattern": TEKKEN, "default_vocab_size": 10, "default_num_special_tokens": 10**12}
    (tmp_path / "tekken.json").write_text(json.dumps({"config": settings, "vocab": []}))
    with pytest.raises(LoadError, match="default_num_special_tokens is 1000000000000, more than"):
        read_tokenizer(str(tmp_path))


def test_merges_of_a_long_token_are_found_by_the_lengths_of_others() -> None:
    """A token of a million letters has a million places to cut it."""
    long = "ab" * 500_000
    assert merges_from_scores({"a": 0.0, "b": 0.0, "ab": 1.0, long: 2.0}) == [("a", "b")]
    assert merges_from_scores({"a": 0.0, long[1:]: 0.0, long: 2.0}) == [("a", long[1:])]


@pytest.mark.parametrize("lists_special", [True, False])
def test_tekken_files_are_read_as_tiktoken_reads_their_vocabulary(
    lists_special: bool, tmp_path: Path, ranks: dict[bytes, int]
) -> None:
    words = [{"rank": r, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for t, r in ranks.items()]
    content: dict[str, Any] = {
        "config": {"pattern": TEKKEN, "num_vocab_tokens": len(words), "default_vocab_size": len(words) - 500 + 24,
                   "default_num_special_tokens": 24, "version": "v3"},
        "vocab": words,
    }  # fmt: skip
    if lists_special:
        names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[THINK]"]
        content["special_tokens"] = [
            {"rank": i, "token_str": name, "is_control": name != "[THINK]"} for i, name in enumerate(names)
        ]
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    tokenizer = read_tokenizer(str(tmp_path))
    kept = {token: rank for token, rank in ranks.items() if rank < len(ranks) - 500}
    oracle = tiktoken.Encoding("tekken", pat_str=TEKKEN, mergeable_ranks=kept, special_tokens={})
    for text in PLAIN:
        ids = [24 + i for i in oracle.encode(text)]
        assert tokenizer.encode(text) == [1, *ids], text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("[INST]a[/INST]")[1::2] == [3, 4]
    assert tokenizer.convert_ids_to_tokens([5, 20]) == (
        ["[THINK]", "<SPECIAL_20>"] if lists_special else ["[AVAILABLE_TOOLS]", "<SPECIAL_20>"]
    )
    assert tokenizer.decode([1, 5], skip_special_tokens=True) == ("[THINK]" if lists_special else "")


# Words


@pytest.mark.parametrize("class_name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocab_json_with_merges_is_read_as_transformers_does(
    class_name: str, default_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    import transformers

    spec = json.loads(load_tokenizer(default_checkpoint).backend_tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(spec["vocab"]))
    merges = "#version: 0.2\n" + "\n".join(" ".join(merge) for merge in spec["merges"]) + "\n"
    (tmp_path / "merges.txt").write_text(merges)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": class_name}))
    tokenizer = read_tokenizer(str(tmp_path))
    oracle = getattr(transformers, class_name).from_pretrained(str(tmp_path))
    for text in CORPUS:
        assert tokenizer(text).input_ids == oracle(text).input_ids, text
    assert tokenizer.special_tokens_map == oracle.special_tokens_map


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz0123456789.,!?'-", "hello", "world",
         "##s", "##ing", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz0123456789"), "世", "界", "cafe"]  # fmt: skip


@pytest.fixture
def bert(tmp_path: Path) -> tuple[Path, Any]:
    from transformers import BertTokenizer

    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return folder, BertTokenizer.from_pretrained(str(folder))


def test_vocab_txt_is_read_as_transformers_does(bert: tuple[Path, Any]) -> None:
    folder, oracle = bert
    tokenizer = read_tokenizer(str(folder))
    for text in CORPUS:
        ids = oracle(text).input_ids
        assert tokenizer(text).input_ids == ids, text
        assert tokenizer.decode(ids) == oracle.decode(ids)
    assert tokenizer.special_tokens_map == oracle.special_tokens_map


# The same kinds in GGUF files


def test_word_pieces_of_gguf_files(bert: tuple[Path, Any], tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    types = [3] * 5 + [1] * (len(WORDS) - 5)
    tokens = WORDS[:5] + [word[2:] if word.startswith("##") else f"▁{word}" for word in WORDS[5:]]
    ids = {"bos": 2, "unknown": 1, "seperator": 3, "padding": 0, "cls": 2, "mask": 4}
    metadata = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    metadata |= {f"tokenizer.ggml.{role}_token_id": index for role, index in ids.items()}
    embeddings = {"token_embd.weight": np.ones((4, 64), np.float32)}
    tokenizer = load_tokenizer(resolve(str(write_gguf(tmp_path / "m.gguf", embeddings, metadata))))
    for text in CORPUS:
        assert tokenizer(text).input_ids == bert[1](text).input_ids, text


def test_unigram_models_of_gguf_files(trained: Trained, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    """With the metadata that llama.cpp's converter copies from tokenizer.model."""
    (tmp_path / "rules.tsv").write_text("FF21\t41\n2028\t20\n9\t20\n")  # Ａ is A, lines and tabs are blanks
    folder = trained(**UNIGRAM, normalization_rule_tsv=str(tmp_path / "rules.tsv"))
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    model = read_sentencepiece(str(folder / "tokenizer.model"), True)
    metadata: dict[str, Any] = {
        "model": "t5", "tokens": model.pieces, "scores": model.scores, "token_type": model.types,
        "precompiled_charsmap": list(model.charsmap), "remove_extra_whitespaces": True, "add_space_prefix": True,
        "unknown_token_id": 0, "eos_token_id": 2, "bos_token_id": 1,
    }  # fmt: skip
    embeddings = {"token_embd.weight": np.ones((4, 64), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", embeddings, {f"tokenizer.ggml.{k}": v for k, v in metadata.items()})
    tokenizer = load_tokenizer(resolve(str(path)))
    for text in [*PLAIN, "Ａ\t\u2028b"]:
        *ids, eos = tokenizer(text).input_ids
        check_pieces(ids, oracle.encode(text), oracle)
        assert eos == 2


def test_files_of_named_templates(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_template": "plain", "tokenizer.chat_templates": ["tool_use", "rag"],
        "tokenizer.chat_template.tool_use": "tools", "tokenizer.chat_template.rag": "documents",
    }  # fmt: skip
    embeddings = {"token_embd.weight": np.ones((4, 64), np.float32)}
    tokenizer = load_tokenizer(resolve(str(write_gguf(tmp_path / "m.gguf", embeddings, metadata))))
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "plain"
    assert tokenizer.apply_chat_template(messages, tools=[{}], tokenize=False) == "tools"
    assert tokenizer.apply_chat_template(messages, chat_template="rag", tokenize=False) == "documents"


def test_files_without_merges_make_the_tokens_of_the_lowest_ids_first(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "kimi-k2",
        "tokenizer.ggml.tokens": ["a", "b", "c", "d", "bc", "ab", "abc", "cd"], "tokenizer.ggml.bos_token_id": None,
        "tokenizer.ggml.eos_token_id": None,
    }  # fmt: skip
    embeddings = {"token_embd.weight": np.ones((4, 64), np.float32)}
    tokenizer = load_tokenizer(resolve(str(write_gguf(tmp_path / "m.gguf", embeddings, metadata))))
    assert tokenizer.tokenize("abc") == ["abc"]
    assert tokenizer.tokenize("abcd") == ["abc", "d"]  # bc before ab and cd


def test_merges_over_characters_with_bytes_for_the_rest(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    """Gemma 4's: byte-pair merges, but blanks and bytes as sentencepiece has them."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab", "\n"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["▁ a", "▁a b"],
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.token_type": [2, *[6] * 256, *[1] * 6],
    }  # fmt: skip
    embeddings = {"token_embd.weight": np.ones((4, 64), np.float32)}
    tokenizer = load_tokenizer(resolve(str(write_gguf(tmp_path / "m.gguf", embeddings, metadata))))
    assert tokenizer.tokenize(" ab\né") == ["▁ab", "\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode(" ab\né")) == " ab\né"
