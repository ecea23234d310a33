"""What is guessed: prompt lookup, suffixes and predictions, against plain searches of the same texts."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from typing import Any

import pytest

from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.sequence import Sequence
from octavo.speculative import ngram
from octavo.speculative.ngram import NgramProposer, PredictionProposer
from octavo.speculative.proposer import Proposer
from octavo.speculative.suffix import SuffixAutomaton, SuffixProposer


def sequence(prompt: list[int], prediction: list[int] | None = None) -> Sequence:
    request = EngineRequest("r", Prompt(prompt), SamplingParams(), [0], 1000, 0.0, prediction=prediction or [])
    return Sequence(request, (0, 0), 0, token_ids=list(prompt))


def draft_tokens(proposer: Proposer, seq: Sequence, tokens: list[int], most: int = 8) -> list[tuple[int, ...]]:
    """What is guessed before each of `tokens`."""
    state = proposer.start(seq)
    found = []
    for token in tokens:
        found.append(proposer.propose(seq, state, most).tokens)
        seq.token_ids.append(token)
    proposer.end(seq, state)
    return found


@pytest.mark.parametrize("n", [1, 2, 5])
def test_n_grams_have_the_same_hash_alone_and_together(n: int) -> None:
    tokens = array("i", [random.Random(n).randrange(-1, 1 << 18) for _ in range(200)])
    found = ngram._hashes(tokens, n).tolist()
    assert found == [ngram._hash(tokens[i : i + n]) for i in range(200 - n + 1)]
    assert len(set(found)) == len({tuple(tokens[i : i + n]) for i in range(200 - n + 1)})


def text(seed: int, length: int) -> list[int]:
    """Tokens that repeat themselves now and then."""
    rng = random.Random(seed)
    found = [rng.randrange(6) for _ in range(4)]
    while len(found) < length:
        begin = rng.randrange(len(found))
        found += found[begin : begin + rng.randrange(1, 12)] if rng.random() < 0.6 else [rng.randrange(6)]
    return found[:length]


@pytest.mark.parametrize("seed", range(5))
def test_a_lookup_guesses_what_followed_the_last_tokens_before(seed: int) -> None:
    tokens = text(seed, 200)
    for n, guess in enumerate(draft_tokens(NgramProposer(2, 4), sequence(tokens[:20]), tokens[20:])):
        known = tokens[: 20 + n]
        if not guess:
            assert all(known[i : i + 2] != known[-2:] for i in range(len(known) - 2))
            continue
        # Some place before the end is followed by these tokens, and two tokens before it agree at least.
        places = [i for i in range(2, len(known)) if known[i - 2 : i] == known[-2:] and known[i : i + 8] == [*guess]]
        assert places, (known, guess)


def test_a_lookup_stays_with_the_place_where_a_long_text_agrees() -> None:
    document = list(range(100, 160))
    tokens = [*document, *document[10:16], 1, 2, 3, *document[:5]]
    found = draft_tokens(NgramProposer(5, 5), sequence(tokens), document[5:20], most=4)
    assert found[0] == tuple(document[5:9])
    assert found[-1] == tuple(document[19:23]), "not where part of it was quoted"


def test_a_long_prompt_is_taken_in_over_several_steps() -> None:
    prompt = list(range(10_000))
    found = draft_tokens(NgramProposer(3, 3), sequence([*prompt, 5, 6, 7]), prompt[8:13], most=2)
    assert found == [(8, 9), (9, 10), (10, 11), (11, 12), (12, 13)]
    found = draft_tokens(NgramProposer(3, 3), sequence([*prompt, 9000, 9001, 9002]), prompt[9003:9008], most=2)
    assert found[0] == ()
    assert found[-1] == (9007, 9008)


def test_a_prediction_is_guessed_from_its_beginning_and_again_after_an_edit() -> None:
    prediction = list(range(100, 130))
    answer = [*prediction[:10], 1, 2, 3, *prediction[12:]]
    found = draft_tokens(PredictionProposer(), sequence([7, 8], prediction), answer, most=4)
    assert found[0] == tuple(prediction[:4])
    assert found[9] == tuple(prediction[9:13])
    assert found[14] == tuple(prediction[13:17]), "one token that agrees brings it back"
    assert found[20] == tuple(answer[20:24])


class Unsearchable(list[int]):
    def index(self, *_: Any) -> int:
        raise AssertionError("a prediction is not searched token by token")


def test_a_prediction_is_read_once_however_often_its_answer_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all completions of its request."""
    hashes, read = ngram._hashes, []

    def count(tokens: Any, n: int) -> Any:
        read.append(n)
        return hashes(tokens, n)

    monkeypatch.setattr(ngram, "_hashes", count)
    proposer, seq = PredictionProposer(), sequence([7], Unsearchable([1, 2] * 2000))
    fork = seq.fork(1)
    states = [(one, proposer.start(one)) for one in (seq, fork)]
    for token in [2, 2, 3, 1, 1] * 20:
        for one, state in states:
            one.token_ids.append(token)
            proposer.propose(one, state, 4)
    assert sorted(read) == [1, 2, 3]
    states.clear()
    del state
    assert not proposer._indexes, "it goes with the last sequence"


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_comes_back_at_the_next_place_of_its_last_tokens(seed: int) -> None:
    prediction, tokens = text(seed, 300), text(seed + 100, 200)
    index = ngram.PlacesIndex(prediction)
    for end in range(len(tokens)):
        before, begin = tokens[max(0, end - 3) : end], random.Random(end).randrange(301)
        wanted = None
        for n in (1, 2, 3):
            places = [i for i in range(max(n, begin + 1), 301) if prediction[i - n : i] == before[-n:]]
            wanted = (places[0], n) if places and len(before) >= n else wanted
        assert index.find_next(before, begin) == wanted


