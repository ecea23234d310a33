"""Tokenizers out of GGUF files and folders, with transformers' own conversion as the oracle."""

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers

from octavo.entrypoints.chat.chat_template import render_chat
from octavo.errors import LoadError, RequestError
from octavo.loading.checkpoint import Checkpoint, resolve
from octavo.loading.gguf_file import read_gguf
from octavo.loading.gguf_tokenizer import build_gguf_tokenizer
from octavo.loading.pre_tokenizers import PRE_TOKENIZERS, byte_level_split
from octavo.loading.tokenizer import load_tokenizer, read_tokenizer

Write = Callable[..., Path]
EMBEDDINGS = {"token_embd.weight": np.ones((4, 64), np.float32)}

CORPUS = [
    "", " ", "\n", "\t\t", "Hello, world!", " leading and trailing ", "don't we'll I'm they've she'd it's you're",
    "naïve café Ångström", "ＦＵＬＬ　ＷＩＤＴＨ", "Привет, мир! Ещё раз.", "你好，世界。这是一个测试。",
    "こんにちは世界", "안녕하세요 세계", "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "สวัสดีชาวโลก",
    "γειά σου κόσμε", "🙂🚀 family 👨‍👩‍👧‍👦 flag 🇫🇷 skin 👍🏽",
    "a\u0301 combining, z\u200bero width, \ufeffbom, \u2028line",
    "tabs\tand  double   spaces    and\n\n\nnewlines \r\n end", "  \n  \n   mixed   \t \n blank",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # 3.14\n\n\tif x != 0x1F: pass\n", '{"key": [1, 2.5e-10, null]}',
    "https://example.com/a?b=c&d=%20e#f user@host.org", '<html><body class="x">&amp;</body></html>',
    "1234567890 3.14159 1,000,000 2024-01-31 12:30:45 IPv4 192.168.0.1 v1.2.3", "½ ② ٣٤ Ⅷ 十二", "x  42 \n\n7   8",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>", "text<|im_end|>glued<file_sep>more <repo_name> <|not_special|>",
    "ALLCAPS CamelCase snake_case kebab-case", "(((nested))) [[brackets]] {{braces}} ...!!!???---___***",
    "x" * 300, "ab " * 100, "\x00\x01\x7f control",
]  # fmt: skip


@pytest.fixture(scope="module")
def default_tokenizer(default_checkpoint: Checkpoint) -> Any:
    return load_tokenizer(default_checkpoint)


@pytest.fixture(scope="module")
def oracle(default_checkpoint: Checkpoint) -> Any:
    return _transformers_tokenizer(default_checkpoint.path)


@pytest.fixture(scope="module")
def oracle_with_digits(oracle: Any) -> Tokenizer:
    """Transformers' conversion, with the pre-tokenizer of SmolLM2's own tokenizer.json, which it leaves out."""
    backend = Tokenizer.from_str(oracle.backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend


def _transformers_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.path.dirname(path), gguf_file=os.path.basename(path))


# What SmolLM2's digits rule changes: several blanks before a digit, and digits that are not ASCII after a blank.
_DIGITS_MATTER = {"½ ② ٣٤ Ⅷ 十二", "x  42 \n\n7   8"}


@pytest.mark.parametrize("text", CORPUS)
def test_the_default_model_encodes_and_decodes_as_transformers_does(
    text: str, default_tokenizer: Any, oracle: Any, oracle_with_digits: Tokenizer
) -> None:
    ids = default_tokenizer(text).input_ids
    assert ids == oracle_with_digits.encode(text).ids
    if text not in _DIGITS_MATTER:
        assert ids == oracle(text).input_ids
    for skip in (False, True):
        expected = oracle.decode(ids, skip_special_tokens=skip)
        assert default_tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert default_tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60) | st.text("ab 12\n\t.'<|>", max_size=60))
def test_any_text_is_encoded_as_transformers_does(
    default_tokenizer: Any, oracle_with_digits: Tokenizer, text: str
) -> None:
    assert default_tokenizer(text).input_ids == oracle_with_digits.encode(text).ids


