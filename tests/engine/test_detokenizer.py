"""Text that grows token by token equals text that is decoded at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from octavo.engine.detokenizer import ByteDetokenizer, WindowDetokenizer, make_detokenizer
from octavo.loading.token_texts import decode

VOCAB_SIZE = 49152
NUM_SPECIAL = 17
TEXT = (
    "Ordinary words, 3.14159 numbers\n\n\tand code(); naïve façade — “quotes”, עברית, العربية, "
    "日本語の文章、한국어, ไทย. "
    "Emoji: 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 👍🏽; mathematics: ∀x∈ℝ: ⌈x⌉ 𝔘𝔫𝔦; zero width:\u200b\u200d; combining: e\u0301 n\u0303."
)
generated = settings(
    max_examples=100, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
token_lists = st.lists(
    st.integers(0, VOCAB_SIZE - 1) | st.integers(0, NUM_SPECIAL - 1) | st.integers(NUM_SPECIAL, 300), max_size=40
)


@pytest.fixture(scope="session")
def backend(tokenizer: Any) -> Tokenizer:
    return tokenizer.backend_tokenizer


@pytest.fixture(params=[make_detokenizer, WindowDetokenizer], ids=["chosen", "window"])
def make(request: pytest.FixtureRequest) -> Any:
    """The detokenizer that fits the vocabulary, and the one that fits all."""
    return request.param


def test_byte_level_vocabularies_get_the_detokenizer_of_their_own(backend: Tokenizer) -> None:
    assert isinstance(make_detokenizer(backend, []), ByteDetokenizer)
    assert isinstance(make_detokenizer(metaspace_tokenizer(), []), WindowDetokenizer)


ODD = [
    AddedToken("é"), AddedToken("Müller"), AddedToken("Ġ", special=True), AddedToken("<▁>"),
    AddedToken("a▁b", special=True), AddedToken("<｜end▁of▁turn｜>", special=True), AddedToken("<plain>"),
]  # fmt: skip


@generated
@given(data=st.data(), skip=st.booleans(), has_bytes=st.booleans())
def test_the_text_of_an_added_token_is_the_token(make: Any, data: st.DataObject, skip: bool, has_bytes: bool) -> None:
    """Whatever its letters stand for in tokens of the vocabulary."""
    plain = metaspace_tokenizer()
    if has_bytes:
        plain = Tokenizer(models.BPE({"a": 0, "Ã": 1, "©": 2, "Ġb": 3}, []))
        plain.decoder = decoders.ByteLevel()
    usual = range(4 if has_bytes else 8)
    plain.add_tokens(ODD)
    odd = {plain.token_to_id(token.content): "" if skip and token.special else token.content for token in ODD}
    tokens = data.draw(st.lists(st.sampled_from([*usual, *odd]), max_size=12))
    whole = decode(plain, tokens, skip_special_tokens=skip)
    assert "".join(grow(make, plain, tokens, skip=skip)) == whole
    for token in set(tokens) & odd.keys():
        assert decode(plain, [token], skip_special_tokens=skip) == odd[token] and odd[token] in whole


def test_a_character_goes_on_behind_a_hidden_token_that_would_be_misread() -> None:
    halves = Tokenizer(models.BPE({"Ã": 0, "©": 1}, []))
    halves.decoder = decoders.ByteLevel()
    halves.add_tokens([AddedToken("Ġ", special=True)])
    assert decode(halves, [0, 2, 1], skip_special_tokens=True) == "é"
    assert decode(halves, [0, 2, 1], skip_special_tokens=False) == "\ufffdĠ\ufffd"


def grow(
    make: Any,
    backend: Tokenizer,
    tokens: list[int],
    prompt: list[int] | None = None,
    skip: bool = True,
    spaces: bool = True,
) -> list[str]:
    """What each token adds, and what the end adds."""
    detokenizer = make(backend, prompt or [], skip, spaces)
    return [*(detokenizer.add([token]) for token in tokens), detokenizer.flush()]


@generated
@given(tokens=token_lists, skip=st.booleans())
def test_any_tokens_give_the_text_that_decoding_them_at_once_gives(
    make: Any, backend: Tokenizer, tokens: list[int], skip: bool
) -> None:
    assert "".join(grow(make, backend, tokens, skip=skip)) == backend.decode(tokens, skip_special_tokens=skip)


@generated
@given(prompt=token_lists, tokens=token_lists, skip=st.booleans())
def test_the_prompt_is_context_and_no_part_of_the_text(
    make: Any, backend: Tokenizer, prompt: list[int], tokens: list[int], skip: bool
) -> None:
    before = backend.decode(prompt, skip_special_tokens=skip)
    if before.endswith("\ufffd"):
        return  # the prompt ends within a character, whose other half nobody can place
    whole = backend.decode(prompt + tokens, skip_special_tokens=skip)
    assert before + "".join(grow(make, backend, tokens, prompt, skip)) == whole


@generated
@given(tokens=token_lists, cuts=st.lists(st.integers(0, 40), max_size=5))
def test_several_tokens_at_once_are_the_same_as_one_at_a_time(
    make: Any, backend: Tokenizer, tokens: list[int], cuts: list[int]
) -> None:
    detokenizer = make(backend, [], True)
    ends = [*sorted(cuts), len(tokens)]
    parts = [detokenizer.add(tokens[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    assert "".join([*parts, detokenizer.flush()]) == backend.decode(tokens, skip_special_tokens=True)


def test_no_half_of_a_character_is_ever_shown(make: Any, backend: Tokenizer) -> None:
    tokens = backend.encode(TEXT).ids
    assert any("\ufffd" in backend.decode([token]) for token in tokens), "some characters take several tokens"
    pieces = grow(make, backend, tokens)
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == TEXT
    shown = ""
    for i, piece in enumerate(pieces[:-1]):
        shown += piece
        so_far = backend.decode(tokens[: i + 1])
        assert so_far.startswith(shown)
        assert shown == so_far or so_far.endswith("\ufffd"), "nothing is held back for longer than its character"


def test_an_emoji_comes_with_its_last_token_and_its_beginning_alone_with_the_end(make: Any, backend: Tokenizer) -> None:
    tokens = backend.encode("👩").ids
    assert len(tokens) > 1
    assert grow(make, backend, tokens) == [""] * (len(tokens) - 1) + ["👩", ""]
    assert "".join(grow(make, backend, tokens[:-1])) == "\ufffd"
    assert "".join(grow(make, backend, [*tokens[:-1], *backend.encode("a").ids])) == "\ufffda"


def test_a_character_that_the_prompt_begins_comes_when_it_is_complete(backend: Tokenizer) -> None:
    first, *rest = backend.encode("👩").ids
    assert "".join(grow(make_detokenizer, backend, rest, prompt=[*backend.encode("Hi ").ids, first])) == "👩"


def test_special_tokens_are_hidden_or_shown(make: Any, backend: Tokenizer) -> None:
    tokens = backend.encode("<|im_start|>assistant\nHi there<|im_end|>").ids
    assert "".join(grow(make, backend, tokens, skip=True)) == "assistant\nHi there"
    assert "".join(grow(make, backend, tokens, skip=False)) == "<|im_start|>assistant\nHi there<|im_end|>"


def test_hidden_tokens_do_not_pile_up(make: Any, backend: Tokenizer) -> None:
    """With ignore_eos a model may say nothing but end-of-sequence: each token must not cost more than the last."""
    detokenizer = make(backend, [], True)
    hello, world = backend.encode("Hello world").ids
    assert detokenizer.add([hello, *[2] * 1000]) == "Hello"
    if isinstance(detokenizer, WindowDetokenizer):
        assert len(detokenizer._pending) < 5
    assert detokenizer.add([world]) == " world"


def metaspace_tokenizer() -> Tokenizer:
    """In the manner of Llama 2: blanks are written ▁, the first of a text is dropped, and bytes stand for the rest."""
    pieces = ["<unk>", "<s>", "</s>", "▁Hello", "▁world", "▁", "lo", "!"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces.append("")  # 264
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def test_blanks_of_sentencepiece_vocabularies_are_kept_between_words_only(make: Any) -> None:
    tokenizer = metaspace_tokenizer()
    hello, world, blank = 3, 4, 5
    assert grow(make, tokenizer, [hello, world, world]) == ["Hello", " world", " world", ""]
    assert grow(make, tokenizer, [world], prompt=[1, hello]) == [" world", ""]
    for hidden in (2, 264):  # a special token, and a piece without text
        assert grow(make, tokenizer, [hello, hidden, hidden, world]) == ["Hello", "", "", " world", ""]
    assert "".join(grow(make, tokenizer, [hello, blank, world])) == "Hello  world"
    assert grow(make, tokenizer, [world], prompt=[hello, *[2] * 9]) == [" world", ""]


def test_characters_of_byte_tokens_come_whole(make: Any) -> None:
    tokenizer = metaspace_tokenizer()
    tokens = [8 + byte for byte in "é👩".encode()]
    assert grow(make, tokenizer, [3, *tokens, 7]) == ["Hello", "", "é", "", "", "", "👩", "!", ""]


@generated
@example(text="日本", cuts=[4], num_prompt=0)
@example(text="x日本é語👩", cuts=[7], num_prompt=2)
@given(text=st.text(min_size=1), cuts=st.lists(st.integers(0, 60), max_size=5), num_prompt=st.integers(0, 4))
def test_byte_tokens_give_their_text_however_they_come(make: Any, text: str, cuts: list[int], num_prompt: int) -> None:
    tokens = [8 + byte for byte in text.encode()]
    detokenizer = make(metaspace_tokenizer(), [1, 3, 4, 5][:num_prompt], True)
    ends = [*sorted(cuts), len(tokens)]
    parts = [detokenizer.add(tokens[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    assert "".join(parts) == text
    assert detokenizer.add([4]) == " world"


@generated
@given(tokens=st.lists(st.sampled_from([3, 4, 5, *range(8, 264)]), max_size=20), cut=st.integers(0, 20))
def test_wrong_bytes_spoil_no_neighbour(make: Any, tokens: list[int], cut: int) -> None:
    tokenizer, pieces = metaspace_tokenizer(), {3: b" Hello", 4: b" world", 5: b" "}
    detokenizer = make(tokenizer, [3], True)
    shown = detokenizer.add(tokens[:cut]) + detokenizer.add(tokens[cut:]) + detokenizer.flush()
    assert shown == b"".join([pieces.get(token) or bytes([token - 8]) for token in tokens]).decode(errors="replace")


def test_characters_before_the_one_that_is_cut_off_are_kept(make: Any) -> None:
    tokens = [8 + byte for byte in "😀😀".encode()][:6]
    assert "".join(grow(make, metaspace_tokenizer(), tokens)) == "😀\ufffd"
    detokenizer = make(metaspace_tokenizer(), [], True)
    assert detokenizer.add(tokens) + detokenizer.flush() == "😀\ufffd"


def test_a_character_of_byte_tokens_may_begin_in_the_prompt(make: Any) -> None:
    tokens = [8 + byte for byte in "é👩".encode()]
    assert "".join(grow(make, metaspace_tokenizer(), tokens[3:], prompt=[3, *tokens[:3]])) == "👩"


def test_tokens_that_the_vocabulary_lacks_do_not_pile_up(make: Any, backend: Tokenizer) -> None:
    """Models have rows for more tokens than their tokenizer, and may say them."""
    plain = metaspace_tokenizer()
    plain.add_tokens([""])
    for tokenizer, more, hello, world in [
        (backend, VOCAB_SIZE + 1000, *backend.encode("Hello world").ids),
        (plain, 5000, 3, 4),
        (plain, plain.token_to_id("") or 5000, 3, 4),
    ]:
        detokenizer = make(tokenizer, [], False)
        assert detokenizer.add([hello]) == "Hello"
        for _ in range(100):
            assert detokenizer.add([more]) == ""
        if isinstance(detokenizer, WindowDetokenizer):
            assert len(detokenizer._pending) <= 10
        assert detokenizer.add([world]) == " world"


def byte_tokenizer(*more: bytes) -> Tokenizer:
    """A byte-level vocabulary: token i is byte i, and then those that are given."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    pieces = [bytes([byte]) for byte in range(256)] + list(more)
    tokenizer = Tokenizer(models.BPE({"".join(letters[b] for b in piece): i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@generated
@example(tokens=[0x80, 0xE2, 0x82, 256, 0x9F, 0x98, 0x80])
@given(tokens=st.lists(st.sampled_from([0x61, 0x80, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 256, 257]), max_size=30))
def test_bytes_that_are_no_text_give_what_decoding_them_at_once_gives(make: Any, tokens: list[int]) -> None:
    """Tokens 256 and 257 end one character and begin the next."""
    tokenizer = byte_tokenizer(b"\xac\xf0", b"\x9f\x98")
    assert "".join(grow(make, tokenizer, tokens)) == tokenizer.decode(tokens)


def test_bytes_that_are_no_text_are_not_held_back_for_good(make: Any) -> None:
    tokenizer = byte_tokenizer()
    detokenizer = make(tokenizer, [], True)
    shown = detokenizer.add([0x80] * 1000)
    assert 990 < len(shown) <= 1000
    if isinstance(detokenizer, WindowDetokenizer):
        assert len(detokenizer._pending) < 10
    assert shown + detokenizer.add([0x61]) == "\ufffd" * 1000 + "a"


def test_spaces_between_added_tokens_are_left_out_on_request(make: Any) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))  # without a decoder: joined by spaces
    tokenizer.add_special_tokens([AddedToken("<x>"), AddedToken("<y>")])
    tokenizer.add_tokens([AddedToken("<z>")])
    tokens = [0, 2, 3, 4, 1, 2]
    assert "".join(grow(make, tokenizer, tokens, skip=False)) == "a <x> <y> <z> b <x>"
    assert "".join(grow(make, tokenizer, tokens, skip=False, spaces=False)) == "a <x><y><z> b <x>"
    assert "".join(grow(make, tokenizer, tokens, skip=True, spaces=False)) == "a <z> b"
