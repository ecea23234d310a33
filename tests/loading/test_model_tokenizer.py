"""`ModelTokenizer` against `transformers`, over every kind of tokenizer.json and of the files beside it."""

import asyncio
import dataclasses
import enum
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.entrypoints.chat.template_traits import template_traits
from octavo.errors import LoadError
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.jinja_template import EndlessTemplateError, render_template, text_after_answer
from octavo.loading.tokenizer import ModelTokenizer, load_tokenizer, read_tokenizer
from tests.loading.test_load_tokenizer import CORPUS

SPECIAL = ["<s>", "</s>", "<unk>", "<pad>", "[CLS]", "[SEP]", "<x>", " <y> ", "<img>", "<late>", "<later>", "<think>"]
TEXTS = [
    *CORPUS,
    *SPECIAL,
    "Hello .what ? yes ! no , it is n't ' fine ' I 'm he 's we 've they 're",
    "hello<s>world</s> <x>  and <y>  <img><late> <later><think>x</think>\ud7ff�",
    "é ünïcode byte fallbacks: ß ☃ 🧊 \U0001f9ff",
]
WORDS = [*SPECIAL, "hello", " world", "é", "🙂", "\n"]


def byte_level() -> Tokenizer:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["he", "ll", "hell", "hello", "Ġw", "or", "Ġwor", "ld", "Ġworld"]
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *symbols, *words])}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or"), ("l", "d")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[*merges, ("Ġwor", "ld")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