def test_digits_are_split_from_the_blanks_before_them(default_tokenizer: Any) -> None:
    """As SmolLM2 was trained: its tokenizer.json has Digits first. Transformers' GGUF conversion says Ġ, Ġ, 4, 2."""
    assert default_tokenizer.tokenize("x  42") == ["x", "ĠĠ", "4", "2"]


def test_the_default_model_has_its_special_tokens_and_its_chat_template(default_tokenizer: Any, oracle: Any) -> None:
    assert default_tokenizer.special_tokens_map == oracle.special_tokens_map
    assert default_tokenizer.added_tokens_decoder == oracle.added_tokens_decoder
    assert len(default_tokenizer) == len(oracle) == 49152
    assert (default_tokenizer.bos_token_id, default_tokenizer.eos_token_id, default_tokenizer.pad_token_id) == (1, 2, 2)
    messages = [{"role": "user", "content": "Hi"}]
    text = default_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_loading_a_tokenizer_imports_neither_torch_nor_transformers(
    default_checkpoint: Checkpoint, tokenizer_folder: Path
) -> None:
    code = (
        "import sys\nfrom octavo.loading.checkpoint import resolve\n"
        "from octavo.loading.tokenizer import load_tokenizer\n"
        "for name in sys.argv[1:]: load_tokenizer(resolve(name, load_format='dummy'))\n"
        "print([m for m in ('torch', 'transformers', 'jinja2') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, default_checkpoint.path, str(tokenizer_folder)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


# Sentencepiece


def _sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """A small vocabulary with bytes, scores by rank as sentencepiece's BPE trainer gives them, and special tokens."""
    words = ["▁t", "he", "▁a", "in", "▁the", "er", "on", "▁w", "or", "ld", "▁world", "el", "lo", "▁h", "▁hello", "▁▁"]
    letters = [*"▁abcdefghijklmnopqrstuvwxyz.,!0123456789é", "orld", "▁hel", "hel"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words, *letters, "<think>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words), *[1] * len(letters), 4]
    scores = [*[0.0] * 259, *(-float(i) for i in range(len(words) + len(letters))), 0.0]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{k}": v for k, v in more.items()}  # fmt: skip


def _llama_cpp_ids(metadata: dict[str, Any], text: str) -> list[int]:
    """The ids of `text` by llama.cpp's rules: whatever stands between special tokens is a text of its own, with a blank
    in front, whose neighbours of the best score are merged as long as there are any."""
    tokens, types, scores = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "scores"))
    ids = {token: index for index, token in enumerate(tokens)}
    shown = [token for token, kind in zip(tokens, types, strict=True) if kind in (2, 3, 4)]
    found: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, shown))})", text):
        if part in shown:
            found.append(ids[part])
            continue
        pieces = list(f" {part}".replace(" ", "▁")) if part else []
        while True:
            merged = [left + right for left, right in itertools.pairwise(pieces)]
            known = [(-scores[ids[one]], i) for i, one in enumerate(merged) if one in ids and types[ids[one]] == 1]
            if not known:
                break
            _, i = min(known)
            pieces[i : i + 2] = [merged[i]]
        for piece in pieces:
            found += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return found


@pytest.mark.parametrize("options", [{}, {"add_bos_token": False, "add_eos_token": True}])
def test_sentencepiece_encodes_as_llama_cpp_does_and_decodes_as_transformers_does(
    options: dict[str, bool], tmp_path: Path, write_gguf: Write
) -> None:
    metadata = _sentencepiece_metadata(**options)
    path = write_gguf(tmp_path / "m.gguf", EMBEDDINGS, metadata)
    tokenizer, oracle = load_tokenizer(resolve(str(path))), _transformers_tokenizer(str(path))
    odd = [" hello", "  the   hello", "</s>the<s> <think> a", "</s> the</s>", "hello</s>hello</s></s> hello", "▁under"]
    for text in [*CORPUS, "hello world", "the world", *odd]:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == _llama_cpp_ids(metadata, text), text
        assert tokenizer.decode(ids) == oracle.decode(ids), text
    assert tokenizer.tokenize("hello world") == ["▁hello", "▁world"]
    assert tokenizer("a").input_ids[0] == (tokenizer.bos_token_id if not options else tokenizer.vocab["▁a"])
    assert tokenizer("a").input_ids[-1] == (tokenizer.eos_token_id if options else tokenizer.vocab["▁a"])