@pytest.mark.parametrize("seed", range(5))
def test_an_automaton_knows_every_piece_how_often_it_occurs_and_what_follows(seed: int) -> None:
    texts = [text(10 * seed + i, 60) for i in range(3)]
    automaton = SuffixAutomaton(max_depth=1000)
    pieces: Counter[tuple[int, ...]] = Counter()
    for one in texts:
        automaton.begin_text()
        for token in one:
            automaton.read(token)
        pieces.update(tuple(one[i:j]) for i in range(len(one)) for j in range(i + 1, len(one) + 1))
    for piece, count in pieces.items():
        state = 0
        for token in piece:
            state = automaton.nexts[state][token]
        assert automaton.counts[state] == count
        assert {token for token in range(6) if pieces[*piece, token]} == automaton.nexts[state].keys()
    unseen = (*texts[0], 99)
    state, length = 0, 0
    for n, token in enumerate(unseen):
        state, length = automaton.advance(state, length, token)
        assert length == max([k for k in range(n + 2) if not k or pieces[unseen[n + 1 - k : n + 1]]])


def test_suffixes_guess_as_much_as_agrees() -> None:
    document = list(range(100, 140))
    proposer = SuffixProposer(24, 100, 1.0, 0.1)
    found = draft_tokens(proposer, sequence([*document, *document[:1]]), document[1:9], most=30)
    assert [len(guess) for guess in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(guess == tuple(document[n + 1 : n + 1 + len(guess)]) for n, guess in enumerate(found))


def test_suffixes_guess_what_recent_answers_said() -> None:
    proposer = SuffixProposer(24, 4, 1.0, 0.1)
    answer = list(range(200, 220))
    assert not any(draft_tokens(proposer, sequence([1, 2]), answer))
    found = draft_tokens(proposer, sequence([3]), answer)
    assert [len(guess) for guess in found[:6]] == [0, 1, 2, 3, 4, 5]
    for n in range(6):  # of four answers the two older ones are forgotten at once
        draft_tokens(proposer, sequence([4]), list(range(300 + 20 * n, 310 + 20 * n)))
    assert not any(draft_tokens(proposer, sequence([3]), answer))
    assert not any(draft_tokens(SuffixProposer(24, 0, 1.0, 0.1), sequence([3]), answer)), "0 keeps none"


def test_answers_that_end_together_are_read_in_later_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer, read = SuffixProposer(24, 1000, 1.0, 0.1), []
    begun = [(seq, proposer.start(seq)) for seq in [sequence([i]) for i in range(64)]]
    for seq, _ in begun:
        seq.token_ids.extend(range(1000, 5000))
    reads = SuffixAutomaton.read
    monkeypatch.setattr(SuffixAutomaton, "read", lambda automaton, token: read.append(token) or reads(automaton, token))
    for seq, state in begun:
        proposer.end(seq, state)
    assert not read
    seq = sequence([1, 2])
    state = proposer.start(seq)
    num_steps = 0
    while proposer._answers:
        read.clear()
        proposer.propose(seq, state, 4)
        assert len(read) <= 1024 + 2
        num_steps += 1
    assert num_steps >= 32 and proposer._num_unread == 0, "as many as are kept"
    seq.token_ids.extend([1000, 1001])
    assert proposer.propose(seq, state, 4).tokens == (1002, 1003)
    for seq, state in [(seq, proposer.start(seq)) for seq in [sequence([i]) for i in range(64)]]:
        seq.token_ids.extend(range(1000, 2000))
        proposer.end(seq, state)
    live = [(seq, proposer.start(seq)) for seq in [sequence([i]) for i in range(255)]]
    read.clear()
    for seq, state in live:
        proposer.propose(seq, state, 4)
    assert 256 < len(read) <= 1024 + 256, "all sequences of a step together"


def test_answers_of_a_salt_are_proposed_to_nobody_else() -> None:
    proposer, answer = SuffixProposer(24, 100, 1.0, 0.1), list(range(200, 220))
    request = EngineRequest("r", Prompt([1], cache_salt="mine"), SamplingParams(), [0], 1000, 0.0)
    draft_tokens(proposer, Sequence(request, (0, 0), 0, token_ids=array("i", [1])), answer)
    assert not any(draft_tokens(proposer, sequence([3]), answer))


def test_a_sequence_that_was_not_followed_is_matched_by_its_last_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer, answer = SuffixProposer(24, 100, 1.0, 0.1), list(range(200, 260))
    draft_tokens(proposer, sequence([1, 2]), answer)
    seq = sequence([3, *answer[:5]])
    state = proposer.start(seq)
    proposer.propose(seq, state, 8)
    seq.token_ids.extend([*range(1000, 6000), *answer[:40]])
    advance, advanced = SuffixAutomaton.advance, []

    def count(automaton: SuffixAutomaton, place: int, length: int, token: int) -> tuple[int, int]:
        advanced.append(token)
        return advance(automaton, place, length, token)

    monkeypatch.setattr(SuffixAutomaton, "advance", count)
    proposer.propose(seq, state, 8)
    assert len(advanced) == 2 * 24, "in both halves"
    new = proposer.start(seq)
    proposer.propose(seq, new, 8)
    assert state.match == new.match and state.match[1] == 24


def test_a_suffix_that_went_on_in_many_ways_is_not_guessed() -> None:
    ways = [token for i in range(20) for token in (7, 100 + i)]
    [guess] = draft_tokens(SuffixProposer(24, 0, 1.0, 0.1), sequence([*ways, 7]), [1])
    assert guess == ()


@pytest.mark.parametrize(
    "proposer", [NgramProposer(1, 3), SuffixProposer(8, 10, 2.0, 0.0)], ids=lambda p: type(p).__name__
)
def test_no_more_is_guessed_than_asked_for(proposer: Any) -> None:
    for most in (0, 1, 3):
        assert all(len(guess) <= most for guess in draft_tokens(proposer, sequence([5] * 20), [5] * 10, most))


@pytest.mark.parametrize("proposer", [NgramProposer(2, 3), SuffixProposer(8, 0, 2.0, 0.0)])
def test_long_prompts_share_what_is_read_between_two_steps(proposer: NgramProposer | SuffixProposer) -> None:
    def num_read(state: Any) -> int:
        return int(state.num_read if isinstance(proposer, SuffixProposer) else state.index.num_read)

    num_first: dict[int, int] = {}
    for count in (1, 16, 64):
        seqs = [sequence(text(i, 6000)) for i in range(count)]
        states = [proposer.start(seq) for seq in seqs]
        for seq, state in zip(seqs, states, strict=True):
            proposer.propose(seq, state, 4)
        num_first[count] = sum(map(num_read, states))
        for seq, state in zip(seqs, states, strict=True):
            proposer.end(seq, state)
    assert num_first[16] <= num_first[1]
    assert num_first[64] <= 64 * 64, "a sequence takes in more than it brings, and not much more"
    last = proposer.start(seq)
    proposer.propose(seq, last, 4)
    assert num_read(last) == num_first[1], "those that have ended have no share"