def sentencepiece(model: str) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcdefghijklmnopqrstuvwxyz.,é"]
    if model == "unigram":
        scored = [(token, -float(i)) for i, token in enumerate([*tokens, "▁hello", "▁w", "or", "ld"])]
        backend = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    else:
        vocab = {token: i for i, token in enumerate([*tokens, "he", "ll"])}
        backend = Tokenizer(
            models.BPE(
                vocab=vocab, merges=[("h", "e"), ("l", "l")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
            )
        )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    replace = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


def word_piece() -> Tokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s", "i", "it", "is", "n", "m", "t", "s"]
    backend = Tokenizer(
        models.WordPiece({w: i for i, w in enumerate([*words, *".,?!'", "##'", "##m", "##t"])}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(words[:5])
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.enable_truncation(8)
    backend.enable_padding(pad_token="[PAD]", length=12)
    return backend


def token(content: str, **flags: bool) -> dict[str, Any]:
    none = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": content, **none, **flags}


TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
Files = dict[str, Any]
CASES: dict[str, tuple[Callable[[], Tokenizer], Files]] = {
    "nothing beside it": (byte_level, {}),
    "roles as texts": (byte_level, {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"}}),
    "tokens added by their index": (
        byte_level,
        {"tokenizer_config.json": {
            "bos_token": "<s>", "eos_token": {"__type": "AddedToken", **token("</s>", lstrip=True)},
            "unk_token": None, "pad_token": "<pad>", "image_token": "<img>",
            "additional_special_tokens": ["<x>", "<s>"],
            "added_tokens_decoder": {
                "400": token("<late>", special=True), "300": token("<later>", rstrip=True),
                "0": token("<s>", lstrip=True), "9": token("<pad>"),
            },
            "add_bos_token": True, "clean_up_tokenization_spaces": True, "model_max_length": 9,
            "chat_template": TEMPLATE,
        }},
    ),
    "roles of its own": (
        byte_level,
        {"tokenizer_config.json": {
            "eos_token": "</s>", "extra_special_tokens": {"image_token": "<img>", "odd": "<x>"},
            "chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}],
        }},
    ),
    "roles of their own beside a list": (
        byte_level,
        {"tokenizer_config.json": {
            "eos_token": "</s>", "extra_special_tokens": {"image_token": "<img>"},
            "additional_special_tokens": ["<x>", "<y>"],
        }},
    ),
    "special tokens as text": (
        byte_level, {"tokenizer_config.json": {"eos_token": "</s>", "split_special_tokens": True}}
    ),
    "files of old versions": (
        lambda: sentencepiece("unigram"),
        {
            "tokenizer_config.json": {"bos_token": "</s>", "tokenizer_class": "LlamaTokenizer", "add_eos_token": True},
            "special_tokens_map.json": {
                "bos_token": token("<s>"), "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>",
                "additional_special_tokens": ["<x>", " <y> "],
            },
            "added_tokens.json": {"<late>": 300, "<pad>": 299, "</s>": 2},
            "chat_template.jinja": "{{ messages | length }}",
        },
    ),
    "sentencepiece BPE": (
        lambda: sentencepiece("bpe"),
        {
            "tokenizer_config.json": {
                "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizerFast",
                "add_bos_token": False, "add_eos_token": True, "legacy": True, "chat_template": TEMPLATE,
                "extra_special_tokens": [{"__type": "AddedToken", **token("<x>", rstrip=True)}, "<late>"],
            },
            "chat_template.jinja": "default", "additional_chat_templates/rag.jinja": "rag",
        },
    ),
    "word pieces that are cleaned up": (
        word_piece,
        {"tokenizer_config.json": {
            "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]",
            "clean_up_tokenization_spaces": True, "tokenizer_class": "BertTokenizer",
        }},
    ),
    "word pieces as they are": (word_piece, {"special_tokens_map.json": {"unk_token": "[UNK]", "pad_token": "<pad>"}}),
}  # fmt: skip


def write(folder: Path, backend: Tokenizer, files: Files) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def read_both(folder: Path) -> tuple[ModelTokenizer, Any]:
    from transformers import PreTrainedTokenizerFast

    return read_tokenizer(str(folder)), PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.fixture(scope="module", params=[*CASES, "tiny"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path
) -> tuple[ModelTokenizer, Any]:
    """A tokenizer and that of transformers."""
    if request.param == "tiny":
        return read_both(tiny_tokenizer)
    make, files = CASES[request.param]
    return read_both(write(tmp_path_factory.mktemp("made"), make(), files))


def check_text(ours: ModelTokenizer, theirs: Any, text: str) -> None:
    for adds in (True, False):
        ids = theirs(text, add_special_tokens=adds).input_ids
        assert ours(text, add_special_tokens=adds).input_ids == ids
        assert ours.encode(text, add_special_tokens=adds) == ids
        assert ours.tokenize(text, add_special_tokens=adds) == theirs.tokenize(text, add_special_tokens=adds)
        assert ours.backend_tokenizer.encode(text, add_special_tokens=adds).ids == ids  # neither cut nor padded
        for skips in (False, True):
            assert ours.convert_ids_to_tokens(ids, skips) == theirs.convert_ids_to_tokens(ids, skips)
            for cleans in (None, False, True):
                assert ours.decode(ids, skips, cleans) == theirs.decode(ids, skips, clean_up_tokenization_spaces=cleans)


def test_texts_are_encoded_and_decoded_alike(pair: tuple[ModelTokenizer, Any]) -> None:
    for text in TEXTS:
        check_text(*pair, text)
    ours, theirs = pair
    both = ours(TEXTS[4:6]), theirs(TEXTS[4:6])
    assert both[0]["input_ids"] == both[1]["input_ids"]
    assert both[0].attention_mask == both[1].attention_mask
    ids = both[0].input_ids
    assert ours.batch_decode(ids) == theirs.batch_decode(ids)
    assert ours.decode(np.array(ids[0])) == theirs.decode(np.array(ids[0]))
    assert ours.decode(5) == theirs.decode(5)
    assert ours.encode("hello", "world") == theirs.encode("hello", "world")


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.sampled_from(WORDS) | st.text(max_size=8), max_size=8))
def test_random_texts_are_encoded_and_decoded_alike(pair: tuple[ModelTokenizer, Any], parts: list[str]) -> None:
    check_text(*pair, "".join(parts))


def test_vocabularies_and_special_tokens_are_the_same(pair: tuple[ModelTokenizer, Any]) -> None:
    ours, theirs = pair
    for name in (
        "special_tokens_map", "all_special_tokens", "all_special_ids", "extra_special_tokens", "chat_template",
        "vocab_size", "vocab", "added_tokens_decoder", "bos_token", "bos_token_id", "eos_token", "eos_token_id",
        "unk_token_id", "pad_token", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert {i: repr(t) for i, t in ours.added_tokens_decoder.items()} == {
        i: repr(t) for i, t in theirs.added_tokens_decoder.items()
    }
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    for tokens in ("hello", "not a token", ["<s>", "not a token", "</s>"]):
        assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    assert ours.convert_ids_to_tokens(3) == theirs.convert_ids_to_tokens(3)
    assert hasattr(ours, "image_token_id") == hasattr(theirs, "image_token_id")
    assert not hasattr(ours, "no_such_thing")


def test_a_text_is_neither_cut_nor_padded(tmp_path: Path) -> None:
    backend = read_tokenizer(str(write(tmp_path, word_piece(), {}))).backend_tokenizer
    assert len(backend.encode("hello " * 20).ids) == 22


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, asyncio.CancelledError])
def test_an_end_from_outside_is_no_damage(error: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(folder: str) -> None:
        raise error

    monkeypatch.setattr("octavo.loading.tokenizer.read_tokenizer_folder", stopped)
    with pytest.raises(error):
        read_tokenizer(str(tmp_path))


def test_a_role_that_is_no_token_is_refused(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), {"tokenizer_config.json": {"eos_token": 7}})
    with pytest.raises(LoadError, match=r"cannot be read .eos_token is 7, not a token"):
        read_tokenizer(str(tmp_path))


def test_what_needs_transformers_says_so_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(LoadError, match=r"only be read by transformers, .*scripts/install transformers"):
        read_tokenizer(str(tmp_path))


# Chat templates


class Role(str, enum.Enum):  # noqa: UP042 - format() of a StrEnum is its value, which hides what is tested
    USER = "user"


@dataclasses.dataclass
class Part:
    text: str
    size: np.int64


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b> & 'you'"}],
    [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b  "},
    ],
    [{"role": "user", "content": None}, {"role": "assistant", "content": "x", "reasoning": "why", "tool_calls": None}],
    [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image", "image": np.zeros(2)}]}],
    [{"role": Role.USER, "content": "enum", "thinking": "t", "part": Part("p", np.int64(3)), "at": (1, 2.5, True)}],
    [{"role": "user", "content": "é 🙂", "callable": print}],
    [{"role": "user", "content": ""}],
]
TEMPLATES = [
    TEMPLATE,
    "{{ messages | tojson }} {{ messages | tojson(indent=2) }} {{ tools | tojson }} {{ documents }}",
    "{%- for m in messages %}\n  {%- if loop.first %}{% continue %}{% endif %}\n{{ m.role }}|\n{% break %}{% endfor %}",
    "{% set ns = namespace(a=1, self=2) %}{% for m in messages %}{% set ns.a = ns.a + ns.self %}{% endfor %}{{ ns.a }}",
    "{% set ns = namespace() %}{% set ns._a = 1 %}",
    "{{ namespace(_a=1) }}",
    "{{ dict(a=1) }}{{ dict.fromkeys('ab') }}",
    "{{ dict.mro() }}",
    "{% generation %}{% set x = 1 %}[{{ messages[0].role }}]{% endgeneration %}{{ x }}",
    "  {% if true %}\n  yes\n  {% endif %}\n{{ enable_thinking }} {{ add_generation_prompt }} {{ eos_token }}",
    "{{ raise_exception('no ' + messages[0].role) }}",
    "{{ strftime_now('%Y-%m') }}",
    "{{ messages[0].content.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }}/{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content | trim }}</end>{% endfor %}",
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}"
    "{% endfor %}{% endif %}</end>{% endfor %}",
    "{% nonsense %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_conversations_are_written_alike(template: str, tiny_tokenizer: Path) -> None:
    ours, theirs = read_both(tiny_tokenizer)
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    variants: list[dict[str, Any]] = [
        {},
        {"add_generation_prompt": True, "enable_thinking": np.bool_(False), "bos_token": "BOS"},
        {"tools": tools, "documents": [{"title": "t", "text": "x"}]},
        {"continue_final_message": True},
        {"continue_final_message": "thinking"},
    ]
    for messages in CONVERSATIONS:
        for options in variants:
            results = []
            for tokenizer in (theirs, ours):
                try:
                    results.append(
                        tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
                    )
                except Exception as error:
                    results.append(str(error) if type(error) is TemplateError else type(error))
            assert results[1] == results[0], (messages, options)


def test_chat_templates_by_name_and_as_ids(tmp_path: Path) -> None:
    ours, theirs = read_both(write(tmp_path, *_made("roles of its own")))
    messages = [{"role": "user", "content": "hello"}]
    for options in ({}, {"chat_template": "tool_use"}, {"tools": [{}]}, {"chat_template": "{{ bos_token }}x"}):
        both = [t.apply_chat_template(messages, tokenize=False, **options) for t in (ours, theirs)]
        assert both[0] == both[1]
    for tokenizer in (ours, theirs):
        ids = tokenizer.apply_chat_template(messages)["input_ids"]
        assert ids == tokenizer.apply_chat_template(messages, return_dict=False) == theirs.encode("user: hello</s>")
        with pytest.raises(ValueError, match=r"exclude|not compatible"):
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, continue_final_message=True)
        with pytest.raises(ValueError, match=r"no messages|empty"):
            tokenizer.apply_chat_template([])
        tokenizer.chat_template = None
        with pytest.raises(ValueError, match="chat template"):
            tokenizer.apply_chat_template(messages)


def _made(case: str) -> tuple[Tokenizer, Files]:
    make, files = CASES[case]
    return make(), files


def test_the_default_models_chat_is_written_alike(default_checkpoint: Checkpoint) -> None:
    from transformers import PreTrainedTokenizerFast

    ours = load_tokenizer(default_checkpoint)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=ours.backend_tokenizer, chat_template=ours.chat_template, **ours.special_tokens_map
    )
    for messages in (*CONVERSATIONS[:2], CONVERSATIONS[5]):
        for adds in (False, True):
            both = [t.apply_chat_template(messages, add_generation_prompt=adds)["input_ids"] for t in (ours, theirs)]
            assert both[0] == both[1]


_GROWS = "{%% set ns = namespace(x='aaaa') %%}{%% for i in range(100) %%}{%% set ns.x = %s %%}{%% endfor %%}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 10 }}", "{{ 10 ** 10 * 'a' }}", "{{ [1] * 10 ** 10 }}", "{{ 9 ** (9 ** 9) }}",
        "{{ 'a'.zfill(10 ** 9) }}",
        "{{ 'a'|center(1000000000) }}", "{{ 'a'.ljust(1000000000) }}", "{{ '\n'|indent(1000000000) }}",
        "{{ '%1000000000d' % 3 }}", "{{ '%.1000000000f'|format(3) }}", "{{ '{:1000000000}'.format(3) }}",
        "{{ '{:{}}'.format(3, 1000000000) }}", "{{ messages|tojson(indent=1000000000) }}", _GROWS % "ns.x ~ ns.x",
        _GROWS % "ns.x + ns.x", _GROWS % "ns.x.replace('a', ns.x)", _GROWS % "ns.x|replace('a', ns.x)",
        _GROWS % "[ns.x, ns.x]|join", _GROWS % "', '.join([ns.x, ns.x])",
        "{% set ns = namespace(x='a') %}{% for i in range(100) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = y %}{% endfor %}",
        "{{ '%(a)1000000000d' % {'a': 3} }}", "{{ '%((a))1000000000d' % {'(a)': 3} }}", "{{ '%*d' % (9999999999, 3) }}",
        "{{ '%(a)99999d' * 100000 % {'a': 3} }}", "{{ '{:>99999}' * 100000 }}{{ ('{0:>99999}' * 100000).format(3) }}",
        "{{ '{a:1000000000}'.format_map({'a': 3}) }}", _GROWS % "'%s%s' % (ns.x, ns.x)",
        _GROWS % "'%s%s'|format(ns.x, ns.x)", _GROWS % "'{0}{0}'.format(ns.x)",
        _GROWS % "[ns.x, ns.x]" + "{{ ns.x }}", _GROWS % "{'a': ns.x, 'b': ns.x}.values()" + "{{ ns.x|tojson }}",
        _GROWS % "(ns.x, ns.x)" + "{{ ns.x|upper }}", _GROWS % "{1: 2, 3: ns.x, 4: ns.x}.items()" + "{{ ns.x }}",
        _GROWS % "[ns.x, ns.x]" + "{{ 'a' ~ ns.x }}",
        _GROWS % "[ns.x, ns.x]" + "{{ '%s' % ns.x }}", _GROWS % "[ns.x, ns.x]" + "{{ '{}'.format(ns.x) }}",
        "{% set ns = namespace(x=9) %}{% for i in range(100) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    ],
)  # fmt: skip
def test_a_template_makes_no_text_that_fills_the_memory(template: str) -> None:
    with pytest.raises(SecurityError, match="a chat template must not"):
        render_template(template, [{"role": "user", "content": "x"}])


