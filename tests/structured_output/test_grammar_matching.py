"""Grammars where the model runs: forced text is the text, and no request spoils the grammar of another."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from llguidance import LLParserLimits, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo.errors import LoadError, RequestError
from octavo.loading.checkpoint import Checkpoint
from octavo.sampling.sampling_table import Samples, SamplingTable
from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.step_plan import Admission
from octavo.structured_output import grammar_matching
from octavo.structured_output.grammar_matching import GrammarCompiler, GrammarTable
from octavo.structured_output.token_bytes import make_vocabulary
from tests.structured_output.grammars import make_grammar

SPECIAL = ["<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "<table>", "ü", "Müll", "  "]
EOS = 1
TEXTS = ["<|im_end|>", "a<|im_start|>b", "<think>", "x</think> <table>", "Müller", "für  Müll", "ﬀ <|im", "é\u2028ü"]


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {**{text: i for i, text in enumerate(SPECIAL)}, **{c: i + 2 for i, c in enumerate(letters)}}
    merges = [("i", "m"), ("Ġ", "<"), ("e", "n"), ("en", "d")]
    for a, b in merges:
        vocab[a + b] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return with_added(tokenizer)


def sentencepiece() -> Tokenizer:
    vocab = {**{text: i for i, text in enumerate(SPECIAL)}, "</s>": 2, "<unk>": 3}
    merges = [("i", "m"), ("▁", "<"), ("e", "n"), ("en", "d")]
    for word in [
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdefghiklmnoprstux<>|_",
        *(a + b for a, b in merges),
    ]:
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_added(tokenizer)


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return tokenizer


class Compiler(GrammarCompiler):
    tokenizer: Tokenizer


class Request:
    """Something that holds a grammar."""


@pytest.fixture(params=[byte_level, sentencepiece])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    tokenizer = request.param()
    read = SimpleNamespace(backend_tokenizer=Tokenizer.from_str(tokenizer.to_str()), eos_token_id=EOS)
    monkeypatch.setattr("octavo.loading.tokenizer.read_tokenizer", lambda path, trusts_code: read)
    checkpoint = Checkpoint("", "dummy", "", [], "", {}, {"eos_token_id": EOS})
    made = Compiler(checkpoint, tokenizer.get_vocab_size())
    made.tokenizer = tokenizer
    return made


def written(compiler: Compiler, grammar: str, *, prefers: str = "first") -> str:
    """An answer: of the tokens that a grammar allows always the first one, or the last one, up to the end."""
    holder = Request()
    compiler.prepare(grammar, holder).result()
    matcher = compiler.matcher(grammar)
    tokens = list[int]()
    while not matcher.is_stopped():
        words = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: compiler.num_words]
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        allowed = [token for token in np.flatnonzero(bits).tolist() if token != EOS]
        if not allowed:
            break
        tokens.append(allowed[0 if prefers == "first" else -1])
        assert matcher.consume_tokens(tokens[-1:]), matcher.get_error()
        assert len(tokens) < 200
    assert matcher.is_accepting(), matcher.get_error()
    assert not set(tokens) & {0, 1}, "a special token has no text"
    return text_of(compiler.tokenizer, tokens)


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """What tokens spell, of which added ones are their own text."""
    added = {token: about.content.encode() for token, about in tokenizer.get_added_tokens_decoder().items()}
    letters = {c: byte for byte, c in _letters().items()}
    spelled = b""
    for token in tokens:
        word = tokenizer.id_to_token(token)
        if token in added:
            spelled += added[token]
        elif isinstance(tokenizer.decoder, decoders.ByteLevel):
            spelled += bytes(letters[c] for c in word)
        elif word.startswith("<0x"):
            spelled += bytes([int(word[3:5], 16)])
        else:
            spelled += word.replace("▁", " ").encode()
    return spelled.decode()


def _letters() -> dict[int, str]:
    """GPT-2's letter of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_tokens_have_the_bytes_that_llguidance_reads_in_the_tokenizer(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    size = tokenizer.get_vocab_size() + 3  # a model may have more rows than tokens
    read, made = LLTokenizer(tokenizer.to_str(), n_vocab=size), make_vocabulary(tokenizer, size, [EOS])
    added = tokenizer.get_added_tokens_decoder()
    for token in range(size):
        is_special = added[token].special if token in added else read.is_special_token(token)
        assert made.is_special_token(token) == is_special
        if not is_special:
            word = added[token].content.encode() if token in added else read.decode_bytes([token])
            assert made.decode_bytes([token]) == word


