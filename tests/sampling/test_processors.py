"""What changes logits before a token is chosen, against naive loops over one row."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops import cpu
from octavo.request import pack_tokens
from octavo.sampling.processors import process_logits
from octavo.sampling.sampling_table import RowSettings, Samples, SamplingTable, SeenTokens, SpecialSample
from octavo.sampling_params import SamplingParams
from octavo.step_plan import Admission
from tests.sampling.rows import Row, sample

V = 12
tokens = st.integers(0, V - 1)


def process(rows: list[Row]) -> tuple[torch.Tensor, dict[int, str]]:
    logits = torch.stack([row.logits for row in rows]).clone()
    special = [
        special_sample(n, RowSettings(row.params, len(row.prompt), row.stop_token_ids), row.prompt + row.output)
        for n, row in enumerate(rows)
    ]
    errors = process_logits(cpu, logits.numpy(), special)
    return logits, errors


def special_sample(n: int, settings: RowSettings, tokens: list[int], num_draft_tokens: int = 0) -> SpecialSample:
    return SpecialSample(n, settings, np.array(tokens, np.int32), len(tokens) - num_draft_tokens)


def naive(row: Row) -> list[float]:
    """The meaning of each parameter, one token at a time."""
    params = row.params
    logits = row.logits.tolist()
    counts = Counter(row.output)
    for token in range(V):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logits[token] = -math.inf
        for word in params.bad_words_token_ids or []:
            if token == word[-1] and row.output[len(row.output) - len(word) + 1 :] == word[:-1]:
                logits[token] = -math.inf
        if token in row.stop_token_ids and len(row.output) < params.min_tokens:
            logits[token] = -math.inf
        logits[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in row.prompt or token in row.output:
            if logits[token] > 0:
                logits[token] /= params.repetition_penalty
            else:
                logits[token] *= params.repetition_penalty
        if counts[token]:
            logits[token] -= params.presence_penalty
        logits[token] -= params.frequency_penalty * counts[token]
    return logits


@st.composite
def special_rows(draw: st.DrawFn) -> Row:
    params = SamplingParams(
        presence_penalty=draw(st.sampled_from([0.0, -2.0, 0.3, 2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.5, 0.25, 2.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.2, 10.0])),
        min_tokens=draw(st.integers(0, 5)),
        logit_bias=draw(st.none() | st.dictionaries(tokens, st.sampled_from([-100.0, -0.5, 2.0]), max_size=4)),
        allowed_token_ids=draw(st.none() | st.lists(tokens, min_size=1, max_size=6)),
    )
    params.bad_words_token_ids = draw(st.none() | st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4))
    logits = torch.tensor(draw(st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 4.0]), min_size=V, max_size=V)))
    return Row(
        logits,
        params,
        prompt=draw(st.lists(tokens, min_size=1, max_size=5)),
        output=draw(st.lists(tokens, max_size=7)),
        stop_token_ids=draw(st.lists(tokens, max_size=3)),
    )


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(special_rows(), min_size=1, max_size=6))
def test_every_combination_equals_the_naive_loops(rows: list[Row]) -> None:
    logits, errors = process(rows)
    assert errors == {}
    for row, found in zip(rows, logits, strict=True):
        torch.testing.assert_close(found, torch.tensor(naive(row)), rtol=1e-5, atol=1e-5)


def greedy(
    logits: list[float], output: list[int] | None = None, stops: list[int] | None = None, **params: object
) -> int:
    row = Row(
        torch.tensor(logits),
        SamplingParams(temperature=0.0, **params),
        [0],
        output or [],
        stops or [],  # type: ignore[arg-type]
    )
    return sample([row]).tokens[0]


def test_presence_counts_once_and_frequency_every_time() -> None:
    logits = [5.0, 4.5, 0.0]
    assert greedy(logits, output=[0, 0, 0], presence_penalty=0.4) == 0
    assert greedy(logits, output=[0, 0, 0], frequency_penalty=0.2) == 1
    assert greedy(logits, output=[], presence_penalty=2.0, frequency_penalty=2.0) == 0, "the prompt does not count"


def test_repetition_counts_the_prompt_too() -> None:
    assert greedy([5.0, 4.5], repetition_penalty=1.2) == 1


def test_a_bias_moves_and_bans_tokens() -> None:
    assert greedy([1.0, 2.0, 3.0], logit_bias={0: 2.5}) == 0
    assert greedy([1.0, 2.0, 3.0], logit_bias={2: -100, 1: -100}) == 0


def test_only_allowed_tokens_are_drawn_whatever_their_bias() -> None:
    assert greedy([1.0, 2.0, 3.0], allowed_token_ids=[0, 1]) == 1
    assert greedy([1.0, 2.0, 3.0], allowed_token_ids=[0], logit_bias={2: 100.0}) == 0


def test_a_bad_word_of_several_tokens_is_banned_only_behind_its_beginning() -> None:
    params = SamplingParams(temperature=0.0)
    params.bad_words_token_ids = [[1, 2, 3], [4]]

    def next_token(prompt: list[int], output: list[int]) -> int:
        return sample([Row(torch.tensor([0.0, 0.0, 0.0, 2.0, 3.0, 1.0]), params, prompt, output)]).tokens[0]

    assert next_token([0], []) == 3, "a word of one token is banned everywhere"
    assert next_token([0], [1, 2]) == 5
    assert next_token([0], [0, 1, 2]) == 5
    assert next_token([0], [1, 0, 2]) == 3
    assert next_token([0], [2]) == 3
    assert next_token([1, 2], []) == 3, "only the output is looked at"


def test_end_and_stop_tokens_are_masked_until_min_tokens_are_out() -> None:
    logits = [1.0, 9.0, 8.0]
    assert greedy(logits, output=[0, 0], stops=[1, 2], min_tokens=3) == 0
    assert greedy(logits, output=[0, 0, 0], stops=[1, 2], min_tokens=3) == 1


def test_masks_that_leave_no_token_fail_their_own_request_only() -> None:
    impossible = SamplingParams(allowed_token_ids=[2], min_tokens=1)
    rows = [
        Row(torch.zeros(4), impossible, stop_token_ids=[2]),
        Row(torch.tensor([0.0, 50.0, 0.0, 0.0])),
        Row(torch.zeros(4), impossible, output=[2], stop_token_ids=[2]),
    ]
    found = sample(rows)
    assert list(found.errors) == [0]
    assert "allowed_token_ids" in found.errors[0]
    assert found.tokens[1:] == [1, 2]


def test_a_callers_processors_run_in_order_last_and_see_prompt_and_output() -> None:
    seen = []

    def first(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((prompt, output, logits.tolist()))
        return logits + torch.tensor([0.0, 100.0, 0.0])

    def second(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[1] -= 200.0  # in place, as many do
        return logits

    params = SamplingParams(temperature=0.0, logit_bias={0: 7.0}, logits_processors=[first, second])
    assert sample([Row(torch.zeros(3), params, prompt=[4, 5], output=[6])]).tokens == [0]
    assert seen == [([4, 5], [6], [7.0, 0.0, 0.0])]


def test_processors_of_vllms_older_form_get_output_and_logits() -> None:
    def favour_the_last(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[output[-1]] += 1.0
        return logits

    params = SamplingParams(temperature=0.0, logits_processors=[favour_the_last])
    assert sample([Row(torch.zeros(3), params, prompt=[4, 5], output=[0, 2])]).tokens == [2]


def test_penalties_count_the_tokens_of_a_growing_sequence_once() -> None:
    """What a row has counted in one step is not counted again in the next."""
    params = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.5)
    settings_of_row = RowSettings(params, 2, [])
    row = Row(torch.linspace(-2, 2, V), params, prompt=[3, 3])
    for token in [4, 4, 3, 4, *range(V), 4]:
        row.output.append(token)
        logits = row.logits[None].clone()
        # Guesses count, for this time only.
        draft_tokens = [5, 5, 4]
        with_guesses = replace(row, output=row.output + draft_tokens)
        drafted = row.logits[None].clone()
        known = row.prompt + row.output
        process_logits(
            cpu, drafted.numpy(), [special_sample(0, settings_of_row, known + draft_tokens, len(draft_tokens))]
        )
        torch.testing.assert_close(drafted[0], torch.tensor(naive(with_guesses)), rtol=1e-5, atol=1e-5)
        process_logits(cpu, logits.numpy(), [special_sample(0, settings_of_row, known)])
        torch.testing.assert_close(logits[0], torch.tensor(naive(row)), rtol=1e-5, atol=1e-5)


def test_penalties_ignore_a_prompt_of_embeddings() -> None:
    """It has the token 0 everywhere."""
    seen = SeenTokens(2, is_embedded=True)
    for num_tokens in (3, 4):
        found, counts = seen.of(np.array([0, 0, 7, 0][:num_tokens], np.int32), num_tokens)
        assert (found.tolist(), counts.tolist()) == ([7, 0][: num_tokens - 2], [1.0, 1.0][: num_tokens - 2])


def test_penalties_follow_a_sequence_with_many_different_tokens() -> None:
    vocab_size = 1000
    params = SamplingParams(presence_penalty=1.0)
    tokens = list(reversed(range(vocab_size)))
    logits = torch.zeros(1, vocab_size)
    process_logits(cpu, logits.numpy(), [special_sample(0, RowSettings(params, 300, []), tokens)])
    assert (logits[0, :700] == -1).all()
    assert (logits[0, 700:] == 0).all()


@pytest.mark.parametrize(
    "processor",
    [
        lambda prompt, output, logits: 1 / 0,
        lambda prompt, output, logits: None,
        lambda prompt, output, logits: logits[:2],
        lambda prompt, output, logits: logits * float("nan"),
        lambda prompt, output, logits: torch.tensor([1.0, float("nan"), 2.0]),
        lambda prompt, output, logits: logits.fill_(float("-inf")),
        lambda logits: logits,
    ],
    ids=["raises", "returns nothing", "too short", "nan", "one nan", "masks all", "other signature"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_fails_fails_its_own_request_only(processor: object, temperature: float) -> None:
    bad = SamplingParams(temperature=temperature, logits_processors=[processor], logprobs=2)
    good = SamplingParams(temperature=temperature, logits_processors=[lambda p, o, logits: logits], logprobs=2)
    logits = torch.tensor([0.0, 60.0, 0.0])
    found = sample([Row(logits, good), Row(logits, bad), Row(logits)])
    assert list(found.errors) == [1]
    assert "\n" not in found.errors[1]
    assert (found.tokens[0], found.tokens[2]) == (1, 1)


def test_the_error_of_a_processor_names_it_and_says_what_it_should_have_returned() -> None:
    def forgetful(output: list[int], logits: torch.Tensor) -> None:
        logits[0] += 1.0

    found = sample([Row(torch.zeros(3), SamplingParams(logits_processors=[forgetful]))])
    assert "forgetful" in found.errors[0] and "it must return the logits" in found.errors[0]


def test_a_plain_request_is_not_processed_at_all() -> None:
    table = SamplingTable(3)
    plain = SamplingParams(top_k=5, top_p=0.5, temperature=2.0, logprobs=1, stop_token_ids=[3])
    table.admit(Admission(0, pack_tokens([1, 2]), 1, [[]], plain, [0], 1, 0))
    table.admit(Admission(1, pack_tokens([1, 2]), 1, [[]], SamplingParams(presence_penalty=0.1), [0], 1, 0))
    samples = Samples(np.array([0, 1, 0], np.int64), np.zeros(3, np.int64), np.full(3, 2))
    batch = table.build(samples, np.zeros((3, 9), np.int32))
    assert [special.sample for special in batch.special] == [1]
    table.admit(Admission(1, pack_tokens([1, 2]), 1, [[]], plain, [0], 1, 0))
    assert table.build(samples, np.zeros((3, 9), np.int32)).special == []