def test_bounded_operations_of_templates_have_their_results() -> None:
    template = (
        "{{ 'a' ~ 1 ~ none ~ absent }} {{ 2 * 'ab' }} {{ [1] + [2] }} {{ 2 ** 10 }} {{ '%3d|%s' % (3, 'x') }} "
        "{{ '{:>4}'.format(3) }} {{ 'abc'|replace('b', 'ZZ') }} {{ 'a\nb'|indent(2) }} {{ 'q'|center(3) }}| "
        "{{ messages|map(attribute='role')|join(', ') }} {{ messages|join('+', attribute='content.x') }} "
        "{{ '-'.join(['a', 'b']) }} {{ '%s'|format('y') }} {{ 'x'.ljust(2) }}|{% set z %}z{% endset %}{{ z }}"
    )
    messages = [{"role": "user", "content": {"x": 5}}, {"role": "assistant", "content": {"x": 6}}]
    assert render_template(template, messages) == (
        "a1None abab [1, 2] 1024   3|x    3 aZZc a\n  b  q | user, assistant 5+6 a-b y x |z"
    )


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("""{{ '{{"name": "{}", "arguments": {}}}'.format('f', '{}') }}""", '{"name": "f", "arguments": {}}'),
        ("""{{ '{"type": "function", "function": {"name": "%s"}}' % 'f' }}""",
         '{"type": "function", "function": {"name": "f"}}'),
        ("{{ '50% * {}'.format(2) }} {{ '**100%** {}'.format(2) }}", "50% * 2 **100%** 2"),
        ("{{ '100%% **%s** %(a' % 'x' if false else '100%% **%s**' % 'x' }}", "100% **x**"),
        ("{{ '{\"a\": 1234567, \"b\": %s}' % 5 }}", '{"a": 1234567, "b": 5}'),
        ("{{ '{a:>3}{b!r}'.format_map({'a': 1, 'b': 'c'}) }}", "  1'c'"),
    ],
)  # fmt: skip
def test_braces_and_percent_signs_of_other_texts_are_no_fields(template: str, text: str) -> None:
    assert render_template(template, []) == text