def test_a_vocabulary_of_neither_bytes_nor_texts_is_refused() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(RequestError, match="neither for bytes nor for texts"):
        make_vocabulary(tokenizer, 0, [EOS])


@pytest.mark.parametrize("text", TEXTS)
def test_forced_text_is_the_text_whatever_tokens_are_added(compiler: Compiler, text: str) -> None:
    constant = make_grammar(StructuredOutputsParams(json={"const": text}, disable_any_whitespace=True))
    assert json.loads(written(compiler, constant)) == text
    assert written(compiler, make_grammar(StructuredOutputsParams(choice=[text]))) == text
    named = {"type": "object", "properties": {text: {"const": 1}}, "required": [text], "additionalProperties": False}
    grammar = make_grammar(StructuredOutputsParams(json=named, disable_any_whitespace=True))
    assert json.loads(written(compiler, grammar)) == {text: 1}


def test_a_choice_among_texts_with_added_tokens_is_one_of_them(compiler: Compiler) -> None:
    grammar = make_grammar(StructuredOutputsParams(choice=TEXTS))
    for prefers in ("first", "last"):
        assert written(compiler, grammar, prefers=prefers) in TEXTS


def test_special_tokens_that_a_grammar_names_are_tokens(compiler: Compiler) -> None:
    grammar = json.dumps({"grammars": [{"lark_grammar": 'start: "a" <[0]> "<|im_start|>"'}]})
    compiler.prepare(grammar, compiler).result()
    matcher = compiler.matcher(grammar)
    assert matcher.consume_tokens([compiler.tokenizer.token_to_id("a"), 0])
    assert not matcher.consume_tokens([0])


