"""`PieceEncoder` against the tokenizer's own encoding of whole texts."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from octavo.loading import piece_encoder
from octavo.loading.piece_encoder import PieceEncoder
from tests.loading.test_model_tokenizer import byte_level, sentencepiece

MARKS = ["<s>", "</s>"]
OTHERS = [
    AddedToken("<x>", lstrip=True, special=True, normalized=False),
    AddedToken("<end>", rstrip=True, special=True, normalized=False),
    AddedToken("<s>>", special=True, normalized=False),  # longer than a mark
    AddedToken("[</", special=True, normalized=False),  # overlaps a mark
    AddedToken("</", special=True, normalized=False),  # the beginning of a mark, which is the longer one
    AddedToken("hello", normalized=True),
]
TEXT = st.lists(
    st.sampled_from(
        [*MARKS, "<x>", "<end>", "<s>>", "</", "[</", "[</s>", "hello", " world", "he", " ", "\n", "<", "s>", "é"]
    )
    | st.text(max_size=6)
).map("".join)


def words() -> Tokenizer:
    backend = sentencepiece("bpe")
    backend.add_special_tokens(MARKS)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    return backend


def metaspace(scheme: str) -> Tokenizer:
    backend = sentencepiece("unigram")
    backend.add_special_tokens(MARKS)
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return backend


def with_template(backend: Tokenizer, **more: Any) -> Any:
    its: dict[str, Any] = {"chat_template": {"default": "{{ '<s>' + m + '</s>' }}"}, "special_tokens_map": {}, **more}
    return SimpleNamespace(backend_tokenizer=backend, **its)


BACKENDS = [byte_level(), words(), metaspace("always"), metaspace("never"), metaspace("first")]
WITH_OTHERS = [byte_level(), words()]
for one in WITH_OTHERS:
    one.add_tokens(OTHERS)
ENCODERS = [(PieceEncoder(with_template(one)), one) for one in (*BACKENDS, *WITH_OTHERS)]


@given(st.lists(TEXT, min_size=1, max_size=4))
def test_tokens_are_those_of_the_whole_text(texts: list[str]) -> None:
    for encoder, backend in ENCODERS:
        for text in texts:
            assert encoder.encode(text) == backend.encode(text, add_special_tokens=False).ids


def test_texts_are_cut_at_marks_that_are_tokens_wherever_they_stand() -> None:
    def marks(backend: Tokenizer, **more: Any) -> list[str]:
        found = PieceEncoder(with_template(backend, **more))._marks
        return [] if found is None else found.pattern.strip("()").split("|")

    assert marks(byte_level()) == marks(words()) == MARKS
    assert marks(byte_level(), chat_template=None) == [], "no chat has them"
    assert marks(byte_level(), chat_template=None, special_tokens_map={"eos_token": "</s>"}) == ["</s>"]
    assert marks(metaspace("first")) == [], "the first piece is another one"
    for token, left in ((OTHERS[2], ["</s>"]), (OTHERS[3], ["<s>"]), (OTHERS[4], MARKS), (OTHERS[0], MARKS)):
        backend = byte_level()
        backend.add_tokens([token])
        assert marks(backend) == left
    backend.add_tokens([AddedToken("alone", single_word=True, normalized=False)])
    assert marks(backend) == [], "tokens that only count as words may hide marks"


@pytest.mark.parametrize("change", ["dropout", "truncation", "padding", "encode_special_tokens", "pre_tokenizer"])
def test_tokenizers_that_make_other_tokens_of_pieces_get_whole_texts(change: str) -> None:
    class Own:
        def pre_tokenize(self, pretokenized: Any) -> None:
            pass

    backend = byte_level()
    match change:
        case "dropout":
            backend.model.dropout = 0.5
        case "truncation":
            backend.enable_truncation(4)
        case "padding":
            backend.enable_padding()
        case "encode_special_tokens":
            backend.encode_special_tokens = True
        case _:
            backend.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Own())
    assert PieceEncoder(with_template(backend))._marks is None


def test_a_piece_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = PieceEncoder(with_template(byte_level()))
    encoded, encode = list[str](), encoder._encode
    monkeypatch.setattr(encoder, "_encode", lambda text: (encoded.append(text), encode(text))[1])
    first = encoder.encode("<s>hello</s><s>one</s>")
    first.append(0)  # the caller's own list
    assert encoder.encode("<s>hello</s><s>two</s>") == byte_level().encode("<s>hello</s><s>two</s>").ids
    assert encoded == ["<s>", "hello", "</s>", "one", "two"]


def test_kept_pieces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_encoder, "_MAX_KEPT_BYTES", 2000)
    monkeypatch.setattr(piece_encoder, "_MAX_PIECE_BYTES", 800)
    encoder = PieceEncoder(with_template(byte_level()))
    for number in range(100):
        encoder.encode(f"<s>{number}")
        encoder.encode("<s>system")
        assert len(encoder._recent) + len(encoder._older) <= 2 * 2000 // piece_encoder._ENTRY_BYTES
    assert "system" in encoder._recent or "system" in encoder._older, "what is used is kept"
    encoder.encode("x" * 1000)
    assert "x" * 1000 not in encoder._recent


def test_lone_surrogates_are_the_tokenizers_errors() -> None:
    with pytest.raises((TypeError, UnicodeEncodeError)):
        PieceEncoder(with_template(byte_level())).encode("<s>\ud800</s>")


def test_threads_share_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_encoder, "_MAX_KEPT_BYTES", 1000)
    encoder, backend = PieceEncoder(with_template(byte_level())), byte_level()
    wrong = list[str]()

    def encode(thread: int) -> None:
        for number in range(200):
            text = f"<s>hello</s>{thread if number % 2 else number}<s>"
            if encoder.encode(text) != backend.encode(text).ids:
                wrong.append(text)

    threads = [threading.Thread(target=encode, args=(thread,)) for thread in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
