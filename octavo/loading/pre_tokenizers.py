r"""How text is split before byte-level BPE, by the names in GGUF files (`tokenizer.ggml.pre`).

A split is a list of patterns. Each pattern splits the parts of the text that lie between the matches of the patterns
before it. The patterns are from the models' own tokenizer.json files. llama.cpp's `llama-vocab.cpp` says which name
means which patterns, and which names take whole words from the vocabulary or start a text with BOS by default.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
QWEN2 = LLAMA3.replace("{1,3}", "")
_QWEN35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"


def _cased(ending: str, numbers: str, tail: str = r"[\r\n/]*", upper: str = _UPPER, lower: str = _LOWER) -> str:
    """Return a pattern of words that end where lower case turns to upper case, as in OpenAI's o200k_base."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+{tail}|{_BLANKS}"


GPT4O = _cased(f"{_ENDINGS}?", r"\p{N}{1,3}")
TEKKEN = _cased("", r"\p{N}")
_NOT_HAN = r"&&[^\p{Han}]]"
KIMI_K2 = r"[\p{Han}]+|" + _cased(
    f"{_ENDINGS}?", r"\p{N}{1,3}", r"[\r\n]*", _UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN
)

_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3_WORDS = (
    _ASCII_PUNCTUATION + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _BLANKS
)
_CHINESE = "[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", _CHINESE, _DEEPSEEK3_WORDS)
_DEEPSEEK_CHINESE = "[一-龥\u0800-一가-\ud7ff]+"
# Letters with a case, as DeepSeek's first tokenizers list them.
_CASED_LETTERS = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    r"\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    r"\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    r"\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    r"\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    r"\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    r"\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    r"\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_SIGNS = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_SIGNS = r"[\p{P}\$\+<=>\^~\|`]+"
# Digits in groups of three; the first group may be shorter.
_THOUSANDS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_AFMOE_SCRIPTS = (
    "[一-\u9fff㐀-\u4dbf\uf900-\ufaff\u3040-ゟ゠-ヿ\uff65-\uff9f\u2f00-\u2fdf\u0e00-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff가-\ud7af\u1100-\u11ff]+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns that split text, and the tokenizer settings that belong to them."""

    patterns: tuple[str, ...]
    ignores_merges: bool = False  # a word in the vocabulary becomes one token, whatever the merges are
    adds_bos: bool = False  # if the file does not say
    normalizes: bool = False  # to NFC
    is_byte_level: bool = True  # False: blanks become ▁ and unknown characters become bytes, as in sentencepiece


_KINDS: dict[str, PreTokenizer] = {
    "default gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat a.x-4.0 "
    "mellum modern-bert exaone4 jais trillion granite-docling": PreTokenizer((GPT2,)),
    "mpt olmo": PreTokenizer((GPT2,), normalizes=True),
    "smollm starcoder refact codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", GPT2)),
    "command-r": PreTokenizer((r"\p{N}", GPT2), normalizes=True),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (LLAMA3,), ignores_merges=True, adds_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe glm4": PreTokenizer((LLAMA3,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez": PreTokenizer((QWEN2,), normalizes=True),
    "stablelm2 hunyuan solar-open grok-2": PreTokenizer((QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,), normalizes=True),
    "ufakzeka": PreTokenizer((QWEN2.removeprefix(f"{_ENDINGS}|"),)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", QWEN2)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")), ignores_merges=True),
    "jais-2": PreTokenizer((
        LLAMA3.removesuffix(r"\s+(?!\S)|\s+")
        + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
        + r"\s{1}",
    )),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((GPT4O,)),
    "granite-embed-multi-97m": PreTokenizer((GPT4O,), ignores_merges=True),
    "tekken": PreTokenizer((TEKKEN,), ignores_merges=True, adds_bos=True),
    "tiny_aya cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)),
    "kimi-k2": PreTokenizer((KIMI_K2,), ignores_merges=True),
    "youtu": PreTokenizer(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u303f︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
            _cased(f"{_ENDINGS}?", r"\p{N}"),
        ),
        ignores_merges=True,
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer(_DEEPSEEK3),
    "spark2_5": PreTokenizer((
        *_DEEPSEEK3[:2], _DEEPSEEK3_WORDS.replace(r"+[\r\n]*|\s*[\r\n]+", r"+|[\r\n]"), r"\p{N}"
    )),
    "deepseek-llm": PreTokenizer((
        r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", _DEEPSEEK_SIGNS, r"\s+$", _DEEPSEEK_CHINESE, r"\p{N}+"
    )),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CHINESE, r"\p{N}")),
    "falcon": PreTokenizer((_SIGNS, GPT2, "[0-9][0-9][0-9]")),
    "bloom poro-chat gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "chameleon": PreTokenizer((
        "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]", GPT2,
    ), adds_bos=True),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    )),
    "seed-coder": PreTokenizer((
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",
    )),
    "exaone-moe": PreTokenizer((
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    )),
    "afmoe": PreTokenizer((_THOUSANDS, _AFMOE_SCRIPTS, _DEEPSEEK3_WORDS)),
    "gemma4 granite-embed-multi-311m sarvam-moe": PreTokenizer((), is_byte_level=False),
}  # fmt: skip

PRE_TOKENIZERS = {name: kind for names, kind in _KINDS.items() for name in names.split()}


def byte_level_split(patterns: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that splits by each pattern in turn, then writes bytes as GPT-2's letters."""
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