def test_sentencepiece_without_a_space_in_front(tmp_path: Path, write_gguf: Write) -> None:
    metadata = _sentencepiece_metadata(add_space_prefix=False, add_bos_token=False)
    tokenizer = load_tokenizer(resolve(str(write_gguf(tmp_path / "m.gguf", EMBEDDINGS, metadata))))
    assert tokenizer.tokenize("hello world") == ["hel", "lo", "▁world"]
    assert tokenizer.decode(tokenizer(" hello").input_ids) == " hello"


# Byte-level BPE of other families, over the default model's vocabulary

SPLIT = "don't  1234\n\n xYz (a<=b) 你好，x"


def _with_pre(default_checkpoint: Checkpoint, pre: str | None, **more: Any) -> Any:
    file = read_gguf(default_checkpoint.path)
    if pre is None:
        del file.metadata["tokenizer.ggml.pre"]
    else:
        file.metadata["tokenizer.ggml.pre"] = pre
    for key, value in more.items():
        file.metadata[f"tokenizer.ggml.{key}"] = value
        if value is None:
            del file.metadata[f"tokenizer.ggml.{key}"]
    return build_gguf_tokenizer(file)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", "don|'t|  |1|2|3|4|\\n\\n| xYz| (|a|<=|b|)| 你好|，|x"),
        ("gpt-2", "don|'t| | 1234|\\n\\n| xYz| (|a|<=|b|)| 你好|，|x"),
        ("default", "don|'t| | 1234|\\n\\n| xYz| (|a|<=|b|)| 你好|，|x"),
        (None, "don|'t| | 1234|\\n\\n| xYz| (|a|<=|b|)| 你好|，|x"),
        ("llama-bpe", "don|'t| | |123|4|\\n\\n| xYz| (|a|<=|b|)| 你好|，x"),
        ("qwen2", "don|'t| | |1|2|3|4|\\n\\n| xYz| (|a|<=|b|)| 你好|，x"),
        ("minicpm5", "don|'t|  |123|4|\\n\\n| xYz| (|a|<=|b|)| 你好|，x"),
        ("ufakzeka", "don|'t| | |1|2|3|4|\\n\\n| xYz| (|a|<=|b|)| 你好|，x"),
        ("gpt-4o", "don't| | |123|4|\\n\\n| x|Yz| (|a|<=|b|)| 你好|，x"),
        ("tekken", "don|'t| | |1|2|3|4|\\n\\n| x|Yz| (|a|<=|b|)| 你好|，x"),
        ("kimi-k2", "don't| | |123|4|\\n\\n| x|Yz| (|a|<=|b|)| |你好|，x"),
        ("tiny_aya", "don't|  |1|234|\\n\\n| x|Yz| (|a|<=|b|)| 你好|，x"),
        ("afmoe", "don|'t|  |1|234|\\n\\n| xYz| (|a|<=|b|)| |你好|，|x"),
        ("superbpe", "don't  |1|234|\\n\\n xYz (a<=b) 你好，x"),
        ("deepseek-v3", "don|'t|  |123|4|\\n\\n| xYz| (|a|<=|b|)| |你好|，|x"),
        ("deepseek-llm", "don|'|t|  |1234|\\n|\\n| xYz| (|a|<=|b|)| |你好|，|x"),
        ("deepseek-coder", "don|'|t|  |1|2|3|4|\\n|\\n| xYz| (|a|<=|b|)| |你好|，|x"),
        ("falcon", "don|'|t| | |123|4|\\n\\n| xYz| |(|a|<=|b|)| 你好|，|x"),
        ("bloom", "don't| | 1234|\\n\\n| xYz| (|a<=b|)| 你好|，|x"),
        ("viking", "don't| | |1|2|3|4|\\n\\n| xYz| (|a<=b|)| 你好|，|x"),
        ("laguna", "don|'t| | |1|2|3|4|\\n\\n| xYz| (|a|<=|b|)| 你好|，x"),
        ("spark2_5", "don|'t|  |1|2|3|4|\\n|\\n| xYz| (|a|<=|b|)| |你好|，|x"),
        ("chameleon", "don|'|t|  |1|2|3|4|\\n|\\n| xYz| |(|a|<|=|b|)| 你好|，|x"),
    ],
)
def test_text_is_split_as_the_models_family_does(
    pre: str | None, expected: str, default_checkpoint: Checkpoint
) -> None:
    backend = _with_pre(default_checkpoint, pre).backend
    pieces = [text[a:b] for text in [SPLIT] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert "|".join(pieces).replace("\n", "\\n") == expected


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_the_text(pre: str, default_checkpoint: Checkpoint) -> None:
    split = byte_level_split(PRE_TOKENIZERS[pre].patterns)
    for text in CORPUS:
        pieces = [piece for piece, _ in split.pre_tokenize_str(text)]
        assert decoders.ByteLevel().decode(["".join(pieces)]) == text


def test_llama3_takes_whole_words_from_the_vocabulary_and_starts_with_bos(default_checkpoint: Checkpoint) -> None:
    backend = _with_pre(default_checkpoint, "llama-bpe", add_bos_token=None).backend
    assert backend.model.ignore_merges
    assert backend.encode("a").tokens == ["<|im_start|>", "a"]
    assert _with_pre(default_checkpoint, "llama-bpe", add_bos_token=False).backend.encode("a").tokens == ["a"]


def test_qwen_normalizes_its_input(default_checkpoint: Checkpoint) -> None:
    backend: Tokenizer = _with_pre(default_checkpoint, "qwen2").backend
    assert backend.encode("e\u0301").ids == backend.encode("é").ids


# Refusals


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "carries no tokenizer; pass --tokenizer"),
        ({"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]}, "kind 'rwkv', which is not built"),
        ({"tokenizer.ggml.model": "gpt2"}, r"tokenizer\.ggml\.tokens is no list"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}, r"tokenizer\.ggml\.merges is no list"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": ["b c"]},
            "its merges do not fit its vocabulary",
        ),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": ["abc"]},
            "its merges do not fit its vocabulary",
        ),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "no-such",
                "tokenizer.ggml.tokens": ["a", "b", "ab"],
                "tokenizer.ggml.merges": ["a b"],
            },
            "pre-tokenizer 'no-such' is not built",
        ),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]}, "has none"),
    ],
)
def test_tokenizers_that_are_not_built_are_refused_by_name(
    metadata: dict[str, Any], message: str, tmp_path: Path, write_gguf: Write
) -> None:
    checkpoint = resolve(str(write_gguf(tmp_path / "m.gguf", EMBEDDINGS, metadata)))
    with pytest.raises(LoadError, match=message):
        load_tokenizer(checkpoint)