def test_the_vocabulary_is_made_once_ahead_of_grammars_too(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = compiler.load_vocabulary().result()
    monkeypatch.setattr(compiler, "_make_vocabulary", pytest.fail)
    assert written(compiler, make_grammar(StructuredOutputsParams(choice=["a"]))) == "a"
    assert compiler.load_vocabulary().result() is vocabulary


@pytest.mark.parametrize(("error", "num_tries"), [(RequestError("no bytes"), 1), (LoadError("no file"), 3)])
def test_a_tokenizer_that_cannot_give_a_vocabulary_is_read_once_and_one_that_cannot_be_read_again(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, error: Exception, num_tries: int
) -> None:
    failing = Mock(side_effect=error)
    monkeypatch.setattr(compiler, "_make_vocabulary", failing)
    assert compiler.load_vocabulary().exception() is error
    for _ in range(2):
        assert compiler.prepare("{}", compiler).exception() is error
    assert failing.call_count == num_tries


def test_a_vocabulary_that_is_made_again_does_not_wait_for_grammars_that_wait_for_it(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, may_fail, may_go_on = compiler._make_vocabulary, threading.Event(), threading.Event()

    def fail_at_first() -> Any:
        monkeypatch.setattr(compiler, "_make_vocabulary", make)
        may_fail.wait()
        raise OSError("the disk is slow")

    monkeypatch.setattr(compiler, "_make_vocabulary", fail_at_first)
    failed = compiler.load_vocabulary()
    pool = compiler._pool
    assert pool is not None
    for _ in range(pool._max_workers):  # one more than there are threads left
        pool.submit(may_go_on.wait)
    waiting = [compiler.prepare(make_grammar(StructuredOutputsParams(choice=[letter])), compiler) for letter in "cdef"]
    may_fail.set()
    assert isinstance(failed.exception(), OSError)
    later = compiler.prepare(make_grammar(StructuredOutputsParams(choice=["z"])), compiler)
    may_go_on.set()
    assert all(isinstance(one.exception(), OSError) for one in waiting)
    assert later.result() is None


def test_a_grammar_is_kept_as_long_as_a_request_has_it(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_matching, "_NUM_IDLE", 2)
    requests = [Request() for _ in range(6)]
    grammars = [make_grammar(StructuredOutputsParams(choice=[f"text {i}"])) for i in range(6)]
    for grammar, request in zip(grammars, requests, strict=True):
        compiler.prepare(grammar, request).result()
    assert [grammar in compiler._templates for grammar in grammars] == [True] * 6
    del requests[:], request
    for i in range(2):
        other = make_grammar(StructuredOutputsParams(choice=[f"other {i}"]))
        compiler.prepare(other, compiler).result()
    assert [grammar in compiler._templates for grammar in grammars] == [False] * 4 + [True] * 2


def test_a_grammar_that_another_thread_drops_is_compiled_again(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two looks at it."""

    class Racing(OrderedDict[str, Any]):
        def __contains__(self, key: object) -> bool:
            return super().pop(key, None) is not None  # type: ignore[call-overload]

        def get(self, key: str, default: Any = None) -> Any:
            return super().pop(key, default)

    compiler._templates = Racing()
    grammar = make_grammar(StructuredOutputsParams(choice=["a"]))
    compiler.prepare(grammar, compiler).result()
    compiler.prepare(grammar, compiler).result()
    assert compiler.matcher(grammar) and compiler.matcher(grammar)
    monkeypatch.setattr(grammar_matching, "_NUM_IDLE", 0)
    other = make_grammar(StructuredOutputsParams(choice=["b"]))
    assert compiler.matcher(other), "though it is dropped at once: no request has it"


def test_a_step_waits_for_no_mask_of_a_sequence_that_is_not_in_it(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was aborted keeps its row until another sequence takes it; of one that ends nothing is kept."""
    compiler.prepare(grammar := make_grammar(StructuredOutputsParams(choice=["a"])), compiler).result()
    table = SamplingTable(2, compiler)
    params = SamplingParams(temperature=1.0)
    params.grammar = grammar
    prompt = np.array([5], np.int32).tobytes()
    table.admit(Admission(0, prompt, 1, [], params, [EOS], 0, 0))
    table.admit(Admission(1, prompt, 1, [], SamplingParams(temperature=1.0), [EOS], 0, 0))
    tokens = np.zeros((2, 8), np.int32)

    def masks_of(row: int) -> int:
        batch = table.build(Samples(np.array([row]), np.zeros(1, np.int64), np.ones(1, np.int64)), tokens)
        assert batch is not None
        return len(batch.masks()[0])

    assert masks_of(0) == 1
    assert table._grammars is not None
    with monkeypatch.context() as patch:
        patch.setattr(table._grammars, "masks", None)
        assert masks_of(1) == 0
    table.advance(np.array([0]), np.zeros(1, np.int64), np.array([EOS]))
    assert not table._grammars._rows
    assert masks_of(0) == 0


def test_a_lexer_that_one_request_has_worn_out_serves_no_other(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance bounds the states of a lexer, which copies of a compiled grammar share."""
    monkeypatch.setattr(grammar_matching, "limits", lambda: LLParserLimits(max_lexer_states=1000))
    grammar = make_grammar(StructuredOutputsParams(regex="[ab]*a[ab]{40}|[ab]{0,12}"))
    compiler.prepare(grammar, compiler).result()
    table = GrammarTable(compiler, 2)
    params = SamplingParams(max_tokens=10)
    params.grammar = grammar
    a, b = (compiler.tokenizer.token_to_id(c) for c in "ab")

    def step(row: int, token: int) -> str | None:
        table.advance(np.array([row]), np.array([token]))
        _, errors = table.masks(np.array([row]), {})
        return errors.get(0)

    rng = np.random.default_rng(1)
    table.admit(0, params, [], [EOS])
    table.admit(1, params, [], [EOS])
    assert step(1, a) is None
    errors = (step(0, (a, b)[rng.integers(2)]) for _ in range(5_000))
    assert next((error for error in errors if error is not None), None), "the lexer was to wear out"
    assert [step(1, token) for token in (b, a, a, b)] == [None] * 4
    table.admit(0, params, [], [EOS])
    assert [step(0, token) for token in (a, b, a, a, b)] == [None] * 5


def test_tokens_of_a_text_are_those_of_the_model_where_these_spell_it(compiler: Compiler) -> None:
    vocabulary = compiler.load_vocabulary().result()
    words = [compiler.tokenizer.id_to_token(token) for token in vocabulary.tokenize_str("end im")]
    assert words[0] == "end" and words[-1] == "im"
