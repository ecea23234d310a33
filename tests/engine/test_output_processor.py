"""What callers see of a request while the core reports its tokens."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.engine.output_processor import OutputProcessor, RequestFailed
from octavo.engine.wire import Abort
from octavo.metrics.prometheus import EngineMetrics
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.request import EngineRequest, Prompt, SequenceOutput, TokenLogprobs
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.structured_output.final_check import FinalCheck
from tests.engine.test_detokenizer import metaspace_tokenizer

EOS = 2
LONG = ",".join(["[]"] * 10_000)  # more than the event loop may wait for
NO_COMPARISON = "the answer could not be compared with its schema"
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def request(name: str = "r", prompt: list[int] | None = None, **params: Any) -> EngineRequest:
    return EngineRequest(
        name, Prompt(prompt or [100], "prompt"), SamplingParams(max_tokens=1000, **params), [EOS], 1000, 1.0
    )


def processor(tokenizer: Any, *requests: EngineRequest) -> OutputProcessor:
    outputs = OutputProcessor(tokenizer)
    for one in requests:
        outputs.add(one)
    return outputs


def only(results: list[RequestOutput | RequestFailed]) -> RequestOutput:
    [result] = results
    assert isinstance(result, RequestOutput)
    return result


def say(tokens: list[int], index: int = 0, finish: str | None = None, **more: Any) -> SequenceOutput:
    return SequenceOutput("r", index, tokens, finish_reason=finish, first_scheduled_time=2.0, **more)


def run(
    tokenizer: Any, tokens: list[int], finish: str | None = "length", stop_reason: int | None = None, **params: Any
) -> tuple[list[RequestOutput], list[Abort]]:
    """Report tokens one at a time until they are all out or the processor ends the request itself."""
    outputs = processor(tokenizer, request(**params))
    found: list[RequestOutput] = []
    aborts: list[Abort] = []
    for i, token in enumerate(tokens):
        is_last = i == len(tokens) - 1
        one = say([token], finish=finish if is_last else None, stop_reason=stop_reason if is_last else None)
        results, more = outputs.process([one])
        found += [result for result in results if isinstance(result, RequestOutput)]
        aborts += more
        if not outputs.requests:
            break
    return found, aborts


def join(results: list[RequestOutput], index: int = 0) -> CompletionOutput:
    """The deltas of one completion, put together."""
    parts = [part for result in results for part in result.outputs if part.index == index]
    return CompletionOutput(
        index,
        "".join(part.text for part in parts),
        [token for part in parts for token in part.token_ids],
        parts[-1].cumulative_logprob,
        [entry for part in parts for entry in part.logprobs or []] if parts[-1].logprobs is not None else None,
        parts[-1].finish_reason,
        parts[-1].stop_reason,
    )


def test_each_output_kind_carries_what_its_name_says(tokenizer: Any) -> None:
    tokens = tokenizer.encode("One two three four")
    delta, _ = run(tokenizer, tokens, output_kind=DELTA)
    assert [part.outputs[0].text for part in delta] == ["One", " two", " three", " four"]
    assert [part.outputs[0].token_ids for part in delta] == [[token] for token in tokens]
    cumulative, _ = run(tokenizer, tokens, output_kind=CUMULATIVE)
    assert [part.outputs[0].text for part in cumulative] == [
        "One", "One two", "One two three", "One two three four",
    ]  # fmt: skip
    final, _ = run(tokenizer, tokens, output_kind=FINAL_ONLY)
    assert len(final) == 1
    assert final[0].outputs[0] == cumulative[-1].outputs[0] == join(delta)
    assert [part.finished for part in cumulative] == [False, False, False, True]
    assert (final[0].prompt, final[0].prompt_token_ids, final[0].request_id) == ("prompt", [100], "r")


words = st.sampled_from(["The", " end", " of", " a", " long", "\n", "END", " END", ".", "é", "👩", " 日本", "x", "  "])


@settings(
    max_examples=200, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    text=st.lists(words, min_size=1, max_size=15).map("".join),
    stop=st.lists(
        st.sampled_from(["END", "\n\n", " of a", "é", "D.", "x👩", "long\nEND", "E"]), max_size=3, unique=True
    ),
    include=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 0, 3, 8]),
    finish=st.sampled_from(["length", "stop"]),
)
def test_deltas_add_up_to_the_final_text_whatever_stops_it(
    tokenizer: Any, text: str, stop: list[str], include: bool, min_tokens: int, finish: str
) -> None:
    tokens = tokenizer.encode(text) + ([EOS] if finish == "stop" else [])
    runs = {
        kind: run(
            tokenizer, tokens, finish, output_kind=kind, stop=stop, include_stop_str_in_output=include,
            min_tokens=min_tokens,
        )
        for kind in RequestOutputKind
    }  # fmt: skip
    [final] = runs[FINAL_ONLY][0]
    assert join(runs[DELTA][0]) == final.outputs[0] == runs[CUMULATIVE][0][-1].outputs[0]
    assert runs[DELTA][1] == runs[FINAL_ONLY][1] == runs[CUMULATIVE][1]
    texts = [part.outputs[0].text for part in runs[CUMULATIVE][0]]
    assert all(after.startswith(before) for before, after in pairwise(texts))

    completion = final.outputs[0]
    if min_tokens == 0:
        first = min(((text.find(s) + len(s), -len(s), s) for s in stop if s in text), default=None)
        if first is None:
            assert (completion.text, completion.stop_reason) == (text, None)
        else:
            end = first[0] if include else first[0] + first[1]
            assert (completion.text, completion.stop_reason) == (text[:end], first[2])
    if completion.stop_reason is not None:
        assert completion.finish_reason == "stop"
        assert len(completion.token_ids) >= min_tokens
    else:
        assert (completion.text, completion.finish_reason) == (text, finish)


def test_a_stop_string_across_tokens_ends_the_request_and_the_core_is_told(tokenizer: Any) -> None:
    tokens = tokenizer.encode("Say the magic word and more follows")
    results, aborts = run(tokenizer, tokens, stop=["gic wor"], output_kind=DELTA)
    assert aborts == [Abort("r", 0)]
    completion = join(results)
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("Say the ma", "stop", "gic wor")
    assert completion.token_ids == tokens[: len(completion.token_ids)]
    assert tokenizer.decode(completion.token_ids) == "Say the magic word"
    results, _ = run(tokenizer, tokens, stop=["gic wor"], include_stop_str_in_output=True)
    assert results[-1].outputs[0].text == "Say the magic wor"


def test_what_was_held_back_for_a_stop_string_that_does_not_come_is_shown_at_the_end(tokenizer: Any) -> None:
    tokens = tokenizer.encode("to be continu")
    results, aborts = run(tokenizer, tokens, stop=["continued"], output_kind=DELTA)
    assert (join(results).text, join(results).finish_reason, aborts) == ("to be continu", "length", [])
    assert [part.outputs[0].text for part in results][:2] == ["to", " be"]


def test_a_stop_string_in_the_last_tokens_wins_over_the_length_limit_without_an_abort(tokenizer: Any) -> None:
    tokens = tokenizer.encode("the END")
    results, aborts = run(tokenizer, tokens, finish="length", stop=["END"])
    assert (results[-1].outputs[0].text, results[-1].outputs[0].stop_reason, aborts) == ("the ", "END", [])


def test_a_stop_string_counts_from_the_token_that_reaches_min_tokens(tokenizer: Any) -> None:
    tokens = tokenizer.encode("one two END four END")
    assert run(tokenizer, tokens, stop=["END"], min_tokens=3)[0][-1].outputs[0].text == "one two "
    assert run(tokenizer, tokens, stop=["END"], min_tokens=4)[0][-1].outputs[0].text == "one two END four "


def test_results_bear_the_callers_id_and_the_core_hears_its_own(tokenizer: Any) -> None:
    outputs = OutputProcessor(tokenizer)
    outputs.add(request("r", stop=["END"]), "the caller's")
    results, aborts = outputs.process([say(tokenizer.encode("END"))])
    assert (only(results).request_id, aborts) == ("the caller's", [Abort("r", 0)])
    outputs.add(request("r"), "the caller's")
    [failed], aborts = outputs.process([say([], finish="error", error="it broke")])
    assert (failed.request_id, aborts) == ("the caller's", [Abort("r")])


def test_a_stop_string_before_min_tokens_is_passed_over_for_good(tokenizer: Any) -> None:
    tokens = tokenizer.encode("END one two three END four")
    results, _ = run(tokenizer, tokens, stop=["END", "a much longer stop string than the text"], min_tokens=3)
    assert results[-1].outputs[0].text == "END one two three "


def test_end_and_stop_tokens_are_reported_but_have_no_text_unless_asked_for(tokenizer: Any) -> None:
    [stop_token] = tokenizer.encode(" stop")
    tokens = [*tokenizer.encode("Hello"), stop_token]

    def end(**params: Any) -> CompletionOutput:
        return run(tokenizer, tokens, "stop", stop_token, stop_token_ids=[stop_token], **params)[0][-1].outputs[0]

    hidden = end()
    assert (hidden.text, hidden.token_ids, hidden.stop_reason) == ("Hello", tokens, stop_token)
    assert end(include_stop_str_in_output=True).text == "Hello stop"


def test_a_character_that_never_comes_to_its_end_is_shown_as_such(tokenizer: Any) -> None:
    tokens = [*tokenizer.encode("a"), *tokenizer.encode("👩")[:-1]]
    results, _ = run(tokenizer, tokens, output_kind=DELTA)
    assert [part.outputs[0].text for part in results] == ["a"] + [""] * (len(tokens) - 2) + ["\ufffd"]


def test_characters_of_byte_tokens_come_whole_in_each_kind() -> None:
    """Four steps go out together, and a limit ends the text within its last character."""
    kept: Any = SimpleNamespace(backend_tokenizer=metaspace_tokenizer())
    for text, num_tokens, shown in (("日本", 6, "日本"), ("😀😀", 6, "😀\ufffd")):
        tokens = [8 + byte for byte in text.encode()][:num_tokens]
        for kind in (DELTA, FINAL_ONLY):
            outputs = OutputProcessor(kept, stream_interval=4)
            outputs.add(request(output_kind=kind))
            found = []
            for i, token in enumerate(tokens):
                results, _ = outputs.process([say([token], finish="length" if i == num_tokens - 1 else None)])
                found += [result for result in results if isinstance(result, RequestOutput)]
            assert join(found).text == shown


def test_without_detokenization_there_is_no_text(tokenizer: Any) -> None:
    results, _ = run(tokenizer, tokenizer.encode("One two"), detokenize=False)
    assert (results[-1].outputs[0].text, len(results[-1].outputs[0].token_ids)) == ("", 2)


def test_special_tokens_are_shown_on_request(tokenizer: Any) -> None:
    tokens = tokenizer.encode("Hi<|im_start|> you")
    assert run(tokenizer, tokens)[0][-1].outputs[0].text == "Hi you"
    assert run(tokenizer, tokens, skip_special_tokens=False)[0][-1].outputs[0].text == "Hi<|im_start|> you"


def test_completions_of_one_request_grow_and_end_on_their_own(tokenizer: Any) -> None:
    outputs = processor(tokenizer, request(n=3, output_kind=DELTA))
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    first = only(outputs.process([say([a], 0), say([b], 1), say([a], 2, "length")])[0])
    assert [(part.index, part.text, part.finish_reason) for part in first.outputs] == [
        (0, "a", None), (1, "b", None), (2, "a", "length"),
    ]  # fmt: skip
    second = only(outputs.process([say([b], 1, "length")])[0])
    assert [(part.index, part.text, part.finish_reason) for part in second.outputs] == [(1, "b", "length")]
    assert not second.finished
    last = only(outputs.process([say([b], 0, "stop")])[0])
    assert [(part.index, part.finish_reason) for part in last.outputs] == [(0, "stop")]
    assert last.finished
    assert outputs.requests == {}


def logprobs(token: int, value: float, *top: tuple[int, float], rank: int = 1) -> list[TokenLogprobs]:
    return [TokenLogprobs([token, *(t for t, _ in top)], [value, *(v for _, v in top)], rank)]


def test_the_best_of_several_are_returned_by_cumulative_logprob(tokenizer: Any) -> None:
    outputs = processor(tokenizer, request(n=2, best_of=4))
    ids = [tokenizer.encode(letter)[0] for letter in "abcd"]
    values = [-3.0, -0.5, -2.0, -1.0]
    early = outputs.process([say([ids[i]], i, logprobs=logprobs(ids[i], values[i])) for i in range(4)])[0]
    assert early == [], "which are the best is known at the end: the one that leads now falls behind"
    done = [say([ids[i]], i, "length", logprobs=logprobs(ids[i], -9.0 if i == 1 else -0.1)) for i in range(4)]
    final = only(outputs.process(done)[0])
    assert [(part.index, part.text) for part in final.outputs] == [(0, "dd"), (1, "cc")]
    assert final.outputs[0].cumulative_logprob == pytest.approx(-1.1)
    assert final.outputs[0].logprobs is None, "they were needed for the ranking and not asked for"
    assert final.finished


def test_logprobs_name_the_chosen_token_first_and_rank_the_others(tokenizer: Any) -> None:
    outputs = processor(tokenizer, request(logprobs=2))
    cat, dog, bird = (tokenizer.encode(word)[0] for word in (" cat", " dog", " bird"))
    one = say([cat], logprobs=logprobs(cat, -3.0, (dog, -0.5), (bird, -1.5), rank=7))
    two = say([dog], finish="length", logprobs=logprobs(dog, -0.2, (dog, -0.2), (cat, -4.0)))
    outputs.process([one])
    completion = only(outputs.process([two])[0]).outputs[0]
    first, second = completion.logprobs or []
    assert [(t, p.logprob, p.rank, p.decoded_token) for t, p in first.items()] == [
        (cat, -3.0, 7, " cat"), (dog, -0.5, 1, " dog"), (bird, -1.5, 2, " bird"),
    ]  # fmt: skip
    assert [(t, p.rank) for t, p in second.items()] == [(dog, 1), (cat, 2)], "a chosen top token comes once"
    assert completion.cumulative_logprob == pytest.approx(-3.2)


def test_logprobs_end_where_the_tokens_end_when_a_stop_string_cuts_a_step(tokenizer: Any) -> None:
    tokens = tokenizer.encode("one END two")
    outputs = processor(tokenizer, request(logprobs=0, stop=["END"]))
    whole_step = say(tokens, logprobs=[TokenLogprobs([token], [-1.0], 1) for token in tokens])
    results, aborts = outputs.process([whole_step])
    completion = only(results).outputs[0]
    assert aborts == [Abort("r", 0)]
    assert completion.text == "one "
    assert len(completion.token_ids) == len(completion.logprobs or []) < len(tokens)
    assert completion.cumulative_logprob == -len(completion.token_ids)


def test_prompt_logprobs_begin_with_none_and_stay_in_every_output(tokenizer: Any) -> None:
    prompt = tokenizer.encode("The cat")
    outputs = processor(tokenizer, request(prompt=prompt, prompt_logprobs=0))
    found = only(outputs.process([say([100], prompt_logprobs=logprobs(prompt[1], -2.0, rank=4))])[0])
    assert (found.prompt_logprobs or [])[0] is None
    assert [(t, p.logprob, p.rank) for t, p in ((found.prompt_logprobs or [])[1] or {}).items()] == [
        (prompt[1], -2.0, 4)
    ]
    later = only(outputs.process([say([100], finish="length")])[0])
    assert later.prompt_logprobs == found.prompt_logprobs
    one_token = processor(tokenizer, request(prompt=[100], prompt_logprobs=0))
    assert only(one_token.process([say([100])])[0]).prompt_logprobs == [None]


def aborted_output(outputs: OutputProcessor) -> RequestOutput:
    state = outputs.abort("r")
    assert state is not None and state.has_new_output
    output = state.take()
    assert isinstance(output, RequestOutput)
    return output


def test_an_abort_returns_what_there_is_and_later_tokens_are_ignored(tokenizer: Any) -> None:
    outputs = processor(tokenizer, request(n=2, stop=["continued"]))
    done, cont = tokenizer.encode("done")[0], tokenizer.encode(" contin")[0]
    outputs.process([say([done], 0, "length"), say([cont], 1)])
    aborted = aborted_output(outputs)
    assert [(part.text, part.finish_reason) for part in aborted.outputs] == [("done", "length"), (" contin", "abort")]
    assert aborted.finished
    assert outputs.process([say([cont], 1)]) == ([], [])
    assert outputs.abort("r") is None
    assert outputs.abort("unknown") is None


def test_an_aborted_stream_ends_with_what_was_not_sent_yet(tokenizer: Any) -> None:
    outputs = processor(tokenizer, request(output_kind=DELTA, stop=["continued"]))
    sent = only(outputs.process([say(tokenizer.encode("to be contin"))])[0])
    rest = aborted_output(outputs)
    assert sent.outputs[0].text == "to be "
    assert (rest.outputs[0].text, rest.outputs[0].token_ids) == ("contin", [])


def test_tokens_of_a_completion_that_a_stop_string_ended_show_nothing_new(tokenizer: Any) -> None:
    outputs = processor(tokenizer, request(n=2, stop=["END"]))
    end, go = tokenizer.encode("END")[0], tokenizer.encode(" go")[0]
    assert outputs.process([say([end], 0), say([go], 1)])[1] == [Abort("r", 0)]
    assert outputs.process([say([go], 0)]) == ([], []), "the core had not heard of it yet"
    assert only(outputs.process([say([go], 0), say([go], 1, "length")])[0]).outputs[0].token_ids == [end]


def test_an_error_ends_its_request_and_tells_the_core_to_drop_the_rest(tokenizer: Any) -> None:
    outputs = processor(tokenizer, request(n=2), request("other"))
    good = SequenceOutput("other", 0, [100])
    results, aborts = outputs.process([say([100], 0), say([], 1, "error", error="it broke"), good])
    failed, other = results
    assert isinstance(failed, RequestFailed)
    assert (failed.request_id, str(failed.error), failed.error.status) == ("r", "it broke", 400)
    assert isinstance(other, RequestOutput)
    assert aborts == [Abort("r")]
    assert list(outputs.requests) == ["other"]


@pytest.mark.parametrize(("reasons", "counted"), [("stop abort", "abort"), ("length stop", "length")])
def test_a_request_of_which_a_completion_was_aborted_is_counted_as_aborted(
    tokenizer: Any, reasons: str, counted: str
) -> None:
    outputs = OutputProcessor(tokenizer, EngineMetrics("m", 100))
    outputs.add(request(n=2))
    outputs.process([say([17], i, reason) for i, reason in enumerate(reasons.split()) if reason != "abort"])
    outputs.abort("r")
    assert outputs.metrics is not None
    assert [reason for reason, number in outputs.metrics.num_finished.items() if number] == [counted]


def test_metrics_say_when_things_happened(tokenizer: Any) -> None:
    outputs = processor(tokenizer, request())
    outputs.process([say([100], num_preemptions=1, num_cached_tokens=16)])
    final = only(outputs.process([say([100], finish="length", num_preemptions=3, num_cached_tokens=16)])[0])
    metrics = final.metrics
    assert metrics is not None
    assert (metrics.arrival_time, metrics.first_scheduled_time, metrics.time_in_queue) == (1.0, 2.0, 1.0)
    assert metrics.first_token_time is not None
    assert metrics.last_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.first_token_time <= metrics.last_token_time <= metrics.finished_time < math.inf
    assert (metrics.num_preemptions, final.num_cached_tokens) == (3, 16)


@pytest.mark.parametrize(
    ("mode", "text", "finish", "stop_reason", "error"),
    [
        ("report", '{"a": [1, 2]}', "stop", None, None),
        ("report", '{"a": [1, 1]}', "stop", "schema_mismatch", None),
        ("report", '{"a": [1, 1', "stop", "schema_mismatch", None),
        ("report", '{"a": [1, 1', "length", None, None),
        ("report", '<think>{"a": [1]}</think>\n{"a": [1, 1]}', "stop", "schema_mismatch", None),
        ("report", '<think>so</think>{"a": [1, 2]}', "stop", None, None),
        ("error", '{"a": [1, 2]}', "stop", None, None),
        (
            "error",
            '{"a": [1, 1]}',
            "stop",
            "schema_mismatch",
            "the answer does not satisfy its schema: $.a: items are not unique",
        ),
        ("report", f'{{"a": [{LONG}]}}', "stop", "schema_unchecked", None),
        ("error", f'{{"a": [{LONG}]}}', "stop", "schema_unchecked", f"{NO_COMPARISON}: it takes too many steps"),
        ("report", f'{{"a": {"9" * 5000}}}', "stop", "schema_unchecked", None),
    ],
)
@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
def test_an_answer_is_compared_with_its_schema_when_it_has_ended(
    tokenizer: Any, mode: str, text: str, finish: str, stop_reason: str | None, error: str | None, kind: Any
) -> None:
    """Of what the grammar did not hold it to; reasoning before it does not count."""
    asked = request(output_kind=kind)
    schema = '{"properties": {"a": {"type": "array", "uniqueItems": true}}}'
    asked.final_check = FinalCheck(schema, mode, "</think>" if "<think>" in text else None)
    outputs = processor(tokenizer, asked)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if finish == "stop":
        tokens.append(EOS)
    results, aborts = outputs.process([say(tokens, finish=finish)])
    if error is not None:
        [failed] = results
        assert isinstance(failed, RequestFailed)
        assert (str(failed.error), failed.error.status, failed.error.code) == (error, 422, stop_reason)
        assert aborts == [Abort("r")]
    else:
        completion = only(results).outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == (finish, stop_reason)


def test_a_comparison_that_fails_ends_no_step(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(check: FinalCheck, text: str) -> None:
        raise KeyError("x")

    monkeypatch.setattr(FinalCheck, "problem", fail)
    reported, failed = request("reported"), request("failed")
    reported.final_check, failed.final_check = FinalCheck("{}", "report"), FinalCheck("{}", "error")
    outputs = processor(tokenizer, reported, failed, request("other"))
    results, _ = outputs.process([
        SequenceOutput(name, 0, [EOS], finish_reason="stop") for name in ("reported", "failed", "other")
    ])  # fmt: skip
    first, second, third = results
    assert isinstance(first, RequestOutput) and isinstance(third, RequestOutput)
    assert isinstance(second, RequestFailed)
    assert first.outputs[0].stop_reason == "schema_unchecked"
    assert (str(second.error), second.error.status) == (NO_COMPARISON, 422)
    assert third.outputs[0].stop_reason is None
    assert [str(one.exc_info[1]) for one in caplog.records if one.exc_info] == ["'x'"] * 2


@pytest.mark.parametrize("stop", [[], ["NEVER", "no"]])
def test_a_stream_of_deltas_keeps_no_more_text_than_a_stop_string_may_need(tokenizer: Any, stop: list[str]) -> None:
    outputs = processor(tokenizer, request(output_kind=DELTA, stop=stop))
    state = outputs.requests["r"]
    tokens = tokenizer.encode("A long text of which all has been sent, and which still ends with NEV ER")
    texts = [only(outputs.process([say([token])])[0]).outputs[0].text for token in tokens]
    kept = state.completions[0].text
    assert "".join(texts) + kept[state.completions[0].num_sent_chars :] == tokenizer.decode(tokens)
    assert len(kept) <= max(map(len, stop), default=0)