def test_attributes_of_a_message_are_its_methods_and_then_its_fields() -> None:
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.absent is defined }} [{{ m.absent }}] {{ m.get('items') }} "
        "{{ m.items()|length }} {{ m._own }} {{ loop.first }}{% endfor %}"
    )
    assert render_template(template, [{"role": "user", "items": 3, "_own": 4}]) == "user False [] 3 3 4 True"
    with pytest.raises(SecurityError, match="unsafe"):
        render_template("{{ messages[0].__class__.__name__ }}", [{"role": "user"}])


def test_a_joined_number_is_refused_as_in_python() -> None:
    with pytest.raises(TypeError, match="expected str instance, int found"):
        render_template("{{ ', '.join([1]) }}", [])


def test_the_tracer_of_a_debugger_sees_the_template() -> None:
    seen, before = set(), sys.gettrace()

    def tracer(frame: Any, event: str, _: object) -> Any:
        seen.add((frame.f_code.co_filename, event))
        return tracer

    sys.settrace(tracer)
    try:
        text_after_answer("{% for m in messages %}{{ m.content }}{% endfor %}")
    finally:
        sys.settrace(before)
    assert {("<template>", "call"), ("<template>", "line"), ("<template>", "return")} <= seen


@pytest.mark.parametrize("body", ["", "x", "{% set y = j %}"])
def test_a_template_without_an_end_is_found_out(body: str) -> None:
    endless = f"{{% for i in range(99999) %}}{{% for j in range(99999) %}}{body}{{% endfor %}}{{% endfor %}}"
    assert text_after_answer(endless) == ""
    with pytest.raises(EndlessTemplateError, match="runs more than"):
        template_traits(object(), endless)  # type: ignore[arg-type]
    assert sys.gettrace() is None or "limited_lines" not in repr(sys.gettrace())