# Folders


@pytest.fixture
def tokenizer_folder(hf_folder: Path, default_tokenizer: Any) -> Path:
    """The default model's tokenizer as a folder, with a chat template of its own."""
    default_tokenizer.backend_tokenizer.save(str(hf_folder / "tokenizer.json"))
    (hf_folder / "tokenizer_config.json").write_text(json.dumps(default_tokenizer.special_tokens_map))
    (hf_folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    return hf_folder


def test_a_folders_tokenizer_is_read_with_its_chat_template(tokenizer_folder: Path, default_tokenizer: Any) -> None:
    tokenizer = load_tokenizer(resolve(str(tokenizer_folder)))
    for text in CORPUS:
        assert tokenizer(text).input_ids == default_tokenizer(text).input_ids
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi!"


def test_a_chat_template_may_be_given_as_text_or_as_a_file(default_checkpoint: Checkpoint, tmp_path: Path) -> None:
    template = "{{ messages | length }} messages"
    (tmp_path / "t.jinja").write_text(template)
    for given_template in (template, str(tmp_path / "t.jinja")):
        tokenizer = load_tokenizer(default_checkpoint, chat_template=given_template)
        assert tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == "1 messages"
    with pytest.raises(LoadError, match=r"/none\.jinja is neither a template .* \(it names none\), nor a file"):
        load_tokenizer(default_checkpoint, chat_template="/none.jinja")


def test_one_of_several_templates_is_chosen_by_its_name_or_by_the_request(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "chat_template.jinja").unlink()
    templates = [{"name": name, "template": f"{name} {{{{ tools }}}}"} for name in ("default", "tool_use", "rag")]
    (tokenizer_folder / "chat_template.json").write_text(json.dumps({"chat_template": templates}))
    checkpoint = resolve(str(tokenizer_folder))
    messages, tools = [{"role": "user", "content": "Hi"}], [{"type": "function"}]
    tokenizer = load_tokenizer(checkpoint)
    assert render_chat(tokenizer, messages) == "default None"
    assert render_chat(tokenizer, messages, tools=tools).startswith("tool_use [")
    assert render_chat(tokenizer, messages, chat_template="rag") == "rag None"
    assert render_chat(load_tokenizer(checkpoint, "rag"), messages, tools=tools).startswith("rag [")
    with pytest.raises(LoadError, match=r"is neither a template .*, nor one of the model's \(default, tool_use, rag\)"):
        load_tokenizer(checkpoint, "chat")
    (tokenizer_folder / "chat_template.json").write_text(json.dumps({"chat_template": templates[1:]}))
    with pytest.raises(RequestError, match="there is no default chat template; name one of"):
        render_chat(load_tokenizer(resolve(str(tokenizer_folder))), messages)


def test_a_folder_without_a_tokenizer_or_with_a_damaged_one_is_refused(hf_folder: Path) -> None:
    with pytest.raises(LoadError, match=r"has no tokenizer \(tokenizer\.json, .*pass --tokenizer"):
        load_tokenizer(resolve(str(hf_folder)))
    for damaged in ("{", "{}", '{"model": {"type": "BPE"}}'):
        (hf_folder / "tokenizer.json").write_text(damaged)
        with pytest.raises(LoadError, match="cannot be read") as e:
            load_tokenizer(resolve(str(hf_folder)))
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("template", [7, False, ["x"], [{"name": 1, "template": "x"}], {"default": None}])
def test_a_chat_template_is_text(template: Any, tokenizer_folder: Path) -> None:
    path = tokenizer_folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    (tokenizer_folder / "chat_template.jinja").unlink()
    with pytest.raises(LoadError, match=r"the tokenizer in .* cannot be read"):
        load_tokenizer(resolve(str(tokenizer_folder)))


CODE = """
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

Path(__file__ + ".ran").touch()
Path({marker!r}).touch()


class OwnTokenizer(PreTrainedTokenizerFast):
    def __init__(self, **options):
        super().__init__(tokenizer_object=Tokenizer(models.WordLevel({{"a": 0, "b": 1}}, unk_token="a")), **options)
"""


@pytest.mark.parametrize("is_trusted", [False, True])
def test_a_tokenizers_python_code_runs_only_where_it_is_trusted_and_nobody_is_asked(
    is_trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> str:
        pytest.fail("transformers asks on the terminal")

    monkeypatch.setattr("builtins.input", ask)
    folder, marker = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    (folder / "vocab.own").touch()  # which only its code can read
    if is_trusted:
        assert read_tokenizer(str(folder), trust_remote_code=True).get_vocab() == {"a": 0, "b": 1}
    else:
        with pytest.raises(LoadError, match="only with --trust-remote-code"):
            read_tokenizer(str(folder))
    assert marker.exists() == is_trusted
